"""Ways to keep small updates of bf16 weights, which rounding to nearest loses.

Rounding to nearest drops every change below half the distance to the next bf16 number, which at
weight 1 is 1/256 below and 1/128 above. Three transforms do better, each the last of its chain:

  stochastic_rounding   0 bytes a weight: right on average, with noise of about one bf16 step
  residual_rounding     1 byte: 24 bits in all, steps 256 times finer, 16 times less noise
  kahan_rounding        2 bytes: what one update loses is added to the next; no randomness

Each replaces the update of a bfloat16 parameter by the difference between the rounded sum and the
parameter, in float32, so that plain `optax.apply_updates` lands on the rounded sum exactly. Other
leaves pass through. Random bits are a function of the seed, the transform, the update, the leaf's
path and the indices of layer and row. `first_layer` is the index of the first layer in stacked
leaves, for callers that hold a slice of a stack.
"""

import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxlm.optim.rules import path_name, unused, unzip


def nested_bits(key: Array, shape: tuple[int, ...], first: int | Array = 0) -> Array:
    """Random uint16 bits whose slice `[i]` depends on `fold_in(key, first + i)` and nothing else.

    Layer i of a stacked leaf [L, m, n] thus gets the bits that a separate leaf [m, n] gets from
    `jax.random.fold_in(key, i)`, whichever engine holds it; the same for each row.

    Args:
        key: typed random key.
        shape: shape of the result.
        first: index that the first slice has in the whole leaf.
    """
    if len(shape) <= 1:
        return jax.random.bits(key, shape, jnp.uint16)
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(first + jnp.arange(shape[0]))
    return jax.vmap(lambda k: nested_bits(k, shape[1:]))(keys)


def update_key(seed: int | Array, purpose: str, step: Array) -> Array:
    """The key of one update of one transform: transforms with one seed draw bits of their own.

    Args:
        seed: an integer, or a typed random key.
        purpose: the transform's name.
        step: number of the update.
    """
    key = jnp.asarray(seed)
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.key(seed)
    return jax.random.fold_in(leaf_key(key, purpose), step)


def leaf_key(key: Array, name: str) -> Array:
    """The key of a leaf by its path, the same whatever other leaves there are."""
    return jax.random.fold_in(key, zlib.crc32(name.encode("utf-8")))


def stochastic_round(x: Array, key: Array, first_layer: int | Array = 0) -> Array:
    """Round float32 to bfloat16, up or down with the probabilities that make it unbiased.

    The sixteen bits that bfloat16 lacks are a fraction of the distance to the next number away
    from zero; adding sixteen random bits carries into the part that stays with that probability.
    Numbers that bfloat16 has stay as they are; NaN and infinities pass through; finite numbers
    stay finite.

    Args:
        x: float32, any shape.
        key: typed random key.
        first_layer: index of x[0] in the leaf that x is a slice of.

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
    carried = (bits + nested_bits(key, x.shape, first_layer).astype(jnp.uint32)) & kept
    rounded = jax.lax.bitcast_convert_type(carried, jnp.float32)
    toward_zero = jax.lax.bitcast_convert_type(bits & kept, jnp.float32)
    # Beyond the largest bfloat16 the next number away from zero is infinity.
    rounded = jnp.where(jnp.isinf(rounded), toward_zero, rounded)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)


def apply_updates(
    params: optax.Params, updates: optax.Updates, key: Array, first_layer: int | Array = 0
) -> optax.Params:
    """`optax.apply_updates` with stochastic rounding of bfloat16 leaves.

    Args:
        params: parameters; other leaves than bfloat16 ones are rounded to nearest.
        updates: what is added, in float32 for a leaf that is to gain from it.
        key: typed random key of this update; each leaf folds its path in.
        first_layer: index of the first layer in stacked leaves.

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
        return stochastic_round(wide, leaf_key(key, path_name(path)), first_layer)

    return jax.tree_util.tree_map_with_path(apply, params, updates)


def _needs(params: optax.Params | None, name: str) -> optax.Params:
    if params is None:
        raise ValueError(f"{name} needs the parameters: update(updates, state, params)")
    return params


def _difference(new: Array, old: Array) -> Array:
    return new.astype(jnp.float32) - old.astype(jnp.float32)


class StochasticRoundingState(NamedTuple):
    """State of :func:`stochastic_rounding`."""

    # Updates made, int32; with the seed and a leaf's path it gives the leaf's key.
    step: Array


def stochastic_rounding(seed: int | Array) -> optax.GradientTransformationExtraArgs:
    """Round each bfloat16 weight up or down, with the probabilities that are right on average.

    Costs no memory. The noise of about one bf16 step per update averages out over updates, as long
    as weights are not much larger than what the rate moves them by in many updates.

    Args:
        seed: seed of all random bits, an integer or a typed random key.

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

    References:
        Gupta et al., "Deep Learning with Limited Numerical Precision", 2015.
        Ozkara, Yu, Park, "Stochastic Rounding for LLM Training", 2025.
    """

    def init_fn(params: optax.Params) -> StochasticRoundingState:
        del params
        return StochasticRoundingState(step=jnp.zeros((), jnp.int32))

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        first_layer: int | Array = 0,
        **extra_args: Any,
    ) -> tuple[optax.Updates, StochasticRoundingState]:
        del extra_args
        params = _needs(params, "stochastic_rounding")
        assert isinstance(state, StochasticRoundingState)
        key = update_key(seed, "stochastic_rounding", state.step)
        rounded = apply_updates(params, updates, key, first_layer)
        changes = jax.tree.map(
            lambda new, old, u: _difference(new, old) if old.dtype == jnp.bfloat16 else u,
            rounded,
            params,
            updates,
        )
        return changes, StochasticRoundingState(jnp.asarray(optax.safe_increment(state.step)))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


class KahanRoundingState(NamedTuple):
    """State of :func:`kahan_rounding`."""

    # Per bfloat16 leaf: what the weight lacks, bfloat16 of its shape; [..., 1] for others.
    compensation: optax.Params


def kahan_rounding() -> optax.GradientTransformation:
    """Round to nearest, and add what was lost to the next update.

    Costs 2 bytes a weight. Weight and compensation together hold about 16 bits of mantissa, without
    any noise: updates below about 2^-17 of the weight are lost as before, and somewhat larger ones
    are rounded. :func:`residual_rounding` costs half and loses none.

    Returns:
        A transform with state :class:`KahanRoundingState`; `params` must be given to `update`.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from jaxlm.optim import kahan_rounding
        >>> tx = optax.chain(optax.sgd(1e-4), kahan_rounding())
        >>> params = jnp.ones((), jnp.bfloat16)
        >>> state = tx.init(params)
        >>> for _ in range(1000):
        ...     updates, state = tx.update(jnp.ones(()), state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> round(float(params), 2)
        0.9

    References:
        Kahan, "Further remarks on reducing truncation errors", 1965.
        Zamirai et al., "Revisiting BFloat16 Training", 2020, algorithm 3.
    """

    def init_fn(params: optax.Params) -> KahanRoundingState:
        return KahanRoundingState(
            jax.tree.map(
                lambda p: (
                    jnp.zeros(p.shape, jnp.bfloat16)
                    if p.dtype == jnp.bfloat16
                    else unused(p.shape[:1], jnp.bfloat16)
                ),
                params,
            )
        )

    def update_fn(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, KahanRoundingState]:
        params = _needs(params, "kahan_rounding")
        assert isinstance(state, KahanRoundingState)

        def leaf(u: Array, p: Array, lacking: Array) -> tuple[Array, Array]:
            if p.dtype != jnp.bfloat16:
                return u, lacking
            wanted = p.astype(jnp.float32) + (u.astype(jnp.float32) + lacking.astype(jnp.float32))
            # reduce_precision rather than a cast, which XLA may take back as excess precision.
            new = jax.lax.reduce_precision(wanted, exponent_bits=8, mantissa_bits=7)
            lost = wanted - new
            return _difference(new, p), jnp.where(jnp.isfinite(lost), lost, 0).astype(jnp.bfloat16)

        changes, compensation = unzip(
            params, jax.tree.map(leaf, updates, params, state.compensation), 2
        )
        return changes, KahanRoundingState(compensation)

    return optax.GradientTransformation(init_fn, update_fn)


class ResidualRoundingState(NamedTuple):
    """State of :func:`residual_rounding`."""

    # Updates made, int32; with the seed and a leaf's path it gives the leaf's key.
    step: Array
    # Per bfloat16 leaf: what the weight lacks in 1/256 of a bf16 step, int8 of its shape;
    # [..., 1] for others.
    residual: optax.Params


def join_residual(weight: Array, residual: Array) -> Array:
    """The 24-bit weight that a bfloat16 and its int8 residual stand for, as float32.

    In memory order the bits of a float's magnitude count its steps, across exponents too. The
    bfloat16 is the upper 16 bits and the residual, -128 to 127, is added in units of the next 8.
    """
    bits = jax.lax.bitcast_convert_type(weight, jnp.uint16).astype(jnp.int32)
    sign, upper = bits & 0x8000, bits & 0x7FFF
    # Adding a difference to a weight thousands of times larger may land beside the bfloat16 that
    # the residual was made for, on zero too, which has no step below.
    magnitude = jnp.maximum((upper << 8) + residual.astype(jnp.int32), 0)
    whole = (sign.astype(jnp.uint32) << 16) | (magnitude.astype(jnp.uint32) << 8)
    joined = jax.lax.bitcast_convert_type(whole, jnp.float32)
    return jnp.where(jnp.isfinite(weight), joined, weight.astype(jnp.float32))


def split_residual(x: Array, noise: Array) -> tuple[Array, Array]:
    """Round float32 to 24 bits stochastically, as the nearest bfloat16 and an int8 residual.

    Args:
        x: float32.
        noise: random uint8, the shape of x.

    Returns:
        bfloat16 and int8, the shape of x. NaN and infinities have residual 0; finite numbers stay
        finite.
    """
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    sign, magnitude = bits & jnp.uint32(0x80000000), bits & jnp.uint32(0x7FFFFFFF)
    # 2^7 more than the largest bfloat16 has in units of 2^-8 steps would round up to infinity.
    short = jnp.minimum((magnitude + noise.astype(jnp.uint32)) >> 8, 0x7F7F7F)
    upper = (short + 128) >> 8
    residual = (short.astype(jnp.int32) - (upper << 8).astype(jnp.int32)).astype(jnp.int8)
    weight = jax.lax.bitcast_convert_type(((sign >> 16) | upper).astype(jnp.uint16), jnp.bfloat16)
    finite = jnp.isfinite(x)
    return jnp.where(finite, weight, x.astype(jnp.bfloat16)), jnp.where(finite, residual, 0)


def residual_rounding(seed: int | Array) -> optax.GradientTransformationExtraArgs:
    """Give each bfloat16 weight eight more bits, and round the rest stochastically.

    Costs 1 byte a weight. The weight that learns has 24 bits (16 of mantissa); the model sees the
    bfloat16 nearest to it. Steps are 256 times finer than with :func:`stochastic_rounding`, and the
    noise that many updates leave is 16 times less.

    Args:
        seed: seed of all random bits, an integer or a typed random key.

    Returns:
        A transform with state :class:`ResidualRoundingState`; `params` must be given to `update`.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from jaxlm.optim import residual_rounding
        >>> tx = optax.chain(optax.sgd(1e-4), residual_rounding(seed=0))
        >>> params = jnp.ones(3, jnp.bfloat16)
        >>> state = tx.init(params)
        >>> for _ in range(1000):
        ...     updates, state = tx.update(jnp.ones(3), state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> params.astype(jnp.float32).tolist()  # the bfloat16 nearest to 0.9
        [0.8984375, 0.8984375, 0.8984375]

    References:
        "FlashOptim: Optimizers for Memory Efficient Training", 2026 (a residual in units of the
        weight's last place; rounded to nearest there).
    """

    def init_fn(params: optax.Params) -> ResidualRoundingState:
        return ResidualRoundingState(
            jnp.zeros((), jnp.int32),
            jax.tree.map(
                lambda p: (
                    jnp.zeros(p.shape, jnp.int8)
                    if p.dtype == jnp.bfloat16
                    else unused(p.shape[:1], jnp.int8)
                ),
                params,
            ),
        )

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        first_layer: int | Array = 0,
        **extra_args: Any,
    ) -> tuple[optax.Updates, ResidualRoundingState]:
        del extra_args
        params = _needs(params, "residual_rounding")
        assert isinstance(state, ResidualRoundingState)
        key = update_key(seed, "residual_rounding", state.step)

        def leaf(path: tuple, u: Array, p: Array, residual: Array) -> tuple[Array, Array]:
            if p.dtype != jnp.bfloat16:
                return u, residual
            bits = nested_bits(leaf_key(key, path_name(path)), p.shape, first_layer)
            wanted = join_residual(p, residual) + u.astype(jnp.float32)
            new, residual = split_residual(wanted, bits.astype(jnp.uint8))
            return _difference(new, p), residual

        changes, residual = unzip(
            params, jax.tree_util.tree_map_with_path(leaf, updates, params, state.residual), 2
        )
        return changes, ResidualRoundingState(
            jnp.asarray(optax.safe_increment(state.step)), residual
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
