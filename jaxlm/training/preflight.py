"""Trials before a long run: is everything connected as the configuration says?

A check is one small function of a :class:`Preflight`, listed in CHECKS. What several of them need,
such as the records of a short trial, is made once, when the first asks for it. A failed check says
which causes its figures speak for, the likeliest first.

Shape legend: B rows, T positions, D width, V vocabulary.
"""

import dataclasses
import functools
import hashlib
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxlm.config import Config
from jaxlm.data.pipeline import Windows, open_sources, training_windows
from jaxlm.data.prepare import ensure_prepared
from jaxlm.data.shards import DataDirectory, token_dtype
from jaxlm.errors import Failure
from jaxlm.evaluation.evaluate import evaluate
from jaxlm.files import size_text
from jaxlm.memory.devices import DEVICES, Device
from jaxlm.memory.plan import planned_bytes
from jaxlm.models.build import Params, apply
from jaxlm.models.depth import draw_depth
from jaxlm.optim import global_norm
from jaxlm.optim.rules import path_name
from jaxlm.training import loop, step
from jaxlm.training.checkpoint import Checkpoints
from jaxlm.training.checks import Cause, Check, Result, listed, result, skipped
from jaxlm.training.compilation import CompileOnce
from jaxlm.training.manifest import damage_text, inspect
from jaxlm.training.metrics import BLOCKS, METRICS, read_records
from jaxlm.training.planning import Plan, default_budget, plan_training
from jaxlm.training.preflight_control import check_control
from jaxlm.training.preflight_data import (
    check_duplicates,
    check_ids,
    check_targets,
    check_tokenizer,
)
from jaxlm.training.reach import reached
from jaxlm.training.scaling import CPU_FLOPS, affordable_flops, scaled, trial_config
from jaxlm.training.spec import StepSpec, row_keys, step_spec

# The first updates of a trial compile and fill queues: speed and waiting are measured after them.
_WARM = 3
# An interrupted run of so many updates, interrupted after so many.
_RESUMED, _INTERRUPTED = 6, 3
# Tokens of a tiny document, and of the rows that the model's own checks are made on.
_TINY, _PROBE = 32, 64
# The final norm's scale is raised so that logits differ enough for a wrong target to show.
_SHARPER = 8.0
# Rows of validation that tell depths apart.
_DEPTH_ROWS = 32
# Share of free host memory that pinned memory may take.
_HOST_SHARE = 0.9

# Fields of a record that an interruption must not change.
_REPEATABLE = ("update", "tokens", "loss", "grad_norm", "update_norm", "learning_rate", "depth")


# ---------------------------------------------------------------- what several checks need


def layers_of(name: str, count: int) -> bool:
    """Whether a parameter's first axis, of `count` entries, counts layers."""
    return "/blocks/" in f"/{name}/" and count > 0


def _labels(name: str, parts: Sequence[bool]) -> list[str]:
    """Names of the parts of a parameter that are marked: the whole, or single layers."""
    if all(parts) or not layers_of(name, len(parts)):
        return [name]
    return [f"{name} (layer {i} of {len(parts)})" for i, marked in enumerate(parts) if marked]


def fingerprints(tree: Any) -> dict[str, list[str]]:
    """A digest of each leaf's bytes by its path; of stacked layers one for each."""
    found: dict[str, list[str]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name, values = path_name(path), np.asarray(jax.device_get(leaf))
        stacked = values.ndim > 0 and layers_of(name, len(values))
        parts = values if stacked else values[None]
        found[name] = [hashlib.blake2b(part.tobytes(), digest_size=8).hexdigest() for part in parts]
    return found


def _differing(a: dict[str, list[str]], b: dict[str, list[str]]) -> list[str]:
    """Leaves whose fingerprints differ, or that one of the two lacks."""
    return [name for name in dict.fromkeys((*a, *b)) if a.get(name) != b.get(name)]


def _unchanged(a: dict[str, list[str]], b: dict[str, list[str]]) -> list[str]:
    """Leaves, or layers of them, whose fingerprints are equal."""
    same = {name: [x == y for x, y in zip(a[name], b[name], strict=True)] for name in a}
    return [label for name, parts in same.items() if any(parts) for label in _labels(name, parts)]


@dataclasses.dataclass(frozen=True)
class Trial:
    """A short run at the run's own learning rate."""

    records: list[dict[str, Any]]
    # Fingerprints of the parameters before and after, and of the state where another is resumed.
    before: dict[str, list[str]]
    after: dict[str, list[str]]
    halfway: dict[str, list[str]]
    # Norm of the parameters before.
    norm: float
    # Validation loss after it by depth; empty for a Transformer.
    by_depth: dict[int, float]
    # Blocks of the updates before `halfway`.
    blocks: list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Restart:
    """A run that was saved, and one that went on from there."""

    # Damage that the manifest shows; and what the saved and the loaded state hold.
    damage: list[str]
    saved: dict[str, list[str]]
    loaded: dict[str, list[str]]
    # What kept it from being loaded.
    error: str | None
    # The state that the resumed run began with, and ended with; its records and blocks.
    resumed: dict[str, list[str]]
    ended: dict[str, list[str]]
    records: list[dict[str, Any]]
    blocks: list[dict[str, Any]]
    next_update: int


@dataclasses.dataclass(frozen=True)
class Probe:
    """The training loss on rows made here, its gradient, and what it is computed from."""

    window: dict[str, np.ndarray]
    # Sums that training computes: cross-entropy and target tokens.
    cross_entropy: float
    target_tokens: float
    # By parameter (layer): whether its gradient is finite, and whether it is zero throughout.
    finite: dict[str, list[bool]]
    zero: dict[str, list[bool]]
    # [B, T, V] log probabilities in float64.
    log_probability: np.ndarray


class Preflight:
    """A configuration with its data, and the trials made with it so far.

    Args:
        config: of the run to come.
        device: a GPU that memory is planned for; None: the one that is here, if any.
        host_budget: bytes of pinned host memory that may be used.

    Raises:
        UserError: as at the start of the run itself.
    """

    def __init__(self, config: Config, device: Device | None = None, host_budget: int = 12 * 10**9):
        self.data: DataDirectory = ensure_prepared(config)
        self.sources = open_sources(config.data, self.data)
        self.windows = self._windows(config)
        self.config = loop.resolve_config(config, self.data, self.windows)
        self.settings = config.preflight
        self.device, self.host_budget = device, host_budget
        self.trial_scaled, self.notes = scaled(self.config, affordable_flops(self.config))
        # Gradients and the like are looked at on a model that leaves room for them anywhere.
        on_cpu = min(CPU_FLOPS, affordable_flops(self.config))
        self.small, small_notes = scaled(self.config, on_cpu)
        if small_notes != self.notes:
            self.notes += [f"single batches: {note}" for note in small_notes]
        self.samples: list[str] = []
        self._results: dict[str, Result] = {}

    def _windows(self, config: Config) -> Windows:
        training = config.training
        return training_windows(
            self.sources, config.data, training.micro_batches, training.micro_batch_rows
        )

    @property
    def recurrent(self) -> bool:
        """Whether the model has a depth."""
        return self.config.model.kind == "recurrent"

    @property
    def vocabulary(self) -> int:
        """Entries of the vocabulary."""
        return self.config.model.vocabulary

    def result(self, name: str) -> Result:
        """The result of a check, which is made once."""
        if name not in self._results:
            check = next(check for check in CHECKS if check.name == name)
            self._results[name] = check.run(self)
        return self._results[name]

    def upstream(self, *names: str) -> list[Cause]:
        """The first cause of each of these checks that fails: what it breaks fails elsewhere too.

        It counts a little less there than where it was seen.
        """
        found = [self.result(name) for name in names]
        first = [one.causes[0] for one in found if one.passed is False and one.causes]
        return [dataclasses.replace(cause, weight=0.9 * cause.weight) for cause in first]

    # ------------------------------------------------------------ trials

    def in_trial(self, directory: str) -> Config:
        """The trial's configuration, with as many passes over the data as it takes."""
        one_pass = dataclasses.replace(
            self.trial_scaled, data=dataclasses.replace(self.trial_scaled.data, epochs=1)
        )
        needed = self.settings.updates
        epochs = max(self.config.data.epochs, -(-needed // len(self._windows(one_pass))) + 1)
        return trial_config(self.trial_scaled, directory, epochs)

    @functools.cached_property
    def windows_of_trial(self) -> Windows:
        """The windows that the trial reads."""
        return self._windows(self.in_trial("unused"))

    @functools.cached_property
    def trial(self) -> Trial:
        """Some updates through the loop that makes the run."""
        with self._directory() as directory:
            run = loop.Run(self.in_trial(directory))
            try:
                before = fingerprints(run.state.params)
                norm = float(global_norm(run.state.params))
                records = _make(run, _RESUMED)
                halfway = fingerprints(run.state)
                blocks = read_records(run.directory / BLOCKS)
                records += _make(run, self.settings.updates - _RESUMED)
                after = fingerprints(run.state.params)
                return Trial(records, before, after, halfway, norm, self._by_depth(run), blocks)
            finally:
                run.close()

    def _by_depth(self, run: loop.Run) -> dict[int, float]:
        if not self.recurrent or len(run.validation_rows) == 0:
            return {}
        depths = sorted({1, round(run.config.depth.mean)})
        found = evaluate(
            run.spec.model,
            run.state.params,
            run.validation_rows,
            depths=depths,
            batch_rows=min(run.config.evaluation.batch_rows, _DEPTH_ROWS),
            chunk_tokens=run.config.loss.chunk_tokens,
            limit=_DEPTH_ROWS,
        )
        return {depth: one.cross_entropy for depth, one in zip(depths, found, strict=True)}

    def _directory(self) -> tempfile.TemporaryDirectory[str]:
        """A folder on the disk of the run, removed afterwards."""
        parent = Path(self.config.run.directory)
        parent.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(prefix=".preflight-", dir=parent)

    @functools.cached_property
    def restart(self) -> Restart:
        """The first updates of the trial again, with an interruption."""
        with self._directory() as directory:
            config = self.in_trial(directory)
            run = loop.Run(config)
            try:
                _make(run, _INTERRUPTED)
                run.save()
                run.checkpoints.wait()
                saved, spec, place = fingerprints(run.state), run.spec, run.sharding
                folder = run.checkpoints.directory
            finally:
                run.close()
            damage = inspect(folder / str(_INTERRUPTED)).damage
            empty: dict[str, list[str]] = {}
            try:
                with Checkpoints(folder, read_only=True) as checkpoints:
                    abstract = jax.eval_shape(lambda: step.init_state(spec))
                    loaded = fingerprints(checkpoints.restore(_INTERRUPTED, abstract, place))
                run = loop.Run(config)
            except Failure as failure:
                return Restart(damage, saved, empty, str(failure), empty, empty, [], [], 0)
            try:
                resumed, begins = fingerprints(run.state), run.progress.update
                _make(run, _RESUMED - begins)
                return Restart(
                    damage,
                    saved,
                    loaded,
                    None,
                    resumed,
                    fingerprints(run.state),
                    read_records(run.directory / METRICS),
                    read_records(run.directory / BLOCKS),
                    begins,
                )
            finally:
                run.close()

    @functools.lru_cache(maxsize=8)  # noqa: B019 - as long-lived as the program
    def losses_at(self, factor: float) -> tuple[float | None, ...]:
        """Cross-entropy of each update of a trial at a multiple of the learning rate."""
        if factor == 1.0:
            return tuple(record["cross_entropy"] for record in self.trial.records)
        config = self.in_trial("unused")
        return _train(
            step_spec(config, self.vocabulary, self.settings.updates),
            config,
            self.windows_of_trial,
            self.settings.updates,
            factor,
        )

    def fall_at(self, factor: float) -> float:
        """What the loss fell by in the trial, nats; minus infinity where it was not finite."""
        return fall(self.losses_at(factor))

    @functools.cached_property
    def update_ratio(self) -> float:
        """Median change of an applied update relative to the weights; 0 where none was applied."""
        norms = [r["update_norm"] for r in self.trial.records if r["applied"]]
        finite = [math.inf if norm is None else norm for norm in norms]
        return statistics.median(finite) / self.trial.norm if finite else 0.0

    @functools.cached_property
    def nonfinite(self) -> int:
        """Updates of the trial that were skipped for what was not finite."""
        skipped_ones = (r for r in self.trial.records if not r["applied"])
        return sum(r["loss"] is None or r["grad_norm"] is None for r in skipped_ones)

    # ------------------------------------------------------------ single batches

    @functools.cached_property
    def small_spec(self) -> StepSpec:
        """The step of the model that single batches are tried on."""
        return step_spec(self.small, self.vocabulary, self.settings.updates)

    @functools.cached_property
    def small_params(self) -> Params:
        """Its parameters at the start, with a sharper head."""
        params = jax.device_get(step.init_state(self.small_spec).params)
        scale = params["final_norm"]["scale"]
        params["final_norm"] = {"scale": (scale * _SHARPER).astype(scale.dtype)}
        return params

    def _depths(self) -> tuple[int, int]:
        depth = round(self.config.depth.mean)
        return depth, self.config.depth.backprop_depth(depth)

    @functools.cached_property
    def hidden(self) -> Callable[..., np.ndarray]:
        """The model as training calls it: from rows [B, T + 1] and a depth to [B, T, D]."""
        spec = self.small_spec

        @jax.jit
        def of(params: Params, window: dict[str, Array], keys: Array, depth: Array, k: Array):
            model = apply(spec.model, params)
            return model(
                window["tokens"][:, :-1].astype(jnp.int32),
                window["segment_ids"][:, :-1],
                window["positions"][:, :-1],
                keys,
                train=True,
                depth=depth,
                backprop_depth=k,
                max_backprop_depth=spec.max_backprop_depth,
            )

        def call(window: dict[str, np.ndarray], depth: int) -> np.ndarray:
            keys = row_keys(spec.seed, 0, jnp.arange(len(window["tokens"])))
            k = self.config.depth.backprop_depth(depth)
            out = of(self.small_params, window, keys, jnp.int32(depth), jnp.int32(k))
            return np.asarray(out, np.float64)

        return call

    @functools.cached_property
    def probe(self) -> Probe:
        """Loss and gradient of three rows: one document, two documents, one with padding."""
        spec, params = self.small_spec, self.small_params
        window = probe_window(self.vocabulary, seed=0)
        keys = row_keys(spec.seed, 0, jnp.arange(len(window["tokens"])))
        depth, k = map(jnp.int32, self._depths())

        @jax.jit
        def gradient(params: Params, window: dict[str, Array]):
            def loss(params: Params):
                return step.loss_sums(spec, params, window, keys, depth, k)

            (_, sums), grads = jax.value_and_grad(loss, has_aux=True)(params)

            def over_parts(test: Callable[[Array], Array]):
                def of(path: Any, g: Array) -> Array:
                    stacked = g.ndim > 0 and layers_of(path_name(path), g.shape[0])
                    return jnp.all(test(g), axis=tuple(range(1 if stacked else 0, g.ndim)))

                return jax.tree_util.tree_map_with_path(of, grads)

            return sums, over_parts(jnp.isfinite), over_parts(lambda g: g == 0)

        sums, finite, zero = jax.device_get(gradient(params, window))
        _, _, zero_again = jax.device_get(gradient(params, probe_window(self.vocabulary, seed=1)))
        zero = jax.tree.map(np.logical_and, zero, zero_again)
        hidden = self.hidden(window, int(depth))
        table = (params["embedding"] if spec.model.tie_embeddings else params["output"])["table"]
        logits = hidden @ np.asarray(table, np.float64).T
        return Probe(
            window,
            float(sums.cross_entropy),
            float(sums.target_tokens),
            _by_name(finite),
            _by_name(zero),
            logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True)),
        )

    @functools.cached_property
    def plan(self) -> Plan | None:
        """The planner's figures for the named device."""
        return None if self.device is None else plan_training(self.config, self.device)


def _by_name(tree: Any) -> dict[str, list[bool]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_name(path): np.atleast_1d(leaf).tolist() for path, leaf in leaves}


def _make(run: loop.Run, updates: int) -> list[dict[str, Any]]:
    """Make updates as the loop does: each is read after the next is dispatched."""
    records, pending = [], None
    for _ in range(updates):
        previous, pending = pending, run.dispatch()
        if previous is not None:
            records.append(run.read(previous))
    return records if pending is None else [*records, run.read(pending)]


def _train(
    spec: StepSpec, config: Config, windows: Any, updates: int, factor: float
) -> tuple[float | None, ...]:
    """Cross-entropy of each update, from the start, at a multiple of the learning rate."""
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    state = jax.device_put(step.init_state(spec), place)
    lengths = sorted({windows[i]["tokens"].shape[-1] - 1 for i in range(updates)})
    once = CompileOnce(step.train_step, spec, lengths)
    found = []
    for update in range(updates):
        window = jax.device_put(windows[update], place)
        depth = draw_depth(config.depth, spec.seed, update) if spec.model.kind == "recurrent" else 0
        k = config.depth.backprop_depth(depth)
        state, metrics = once(
            state,
            window,
            jnp.asarray(depth, jnp.int32),
            jnp.asarray(k, jnp.int32),
            jnp.asarray(factor, jnp.float32),
            variant=window["tokens"].shape[-1] - 1,
        )
        found.append(metrics.cross_entropy)
    values = [float(x) for x in jax.device_get(found)]
    return tuple(x if math.isfinite(x) else None for x in values)


def fall(losses: Sequence[float | None]) -> float:
    """First loss less the mean of the last quarter; minus infinity where one is not finite."""
    ends = [losses[0], *losses[-max(1, len(losses) // 4) :]]
    finite = [x for x in ends if x is not None]
    if len(finite) < len(ends):
        return -math.inf
    return finite[0] - statistics.fmean(finite[1:])


def probe_window(vocabulary: int, seed: int) -> dict[str, np.ndarray]:
    """Three rows of random tokens: one document; two; one, followed by padding. Arrays [3, T+1]."""
    width = _PROBE + 1
    first, real = width // 3, width // 2
    rng = np.random.Generator(np.random.Philox(key=seed))
    tokens = rng.integers(0, vocabulary, (3, width)).astype(token_dtype(vocabulary))
    segments = np.ones((3, width), np.int32)
    positions = np.tile(np.arange(width, dtype=np.int32), (3, 1))
    segments[1, first:], positions[1, first:] = 2, positions[1, first:] - first
    tokens[2, real:], segments[2, real:], positions[2, real:] = 0, 0, 0
    block = np.arange(3, dtype=np.int32)
    return {"tokens": tokens, "segment_ids": segments, "positions": positions, "block": block}


def tiny_documents(vocabulary: int) -> dict[str, np.ndarray]:
    """A window [1, 2, T+1] of two documents of random tokens, one of them shorter."""
    width = _TINY + 1
    lengths = (width, 3 * width // 4)
    rng = np.random.Generator(np.random.Philox(key=2))
    tokens = rng.integers(0, vocabulary, (1, 2, width)).astype(token_dtype(vocabulary))
    real = (np.arange(width) < np.array(lengths)[:, None])[None]
    return {
        "tokens": np.where(real, tokens, 0).astype(tokens.dtype),
        "segment_ids": real.astype(np.int32),
        "positions": np.where(real, np.arange(width), 0).astype(np.int32),
        "block": np.arange(2, dtype=np.int32)[None],
    }


# ---------------------------------------------------------------- memory


def memory(of: Preflight) -> Result:
    """The step fits the device, and pinned host memory can be had."""
    name = "memory"
    present = DEVICES_BY_KIND.get(jax.devices()[0].device_kind)
    if of.device is None and jax.default_backend() == "cpu":
        return skipped(name, "no GPU is here, and --device names none")
    if of.plan is not None:
        peak, host, budget = of.plan.peak, of.plan.host, default_budget(of.plan.device)
        what = f"planned for {of.plan.device.kind}"
    else:
        peak, host = _compiled_here(of)
        budget = default_budget(present) if present else _memory_here()
        what = f"planned for {jax.devices()[0].device_kind}"
    causes = []
    if peak > budget:
        parts = {} if of.plan is None else of.plan.parts
        largest = sorted(parts, key=lambda part: -parts[part])[:2]
        most = ", ".join(f"{part} {size_text(parts[part])}" for part in largest)
        causes.append(
            Cause(
                "memory",
                f"the step needs {size_text(peak - budget)} more than the device gives; most of it "
                f"is {most or 'in temporaries'}",
                0.95,
            )
        )
    causes += _pin(host, of.host_budget)
    return result(
        name,
        not causes,
        f"{size_text(peak)}, pinned host memory {size_text(host)}; {what}",
        f"<= {size_text(budget)}, <= {size_text(of.host_budget)}",
        causes,
        "scripts/plan_memory.py --suggest with the same configuration",
        peak_bytes=peak,
        host_bytes=host,
        budget_bytes=budget,
    )


DEVICES_BY_KIND = {device.kind: device for device in DEVICES.values()}


def _compiled_here(of: Preflight) -> tuple[int, int]:
    """Bytes of the run's own step on the GPU that is here: device, pinned host."""
    updates, data, training = of.config.training.updates, of.config.data, of.config.training
    assert updates is not None
    spec = step_spec(of.config, of.vocabulary, updates)
    state = jax.eval_shape(lambda: step.init_state(spec))
    rows = (training.micro_batches, training.micro_batch_rows)
    row = (*rows, data.sequence_length + 1)
    window = {
        "tokens": jax.ShapeDtypeStruct(row, token_dtype(of.vocabulary)),
        "segment_ids": jax.ShapeDtypeStruct(row, jnp.int32),
        "positions": jax.ShapeDtypeStruct(row, jnp.int32),
        "block": jax.ShapeDtypeStruct(rows, jnp.int32),
    }
    depth = jax.ShapeDtypeStruct((), jnp.int32)
    return planned_bytes(step.train_step.lower(spec, state, window, depth, depth).compile())


def _memory_here() -> int:
    return (jax.devices()[0].memory_stats() or {})["bytes_limit"]


def _pin(size: int, budget: int) -> list[Cause]:
    """Take pinned host memory once, and give it back; what is wrong with that."""
    if size == 0:
        return []
    if size > budget:
        text = f"{size_text(size)} of pinned host memory are over the host budget"
        return [Cause("host_memory", text, 0.95)]
    free = _free_host_memory()
    if size > _HOST_SHARE * free:
        text = f"{size_text(size)} of pinned host memory are needed, {size_text(free)} are free"
        return [Cause("host_memory", text, 0.95)]
    kinds = [memory.kind for memory in jax.devices()[0].addressable_memories()]
    kind = "pinned_host" if "pinned_host" in kinds else None
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=kind)
    try:
        held = jax.device_put(np.ones(size, np.uint8), place)
        held.block_until_ready()
        held.delete()
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        text = f"{size_text(size)} of pinned host memory were refused: {str(error).splitlines()[0]}"
        return [Cause("host_memory", text, 0.95)]
    return []


def _free_host_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("Linux has MemAvailable")


# ---------------------------------------------------------------- data


def ids(of: Preflight) -> Result:
    """See preflight_data."""
    return check_ids(of.data, of.vocabulary, of.settings.data_tokens)


def targets(of: Preflight) -> Result:
    """See preflight_data."""
    return check_targets(of.config, of.data, of.windows)


def duplicates(of: Preflight) -> Result:
    """See preflight_data."""
    return check_duplicates(of.config, of.data)


def tokenizer(of: Preflight) -> Result:
    """See preflight_data."""
    found, of.samples = check_tokenizer(of.config, of.data)
    return found


# ---------------------------------------------------------------- model


def _reference(probe: Probe, shift: int, across: bool, padding: bool) -> tuple[float, int]:
    """Cross-entropy of the probe in NumPy: its mean, and the number of targets.

    Args:
        probe: rows and log probabilities.
        shift: how many tokens ahead the target is; 1 is right. The mask stays that of 1.
        across: also targets of another document.
        padding: also padding.
    """
    tokens, segments = probe.window["tokens"], probe.window["segment_ids"]
    t = np.arange(tokens.shape[1] - max(shift, 1))
    mask = np.ones((len(tokens), len(t)), bool)
    if not across:
        mask &= segments[:, t + 1] == segments[:, t]
    if not padding:
        mask &= segments[:, t + 1] > 0
    target = tokens[:, t + shift, None].astype(np.int64)
    taken = np.take_along_axis(probe.log_probability[:, t], target, axis=-1)[..., 0]
    return float(-taken[mask].mean()), int(mask.sum())


# What a wrong loss may be instead: shift, across, padding; cause and description.
_WRONG_LOSSES = {
    (2, False, False): ("labels_shifted", "the token after the next were the target"),
    (0, False, False): ("labels_shifted", "each token were its own target"),
    (1, True, False): ("mask_ignored", "targets of the next document carried loss"),
    (1, False, True): ("mask_ignored", "padding carried loss"),
    (1, True, True): ("mask_ignored", "padding and targets of the next document carried loss"),
}
# A shifted loss differs from its model at the ends of rows.
_SHIFTED_DIFFERENCE = 0.01


def _loss_causes(probe: Probe, limit: float) -> list[Cause]:
    """What the loss is, where it is not what it should be."""
    found, causes = probe.cross_entropy / max(probe.target_tokens, 1.0), []
    for (shift, across, padding), (key, what) in _WRONG_LOSSES.items():
        other, count = _reference(probe, shift, across, padding)
        distance = abs(found - other) / other
        if shift == 1:
            alike = distance <= limit and count == probe.target_tokens
            weight = 0.97
        else:
            alike = distance <= _SHIFTED_DIFFERENCE
            weight = 0.97 - 10 * distance
        if alike:
            text = f"the loss, {found:.4f}, is what it would be if {what}: {other:.4f}"
            causes.append(Cause(key, text, weight))
    return causes


def loss_value(of: Preflight) -> Result:
    """Training's loss is the cross-entropy of the next token of the same document."""
    probe, limit = of.probe, of.settings.loss_difference
    wanted, count = _reference(probe, 1, across=False, padding=False)
    found = probe.cross_entropy / max(probe.target_tokens, 1.0)
    relative = abs(found - wanted) / wanted if math.isfinite(found) else math.inf
    first = of.trial.records[0]["tokens"]
    segments = of.windows_of_trial[0]["segment_ids"]
    expected = int(np.sum((segments[..., 1:] == segments[..., :-1]) & (segments[..., 1:] > 0)))
    passed = relative <= limit and probe.target_tokens == count and first == expected
    causes: list[Cause] = []
    if not passed:
        causes += _loss_causes(probe, limit)
        if not math.isfinite(found):
            causes.append(Cause("nonfinite", "the loss is not finite", 0.9))
        for number, right, where in (
            (probe.target_tokens, count, "of the rows made here"),
            (first, expected, "of the first update"),
        ):
            if number != right:
                text = f"{number:,.0f} positions {where} carry loss where {right:,} have a target"
                causes.append(Cause("mask_ignored" if number > right else "mask_lost", text, 0.9))
        text = f"the loss in training is {found:.4f}, the cross-entropy of its logits {wanted:.4f}"
        causes.append(Cause("loss_code", text, 0.3))
    return result(
        "loss_value",
        passed,
        f"{relative:.1e} from NumPy's; {probe.target_tokens:.0f} of {count} and "
        f"{first:,} of {expected:,} targets",
        f"<= {limit:g}, all",
        causes,
        "`loss_sums` in jaxlm/training/step.py: tokens[:, 1:] and target_mask",
        relative_difference=relative if math.isfinite(relative) else None,
        targets=probe.target_tokens,
        expected_targets=count,
    )


def connected(of: Preflight) -> Result:
    """Every parameter reaches the loss of the traced program, and gradient reaches it."""
    config = of.config
    updates = config.training.updates
    assert updates is not None
    spec = step_spec(config, of.vocabulary, updates)
    shapes = jax.eval_shape(lambda: step.init_state(spec).params)
    window = probe_window(of.vocabulary, seed=0)
    keys = row_keys(0, 0, jnp.arange(len(window["tokens"])))

    def loss(params: Params, window: dict[str, Array], depth: Array, k: Array) -> Array:
        return step.loss_sums(spec, params, window, keys, depth, k)[0]

    arguments = (shapes, window, jnp.int32(1), jnp.int32(1))
    used, _, depth, _ = reached(loss, *arguments)
    differentiated = reached(loss, *arguments, gradient=True)[0]
    used, differentiated = _by_name(used), _by_name(differentiated)
    unused = {n: [not x for x in parts] for n, parts in used.items()}
    blocked = {
        n: [u and not d for u, d in zip(used[n], differentiated[n], strict=True)] for n in used
    }
    dead, cut = (
        [label for n, parts in kind.items() if any(parts) for label in _labels(n, parts)]
        for kind in (unused, blocked)
    )
    ignored = of.recurrent and not depth.all()
    causes = []
    if dead:
        text = f"the loss does not use {listed(dead)}: built, but left out of the forward pass"
        causes.append(Cause("detached", text, 0.98))
    if cut:
        text = f"{listed(cut)}: used, but no gradient flows back (stop_gradient)"
        causes.append(Cause("frozen", text, 0.98))
    if ignored:
        text = "the loss does not depend on the number of core steps: depth is ignored"
        causes.append(Cause("depth_ignored", text, 0.98))
    return result(
        "connected",
        not causes,
        f"{len(used) - len({x.split(' (')[0] for x in (*dead, *cut)})} of {len(used)} parameters"
        + (f"; not {listed([*dead, *cut])}" if dead or cut else ""),
        "all, by the traced program",
        causes,
        "`__call__` of the model in jaxlm/models; is each layer of the stack applied?",
        unused=dead,
        without_gradient=cut,
    )


def gradients(of: Preflight) -> Result:
    """Every parameter gets a finite gradient; zero is told apart from detached."""
    probe = of.probe

    def marked(kind: dict[str, list[bool]], wanted: bool) -> list[str]:
        parts = {name: [x == wanted for x in values] for name, values in kind.items()}
        return [label for n, p in parts.items() if any(p) for label in _labels(n, p)]

    bad, zero = marked(probe.finite, wanted=False), marked(probe.zero, wanted=True)
    detached = of.result("connected").numbers
    cut = {*detached["unused"], *detached["without_gradient"]}
    merely = [name for name in zero if name not in cut]
    causes = []
    if bad:
        text = f"the gradient of {len(bad)} parameters is not finite: {listed(bad)}"
        if math.isfinite(probe.cross_entropy):
            text += "; the loss is: a derivative at a point where there is none (0/0, sqrt(0))"
        causes.append(Cause("nonfinite", text, 0.98))
    if cut & set(zero):
        causes += of.upstream("connected")
    if merely:
        text = (
            f"the gradient of {listed(merely)} is zero on two batches though the loss uses it: "
            f"multiplied by zero, rounded away, or saturated"
        )
        causes.append(Cause("zero_gradient", text, 0.9))
    count = len(probe.finite)
    return result(
        "gradients",
        not causes,
        f"finite for {count - len({b.split(' (')[0] for b in bad})} of {count}; zero: "
        f"{listed(zero) or 'none'}",
        "finite, not zero",
        causes,
        "the first module named, with jax.config.update('jax_debug_nans', True)",
        nonfinite=bad,
        zero=zero,
    )


def causality(of: Preflight) -> Result:
    """Outputs do not depend on later tokens, on other documents, or on padding."""
    window = probe_window(of.vocabulary, seed=0)
    width = window["tokens"].shape[1]
    middle, first, real = width // 2, width // 3, width // 2
    other = dict(window, tokens=window["tokens"].copy())
    change = probe_window(of.vocabulary, seed=3)["tokens"]
    other["tokens"][0, middle:] = change[0, middle:]
    other["tokens"][1, :first] = change[1, :first]
    other["tokens"][2, real:] = np.uint16(1)
    mean = round(of.config.depth.mean)
    depths = sorted({1, mean, 2 * mean}) if of.recurrent else [1]
    worst = {"later tokens": 0.0, "another document": 0.0, "padding": 0.0}
    reacts = math.inf
    worst_depth = depths[0]
    for depth in depths:
        before, after = of.hidden(window, depth), of.hidden(other, depth)
        difference = np.abs(after - before).max(axis=-1) / np.abs(before).max()
        found = {
            "later tokens": difference[0, :middle].max(),
            "another document": difference[1, first:].max(),
            "padding": difference[2, :real].max(),
        }
        if max(found.values()) > max(worst.values()):
            worst_depth = depth
        worst = {key: max(worst[key], float(found[key])) for key in worst}
        # Beyond the changed tokens themselves: the last one sees the others.
        reacts = min(reacts, float(difference[0, middle:].min()))
    limit = of.settings.causality
    texts = {
        "later tokens": ("leak", "outputs change with later tokens: the causal mask is missing"),
        "another document": ("segments", "outputs change with another document of the row"),
        "padding": ("padding_seen", "outputs change with what stands in the padding"),
    }
    causes = [
        Cause(key, f"{text} (by {worst[kind]:.1e} at depth {worst_depth})", 0.97)
        for kind, (key, text) in texts.items()
        if not worst[kind] <= limit
    ]
    if reacts == 0.0:
        causes.append(Cause("blind", "outputs do not change with the tokens before them", 0.8))
    largest = max(worst.values())
    return result(
        "causality",
        not causes,
        f"{largest:.1e} at depths {', '.join(map(str, depths))}",
        f"<= {limit:g}",
        causes,
        "`attention_mask` and the call of attention in jaxlm/models/layers.py",
        **{key.replace(" ", "_"): value for key, value in worst.items()},
    )


def overfit(of: Preflight) -> Result:
    """Two tiny documents are learnt by heart."""
    config, settings = of.small, of.settings
    epochs, goal = settings.overfit_epochs, settings.overfit_loss
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, dropout=0.0),
        data=dataclasses.replace(config.data, sequence_length=_TINY, buckets=()),
        training=dataclasses.replace(
            config.training, updates=epochs + 1, micro_batches=1, micro_batch_rows=2
        ),
        optim=dataclasses.replace(
            config.optim,
            schedule="constant",
            warmup_updates=min(config.optim.warmup_updates, epochs // 10),
            decay_updates=0,
            end_learning_rate=0.0,
        ),
    )
    spec = step_spec(config, of.vocabulary, epochs + 1)
    window = tiny_documents(of.vocabulary)

    class Same:
        def __getitem__(self, index: int) -> dict[str, np.ndarray]:
            return window

    def losses(factor: float) -> tuple[float | None, ...]:
        return _train(spec, config, Same(), epochs + 1, factor)

    def best(found: Sequence[float | None]) -> float:
        return min((x for x in found if x is not None), default=math.inf)

    found = losses(1.0)
    lowest = best(found)
    causes: list[Cause] = []
    reached_at = next((i for i, x in enumerate(found) if x is not None and x < goal), None)
    if reached_at is None:
        higher, lower = best(losses(10.0)), best(losses(0.1))
        for factor, value, key, word in (
            (10, higher, "rate_low", "low"),
            (0.1, lower, "rate_high", "high"),
        ):
            if value < lowest - 0.1 * max(lowest, goal):
                text = f"at {factor:g} times the rate the loss gets to {value:.3g}, at 1 to "
                text += f"{lowest:.3g}: the learning rate is too {word}"
                causes.append(Cause(key, text, 0.85 if value < goal else 0.6))
        causes += of.upstream("gradients", "connected", "loss_value", "causality")
        text = f"the loss stays at {lowest:.3g}: model too small, or optimizer not wired up"
        causes.append(Cause("capacity", text, 0.15))
    start = found[0] if found[0] is not None else math.nan
    return result(
        "overfit",
        reached_at is not None,
        f"{start:.2f} to {lowest:.3f}"
        + (f" in {reached_at} epochs" if reached_at is not None else f" in {epochs} epochs"),
        f"< {goal:g} in {epochs} epochs",
        causes,
        "optim.learning_rate; grad_norm and update_norm of the first updates",
        start=start if math.isfinite(start) else None,
        lowest=lowest if math.isfinite(lowest) else None,
        epochs=reached_at,
    )


# ---------------------------------------------------------------- trial


def initial_loss(of: Preflight) -> Result:
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
        spread = float(np.std(logp - logp.mean(axis=-1, keepdims=True))) / _SHARPER
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
        loss=found if math.isfinite(found) else None,
        expected=wanted,
    )


def loss_falls(of: Preflight) -> Result:
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
        text = f"the loss fell by {fell:.3f} only: too few updates to tell, or data without order"
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
        fall=fell if math.isfinite(fell) else None,
    )


def _shown(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.2f}"


def updated(of: Preflight) -> Result:
    """Every parameter, in each layer, is changed by the trial."""
    same = _unchanged(of.trial.before, of.trial.after)
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
            f"{len(same)} parameters or layers stay as they were through {applied} applied "
            f"updates: {listed(same)}; the optimizer does not reach {listed(parts)}"
        )
        causes.append(Cause("frozen", text, 0.9 if applied else 0.2))
        if of.update_ratio < of.settings.update_ratio_minimum:
            text = f"updates change weights by {of.update_ratio:.1e}, below their rounding"
            causes.append(Cause("rate_low", text, 0.6))
    return result(
        "updated",
        not same,
        f"{count - len(same)} of {count} parameters and layers changed in {applied} updates",
        "all",
        causes,
        "the optimizer's masks in jaxlm/training/optimizer.py; optim.rounding",
        unchanged=same,
    )


def depth_order(of: Preflight) -> Result:
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
        depth_1=one if math.isfinite(one) else None,
        depth_mean=mean if math.isfinite(mean) else None,
    )


def learning_rate(of: Preflight) -> Result:
    """A rate 100 times too high or too low shows in the size of updates and in other rates."""
    settings = of.settings
    falls = {factor: of.fall_at(factor) for factor in (0.1, 1.0, 10.0)}
    best = max(falls, key=lambda factor: falls[factor])
    share = falls[1.0] / falls[best] if falls[best] > 0 else 0.0
    ratio = of.update_ratio
    lowest, highest = settings.update_ratio_minimum, settings.update_ratio_maximum
    passed = share >= settings.rate_share and lowest <= ratio <= highest
    causes: list[Cause] = []
    told = ", ".join(f"{fell:.2f} at {factor:g} x" for factor, fell in falls.items())
    if not passed:
        causes += of.upstream("gradients")
        if ratio > highest:
            excess = min(1.0, math.log10(ratio / highest) / 1.5) if math.isfinite(ratio) else 1.0
            text = f"an update changes the weights by {ratio:.2g} of their size: the learning rate "
            causes.append(Cause("rate_high", text + "is too high", 0.75 + 0.2 * excess))
        if ratio < lowest:
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
        update_ratio=ratio if math.isfinite(ratio) else None,
        falls={f"{k:g}": v if math.isfinite(v) else None for k, v in falls.items()},
    )


# ---------------------------------------------------------------- checkpoints


def checkpoint(of: Preflight) -> Result:
    """A checkpoint holds every bit of the state, and its manifest agrees."""
    restart = of.restart
    differing = _differing(restart.saved, restart.loaded) if restart.error is None else []
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
        "jaxlm/training/checkpoint.py; scripts/checkpoints.py --verify",
        differing=differing,
    )


def resume(of: Preflight) -> Result:
    """An interrupted run is the uninterrupted one, bit for bit."""
    restart, trial = of.restart, of.trial
    name, look = "resume", "`Run.restore` in jaxlm/training/loop.py"
    if restart.error is not None:
        causes = [*of.upstream("checkpoint"), Cause("checkpoint_leaf", restart.error, 0.9)]
        return result(name, False, "cannot be resumed", "bit for bit", causes, look)
    began = _differing(restart.saved, restart.resumed)
    ended = _differing(trial.halfway, restart.ended)
    blocks = [a == b for a, b in zip(trial.blocks, restart.blocks, strict=False)]
    moved = len(trial.blocks) != len(restart.blocks) or not all(blocks)
    records = {
        key: [r[key] for r in trial.records[:_RESUMED]] == [r[key] for r in restart.records]
        for key in _REPEATABLE
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
    if restart.next_update != _INTERRUPTED:
        text = f"it goes on at update {restart.next_update} instead of {_INTERRUPTED}"
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
        f"{_INTERRUPTED} + {_RESUMED - _INTERRUPTED} updates "
        + (
            f"differ from {_RESUMED}: {len(ended)} arrays, {len(wrong)} of {len(records)} records"
            if moved or began or ended or wrong
            else f"equal {_RESUMED}"
        ),
        "bit for bit",
        causes,
        look,
        differing=ended,
        differing_records=wrong,
    )


# ---------------------------------------------------------------- speed


def data_wait(of: Preflight) -> Result:
    """The device does not wait for data."""
    records = of.trial.records[_WARM:]
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


def _reading_seconds(of: Preflight) -> float:
    """Median seconds to make a window on the host."""
    windows, seconds = of.windows_of_trial, []
    for number in range(min(5, len(windows))):
        began = time.perf_counter()
        windows[number]
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _step_seconds(of: Preflight) -> float:
    """Median seconds of a trial's update."""
    tokens = np.diff([0, *[record["tokens"] for record in of.trial.records]])[_WARM:]
    speeds = [record["tokens_per_second"] for record in of.trial.records[_WARM:]]
    return statistics.median(
        float(count) / speed for count, speed in zip(tokens, speeds, strict=True) if speed
    )


def speed(of: Preflight) -> Result:
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


def control(of: Preflight) -> Result:
    """See preflight_control."""
    return check_control(of.config)


# In the order in which they are made: what costs least, and what most others hang on, first.
CHECKS: tuple[Check[Preflight], ...] = (
    Check("memory", memory),
    Check("ids", ids),
    Check("targets", targets),
    Check("duplicates", duplicates),
    Check("tokenizer", tokenizer),
    Check("control", control),
    Check("connected", connected),
    Check("gradients", gradients),
    Check("causality", causality),
    Check("loss_value", loss_value),
    Check("overfit", overfit),
    Check("initial_loss", initial_loss),
    Check("loss_falls", loss_falls),
    Check("updated", updated),
    Check("learning_rate", learning_rate),
    Check("depth_order", depth_order),
    Check("checkpoint", checkpoint),
    Check("resume", resume),
    Check("data_wait", data_wait),
    Check("speed", speed),
)


def run_checks(
    of: Preflight, names: Iterable[str], advance: Callable[[int, str], None]
) -> list[Result]:
    """Make checks in their order.

    Args:
        of: the configuration.
        names: of CHECKS.
        advance: called with (1, name) after each.
    """
    wanted, found = set(names), []
    for check in CHECKS:
        if check.name in wanted:
            found.append(of.result(check.name))
            advance(1, check.name)
    return found
