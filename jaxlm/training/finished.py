"""Checks on a run that is finished, or under way: are its records whole, and do they add up?

Whatever can be worked out again is: schedule, depth draws and every controller's decisions follow
from the configuration and the records alone, so that each logged value has a right one beside it.
"""

import dataclasses
import functools
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxlm.config import Config, Monitor
from jaxlm.data.pipeline import Windows, open_sources, training_windows
from jaxlm.data.shards import DataDirectory
from jaxlm.errors import Failure, UserError
from jaxlm.models.depth import draw_depth
from jaxlm.training.checkpoint import Checkpoints
from jaxlm.training.checks import Cause, Check, Result, listed, result, skipped
from jaxlm.training.control import Control
from jaxlm.training.loading import load_resolved
from jaxlm.training.manifest import damage_text, inspect, updates_in
from jaxlm.training.metrics import (
    ALARMS,
    BLOCKS,
    CHANGES,
    DECISIONS,
    EVALUATIONS,
    METRICS,
    MONITORS,
    STARTS,
    read_records,
)
from jaxlm.training.monitors import TEXTS, Alarms, not_judged
from jaxlm.training.optimizer import build_schedule
from jaxlm.training.rewind import Rewinds
from jaxlm.training.spec import step_spec
from jaxlm.training.step import init_state

# Rates are computed in float32.
_RATE_DIFFERENCE = 1e-5
# Windows that are read again to compare their blocks.
_WINDOWS = 32


class FinishedRun:
    """A run's directory, read once.

    Raises:
        UserError: it is not a run, or has no records.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.config: Config = load_resolved(directory)
        self.settings = self.config.preflight
        self.metrics = read_records(directory / METRICS)
        if not self.metrics:
            raise UserError(f"{directory / METRICS}: holds no record")
        self.evaluations = read_records(directory / EVALUATIONS)
        self.decisions = read_records(directory / DECISIONS)
        self.monitors = read_records(directory / MONITORS)
        self.alarms = read_records(directory / ALARMS)
        self.blocks = read_records(directory / BLOCKS)
        # Settings before the last change of them are not known any more.
        self.rewinds = Rewinds(directory)
        changes = read_records(directory / CHANGES)
        self.since: int = max((change["update"] for change in changes), default=0)

    @property
    def recurrent(self) -> bool:
        """Whether the model has a depth."""
        return self.config.model.kind == "recurrent"

    @functools.cached_property
    def windows(self) -> Windows | None:
        """The run's windows; None where its data, or the first of it, is gone."""
        config = self.config
        directories = [config.data.directory, *(one.directory for one in config.data.sources)]
        if not all((Path(name) / "manifest.json").is_file() for name in directories):
            return None
        data = DataDirectory(Path(config.data.directory), verify=False)
        until = self.rewinds.windows_before(len(self.metrics))  # later ones may still arrive
        sources = open_sources(config.data, data, until=until)
        first = config.data.tokens[0] if config.data.tokens else 0
        if any(source.stream.readable_from > first for source in sources):
            return None
        return training_windows(
            sources,
            config.data,
            config.training.micro_batches,
            config.training.micro_batch_rows,
            until,
        )


def _since(of: FinishedRun) -> str:
    return f" from update {of.since} on, where settings last changed" if of.since else ""


def records(of: FinishedRun) -> Result:
    """Every update has its record, and the counts add up."""
    updates = [record["update"] for record in of.metrics]
    missing = sorted(set(range(len(updates))) - set(updates))
    tokens = [record["tokens"] for record in of.metrics]
    backwards = sum(later < earlier for earlier, later in itertools.pairwise(tokens))
    found = updates_in(of.directory / "checkpoints") if _has_checkpoints(of) else []
    behind = max(found, default=0)
    numbers: dict[int, list[int]] = {update: [] for update in updates}
    for record in of.blocks:
        numbers.setdefault(record["update"], []).append(record["micro_batch"])
    gaps = []
    # How many there are of an update may change at a restart.
    starts = sorted({0, *(start["update"] for start in read_records(of.directory / STARTS))})
    for first, last in itertools.pairwise([*starts, len(updates)]):
        life = [update for update in updates if first <= update < last]
        count = max((len(numbers[update]) for update in life), default=0)
        gaps += [u for u in life if not count or numbers[u] != list(range(count))]
    causes = []
    if missing or updates != sorted(set(updates)):
        text = f"metrics.jsonl lacks updates {listed(map(str, missing))} or has some twice"
        causes.append(Cause("records", text, 0.95))
    if backwards:
        causes.append(Cause("tokens", f"the token count falls {backwards} times", 0.9))
    if len(updates) < behind:
        text = f"a checkpoint has {behind} updates behind it, metrics.jsonl {len(updates)}"
        causes.append(Cause("records", text, 0.95))
    if gaps:
        text = f"blocks.jsonl lacks micro-batches of {len(gaps)} updates or has some twice, the "
        causes.append(Cause("blocks_missing", text + f"first of them update {gaps[0]}", 0.9))
    horizon = of.config.training.updates
    return result(
        "records",
        not causes,
        f"{len(updates):,} updates of {horizon:,}, {tokens[-1]:,} target tokens",
        "each once, counts add up",
        causes,
        f"{of.directory / METRICS}; was it edited, or copied while the run went on?",
        updates=len(updates),
        tokens=tokens[-1],
    )


def _has_checkpoints(of: FinishedRun) -> bool:
    return (of.directory / "checkpoints").is_dir()


def blocks(of: FinishedRun) -> Result:
    """Every block was seen as often as there are epochs, in the order that the data has."""
    name = "blocks"
    if not of.blocks:
        return skipped(name, "blocks.jsonl is empty")
    counts = Counter(block for record in of.blocks for block in record["blocks"])
    epochs = of.config.data.epochs
    often = [block for block, count in counts.items() if count > epochs]
    causes = []
    if often:
        text = f"{len(often):,} blocks were seen more than {epochs} times, such as block {often[0]}"
        causes.append(Cause("repeated_blocks", text + ": data was read again at a resume", 0.9))
    wrong: list[int] = []
    if of.windows is not None:
        by_update: dict[int, list[int]] = {}
        for record in of.blocks:
            by_update.setdefault(record["update"], []).extend(record["blocks"])
        numbers = np.unique(np.linspace(0, len(of.metrics) - 1, _WINDOWS).astype(int)).tolist()
        for update in numbers:
            # A rewind may have passed over windows.
            window = of.windows[of.rewinds.windows_before(update)]["block"]
            if window[window >= 0].tolist() != by_update.get(update):
                wrong.append(update)
    if wrong:
        text = f"update {wrong[0]} saw other blocks than its window has ({len(wrong)} such): data "
        causes.append(Cause("wrong_blocks", text + "position lost, or data changed", 0.95))
    return result(
        name,
        not causes,
        f"{len(counts):,} blocks, at most {max(counts.values())} times"
        + ("; the data is gone" if of.windows is None else ", in the data's order"),
        f"<= {epochs} times",
        causes,
        f"{of.directory / BLOCKS} about that update; recovery.jsonl and changes.jsonl",
        blocks=len(counts),
        repeated=len(often),
        wrong_updates=wrong,
    )


def rates(of: FinishedRun) -> Result:
    """Each applied rate is the schedule's, times the multiplier that controllers gave."""
    updates = of.config.training.updates
    assert updates is not None
    schedule = build_schedule(of.config.optim, updates)
    applied = [record for record in of.metrics if record["applied"]]
    wanted = np.asarray(jax.vmap(schedule)(np.arange(len(applied))))
    wrong, worst = [], 0.0
    for record, rate in zip(applied, wanted.tolist(), strict=True):
        if record["update"] < of.since:
            continue
        expected = rate * record["rate_multiplier"]
        difference = abs(record["learning_rate"] - expected) / max(expected, 1e-30)
        worst = max(worst, difference)
        if difference > _RATE_DIFFERENCE:
            wrong.append((record["update"], record["learning_rate"], expected))
    causes = []
    if wrong:
        update, found, expected = wrong[0]
        ratios = {round(found / max(expected, 1e-30), 3) for _, found, expected in wrong}
        text = f"update {update} has {found:.4g} where the schedule says {expected:.4g}"
        if len(ratios) == 1:
            text += f"; all {len(wrong)} by the same factor {ratios.pop():g}: another peak"
        causes.append(Cause("schedule", f"{text} ({len(wrong)} updates)", 0.9))
    return result(
        "rates",
        not causes,
        f"{len(applied) - len(wrong):,} of {len(applied):,} applied rates{_since(of)}",
        "the schedule's x multiplier",
        causes,
        "optim in config.yaml; changes.jsonl; decisions.jsonl",
        wrong=len(wrong),
        largest_difference=worst,
    )


def controllers(of: FinishedRun) -> Result:
    """Controllers decided what they decide when the same records are shown to them again."""
    name = "controllers"
    if of.since:
        return skipped(name, f"settings changed at update {of.since}: what was before is not known")
    config = of.config
    control, left = Control(config), list(of.evaluations)
    replayed: list[dict[str, Any]] = []
    wrong: list[str] = []

    def draw(update: int, mean: float) -> int:
        return draw_depth(config.depth, config.run.seed, update, mean) if of.recurrent else 0

    fields = ["rate_multiplier"]
    if of.recurrent:
        fields += ["depth", "backprop_depth", "mean_depth"]
    for record in of.metrics:
        update = record["update"]
        while left and left[0]["update"] <= update:
            control.read_evaluation(left.pop(0))
        settings = control.decide(update, functools.partial(draw, update))
        factor = of.rewinds.rate(update)
        if factor != 1.0:
            multiplier = settings.rate_multiplier * factor
            settings = dataclasses.replace(settings, rate_multiplier=multiplier)
        replayed += [dataclasses.asdict(decision) for decision in settings.decisions]
        for field in fields:
            if record[field] != getattr(settings, field):
                wrong.append(
                    f"update {update} has {field} {record[field]}, not {getattr(settings, field)}"
                )
        control.read_update(record)
    made = [d for d in of.decisions if d["update"] <= of.metrics[-1]["update"]]
    logged, due = ({tuple(d.items()) for d in decisions} for decisions in (made, replayed))
    differing = [d for d in (*made, *replayed) if tuple(d.items()) not in logged & due]
    causes = []
    if wrong:
        text = f"{wrong[0]} ({len(wrong)} values): the controllers were not what config.yaml says, "
        causes.append(Cause("decisions", text + "or lost their state at a resume", 0.9))
    if differing:
        first = min(differing, key=lambda d: d["update"])
        where = "logged" if first in made else "due"
        text = f"{first['controller']} at update {first['update']}: {first['old']:g} -> "
        text += f"{first['new']:g} is {where} alone ({len(differing)} such)"
        causes.append(Cause("decisions", text, 0.92))
    kinds = Counter(decision["controller"] for decision in made)
    return result(
        name,
        not causes,
        f"{len(made):,} decisions, as due"
        + (f" ({', '.join(f'{k} {n}' for k, n in kinds.items())})" if kinds else "")
        if not causes
        else f"{len(differing)} decisions and {len(wrong)} values are not as due",
        "those of a replay",
        causes,
        f"{of.directory / DECISIONS} about that update",
        decisions=len(made),
        differing=len(differing),
        wrong_values=len(wrong),
    )


def monitors(of: FinishedRun) -> Result:
    """No alarm stands at the end, and those logged are those that the figures raise."""
    name = "monitors"
    if not of.recurrent:
        return skipped(name, "the model has no depth")
    if not of.monitors:
        return skipped(name, "monitors.jsonl is empty")
    alarms = Alarms(of.config)
    wrong: list[str] = []
    for record in of.monitors:
        update, logged_beyond = record["update"], record["beyond"]
        beyond = _beyond(alarms, record) if update >= of.since else logged_beyond
        wrong += [
            f"{monitor} of update {update} is {_short(record.get(monitor))} and logged as "
            f"{'beyond' if monitor in logged_beyond else 'not beyond'} its threshold "
            f"({getattr(of.config.monitors, monitor)}, judged from update {alarms.first:,} on)"
            for monitor in TEXTS
            if (monitor in beyond) != (monitor in logged_beyond)
        ]
        alarms.follow(update, beyond)
    standing: list[str] = list(alarms.raised)
    logged: list[str] = []
    for alarm in of.alarms:
        if alarm["event"] == "raised":
            logged.append(alarm["monitor"])
        elif alarm["monitor"] in logged:
            logged.remove(alarm["monitor"])
    last = {alarm["monitor"]: alarm for alarm in of.alarms}
    causes = [
        Cause(
            f"alarm:{monitor}",
            f"{monitor} is {_short(last[monitor]['value'])} since update {last[monitor]['since']} "
            f"(threshold {last[monitor]['threshold']:g}): {last[monitor]['text']}",
            0.9,
        )
        for monitor in standing
        if monitor in last
    ]
    if wrong:
        causes.append(Cause("beyond", f"{wrong[0]} ({len(wrong)} such)", 0.95))
    if sorted(standing) != sorted(logged) and not of.since:
        text = f"alarms.jsonl leaves {listed(logged) or 'none'} standing, the figures "
        text += f"{listed(standing) or 'none'} (was monitors.window changed on the way?)"
        causes.append(Cause("alarms", text, 0.8))
    raised = sum(alarm["event"] == "raised" for alarm in of.alarms)
    early = not_judged(of.config, of.monitors)
    if early is not None and not causes:
        return skipped(name, early)
    return result(
        name,
        not causes,
        f"{raised} alarms in {len(of.monitors)} passes, {len(standing)} standing at the end",
        "none standing",
        causes,
        f"{of.directory / MONITORS}; docs/control.md",
        raised=raised,
        standing=standing,
        wrong_verdicts=len(wrong),
    )


def _beyond(alarms: Alarms, record: dict[str, Any]) -> list[Monitor]:
    """Monitors whose logged figure is beyond its threshold.

    What JSON cannot write stands as null, an overflow as well as what is not a number: of those the
    logged verdict is the one that there is.
    """
    due = alarms.beyond(record["update"], record)
    return [
        monitor
        for monitor in TEXTS
        if monitor in (record["beyond"] if record.get(monitor) is None else due)
    ]


def _short(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def checkpoint(of: FinishedRun) -> Result:
    """The newest checkpoint is whole, is the run's last state, and is finite."""
    name, look = "checkpoint", "scripts/checkpoints.py RUN verify; jaxlm/training/checkpoint.py"
    if not _has_checkpoints(of) or not updates_in(of.directory / "checkpoints"):
        cause = Cause("no_checkpoint", "the run has no checkpoint", 0.95)
        return result(name, False, "none", "whole", [cause], look)
    folder = of.directory / "checkpoints"
    newest = updates_in(folder)[-1]
    found = inspect(folder / str(newest))
    causes = []
    if found.damage:
        text = f"checkpoint {newest}: {damage_text(found.damage)}"
        causes.append(Cause("checkpoint_damaged", text, 0.95))
    if found.unverified:
        text = f"checkpoint {newest} has no manifest: damage would go unnoticed"
        causes.append(Cause("checkpoint_unverified", text, 0.9))
    horizon = of.config.training.updates
    if newest < len(of.metrics) == horizon:
        text = f"the newest is of update {newest}, the run made {len(of.metrics)}"
        causes.append(Cause("checkpoint_old", text, 0.9))
    elif found.manifest is not None and newest <= len(of.metrics):
        tokens = of.metrics[newest - 1]["tokens"] if newest else 0
        if found.manifest.tokens != tokens:
            text = f"it has {found.manifest.tokens:,} tokens behind it, metrics.jsonl {tokens:,}"
            causes.append(Cause("checkpoint_other", text, 0.9))
    finite = None
    if not found.damage:
        try:
            finite = _all_finite(of, newest)
        except Failure as failure:
            causes.append(Cause("checkpoint_damaged", str(failure), 0.95))
        if finite is False:
            causes.append(Cause("nonfinite", "its weights are not finite", 0.97))
    return result(
        name,
        not causes,
        f"update {newest}" + (", whole, weights finite" if not causes else ""),
        "whole, finite, the last state",
        causes,
        look,
        update=newest,
        finite=finite,
    )


def _all_finite(of: FinishedRun, update: int) -> bool:
    updates = of.config.training.updates
    assert updates is not None
    spec = step_spec(of.config, of.config.model.vocabulary, updates)
    abstract = jax.eval_shape(lambda: init_state(spec)).params
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with Checkpoints(of.directory / "checkpoints", read_only=True) as checkpoints:
        params = checkpoints.restore_params(update, abstract, place)
    return all(bool(jax.numpy.isfinite(leaf).all()) for leaf in jax.tree.leaves(params))


def loss_falls(of: FinishedRun) -> Result:
    """The loss at the end is below that at the beginning, and did not rise again for good."""
    losses = [r["cross_entropy"] for r in of.metrics if r["cross_entropy"] is not None]
    if not losses:
        cause = Cause("nonfinite", "no update has a finite loss", 0.95)
        return result("loss_falls", False, "not finite", "", [cause], "optim.learning_rate")
    # Ten parts whose lengths differ by one at most: the mean of a short rest would be mere noise.
    tenths = np.array_split(np.asarray(losses), min(10, len(losses)))
    parts = [float(part.mean()) for part in tenths]
    fell, limit = parts[0] - parts[-1], of.settings.loss_fall
    rose = parts[-1] - min(parts)
    causes = []
    if fell < limit:
        skips = sum(not record["applied"] for record in of.metrics)
        if skips > len(of.metrics) // 10:
            text = f"{skips} of {len(of.metrics)} updates were skipped"
            causes.append(Cause("nonfinite", text, 0.9))
        change = statistics.median(r["update_norm"] or 0.0 for r in of.metrics)
        text = f"the median update changes the weights by a norm of {change:.2g}: a rate too low"
        causes.append(Cause("rate_low", text, 0.5 if change < 1e-3 else 0.1))
        tokens = of.metrics[-1]["tokens"]
        text = f"{tokens:,} target tokens are too few, or the data is without order"
        causes.append(Cause("too_short", text, 0.2))
    if rose > limit:
        at = sum(map(len, tenths[: parts.index(min(parts))]))
        text = f"the loss was {rose:.2f} lower about update {at}: it diverged, the rate is too high"
        causes.append(Cause("rate_high", text, 0.85))
    return result(
        "loss_falls",
        not causes,
        f"by {fell:.2f} nats, from {parts[0]:.2f} to {parts[-1]:.2f} (means of a tenth)",
        f">= {limit:g}, not risen by more",
        causes,
        "curves.png; grad_norm and update_norm in metrics.jsonl",
        fall=fell,
        rise=rose,
    )


def skipped_updates(of: FinishedRun) -> Result:
    """Few updates were skipped."""
    nonfinite = [r for r in of.metrics if r["loss"] is None or r["grad_norm"] is None]
    empty = [r for r in of.metrics if not r["applied"] and r not in nonfinite]
    layers = sum(record["kept_layers"] for record in of.metrics)
    share = (len(nonfinite) + len(empty)) / len(of.metrics)
    limit = of.settings.skipped_updates
    causes = []
    if share > limit:
        if nonfinite:
            late = statistics.median(r["update"] for r in nonfinite) / len(of.metrics)
            text = (
                f"{len(nonfinite):,} updates had a loss or gradient that was not finite, half of "
            )
            text += (
                f"them in the first {late:.0%} of the run: a rate too high or too little warm-up"
            )
            causes.append(
                Cause("nonfinite", text, 0.9 * len(nonfinite) / (share * len(of.metrics)))
            )
        if empty:
            text = f"{len(empty):,} windows held no target token"
            weight = 0.9 * len(empty) / (share * len(of.metrics))
            causes.append(Cause("empty_windows", text, weight))
    return result(
        "skipped_updates",
        share <= limit,
        f"{share:.2%} ({len(nonfinite)} not finite, {len(empty)} empty), {layers} single layers",
        f"<= {limit:.0%}",
        causes,
        "grad_norm in metrics.jsonl before the first of them; optim.learning_rate",
        nonfinite=len(nonfinite),
        empty=len(empty),
    )


def data_wait(of: FinishedRun) -> Result:
    """The device did not wait for data."""
    share = statistics.median(record["data_wait_fraction"] for record in of.metrics)
    limit = of.settings.data_wait
    cause = Cause("slow_data", f"half of the updates waited for {share:.1%} or more of them", 0.9)
    return result(
        "data_wait",
        share <= limit,
        f"{share:.2%} of an update's time (median)",
        f"<= {limit:.0%}",
        [cause],
        "data.prefetch; the disk that data.directory is on",
        share=share,
    )


def depth_order(of: FinishedRun) -> Result:
    """At the last pass of the monitors, the mean depth was not worse than depth 1, nor the same."""
    name = "depth_order"
    if not of.recurrent:
        return skipped(name, "the model has no depth")
    if not of.monitors:
        return skipped(name, "monitors.jsonl is empty")
    last = of.monitors[-1]
    if last["depth"] == 1:
        return skipped(name, "a mean depth of 1")
    one, mean, limit = last["loss_1"], last["loss_mean"], of.settings.depth_order
    worse = math.inf if one is None or mean is None else mean - one
    causes = []
    if one is not None and one == mean:
        text = f"depth 1 and {last['depth']} give the same loss to the last digit: depth is ignored"
        causes.append(Cause("depth_ignored", text, 0.9))
    if worse > limit:
        text = f"depth {last['depth']} is worse than depth 1 by {worse:.2f} nats: the state drifts"
        causes.append(Cause("depth_order", text, 0.7))
    return result(
        name,
        not causes,
        f"{_short(one)} at depth 1, {_short(mean)} at {last['depth']}",
        f"not above by {limit:g}, nor the same",
        causes,
        "relative_residual and state_norm in monitors.jsonl",
        depth_1=one,
        depth_mean=mean,
    )


CHECKS: tuple[Check[FinishedRun], ...] = (
    Check("records", records),
    Check("blocks", blocks),
    Check("rates", rates),
    Check("controllers", controllers),
    Check("monitors", monitors),
    Check("checkpoint", checkpoint),
    Check("loss_falls", loss_falls),
    Check("skipped_updates", skipped_updates),
    Check("data_wait", data_wait),
    Check("depth_order", depth_order),
)


def run_checks(
    directory: Path, names: Iterable[str], advance: Callable[[int, str], None]
) -> list[Result]:
    """Make checks on a run, in their order; arguments as for preflight.run_checks."""
    of, wanted, found = FinishedRun(directory), set(names), []
    for check in CHECKS:
        if check.name in wanted:
            found.append(check.run(of))
            advance(1, check.name)
    return found
