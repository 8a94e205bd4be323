"""Gradient accumulation over micro-batches that counts target tokens, not micro-batches."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxlm.optim.guard import all_finite, select
from jaxlm.optim.rounding import leaf_key, stochastic_round, update_key
from jaxlm.optim.rules import path_name


def add_gradients(
    total: optax.Updates, gradients: optax.Updates, key: Array, first_layer: int | Array = 0
) -> optax.Updates:
    """Add gradients to a running sum, computed in float32 and stored in the sum's dtype.

    Args:
        total: the sum; a bfloat16 leaf is rounded stochastically, because rounding to nearest
            loses what is small beside a large sum.
        gradients: what is added, in any dtype.
        key: typed random key of this addition; each leaf folds its path in.
        first_layer: index of the first layer in stacked leaves.

    Returns:
        The new sum, in the dtypes of the old one.
    """

    def add(path: tuple, acc: Array, g: Array) -> Array:
        wide = acc.astype(jnp.promote_types(acc.dtype, jnp.float32)) + g.astype(
            jnp.promote_types(g.dtype, jnp.float32)
        )
        if acc.dtype == jnp.bfloat16:
            return stochastic_round(wide, leaf_key(key, path_name(path)), first_layer)
        return wide.astype(acc.dtype)

    return jax.tree_util.tree_map_with_path(add, total, gradients)


class AccumulateTokensState(NamedTuple):
    """State of :func:`accumulate_tokens`."""

    # Micro-batches of the open window so far, int32; 0 after a window's end.
    micro_batches: Array
    # Their target tokens, float32.
    target_tokens: Array
    # Whether all of their gradients, sums and token counts were finite, bool.
    finite: Array
    # Sum of their gradients, always finite. What a closed window leaves is overwritten.
    total: optax.Updates
    # Windows that made an update, int32.
    updates: Array
    # Windows lost to a number that was not finite, int32.
    nonfinite_windows: Array
    # Windows without any target token, int32.
    empty_windows: Array
    # State of the inner transform; it advances once per window that makes an update.
    inner: optax.OptState


def accumulate_tokens(
    inner: optax.GradientTransformation,
    every: int | None = None,
    *,
    accumulator_dtype: jax.typing.DTypeLike = jnp.float32,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Sum gradients and target tokens over a window of micro-batches, and divide once.

    Call `update` once per micro-batch with the gradient of the *summed* loss and
    ``target_tokens=``, the number of tokens that it is a sum over. Until the window's end the
    updates are zeros; there, `inner` gets the sum divided by the window's tokens: 2.0 over 100
    tokens and 4.0 over 300 are 3.5 together, not 3.0.

    A window ends after `every` micro-batches, or early with ``final=True``, when it is divided by
    the tokens that it has. A micro-batch that is not finite costs its window and nothing else. A
    window that is lost, or has no target tokens, makes no update and does not advance `inner`.

    Where the window's end is not known at compile time (`every` is given, or `final` is a traced
    array), `inner` runs for every micro-batch and all but the last result is dropped, as in
    `optax.MultiSteps`: a select needs no memory, where a branch would hold the updates twice. With
    `every=None` and a Python bool for `final` nothing is wasted: loop over all but the last
    micro-batch with ``final=False``, then call once with ``final=True``.

    Args:
        inner: gets the mean gradient in float32.
        every: micro-batches a window; None leaves its end to `final` alone.
        accumulator_dtype: float32 (4 bytes a parameter), or bfloat16 (2 bytes), which rounds
            stochastically: unbiased, with a relative error of about 3 % over 512 micro-batches.
        seed: seed of that rounding.

    Returns:
        A transform with state :class:`AccumulateTokensState` whose `update` takes
        ``target_tokens`` (required), ``final`` and the extra arguments of `inner`.

    Raises:
        ValueError: `every` is below 1, or `update` was called without ``target_tokens``.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from jaxlm.optim import accumulate_tokens
        >>> tx = accumulate_tokens(optax.sgd(1.0), every=2)
        >>> state = tx.init(jnp.zeros(()))
        >>> first, state = tx.update(jnp.array(200.0), state, target_tokens=100)
        >>> second, state = tx.update(jnp.array(1200.0), state, target_tokens=300)
        >>> float(first), float(second)
        (0.0, -3.5)
    """
    if every is not None and every < 1:
        raise ValueError(f"every ({every}) must be at least 1")
    inner = optax.with_extra_args_support(inner)

    def init_fn(params: optax.Params) -> AccumulateTokensState:
        def zero() -> Array:  # a buffer of its own: a donated one must not stand twice
            return jnp.zeros((), jnp.int32)

        return AccumulateTokensState(
            micro_batches=zero(),
            target_tokens=jnp.zeros((), jnp.float32),
            finite=jnp.ones((), jnp.bool_),
            total=jax.tree.map(lambda p: jnp.zeros(p.shape, accumulator_dtype), params),
            updates=zero(),
            nonfinite_windows=zero(),
            empty_windows=zero(),
            inner=inner.init(params),
        )

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        target_tokens: jax.typing.ArrayLike | None = None,
        final: bool | Array = False,
        first_layer: int | Array = 0,
        **extra_args: Any,
    ) -> tuple[optax.Updates, AccumulateTokensState]:
        if target_tokens is None:
            raise ValueError("accumulate_tokens needs update(..., target_tokens=)")
        assert isinstance(state, AccumulateTokensState)
        windows = state.updates + state.nonfinite_windows + state.empty_windows
        key = update_key(seed, "accumulate_tokens", windows)
        key = jax.random.fold_in(key, state.micro_batches)

        # Sums are zeroed at a window's start, by a product: selecting zeros would copy them. What
        # was not finite is dropped here: a sum that once was NaN would stay so, for 0 * NaN is NaN.
        opens = state.micro_batches == 0
        keep = jnp.where(opens, 0, 1)
        kept = jax.tree.map(
            lambda acc: jnp.where(jnp.isfinite(acc), acc, 0) * keep.astype(acc.dtype), state.total
        )
        total = add_gradients(kept, updates, key, first_layer)
        # A pass of its own: fused with the addition, XLA would not write the sum in place.
        total = jax.lax.optimization_barrier(total)
        tokens = keep * state.target_tokens + jnp.asarray(target_tokens, jnp.float32)
        finite = (opens | state.finite) & jnp.isfinite(tokens) & all_finite(total)
        tokens = jnp.where(jnp.isfinite(tokens), tokens, 0)

        def close() -> tuple[optax.Updates, optax.OptState]:
            count = jnp.where(tokens > 0, tokens, 1.0)
            mean = jax.tree.map(
                lambda acc: acc.astype(jnp.promote_types(acc.dtype, jnp.float32)) / count, total
            )
            return inner.update(mean, state.inner, params, first_layer=first_layer, **extra_args)

        micro_batches = state.micro_batches + 1
        if every is None and isinstance(final, bool):
            ends = jnp.array(final)
        else:
            ends = jnp.asarray(final) | (False if every is None else micro_batches == every)
        if every is None and final is False:
            changes = jax.tree.map(
                lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(lambda: close()[0])
            )
            inner_state = state.inner
        else:
            applies = ends & finite & (tokens > 0)
            changes, inner_state = close()
            changes = select(applies, changes, jax.tree.map(jnp.zeros_like, changes))
            inner_state = select(applies, inner_state, state.inner)

        def one_if(condition: Array) -> Array:
            return jnp.where(ends & condition, 1, 0)

        return changes, AccumulateTokensState(
            micro_batches=jnp.where(ends, 0, micro_batches),
            target_tokens=tokens,
            finite=finite,
            total=total,
            updates=state.updates + one_if(finite & (tokens > 0)),
            nonfinite_windows=state.nonfinite_windows + one_if(~finite),
            empty_windows=state.empty_windows + one_if(finite & (tokens <= 0)),
            inner=inner_state,
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
