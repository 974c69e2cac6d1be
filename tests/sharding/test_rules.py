"""The table of path -> PartitionSpec, and what it refuses."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from kdjax import drafter as dflash
from kdjax.checkpoint import read_drafter_config, read_model_config
from kdjax.config import MeshConfig, ModelPair, load
from kdjax.errors import KdjaxError
from kdjax.model import k2
from kdjax.model.int4 import Int4
from kdjax.model.runtime import CPU_EXACT, Runtime
from kdjax.sharding import Rule, Split, drafter_specs, make_mesh, partition, target_specs
from tests.oracles import HERE, HF_K2, find
from tests.sharding.splits import is_legal, splits

PACKED = Runtime(compute_dtype="bfloat16", cache_dtype="bfloat16", expert_weights="packed")
K26 = load(ModelPair, HERE.parents[1] / "configs/models/kimi-k2.6.toml")
ROW = jax.ShapeDtypeStruct((8, 6), jnp.float32)


def test_first_match_wins_and_nothing_goes_unmatched_or_unused():
    mesh = MeshConfig(tensor=2)
    cut = Rule("*.weight", (Split(("tensor",)),))
    tree = {"a": {"weight": ROW}, "b": {"weight": ROW}}
    specs = partition(tree, [Rule("a.weight"), cut], mesh)
    assert specs == {"a": {"weight": P()}, "b": {"weight": P(("tensor",))}}
    with pytest.raises(KdjaxError, match="no sharding rule matches b.weight"):
        partition(tree, [Rule("a.weight")], mesh)
    with pytest.raises(KdjaxError, match=r"sharding rule c.weight matches nothing"):
        partition(tree, [cut, Rule("c.weight")], mesh)
    with pytest.raises(KdjaxError, match=r"sharding rule a.weight .* comes after one that takes all"):
        partition(tree, [cut, Rule("a.weight")], mesh)


def test_words_and_scales_are_cut_at_the_same_columns():
    int4 = Int4(jax.ShapeDtypeStruct((4, 16, 16), jnp.uint32), jax.ShapeDtypeStruct((4, 16, 4), jnp.bfloat16), 128, 32)
    rules = [Rule("down.weight", (None, None, Split(("tensor",), 32, "scale group")))]
    specs = partition({"down": {"weight": int4}}, rules, MeshConfig(tensor=4))["down"]["weight"]
    assert specs.packed == specs.scale == P(None, None, ("tensor",))
    with pytest.raises(KdjaxError, match=r"down.weight \[4, 16, 128\] cannot be cut into 8 .* holds 4 scale groups"):
        partition({"down": {"weight": int4}}, rules, MeshConfig(tensor=8))


@pytest.mark.parametrize("case", HF_K2)
def test_a_split_is_refused_exactly_where_arithmetic_says_so(case):
    config = read_model_config(find(case) / "checkpoint")
    params = k2.abstract_params(config, PACKED)
    legal = [mesh for mesh in splits() if is_legal(config, mesh)]
    for mesh in splits():
        if mesh in legal:
            target_specs(params, config, mesh)
            continue
        with pytest.raises(KdjaxError, match=r"^(layers\.\d|embed_tokens|lm_head)\S* \[[\d, ]+\] cannot be cut into"):
            target_specs(params, config, mesh)
    assert len(legal) == {"hf_k2_a": 9, "hf_k2_b": 4}[case]


def test_heads_are_never_cut():
    config = read_model_config(find("hf_k2_b") / "checkpoint")  # five heads of 64 columns: divisible, but not by heads
    with pytest.raises(KdjaxError, match=r"self_attn.kv_b_proj.weight .* 2 parts .* holds 5 heads: choose another"):
        target_specs(k2.abstract_params(config, PACKED), config, MeshConfig(tensor=2))


@pytest.mark.parametrize("mesh", [MeshConfig(tensor=8), MeshConfig(expert=8), MeshConfig(sequence=2, tensor=4)])
def test_kimi_k26_on_eight_devices(mesh):
    """Bytes per device as the sizes of its published parts say: 71.35 + 2.66 + 2.18 GB in the target."""
    shapes = k2.abstract_params(K26.target, PACKED)
    specs = target_specs(shapes, K26.target, mesh)
    assert round(_bytes(shapes, specs, mesh) / 1e9, 1) == 76.2
    drafter = dflash.abstract_params(K26.drafter, PACKED)
    assert round(_bytes(drafter, drafter_specs(drafter, K26.drafter, mesh), mesh) / 1e9, 2) == 0.87


def _bytes(shapes, specs, mesh):
    """Of one device."""
    leaves, spec_leaves = jax.tree.leaves(shapes), jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, P))
    total = 0
    for leaf, spec in zip(leaves, spec_leaves, strict=True):
        parts = 1
        for axes in spec:
            parts *= mesh.size((axes,) if isinstance(axes, str) else axes or ())
        total += leaf.size * leaf.dtype.itemsize / parts
    return total


def test_a_drafter_with_few_key_heads_is_refused_or_repeated():
    config = read_drafter_config(find("e2e_random_drafter_p0") / "checkpoint")
    shapes = dflash.abstract_params(config, PACKED)
    with pytest.raises(KdjaxError, match=r"layers.0.self_attn.k_proj.weight .* cannot be cut into 4 parts"):
        drafter_specs(shapes, config, MeshConfig(tensor=4))
    specs = drafter_specs(shapes, config, MeshConfig(tensor=4, drafter="replicated"))
    leaves = jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, P))
    assert all(axes is None for spec in leaves for axes in spec)


def test_meshes_need_their_devices():
    assert make_mesh(MeshConfig(tensor=2, expert=4)).shape == {"expert": 4, "sequence": 1, "tensor": 2}
    with pytest.raises(KdjaxError, match=r"needs 16 devices and JAX sees 8: set XLA_FLAGS=.*count=16"):
        make_mesh(MeshConfig(tensor=16))
    with pytest.raises(KdjaxError, match="layout='fused' is for one device, not a mesh of 2"):
        Runtime(compute_dtype="float32", cache_dtype="float32", expert_weights="dequantized", layout="fused",
                mesh=MeshConfig(tensor=2))  # fmt: skip
    assert CPU_EXACT.mesh.devices == 1
