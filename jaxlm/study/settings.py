"""Settings of a study, and the configuration of each of its runs.

A study file has three parts, and a fourth where models learn from a teacher::

    study:      name, cycles, tokens per cycle, seeds, depths, ...
    settings:   of every model, as in a run's file
    models:     NAME: {config: [files of a run], settings: {what differs}}
    teacher:    run: DIR or hf: NAME, and what is kept of its predictions

or, to compare optimizers, `sweep` in place of `models`: one model, several optimizers, each with as
many learning rates as the others. A model's settings are its files, the study's `settings` and its
own `settings`, merged in this order; what would let models see different data is refused. All of
them learn from the teacher but those that set `distillation: {cache: null}`.
"""

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from jaxlm.config import (
    Config,
    Name,
    Positive,
    Rate,
    Seed,
    Text,
    from_tree,
    merged,
    read_tree,
    read_word,
    read_yaml,
    to_tree,
    tree_to_yaml,
)
from jaxlm.distillation.settings import TeacherConfig
from jaxlm.errors import UserError

_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

# The study decides these; a model's own file may set them, to be run alone.
DECIDED = (
    r"run\..*",
    r"data\.(directory|sources|tokens|validation_tokens|epochs)",
    r"training\.updates",
    r"evaluation\.depths",
)
# And this, where there is a teacher; null leaves a model without it.
CACHE = "distillation.cache"
# What must be equal in all models, so that they see the same rows in the same order.
EQUAL = (r"prepare\.(?!processes$).*", r"data\.(?!prefetch$).*")
# What may be set otherwise when a study goes on: of the study, and of its models.
FREE_OF_STUDY = r"name|directory|disk|device|reclaim"
FREE_OF_MODELS = (
    r"prepare\.processes|data\.(directory|prefetch)|model\.(attention|remat)|loss\.chunk_tokens|"
    r"training\.(micro_batch_rows|micro_batches|block_inputs|max_nonfinite_updates)|"
    r"evaluation\.batch_rows|(checkpoint|logging|profile|run)\..*"
)
# Of the teacher: where it is, and how its work is cut. Its cache knows whether it is the same.
FREE_OF_TEACHER = r"run|batch_rows|chunk_tokens|parameters"


@dataclass(frozen=True, config=_STRICT)
class StudyConfig:
    """What is compared, on how much, and how."""

    # Training tokens of each cycle: a multiple of the tokens of an update and of
    # data.shuffle_tokens, which is as many unless it is set.
    tokens_per_cycle: Positive
    # Directory name of the study under `directory`.
    name: Name = "study"
    # Parent directory of all studies.
    directory: Text = "studies"
    # Cycles. Schedules cover all of them from the first.
    cycles: Positive = 5
    # Seeds of weights, dropout, initial states and depth draws: each model is trained once with
    # each. The order of the data is that of data.seed for all.
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1)] = (42,)
    # Core steps that recurrent models are evaluated at.
    depths: Annotated[tuple[Positive, ...], Field(min_length=1)] = (1, 3, 6, 12)
    # The model that the others are compared with; null is the last one.
    reference: Name | None = None
    # Smallest difference, in nats per token, that counts where each model has one seed.
    margin: Rate = 0.01
    # Also evaluate, after each cycle, on the validation documents that came with its tokens: where
    # the study prepares them.
    held_out_windows: bool = False
    # Further data directories whose validation documents are evaluated, by name; never written to.
    evaluation_data: dict[Name, Text] = dataclasses.field(default_factory=dict)
    # Remove the tokens of a cycle once every model is past them.
    reclaim: bool = True
    # Bytes on disk that the study may take, in GB of 10^9; null is what is free.
    disk: Annotated[float, Field(gt=0.0)] | None = None
    # GPU that --plan compiles for, see scripts/plan_memory.py.
    device: Name = "rtx3090"


@dataclass(frozen=True, config=_STRICT)
class ModelEntry:
    """One of the models: the settings of a run."""

    # Files of settings, merged from left to right.
    config: tuple[Text, ...] = ()
    # Settings that win over the files and over the study's.
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, config=_STRICT)
class OptimizerEntry:
    """One of the optimizers of a sweep."""

    # Learning rates that it is tried with.
    learning_rates: Annotated[tuple[Annotated[float, Field(gt=0.0)], ...], Field(min_length=1)]
    # Settings that choose it, such as {optim: {name: adamw}}.
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, config=_STRICT)
class SweepConfig:
    """One model with several optimizers, each at each of its learning rates."""

    # The model.
    model: ModelEntry
    # Optimizers by name.
    optimizers: Annotated[dict[Name, OptimizerEntry], Field(min_length=1)]


@dataclass(frozen=True, config=_STRICT)
class StudyFile:
    """A study as it is written down."""

    # See StudyConfig.
    study: StudyConfig
    # Settings of every model.
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    # Models by name, in the order in which they are trained.
    models: dict[Name, ModelEntry] = dataclasses.field(default_factory=dict)
    # In place of models: optimizers.
    sweep: SweepConfig | None = None
    # What models learn from beside the text; null: nothing.
    teacher: TeacherConfig | None = None


@dataclasses.dataclass(frozen=True)
class Study:
    """A study that was found fit to begin."""

    config: StudyConfig
    # By model, in the order of training; `run` names neither model nor seed yet.
    models: dict[str, Config]
    # Optimizer and learning rate of each model of a sweep; empty where there is none.
    sweep: dict[str, tuple[str, float]]
    # Updates of a cycle.
    updates_per_cycle: int
    # What models learn from whose `distillation.cache` is not null.
    teacher: TeacherConfig | None

    @property
    def directory(self) -> Path:
        """The study's folder."""
        return Path(self.config.directory) / self.config.name

    @property
    def own_data(self) -> bool:
        """The study prepares its data itself, and may reclaim them."""
        return bool(self.first.prepare.inputs)

    @property
    def data_directory(self) -> Path:
        """Where the tokens are."""
        return self.directory / "data" if self.own_data else Path(self.first.data.directory)

    @property
    def teacher_directory(self) -> Path:
        """The cache of the teacher's predictions, always inside the study's folder."""
        assert self.teacher is not None
        parent = self.data_directory if self.own_data else self.directory
        return parent / f"teacher-{self.teacher.cache_name}"

    @property
    def measured(self) -> list[str]:
        """The models whose divergence from the teacher is measured: the students among them."""
        if self.teacher is None:
            return []
        return [n for n, config in self.models.items() if config.distillation.cache is not None]

    @property
    def students(self) -> list[str]:
        """The models that learn from the teacher."""
        return [name for name in self.measured if self.models[name].distillation.alpha > 0]

    @property
    def first(self) -> Config:
        """The first model's settings; those of the data are all models'."""
        return next(iter(self.models.values()))

    @property
    def tokens(self) -> int:
        """Training tokens of all cycles."""
        return self.config.cycles * self.config.tokens_per_cycle

    @property
    def updates(self) -> int:
        """Updates of all cycles."""
        return self.config.cycles * self.updates_per_cycle

    @property
    def reference(self) -> str:
        """The model that the others are compared with."""
        return self.config.reference or list(self.models)[-1]

    @property
    def runs(self) -> list[tuple[str, int]]:
        """Model and seed of each run, in the order of training."""
        return [(model, seed) for model in self.models for seed in self.config.seeds]

    def run_config(self, model: str, seed: int, validation_tokens: int) -> Config:
        """The whole configuration of a run, the same in every cycle."""
        config = self.models[model]
        if self.sweep:  # a rate that is too high is a result, and ends no study
            unlimited = dataclasses.replace(config.training, max_nonfinite_updates=self.updates + 1)
            config = dataclasses.replace(config, training=unlimited)
        if model in self.measured:
            cache = str(self.teacher_directory)
            distillation = dataclasses.replace(config.distillation, cache=cache)
            config = dataclasses.replace(config, distillation=distillation)
        return dataclasses.replace(
            config,
            run=dataclasses.replace(
                config.run,
                name=run_name(model, seed),
                directory=str(self.directory / "models"),
                seed=seed,
            ),
            data=dataclasses.replace(
                config.data,
                directory=str(self.data_directory),
                validation_tokens=validation_tokens,
            ),
        )

    def tree(self) -> dict[str, Any]:
        """Everything as plain values: what study.yaml holds."""
        return {
            "study": {
                name: _plain(getattr(self.config, name))
                for name in (field.name for field in dataclasses.fields(self.config))
            },
            "sweep": {name: list(entry) for name, entry in self.sweep.items()},
            "models": {name: to_tree(config) for name, config in self.models.items()},
            **({} if self.teacher is None else {"teacher": self._teacher_tree()}),
        }

    def _teacher_tree(self) -> dict[str, Any]:
        fields = dataclasses.fields(TeacherConfig)
        return {field.name: getattr(self.teacher, field.name) for field in fields}

    def yaml(self) -> str:
        """The text of study.yaml."""
        return tree_to_yaml(self.tree())


def run_name(model: str, seed: int) -> str:
    """Folder of a run under the study's `models`."""
    return f"{model}-{seed}"


def read_study(path: Path, overrides: Sequence[str] = ()) -> Study:
    """Read a study file and check that its models can be compared.

    Args:
        path: the file.
        overrides: words such as ``study.cycles=2`` that win over it.

    Raises:
        UserError: one line for each thing that is wrong.
    """
    tree, where = merged([read_yaml(path), *(read_word(word) for word in overrides)])
    file = read_tree(StudyFile, tree, where)
    if bool(file.models) == (file.sweep is not None):
        raise UserError(f"{path}: expected either 'models' or 'sweep', with something in it")
    places = (tree, where)
    if file.sweep is not None:
        models, sweep = _sweep_models(path, file, file.sweep, places)
    else:
        models = {
            name: _model(file, entry, [("settings",), ("models", name, "settings")], places)
            for name, entry in file.models.items()
        }
        sweep = {}
    config = file.study
    if sweep and config.reference is not None:
        raise UserError(
            f"{path}: study.reference: optimizers are compared with the first of the sweep; remove "
            f"it, and put that one first"
        )
    if config.reference is not None and config.reference not in models:
        raise UserError(
            f"{path}: study.reference is {config.reference}; the models are {', '.join(models)}"
        )
    if len(set(config.seeds)) < len(config.seeds) or len(set(config.depths)) < len(config.depths):
        raise UserError(f"{path}: study.seeds or study.depths repeats a value")
    if len(models) < 2:
        raise UserError(f"{path}: there is nothing to compare: a study needs two models")
    names = [run_name(model, seed) for model in models for seed in config.seeds]
    if len(set(names)) < len(names):
        raise UserError(f"{path}: two runs would be called alike ({', '.join(names)}); rename one")
    _refuse_unequal(path, models)
    updates = _updates_per_cycle(path, config, models)
    study = Study(config, models, sweep, updates, file.teacher)
    if config.held_out_windows and not study.own_data:
        raise UserError(
            f"{path}: study.held_out_windows: no validation documents come with a cycle of data "
            f"that are prepared already; remove it, or set prepare.inputs"
        )
    if file.teacher is not None:
        _refuse_without_use(path, study)
    return study


def _refuse_without_use(path: Path, study: Study) -> None:
    """Refuse a teacher that nobody learns from, or whose tokenizer the data cannot have."""
    if not study.measured:
        raise UserError(f"{path}: teacher: no model learns from it; remove it, or a cache: null")
    if study.own_data and study.first.prepare.tokenizer is None:
        raise UserError(
            f"{path}: teacher: ids must mean the same to it; set prepare.tokenizer in the study's "
            f"settings to its tokenizer's file (of a run, tokenizer.json or tokenizer.model in its "
            f"data.directory)"
        )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _sweep_models(
    path: Path, file: StudyFile, sweep: SweepConfig, places: tuple[dict, dict[str, str]]
) -> tuple[dict[str, Config], dict[str, tuple[str, float]]]:
    """A model for each optimizer and learning rate."""
    counts = {name: len(entry.learning_rates) for name, entry in sweep.optimizers.items()}
    if len(set(counts.values())) > 1:
        found = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise UserError(
            f"{path}: sweep: every optimizer gets as many learning rates as the others: {found}"
        )
    models, chosen = {}, {}
    for name, entry in sweep.optimizers.items():
        for rate in entry.learning_rates:
            model = f"{name}-lr{rate:g}".replace("+", "")  # as in 1e+30: names a folder
            if model in models:
                raise UserError(f"{path}: sweep: {name} repeats the learning rate {rate:g}")
            layers = [
                ("settings",),
                ("sweep", "model", "settings"),
                ("sweep", "optimizers", name, "settings"),
            ]
            config = _model(file, sweep.model, layers, places, {"learning_rate": rate})
            models[model], chosen[model] = config, (name, rate)
    return models, chosen


def _model(
    file: StudyFile,
    entry: ModelEntry,
    layers: list[tuple[str, ...]],
    places: tuple[dict[str, Any], dict[str, str]],
    optim: dict[str, Any] | None = None,
) -> Config:
    """The settings of a model: its files, then those of the study file in the order of `layers`."""
    study = file.study
    tree, where = places
    found = [read_yaml(path) for path in entry.config]
    of_study = []
    for path in layers:
        part: Any = tree
        for key in path:
            part = part.get(key) or {} if isinstance(part, dict) else {}
        prefix = ".".join(path) + "."
        at = {k.removeprefix(prefix): v for k, v in where.items() if k.startswith(prefix)}
        of_study.append((part, at))
    horizon = study.cycles * study.tokens_per_cycle
    decided: dict[str, Any] = {
        "data": {"tokens": [0, horizon], "validation_tokens": None, "epochs": 1, "sources": []},
        "training": {"updates": None},
        "evaluation": {"depths": list(study.depths)},
    }
    if optim is not None:
        decided["optim"] = optim
    if file.teacher is not None and not _without_teacher(of_study):
        decided["distillation"] = {"cache": f"teacher-{file.teacher.cache_name}"}
    config = from_tree(*merged([*found, *of_study, (decided, {})]))
    for part, at in of_study:
        _refuse_decided(part, at, bool(config.prepare.inputs))
    if config.rewind.response != "off":
        raise UserError(
            "rewind.response: a study's runs cannot go back, to tokens that may be gone; leave it "
            "off (control.controllers has a spike controller)"
        )
    data = dataclasses.replace(
        config.data, shuffle_tokens=config.data.shuffle_tokens or study.tokens_per_cycle
    )
    rows = config.training.window_rows * data.sequence_length
    updates = max(horizon // rows, 1)
    try:  # the schedule against the horizon
        training = dataclasses.replace(config.training, updates=updates)
        return dataclasses.replace(config, data=data, training=training)
    except ValueError as error:
        raise UserError(f"{error}; the study has {updates} updates") from None


def _without_teacher(of_study: Sequence[tuple[dict[str, Any], dict[str, str]]]) -> bool:
    """Whether the study's settings of a model say `distillation: {cache: null}`."""
    found = [leaves(part).get(CACHE, "") for part, _ in of_study]
    for (_, at), cache in zip(of_study, found, strict=True):
        if cache not in ("", None):
            place = f"{at[CACHE]}: " if at.get(CACHE) else ""
            raise UserError(
                f"{place}'{CACHE}' is decided by the study, which has a teacher; remove it, or set "
                f"it to null for a model that does without"
            )
    return None in found


def leaves(tree: Any, path: str = "") -> dict[str, Any]:
    """Values of nested settings by dotted key."""
    if not isinstance(tree, dict) or not tree:
        return {path: tree}
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= leaves(value, f"{path}.{key}" if path else str(key))
    return found


def _refuse_decided(settings: dict[str, Any], where: dict[str, str], inputs: bool) -> None:
    for key in leaves(settings) if settings else ():
        allowed = key == "data.directory" and not inputs
        if any(re.fullmatch(pattern, key) for pattern in DECIDED) and not allowed:
            at = f"{where[key]}: " if where.get(key) else ""
            hint = "; remove it"
            if key == "data.directory":
                hint += ", or prepare.inputs, to read data that are prepared already"
            raise UserError(f"{at}'{key}' is decided by the study{hint}")


def _refuse_unequal(path: Path, models: dict[str, Config]) -> None:
    """Refuse models that would see different rows, or the same rows in another order."""
    (first, config), *others = models.items()
    wanted = leaves(to_tree(config))
    lines = []
    for name, other in others:
        found = leaves(to_tree(other))
        lines += [
            f"{path}: {key} is {wanted.get(key)!r} in {first} and {found.get(key)!r} in {name}"
            for key in dict.fromkeys((*wanted, *found))
            if wanted.get(key) != found.get(key)
            and any(re.fullmatch(pattern, key) for pattern in EQUAL)
            and (key != "data.directory" or not config.prepare.inputs)
        ]
        rows = [c.training.window_rows for c in (config, other)]
        if rows[0] != rows[1]:
            lines.append(
                f"{path}: an update has {rows[0]} rows in {first} and {rows[1]} in {name} "
                f"(training.micro_batch_rows * training.micro_batches)"
            )
    if lines:
        lines.append(
            f"{path}: the models would not see the same blocks; put what is of the data into the "
            f"study's settings"
        )
        raise UserError("\n".join(lines))
    if config.data.layout != "packed":
        raise UserError(
            f"{path}: data.layout is {config.data.layout}; a study needs packed, where a cycle is "
            f"a whole number of rows"
        )


def _updates_per_cycle(path: Path, study: StudyConfig, models: dict[str, Config]) -> int:
    config = next(iter(models.values()))
    window = config.training.window_rows * config.data.sequence_length
    shuffled = config.data.shuffle_tokens
    assert shuffled is not None
    for what, size in (("the tokens of an update", window), ("data.shuffle_tokens", shuffled)):
        if study.tokens_per_cycle % size:
            low = study.tokens_per_cycle // size * size
            near = f"{low:,} or {low + size:,}" if low else f"{size:,}"
            raise UserError(
                f"{path}: study.tokens_per_cycle ({study.tokens_per_cycle:,}) is no multiple of "
                f"{what} ({size:,}); the nearest are {near}"
            )
    return study.tokens_per_cycle // window


def differing(models: dict[str, Config]) -> dict[str, list[Any]]:
    """Settings that are not the same in all models, by dotted key, in the order of the models."""
    trees = [leaves(to_tree(config)) for config in models.values()]
    keys = dict.fromkeys(key for tree in trees for key in tree)
    found = {key: [tree.get(key) for tree in trees] for key in keys}
    return {
        key: values
        for key, values in found.items()
        if not key.startswith(("run.", "data.directory"))
        and any(value != values[0] for value in values)
    }


def changes(stored: dict[str, Any], study: Study) -> list[str]:
    """What of a stored :meth:`Study.tree` is otherwise now and may not be, line by line."""
    now = json.loads(json.dumps(study.tree()))
    lines = []
    free = {"study": FREE_OF_STUDY, "teacher": FREE_OF_TEACHER}
    for part in ("study", "sweep", "models", "teacher"):
        if part == "models" and list(stored[part]) == list(now[part]):
            pairs = [(f"models.{name}", stored[part][name], now[part][name]) for name in now[part]]
        else:
            pairs = [(part, stored.get(part, {}), now.get(part, {}))]
        for prefix, was, found in pairs:
            old, new = (leaves(tree) if tree else {} for tree in (was, found))
            lines += [
                f"{prefix}.{key}: was {old.get(key)!r}, is {new.get(key)!r}"
                for key in dict.fromkeys((*old, *new))
                if old.get(key) != new.get(key)
                and not re.fullmatch(free.get(part, FREE_OF_MODELS), key)
            ]
    return lines
