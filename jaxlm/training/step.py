"""One update: gradients of a window's micro-batches, summed, divided once, clipped, applied.

Shape legend: M micro-batches, B rows of a micro-batch, T positions, D width.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

from jaxlm.losses import LossSums, chunked_cross_entropy, target_mask, zero_sums
from jaxlm.models.build import Params, apply, init_params
from jaxlm.optim import add_gradients, global_norm, to_float32
from jaxlm.training.layerwise import update_in_backward
from jaxlm.training.optimizer import applied_learning_rate, build_optimizer, norm_before_clipping
from jaxlm.training.spec import (
    ACCUMULATION,
    INIT,
    ROUNDING,
    Outcome,
    StepMetrics,
    StepSpec,
    Window,
    optimised_loss,
    row_keys,
    teacher_of,
)
from jaxlm.training.state import TrainState


def _optimizer(spec: StepSpec) -> optax.GradientTransformationExtraArgs:
    return build_optimizer(
        spec.optim,
        updates=spec.updates,
        micro_batches=spec.micro_batches,
        window_tokens=spec.window_tokens,
        key=jax.random.fold_in(jax.random.key(spec.seed), ROUNDING),
    )


@functools.partial(jax.jit, static_argnums=0)
def init_state(spec: StepSpec) -> TrainState:
    """The state before the first update, a function of the seed."""
    key = jax.random.fold_in(jax.random.key(spec.seed), INIT)
    params = init_params(spec.model, spec.expected_depth, key)
    opt_state = _optimizer(spec).init(params)
    return TrainState(update=jnp.zeros((), jnp.int32), params=params, opt_state=opt_state)


def loss_sums(
    spec: StepSpec, params: Params, batch: Window, keys_B: Array, depth: Array, backprop: Array
) -> tuple[Array, LossSums]:
    """Summed training loss of one micro-batch, and its parts.

    Args:
        spec: static settings.
        params: parameters.
        batch: arrays [B, T + 1] (`tokens`, `segment_ids`, `positions`), and those of a teacher
            where the window has them.
        keys_B: a random key per row.
        depth: core steps, traced int32.
        backprop: core steps with gradient, traced int32.
    """
    model = apply(spec.model, params)
    tokens = batch["tokens"].astype(jnp.int32)
    hidden_BTD = model(
        tokens[:, :-1],
        batch["segment_ids"][:, :-1],
        batch["positions"][:, :-1],
        keys_B,
        train=True,
        depth=depth,
        backprop_depth=backprop,
        max_backprop_depth=spec.max_backprop_depth,
    )
    with jax.named_scope("head"):
        sums = chunked_cross_entropy(
            hidden_BTD.reshape(-1, hidden_BTD.shape[-1]),
            model.head(),
            tokens[:, 1:].reshape(-1),
            target_mask(batch["segment_ids"]).reshape(-1),
            chunk_tokens=spec.loss.chunk_tokens,
            teacher=jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), teacher_of(batch)),
            temperature=spec.temperature,
        )
    return optimised_loss(spec, sums), sums


def window_gradients(
    spec: StepSpec, state: TrainState, window: Window, depth: Array, backprop: Array
) -> tuple[optax.Updates, Array, LossSums]:
    """Gradient sums of a window's micro-batches, summed loss, and the loss's parts.

    One micro-batch has its gradient in the weights' dtype. Of several, the sum is computed in
    float32 and kept in the dtype that the configuration names.
    """
    micro_batches, rows = window["block"].shape
    keys = row_keys(spec.seed, state.update, jnp.arange(micro_batches * rows))
    keys = keys.reshape(micro_batches, rows)

    def gradients(batch: Window, keys_B: Array):
        loss = functools.partial(loss_sums, spec)
        (total, sums), grads = jax.value_and_grad(loss, has_aux=True)(
            state.params, batch, keys_B, depth, backprop
        )
        return grads, total, sums

    if micro_batches == 1:
        return gradients(jax.tree.map(lambda x: x[0], window), keys[0])

    key = jax.random.fold_in(jax.random.key(spec.seed), ACCUMULATION)
    key = jax.random.fold_in(key, state.update)

    def accumulate(carry, scanned):
        sum_of_grads, *sums = carry
        grads, *parts = gradients(*scanned[1:])
        sum_of_grads = add_gradients(sum_of_grads, grads, jax.random.fold_in(key, scanned[0]))
        return (sum_of_grads, *jax.tree.map(jnp.add, sums, parts)), None

    def zeros(p: Array) -> Array:
        wide = jnp.promote_types(p.dtype, jnp.float32)
        narrow = spec.optim.accumulator_dtype == "bfloat16"
        return jnp.zeros(p.shape, jnp.bfloat16 if narrow else wide)

    _, *sums = jax.eval_shape(gradients, jax.tree.map(lambda x: x[0], window), keys[0])
    start = (
        jax.tree.map(zeros, state.params),
        *jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums),
    )
    return jax.lax.scan(accumulate, start, (jnp.arange(micro_batches), window, keys))[0]


def multisteps_updates(
    spec: StepSpec,
    state: TrainState,
    window: Window,
    depth: Array,
    backprop: Array,
    rate_multiplier: ArrayLike,
) -> tuple[optax.Updates, optax.OptState, Array, LossSums]:
    """Feed micro-batches to a stock optax.MultiSteps, whose last call emits the update.

    MultiSteps averages its M inputs. Each is scaled by M / (the window's target tokens), which is
    known beforehand from the segment ids, so that the average is the mean over target tokens.
    """
    micro_batches, rows = window["block"].shape
    keys = row_keys(spec.seed, state.update, jnp.arange(micro_batches * rows))
    tokens = jnp.maximum(jnp.sum(target_mask(window["segment_ids"])), 1).astype(jnp.float32)
    optimizer = _optimizer(spec)

    def feed(carry: Any, scanned: Any) -> tuple[optax.Updates, Any]:
        opt_state, total, sums = carry
        (loss, parts), grads = jax.value_and_grad(functools.partial(loss_sums, spec), has_aux=True)(
            state.params, *scanned, depth, backprop
        )
        grads = jax.tree.map(lambda g: g * (micro_batches / tokens), to_float32(grads))
        updates, opt_state = optimizer.update(
            grads, opt_state, state.params, rate_multiplier=rate_multiplier
        )
        return updates, (opt_state, total + loss, jax.tree.map(jnp.add, sums, parts))

    zero = jnp.zeros((), jnp.float32)
    scanned = (window, keys.reshape(micro_batches, rows))
    # All calls but the last emit zeros, which a scan that carried them would keep in memory.
    carry, _ = jax.lax.scan(
        lambda carry, x: (feed(carry, x)[1], None),
        (state.opt_state, zero, zero_sums(zero.dtype, spec.distillation is not None)),
        jax.tree.map(lambda x: x[:-1], scanned),
    )
    updates, (opt_state, total, sums) = feed(carry, jax.tree.map(lambda x: x[-1], scanned))
    return updates, opt_state, total, sums


def update_after_backward(
    spec: StepSpec,
    state: TrainState,
    window: Window,
    depth: Array,
    backprop: Array,
    rate_multiplier: ArrayLike,
) -> Outcome:
    """All gradients of the window, then one call of the optimizer."""
    if spec.optim.accumulation == "optax_multisteps":
        updates, opt_state, total, sums = multisteps_updates(
            spec, state, window, depth, backprop, rate_multiplier
        )
        return _apply(state, updates, opt_state, total, sums)
    grads, total, sums = window_gradients(spec, state, window, depth, backprop)
    return apply_gradients(spec, state, grads, total, sums, rate_multiplier)


def apply_gradients(
    spec: StepSpec,
    state: TrainState,
    grads: optax.Updates,
    total: Array,
    sums: LossSums,
    rate_multiplier: ArrayLike,
    allowed: ArrayLike = True,
) -> Outcome:
    """The optimizer's part of an update, from what :func:`window_gradients` returns.

    With `allowed` false the state stays what it was, after the same work.
    """
    tokens = jnp.maximum(sums.target_tokens, 1.0)
    grads = jax.tree.map(lambda g: g / tokens, to_float32(grads))
    updates, opt_state = _optimizer(spec).update(
        grads, state.opt_state, state.params, rate_multiplier=rate_multiplier
    )
    return _apply(state, updates, opt_state, total, sums, allowed)


def _apply(
    state: TrainState,
    updates: optax.Updates,
    opt_state: optax.OptState,
    total: Array,
    sums: LossSums,
    allowed: ArrayLike = True,
) -> Outcome:
    """Change the weights, unless something is not finite."""
    # What decides is known before anything is written: where it hung on the new weights, XLA would
    # hold all of them beside the old ones.
    grad_norm = norm_before_clipping(opt_state)
    finite = jnp.isfinite(total) & jnp.isfinite(grad_norm)
    applied = finite & (sums.target_tokens > 0) & allowed

    def choose(new: Array, old: Array) -> Array:
        return jnp.where(applied, new, old)

    new_params = optax.apply_updates(state.params, updates)
    params = jax.tree.map(choose, new_params, state.params)
    change = jax.tree.map(jnp.subtract, to_float32(params), to_float32(state.params))
    return Outcome(
        params=params,
        opt_state=jax.tree.map(choose, opt_state, state.opt_state),
        total=total,
        sums=sums,
        grad_norm=grad_norm,
        update_norm=global_norm(change),
        core_update_norm=global_norm(change.get("core", {})),
        finite=finite,
        applied=applied,
        kept_layers=jnp.zeros((), jnp.int32),
    )


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def train_step(
    spec: StepSpec,
    state: TrainState,
    window: Window,
    depth: Array,
    backprop: Array,
    rate_multiplier: ArrayLike = 1.0,
) -> tuple[TrainState, StepMetrics]:
    """Take one update.

    Args:
        spec: static settings.
        state: donated.
        window: arrays of one window, see data/pipeline.py.
        depth: core steps n of all its micro-batches, traced int32.
        backprop: core steps with gradient k <= n, traced int32.
        rate_multiplier: factor of the scheduled learning rate, traced float32.

    Returns:
        The next state and what to report. A window without target tokens, or with a loss or
        gradient that is not finite, leaves parameters and optimizer state as they were (for
        in_backward see layerwise.py).
    """
    if spec.update == "in_backward":
        out = update_in_backward(
            spec, _optimizer(spec), state, window, depth, backprop, rate_multiplier
        )
    else:
        out = update_after_backward(spec, state, window, depth, backprop, rate_multiplier)
    tokens = jnp.maximum(out.sums.target_tokens, 1.0)
    metrics = StepMetrics(
        loss=out.total / tokens,
        cross_entropy=out.sums.cross_entropy / tokens,
        target_tokens=out.sums.target_tokens.astype(jnp.int32),
        grad_norm=out.grad_norm,
        update_norm=jnp.where(out.applied, out.update_norm, 0.0),
        core_update_norm=jnp.where(out.applied, out.core_update_norm, 0.0),
        learning_rate=jnp.where(out.applied, applied_learning_rate(out.opt_state), 0.0),
        applied=out.applied,
        finite=out.finite,
        kept_layers=out.kept_layers,
        blocks=window["block"],
        distillation=(None if out.sums.distillation is None else out.sums.distillation / tokens),
    )
    return TrainState(state.update + 1, out.params, out.opt_state), metrics
