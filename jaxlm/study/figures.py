"""The figures of a study, from its journal and the records of its runs."""

import dataclasses
import functools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.config import Config
from jaxlm.files import sha256_of
from jaxlm.models.flops import flops_per_token
from jaxlm.models.match import stored_parameters
from jaxlm.study.journal import Journal
from jaxlm.study.plan import with_vocabulary
from jaxlm.study.settings import Study, run_name
from jaxlm.training.goodput import read_accounts, summary
from jaxlm.training.metrics import ALARMS, DECISIONS, EVENTS, METRICS, STARTS, read_records

Axis = str  # "tokens", "flops" or "seconds"


@dataclasses.dataclass(frozen=True)
class Point:
    """A run at the end of a cycle."""

    cycle: int
    update: int
    # Target tokens behind it.
    tokens: int
    # Training operations behind it, recomputation not counted.
    flops: float
    # Seconds of its updates: evaluation, saving and compilation left out.
    seconds: float
    # Figures of each depth, by evaluation set.
    evaluations: dict[str, list[dict[str, Any]]]
    # Most bytes on the device, or of the process, and which.
    peak_memory: int
    peak_memory_of: str
    # Per-document sums of the cycle; None where there are none, or not those that were written.
    sums: Path | None

    def at(self, axis: Axis) -> float:
        """Tokens, FLOPs or seconds behind it."""
        return float(getattr(self, axis))

    def evaluation(self, name: str, depth: int | None) -> dict[str, Any] | None:
        """Figures of an evaluation set at a depth."""
        found = (e for e in self.evaluations.get(name, []) if e["depth"] == depth)
        return next(found, None)


@dataclasses.dataclass(frozen=True)
class RunFigures:
    """What one model did with one seed."""

    model: str
    seed: int
    parameters: int
    # Of all its cycles, in order of name.
    devices: list[str]
    # By cycle, from the first.
    points: list[Point]
    # Records of alarms, of controllers' decisions, and of what else a person should know.
    alarms: list[dict[str, Any]]
    decisions: list[dict[str, Any]]
    events: list[dict[str, Any]]
    nonfinite_updates: int
    empty_windows: int
    # Times that training.update: in_backward left a single layer as it was: no finite gradient.
    kept_layers: int
    # Device, CPU threads and versions of each start, where they are not those of another.
    environments: list[str]
    # Tokens a second of the median update, and the share of time that training waited for data.
    training_speed: float
    data_wait: float
    # goodput.summary of all its processes, killed ones included.
    goodput: dict[str, Any]

    @property
    def peak_memory(self) -> int:
        """The highest of all cycles: a process that went on may have evaluated alone."""
        return max(point.peak_memory for point in self.points)


@dataclasses.dataclass(frozen=True)
class ModelFigures:
    """What one model did, over its seeds."""

    name: str
    config: Config
    runs: list[RunFigures]

    @property
    def depths(self) -> list[int | None]:
        """Depths that it was evaluated at."""
        return [e["depth"] for e in self.runs[0].points[-1].evaluations["validation"]]

    @property
    def mean_depth(self) -> int | None:
        """Of the evaluated depths the one nearest to that of training; None for a Transformer."""
        if self.config.model.kind != "recurrent":
            return None
        return min(
            (depth for depth in self.depths if depth is not None),
            key=lambda depth: (abs(depth - self.config.depth.mean), depth),
        )

    @property
    def stored(self) -> int:
        """Parameters that exist once."""
        return self.runs[0].parameters

    def unrolled(self, depth: int | None) -> int:
        """Parameters with the core counted `depth` times."""
        if depth is None:
            return self.stored
        config = self.config.model
        parts = config.recurrent
        with_more = dataclasses.replace(
            config, recurrent=dataclasses.replace(parts, core_layers=parts.core_layers + 1)
        )
        layer = stored_parameters(with_more) - stored_parameters(config)
        injection = {"add": 0, "concat": 2 * config.width**2}.get(
            parts.injection, config.width**2 + 2 * config.width
        )
        return self.stored + (depth - 1) * (parts.core_layers * layer + injection)

    def inference_flops(self, depth: int | None) -> float:
        """Operations per token of a forward pass, causal attention's need."""
        attended = (self.config.data.sequence_length + 1) / 2
        return flops_per_token(self.config.model, attended, depth or 0, 0).forward

    def training_flops(self) -> float:
        """Operations per token of training so far, over the depths that were drawn."""
        points = [run.points[-1] for run in self.runs]
        return sum(p.flops for p in points) / sum(p.tokens for p in points)

    @property
    def cycles(self) -> int:
        """Cycles that every seed has behind it."""
        return min(len(run.points) for run in self.runs)

    def mean(self, cycle: int, name: str, depth: int | None, key: str) -> float | None:
        """A figure of an evaluation, averaged over seeds; None where it is not there."""
        values = []
        for run in self.runs:
            evaluation = run.points[cycle - 1].evaluation(name, depth)
            if evaluation is None or evaluation[key] is None:
                return None
            values.append(evaluation[key])
        return statistics.fmean(values)

    def curve(self, axis: Axis, depth: int | None) -> tuple[np.ndarray, np.ndarray]:
        """Validation loss at the end of each cycle, averaged over seeds, over an axis."""
        numbers = range(1, self.cycles + 1)
        x = [statistics.fmean(r.points[c - 1].at(axis) for r in self.runs) for c in numbers]
        y = [self.mean(c, "validation", depth, "cross_entropy") for c in numbers]
        return np.array(x), np.array(y, np.float64)


@dataclasses.dataclass(frozen=True)
class Figures:
    """All figures of a study."""

    models: dict[str, ModelFigures]
    # Cycles that every run has behind it.
    cycles: int
    unigram: float


def gather(study: Study, journal: Journal) -> Figures | None:
    """The figures of a study so far; None before every run has one cycle behind it."""
    prepared = journal.find("prepared", cycle=1)
    models: dict[str, ModelFigures] = {}
    for name, config in study.models.items():
        runs = []
        for seed in study.config.seeds:
            run = _run(study, journal, name, seed)
            if run is None:
                return None
            runs.append(run)
        assert prepared is not None
        entries = with_vocabulary(config, prepared["vocabulary_size"])
        models[name] = ModelFigures(name, entries, runs)
    if prepared is None:
        return None
    cycles = min(model.cycles for model in models.values())
    return Figures(models, cycles, prepared["unigram_cross_entropy"])


def _run(study: Study, journal: Journal, model: str, seed: int) -> RunFigures | None:
    evaluated = journal.all("evaluated", model=model, seed=seed)
    prepared = journal.find("prepared", cycle=1)
    if not evaluated or prepared is None:
        return None
    name = run_name(model, seed)
    directory = study.directory / "models" / name
    config = with_vocabulary(study.models[model], prepared["vocabulary_size"])
    metrics = read_records(directory / METRICS)
    flops, seconds = _cumulative(config, metrics)
    points = []
    for event in evaluated:
        cycle = event["cycle"]
        trained = journal.find("trained", cycle=cycle, model=model, seed=seed)
        assert trained is not None
        update = trained["update"]
        sums = study.directory / "evaluations" / f"{name}-cycle-{cycle}.npz"
        whole = sums.is_file() and sha256_of(sums) == event["documents"]
        points.append(
            Point(
                cycle=cycle,
                update=update,
                tokens=trained["tokens"],
                flops=float(flops[update - 1]) if update <= len(flops) else float("nan"),
                seconds=float(seconds[update - 1]) if update <= len(seconds) else float("nan"),
                evaluations=event["evaluations"],
                peak_memory=event["peak_memory_bytes"],
                peak_memory_of=event["peak_memory_of"],
                sums=sums if whole else None,
            )
        )
    last = evaluated[-1]
    speeds = [r["tokens_per_second"] for r in metrics if r["tokens_per_second"]]
    waits = [r["data_wait_fraction"] for r in metrics]
    return RunFigures(
        model=model,
        seed=seed,
        parameters=last["parameters"],
        devices=sorted({event["device"] for event in evaluated}),
        points=points,
        alarms=read_records(directory / ALARMS),
        decisions=read_records(directory / DECISIONS),
        events=read_records(directory / EVENTS),
        nonfinite_updates=last["nonfinite_updates"],
        empty_windows=last["empty_windows"],
        kept_layers=sum(record["kept_layers"] for record in metrics),
        environments=_environments(directory),
        training_speed=statistics.median(speeds) if speeds else float("nan"),
        data_wait=statistics.fmean(waits) if waits else float("nan"),
        goodput=summary(read_accounts(directory)) or {},
    )


def _environments(directory: Path) -> list[str]:
    """What speed depends on besides the settings, of each start of a run; each once."""
    described = [start["environment"] for start in read_records(directory / STARTS)]
    texts = [
        f"{one['device']}, {one['threads']} CPU threads, "
        + ", ".join(f"{name} {version}" for name, version in one["versions"].items())
        for one in described
    ]
    return list(dict.fromkeys(texts))


def _cumulative(config: Config, metrics: Sequence[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Training operations and seconds behind each update: [updates] float64 both."""
    attended = (config.data.sequence_length + 1) / 2

    @functools.cache
    def per_token(depth: int, backprop: int) -> float:
        return flops_per_token(config.model, attended, depth, backprop).training

    tokens = np.diff([r["tokens"] for r in metrics], prepend=0).astype(np.float64)
    each = [per_token(r["depth"] or 0, r["backprop_depth"] or 0) for r in metrics]
    seconds = np.array([r["seconds"] for r in metrics], np.float64)
    return np.cumsum(tokens * np.array(each, np.float64)), np.cumsum(seconds)


@dataclasses.dataclass(frozen=True)
class EqualPoint:
    """Two curves at the same place of an axis."""

    # Where: the farthest place that both have reached.
    x: float
    # Validation loss of each there, interpolated; None where a curve begins later.
    losses: tuple[float | None, float | None]


def at_equal(a: tuple[np.ndarray, np.ndarray], b: tuple[np.ndarray, np.ndarray]) -> EqualPoint:
    """Losses of two models at the largest x that both have reached.

    Between the ends of cycles a curve is a straight line over the logarithm of x; before the first
    it is not known.
    """
    x = float(min(a[0][-1], b[0][-1]))

    def at(curve: tuple[np.ndarray, np.ndarray]) -> float | None:
        if not x >= curve[0][0] * (1 - 1e-9):
            return None
        return float(np.interp(np.log(x), np.log(curve[0]), curve[1]))

    return EqualPoint(x, (at(a), at(b)))
