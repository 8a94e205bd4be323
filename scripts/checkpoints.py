"""List, verify or prune the checkpoints of a run.

    python scripts/checkpoints.py runs/quickstart list
    python scripts/checkpoints.py runs/quickstart verify
    python scripts/checkpoints.py runs/quickstart prune --keep 1 --yes

list compares names and sizes of files; verify compares their checksums too. prune removes what a
run with this `--keep` would not have kept, counting whole checkpoints alone; without --yes it says
what that is. Exit code 0; 1: list or verify found damage; 2: not a run, or it is being trained
(prune).
"""

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

from jaxlm.cli import run_script
from jaxlm.config import CheckpointConfig, load
from jaxlm.console import console, new_table
from jaxlm.errors import UserError
from jaxlm.files import Lock, refuse_links, size_text
from jaxlm.training.manifest import (
    Inspection,
    best_of,
    inspect,
    leftovers,
    removable,
    remove,
    updates_in,
)


def arguments() -> argparse.Namespace:
    """The command line."""
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("run", type=Path, help="the run, such as runs/quickstart")
    result.add_argument("action", choices=("list", "verify", "prune"))
    result.add_argument("--json", action="store_true", help="print JSON instead of a table")
    result.add_argument(
        "--keep", type=int, metavar="N", help="prune: newest to keep; default: the run's setting"
    )
    result.add_argument("--yes", action="store_true", help="prune: do remove them")
    parsed = result.parse_args()
    if parsed.keep is not None and parsed.keep < 1:
        raise UserError(f"--keep {parsed.keep}: keep at least 1")
    return parsed


def settings_of(run: Path) -> CheckpointConfig:
    """What the run's configuration says of checkpoints."""
    if not (run / "config.yaml").is_file():
        raise UserError(f"{run}: not a run (it has no config.yaml)")
    return load([run / "config.yaml"]).checkpoint


def state_of(found: Inspection) -> str:
    """One word for what was found."""
    return "damaged" if found.damage else "unverified" if found.unverified else "whole"


def examine(directory: Path, contents: bool) -> list[dict[str, Any]]:
    """What is known about each checkpoint, ascending, as plain values."""
    found = {}
    for update in updates_in(directory):
        inspection = inspect(directory / str(update), contents)
        # One that is gone was removed meanwhile, by the process that trains: that is no damage.
        if (directory / str(update)).is_dir():
            found[update] = inspection
    best = best_of(one.manifest for one in found.values() if one.manifest is not None)
    rows = []
    for update, one in found.items():
        manifest = one.manifest
        rows.append(
            {
                "update": update,
                "tokens": manifest and manifest.tokens,
                "validation_cross_entropy": manifest and manifest.validation_cross_entropy,
                "bytes": manifest and manifest.bytes,
                "age_seconds": manifest and time.time() - manifest.saved_at,
                "state": state_of(one),
                "damage": one.damage,
                "best": update == best,
            }
        )
    return rows


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"


def _cell(value: Any, text: str) -> str:
    return "-" if value is None else text.format(value)


def print_table(rows: list[dict[str, Any]], aside: list[str], contents: bool) -> None:
    """A line for each checkpoint, and one for each damaged file."""
    table = new_table("update", "tokens", "validation loss", "size", "age", "state", "best")
    table.columns[0].justify = "right"
    for row in rows:
        size, age = row["bytes"], row["age_seconds"]
        table.add_row(
            str(row["update"]),
            _cell(row["tokens"], "{:,}"),
            _cell(row["validation_cross_entropy"], "{:.4f}"),
            _cell(size, size_text(size or 0)),
            _cell(age, _age(age or 0.0)),
            row["state"],
            "best" if row["best"] else "",
        )
    screen = console()
    screen.print(table)
    for row in rows:
        for line in row["damage"]:
            screen.print(f"{row['update']}/{line}", markup=False, soft_wrap=True)
    if aside:
        screen.print(f"moved aside because of damage: {', '.join(aside)}", soft_wrap=True)
    if not contents:
        screen.print("(names and sizes were compared; verify compares checksums too)")


def show(directory: Path, contents: bool, as_json: bool) -> int:
    """Print what is there. Returns the exit code."""
    rows = examine(directory, contents)
    aside = sorted(path.name for path in directory.glob("*.damaged*"))
    if as_json:
        print(json.dumps({"checkpoints": rows, "moved_aside": aside}, indent=2))
    else:
        print_table(rows, aside, contents)
    return 1 if any(row["damage"] for row in rows) else 0


def prune(directory: Path, keep: int, keep_every_tokens: int | None, yes: bool) -> int:
    """Remove what retention would not keep; damaged ones are left, and stand for none kept."""
    there = updates_in(directory)
    damaged = {update for update in there if inspect(directory / str(update)).damage}
    old = removable(directory, keep, keep_every_tokens, damaged)
    stay = [update for update in there if update not in old]
    for path in leftovers(directory):  # of a removal or a save that was killed
        if yes:
            shutil.rmtree(path)
        print(f"{'removed' if yes else 'would remove'} {path}, which is not complete")
    for update in old:
        if yes:
            remove(directory, update)
        print(f"{'removed' if yes else 'would remove'} {directory / str(update)}")
    print(f"{'stay' if yes else 'would stay'}: {', '.join(map(str, stay)) or 'none'}")
    if not yes and (old or leftovers(directory)):
        print("nothing was removed; add --yes to do it")
    return 0


def main() -> int:
    """Do what the arguments say."""
    options = arguments()
    settings = settings_of(options.run)
    directory = options.run / "checkpoints"
    if not directory.is_dir():
        raise UserError(f"{directory}: no checkpoint has been saved yet")
    if options.action != "prune":
        return show(directory, options.action == "verify", options.json)
    if options.json:
        raise UserError("--json goes with list and verify")
    refuse_links(options.run, "a run")
    with Lock(options.run / "lock", f"{options.run}: is being trained; it prunes by itself"):
        return prune(
            directory, options.keep or settings.keep, settings.keep_every_tokens, options.yes
        )


if __name__ == "__main__":
    run_script(main)
