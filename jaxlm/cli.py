"""What the scripts share: arguments, and errors that become one line and an exit code."""

import argparse
import sys
from collections.abc import Callable

from jaxlm.config import Config, load
from jaxlm.errors import UserError


def parser(doc: str | None) -> argparse.ArgumentParser:
    """An argument parser with ``--config FILE`` (repeatable) and ``key=value`` words."""
    result = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument(
        "--config",
        action="append",
        required=True,
        metavar="FILE",
        help="YAML settings; may be given several times, later files win",
    )
    result.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="settings that win over the files, such as optim.learning_rate=1e-4",
    )
    return result


def config_from(arguments: argparse.Namespace) -> Config:
    """The configuration that :func:`parser`'s arguments describe."""
    return load(arguments.config, arguments.overrides)


def run_script(main: Callable[[], int]) -> None:
    """Run a script's main function and exit: 2 for the user's mistake, with one line that says so."""
    try:
        code = main()
    except UserError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        code = 2
    sys.exit(code)
