"""Checks on the records of a short trial: loss, rates, checkpoints and speed."""

import math
import statistics
import time

import numpy as np

from jaxlm.training.checks import Cause, Result, listed, result, skipped
from jaxlm.training.manifest import damage_text
from jaxlm.training.trials import (
    INTERRUPTED,
    REPEATABLE,
    RESUMED,
    SHARPER,
    WARM,
    Trials,
    differing_leaves,
    unchanged_parts,
)


def initial_loss(of: Trials) -> Result:
    """The first loss is about that of guessing."""
    wanted, found = math.log(of.vocabulary), of.trial.records[0]["cross_entropy"]
    causes: list[Cause] = []
    if found is None:
        causes.append(Cause("nonfinite", "the first loss is not finite", 0.9))
        found = math.nan
    else:
        causes += of.upstream("loss_value", "causality", "targets", "gradients")
        # Random logits of standard deviation s cost s^2 / 2 above ln V, as long as they are small.
        logp = of.probe.log_probability
        spread = float(np.std(logp - logp.mean(axis=-1, keepdims=True))) / SHARPER
        excess = found - wanted
        if excess > 0:
            text = (
                f"logits have a standard deviation of {spread:.2g}, where 0.3 is usual: the output "
                f"layer or the final norm starts too large, which costs {excess:.2f} nats"
            )
            causes.append(Cause("output_scale", text, 0.85 if spread > 1 else 0.3))
        else:
            text = f"the loss starts {-excess:.2f} nats below guessing: the answer is in the input"
            causes.append(Cause("leak", text, 0.5))
    limit = of.settings.initial_loss
    return result(
        "initial_loss",
        abs(found - wanted) <= limit,
        f"{found:.3f}; ln {of.vocabulary:,} = {wanted:.3f}",
        f"within {limit:g}",
        causes,
        "`final_norm` and `Embedding` in jaxlm/models/layers.py; model.vocabulary_size",
        loss=found,
        expected=wanted,
    )


def loss_falls(of: Trials) -> Result:
    """The loss falls in the trial."""
    fell, limit = of.fall_at(1.0), of.settings.loss_fall
    causes: list[Cause] = []
    if fell < limit:
        if of.nonfinite:
            text = f"{of.nonfinite} of {of.settings.updates} updates were skipped: not finite"
            causes.append(Cause("nonfinite", text, 0.9))
        causes += of.upstream(
            "ids", "targets", "loss_value", "connected", "gradients", "updated", "learning_rate"
        )
        if fell > -limit:
            text = f"the loss fell by {fell:.3f} only: too few updates, or data without order"
            causes.append(Cause("too_short", text, 0.1))
    first, last = of.losses_at(1.0)[0], of.losses_at(1.0)[-1]
    return result(
        "loss_falls",
        fell >= limit,
        f"by {fell:.2f} nats in {of.settings.updates} updates, from {_shown(first)} to "
        f"{_shown(last)}",
        f">= {limit:g}",
        causes,
        "learning_rate below; the samples of the data",
        fall=fell,
    )


def _shown(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.2f}"


def updated(of: Trials) -> Result:
    """Every parameter, in each layer, is changed by the trial."""
    same, left = unchanged_parts(of.trial.before, of.trial.after)
    applied = sum(record["applied"] for record in of.trial.records)
    count = sum(map(len, of.trial.before.values()))
    causes: list[Cause] = []
    if same:
        if not applied:
            if of.nonfinite:
                text = f"all {of.settings.updates} updates were skipped: loss or gradient is not "
                causes.append(Cause("nonfinite", text + "finite", 0.95))
            else:
                text = "no update was applied: no window held a target token"
                causes.append(Cause("mask_lost", text, 0.9))
        causes += of.upstream("connected", "gradients")
        parts = sorted({name.split("/")[0] for name in same})
        text = (
            f"{left} parameters and layers stay as they were through {applied} applied "
            f"updates: {listed(same)}; the optimizer does not reach {listed(parts)}"
        )
        causes.append(Cause("frozen", text, 0.9 if applied else 0.2))
        if applied and of.update_ratio < of.settings.update_ratio_minimum:
            text = f"updates change weights by {of.update_ratio:.1e}, below their rounding"
            causes.append(Cause("rate_low", text, 0.6))
    return result(
        "updated",
        not same,
        f"{count - left} of {count} parameters and layers changed in {applied} updates",
        "all",
        causes,
        "the optimizer's masks in jaxlm/training/optimizer.py; optim.rounding",
        unchanged=same,
    )


def depth_order(of: Trials) -> Result:
    """More core steps are not worse than one, and make a difference."""
    name = "depth_order"
    if not of.recurrent:
        return skipped(name, "the model has no depth")
    by_depth = of.trial.by_depth
    if len(by_depth) < 2:
        return skipped(name, "no validation rows, or a mean depth of 1")
    one, mean = by_depth[1], by_depth[max(by_depth)]
    limit = of.settings.depth_order
    same = one == mean
    causes: list[Cause] = []
    if same:
        text = f"depth 1 and {max(by_depth)} give the same loss to the last digit: depth is ignored"
        causes.append(Cause("depth_ignored", text, 0.9))
    if not mean - one <= limit:
        text = f"more steps are worse by {mean - one:.2f} nats: the state drifts from step to step"
        causes.append(Cause("depth_order", text, 0.5))
    if same or not mean - one <= limit:
        causes += of.upstream("connected", "updated", "learning_rate", "gradients")
    return result(
        name,
        not causes,
        f"{one:.3f} at depth 1, {mean:.3f} at {max(by_depth)}",
        f"not above by {limit:g}",
        causes,
        "relative_residual and state_norm of the monitors (docs/control.md); depth.backprop",
        depth_1=one,
        depth_mean=mean,
    )


def learning_rate(of: Trials) -> Result:
    """A rate 100 times too high or too low shows in the size of updates and in other rates."""
    settings = of.settings
    falls = {factor: of.fall_at(factor) for factor in (0.1, 1.0, 10.0)}
    best = max(falls, key=lambda factor: falls[factor])
    share = falls[1.0] / falls[best] if falls[best] > 0 else 0.0
    ratio = of.update_ratio
    lowest, highest = settings.update_ratio_minimum, settings.update_ratio_maximum
    passed = share >= settings.rate_share and lowest <= ratio <= highest
    causes: list[Cause] = []
    told = ", ".join(
        f"{f'{fell:.2f}' if math.isfinite(fell) else 'not finite'} at {factor:g} x"
        for factor, fell in falls.items()
    )
    if not passed:
        causes += of.upstream("gradients")
        if ratio > highest:
            excess = min(1.0, math.log10(ratio / highest) / 1.5) if math.isfinite(ratio) else 1.0
            text = f"an update changes the weights by {ratio:.2g} of their size: the learning rate "
            causes.append(Cause("rate_high", text + "is too high", 0.75 + 0.2 * excess))
        if ratio < lowest and any(record["applied"] for record in of.trial.records):
            text = f"an update changes the weights by {ratio:.1e} of their size only: the learning "
            causes.append(Cause("rate_low", text + "rate is too low", 0.85))
        if share < settings.rate_share and best != 1.0 and falls[best] > 0:
            key, word = ("rate_high", "high") if best < 1 else ("rate_low", "low")
            text = f"the loss falls by {told} the rate: it is too {word}"
            causes.append(Cause(key, text, 0.93))
        if falls[best] <= 0:
            text = f"the loss falls at no rate ({told}): the rate is not what is wrong"
            causes.append(Cause("not_learning", text, 0.2))
    return result(
        "learning_rate",
        passed,
        f"update/weights {ratio:.1e}; the loss falls by {told} the rate",
        f"{lowest:g} to {highest:g}; >= {settings.rate_share:.0%} of the best",
        causes,
        "optim.learning_rate; grad_norm and update_norm",
        update_ratio=ratio,
        falls={f"{factor:g}": fell for factor, fell in falls.items()},
    )


# ---------------------------------------------------------------- checkpoints


def checkpoint(of: Trials) -> Result:
    """A checkpoint holds every bit of the state, and its manifest agrees."""
    restart = of.restart
    differing = differing_leaves(restart.saved, restart.loaded) if restart.error is None else []
    causes = []
    if restart.damage:
        text = f"files are not what the manifest says: {damage_text(restart.damage)}"
        causes.append(Cause("checkpoint_damaged", text, 0.95))
    if restart.error is not None:
        causes.append(Cause("checkpoint_leaf", restart.error, 0.95))
    if differing:
        text = f"{listed(differing)} came back changed: left out of the checkpoint or cast"
        causes.append(Cause("checkpoint_leaf", text, 0.96))
    size = len(restart.saved)
    return result(
        "checkpoint",
        not causes,
        f"{0 if restart.error else size - len(differing)} of {size} arrays bit for bit"
        + ("" if restart.damage else "; manifest verified"),
        "all",
        causes,
        "jaxlm/training/checkpoint.py; scripts/checkpoints.py RUN verify",
        differing=differing,
    )


def resume(of: Trials) -> Result:
    """An interrupted run is the uninterrupted one, bit for bit."""
    restart, trial = of.restart, of.trial
    name, look = "resume", "`Run.restore` in jaxlm/training/loop.py"
    if restart.error is not None:
        causes = [*of.upstream("checkpoint"), Cause("checkpoint_leaf", restart.error, 0.9)]
        return result(name, False, "cannot be resumed", "bit for bit", causes, look)
    began = differing_leaves(restart.saved, restart.resumed)
    ended = differing_leaves(trial.halfway, restart.ended)
    blocks = [a == b for a, b in zip(trial.blocks, restart.blocks, strict=False)]
    moved = len(trial.blocks) != len(restart.blocks) or not all(blocks)
    records = {
        key: [r[key] for r in trial.records[:RESUMED]] == [r[key] for r in restart.records]
        for key in REPEATABLE
    }
    wrong = [key for key, same in records.items() if not same]
    causes: list[Cause] = []
    if moved:
        where = next((i for i, same in enumerate(blocks) if not same), len(blocks))
        text = f"from micro-batch {where} on other blocks are read: the data position is lost"
        causes.append(Cause("data_position", text, 0.97))
    if began:
        parts = sorted({leaf.split("/")[0] for leaf in began})
        text = f"the resumed run begins with another {' and '.join(parts)} ({listed(began)})"
        causes.append(Cause("resume_state", text, 0.96))
    if restart.next_update != INTERRUPTED:
        text = f"it goes on at update {restart.next_update} instead of {INTERRUPTED}"
        causes.append(Cause("resume_counter", text, 0.96))
    for key, what in (("depth", "depths are drawn"), ("learning_rate", "rates are applied")):
        if key in wrong:
            causes.append(Cause(f"resume_{key}", f"after the interruption other {what}", 0.7))
    if ended or wrong:
        causes += of.upstream("checkpoint")
        text = f"the same state and data give another result ({listed([*wrong, *ended])}): the "
        causes.append(Cause("nondeterminism", text + "device does not repeat its own sums", 0.3))
    return result(
        name,
        not (moved or began or ended or wrong),
        f"{INTERRUPTED} + {RESUMED - INTERRUPTED} updates "
        + (
            f"differ from {RESUMED}: {len(ended)} arrays, {len(wrong)} of {len(records)} records"
            if moved or began or ended or wrong
            else f"equal {RESUMED}"
        ),
        "bit for bit",
        causes,
        look,
        differing=ended,
        differing_records=wrong,
    )


# ---------------------------------------------------------------- speed


def data_wait(of: Trials) -> Result:
    """The device does not wait for data."""
    records = of.trial.records[WARM:]
    share = statistics.fmean(record["data_wait_fraction"] for record in records)
    limit = of.settings.data_wait
    causes: list[Cause] = []
    if share > limit:
        reading, updating = _reading_seconds(of), _step_seconds(of)
        if reading > 0.5 * updating:
            text = f"a window takes {reading:.3g} s to read and an update {updating:.3g} s: the "
            causes.append(Cause("slow_data", text + "loader or the disk is too slow", 0.9))
        text = f"a window takes {reading:.3g} s to read and an update {updating:.3g} s: other work "
        text += "on the processor, or too little prefetched"
        causes.append(Cause("busy_host", text, 0.5))
    return result(
        "data_wait",
        share <= limit,
        f"{share:.2%} of the time",
        f"<= {limit:.0%}",
        causes,
        "data.prefetch; the disk that data.directory is on",
        share=share,
    )


def _reading_seconds(of: Trials) -> float:
    """Median seconds to make a window on the host."""
    windows, seconds = of.windows_of_trial, []
    for number in range(min(5, len(windows))):
        began = time.perf_counter()
        windows[number]
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _step_seconds(of: Trials) -> float:
    """Median seconds of a trial's update."""
    return statistics.median(record["seconds"] for record in of.trial.records[WARM:])


def speed(of: Trials) -> Result:
    """How long the run will take."""
    name, config = "speed", of.config
    updates = config.training.updates
    assert updates is not None
    horizon = updates * config.training.window_rows * config.data.sequence_length
    seconds = _step_seconds(of)
    tried = of.trial_scaled
    measured = f"{1000 * seconds:,.0f} ms an update of the trial"
    if tried.model == config.model:
        tokens = tried.training.window_rows * tried.data.sequence_length
        speed, how = tokens / seconds, "measured"
    elif of.plan is not None:
        speed, how = of.plan.tokens_per_second(0.8), f"80 % of {of.plan.device.kind}'s peak"
    else:
        return skipped(
            name, f"{measured}, which is not the run's model; name a --device for a bound"
        )
    days = horizon / speed / 86_400
    limit = of.settings.days
    causes = [
        Cause(
            "too_long",
            f"{horizon:,} tokens at {speed:,.0f} a second take {days:.3g} days",
            0.9,
        )
    ]
    return result(
        name,
        limit is None or days <= limit,
        f"{measured}; {speed:,.0f} tokens/s ({how}), {86_400 * speed / 1e6:,.4g} M a day, "
        f"{days:.3g} days for {horizon:,} tokens",
        "none set" if limit is None else f"<= {limit:g} days",
        causes,
        "training.updates; scripts/plan_memory.py shows the bound of the device",
        seconds_per_update=seconds,
        tokens_per_second=speed,
        days=days,
    )
