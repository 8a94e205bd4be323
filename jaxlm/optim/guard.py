"""Skip updates that are not finite, and count them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array


def all_finite(tree: optax.Params) -> Array:
    """Whether every element of every leaf is finite, a bool scalar."""
    leaves = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)]
    return jnp.all(jnp.stack(leaves)) if leaves else jnp.array(True)


def select(condition: Array, new: optax.Params, old: optax.Params) -> optax.Params:
    """Leaf by leaf `new` where the scalar condition holds, else `old`.

    A select rather than a branch: XLA then writes in place, where `lax.cond` holds both.
    """
    return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)


class SkipNonfiniteState(NamedTuple):
    """State of :func:`skip_nonfinite`."""

    # Updates skipped in all, int32.
    skipped: Array
    # Updates skipped since the last one that was made, int32.
    in_a_row: Array
    # State of the inner transform, as it was before a skipped update.
    inner: optax.OptState


def skip_nonfinite(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Make an update of zeros, and keep the state, where gradients or updates are not finite.

    Unlike `optax.apply_if_finite` it never gives in: weights stay finite for as long as it takes,
    and the caller stops the run by `in_a_row`. It also looks at what `inner` makes of finite
    gradients.

    Args:
        inner: the transform to protect: put the whole chain inside.

    Returns:
        A transform with state :class:`SkipNonfiniteState`.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from jaxlm.optim import skip_nonfinite
        >>> tx = skip_nonfinite(optax.sgd(1.0))
        >>> state = tx.init(jnp.zeros(2))
        >>> updates, state = tx.update(jnp.array([jnp.nan, 1.0]), state)
        >>> updates.tolist(), int(state.skipped), int(state.in_a_row)
        ([0.0, 0.0], 1, 1)
        >>> updates, state = tx.update(jnp.ones(2), state)
        >>> updates.tolist(), int(state.skipped), int(state.in_a_row)
        ([-1.0, -1.0], 1, 0)
    """
    inner = optax.with_extra_args_support(inner)

    def init_fn(params: optax.Params) -> SkipNonfiniteState:
        return SkipNonfiniteState(
            jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), inner.init(params)
        )

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, SkipNonfiniteState]:
        assert isinstance(state, SkipNonfiniteState)
        changes, inner_state = inner.update(updates, state.inner, params, **extra_args)
        finite = all_finite(updates) & all_finite(changes)
        return select(finite, changes, jax.tree.map(jnp.zeros_like, changes)), SkipNonfiniteState(
            skipped=state.skipped + jnp.where(finite, 0, 1),
            in_a_row=jnp.where(finite, 0, state.in_a_row + 1),
            inner=select(finite, inner_state, state.inner),
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
