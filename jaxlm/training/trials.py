"""Short trials of a run to come, made once each, when the first check asks for one.

Shape legend: B rows, T positions, D width, V vocabulary.
"""

import contextlib
import dataclasses
import functools
import hashlib
import io
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

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
from jaxlm.memory.devices import Device
from jaxlm.models.build import Params, apply
from jaxlm.models.depth import draw_depth
from jaxlm.optim import global_norm
from jaxlm.optim.rules import path_name
from jaxlm.training import loop, step
from jaxlm.training.checkpoint import Checkpoints
from jaxlm.training.checks import Cause, Check, Result
from jaxlm.training.compilation import CompileOnce
from jaxlm.training.control import Control
from jaxlm.training.manifest import inspect
from jaxlm.training.metrics import BLOCKS, METRICS, read_records
from jaxlm.training.planning import HOST_BUDGET, Plan, plan_training
from jaxlm.training.scaling import CPU_FLOPS, affordable_flops, scaled, trial_config
from jaxlm.training.spec import StepSpec, row_keys, step_spec

# The first updates of a trial compile and fill queues: speed and waiting are measured after them.
WARM = 3
# An interrupted run of so many updates, interrupted after so many.
RESUMED, INTERRUPTED = 6, 3
# Tokens of a tiny document, and of the rows that the model's own checks are made on.
TINY, _PROBE = 32, 64
# The final norm's scale is raised so that logits differ enough for a wrong target to show.
SHARPER = 8.0
# Rows of validation that tell depths apart.
_DEPTH_ROWS = 32

# Fields of a record that an interruption must not change.
REPEATABLE = ("update", "tokens", "loss", "grad_norm", "update_norm", "learning_rate", "depth")


# ---------------------------------------------------------------- what several checks need


def layers_of(name: str, count: int) -> bool:
    """Whether a parameter's first axis, of `count` entries, counts layers."""
    return "/blocks/" in f"/{name}/" and count > 0


def labels(name: str, parts: Sequence[bool]) -> list[str]:
    """Names of the parts of a parameter that are marked: the whole, or single layers."""
    if all(parts) or not layers_of(name, len(parts)):
        return [name]
    return [
        f"{name} (layer {i} of {len(parts)})" for i, marked in enumerate(parts, start=1) if marked
    ]


def fingerprints(tree: Any) -> dict[str, list[str]]:
    """A digest of each leaf's bytes by its path; of stacked layers one for each."""
    found: dict[str, list[str]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name, values = path_name(path), np.asarray(jax.device_get(leaf))
        stacked = values.ndim > 0 and layers_of(name, len(values))
        parts = values if stacked else values[None]
        found[name] = [hashlib.blake2b(part.tobytes(), digest_size=8).hexdigest() for part in parts]
    return found


def differing_leaves(a: dict[str, list[str]], b: dict[str, list[str]]) -> list[str]:
    """Leaves whose fingerprints differ, or that one of the two lacks."""
    return [name for name in dict.fromkeys((*a, *b)) if a.get(name) != b.get(name)]


def unchanged_parts(a: dict[str, list[str]], b: dict[str, list[str]]) -> tuple[list[str], int]:
    """Leaves, or layers of them, whose fingerprints are equal: names, and number of layers."""
    same = {name: [x == y for x, y in zip(a[name], b[name], strict=True)] for name in a}
    names = [label for name, parts in same.items() if any(parts) for label in labels(name, parts)]
    return names, sum(map(sum, same.values()))


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


class Trials:
    """A configuration with its data, and the trials and checks made with it so far.

    Args:
        config: of the run to come.
        device: a GPU that memory is planned for; None: the one that is here, if any.
        host_budget: bytes of pinned host memory that may be used.

    Raises:
        UserError: as at the start of the run itself.
    """

    # What `result` finds by name.
    checks: ClassVar[Sequence[Check[Any]]] = ()

    def __init__(
        self, config: Config, device: Device | None = None, host_budget: int = HOST_BUDGET
    ):
        self.data: DataDirectory = ensure_prepared(config)
        self.sources = open_sources(config.data, self.data)
        self.windows = self._windows(config)
        self.config = loop.resolve_config(config, self.data, self.windows)
        Control(self.config)  # trials are made without controllers, the run is not
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
            check = next(check for check in self.checks if check.name == name)
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
        with self._directory() as directory, _quietly():
            run = loop.Run(self.in_trial(directory))
            try:
                before = fingerprints(run.state.params)
                norm = float(global_norm(run.state.params))
                records = make_updates(run, RESUMED)
                halfway = fingerprints(run.state)
                blocks = read_records(run.directory / BLOCKS)
                records += make_updates(run, self.settings.updates - RESUMED)
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
        with self._directory() as directory, _quietly():
            config = self.in_trial(directory)
            run = loop.Run(config)
            try:
                make_updates(run, INTERRUPTED)
                run.save()
                run.checkpoints.wait()
                saved, spec, place = fingerprints(run.state), run.spec, run.sharding
                folder = run.checkpoints.directory
            finally:
                run.close()
            damage = inspect(folder / str(INTERRUPTED)).damage
            empty: dict[str, list[str]] = {}
            try:
                with Checkpoints(folder, read_only=True) as checkpoints:
                    abstract = jax.eval_shape(lambda: step.init_state(spec))
                    loaded = fingerprints(checkpoints.restore(INTERRUPTED, abstract, place))
                run = loop.Run(config)
            except Failure as failure:
                return Restart(damage, saved, empty, str(failure), empty, empty, [], [], 0)
            try:
                resumed, begins = fingerprints(run.state), run.progress.update
                make_updates(run, RESUMED - begins)
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
        return train_on(
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
        params["final_norm"] = {"scale": (scale * SHARPER).astype(scale.dtype)}
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
        head = jax.jit(lambda p: apply(spec.model, p).head().astype(spec.model.compute_dtype))
        logits = hidden @ np.asarray(head(params), np.float64).T
        return Probe(
            window,
            float(sums.cross_entropy),
            float(sums.target_tokens),
            by_name(finite),
            by_name(zero),
            logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True)),
        )

    @functools.cached_property
    def plan(self) -> Plan | None:
        """The planner's figures for the named device."""
        return None if self.device is None else plan_training(self.config, self.device)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keep from the terminal what the loop says about a trial: checks say it."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def by_name(tree: Any) -> dict[str, list[bool]]:
    """Leaves, or single booleans, as lists by their path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_name(path): np.atleast_1d(leaf).tolist() for path, leaf in leaves}


def make_updates(run: loop.Run, updates: int) -> list[dict[str, Any]]:
    """Make updates as the loop does: each is read after the next is dispatched."""
    records, pending = [], None
    for _ in range(updates):
        previous, pending = pending, run.dispatch()
        if previous is not None:
            records.append(run.read(previous))
    return records if pending is None else [*records, run.read(pending)]


def train_on(
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
    width = TINY + 1
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
