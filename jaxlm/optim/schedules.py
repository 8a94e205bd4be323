"""Learning-rate schedules by update, with an explicit horizon.

Update i counts from 0. With w warm-up updates, update i < w uses peak * (i + 1) / w, so that the
first update already moves the weights and update w - 1 uses the peak; the decay starts at update w.
"""

from collections.abc import Callable

import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike


def _with_warmup(
    peak: float, warmup_updates: int, after: Callable[[Array], Array]
) -> optax.Schedule:
    def schedule(count: ArrayLike) -> Array:
        count = jnp.asarray(count)
        warmup = peak * ((count + 1) / max(warmup_updates, 1))
        return jnp.where(count < warmup_updates, warmup, after(count))

    return schedule


def warmup_constant(peak: float, *, warmup_updates: int = 0) -> optax.Schedule:
    """Linear warm-up, then `peak` for ever."""
    return _with_warmup(peak, warmup_updates, lambda count: jnp.full_like(count, peak, jnp.float32))


def warmup_cosine(
    peak: float, *, updates: int, warmup_updates: int = 0, end: float = 0.0
) -> optax.Schedule:
    """Linear warm-up, then half a cosine from `peak` at update `warmup_updates` to `end`.

    `end` is reached at update `updates`, the first one after the run; in the middle of the decay
    the rate is (peak + end) / 2.

    Args:
        peak: largest rate.
        updates: horizon of the schedule, warm-up included.
        warmup_updates: length of the warm-up; 0 is allowed.
        end: rate at the horizon and after it.

    Returns:
        A function from the update's number (from 0) to its rate.

    Raises:
        ValueError: `warmup_updates` is not below `updates`.

    References:
        Loshchilov & Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2017, eq. 5.
    """
    if warmup_updates >= updates:
        raise ValueError(f"warmup_updates ({warmup_updates}) must be below updates ({updates})")

    def decay(count: Array) -> Array:
        progress = jnp.clip((count - warmup_updates) / (updates - warmup_updates), 0.0, 1.0)
        return end + (peak - end) * 0.5 * (1.0 + jnp.cos(jnp.pi * progress))

    return _with_warmup(peak, warmup_updates, decay)


def warmup_stable_decay(
    peak: float, *, updates: int, decay_updates: int, warmup_updates: int = 0, end: float = 0.0
) -> optax.Schedule:
    """Linear warm-up, constant, then linear decay from `peak` to `end` at update `updates`.

    Args:
        peak: largest rate.
        updates: horizon of the schedule, warm-up and decay included.
        decay_updates: length of the decay, which starts at update `updates - decay_updates`.
        warmup_updates: length of the warm-up; 0 is allowed.
        end: rate at the horizon and after it.

    Returns:
        A function from the update's number (from 0) to its rate.

    Raises:
        ValueError: warm-up and decay do not fit into `updates`, or there is no decay.

    References:
        Hu et al., "MiniCPM", 2024, section 4.
    """
    if decay_updates < 1 or warmup_updates + decay_updates > updates:
        raise ValueError(
            f"warmup_updates ({warmup_updates}) + decay_updates ({decay_updates}, at least 1) "
            f"must be at most updates ({updates})"
        )

    def stable_then_decay(count: Array) -> Array:
        progress = jnp.clip((count - (updates - decay_updates)) / decay_updates, 0.0, 1.0)
        return peak + (end - peak) * progress

    return _with_warmup(peak, warmup_updates, stable_then_decay)
