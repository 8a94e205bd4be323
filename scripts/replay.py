"""Make one update of a run once more, and find where its numbers stop being finite.

    python scripts/replay.py runs/quickstart --update 1234

Takes the newest checkpoint at or before the update, or the initial weights, makes the updates in
between again, and then looks at each micro-batch. Where a loss or a gradient is not finite, the
operations are run one by one until the first whose output is not. The run itself is only read. Exit
code 0: all is finite; 1: something is not; 2: not a run, or no such update.
"""

import argparse
import dataclasses
import math
from pathlib import Path
from typing import Any

from jaxlm.cli import run_script
from jaxlm.console import console, new_table
from jaxlm.files import write_json
from jaxlm.training.replay import Replay, replay


def arguments() -> argparse.Namespace:
    """The command line."""
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("run", type=Path, help="the run, such as runs/quickstart")
    result.add_argument("--update", type=int, required=True, metavar="N", help="counts from 0")
    result.add_argument("--json", metavar="FILE", help="also write the result there")
    return result.parse_args()


def show(found: Replay) -> None:
    """Print a table of micro-batches and the culprit."""
    screen = console()
    table = new_table("micro-batch", "loss", "gradient norm", "blocks")
    for one in found.micro_batches:
        ids = ", ".join(map(str, one.blocks[:4])) + (" ..." if len(one.blocks) > 4 else "")
        table.add_row(str(one.number), f"{one.loss:.6g}", f"{one.grad_norm:.6g}", ids)
    source = f"the checkpoint of update {found.checkpoint}" if found.checkpoint else "the beginning"
    screen.print(f"Update {found.update}, from {source}")
    if found.differs_from is not None:
        screen.print(
            f"From update {found.differs_from} on the losses are not those on record: hardware, "
            f"versions, or a setting that may change at a restart (docs/runs.md) are not those of "
            f"then, so that this is a close relative of that update",
            soft_wrap=True,
        )
    screen.print(table)
    for name in found.bad_parameters:
        screen.print(f"not finite before the update: parameter {name}", markup=False)
    if found.culprit is not None:
        screen.print(f"First: {found.culprit.line()}", markup=False, soft_wrap=True)
    elif not all(one.finite for one in found.micro_batches):
        screen.print("Run one by one, all operations are finite: the fused program overflows.")
    else:
        screen.print(
            "All losses and gradients are finite here; if the update was skipped, the optimizer's "
            "change was not finite, or the hardware erred."
        )


def as_json(found: Replay) -> dict[str, Any]:
    """Plain values; null for numbers that are not finite."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [plain(one) for one in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return plain(dataclasses.asdict(found))


def main() -> int:
    """Replay, print, and tell by the exit code whether all is finite."""
    options = arguments()
    found = replay(options.run, options.update)
    show(found)
    if options.json:
        write_json(Path(options.json), as_json(found))
    clean = not found.bad_parameters and all(one.finite for one in found.micro_batches)
    return 0 if clean else 1


if __name__ == "__main__":
    run_script(main)
