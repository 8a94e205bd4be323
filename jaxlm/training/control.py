"""Control of learning rate and depth during training, from what has been read so far.

A controller owns one quantity. It reads records of updates and of validation passes, keeps what it
has to remember in a dict of plain values, and says what its quantity is to be at an update. Values
change, never shapes: the compiled step takes all three quantities as scalars.

What applies when is fixed, so that a run that was interrupted anywhere goes on as if it had not
been. The record of update i is read while update i + 1 runs, and counts from update i + 2 on. The
figures of a validation pass after u updates count from update u on, the next one. Records that were
read ahead of that, as before a save, wait in a queue that is part of the checkpoint.
"""

import dataclasses
import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from jaxlm.config import (
    Config,
    CurriculumConfig,
    DepthConfig,
    GradientNormConfig,
    PlateauConfig,
    RateByDepthConfig,
    SpikeConfig,
)
from jaxlm.errors import UserError
from jaxlm.models.depth import curriculum
from jaxlm.training.rewind import median_and_deviation

Quantity = Literal["rate_multiplier", "mean_depth", "backprop_depth"]

# What controllers see of a record: nothing of it depends on the clock or on the machine's load.
UPDATE_FIELDS = (
    "update",
    "tokens",
    "loss",
    "cross_entropy",
    "grad_norm",
    "update_norm",
    "core_update_norm",
    "applied",
    "depth",
    "backprop_depth",
)
EVALUATION_FIELDS = ("update", "tokens", "depth", "cross_entropy", "top1", "top5")


class Drawn(NamedTuple):
    """The depth of an update, known before its learning rate; zeros for a Transformer."""

    # Mean that the depth was drawn with.
    mean: float
    # Core steps.
    depth: int


class Controller:
    """One quantity and how it follows from what was read: derive from this.

    `state` must hold all that a controller remembers, as values that JSON has: it goes into the
    checkpoint, and comes back from it where type and settings are the same.

    Args:
        settings: a dataclass of plain values, from config.py.
    """

    # What is controlled. A multiplier takes part in a product; of the others there is one.
    quantity: Quantity = "rate_multiplier"

    def __init__(self, settings: Any):
        self.settings = settings
        self.state: dict[str, Any] = {}

    def read_update(self, record: dict[str, Any]) -> None:
        """Take the record of an update, with UPDATE_FIELDS; None stands for what is not finite."""

    def read_evaluation(self, record: dict[str, Any]) -> None:
        """Take the record of a validation pass, with EVALUATION_FIELDS."""

    def decide(self, update: int, drawn: Drawn | None) -> tuple[float, str]:
        """The quantity at an update, and why.

        Args:
            update: its number, from 0.
            drawn: its depth; None where the quantity is what the depth is drawn from.
        """
        raise NotImplementedError


class Curriculum(Controller):
    """Mean depth or gradient depth as a function of the update; see CurriculumConfig."""

    def __init__(self, settings: CurriculumConfig, depth: DepthConfig):
        super().__init__(settings)
        self.depth, self.quantity = depth, settings.quantity

    def decide(self, update: int, drawn: Drawn | None) -> tuple[float, str]:
        """The point of the curve."""
        made = min(update, self.settings.updates)
        why = f"{made} of the curriculum's {self.settings.updates} updates are made"
        return curriculum(self.settings, self.depth, update), why


class RateByDepth(Controller):
    """(mean depth / depth drawn) ** power; see RateByDepthConfig."""

    def decide(self, update: int, drawn: Drawn | None) -> tuple[float, str]:
        """The multiplier of the depth drawn."""
        assert drawn is not None
        multiplier = (drawn.mean / drawn.depth) ** self.settings.power
        return multiplier, f"depth {drawn.depth} was drawn with mean {drawn.mean:.4g}"


class Plateau(Controller):
    """A multiplier that falls when the validation loss stands still; see PlateauConfig.

    The best loss moves only when it is beaten by `improvement`, so that many small gains together
    count as one.
    """

    def __init__(self, settings: PlateauConfig):
        super().__init__(settings)
        self.state = {"multiplier": 1.0, "best": None, "bad": 0, "cooldown": 0, "why": "start"}

    def read_evaluation(self, record: dict[str, Any]) -> None:
        """Count passes without improvement."""
        settings, state, loss = self.settings, self.state, record["cross_entropy"]
        best = state["best"]
        if loss is not None and (best is None or loss < best - settings.improvement):
            state |= {"best": loss, "bad": 0}
        elif state["cooldown"] == 0:
            state["bad"] += 1
        state["cooldown"] = max(0, state["cooldown"] - 1)
        if state["bad"] >= settings.patience:
            state["why"] = (
                f"validation loss {loss} after {record['update']} updates: {state['bad']} passes "
                f"in a row were not {settings.improvement:g} below the best, {state['best']}"
            )
            multiplier = max(state["multiplier"] * settings.factor, settings.minimum)
            state |= {"multiplier": multiplier, "bad": 0, "cooldown": settings.cooldown}

    def decide(self, update: int, drawn: Drawn | None) -> tuple[float, str]:
        """The multiplier so far."""
        return self.state["multiplier"], self.state["why"]


class Spike(Controller):
    """A lower multiplier for some updates after a jump of the loss; see SpikeConfig."""

    def __init__(self, settings: SpikeConfig):
        super().__init__(settings)
        # The last losses; the first update that is free again; why it is not yet.
        self.state = {"losses": [], "until": 0, "why": "start"}

    def read_update(self, record: dict[str, Any]) -> None:
        """Compare a loss with those before it."""
        settings, state, loss = self.settings, self.state, record["loss"]
        losses: list[float] = state["losses"]
        why = None
        if loss is None:
            why = f"the loss of update {record['update']} was not finite"
        elif len(losses) == settings.window:
            median, deviation = median_and_deviation(losses)
            limit = median + settings.deviations * deviation
            if loss > limit:
                why = (
                    f"loss {loss:.4f} of update {record['update']} is above {limit:.4f}: median "
                    f"{median:.4f} + {settings.deviations:g} x deviation {deviation:.4f}"
                )
        if why is not None:
            state |= {"until": record["update"] + 2 + settings.updates, "why": why}
        if loss is not None:
            state["losses"] = [*losses, loss][-settings.window :]

    def decide(self, update: int, drawn: Drawn | None) -> tuple[float, str]:
        """The lower multiplier until enough updates are over."""
        if update < self.state["until"]:
            return self.settings.factor, self.state["why"]
        return 1.0, f"{self.settings.updates} updates since the spike are over"


class GradientNorm(Controller):
    """A multiplier below 1 while gradients are larger than usual; see GradientNormConfig."""

    def __init__(self, settings: GradientNormConfig):
        super().__init__(settings)
        self.state = {"norms": [], "multiplier": 1.0, "why": "start"}

    def read_update(self, record: dict[str, Any]) -> None:
        """Compare the recent norms with those before them."""
        if record["grad_norm"] is None:
            return
        settings, state = self.settings, self.state
        norms = [*state["norms"], record["grad_norm"]][-(settings.usual + settings.recent) :]
        state["norms"] = norms
        if len(norms) < settings.usual + settings.recent:
            return
        usual = statistics.median(norms[: settings.usual])
        recent = statistics.median(norms[settings.usual :])
        following = state["multiplier"] < 1.0
        if usual <= 0.0 or recent <= (settings.end if following else settings.begin) * usual:
            state["multiplier"] = 1.0
        else:
            ratio = (usual / recent) ** settings.power
            state["multiplier"] = min(max(ratio, settings.minimum), 1.0)
        state["why"] = (
            f"after update {record['update']} the recent gradient norm is {recent:.4g}, the usual "
            f"one {usual:.4g}"
        )

    def decide(self, update: int, drawn: Drawn | None) -> tuple[float, str]:
        """The multiplier of the last norms."""
        return self.state["multiplier"], self.state["why"]


def build(config: Config) -> list[Controller]:
    """The controllers that a configuration names: a new kind is added here and in config.py."""
    controllers: list[Controller] = []
    for settings in config.control.controllers:
        if isinstance(settings, CurriculumConfig):
            controllers.append(Curriculum(settings, config.depth))
        elif isinstance(settings, RateByDepthConfig):
            controllers.append(RateByDepth(settings))
        elif isinstance(settings, PlateauConfig):
            controllers.append(Plateau(settings))
        elif isinstance(settings, GradientNormConfig):
            controllers.append(GradientNorm(settings))
        elif isinstance(settings, SpikeConfig):
            controllers.append(Spike(settings))
        else:
            raise TypeError(f"{type(settings).__name__}: its controller is missing in {__name__}")
    return controllers


@dataclasses.dataclass(frozen=True)
class Decision:
    """A controller's quantity changed."""

    # First update that the new value applies to.
    update: int
    # Kind, and place in control.controllers.
    controller: str
    quantity: Quantity
    # The controller's own value, before limits and before multipliers are multiplied.
    old: float
    new: float
    why: str


@dataclasses.dataclass(frozen=True)
class Settings:
    """What an update is made with."""

    rate_multiplier: float
    # Within [depth.minimum, depth.maximum].
    mean_depth: float
    # Core steps n, and those with gradient k <= min(n, depth.max_backprop); 0 for a Transformer.
    depth: int
    backprop_depth: int
    # What has changed since the update before.
    decisions: tuple[Decision, ...]


class Control:
    """All controllers of a run.

    Args:
        config: of the run.
        controllers: instead of those that the configuration names.

    Raises:
        UserError: several of them set one depth.
    """

    def __init__(self, config: Config, controllers: Sequence[Controller] | None = None):
        self.depth = config.depth
        self.controllers = build(config) if controllers is None else list(controllers)
        self._neutral: dict[Quantity, float] = {
            "rate_multiplier": 1.0,
            "mean_depth": config.depth.mean,
            "backprop_depth": float(config.depth.max_backprop),
        }
        for quantity in ("mean_depth", "backprop_depth"):
            owners = [_label(self.controllers[n], n) for n in self._of(quantity)]
            if len(owners) > 1:
                raise UserError(
                    f"control.controllers: {' and '.join(owners)} set {quantity}; keep one of them"
                )
        self._values = [self._neutral[controller.quantity] for controller in self.controllers]
        # Records that do not count yet: (first update that they count for, kind, record).
        self._waiting: list[tuple[int, str, dict[str, Any]]] = []

    def read_update(self, record: dict[str, Any]) -> None:
        """Take the record of an update; it counts from the update after the next on."""
        seen = {field: record[field] for field in UPDATE_FIELDS}
        self._waiting.append((record["update"] + 2, "update", seen))

    def read_evaluation(self, record: dict[str, Any]) -> None:
        """Take the record of a validation pass; it counts from the next update on."""
        seen = {field: record[field] for field in EVALUATION_FIELDS}
        self._waiting.append((record["update"], "evaluation", seen))

    def decide(self, update: int, draw: Callable[[float], int]) -> Settings:
        """What an update is made with; to be called once for each, in order.

        Args:
            update: its number, from 0.
            draw: gives the update's depth for a mean depth; 0 for a Transformer.
        """
        self._release(update)
        decisions: list[Decision] = []
        bounds = self.depth
        values = dict(self._neutral)
        for number in self._of("mean_depth", "backprop_depth"):
            quantity = self.controllers[number].quantity
            values[quantity] = self._ask(number, update, None, decisions)
        mean = min(max(values["mean_depth"], float(bounds.minimum)), float(bounds.maximum))
        depth = draw(mean)
        multiplier = 1.0
        for number in self._of("rate_multiplier"):
            multiplier *= self._ask(number, update, Drawn(mean, depth), decisions)
        backprop = min(max(round(values["backprop_depth"]), 1), bounds.max_backprop)
        return Settings(multiplier, mean, depth, min(depth, backprop), tuple(decisions))

    def _of(self, *quantities: Quantity) -> list[int]:
        return [i for i, c in enumerate(self.controllers) if c.quantity in quantities]

    def _release(self, update: int) -> None:
        """Show the controllers what counts by now, in an order that no interruption changes."""
        due = [entry for entry in self._waiting if entry[0] <= update]
        self._waiting = [entry for entry in self._waiting if entry[0] > update]
        for _, kind, record in sorted(due, key=lambda entry: (entry[0], entry[1] == "evaluation")):
            for controller in self.controllers:
                if kind == "update":
                    controller.read_update(record)
                else:
                    controller.read_evaluation(record)

    def _ask(
        self, number: int, update: int, drawn: Drawn | None, decisions: list[Decision]
    ) -> float:
        controller, old = self.controllers[number], self._values[number]
        value, why = controller.decide(update, drawn)
        if value != old:
            kind = type(controller).__name__
            name = f"{kind}[{number}]"
            decisions.append(Decision(update, name, controller.quantity, old, value, why))
        self._values[number] = value
        return value

    def state(self) -> dict[str, Any]:
        """All that the next decisions depend on, as plain values for a checkpoint's metadata."""
        controllers = [
            {"is": _identity(controller), "state": controller.state, "value": value}
            for controller, value in zip(self.controllers, self._values, strict=True)
        ]
        # A copy, because a checkpoint is written while training goes on.
        return json.loads(json.dumps({"controllers": controllers, "waiting": self._waiting}))

    def restore(self, stored: dict[str, Any]) -> None:
        """Go back to a state; controllers whose settings are not the stored ones begin anew."""
        self._waiting = [(due, kind, record) for due, kind, record in stored["waiting"]]
        left = list(stored["controllers"])
        for number, controller in enumerate(self.controllers):
            for entry in left:
                if entry["is"] == _identity(controller):
                    controller.state, self._values[number] = entry["state"], entry["value"]
                    left.remove(entry)
                    break


def _label(controller: Controller, number: int) -> str:
    """What a configuration calls it, and its place there."""
    return f"{getattr(controller.settings, 'kind', type(controller).__name__)}[{number}]"


def _identity(controller: Controller) -> list[Any]:
    """Type and settings as plain values: what a stored state belongs to."""
    settings = json.loads(json.dumps(dataclasses.asdict(controller.settings)))
    return [type(controller).__name__, settings]
