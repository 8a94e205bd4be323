"""What the scripts share: arguments, and errors that become one line and an exit code."""

import argparse
import importlib.util
import os
import re
import sys
from collections.abc import Callable

from jaxlm import environment
from jaxlm.config import Config, load
from jaxlm.errors import Failure, UserError
from jaxlm.output import lasting_output

_UNITS = {"": 1, "B": 1, "MB": 10**6, "GB": 10**9, "MIB": 2**20, "GIB": 2**30}


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
    """The configuration that :func:`parser`'s arguments describe.

    Parse with `parse_intermixed_args`, so that options may stand between settings.
    """
    return load(arguments.config, arguments.overrides)


def size(text: str, option: str) -> int:
    """Bytes of a size such as 22.6GB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?) ?([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise UserError(f"{option} {text}: expected a size such as 22.6GB or 21GiB")
    return round(float(match[1]) * _UNITS[match[2].upper()])


def add_host_budget(to: argparse.ArgumentParser) -> None:
    """Add ``--host-budget SIZE``, read by :func:`host_budget_of`."""
    to.add_argument(
        "--host-budget",
        metavar="SIZE",
        help="pinned host memory that may be used; default: 12GB",
    )


def host_budget_of(options: argparse.Namespace, default: int) -> int:
    """Bytes that ``--host-budget`` names."""
    words = options.host_budget
    return default if words is None else size(words, "--host-budget")


def run_script(main: Callable[[], int], judge_output: bool = True) -> None:
    """Run a script's main function and exit; a user's mistake is one line and exit code 2.

    Args:
        main: returns the exit code.
        judge_output: whether output that could not be written makes a failure of success; a worker
            leaves that to the process which waits for it, and shares its output.
    """
    environment.prepare()
    lost = lasting_output()
    if importlib.util.find_spec("jax_cuda12_plugin") and not environment.has_gpu_driver():
        # The extra `plan` brings XLA's GPU compiler to machines without a GPU, where JAX would
        # report the missing libraries with a traceback before it falls back to the CPU.
        import jax  # not above: processes that only handle text import this module too

        jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS") or "cpu")
    try:
        code = main()
    except UserError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        code = 2
    except Failure as failure:
        print(f"error: {failure}", file=sys.stderr)
        code = 1
    except OSError as error:
        if error.filename is None:
            raise
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    error = lost()
    if error is not None and judge_output:
        print(f"error: part of the output could not be written: {error.strerror}", file=sys.stderr)
        code = code or 1
    sys.exit(code)
