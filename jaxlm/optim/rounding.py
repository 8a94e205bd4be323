"""Stochastic rounding of bf16 weights, so that small updates are not lost.

Rounding to nearest drops every change below half the distance to the next bf16 number, which at
weight 1 is 1/256 below and 1/128 above. Stochastic rounding goes to one of the two neighbours with
the probabilities that make the result right on average, at no memory beyond the weights.
"""

import zlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxlm.optim.rules import path_name


def nested_bits(key: Array, shape: tuple[int, ...]) -> Array:
    """Random uint16 bits whose slice `[i]` depends on `fold_in(key, i)` and nothing else.

    Layer i of a stacked leaf [L, m, n] thus gets the bits that a separate leaf [m, n] gets from
    `jax.random.fold_in(key, i)`, whichever engine holds it; the same for each row.

    Args:
        key: typed random key.
        shape: shape of the result.
    """
    if len(shape) <= 1:
        return jax.random.bits(key, shape, jnp.uint16)
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(shape[0]))
    return jax.vmap(lambda k: nested_bits(k, shape[1:]))(keys)


def leaf_key(key: Array, name: str) -> Array:
    """The key of a leaf by its path, the same whatever other leaves there are."""
    return jax.random.fold_in(key, zlib.crc32(name.encode("utf-8")))


def stochastic_round(x: Array, key: Array) -> Array:
    """Round float32 to bfloat16, up or down with the probabilities that make it unbiased.

    The sixteen bits that bfloat16 lacks are a fraction of the distance to the next number away
    from zero; adding sixteen random bits carries into the part that stays with that probability.
    Numbers that bfloat16 has stay as they are; NaN and infinities pass through; finite numbers
    stay finite.

    Args:
        x: float32, any shape.
        key: typed random key.

    Returns:
        bfloat16 of the same shape.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxlm.optim import stochastic_round
        >>> x = jnp.full(10_000, 1.001)  # between 1 and 1.0078125
        >>> y = stochastic_round(x, jax.random.key(0)).astype(jnp.float32)
        >>> sorted(set(y.tolist())), round(float(y.mean()), 3)
        ([1.0, 1.0078125], 1.001)

    References:
        Gupta et al., "Deep Learning with Limited Numerical Precision", 2015.
    """
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    kept = jnp.uint32(0xFFFF0000)
    carried = (bits + nested_bits(key, x.shape).astype(jnp.uint32)) & kept
    rounded = jax.lax.bitcast_convert_type(carried, jnp.float32)
    toward_zero = jax.lax.bitcast_convert_type(bits & kept, jnp.float32)
    # Beyond the largest bfloat16 the next number away from zero is infinity.
    rounded = jnp.where(jnp.isinf(rounded), toward_zero, rounded)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)


def apply_updates(params: optax.Params, updates: optax.Updates, key: Array) -> optax.Params:
    """`optax.apply_updates` with stochastic rounding of bfloat16 leaves.

    Args:
        params: parameters; other leaves than bfloat16 ones are rounded to nearest.
        updates: what is added, in float32 for a leaf that is to gain from it.
        key: typed random key of this update; each leaf folds its path in.

    Returns:
        New parameters in the dtypes of the old ones.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxlm.optim import apply_updates
        >>> params = {"w": jnp.ones(4096, jnp.bfloat16)}
        >>> for i in range(100):
        ...     key = jax.random.fold_in(jax.random.key(0), i)
        ...     params = apply_updates(params, {"w": jnp.full(4096, -1e-4)}, key)
        >>> round(float(params["w"].astype(jnp.float32).mean()), 2)
        0.99
    """

    def apply(path: tuple, param: Array, update: Array) -> Array:
        wide = param.astype(jnp.promote_types(param.dtype, jnp.float32)) + update
        if param.dtype != jnp.bfloat16:
            return wide.astype(param.dtype)
        return stochastic_round(wide, leaf_key(key, path_name(path)))

    return jax.tree_util.tree_map_with_path(apply, params, updates)


class StochasticRoundingState(NamedTuple):
    """State of :func:`stochastic_rounding`."""

    # Updates made, int32; with the seed and a leaf's path it gives the leaf's key.
    step: Array


def stochastic_rounding(seed: int) -> optax.GradientTransformation:
    """Round stochastically inside a chain, as its last transform.

    Replaces each update of a bfloat16 parameter by the difference between the rounded sum and the
    parameter, in float32, so that plain `optax.apply_updates` lands on the rounded sum exactly.
    Other leaves pass through.

    Args:
        seed: seed of all random bits.

    Returns:
        A transform with state :class:`StochasticRoundingState`; `params` must be given to `update`.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from jaxlm.optim import stochastic_rounding
        >>> tx = optax.chain(optax.sgd(1e-4), stochastic_rounding(seed=0))
        >>> params = jnp.ones(4096, jnp.bfloat16)
        >>> state = tx.init(params)
        >>> for _ in range(100):
        ...     updates, state = tx.update(jnp.ones(4096), state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> round(float(params.astype(jnp.float32).mean()), 2)
        0.99
    """

    def init_fn(params: optax.Params) -> StochasticRoundingState:
        del params
        return StochasticRoundingState(step=jnp.zeros((), jnp.int32))

    def update_fn(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, StochasticRoundingState]:
        if params is None:
            raise ValueError(
                "stochastic_rounding needs the parameters: update(updates, state, params)"
            )
        assert isinstance(state, StochasticRoundingState)
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        rounded = apply_updates(params, updates, key)

        def difference(new: Array, old: Array, update: Array) -> Array:
            if old.dtype != jnp.bfloat16:
                return update
            return new.astype(jnp.float32) - old.astype(jnp.float32)

        changes = jax.tree.map(difference, rounded, params, updates)
        return changes, StochasticRoundingState(jnp.asarray(optax.safe_increment(state.step)))

    return optax.GradientTransformation(init_fn, update_fn)
