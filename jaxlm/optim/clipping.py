"""Clipping by global norm, computed in float32, that reports the norm and never hides a NaN."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array


class ClipByGlobalNormState(NamedTuple):
    """State of :func:`clip_by_global_norm`."""

    # Global norm of the last updates before clipping, float32. Not finite if they were not.
    norm: Array


def global_norm(tree: optax.Updates) -> Array:
    """Euclidean norm of all leaves together, a float32 (or wider) scalar.

    Squares and sums are taken in float32 even where leaves are bfloat16 (whose eight bits would
    lose 0.1 % of the norm of a large model).
    """

    def sum_of_squares(x: Array) -> Array:
        return jnp.sum(jnp.square(x.astype(jnp.promote_types(x.dtype, jnp.float32))))

    squares = [sum_of_squares(x) for x in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares, start=jnp.zeros((), jnp.float32)))


def clip_scale(norm: Array, max_norm: float) -> Array:
    """The factor that takes a norm down to `max_norm`: 1 below it, and where it is not finite."""
    clip = jnp.isfinite(norm) & (norm > max_norm)
    return jnp.where(clip, max_norm / jnp.where(clip, norm, 1.0), 1.0)


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Scale updates down so that their global norm is at most `max_norm`.

    Unlike `optax.clip_by_global_norm` the norm is computed in float32 and kept in the state, zero
    updates stay exactly zero, and updates whose norm is not finite pass through unchanged: the
    norm in the state then says so, and whoever applies the updates must skip them.

    Args:
        max_norm: upper limit of the norm; infinity never clips and still reports.

    Returns:
        A transform with state :class:`ClipByGlobalNormState`. Shapes and dtypes are kept.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxlm.optim import clip_by_global_norm
        >>> tx = clip_by_global_norm(1.0)
        >>> updates, state = tx.update({"w": jnp.array([3.0, 4.0])}, tx.init({}))
        >>> [round(float(x), 6) for x in updates["w"]], float(state.norm)
        ([0.6, 0.8], 5.0)

    References:
        Pascanu, Mikolov, Bengio, "On the difficulty of training recurrent neural networks", 2013.
    """

    def init_fn(params: optax.Params) -> ClipByGlobalNormState:
        del params
        return ClipByGlobalNormState(norm=jnp.zeros((), jnp.float32))

    def update_fn(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ClipByGlobalNormState]:
        del state, params
        norm = global_norm(updates)
        scale = clip_scale(norm, max_norm).astype(norm.dtype)
        clipped = jax.tree.map(
            lambda u: jnp.where(scale < 1, (u * scale).astype(u.dtype), u), updates
        )
        return clipped, ClipByGlobalNormState(norm=norm.astype(jnp.float32))

    return optax.GradientTransformation(init_fn, update_fn)
