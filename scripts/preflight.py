"""Check in minutes what would otherwise spoil a run of weeks; or check a finished run.

    python scripts/preflight.py --config configs/quickstart.yaml
    python scripts/preflight.py --config my.yaml --device rtx3090 --only memory,learning_rate
    python scripts/preflight.py --run runs/quickstart --json result.json

Prints a table and, for each failure, the likely causes in order. Exit code 0: everything passes;
1: a check fails; 2: a mistake in the settings. docs/preflight.md says what each check means.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rich.markup
import rich.table

from jaxlm.cli import add_host_budget, host_budget_of, parser, run_script
from jaxlm.config import load
from jaxlm.console import console, progress
from jaxlm.errors import UserError
from jaxlm.files import write_json
from jaxlm.memory.devices import DEVICES, Device
from jaxlm.training import finished, preflight
from jaxlm.training.checks import Check, Result, ranked
from jaxlm.training.planning import HOST_BUDGET

_STATES = {True: "[green]pass[/]", False: "[bold red]FAIL[/]", None: "[dim]skipped[/]"}


def arguments() -> argparse.Namespace:
    """The command line."""
    result = parser(__doc__)
    for action in result._actions:
        if action.dest == "config":
            action.required = False
    result.add_argument("--run", type=Path, metavar="DIR", help="check this finished run instead")
    result.add_argument(
        "--device", metavar="NAME", help=f"plan memory for one of {', '.join(DEVICES)}"
    )
    add_host_budget(result)
    result.add_argument("--only", metavar="NAME,...", help="make these checks alone")
    result.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    options = result.parse_intermixed_args()
    if bool(options.config) == bool(options.run):
        raise UserError("expected either --config FILE or --run DIR")
    if options.run and (options.overrides or options.device or options.host_budget):
        raise UserError(
            "--run takes its settings from the run: leave out key=value, --device and --host-budget"
        )
    return options


def chosen(checks: Sequence[Check[Any]], only: str | None) -> list[str]:
    """Names of the checks asked for."""
    known = [check.name for check in checks]
    if only is None:
        return known
    names = [name.strip() for name in only.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise UserError(f"--only {only}: no check {', '.join(unknown)}; one of {', '.join(known)}")
    return names


def device_of(name: str | None) -> Device | None:
    """The device that is named."""
    if name is None:
        return None
    if name not in DEVICES:
        raise UserError(f"--device {name}: not known; one of {', '.join(DEVICES)}")
    return DEVICES[name]


def table_of(results: Sequence[Result], notes: Sequence[str]) -> rich.table.Table:
    """One row a check, and what was tried on another scale."""
    table = rich.table.Table()
    table.add_column("check", no_wrap=True)
    table.add_column("result", no_wrap=True)
    table.add_column("figure", ratio=5)
    table.add_column("threshold", ratio=2)
    for one in results:
        table.add_row(
            one.name,
            _STATES[one.passed],
            rich.markup.escape(one.figure),
            rich.markup.escape(one.threshold),
        )
    if notes:
        table.add_section()
        for note in notes:
            what, _, how = note.partition(": ")
            table.add_row("scaled", "", rich.markup.escape(f"{what}: {how}"), "")
    return table


def print_failures(results: Sequence[Result]) -> None:
    """Causes of each failure; of several failures together first."""
    out = console()
    failed = [one for one in results if one.passed is False]
    if len(failed) > 1:
        out.print("\n[bold]Most likely causes, of all failures together[/]")
        for number, (cause, names) in enumerate(ranked(failed)[:4], start=1):
            out.print(f"  {number}. {cause.text} ({', '.join(names)})", markup=False)
    for one in failed:
        out.print(f"\n[bold]{one.name}[/]: {rich.markup.escape(one.figure)}")
        for number, cause in enumerate(one.causes[:4], start=1):
            out.print(f"  {number}. {cause.text}", markup=False)
        out.print(f"  Look first at: {one.look_at}", markup=False)


def as_json(results: Sequence[Result], notes: Sequence[str], samples: Sequence[str]) -> Any:
    """The results as plain values."""
    return {
        "passed": all(one.passed is not False for one in results),
        "checks": [dataclasses.asdict(one) for one in results],
        "causes": [
            {**dataclasses.asdict(cause), "checks": names} for cause, names in ranked(results)
        ],
        "scaled": list(notes),
        "samples": list(samples),
    }


def main() -> int:
    """Check, print, and tell by the exit code."""
    options = arguments()
    notes: list[str] = []
    samples: list[str] = []
    if options.run:
        names = chosen(finished.CHECKS, options.only)
        with progress("Checking", len(names), line_every=1) as advance:
            results = finished.run_checks(options.run, names, advance)
    else:
        names, device = chosen(preflight.CHECKS, options.only), device_of(options.device)
        host_budget = host_budget_of(options, HOST_BUDGET)
        config = load(options.config, options.overrides)
        trial = preflight.Preflight(config, device, host_budget)
        with progress("Preflight", len(names), line_every=1) as advance:
            results = preflight.run_checks(trial, names, advance)
        notes, samples = trial.notes, trial.samples
    console().print(table_of(results, notes))
    for sample in samples:
        console().print(sample, markup=False)
    print_failures(results)
    if options.json:
        write_json(options.json, as_json(results, notes, samples))
    failed = sum(one.passed is False for one in results)
    passed = sum(one.passed is True for one in results)
    skipped = len(results) - failed - passed
    print(f"\n{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    run_script(main)
