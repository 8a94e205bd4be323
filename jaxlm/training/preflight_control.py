"""Whether the configured controllers act where they must, and only there, on made-up curves.

Each controller is put alone into :class:`jaxlm.training.control.Control` and fed the records of a
run that must make it act, and of one that must not, in the order in which a run would. When that
is, only its kind knows: a kind without curves of its own (see CURVES) is held to what holds for
every controller, that an interruption changes nothing.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxlm.config import (
    Config,
    ControlConfig,
    CurriculumConfig,
    GradientNormConfig,
    PlateauConfig,
    RateByDepthConfig,
    SpikeConfig,
)
from jaxlm.models.depth import draw_depth
from jaxlm.training.checks import Cause, Result, result, skipped
from jaxlm.training.control import EVALUATION_FIELDS, UPDATE_FIELDS, Control, Decision, Settings

# Noise of a made-up training loss, nats: that of an update of few tokens.
_NOISE = 0.1
# A spike, nats.
_JUMP = 1.0
# Updates that a made-up run takes at most where a controller's own time is longer.
_LONGEST = 5000
# Updates of the made-up run of a kind without curves.
_SOME = 1200
# What code that is new here may raise.
_ERRORS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def _alone(config: Config, number: int) -> Config:
    """The run with one of its controllers.

    A rate that follows the depth drawn comes with the curriculum that the depth follows.
    """
    one = config.control.controllers[number]
    also = [c for c in config.control.controllers if isinstance(one, RateByDepthConfig)]
    also = [c for c in also if isinstance(c, CurriculumConfig) and c.quantity == "mean_depth"]
    control = ControlConfig(controllers=(one, *also))
    return dataclasses.replace(config, control=control)


def _run(
    config: Config,
    updates: int,
    loss: Callable[[int], float | None],
    validation: Callable[[int], float] | None = None,
    depth: Callable[[int, float], int] = lambda update, mean: round(mean),
    norm: Callable[[int], float] = lambda update: 1.0,
) -> tuple[list[Settings], list[Decision]]:
    """What a controller does over a made-up run; half-way through it is saved and restored."""
    control, every = Control(config), config.evaluation.every
    settings: list[Settings] = []
    for update in range(updates):
        if update == updates // 2:
            stored = control.state()
            control = Control(config)
            control.restore(stored)
        if validation is not None and update and update % every == 0:
            figures: dict[str, Any] = dict.fromkeys(EVALUATION_FIELDS)
            figures |= {"update": update, "cross_entropy": validation(update // every - 1)}
            control.read_evaluation(figures)
        settings.append(control.decide(update, functools.partial(depth, update)))
        record: dict[str, Any] = dict.fromkeys(UPDATE_FIELDS)
        record |= {"update": update, "loss": loss(update), "grad_norm": norm(update)}
        control.read_update(record)
    return settings, [decision for one in settings for decision in one.decisions]


def _falling(update: int) -> float:
    """A healthy training loss: from 10 down to 3, with noise."""
    noise = np.random.Generator(np.random.Philox(key=update)).normal()
    return 3.0 + 7.0 * math.exp(-update / 200) + _NOISE * float(noise)


@dataclasses.dataclass(frozen=True)
class _Found:
    """What the curves say about one controller; each list holds what is wrong."""

    acted: str
    too_dull: list[str]
    too_keen: list[str]
    # What would be wrong of a controller of any kind.
    broken: list[str] = dataclasses.field(default_factory=list)


def _plateau(config: Config, settings: PlateauConfig) -> _Found:
    # The first pass is the best so far; those after it do not improve.
    passes = settings.patience + 2
    updates = passes * config.evaluation.every + 1
    flat, made = _run(config, updates, _falling, lambda _: 4.0)
    due = (settings.patience + 1) * config.evaluation.every
    # After the fall there is one pass more: enough for a second where none has to rest.
    falls = 1 + (passes - 1 - settings.patience) // (settings.cooldown + settings.patience)
    wanted = max(settings.factor**falls, settings.minimum)
    dull, keen = [], []
    if [d.update for d in made[:1]] != [due]:
        dull.append(f"a loss that stands still for {settings.patience} passes does not lower it")
    elif not math.isclose(flat[-1].rate_multiplier, wanted):
        dull.append(f"it falls to {flat[-1].rate_multiplier:g} instead of {wanted:g}")
    _, made = _run(config, updates, _falling, lambda i: 9.0 - i * (2 * settings.improvement + 1e-3))
    if made:
        keen.append(f"a loss that falls by {2 * settings.improvement + 1e-3:g} a pass lowers it")
    horizon = config.training.updates
    if horizon is not None and due > horizon:
        dull.append(f"it cannot act before update {due:,}; the run has {horizon:,}")
    return _Found(f"fell after {settings.patience} flat passes", dull, keen)


def _spike(config: Config, settings: SpikeConfig) -> _Found:
    # By then the made-up loss is level, and its window full.
    jump = max(1200, min(settings.window + 10, _LONGEST))
    lasts = min(settings.updates, _LONGEST)
    made, decisions = _run(
        config, jump + lasts + 6, lambda u: _falling(u) + (_JUMP if u == jump else 0.0)
    )
    low = {u for u, one in enumerate(made) if one.rate_multiplier < 1}
    dull, keen = [], []
    if not set(range(jump + 2, jump + 2 + lasts)) <= low:
        dull.append(f"a jump of {_JUMP:g} nats in a level loss does not lower the rate")
    _, decisions = _run(config, jump + 10 * settings.window, _falling)
    if decisions:
        keen.append(
            f"noise of {_NOISE:g} nats alone lowers the rate {-(-len(decisions) // 2):,} times in "
            f"{jump + 10 * settings.window:,} updates"
        )
    horizon = config.training.updates
    if horizon is not None and settings.window >= horizon:
        dull.append(f"its window ({settings.window:,}) is as long as the run ({horizon:,})")
    return _Found(f"low for {len(low)} updates after a jump", dull, keen)


def _gradient_norm(config: Config, settings: GradientNormConfig) -> _Found:
    full = settings.usual + settings.recent

    def noisy(update: int) -> float:
        return _falling(update + 10_000) / 3.0  # about 1, with the noise of a level loss

    def grown(update: int) -> float:
        return noisy(update) * (1.5 * settings.begin if update >= full else 1.0)

    updates = full + settings.recent + 4
    made, _ = _run(config, updates, _falling, norm=grown)
    _, decisions = _run(config, full + 20 * settings.recent, _falling, norm=noisy)
    dull, keen = [], []
    if made[-1].rate_multiplier >= 1.0:
        dull.append(f"gradients {1.5 * settings.begin:g} times as large do not lower the rate")
    if decisions:
        keen.append(f"noise of {_NOISE / 3:.1%} in the norm alone lowers the rate")
    horizon = config.training.updates
    if horizon is not None and full >= horizon:
        dull.append(f"it judges after {full:,} updates; the run has {horizon:,}")
    return _Found(f"{made[-1].rate_multiplier:.2g} after the norm grew", dull, keen)


def _curriculum(config: Config, settings: CurriculumConfig) -> _Found:
    depth, field = config.depth, settings.quantity
    updates = min(settings.updates, _LONGEST)
    made, _ = _run(config, updates + 20, _falling)
    values = [float(getattr(one, field)) for one in made]
    # As `decide` has it: the gradient depth is never above the depth that was drawn.
    start, end = (depth.minimum, depth.mean) if field == "mean_depth" else (1, depth.max_backprop)
    end = min(end, round(depth.mean)) if field == "backprop_depth" else end
    dull, keen = [], []
    if values[0] != start or (settings.updates <= _LONGEST and values[updates] != end):
        dull.append(f"{field} goes from {values[0]:g} to {values[-1]:g}, not {start:g} to {end:g}")
    if any(later < earlier for earlier, later in itertools.pairwise(values)):
        keen.append(f"{field} falls again on the way")
    if settings.updates <= _LONGEST and len(set(values[updates:])) > 1:
        keen.append(f"{field} still changes after {settings.updates:,} updates")
    horizon = config.training.updates
    if horizon is not None and settings.updates > horizon:
        dull.append(f"it takes {settings.updates:,} updates; the run has {horizon:,}")
    return _Found(f"{field} {values[0]:g} to {values[-1]:g}", dull, keen)


def _rate_by_depth(config: Config, settings: RateByDepthConfig) -> _Found:
    """Judged at the depths that the run itself draws, as far as it goes."""
    draw = functools.partial(draw_depth, config.depth, config.run.seed)
    updates = min(config.training.updates or _LONGEST, _LONGEST)
    made, _ = _run(config, updates, _falling, depth=draw)
    dull, keen = [], []
    deepest = max(made, key=lambda one: (one.depth, one.mean_depth))
    for one in made:
        wanted = (one.mean_depth / one.depth) ** settings.power
        found = f"depth {one.depth} gives {one.rate_multiplier:g}, not {wanted:g}"
        if one.depth == one.mean_depth and one.rate_multiplier != 1:
            keen.append(found)
        elif not math.isclose(one.rate_multiplier, wanted, rel_tol=1e-6):
            dull.append(found)
    if all(one.depth == one.mean_depth for one in made):
        dull.append(
            f"every depth drawn is the mean, {deepest.depth}, so it never changes anything: "
            f"depth.distribution is {config.depth.distribution}"
        )
    acted = f"{deepest.rate_multiplier:.3g} at depth {deepest.depth}"
    return _Found(acted, list(dict.fromkeys(dull)), list(dict.fromkeys(keen)))


def _some_run(config: Config, updates: int, resumed: bool) -> list[Settings]:
    """What a controller does in a run that has a bit of everything.

    The loss falls, stands still from the middle on, jumps once, and once is not finite. `resumed`
    saves and restores before each update, so that memory outside the state never fills.
    """
    control, made = Control(config), []

    def draw(update: int, mean: float) -> int:
        recurrent = config.model.kind == "recurrent"
        return draw_depth(config.depth, config.run.seed, update, mean) if recurrent else 0

    every = config.evaluation.every
    for update in range(updates):
        if resumed:
            stored = control.state()
            control = Control(config)
            control.restore(stored)
        if every and update and update % every == 0:
            loss = _falling(min(update, updates // 2))
            figures: dict[str, Any] = dict.fromkeys(EVALUATION_FIELDS, 0.5)
            figures |= {"update": update, "tokens": 1000 * update, "cross_entropy": loss}
            figures["depth"] = round(config.depth.mean)
            control.read_evaluation(figures)
        settings = control.decide(update, functools.partial(draw, update))
        made.append(settings)
        finite = update != updates // 3
        loss = _falling(update) + (_JUMP if update == 2 * updates // 3 else 0.0)
        record: dict[str, Any] = dict.fromkeys(UPDATE_FIELDS, 1.0 if finite else None)
        record |= {"update": update, "tokens": 1000 * (update + 1), "applied": finite}
        record |= {"depth": settings.depth, "backprop_depth": settings.backprop_depth}
        if finite:
            record |= {"loss": loss, "cross_entropy": loss, "grad_norm": loss / 3.0}
        control.read_update(record)
    return made


def _other(config: Config, settings: Any) -> _Found:
    """A kind that no curve is known for: its values are numbers, and a save changes none."""
    del settings
    updates = max(_SOME, min(4 * config.evaluation.every, _LONGEST))
    broken = []
    try:
        whole = _some_run(config, updates, resumed=False)
        decisions = [decision for one in whole for decision in one.decisions]
        unusable = [d for d in decisions if not math.isfinite(d.new)]
        if unusable:
            broken.append(f"its value at update {unusable[0].update} is {unusable[0].new}")
        resumed = _some_run(config, updates, resumed=True)
        other = [n for n, pair in enumerate(zip(whole, resumed, strict=True)) if pair[0] != pair[1]]
        if other:
            broken.append(
                f"it decides otherwise at update {other[0]} when the run is saved and resumed: "
                "what it remembers must be in self.state"
            )
    except _ERRORS as error:
        decisions = []
        broken.append(f"{type(error).__name__}: {error}")
    acted = f"makes {len(decisions)} decisions in {updates:,} updates, the same across saves"
    return _Found("is broken" if broken else f"{acted}; no curve is known for it", [], [], broken)


# By settings, the curves that a kind must act on and must not: a new kind's go here.
CURVES: dict[type, Callable[[Config, Any], _Found]] = {
    PlateauConfig: _plateau,
    SpikeConfig: _spike,
    GradientNormConfig: _gradient_norm,
    CurriculumConfig: _curriculum,
    RateByDepthConfig: _rate_by_depth,
}


def check_control(config: Config) -> Result:
    """Every configured controller acts on a curve that asks for it, and not on one that does not.

    Args:
        config: with `training.updates` resolved.
    """
    name, found = "control", []
    if not config.control.controllers:
        return skipped(name, "no controllers are configured")
    for number, settings in enumerate(config.control.controllers):
        one = _alone(config, number)
        label = f"{settings.kind}[{number}]"
        found.append((label, CURVES.get(type(settings), _other)(one, settings)))
    causes = []
    for label, what in found:
        causes += [
            Cause(f"control_dull:{label}", f"{label} does not do its part: {why}", 0.9)
            for why in what.too_dull
        ]
        causes += [
            Cause(f"control_keen:{label}", f"{label} acts without need: {why}", 0.9)
            for why in what.too_keen
        ]
        causes += [
            Cause(f"control_broken:{label}", f"{label} cannot be relied on: {why}", 0.9)
            for why in what.broken
        ]
    return result(
        name,
        not causes,
        "; ".join(f"{label} {what.acted}" for label, what in found),
        "act where they must",
        causes,
        "control.controllers in the configuration; docs/control.md",
    )
