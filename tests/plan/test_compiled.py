"""The decode step compiled for GPUs that are not there; the compiles need jax[cuda13], not a GPU."""

import pathlib

import msgspec
import pytest

from kdjax.cli import main
from kdjax.config import Cluster, DeviceConfig, MeshConfig, ModelPair
from kdjax.errors import KdjaxError
from kdjax.plan import Workload, compile_step, memory, step
from pallas_kernels import aot
from tests.checkpoint.random_models import DRAFTER, TARGET

needs_cuda = pytest.mark.skipif(not aot.available(), reason="compiling for GPUs needs jax[cuda13]")
CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
# Two heads in target and drafter, whole scale groups in half an expert.
PAIR = ModelPair(target=msgspec.structs.replace(TARGET, moe_intermediate_size=64), drafter=DRAFTER)
DEVICE = DeviceConfig(kind="NVIDIA H200", memory_gb=149, read_gb_per_s=3540, all_reduce_us=14, all_reduce_gb_per_s=185)
WORKLOAD = Workload(context=128, streams=2, budget=3)


@needs_cuda
@pytest.mark.parametrize("budget", [3, 0])
@pytest.mark.parametrize(
    "mesh", [MeshConfig(tensor=2), MeshConfig(expert=2, outside_experts="replicated")], ids=["tp2", "ep2"]
)
def test_the_compiler_agrees_with_the_plan(mesh, budget):
    workload = WORKLOAD._replace(budget=budget)
    found = compile_step(PAIR, Cluster(mesh=mesh, device=DEVICE), workload, "xla")
    held = memory(PAIR, mesh, workload)
    assert found.target_weights == sum(held.target.values())
    assert found.drafter_weights == (sum(held.drafter.values()) if budget else 0)
    caches = held.kv_cache + (held.drafter_cache if budget else 0)
    assert caches <= found.state < caches + 4096  # and counters
    assert 0 < found.workspace < 2**24
    sums = step(PAIR, mesh, workload, held).all_reduces
    assert found.collectives["all-reduce"] == sum(count for count, _ in sums)


def test_what_cannot_be_compiled_is_said(monkeypatch, capsys):
    cluster = Cluster(mesh=MeshConfig(tensor=2), device=DEVICE)
    monkeypatch.setattr(aot, "available", lambda: False)
    with pytest.raises(
        KdjaxError, match=r"needs the CUDA compiler: pip install 'kdjax\[cuda13\]' \(no GPU is needed\)"
    ):
        compile_step(PAIR, cluster, WORKLOAD, "xla")
    model, mesh = (str(CONFIGS / name) for name in ("models/kimi-k2.6.toml", "meshes/h200x8.toml"))
    assert main(["plan", model, "--mesh", mesh, "--compile"]) == 2
    assert "pip install 'kdjax[cuda13]'" in capsys.readouterr().err
    monkeypatch.setattr(aot, "available", lambda: True)
    unknown = msgspec.structs.replace(DEVICE, kind="NVIDIA B200")
    with pytest.raises(KdjaxError, match="'NVIDIA B200' has no compiler target: choose from NVIDIA H200, NVIDIA RTX"):
        compile_step(PAIR, msgspec.structs.replace(cluster, device=unknown), WORKLOAD, "xla")
