"""Train two or more models on exactly the same tokens, in cycles, and report which is better.

    python scripts/compare.py --config configs/study_quickstart.yaml
    python scripts/compare.py --config configs/study_rtx3090_1b.yaml --plan
    python scripts/compare.py --config configs/study_quickstart.yaml --status

The same command goes on after any interruption. Exit code 0: done, or saved after a SIGTERM; 1: a
failure, a plan that does not fit, or a verdict that is withheld; 2: a mistake in the settings; 130:
saved after Ctrl-C.
"""

import argparse
import os
import signal
from pathlib import Path

import jax

from jaxlm.cli import run_script
from jaxlm.study.cycle import Cycles, StoppedError, launcher
from jaxlm.study.settings import read_study
from jaxlm.study.status import print_plan, print_status
from jaxlm.training.loop import INTERRUPTED


def main() -> int:
    """Run the study that the arguments name, or tell about it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="the study")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--status", action="store_true", help="how far it is; changes nothing")
    what.add_argument(
        "--plan", action="store_true", help="disk, days and memory that it takes; changes nothing"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="settings that win over the file's, such as study.cycles=2",
    )
    options = parser.parse_intermixed_args()
    # Models get the device, one after the other, in processes of their own; this one keeps off it.
    jax.config.update("jax_platforms", "cpu")
    study = read_study(options.config, options.overrides)
    if options.plan:
        return print_plan(study)
    if options.status:
        return print_status(study)
    try:
        with Cycles(study, launcher(os.environ)) as cycles:
            cycles.run()
    except StoppedError as stopped:
        print("Saved; the same command goes on", flush=True)
        return INTERRUPTED if stopped.number == signal.SIGINT else 0
    return 0


if __name__ == "__main__":
    run_script(main)
