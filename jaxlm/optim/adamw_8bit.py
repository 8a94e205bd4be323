"""AdamW whose two moments take two bytes a parameter."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxlm.optim.quantization import UNSIGNED, dequantize, is_quantized, quantize, spread
from jaxlm.optim.rounding import leaf_key, nested_bits, update_key
from jaxlm.optim.rules import LayerRules, layer_axes, path_name, unused, unzip


class Adam8bitState(NamedTuple):
    """State of :func:`scale_by_adam_8bit`. Leaves are float32 values where not coded."""

    # Updates made, int32; with the seed and a leaf's path it gives the leaf's key.
    step: Array
    # Per leaf: codes of the first moment, int8 of its shape.
    mu: optax.Updates
    # Per leaf: largest magnitude of each block, float32 [..., blocks]; [..., 1] where not coded.
    mu_scale: optax.Updates
    # Per leaf: codes of the second moment's root, uint8 of its shape.
    root_nu: optax.Updates
    # Per leaf: largest root of each block, float32 [..., blocks]; [..., 1] where not coded.
    root_nu_scale: optax.Updates


def scale_by_adam_8bit(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    *,
    block: int = 128,
    min_size: int = 4096,
    full_precision: Sequence[str] = ("embed",),
    layer_rules: LayerRules = (),
    seed: int | None = 0,
) -> optax.GradientTransformationExtraArgs:
    """Adam with block-wise int8 first moments and the roots of second moments in uint8.

    2 + 8 / block bytes a parameter. Both moments are computed in float32 and used before they are
    coded again, so that the first update is Adam's own. A coordinate whose gradient was always
    zero has codes 0 and does not move.

    Differences from Adam and from other 8-bit forms:
      1. Codes are linear in m and in sqrt(v), which has half as many orders of magnitude as v.
      2. They are rounded stochastically. To nearest, a root that should fall by less than half a
         step per update never falls (at b2 = 0.999 none would; at 0.95 those below 20 / 255 of
         their block's largest), and a first moment sticks at 4 / 127.
      3. The denominator is at least one step of the stored root. A root of a few thousandths of
         its block's largest is not resolved, and dividing by its code 0 would explode.

    Args:
        b1: decay rate of the first moment.
        b2: decay rate of the second moment.
        eps: added to the denominator.
        block: numbers of the last axis that share a scale.
        min_size: matrices with fewer elements (in one layer) stay in float32, as do vectors.
        full_precision: patterns; leaves whose path has one of them stay in float32.
        layer_rules: see :func:`jaxlm.optim.rules.layer_axes`.
        seed: seed of the rounding; None rounds to nearest.

    Returns:
        A transform with state :class:`Adam8bitState`; updates are float32.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxlm.optim import scale_by_adam_8bit
        >>> tx = scale_by_adam_8bit()
        >>> params = {"w": jnp.zeros((64, 256)), "embedding": jnp.zeros((64, 256))}
        >>> state = tx.init(params)
        >>> {name: codes.dtype.name for name, codes in state.mu.items()}
        {'embedding': 'float32', 'w': 'int8'}

    References:
        Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022.
        Kingma & Ba, "Adam: A Method for Stochastic Optimization", 2015, algorithm 1.
    """

    def coded(path: tuple, shape: tuple[int, ...]) -> bool:
        name = path_name(path)
        layers = layer_axes(name, len(shape), layer_rules)
        return is_quantized(name, shape, layers, min_size, full_precision)

    def init_fn(params: optax.Params) -> Adam8bitState:
        def leaf(path: tuple, p: Array) -> tuple[Array, Array, Array, Array]:
            if coded(path, p.shape):
                scale = (*p.shape[:-1], -(-p.shape[-1] // block))
                return (
                    jnp.zeros(p.shape, jnp.int8),
                    jnp.zeros(scale),
                    jnp.zeros(p.shape, jnp.uint8),
                    jnp.zeros(scale),
                )
            wide = jnp.promote_types(p.dtype, jnp.float32)
            layers = p.shape[: layer_axes(path_name(path), p.ndim, layer_rules)]
            return (
                jnp.zeros(p.shape, wide),
                unused(layers, jnp.float32),
                jnp.zeros(p.shape, wide),
                unused(layers, jnp.float32),
            )

        leaves = jax.tree_util.tree_map_with_path(leaf, params)
        return Adam8bitState(jnp.zeros((), jnp.int32), *unzip(params, leaves, 4))

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        first_layer: int | Array = 0,
        **extra_args: Any,
    ) -> tuple[optax.Updates, Adam8bitState]:
        del params, extra_args
        assert isinstance(state, Adam8bitState)
        step = jnp.asarray(optax.safe_increment(state.step))
        t = step.astype(jnp.float32)

        def moments(g: Array, m: Array, root: Array) -> tuple[Array, Array]:
            return b1 * m + (1 - b1) * g, jnp.sqrt(b2 * jnp.square(root) + (1 - b2) * jnp.square(g))

        def direction(m: Array, root: Array) -> Array:
            wide = t.astype(m.dtype)
            return (m / (1 - b1**wide)) / (root / jnp.sqrt(1 - b2**wide) + eps)

        def leaf(path: tuple, g: Array, mu: Array, mu_scale: Array, root: Array, scale: Array):
            g = g.astype(jnp.promote_types(g.dtype, jnp.float32))
            if not coded(path, g.shape):
                m, new = moments(g, mu, root)
                return direction(m, new), m, mu_scale, new, scale
            m, new = moments(g, dequantize(mu, mu_scale, block), dequantize(root, scale, block))
            one_step = spread(scale / UNSIGNED, block, g.shape[-1])
            update = direction(m, jnp.maximum(new, one_step))
            noise = other_noise = None
            if seed is not None:
                key = leaf_key(update_key(seed, "scale_by_adam_8bit", state.step), path_name(path))
                bits = nested_bits(key, g.shape, first_layer)
                noise = ((bits & 255).astype(jnp.float32) + 0.5) / 256
                other_noise = ((bits >> 8).astype(jnp.float32) + 0.5) / 256
            return (
                update,
                *quantize(m, block, noise=noise),
                *quantize(new, block, largest=UNSIGNED, noise=other_noise),
            )

        leaves = jax.tree_util.tree_map_with_path(
            leaf, updates, state.mu, state.mu_scale, state.root_nu, state.root_nu_scale
        )
        directions, *moment_parts = unzip(updates, leaves, 5)
        return directions, Adam8bitState(step, *moment_parts)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def adamw_8bit(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    mask: optax.MaskOrFn = None,
    *,
    block: int = 128,
    min_size: int = 4096,
    full_precision: Sequence[str] = ("embed",),
    layer_rules: LayerRules = (),
    seed: int | None = 0,
) -> optax.GradientTransformationExtraArgs:
    """`optax.adamw` with moments of one byte each: about 2.06 bytes a parameter instead of 8.

    Args:
        learning_rate: rate or schedule.
        b1: decay rate of the first moment.
        b2: decay rate of the second moment.
        eps: added to the denominator.
        weight_decay: decoupled, multiplied by the learning rate.
        mask: which parameters decay, a tree of bools or a function of the parameters; None is all.
        block: see :func:`scale_by_adam_8bit`.
        min_size: see :func:`scale_by_adam_8bit`.
        full_precision: see :func:`scale_by_adam_8bit`.
        layer_rules: see :func:`scale_by_adam_8bit`.
        seed: see :func:`scale_by_adam_8bit`.

    Returns:
        A transform; `params` must be given to `update`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxlm.optim import adamw_8bit
        >>> tx = adamw_8bit(1e-2, weight_decay=0.1)
        >>> params = {"w": jnp.ones((64, 64))}
        >>> updates, _ = tx.update({"w": jnp.zeros((64, 64))}, tx.init(params), params)
        >>> round(float(updates["w"][0, 0]), 6)
        -0.001

    References:
        Loshchilov & Hutter, "Decoupled Weight Decay Regularization", 2019.
    """
    return optax.chain(
        scale_by_adam_8bit(
            b1,
            b2,
            eps,
            block=block,
            min_size=min_size,
            full_precision=full_precision,
            layer_rules=layer_rules,
            seed=seed,
        ),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )
