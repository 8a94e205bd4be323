"""The records of a run: JSON lines for programs, TensorBoard for people."""

import contextlib
import itertools
import json
import os
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import (
    Event,  # pyright: ignore[reportAttributeAccessIssue]  # protobuf makes it when imported
    SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboardX.summary import scalar

from jaxlm.errors import Failure, UserError
from jaxlm.files import write_all, write_atomically

METRICS, BLOCKS, EVALUATIONS = "metrics.jsonl", "blocks.jsonl", "evaluations.jsonl"
MONITORS, ALARMS, DECISIONS = "monitors.jsonl", "alarms.jsonl", "decisions.jsonl"
EVENTS = "events.jsonl"
# One line for each start of the run (from where, in which environment), and for each setting that
# changed at one.
STARTS, CHANGES = "starts.jsonl", "changes.jsonl"
# A record belongs to the state after so many updates, or to one update; a change to the first one
# that was made under it.
_OF_STATES = (EVALUATIONS, MONITORS, ALARMS)
_OF_UPDATES = (BLOCKS, DECISIONS, EVENTS, CHANGES)
_TENSORBOARD_SECONDS = 30.0  # between flushes


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON-lines file, up to the first line that a crash left incomplete.

    Records are synced before each checkpoint; what a power failure tears comes after it.
    """
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    return list(itertools.takewhile(lambda record: record is not None, map(_record, lines)))


def _record(line: bytes) -> Any:
    """A line as an object with fields; None if it is none."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _records_until(path: Path, last: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The records up to an update, and those of later ones, as far as they can be read.

    Records up to a checkpoint were on disk before it was. So a line among them that cannot be read
    is damage, and no line that a power failure tore.

    Raises:
        UserError: naming such a line.
    """
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    kept: list[dict[str, Any]] = []
    later: list[dict[str, Any]] = []
    torn: int | None = None
    for number, line in enumerate(lines, 1):
        record = _record(line)
        update = None if record is None else record.get("update")
        if record is None or not isinstance(update, int):
            torn = torn or number
        elif update > last:
            later += [record] if torn is None else []
        elif torn is None:
            kept.append(record)
        else:
            raise UserError(
                f"{path}:{torn}: cannot be read as a record, though it is of before the "
                f"checkpoint; restore the file, or remove that line to go on without it"
            )
    return kept, later


class RunLog:
    """Appends records to a run's files.

    Args:
        directory: the run.
        update: updates the run has behind it; later records, left by a run that was killed after
            its last checkpoint, are removed, because those updates will be made again.
        tensorboard: also write TensorBoard event files.

    Every method raises a :class:`Failure` that names the file which cannot be written.
    """

    # Records of updates that will be made again.
    dropped: list[dict[str, Any]]

    def __init__(self, directory: Path, update: int, tensorboard: bool):
        self._files: dict[str, FileIO] = {}
        self._broken = False
        self.dropped = []
        files = [directory / name for name in (METRICS, *_OF_UPDATES, *_OF_STATES)]
        found = [
            _records_until(path, update if path.name in _OF_STATES else update - 1)
            for path in files
        ]
        for path, (kept, later) in zip(files, found, strict=True):
            updates = [record["update"] for record in kept]
            made = len(updates) if path.name == METRICS else len(set(updates))
            if path.name in (METRICS, BLOCKS) and made != update:
                raise UserError(
                    f"{path}: holds the records of {made} of the {update} updates that the "
                    f"checkpoint has behind it; restore it, or remove {directory} to start over"
                )
            if path.name == METRICS:
                self.dropped = later
        # All were read before any is cut.
        for path, (kept, _) in zip(files, found, strict=True):
            write_atomically(path, "".join(json.dumps(record) + "\n" for record in kept))
            self._files[path.name] = path.open("ab", buffering=0)
        # Written from this thread: SummaryWriter's own blocks for ever after a failed write.
        self._tensorboard: EventsWriter | None = None
        self._events = directory / "tensorboard"
        self._flushed = time.monotonic()
        if tensorboard:
            self._events.mkdir(exist_ok=True)
            self._tensorboard = EventsWriter(str(self._events / "events"))
            # Viewers drop what an earlier process wrote from this update on.
            start = SessionLog(status=SessionLog.START)
            self._write_event(Event(step=update, session_log=start))

    @contextlib.contextmanager
    def _naming(self, path: str | Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._broken = True
            raise Failure(
                f"{path}: {error.strerror}; repair that, and the same command continues from the "
                f"last checkpoint"
            ) from error

    def _append(self, name: str, record: dict[str, Any]) -> None:
        file = self._files[name]
        with self._naming(file.name):
            write_all(file, (json.dumps(record, allow_nan=False) + "\n").encode())

    def _write_event(self, event: Event) -> None:
        assert self._tensorboard is not None
        event.wall_time = time.time()
        with self._naming(self._events):
            self._tensorboard.write_event(event)
            if time.monotonic() - self._flushed > _TENSORBOARD_SECONDS:
                self._tensorboard.flush()
                self._flushed = time.monotonic()

    def update(self, record: dict[str, Any]) -> None:
        """Record what an update reported."""
        self._append(METRICS, record)
        if self._tensorboard is not None:
            for key, value in record.items():
                if key != "update" and value is not None:
                    summary = scalar(f"train/{key}", float(value))
                    self._write_event(Event(step=record["update"], summary=summary))

    def blocks(self, update: int, blocks: list[list[int]]) -> None:
        """Record the block ids of each micro-batch; rows that fill up the window are left out."""
        for number, ids in enumerate(blocks):
            self._append(
                BLOCKS,
                {"update": update, "micro_batch": number, "blocks": [i for i in ids if i >= 0]},
            )

    def evaluation(self, record: dict[str, Any]) -> None:
        """Record a validation pass at one depth."""
        self._append(EVALUATIONS, record)
        if self._tensorboard is not None:
            name = (
                "validation" if record["depth"] is None else f"validation/depth_{record['depth']}"
            )
            for key in ("cross_entropy", "top1"):
                if record[key] is not None:
                    summary = scalar(f"{name}/{key}", record[key])
                    self._write_event(Event(step=record["update"], summary=summary))

    def monitors(self, record: dict[str, Any]) -> None:
        """Record the figures of a pass of the monitors."""
        self._append(MONITORS, record)
        if self._tensorboard is not None:
            for key, value in record.items():
                if isinstance(value, float):
                    summary = scalar(f"monitors/{key}", value)
                    self._write_event(Event(step=record["update"], summary=summary))

    def alarm(self, record: dict[str, Any]) -> None:
        """Record that an alarm was raised or has cleared."""
        self._append(ALARMS, record)

    def event(self, update: int, kind: str, text: str, **more: Any) -> None:
        """Record something that a person should know of."""
        self._append(EVENTS, {"update": update, "kind": kind, "text": text, **more})

    def change(self, record: dict[str, Any]) -> None:
        """Record that a setting was changed at a restart."""
        self._append(CHANGES, record)

    def decision(self, record: dict[str, Any]) -> None:
        """Record what a controller changed."""
        self._append(DECISIONS, record)

    def sync(self) -> None:
        """Put everything recorded so far on disk: called before a checkpoint."""
        for file in self._files.values():
            with self._naming(file.name):
                os.fsync(file.fileno())
        if self._tensorboard is not None:
            with self._naming(self._events):
                self._tensorboard.flush()

    def close(self) -> None:
        """Sync and close the files."""
        if not self._broken:
            self.sync()
        for file in self._files.values():
            file.close()
        if self._tensorboard is not None:
            # What is buffered fails again where a write has failed: that was said already.
            with contextlib.suppress(OSError) if self._broken else contextlib.nullcontext():
                self._tensorboard.close()
