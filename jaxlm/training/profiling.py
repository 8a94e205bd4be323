"""Where the time of an update goes, measured in the first updates of a run and then never again.

The step is one compiled program, whose phases cannot be timed from outside. So some of the first
updates are followed by programs of their own on the same window: the forward pass, the forward
pass with the loss, all gradients, and the optimizer, each waited for. Differences between them are
the phases; all gradients and the optimizer together should be the step. The state is what it would
be without: the optimizer's program does all of its work and then keeps the old values.
"""

import dataclasses
import functools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import rich.table
from jax import Array

from jaxlm.console import new_table
from jaxlm.files import write_atomically
from jaxlm.losses import LossSums
from jaxlm.models.build import Params, apply
from jaxlm.models.flops import flops_per_token
from jaxlm.models.layers import attention_implementation
from jaxlm.training.spec import StepSpec, Window, row_keys
from jaxlm.training.state import TrainState
from jaxlm.training.step import apply_gradients, loss_sums, window_gradients

PROFILE = "profile.json"


@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward(
    spec: StepSpec,
    with_loss: bool,
    state: TrainState,
    window: Window,
    depth: Array,
    backprop: Array,
) -> Array:
    """The forward pass of all micro-batches; a sum, so that nothing of it can be left out."""
    micro_batches, rows = window["block"].shape
    keys = row_keys(spec.seed, state.update, jnp.arange(micro_batches * rows))

    def hidden(batch: Window, keys_B: Array) -> Array:
        return apply(spec.model, state.params)(
            batch["tokens"].astype(jnp.int32)[:, :-1],
            batch["segment_ids"][:, :-1],
            batch["positions"][:, :-1],
            keys_B,
            train=True,
            depth=depth,
            backprop_depth=backprop,
            max_backprop_depth=spec.max_backprop_depth,
        )

    def one(total: Array, scanned: tuple[Window, Array]) -> tuple[Array, None]:
        batch, keys_B = scanned
        if with_loss:
            part = loss_sums(spec, state.params, batch, keys_B, depth, backprop)[0]
        else:
            part = jnp.sum(hidden(batch, keys_B), dtype=jnp.float32)
        return total + part, None

    scanned = (window, keys.reshape(micro_batches, rows))
    return jax.lax.scan(one, jnp.zeros((), jnp.float32), scanned)[0]


_Gradients = tuple[optax.Updates, Array, LossSums]


@functools.partial(jax.jit, static_argnums=0, donate_argnums=5, keep_unused=True)
def _gradients(
    spec: StepSpec,
    state: TrainState,
    window: Window,
    depth: Array,
    backprop: Array,
    place: _Gradients,
) -> _Gradients:
    """All gradients, written into those of an earlier call: within the step they have a place."""
    del place
    return window_gradients(spec, state, window, depth, backprop)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _optimizer(
    spec: StepSpec,
    state: TrainState,
    grads: Params,
    total: Array,
    sums: LossSums,
    rate_multiplier: Array,
    allowed: Array,
) -> tuple[TrainState, Array]:
    out = apply_gradients(spec, state, grads, total, sums, rate_multiplier, allowed)
    return TrainState(state.update, out.params, out.opt_state), out.grad_norm


class Phases:
    """The programs beside the step, compiled at their first use.

    Args:
        spec: of the run. With `in_backward`, and with optax.MultiSteps, gradients and optimizer are
            one: then forward pass and loss are measured, and the rest is the step's difference.
    """

    def __init__(self, spec: StepSpec):
        self._spec = spec
        self.separate = (
            spec.update == "after_backward" and spec.optim.accumulation == "token_weighted"
        )

    def measure(
        self, state: TrainState, window: Window, depth: Array, backprop: Array, rate: Array
    ) -> tuple[TrainState, dict[str, float]]:
        """Run each program twice, the second time with a clock.

        Returns:
            The state, which has been donated and is the same; seconds by program: `forward`,
            `loss` (with the forward pass), and where they are separate `gradients` (with both) and
            `optimizer`.
        """
        spec, arguments = self._spec, (window, depth, backprop)
        seconds = {
            "forward": _timed(lambda: _forward(spec, False, state, *arguments)),
            "loss": _timed(lambda: _forward(spec, True, state, *arguments)),
        }
        if not self.separate:
            return state, seconds
        shapes = jax.eval_shape(functools.partial(window_gradients, spec), state, *arguments)
        # With a device they are "committed" like results: otherwise the second call would compile.
        device = state.update.sharding
        result = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=device), shapes)
        never = jnp.asarray(False)
        # What is donated cannot be used twice.
        for _ in range(2):
            jax.block_until_ready(result)
            began = time.perf_counter()
            result = jax.block_until_ready(_gradients(spec, state, *arguments, result))
            seconds["gradients"] = time.perf_counter() - began
        for _ in range(2):
            began = time.perf_counter()
            state, norm = _optimizer(spec, state, *result, rate, never)
            jax.block_until_ready((state, norm))
            seconds["optimizer"] = time.perf_counter() - began
        return state, seconds


def _timed(run: Any) -> float:
    jax.block_until_ready(run())
    began = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - began


@dataclasses.dataclass(frozen=True)
class Profile:
    """Phases of the profiled updates, in seconds; medians over the updates."""

    updates: int
    tokens: int
    # Waiting for the window; the program of the step; what the host does between steps.
    data: float
    step: float
    host: float
    # Parts of the step. The last two are None where they are one (see Phases), and their sum is
    # then `backward_and_optimizer`.
    forward: float
    loss: float
    backward: float | None
    optimizer: float | None
    backward_and_optimizer: float
    # Sum of the phases over the step's own time; None where the rest is a difference.
    phases_over_step: float | None
    # Backward pass over forward pass with loss: as measured, and as the operations of the remat
    # policy and of the depths drawn predict.
    backward_over_forward: float | None
    predicted_backward_over_forward: float


def predicted_ratio(spec: StepSpec, length: int, depth: int, backprop: int) -> float:
    """Operations of the backward pass, recomputation included, over those of the forward pass.

    XLA's attention computes the full square of positions, cuDNN's what is causal of it.
    """
    full = attention_implementation(spec.model, length) == "xla"
    flops = flops_per_token(spec.model, length if full else (length + 1) / 2, depth, backprop)
    return (flops.backward + flops.recomputed) / flops.forward


def summarise(records: list[dict[str, float]]) -> Profile:
    """The medians of several updates' seconds.

    Args:
        records: with `data`, `step`, `host`, `tokens`, `predicted`, and what
            :meth:`Phases.measure` gives.
    """

    def median(value: Any) -> float:
        return statistics.median(value(record) for record in records)

    separate = "gradients" in records[0]
    return Profile(
        updates=len(records),
        tokens=int(median(lambda r: r["tokens"])),
        data=median(lambda r: r["data"]),
        step=median(lambda r: r["step"]),
        host=median(lambda r: r["host"]),
        forward=median(lambda r: r["forward"]),
        loss=median(lambda r: r["loss"] - r["forward"]),
        backward=median(lambda r: r["gradients"] - r["loss"]) if separate else None,
        optimizer=median(lambda r: r["optimizer"]) if separate else None,
        backward_and_optimizer=median(
            lambda r: (
                r["gradients"] - r["loss"] + r["optimizer"] if separate else r["step"] - r["loss"]
            )
        ),
        phases_over_step=median(lambda r: (r["gradients"] + r["optimizer"]) / r["step"])
        if separate
        else None,
        backward_over_forward=median(lambda r: (r["gradients"] - r["loss"]) / r["loss"])
        if separate
        else None,
        predicted_backward_over_forward=median(lambda r: r["predicted"]),
    )


def write_profile(directory: Path, profile: Profile) -> None:
    """Write profile.json."""
    text = json.dumps(dataclasses.asdict(profile), indent=2) + "\n"
    write_atomically(directory / PROFILE, text)


def profile_table(profile: Profile) -> rich.table.Table:
    """The phases with their shares of an update."""
    table = new_table(f"phases of an update ({profile.updates} timed)", "ms", "share")
    whole = profile.data + profile.step + profile.host
    rows: list[tuple[str, float | None]] = [
        ("waiting for data", profile.data),
        ("forward", profile.forward),
        ("loss", profile.loss),
        ("backward", profile.backward),
        ("optimizer", profile.optimizer),
    ]
    if profile.backward is None:
        rows[3:] = [("backward and optimizer", profile.backward_and_optimizer)]
    for name, seconds in [*rows, ("host", profile.host)]:
        assert seconds is not None
        table.add_row(name, f"{1e3 * seconds:,.1f}", f"{seconds / whole:.1%}")
    table.add_section()
    table.add_row("training step, as one program", f"{1e3 * profile.step:,.1f}", "")
    return table


def ratio_line(profile: Profile) -> str:
    """What the figures say beside what they should."""
    predicted = profile.predicted_backward_over_forward
    if profile.backward_over_forward is None or profile.phases_over_step is None:
        return f"Operations predict a backward pass of {predicted:.2f} times the forward pass."
    return (
        f"Phases add up to {profile.phases_over_step:.1%} of the step. The backward pass takes "
        f"{profile.backward_over_forward:.2f} times the forward pass; operations predict "
        f"{predicted:.2f}."
    )
