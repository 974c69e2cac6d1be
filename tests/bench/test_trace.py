"""Gaps between what ran on a device, from profiles whose gaps are known."""

import jax
import jax.numpy as jnp
import pytest
from jax.profiler import ProfileData

from kdjax.bench import trace
from kdjax.cli import main
from kdjax.errors import KdjaxError

# Times of the two streams overlap: the device waits from 3 to 4 us and from 5 to 7.5 us. A line that groups kernels
# covers everything.
PROFILE = """
planes {
  name: "/device:GPU:0"
  lines {
    name: "Stream #1(Compute)" timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 0 duration_ps: 2000000 }
    events { metadata_id: 2 offset_ps: 4000000 duration_ps: 1000000 }
  }
  lines {
    name: "Stream #2(MemcpyD2D)" timestamp_ns: 1000
    events { metadata_id: 3 offset_ps: 1000000 duration_ps: 2000000 }
    events { metadata_id: 3 offset_ps: 7500000 duration_ps: 500000 }
  }
  lines { name: "XLA Modules" timestamp_ns: 1000 events { metadata_id: 4 offset_ps: 0 duration_ps: 8000000 } }
  event_metadata { key: 1 value { id: 1 name: "gemm" } }
  event_metadata { key: 2 value { id: 2 name: "softmax" } }
  event_metadata { key: 3 value { id: 3 name: "copy" } }
  event_metadata { key: 4 value { id: 4 name: "jit_decode" } }
}
planes { name: "/host:CPU" lines { name: "python" events { metadata_id: 1 offset_ps: 0 duration_ps: 9 } } }
"""


def test_gaps_are_where_no_stream_ran(tmp_path, capsys):
    folder = tmp_path / "plugins" / "profile" / "now"
    folder.mkdir(parents=True)
    (folder / "host.xplane.pb").write_bytes(ProfileData.text_proto_to_serialized_xspace(PROFILE))
    (device,) = trace.idle(tmp_path)
    assert device.span_us == pytest.approx(8.0) and device.busy_us == pytest.approx(4.5)
    assert device.fraction == pytest.approx(3.5 / 8)
    assert [(g.us, g.at_us, g.after, g.before) for g in device.gaps] == [
        (pytest.approx(2.5), pytest.approx(5.0), "softmax", "copy"),
        (pytest.approx(1.0), pytest.approx(3.0), "copy", "softmax"),
    ]
    assert main(["bench", "gaps", str(tmp_path), "--largest", "1"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "/device:GPU:0: nothing ran in 43.8% of 0.008 ms"
    assert len(out) == 2 and "2.50 us at     0.005 ms, after softmax, before copy" in out[1]


def test_without_a_gpu_there_is_nothing_to_say(tmp_path):
    with pytest.raises(KdjaxError, match="holds no profile"):
        trace.idle(tmp_path)
    with trace.recording(tmp_path):
        jnp.ones(8).sum().block_until_ready()
    assert jax.default_backend() == "cpu"
    with pytest.raises(KdjaxError, match="has no events of a GPU"):
        trace.idle(tmp_path)
