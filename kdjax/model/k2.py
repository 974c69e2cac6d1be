"""The Kimi K2 text model as pure functions: params in, arrays out.

Flax NNX modules describe the structure; they are built under `nnx.eval_shape` and never hold a value. The public
artefact is a plain nested dict of arrays whose names are those of the Hugging Face checkpoint.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int32

from kdjax.config import ModelConfig
from kdjax.errors import KdjaxError
from kdjax.model import parallel, rope, sequence
from kdjax.model.block import Block
from kdjax.model.cache import KVCache
from kdjax.model.experts import runs_tiled, tile_layer
from kdjax.model.fused import fuse
from kdjax.model.linear import Linear, WeightFirstLinear
from kdjax.model.mla import Step
from kdjax.model.norm import RMSNorm
from kdjax.model.runtime import Runtime
from kdjax.model.structure import split
from pallas_kernels import tree_attention
from pallas_kernels.numerics import matmul_nt, matmul_weight_first

Params = dict[str, Any]


class Embedding(nnx.Module):
    """`embed_tokens.weight` [vocab, hidden]; read by `embed`."""

    def __init__(self, vocab: int, hidden: int, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.zeros((vocab, hidden), dtype))


class K2(nnx.Module):
    """The structure of the whole text model, with the names of the checkpoint. `forward` and `logits` run it."""

    def __init__(self, config: ModelConfig, runtime: Runtime):
        c, dtype = config, runtime.dtype
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size, dtype)
        self.layers = nnx.List([Block(c, i, runtime) for i in range(c.num_hidden_layers)])
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype)
        linear = WeightFirstLinear if runtime.layout == "fused" else Linear
        self.lm_head = linear(c.hidden_size, c.vocab_size, dtype)


@functools.lru_cache(maxsize=16)
def _split(config: ModelConfig, runtime: Runtime) -> tuple[Any, Any]:
    """The graph definition and the abstract state."""
    return split(lambda: K2(config, runtime))


def abstract_params(config: ModelConfig, runtime: Runtime) -> Params:
    """The params as `jax.ShapeDtypeStruct` leaves (INT4 matrices as `Int4` of them): what a loader must deliver."""
    return nnx.to_pure_dict(_split(config, runtime)[1])


def arrange_layer(layer: Params, config: ModelConfig, runtime: Runtime) -> None:
    """What `arrange` does to the params of one layer in place, so that a loader can do it while it reads the next."""
    if runs_tiled(config, runtime):
        tile_layer(layer)


def arrange(params: Params, config: ModelConfig, runtime: Runtime) -> Params:
    """Params as a checkpoint has them, in the layout that `runtime` runs. A loader's last step.

    It may take `params` apart on the way. Layers that have been through `arrange_layer` stay as they are.
    """
    if runtime.layout == "fused":
        return fuse(params, config)
    for layer in params["layers"].values():
        arrange_layer(layer, config, runtime)
    return params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Forward:
    """Result of `forward`.

    Attributes:
        hidden: [slots, q, hidden], after the final norm.
        taps: [slots, q, len(taps) * hidden], un-normed residual streams in the order asked for.
        cache: with the new rows appended, lengths not advanced.
        routing: per MoE layer, int32 [slots, q, top_k]: the routed experts of each token, padding included.
    """

    hidden: Any
    taps: Any
    cache: KVCache
    routing: tuple[Any, ...] = ()


def forward(
    params: Params,
    config: ModelConfig,
    tokens: Int32[Array, "slots q"],
    positions: Int32[Array, "slots q"],
    cache: KVCache,
    *,
    ancestors: Bool[Array, "slots q q"] | None = None,
    n_valid: Int32[Array, "slots"] | None = None,
    taps: tuple[int, ...] = (),
    runtime: Runtime,
) -> Forward:
    """One pass over `q` new tokens per slot, on top of the committed rows of `cache`.

    Args:
        params: see `abstract_params`.
        config: static.
        tokens: ids; those at i >= n_valid[s] are padding and influence no other token.
        positions: rotary positions (start + depth in a tree; siblings share one).
        cache: its rows from `lengths[s]` on are overwritten by those of the new tokens.
        ancestors: `ancestors[s, i, j]`: token i sees token j (itself included). None is the causal chain.
        n_valid: tokens that count, per slot. None is all of them.
        taps: layers whose residual output is wanted, 0-based, concatenated in the given order.
        runtime: static.

    Returns:
        hidden after the final norm, the taps, the cache with the new rows appended, and the experts in use.

    Raises:
        KdjaxError: a tap layer does not exist.
    """
    if bad := [i for i in taps if not 0 <= i < config.num_hidden_layers]:
        raise KdjaxError(f"tap layers {bad} do not exist: the model has layers 0 to {config.num_hidden_layers - 1}")
    model = modules(params, config, runtime)
    if ancestors is not None and n_valid is not None:
        valid = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :] < n_valid[:, None]
        ancestors = ancestors & valid[:, None, :]
    step = shared_step(config, positions, cache, ancestors, runtime)
    x = embed(params, tokens, runtime)
    latent, routing, tapped = [], [], {}
    for i, block in enumerate(model.layers):
        with jax.named_scope(f"layer_{i}"):
            x, rows, chosen = _layer(*nnx.split(block), x, cache.latent[i], step)
        latent.append(rows)
        if chosen is not None:
            routing.append(chosen)
        if i in taps:
            tapped[i] = x
    tap_features = jnp.concatenate([tapped[i] for i in taps], axis=-1) if taps else x[..., :0]
    return Forward(model.norm(x), tap_features, KVCache(tuple(latent), cache.lengths), tuple(routing))


@functools.partial(jax.jit, static_argnames="graph")
def _layer(
    graph: nnx.GraphDef,
    weights: Any,
    x: Float[Array, "slots q hidden"],
    rows: Float[Array, "slots rows width"],
    step: Step,
) -> tuple[Float[Array, "slots q hidden"], Float[Array, "slots rows width"], Int32[Array, "slots q top_k"] | None]:
    """A `Block`. As a function of its own it is traced and lowered once for all layers that are alike, which is most of
    the time until compilation begins; XLA inlines it."""
    return nnx.merge(graph, weights)(x, rows, step)


def modules(params: Params, config: ModelConfig, runtime: Runtime) -> K2:
    """The model's modules around `params`, for one trace."""
    return nnx.merge(_split(config, runtime)[0], params)


def shared_step(
    config: ModelConfig,
    positions: Int32[Array, "slots q"],
    cache: KVCache,
    ancestors: Bool[Array, "slots q q"] | None,
    runtime: Runtime,
) -> Step:
    """What all layers share in a forward over tokens at `positions`; arguments as those of `forward`."""
    inv_freq = rope.inverse_frequencies(config.qk_rope_head_dim, config.rope_theta, config.rope_scaling)
    cos, sin = rope.cos_sin(positions, inv_freq, rope.amplitude(config.rope_scaling))
    mesh, q = runtime.mesh, positions.shape[1]
    own_lengths = sequence.own_lengths(cache.lengths, mesh.cache_axes)
    ancestors = sequence.own_ancestors(ancestors, cache.lengths, q, mesh.cache_axes)
    plan = tree_attention.plan(
        own_lengths,
        ancestors,
        q=q,
        heads=config.num_attention_heads // mesh.size(mesh.model_axes) * mesh.size(mesh.cache_axes),
        cache_rows=cache.rows,
        rank=config.kv_lora_rank,
        rope=config.qk_rope_head_dim,
        dtype=runtime.dtype,
        cache_dtype=cache.latent[0].dtype,
        backend=runtime.backend,
    )
    return Step(cos, sin, cache.lengths, own_lengths, ancestors, plan)


def embed(params: Params, tokens: Int32[Array, "*lead"], runtime: Runtime) -> Float[Array, "*lead hidden"]:
    """Rows of embed_tokens in the compute dtype, unscaled. Ids are checked by the caller; padding may be any id."""
    table, axes = params["embed_tokens"]["weight"], runtime.mesh.model_axes
    if not axes:
        return jnp.take(table, tokens, axis=0, mode="clip").astype(runtime.dtype)
    row = tokens - table.shape[0] * parallel.index(axes)
    own = (row >= 0) & (row < table.shape[0])
    rows = jnp.take(table, row, axis=0, mode="clip").astype(runtime.dtype)
    return parallel.total(jnp.where(own[..., None], rows, jnp.zeros_like(rows)), axes)


def logits(
    params: Params, config: ModelConfig, hidden: Float[Array, "*lead hidden"], runtime: Runtime
) -> Float32[Array, "*lead vocab"]:
    """lm_head of a final-normed hidden state, accumulated and returned in float32.

    On a mesh these are the logits of this device's part of the vocabulary, in order of id.

    Raises:
        KdjaxError: `lm_head.weight` has another shape than config and runtime say.
    """
    weight = params["lm_head"]["weight"]
    expected = (config.vocab_size // runtime.mesh.size(runtime.mesh.model_axes), config.hidden_size)
    if weight.shape != expected:
        raise KdjaxError(
            f"lm_head.weight is {weight.shape}, config and runtime say {expected}: "
            "use the config of this checkpoint and the runtime it was loaded for"
        )
    if runtime.layout == "fused":
        return matmul_weight_first(hidden, weight)
    return matmul_nt(hidden, weight, jnp.dtype(jnp.float32))
