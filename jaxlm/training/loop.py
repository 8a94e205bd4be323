"""A run from its first update to its report, through any number of interruptions.

Order of things in an update: take the window, dispatch the step, and only then read what the
update before it reported, so that the device never waits for the host. A checkpoint is written
after the records of every update before it are on disk.
"""

import contextlib
import dataclasses
import gc
import importlib.metadata
import json
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm import environment
from jaxlm.config import Config, check_horizon, to_tree, to_yaml
from jaxlm.console import Advance, console, progress
from jaxlm.data.pipeline import (
    Windows,
    device_iterator,
    fingerprint_of,
    open_sources,
    rows_of,
    training_windows,
    validation_stream,
)
from jaxlm.data.prepare import ensure_prepared
from jaxlm.data.shards import DataDirectory
from jaxlm.errors import Failure, UserError
from jaxlm.evaluation.evaluate import (
    Evaluation,
    evaluate,
    number_of_batches,
    unigram_cross_entropy,
)
from jaxlm.evaluation.report import evaluation_json, evaluation_table, write_report
from jaxlm.files import Lock, append_line, finite, refuse_links, write_atomically
from jaxlm.memory.devices import peak_flops
from jaxlm.models.depth import draw_depth
from jaxlm.models.flops import flops_per_token
from jaxlm.signals import on_ending, say
from jaxlm.training.checkpoint import Checkpoints
from jaxlm.training.compilation import CompileOnce
from jaxlm.training.control import Control, Settings
from jaxlm.training.diagnosis import Diagnosis, Finding
from jaxlm.training.goodput import Goodput, Kind, goodput_line, read_accounts, summary
from jaxlm.training.manifest import inspect, remove
from jaxlm.training.metrics import (
    ALARMS,
    EVALUATIONS,
    EVENTS,
    METRICS,
    MONITORS,
    STARTS,
    RunLog,
    read_records,
)
from jaxlm.training.monitors import TEXTS, Alarm, Alarms, due, measure, not_judged
from jaxlm.training.optimizer import describe_optimizer
from jaxlm.training.out_of_memory import explaining_out_of_memory, memory_line
from jaxlm.training.profiling import (
    PROFILE,
    Phases,
    predicted_ratio,
    profile_table,
    ratio_line,
    summarise,
    write_profile,
)
from jaxlm.training.resume import config_changes, data_changes
from jaxlm.training.rewind import Rewinds, SpikeError, SpikeWatch
from jaxlm.training.spec import StepMetrics, StepSpec, step_spec
from jaxlm.training.state import TrainState
from jaxlm.training.step import init_state, train_step
from jaxlm.training.watchdog import Watchdog

RECOVERY = "recovery.jsonl"  # which damaged checkpoints were passed over
INTERRUPTED = 130  # exit code after Ctrl-C, as shells have it; SIGTERM ends with 0


@dataclasses.dataclass
class Progress:
    """What a run carries from update to update beside its TrainState, in host integers."""

    # Updates made, skipped ones included.
    update: int = 0
    # Target tokens of all windows so far.
    tokens: int = 0
    # Updates skipped because loss, gradient or change was not finite: in all, and in a row.
    nonfinite_updates: int = 0
    nonfinite_in_a_row: int = 0
    # Windows that held no target token.
    empty_windows: int = 0


@dataclasses.dataclass(frozen=True)
class _Pending:
    """An update whose step was dispatched and whose metrics are still on the device."""

    update: int
    settings: Settings
    metrics: StepMetrics


class _Signals:
    """SIGTERM, SIGHUP and SIGINT finish the update in hand; Ctrl-C after that stops at once.

    At once is meant: the kernel then ends the process, without waiting for a save in the
    background. That is safe because nothing of a save counts before it is complete.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals inside the block."""

        def handle(number: int, frame: object) -> None:
            del frame
            self.received = signal.Signals(number)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            say(
                f"{self.received.name}: finishing this update, then saving"
                + ("; Ctrl-C again stops at once" if number == signal.SIGINT else "")
            )

        with on_ending(handle):
            yield


def resolve_config(
    config: Config, data: DataDirectory, windows: Windows, passed_over: int = 0
) -> Config:
    """Fill in what the data decides: vocabulary size and number of updates.

    Args:
        config: settings.
        data: what `windows` are made of.
        windows: of training data.
        passed_over: how many of them the run does not read, after spikes of its loss.

    Raises:
        UserError: a vocabulary too small for the data, more updates than the data gives, or a
            schedule that does not fit.
    """
    vocabulary = config.model.vocabulary_size or data.vocabulary_size
    if vocabulary < data.vocabulary_size:
        raise UserError(
            f"model.vocabulary_size ({vocabulary}) is below the data's ({data.vocabulary_size})"
        )
    available = len(windows) - passed_over
    less = f" less {passed_over} that rewinds passed over" if passed_over else ""
    updates = config.training.updates or available
    if updates > available:
        raise UserError(
            f"training.updates ({updates}) needs as many windows; the data gives {available}: "
            f"{windows.describe()}{less}; lower training.updates or raise data.epochs"
        )
    try:
        check_horizon(config, updates)
    except ValueError as error:
        raise UserError(f"{error}; the data gives {available} updates") from None
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, vocabulary_size=vocabulary),
        training=dataclasses.replace(config.training, updates=updates),
    )


class Run:
    """One run: its directory, data, state and records."""

    def __init__(
        self,
        config: Config,
        allow_changes: Collection[str] = (),
        first_of_process: bool = True,
        until_update: int | None = None,
    ):
        """Open a run, new or interrupted.

        Args:
            config: settings.
            allow_changes: kinds of change against the run's last checkpoint that are accepted, and
                recorded in changes.jsonl: names of `resume.ON_REQUEST`.
            first_of_process: whether the time since the process began counts as starting.
            until_update: :meth:`train` stops, saved, after so many updates of the horizon; None
                goes to its end. Data for the later ones need not be there yet.

        Raises:
            UserError: unusable data or settings, or changes that may not be made at resume.
        """
        data = ensure_prepared(config)
        self.directory = Path(config.run.directory) / config.run.name
        rewinds = Rewinds(self.directory)
        needed = until_update and rewinds.windows_before(until_update)
        sources = open_sources(config.data, data, config.distillation.cache, needed)
        self.teacher = sources[0].stream.teacher
        self.windows = training_windows(
            sources,
            config.data,
            config.training.micro_batches,
            config.training.micro_batch_rows,
            needed,
        )
        self.validation_rows = rows_of(validation_stream(data, config.data), config.data)
        if not len(self.validation_rows):  # said now and not after weeks
            limit = config.data.validation_tokens
            within = "" if limit is None else f" within data.validation_tokens ({limit:,})"
            raise UserError(
                f"{data.directory}: no validation document with a target lies{within or ' there'}; "
                + ("raise it" if within else "prepare with a larger prepare.validation_fraction")
            )
        self.data = data
        self.data_fingerprint = fingerprint_of(data, config.data, sources)
        self.config = config = resolve_config(config, data, self.windows, rewinds.passed_over())
        assert config.training.updates is not None
        self.updates = config.training.updates
        self.until = self.updates if until_update is None else until_update
        if not 1 <= self.until <= self.updates:
            raise UserError(
                f"--until-update {self.until}: expected 1 to {self.updates}, the run's horizon"
            )
        self.spec: StepSpec = step_spec(config, config.model.vocabulary, self.updates)
        self.sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        self.progress = Progress()
        self.signals = _Signals()
        self._step = CompileOnce(train_step, self.spec, self.windows.lengths)
        self._peak_flops = peak_flops(jax.devices()[0].device_kind)
        self._last_read = time.perf_counter()
        self._data_seconds = 0.0
        # Seconds since the last read that belong to no update: compilation, profiling.
        self._aside_seconds = 0.0
        with (
            explaining_out_of_memory(config, self.directory),
            contextlib.ExitStack() as stack,
        ):
            self._open(stack, allow_changes, first_of_process)
            self._open_resources = stack.pop_all()

    def _open(
        self, stack: contextlib.ExitStack, allow_changes: Collection[str], first_of_process: bool
    ) -> None:
        """Open what has to be closed again, also when opening the rest fails."""
        config = self.config
        busy = f"{self.directory}: another process is training this run"
        refuse_links(self.directory, "a run")
        stack.enter_context(Lock(self.directory / "lock", busy))
        self.checkpoints = stack.enter_context(
            Checkpoints(
                self.directory / "checkpoints",
                config.checkpoint.keep,
                config.checkpoint.keep_every_tokens,
            )
        )
        self.rewinds = Rewinds(self.directory)  # under the lock: nobody adds any from now on
        self.iterator = device_iterator(
            self.windows,
            config.data.prefetch,
            self.sharding,
            self.rewinds.windows_before(self.until),
        )
        stack.callback(self._close_iterator)
        latest = self.checkpoints.recover(self.directory / RECOVERY)
        self._changes: list[dict[str, Any]] = []
        self._resumed_at = latest or 0
        self.control = Control(config)
        if latest is None:
            self._refuse_to_start_over()
            self._write_config()
            self.state = jax.device_put(init_state(self.spec), self.sharding)
        else:
            self.state = self.restore(latest, allow_changes)
            self._write_config()
        self.checkpoints.check_space(self.state)
        self.log = RunLog(self.directory, self.progress.update, config.logging.tensorboard)
        stack.callback(self.log.close)
        self.goodput = Goodput(
            self.directory, self.progress.update, self.log.dropped, first_of_process
        )
        stack.callback(lambda: self.goodput.close(self.progress.update))
        self._last_record: dict[str, Any] | None = None
        self._alarms = Alarms(config, read_records(self.directory / MONITORS))
        self._read_what_was()
        self._watchdog = Watchdog(self._tell_slow)
        stack.callback(self._watchdog.close)
        self._profiling = _Profiling(self)
        stack.callback(self._profiling.end_trace)
        start = {
            "time": time.time(),
            "update": self.progress.update,
            "environment": environment.describe(),
        }
        append_line(self.directory / STARTS, json.dumps(start))

    def _write_config(self) -> None:
        write_atomically(self.directory / "config.yaml", to_yaml(self.config))

    def _read_what_was(self) -> None:
        """Let everything that follows the records see those of before."""
        named = [e["finding"] for e in read_records(self.directory / EVENTS) if "finding" in e]
        # Tokens of a mixture are not as common as in the directory that the validation is of.
        unigram = None if self.config.data.sources else self._unigram()
        self._diagnosis = Diagnosis(self.config, named, unigram)
        self._spikes = SpikeWatch(self.config.rewind)
        passes = {e["update"]: e for e in read_records(self.directory / EVALUATIONS)}
        for record in read_records(self.directory / METRICS):
            self._diagnosis.read_update(record)
            self._spikes.read(record)
            if record["update"] + 1 in passes:
                self._diagnosis.read_evaluation(passes[record["update"] + 1])

    def _unigram(self) -> float:
        return unigram_cross_entropy(self.data, validation_stream(self.data, self.config.data))

    def _refuse_to_start_over(self) -> None:
        """Starting anew empties the records: not where they say that checkpoints should be here.

        A save waits for the one before it: with records beyond the second save, the first one was
        complete. Without, a run may have been killed before it had any checkpoint.
        """
        made = len(read_records(self.directory / METRICS))
        if made > 2 * self.config.checkpoint.every:
            raise UserError(
                f"{self.directory}: has the records of {made} updates but no checkpoint in "
                f"{self.checkpoints.directory}; bring the checkpoints back (is a disk missing?), "
                f"choose another run.name, or remove {self.directory} to start over"
            )

    def tell_start(self) -> None:
        """Say where an interrupted run goes on, and what has changed."""
        done = self.progress.update
        if done:
            print(f"Continuing {self.directory} after update {done}", flush=True)
        for change in self._changes:
            print(
                f"Changed from here on ({change['change']}): {change['key']} was {change['was']}, "
                f"is {change['is']}",
                flush=True,
            )

    def go_back(self, spike: SpikeError) -> None:
        """Make the last whole checkpoint before a spike the newest, and record what follows.

        Later checkpoints are removed first: a kill between the two leaves a run that meets the same
        spike again.

        Raises:
            Failure: there is no such checkpoint, or the run went back often enough.
        """
        settings, directory = self.config.rewind, self.checkpoints.directory
        self.checkpoints.wait()
        what = f"{self.directory}: update {spike.update}: {spike.why}"
        if len(self.rewinds.made) >= settings.maximum:
            raise Failure(
                f"{what}; the run has gone back {settings.maximum} times already (rewind.maximum); "
                f"lower optim.learning_rate, or look at the data (rewinds.jsonl has the updates)"
            )
        before = [update for update in self.checkpoints.updates if update <= spike.since]
        whole = next((u for u in reversed(before) if inspect(directory / str(u)).whole), None)
        if whole is None:
            raise Failure(
                f"{what}; there is no checkpoint of before update {spike.since} to go back to: "
                f"lower optim.learning_rate, or save more often (checkpoint.every)"
            )
        for update in self.checkpoints.updates:
            if update > whole:
                remove(directory, update)
        rewind = self.rewinds.answer(settings, spike, whole, self.updates, len(self.windows))
        self.rewinds.append(rewind)
        then = (
            f"{rewind.skipped_windows} windows of data are passed over"
            if rewind.skipped_windows
            else f"learning rate times {rewind.rate_factor:g} for {rewind.rate_updates} updates"
        )
        print(f"Going back from update {spike.update} to {whole}: {rewind.why}; {then}", flush=True)

    def _close_iterator(self) -> None:
        self.iterator.close()
        # Grain's iterators complain when the interpreter, not the collector, ends them.
        del self.iterator
        gc.collect()

    def close(self) -> None:
        """Wait for pending saves; close files and threads; let another process continue."""
        self._open_resources.close()

    # ------------------------------------------------------------------ checkpoints

    def restore(self, update: int, allow_changes: Collection[str] = ()) -> TrainState:
        """Go back to a checkpoint: state, position in the data, and counters."""
        metadata = self.checkpoints.metadata(update)
        refused, self._changes = config_changes(metadata["config"], self.config, allow_changes)
        refused += data_changes(
            metadata["data_fingerprint"], self.data_fingerprint, self.config.data.tokens is not None
        )
        if refused:
            raise UserError(
                f"{self.directory}: cannot continue from update {update} with these changes; undo "
                f"them, or choose another run.name:\n" + "\n".join(refused)
            )
        self.progress = Progress(**metadata["progress"])
        self.control.restore(metadata["control"])
        position = metadata["data_position"]
        if self.rewinds.made:
            position |= {"next_index": self.rewinds.windows_before(update)}
        self.iterator.set_state(position)
        abstract = jax.eval_shape(lambda: init_state(self.spec))
        return self.checkpoints.restore(update, abstract, self.sharding)

    def save(self, validation: float | None = None) -> None:
        """Write a checkpoint of the state between two updates."""
        for change in self._changes:  # updates were made under them: they are part of the run
            self.log.change({"update": self._resumed_at, **change})
        self._changes = []
        self.log.sync()
        versions = {n: importlib.metadata.version(n) for n in ("jax", "flax", "optax", "grain")}
        metadata = {
            "progress": dataclasses.asdict(self.progress),
            "control": self.control.state(),
            "data_position": self.iterator.get_state(),
            "data_fingerprint": self.data_fingerprint,
            "config": to_tree(self.config),
            "versions": versions,
        }
        self.checkpoints.save(
            self.progress.update, self.state, metadata, self.progress.tokens, validation
        )

    # ------------------------------------------------------------------ updates

    def dispatch(self) -> _Pending:
        """Start the next update and return without waiting for it."""
        update = self.progress.update
        self._profiling.before(update)
        window = self._next_window()
        settings = self.control.decide(update, lambda mean: self._draw(update, mean))
        factor = self.rewinds.rate(update)
        if factor != 1.0:
            multiplier = settings.rate_multiplier * factor
            settings = dataclasses.replace(settings, rate_multiplier=multiplier)
        for decision in settings.decisions:
            self.log.decision(dataclasses.asdict(decision))
        arguments = (
            window,
            jnp.asarray(settings.depth, jnp.int32),
            jnp.asarray(settings.backprop_depth, jnp.int32),
            jnp.asarray(settings.rate_multiplier, jnp.float32),
        )
        length = window["tokens"].shape[-1] - 1
        with self._profiling.timing(update, arguments, settings):
            compiled = self._step.seconds
            self.state, metrics = self._step(self.state, *arguments, variant=length)
            self.set_aside("compile", self._step.seconds - compiled)
        self.progress.update += 1
        return _Pending(update, settings, metrics)

    def _next_window(self) -> Any:
        began = time.perf_counter()
        before = self.goodput.switch("data")
        self._watchdog.waiting_for("data")
        self.rewinds.pass_over(self.iterator, self.progress.update)
        window = next(self.iterator)
        self._watchdog.waiting_for("the device")
        self.goodput.switch(before)
        self.data_seconds = time.perf_counter() - began
        self._data_seconds += self.data_seconds
        return window

    def set_aside(self, kind: Kind, seconds: float) -> None:
        """Seconds that were no part of an update."""
        self.goodput.move(kind, seconds)
        self._aside_seconds += seconds

    def _draw(self, update: int, mean: float) -> int:
        if self.config.model.kind != "recurrent":
            return 0
        return draw_depth(self.config.depth, self.config.run.seed, update, mean)

    def read(self, pending: _Pending) -> dict[str, Any]:
        """Wait for an update, count it, record it, and return its record."""
        metrics = jax.device_get(pending.metrics)
        now = time.perf_counter()
        seconds, self._last_read = now - self._last_read - self._aside_seconds, now
        data_seconds, self._data_seconds = self._data_seconds, 0.0
        self._aside_seconds = 0.0
        self._watchdog.done(seconds)
        self._watchdog.begin(pending.update + 1)  # dispatched before this one was read
        progress = self.progress
        target_tokens = int(metrics.target_tokens)
        progress.tokens += target_tokens
        progress.empty_windows += target_tokens == 0
        progress.nonfinite_updates += not metrics.finite
        progress.nonfinite_in_a_row = 0 if metrics.finite else progress.nonfinite_in_a_row + 1
        tokens_per_second = target_tokens / seconds
        settings = pending.settings
        recurrent = self.config.model.kind == "recurrent"
        record = finite(
            {
                "update": pending.update,
                "tokens": progress.tokens,
                "loss": float(metrics.loss),
                "cross_entropy": float(metrics.cross_entropy),
                "distillation": None if self.teacher is None else float(metrics.distillation),
                "grad_norm": float(metrics.grad_norm),
                "update_norm": float(metrics.update_norm),
                "core_update_norm": float(metrics.core_update_norm) if recurrent else None,
                "learning_rate": float(metrics.learning_rate),
                "rate_multiplier": settings.rate_multiplier,
                "applied": bool(metrics.applied),
                "kept_layers": int(metrics.kept_layers),
                "depth": settings.depth if recurrent else None,
                "backprop_depth": settings.backprop_depth if recurrent else None,
                "mean_depth": settings.mean_depth if recurrent else None,
                "seconds": seconds,
                "tokens_per_second": tokens_per_second,
                "mfu": self._mfu(tokens_per_second, pending),
                "data_wait_fraction": data_seconds / seconds,
                "planned_memory_bytes": self._step.planned[0],
                "peak_memory_bytes": (jax.devices()[0].memory_stats() or {}).get(
                    "peak_bytes_in_use"
                ),
            }
        )
        self._last_record = record
        self.control.read_update(record)
        self.log.update(record)
        blocks = np.asarray(metrics.blocks).tolist()
        self.log.blocks(pending.update, blocks)
        if not metrics.finite:
            self._tell_not_finite(pending.update, blocks)
        self._tell_findings(self._diagnosis.read_update(record))
        self.goodput.record(pending.update + 1, due_only=True)
        spike = self._spikes.read(record)
        if spike is not None and self.config.rewind.response != "off":
            raise spike
        limit = self.config.training.max_nonfinite_updates
        if progress.nonfinite_in_a_row >= limit:
            self.checkpoints.wait()
            latest = self.checkpoints.latest
            saved = (
                "no checkpoint had been saved"
                if latest is None
                else f"{self.checkpoints.directory / str(latest)} holds finite weights of before"
            )
            raise Failure(
                f"{self.directory}: loss or gradient was not finite for {limit} updates in a row "
                f"(up to update {pending.update}); {saved}. Lower optim.learning_rate, or lengthen "
                f"the warm-up; python scripts/replay.py {self.directory} --update {pending.update} "
                f"finds where numbers stop being finite"
            )
        return record

    def _tell(self, update: int, kind: str, text: str, line: str, **more: Any) -> None:
        """Write an event down and say it."""
        self.log.event(update, kind, text, **more)
        print(line, flush=True)

    def _tell_not_finite(self, update: int, blocks: list[list[int]]) -> None:
        text = (
            f"loss or gradient was not finite; skipped, {self.progress.nonfinite_updates} so far. "
            f"Find out where: python scripts/replay.py {self.directory} --update {update}"
        )
        ids = [[i for i in row if i >= 0] for row in blocks]
        self._tell(update, "not_finite", text, f"Update {update}: {text}", blocks=ids)

    def _tell_findings(self, findings: list[Finding]) -> None:
        for found in findings:
            self._tell(found.update, "finding", found.text, found.line(), finding=found.kind)

    def _tell_slow(self, update: int, line: str) -> None:
        self._tell(update, "slow", line, line)

    def _mfu(self, tokens_per_second: float, pending: _Pending) -> float | None:
        """Model FLOPs utilisation: causal attention's need, no recomputation counted."""
        if self._peak_flops is None:
            return None
        attended = (self.config.data.sequence_length + 1) / 2
        flops = flops_per_token(
            self.spec.model, attended, pending.settings.depth, pending.settings.backprop_depth
        )
        return tokens_per_second * flops.training / self._peak_flops

    def validate(self, depths: tuple[int, ...], limit: int | None, title: str) -> list[Evaluation]:
        """Evaluate the current weights, with a progress bar if it has a title."""
        settings = self.config.evaluation
        chosen = depths if self.config.model.kind == "recurrent" else depths[:1]
        batches = number_of_batches(self.validation_rows, limit, settings.batch_rows, chosen)
        show = progress(title, batches) if title else contextlib.nullcontext(None)
        with show as on_batch:
            evaluations = evaluate(
                self.spec.model,
                self.state.params,
                self.validation_rows,
                depths=chosen,
                batch_rows=settings.batch_rows,
                chunk_tokens=self.config.loss.chunk_tokens,
                token_bytes=self.data.token_bytes(),
                text_prefix=self.data.text_prefix,
                limit=limit,
                on_batch=on_batch,
            )
        return evaluations

    def train(self) -> signal.Signals | None:
        """Make the updates that are left; returns the signal that ended them early, if any."""
        config, signals, goodput = self.config, self.signals, self.goodput
        title = f"Training {config.run.name}"
        start = self.progress.update
        with (
            signals.installed(),
            progress(title, self.until, start, config.logging.every) as advance,
        ):
            goodput.switch("training")
            self._last_read = time.perf_counter()
            self._watchdog.begin(start)
            pending: _Pending | None = None
            stopping = False

            def finish(pending: _Pending) -> None:
                record = self.read(pending)
                if pending.update == start and record["peak_memory_bytes"]:
                    print(memory_line(self._step.planned, record["peak_memory_bytes"]))
                self._show(advance, record)

            while self.progress.update < self.until and not stopping:
                self.checkpoints.raise_failed()
                alone = self._profiling.busy
                previous, pending = pending, self.dispatch()
                if previous is not None:
                    finish(previous)
                done = self.progress.update
                evaluating = config.evaluation.every and done % config.evaluation.every == 0
                watching = evaluating or due(config, done)
                saving = done % config.checkpoint.every == 0 or done == self.until
                # Looked at once: a signal that comes later ends the next update.
                stopping = signals.received is not None
                if alone or watching or saving or stopping:
                    finish(pending)
                    pending = None
                if watching or saving or stopping:
                    self._watchdog.pause()
                    goodput.switch("evaluation")
                    validation = self._periodic_validation() if evaluating else None
                    stop = [a for a in self._watch() if a.action == "stop"] if watching else []
                    goodput.switch("checkpoint")
                    if saving or stopping or stop:
                        self.save(validation)
                        goodput.record(done)
                    if stop:
                        self.checkpoints.wait()
                        names = ", ".join(alarm.monitor for alarm in stop)
                        raise Failure(
                            f"{self.directory}: saved after update {done} and stopped by the "
                            f"alarm of {names} (monitors.stop); the same command goes on, without "
                            f"stopping again before that alarm has cleared"
                        )
                    goodput.switch("training")
                    self._last_read, self._data_seconds = time.perf_counter(), 0.0
                    self._watchdog.begin(done)
            self._watchdog.pause()
            goodput.switch("checkpoint")
            self.checkpoints.wait()  # under the handlers: no signal may cut the last save short
            self._profiling.close()
        return signals.received

    def _periodic_validation(self) -> float | None:
        depth = round(self.config.depth.mean)
        evaluation = self.validate((depth,), self.config.evaluation.rows, "")[0]
        figures = dataclasses.asdict(evaluation)
        progress = self.progress
        record = finite({"update": progress.update, "tokens": progress.tokens, **figures})
        self.log.evaluation(record)
        self.control.read_evaluation(record)
        self._tell_findings(self._diagnosis.read_evaluation(record))
        return record["cross_entropy"]

    def _watch(self) -> list[Alarm]:
        """Take the monitors' figures, record them, and return the alarms that they raise."""
        config, done = self.config, self.progress.update
        if config.model.kind != "recurrent" or config.monitors.rows == 0:
            return []
        last = self._last_record
        assert last is not None  # that of the update just made
        figures = measure(config, self.spec, self.state.params, self.validation_rows, last)
        record = {"update": done, "tokens": self.progress.tokens, **figures}
        record["beyond"] = self._alarms.beyond(done, figures)
        self.log.monitors(finite(record))
        alarms = self._alarms(done, figures)
        for alarm in alarms:
            self.log.alarm(dataclasses.asdict(alarm))
            print(alarm.line(), flush=True)
        return [alarm for alarm in alarms if alarm.event == "raised"]

    def _show(self, advance: Advance, record: dict[str, Any]) -> None:
        depth = "" if record["depth"] is None else f"  depth {record['depth']:2d}"
        loss = "not finite" if record["loss"] is None else f"{record['loss']:.4f}"
        mfu = "" if record["mfu"] is None else f"  MFU {record['mfu']:.1%}"
        advance(
            1,
            f"loss {loss}{depth}  rate {record['learning_rate']:.2e}"
            f"  {record['tokens_per_second']:,.0f} tok/s{mfu}"
            f"  data {record['data_wait_fraction']:.1%}",
        )

    def report(self) -> None:
        """Evaluate at every depth asked for and write the report."""
        settings = self.config.evaluation
        self.goodput.switch("evaluation")
        evaluations = self.validate(settings.depths, None, "Evaluating")
        self.goodput.record(self.progress.update)
        goodput = summary(read_accounts(self.directory))
        assert goodput is not None
        unigram = self._unigram()
        passes = read_records(self.directory / MONITORS)
        report = evaluation_json(
            evaluations,
            unigram,
            self.progress.update,
            name=self.config.run.name,
            model=self.config.model.kind,
            parameters=sum(x.size for x in jax.tree.leaves(self.state.params)),
            tokens=self.progress.tokens,
            nonfinite_updates=self.progress.nonfinite_updates,
            empty_windows=self.progress.empty_windows,
            monitors=next(reversed(passes), None),
            not_judged=not_judged(self.config, passes),
            alarms=read_records(self.directory / ALARMS),
            events=read_records(self.directory / EVENTS),
            goodput=goodput,
            goodput_line=goodput_line(goodput),
        )
        thresholds = {name: getattr(self.config.monitors, name) for name in TEXTS}
        written = write_report(
            self.directory,
            finite(report),
            evaluations,
            read_records(self.directory / METRICS),
            read_records(self.directory / EVALUATIONS),
            passes,
            thresholds,
        )
        screen = console()
        screen.print(evaluation_table(evaluations, f"Validation of {self.config.run.name}"))
        screen.print(f"Unigram cross-entropy of the validation tokens: {unigram:.4f}")
        screen.print(goodput_line(goodput), soft_wrap=True)
        screen.print(f"Written to {self.directory}: {', '.join(written)}")
        if "curves.png" not in written:
            screen.print("(curves.png needs matplotlib: pip install 'jaxlm[report]')")


class _Profiling:
    """Times the phases of the first updates of a new run, and writes the trace asked for."""

    def __init__(self, run: Run):
        self._run, self._settings = run, run.config.profile
        done = (run.directory / PROFILE).exists() or run.progress.update > 0
        self._phases = None if done or self._settings.updates == 0 else Phases(run.spec)
        self._records: list[dict[str, float]] = []
        # When the update before one that is timed ended, and the seconds of evaluation and saving
        # by then.
        self._before: tuple[float, float] | None = None
        self._tracing = False

    def before(self, update: int) -> None:
        """Start or stop the trace, as the settings say."""
        if self._settings.trace is None:
            return
        first, stop = self._settings.trace
        if update == first:
            self._tracing = True
            jax.profiler.start_trace(str(self._run.directory / "trace"))
        elif self._tracing and update >= stop:
            jax.block_until_ready(self._run.state)
            self.end_trace()

    def end_trace(self) -> None:
        """Write the trace, if one is under way: JAX begins no other before it has ended."""
        if not self._tracing:
            return
        self._tracing = False
        jax.profiler.stop_trace()
        print(f"Trace written to {self._run.directory / 'trace'}", flush=True)

    def close(self) -> None:
        """At the end of the updates, end what one more of them would have ended."""
        jax.block_until_ready(self._run.state)
        self.end_trace()
        if self._phases is not None:
            made = f"{len(self._records)} of {self._settings.updates} updates"
            print(f"No {PROFILE}: {made} were profiled before the run ended", flush=True)

    @property
    def busy(self) -> bool:
        """Whether each update is to be waited for, since it is timed or goes before one that is."""
        return self._phases is not None

    @contextlib.contextmanager
    def timing(self, update: int, arguments: Any, settings: Settings) -> Iterator[None]:
        """Run the step in the block, with the clock around it and the phases after it.

        Every second update is timed: the programs of the phases take the step's memory, and the
        first step after them pays for getting it back.
        """
        run, phases = self._run, self._phases
        if phases is None or update == 0:  # the first update compiles
            yield
            return
        began, apart = time.perf_counter(), run.goodput.spent("evaluation", "checkpoint")
        yield
        jax.block_until_ready(run.state)
        ended = time.perf_counter()
        if self._before is None:
            self._before = (ended, apart)
            return
        host = began - self._before[0] - run.data_seconds - (apart - self._before[1])
        self._before = None
        window, *scalars = arguments
        run.state, seconds = phases.measure(run.state, window, *scalars)
        run.set_aside("profile", time.perf_counter() - ended)
        length = window["tokens"].shape[-1] - 1
        self._records.append(
            {
                **seconds,
                "step": ended - began,
                "host": host,
                "data": run.data_seconds,
                "tokens": float(window["block"].size * length),
                "predicted": predicted_ratio(
                    run.spec, length, settings.depth, settings.backprop_depth
                ),
            }
        )
        if len(self._records) == self._settings.updates:
            self._finish()

    def _finish(self) -> None:
        """Say what was measured, and let go of the programs."""
        profile = summarise(self._records)
        write_profile(self._run.directory, profile)
        console().print(profile_table(profile))
        print(ratio_line(profile), flush=True)
        self._phases = None


def train(
    config: Config,
    allow_changes: Collection[str] = (),
    until_update: int | None = None,
    finish: Callable[[Run], None] | None = None,
) -> int:
    """Run, or continue, what a configuration describes.

    Args:
        config: settings.
        allow_changes: see :class:`Run`.
        until_update: stop, saved and without a report, after so many updates of the horizon.
        finish: what is done with the run at the end in place of that, but not after a signal.

    Returns:
        The exit code: 0 after the report or a SIGTERM, 130 after Ctrl-C.
    """
    for line in environment.lines(environment.describe()):
        print(line, flush=True)
    finish = finish or (Run.report if until_update is None else _say_saved)
    first = True
    while True:
        code = _one_course(config, allow_changes, first, until_update, finish)
        if code is not None:
            return code
        # What went back holds a whole state in reference cycles: it goes before the next one comes.
        gc.collect()
        first = False


def _one_course(
    config: Config,
    allow_changes: Collection[str],
    first: bool,
    until_update: int | None,
    finish: Callable[[Run], None],
) -> int | None:
    """Start, or continue, a run; returns the exit code, None where it went back after a spike."""
    run = Run(config, allow_changes, first, until_update)
    with _closing(run):
        try:
            with explaining_out_of_memory(run.config, run.directory):
                return _live(run, finish)
        except SpikeError as spike:
            run.go_back(spike)  # and start again from there
            received = run.signals.received
            if received is None:
                return None
            return _ended_by(received, f"{run.directory}: saved there")


@contextlib.contextmanager
def _closing(run: Run) -> Iterator[None]:
    """Close a run after the block; what went wrong in it is not replaced by what follows of it."""
    try:
        yield
    except BaseException:
        try:
            run.close()
        except (Failure, OSError) as error:
            print(f"warning: while closing: {error}", file=sys.stderr, flush=True)
        raise
    run.close()


def _say_saved(run: Run) -> None:
    print(f"Saved after update {run.progress.update} of {run.updates}", flush=True)


def _live(run: Run, finish: Callable[[Run], None]) -> int:
    """Train to the end, or to a signal; returns the exit code."""
    print(f"Data: {run.windows.describe()}", flush=True)
    if run.teacher is not None:
        print(f"Teacher: {run.teacher.describe()}", flush=True)
    print(f"Update: {describe_optimizer(run.config)}", flush=True)
    run.tell_start()
    received = run.train()
    if received is not None:
        return _ended_by(received, f"Saved after update {run.progress.update} of {run.updates}")
    finish(run)
    return 0


def _ended_by(received: signal.Signals, saved: str) -> int:
    """Say what a signal has left; returns the exit code."""
    print(f"{saved}; the same command continues", flush=True)
    return INTERRUPTED if received == signal.SIGINT else 0
