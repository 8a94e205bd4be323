"""Watching a recurrent model during training: figures every some updates, and alarms.

What can go wrong with weight-shared depth goes wrong quietly: the loss still falls while depth has
stopped to matter, or while the state grows with every step beyond the trained ones. Each monitor is
one figure with a threshold, see MonitorsConfig and docs/control.md.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from jaxlm.config import Config, Monitor
from jaxlm.data.pipeline import Rows
from jaxlm.evaluation.evaluate import evaluate, trace
from jaxlm.files import finite
from jaxlm.models.build import Params
from jaxlm.training.spec import StepSpec

# What happens, what usually causes it, what to look at first.
TEXTS: dict[Monitor, str] = {
    "token_correlation": (
        "the states of all positions point the same way, so the model has nothing left to tell "
        "tokens apart by; usually a learning rate too high for the core, or missing norms; look at "
        "state_correlation by step in monitors.jsonl, lower optim.learning_rate, set model.norm"
    ),
    "depth_gain": (
        "more core steps hardly lower the loss: the model ignores its recurrence; usually the core "
        "is frozen or too small, or the prelude and coda do the work alone; look at "
        "relative_residual by step, raise depth.backprop or the core's layers"
    ),
    "idle_residual": (
        "the state stands still after the first core step, so that further ones change nothing; "
        "usually the core passes the prelude's output through and forgets its state, or its "
        "weights are near zero; look at relative_residual by step and state_gain in "
        "monitors.jsonl and at core_update_norm in metrics.jsonl, raise depth.backprop"
    ),
    "state_growth": (
        "the state grows from step to step and will overflow at larger depths; usually a missing "
        "norm or an injection that adds without damping; look at state_norm by step, use "
        "model.recurrent.injection=diagonal or model.norm=sandwich"
    ),
    "overthinking": (
        "beyond the trained depth the loss rises again; usually depth is fixed or its maximum is "
        "too near to its mean; look at the loss_ figures, draw depth.distribution="
        "lognormal_poisson and raise depth.maximum"
    ),
    "state_gain": (
        "the injection amplifies the state, and loss spikes may follow; usually a learning rate "
        "too high for the core; look at grad_norm in metrics.jsonl, lower optim.learning_rate, "
        "raise optim.weight_decay, or use model.recurrent.injection=diagonal"
    ),
    "core_ratio": (
        "the core's weights change much faster than the others, because its gradient adds up over "
        "steps; look at core_update_norm in metrics.jsonl, lower optim.learning_rate or "
        "depth.backprop"
    ),
}
# Monitors whose alarm is a figure below its threshold.
_BELOW = ("depth_gain", "idle_residual")


@dataclasses.dataclass(frozen=True)
class Alarm:
    """An alarm that was raised, or that has cleared."""

    # "raised" or "cleared".
    event: str
    # Updates behind the weights, and those at the first pass at which the figure was beyond.
    update: int
    since: int
    monitor: Monitor
    # The figure, None where it is not finite; and the threshold.
    value: float | None
    threshold: float
    # "warn" or "stop".
    action: str
    # What happens, what usually causes it, what to look at first.
    text: str

    def line(self) -> str:
        """One line for the terminal."""
        value = "not finite" if self.value is None else f"{self.value:.4g}"
        if self.event == "cleared":
            return f"Alarm over at update {self.update}: {self.monitor} is {value}"
        side = "below" if self.monitor in _BELOW else "above"
        return (
            f"ALARM at update {self.update}: {self.monitor} is {value}, {side} {self.threshold:g} "
            f"since update {self.since}: {self.text}"
        )


class Alarms:
    """Turns figures into alarms; what it remembers is what monitors.jsonl holds.

    Args:
        config: of the run.
        records: of monitors.jsonl so far, oldest first.
    """

    def __init__(self, config: Config, records: Iterable[dict[str, Any]] = ()):
        self.settings = config.monitors
        self.first = max(config.monitors.after_updates, config.optim.warmup_updates)
        # First pass of those at which a figure has been beyond its threshold without a break.
        self.since: dict[Monitor, int] = {}
        self.raised: list[Monitor] = []
        for record in records:
            self.follow(record["update"], record["beyond"])

    def beyond(self, update: int, figures: dict[str, Any]) -> list[Monitor]:
        """Monitors whose figure is beyond its threshold; a missing one ends no standing alarm."""
        if update < self.first:
            return []
        found: list[Monitor] = []
        for monitor in TEXTS:
            value, threshold = figures.get(monitor), getattr(self.settings, monitor)
            if threshold is None:
                continue
            if value is None or math.isnan(value):
                if monitor in self.raised:
                    found.append(monitor)
            elif value < threshold if monitor in _BELOW else value > threshold:
                found.append(monitor)
        return found

    def follow(self, update: int, beyond: Iterable[Monitor]) -> tuple[list[Monitor], list[Monitor]]:
        """What a pass raises and clears, by the monitors that are beyond their thresholds."""
        self.since = {monitor: self.since.get(monitor, update) for monitor in beyond}
        window = self.settings.window
        raised: list[Monitor] = [
            monitor
            for monitor, since in self.since.items()
            if update - since >= window and monitor not in self.raised
        ]
        cleared: list[Monitor] = [monitor for monitor in self.raised if monitor not in self.since]
        held: list[Monitor] = [*self.raised, *raised]
        self.raised = [monitor for monitor in held if monitor not in cleared]
        return raised, cleared

    def __call__(self, update: int, figures: dict[str, Any]) -> list[Alarm]:
        """Alarms that the figures of a pass raise or clear."""
        before = dict(self.since)
        raised, cleared = self.follow(update, self.beyond(update, figures))

        def alarm(event: str, monitor: Monitor, since: int) -> Alarm:
            return Alarm(
                event=event,
                update=update,
                since=since,
                monitor=monitor,
                value=finite(figures[monitor]),
                threshold=getattr(self.settings, monitor) or 0.0,
                action="stop" if monitor in self.settings.stop else "warn",
                text=TEXTS[monitor],
            )

        return [
            *[alarm("raised", monitor, self.since[monitor]) for monitor in raised],
            *[alarm("cleared", monitor, before[monitor]) for monitor in cleared],
        ]


def not_judged(config: Config, passes: Sequence[dict[str, Any]]) -> str | None:
    """Why no alarm could be raised: all passes came too early; None where one did not."""
    first = Alarms(config).first
    if any(record["update"] >= first for record in passes):
        return None
    warming = first > config.monitors.after_updates
    setting = "optim.warmup_updates" if warming else "monitors.after_updates"
    return f"nothing is judged before update {first:,} ({setting})"


def due(config: Config, update: int) -> bool:
    """Whether monitors take their figures after so many updates, beside validation passes."""
    every = config.monitors.every
    watched = config.model.kind == "recurrent" and config.monitors.rows > 0
    return watched and bool(every) and update % every == 0


def measure(
    config: Config,
    spec: StepSpec,
    params: Params,
    rows: Rows,
    last_update: dict[str, Any],
) -> dict[str, Any]:
    """The figures of a recurrent model.

    Args:
        config: of the run.
        spec: of the run.
        params: parameters.
        rows: validation rows, of which the first `monitors.rows` are read.
        last_update: record of the last update. Depths are 0.5, 1, 2 and 4 times its mean depth;
            `core_update_ratio` and `core_ratio` are of its changes.

    Returns:
        By name: numbers, numbers by step from 1 on, or None; infinities and NaN as they are.
    """
    mean_depth = last_update["mean_depth"]
    mean = max(1, round(mean_depth))
    steps = 4 * mean
    depths = {"1": 1, "half": max(1, round(mean_depth / 2)), "mean": mean}
    depths |= {"double": 2 * mean, "quadruple": steps}
    evaluations = evaluate(
        spec.model,
        params,
        rows,
        depths=sorted(set(depths.values())),
        batch_rows=config.evaluation.batch_rows,
        chunk_tokens=config.loss.chunk_tokens,
        limit=config.monitors.rows,
    )
    by_depth = {evaluation.depth: evaluation.cross_entropy for evaluation in evaluations}
    loss = {name: by_depth[depth] for name, depth in depths.items()}
    states, weights = trace(
        spec.model,
        params,
        rows,
        depth=mean,
        steps=steps,
        max_steps=4 * config.depth.maximum,
        batch_rows=config.evaluation.batch_rows,
        limit=config.monitors.rows,
    )
    norm, correlation = states.state_norm.tolist(), states.state_correlation.tolist()
    residual = states.relative_residual.tolist()
    limit = config.monitors.idle_residual
    idle = [step for step, x in enumerate(residual, start=1) if limit is not None and x < limit]
    hidden = float(states.hidden_correlation)
    return {
        "depth": mean,
        **{f"loss_{name}": value for name, value in loss.items()},
        # At a mean depth of 1 both are the same loss, which tells nothing of what depth does.
        "depth_gain": loss["1"] - loss["mean"] if mean > 1 else None,
        "overthinking": _worst(loss["double"], loss["quadruple"]) - loss["mean"],
        "state_norm": norm,
        "relative_residual": residual,
        "state_correlation": correlation,
        "hidden_correlation": hidden,
        "token_correlation": max(correlation[mean - 1], hidden),
        "state_growth": _growth(norm),
        "first_idle_step": idle[0] if idle else None,
        "idle_residual": _largest(residual[1:mean]),
        "state_gain": float(weights.state_gain),
        "input_gain": float(weights.input_gain),
        **_core_changes(last_update, float(weights.core_norm), float(weights.other_norm)),
    }


def _largest(values: list[float]) -> float | None:
    """NaN if one of them is; None where there are none, as for the steps after the only one."""
    if any(map(math.isnan, values)):
        return math.nan
    return max(values, default=None)


def _worst(*losses: float) -> float:
    """The largest loss; one that is not a number is the worst."""
    return max(math.inf if math.isnan(loss) else loss for loss in losses)


def _growth(norm: list[float]) -> float:
    """Norm after the last step over that after the first; infinite where the last overflowed."""
    if not math.isfinite(norm[0]):
        return math.nan
    return norm[-1] / max(norm[0], 1e-30) if math.isfinite(norm[-1]) else math.inf


def _core_changes(
    record: dict[str, Any], core_norm: float, other_norm: float
) -> dict[str, float | None]:
    """Change over weights of the core in the last update, and this over the same of all others."""
    if not record["applied"] or record["update_norm"] is None or core_norm <= 0:
        return {"core_update_ratio": None, "core_ratio": None}
    core, whole = record["core_update_norm"], record["update_norm"]
    other = math.sqrt(max(whole**2 - core**2, 0.0))
    ratio = core / core_norm
    return {
        "core_update_ratio": ratio,
        "core_ratio": ratio / (other / other_norm) if other > 0 else None,
    }
