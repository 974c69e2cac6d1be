"""The harness that every benchmark uses, at sizes that a CPU runs."""

from __future__ import annotations

import json
import re
import time

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import timing


def test_every_input_is_computed_once_per_program():
    w = jnp.arange(6.0).reshape(2, 3)
    inputs = [(jnp.full((2,), float(i)),) for i in range(4)]
    outs = timing.several_calls(lambda w, x: x @ w)((w,), inputs)
    np.testing.assert_array_equal(jnp.stack(outs), jnp.stack([x @ w for (x,) in inputs]))


def test_a_loop_does_every_call_in_every_iteration():
    """Calls that XLA moved out of the loop would look free."""
    w = jnp.arange(6.0).reshape(2, 3)
    inputs = [(jnp.full((2,), float(i)),) for i in range(4)]
    f = timing.several_calls(lambda w, x: jnp.sin(x @ w), loops=3)
    np.testing.assert_allclose(jnp.stack(f((w,), inputs)), jnp.sin(jnp.stack([x @ w for (x,) in inputs])), rtol=1e-6)
    text = f.lower((w,), inputs).compile().as_text()
    name = re.search(r"body=(%[\w.]+)", text)[1]
    assert text.split(f"\n{name} (")[1].split("\n}")[0].count(" dot(") == len(inputs)


def test_time_is_per_op_not_per_program():
    n = 256
    op, shared = lambda a, b: jnp.dot(a, b), (jnp.ones((n, n)),)
    one = timing.time_op(op, shared, [(jnp.ones((n, n)),)], repetitions=5, min_ops=1)
    sixteen = timing.time_op(op, shared, [(jnp.full((n, n), float(i)),) for i in range(16)], repetitions=5, min_ops=1)
    assert 0 < one.min_us <= one.median_us
    assert sixteen.median_us < 8 * one.median_us


def test_a_repetition_lasts_long_enough_that_waiting_for_it_does_not_count():
    ran = []

    def program(shared, inputs):
        time.sleep(0.001)
        ran.append(inputs)

    timing.measure(program, (), [(1,)], repetitions=3, min_ops=4, min_ms=0.0, loops=1)
    assert len(ran) == 2 + 3 * 4  # one to warm up, one to see how long it takes
    ran.clear()
    timing.measure(program, (), [(1,)], repetitions=3, min_ops=4, min_ms=10.0, loops=1)
    assert 2 + 3 * 5 <= len(ran) <= 2 + 3 * 10


def test_ceilings_are_positive_rates():
    assert timing.read_ceiling(2**22) > 0
    assert timing.matmul_peak(64) > 0


def test_rows_that_cannot_be_written_name_their_file(tmp_path):
    (tmp_path / "rows.json.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: '.*rows\.json'"):
        timing.write_rows(tmp_path / "rows.json", [])
    assert not (tmp_path / "rows.json").exists()


def test_rows_can_be_read_after_every_write(tmp_path):
    path = tmp_path / "new" / "op.json"
    rows = []
    for i in range(3):
        rows.append({"us": float(i)})
        timing.write_rows(path, rows, **timing.device_facts())
        assert json.loads(path.read_text())["rows"] == rows
    assert json.loads(path.read_text())["platform"] == "cpu"
    timing.write_rows(path, rows)
    assert json.loads(path.read_text()) == {"rows": rows}
