"""What does not fit is refused before anything is made, with its size and the remedy."""

import pathlib

import jax
import pytest

from kdjax.bench import room
from kdjax.bench.subject import Subject, hundredth
from kdjax.cli import main
from kdjax.config import ONE_DEVICE, MeshConfig, ModelPair, load
from kdjax.errors import KdjaxError
from kdjax.plan import Workload

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
K26 = str(CONFIGS / "models" / "kimi-k2.6.toml")
PAIR = hundredth(load(ModelPair, CONFIGS / "models" / "kimi-k2.6.toml"))
WORKLOAD = Workload(context=64, streams=2, budget=3)


@pytest.mark.parametrize(
    ("argv", "size"),
    [
        (["step", "--rank-of", str(CONFIGS / "meshes" / "h200x8.toml"), "--context", "512"], "77.8 GB"),
        (["ttft", "--rank-of", str(CONFIGS / "meshes" / "h200x8.toml"), "--prompts", "8192"], "77.7 GB"),
        (["equal", "--mesh", str(CONFIGS / "meshes" / "h200x2.toml"), "--layers", "2"], "GB"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_before_it_is_made(argv, size, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("kdjax.cli.bench.configure_jax", lambda **_: None)
    monkeypatch.setattr(room, "free_bytes", lambda device: 3 * 10**9)
    monkeypatch.setattr(Subject, "_make", lambda *_: pytest.fail("something was made"))
    bench, *options = argv
    assert main(["bench", bench, K26, *options, "--out", str(tmp_path / "x.json")]) == 2
    err = capsys.readouterr().err
    assert f"{size} and 3.0 GB are free on cpu: give --smoke or fewer --layers, or run it on a GPU\n" in err
    assert err.count("\n") == 1


def test_what_is_counted_is_what_is_made(monkeypatch):
    subject = Subject.of(PAIR, ONE_DEVICE, "xla", jax.devices(), rank=False)
    made = (subject.params(), subject.state(WORKLOAD), subject.state(WORKLOAD))
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(made))
    monkeypatch.setattr(room, "free_bytes", lambda device: held)
    room.require([subject], [WORKLOAD, WORKLOAD])
    monkeypatch.setattr(room, "free_bytes", lambda device: held - 1)
    with pytest.raises(KdjaxError, match="weights and caches take"):
        room.require([subject], [WORKLOAD, WORKLOAD])


def test_devices_of_a_cpu_share_its_memory(monkeypatch):
    mesh = Subject.of(PAIR, MeshConfig(tensor=2), "xla", jax.devices(), rank=False)
    share = room._bytes(mesh, [WORKLOAD])
    monkeypatch.setattr(room, "free_bytes", lambda device: 2 * share - 1)
    with pytest.raises(KdjaxError, match="GB are free on cpu"):
        room.require([mesh], [WORKLOAD])


def test_free_memory_of_a_gpu_is_what_its_allocator_may_still_take():
    class Gpu:
        platform = "gpu"

        def __init__(self, stats):
            self.memory_stats = lambda: stats

    assert room.free_bytes(Gpu({"bytes_limit": 100, "bytes_in_use": 40})) == 60
    assert room.free_bytes(Gpu(None)) is None
    assert 0 < room.free_bytes(jax.devices("cpu")[0])
