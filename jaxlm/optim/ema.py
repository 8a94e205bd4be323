"""A running mean of updates in one byte a parameter."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxlm.optim.quantization import dequantize, is_quantized, quantize
from jaxlm.optim.rounding import leaf_key, nested_bits, update_key
from jaxlm.optim.rules import LayerRules, layer_axes, path_name, unused, unzip


class Ema8bitState(NamedTuple):
    """State of :func:`ema_8bit`."""

    # Updates made, int32; with the seed and a leaf's path it gives the leaf's key.
    step: Array
    # Per leaf: codes of the running mean, int8 of its shape; float32 values for small leaves.
    mean: optax.Updates
    # Per leaf: largest magnitude of each block, float32 [..., blocks]; [..., 1] for small leaves.
    scale: optax.Updates


def ema_8bit(
    decay: float,
    *,
    block: int = 128,
    min_size: int = 4096,
    full_precision: Sequence[str] = ("embed",),
    layer_rules: LayerRules = (),
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Replace updates by their running mean, which is stored in 8 bits.

    `optax.ema` without debiasing, in 1 + 4 / block bytes a parameter. Codes are rounded
    stochastically: rounded to nearest, a mean whose updates have stopped would stay at 4 / 127 of
    its block's largest value for ever.

    Args:
        decay: decay rate of the mean.
        block: numbers of the last axis that share a scale.
        min_size: matrices with fewer elements (in one layer) stay in float32, as do vectors.
        full_precision: patterns; leaves whose path has one of them stay in float32.
        layer_rules: see :func:`jaxlm.optim.rules.layer_axes`.
        seed: seed of the rounding.

    Returns:
        A transform with state :class:`Ema8bitState`; updates are float32, before coding.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxlm.optim import ema_8bit
        >>> tx = ema_8bit(0.9)
        >>> params = {"w": jnp.zeros((64, 256)), "b": jnp.zeros(256)}
        >>> state = tx.init(params)
        >>> state.mean["w"].dtype.name, state.scale["w"].shape, state.mean["b"].dtype.name
        ('int8', (64, 2), 'float32')

    References:
        Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022.
    """

    def init_fn(params: optax.Params) -> Ema8bitState:
        def leaf(path: tuple, p: Array) -> tuple[Array, Array]:
            name = path_name(path)
            layers = layer_axes(name, p.ndim, layer_rules)
            if is_quantized(name, p.shape, layers, min_size, full_precision):
                blocks = -(-p.shape[-1] // block)
                return jnp.zeros(p.shape, jnp.int8), jnp.zeros((*p.shape[:-1], blocks))
            return jnp.zeros(p.shape), unused(p.shape[:layers], jnp.float32)

        leaves = jax.tree_util.tree_map_with_path(leaf, params)
        return Ema8bitState(jnp.zeros((), jnp.int32), *unzip(params, leaves, 2))

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        first_layer: int | Array = 0,
        **extra_args: Any,
    ) -> tuple[optax.Updates, Ema8bitState]:
        del params, extra_args
        assert isinstance(state, Ema8bitState)
        key = update_key(seed, "ema_8bit", state.step)

        def leaf(path: tuple, u: Array, mean: Array, scale: Array) -> tuple[Array, Array, Array]:
            if mean.dtype != jnp.int8:
                new = decay * mean + (1 - decay) * u.astype(jnp.float32)
                return new, new, scale
            new = decay * dequantize(mean, scale, block) + (1 - decay) * u.astype(jnp.float32)
            bits = nested_bits(leaf_key(key, path_name(path)), u.shape, first_layer)
            return new, *quantize(new, block, noise=(bits.astype(jnp.float32) + 0.5) / 65536)

        leaves = jax.tree_util.tree_map_with_path(leaf, updates, state.mean, state.scale)
        new, mean, scale = unzip(updates, leaves, 3)
        return new, Ema8bitState(jnp.asarray(optax.safe_increment(state.step)), mean, scale)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
