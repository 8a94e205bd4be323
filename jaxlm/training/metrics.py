"""The records of a run: JSON lines for programs, TensorBoard for people."""

import json
import os
from pathlib import Path
from typing import IO, Any

import tensorboardX

from jaxlm.errors import UserError
from jaxlm.files import write_atomically

METRICS, BLOCKS, EVALUATIONS = "metrics.jsonl", "blocks.jsonl", "evaluations.jsonl"


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON-lines file, up to the first line that a crash left incomplete.

    Records are synced before each checkpoint; what a power failure tears comes after it.
    """
    records: list[dict[str, Any]] = []
    if not path.is_file():
        return records
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


class RunLog:
    """Appends records to a run's files.

    Args:
        directory: the run.
        update: updates the run has behind it; later records, left by a run that was killed after
            its last checkpoint, are removed, because those updates will be made again.
        tensorboard: also write TensorBoard event files.
    """

    def __init__(self, directory: Path, update: int, tensorboard: bool):
        self._files: dict[str, IO[str]] = {}
        for name in (METRICS, BLOCKS, EVALUATIONS):
            path = directory / name
            # A validation pass belongs to the state after its update count, hence <=.
            last = update if name == EVALUATIONS else update - 1
            kept = [record for record in read_records(path) if record["update"] <= last]
            if name == METRICS and len(kept) != update:
                raise UserError(
                    f"{path}: holds the records of {len(kept)} of the {update} updates that the "
                    f"checkpoint has behind it; restore it, or remove {directory} to start over"
                )
            write_atomically(path, "".join(json.dumps(record) + "\n" for record in kept))
            self._files[name] = path.open("a", encoding="utf-8")
        self._tensorboard = None
        if tensorboard:
            self._tensorboard = tensorboardX.SummaryWriter(
                str(directory / "tensorboard"), purge_step=update
            )

    def _append(self, name: str, record: dict[str, Any]) -> None:
        self._files[name].write(json.dumps(record, allow_nan=False) + "\n")
        self._files[name].flush()

    def update(self, record: dict[str, Any]) -> None:
        """Record what an update reported."""
        self._append(METRICS, record)
        if self._tensorboard is not None:
            for key, value in record.items():
                if key != "update" and value is not None:
                    self._tensorboard.add_scalar(f"train/{key}", float(value), record["update"])

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
                self._tensorboard.add_scalar(f"{name}/{key}", record[key], record["update"])

    def sync(self) -> None:
        """Put everything recorded so far on disk: called before a checkpoint."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        if self._tensorboard is not None:
            self._tensorboard.flush()

    def close(self) -> None:
        """Sync and close the files."""
        self.sync()
        for file in self._files.values():
            file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
