"""One run of a study for one cycle, in a process of its own: train to an update, then evaluate.

    python -m jaxlm.study.worker JOB.json STUDY_PID

Or the teacher's part of a cycle: predict its tokens. A process for each run and cycle gives every
model a device that nothing was left on. The worker follows its study: if that is killed, it saves
and ends.
"""

import contextlib
import ctypes
import dataclasses
import io
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxlm.cli import run_script
from jaxlm.config import Config, from_tree, read_tree, to_tree
from jaxlm.console import progress
from jaxlm.data.pipeline import Rows, rows_of
from jaxlm.data.shards import DataDirectory
from jaxlm.data.teacher import lock_path
from jaxlm.distillation.caching import cache_teacher
from jaxlm.distillation.settings import TeacherConfig
from jaxlm.distillation.teachers import load_teacher
from jaxlm.errors import UserError
from jaxlm.evaluation.evaluate import (
    DocumentLosses,
    Evaluation,
    evaluate_documents,
    number_of_batches,
)
from jaxlm.files import Lock, finite, write_atomically, write_json
from jaxlm.signals import on_ending, say
from jaxlm.training.loop import Run, train

STOPPED = 75  # exit code after a signal: saved, and to be started again
_WAIT_SECONDS = 600.0  # for a worker of before to finish its last save
_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True)
class EvaluationSet:
    """Validation documents to evaluate on."""

    # How the report calls it.
    name: str
    # Data directory; None is the run's own.
    directory: str | None
    # The documents that lie within these validation tokens; None is all.
    tokens: tuple[int, int] | None


@dataclasses.dataclass(frozen=True)
class Job:
    """What a worker does."""

    # The run's configuration.
    config: Config
    # Updates after which training ends.
    until: int
    # Core steps to evaluate at.
    depths: tuple[int, ...]
    # What to evaluate on.
    sets: tuple[EvaluationSet, ...]
    # Where the figures go: JSON, and per-document sums beside it as .npz.
    result: Path

    def write(self, path: Path) -> None:
        """Write the job down for a worker."""
        tree = {
            "config": to_tree(self.config),
            "until": self.until,
            "depths": list(self.depths),
            "sets": [dataclasses.asdict(one) for one in self.sets],
            "result": str(self.result),
        }
        write_json(path, tree)


@dataclasses.dataclass(frozen=True)
class TeacherJob:
    """What a worker does for a teacher."""

    # Who predicts, and what is kept of it.
    teacher: TeacherConfig
    # Data directory.
    data: Path
    # Training tokens [0, until) that the cache is to reach to the end of.
    until: int
    # The cache.
    directory: Path

    def write(self, path: Path) -> None:
        """Write the job down for a worker."""
        fields = dataclasses.fields(TeacherConfig)
        tree = {
            "teacher": {field.name: getattr(self.teacher, field.name) for field in fields},
            "data": str(self.data),
            "until": self.until,
            "directory": str(self.directory),
        }
        write_json(path, tree)


def read_job(path: Path) -> Job | TeacherJob:
    """The job that :meth:`Job.write` or :meth:`TeacherJob.write` wrote."""
    tree = json.loads(path.read_text(encoding="utf-8"))
    if "teacher" in tree:
        teacher = read_tree(TeacherConfig, tree["teacher"], {})
        return TeacherJob(teacher, Path(tree["data"]), tree["until"], Path(tree["directory"]))
    sets = tuple(
        EvaluationSet(one["name"], one["directory"], one["tokens"] and tuple(one["tokens"]))
        for one in tree["sets"]
    )
    return Job(
        from_tree(tree["config"]),
        tree["until"],
        tuple(tree["depths"]),
        sets,
        Path(tree["result"]),
    )


def work(job: Job | TeacherJob) -> int:
    """Train, evaluate and write the figures; or predict.

    Returns:
        0 once all is done; STOPPED after a signal.
    """
    if isinstance(job, TeacherJob):
        return _predict(job)
    directory = Path(job.config.run.directory) / job.config.run.name
    _wait_for(directory / "lock")
    done = False

    def finish(run: Run) -> None:
        nonlocal done
        _evaluate_all(run, job)
        done = True

    train(job.config, until_update=job.until, finish=finish)
    return 0 if done else STOPPED


class _Signals:
    """A signal ends loading at once, and predicting after the group in hand."""

    def __init__(self) -> None:
        self.received = False
        self.loading = True

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals inside the block."""

        def handle(number: int, frame: object) -> None:
            del frame
            self.received = True
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            if self.loading:
                raise SystemExit(STOPPED)
            say(f"{signal.Signals(number).name}: saving what was predicted so far")

        with on_ending(handle):
            yield


def _predict(job: TeacherJob) -> int:
    _wait_for(lock_path(job.directory))
    signals = _Signals()
    with signals.installed():
        data = DataDirectory(job.data)
        teacher = load_teacher(job.teacher, data)
        signals.loading = False
        whole = cache_teacher(
            data,
            teacher,
            job.directory,
            job.teacher.form(data.vocabulary_size),
            (0, job.until),
            # So that a cycle's shards go with its tokens.
            exact=True,
            stopping=lambda: signals.received,
        )
    return 0 if whole else STOPPED


def _evaluate_all(run: Run, job: Job) -> None:
    began = time.time()
    evaluations: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}
    run.goodput.switch("evaluation")
    for one in job.sets:
        rows, data = _rows(run, one)
        if len(rows) == 0:
            continue
        found, documents = _evaluate(run, one.name, rows, data, job.depths)
        evaluations[one.name] = [finite(dataclasses.asdict(evaluation)) for evaluation in found]
        arrays[f"{one.name}.loss"] = documents.loss
        arrays[f"{one.name}.tokens"] = documents.tokens
    run.goodput.record(run.progress.update)
    written = io.BytesIO()
    np.savez_compressed(written, allow_pickle=False, **arrays)
    write_atomically(job.result.with_suffix(".npz"), written.getvalue())
    result = {
        "update": run.progress.update,
        "tokens": run.progress.tokens,
        "parameters": sum(x.size for x in jax.tree.leaves(run.state.params)),
        "nonfinite_updates": run.progress.nonfinite_updates,
        "empty_windows": run.progress.empty_windows,
        "evaluations": evaluations,
        "evaluation_seconds": time.time() - began,
        "device": jax.devices()[0].device_kind,
        **_peak_memory(),
    }
    write_json(job.result, result)


def check_comparable(data: DataDirectory, trained_on: DataDirectory) -> None:
    """Refuse data whose losses are not of the same tokens as those of the study's own.

    Raises:
        UserError: naming what differs.
    """
    for field in ("tokenizer", "normalization", "vocabulary"):
        if data.fingerprint()[field] != trained_on.fingerprint()[field]:
            raise UserError(
                f"study.evaluation_data: {data.directory} differs from {trained_on.directory} in "
                f"its {field}; losses would not be comparable"
            )


def _rows(run: Run, one: EvaluationSet) -> tuple[Rows, DataDirectory]:
    data = run.data if one.directory is None else DataDirectory(Path(one.directory))
    check_comparable(data, run.data)
    stream = data.stream("validation")
    if one.tokens is not None:
        stream = stream.part(*one.tokens)
    return rows_of(stream, run.config.data), data


def _evaluate(
    run: Run, title: str, rows: Rows, data: DataDirectory, depths: tuple[int, ...]
) -> tuple[list[Evaluation], DocumentLosses]:
    config = run.config
    chosen = depths if config.model.kind == "recurrent" else depths[:1]
    batches = number_of_batches(rows, None, config.evaluation.batch_rows, chosen)
    with progress(f"Evaluating on {title}", batches) as on_batch:
        return evaluate_documents(
            run.spec.model,
            run.state.params,
            rows,
            depths=chosen,
            batch_rows=config.evaluation.batch_rows,
            chunk_tokens=config.loss.chunk_tokens,
            token_bytes=data.token_bytes(),
            text_prefix=data.text_prefix,
            on_batch=on_batch,
        )


def _peak_memory() -> dict[str, Any]:
    """Most bytes on the device; of a device that does not say, of the process."""
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    if peak is not None:
        return {"peak_memory_bytes": peak, "peak_memory_of": "device"}
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"peak_memory_bytes": kibibytes * 1024, "peak_memory_of": "process"}


def _wait_for(lock: Path) -> None:
    """Wait until a worker whose study was killed has saved and let go of what it wrote."""
    deadline, told = time.monotonic() + _WAIT_SECONDS, False
    while True:
        try:
            with Lock(lock, f"{lock}: another process of the study still holds it"):
                return
        except UserError:
            if time.monotonic() > deadline:
                raise
            if not told:
                print(f"Waiting for another process to save and let go of {lock}", flush=True)
                told = True
            time.sleep(0.5)


def main() -> int:
    """Do the job that the first argument names, for the process that the second one numbers."""
    # Not longer than the study that waits for it: as a SIGTERM, the update is finished and saved.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    job, study = sys.argv[1:]
    if os.getppid() != int(study):  # it was killed before that
        return STOPPED
    return work(read_job(Path(job)))


if __name__ == "__main__":
    run_script(main, judge_output=False)
