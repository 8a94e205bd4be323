"""Token shards on disk: plain .npy files and a manifest that names and checks them.

A data directory holds::

    manifest.json             what is here: sizes, checksums, vocabulary, tokenizer
    tokenizer.json            or tokenizer.model; absent where the tokens came from elsewhere
    token_bytes.npy           [V] int32, bytes each token stands for; absent if unknown
    train/tokens-00000.npy    token ids, uint16 or uint32
    train/ends-00000.npy      int64, end of each document within the shard's tokens
    train/counts-00001.npy    [V] int64, how often each token occurs in the split
    validation/...            the same
    preparation.sqlite        how far scripts/prepare_data.py is, and which documents it has seen
    teacher-NAME/             what a teacher predicts for the training tokens, see data/teacher.py

A document never crosses a shard. Tokens are memory-mapped and read as slices.

A directory that is prepared step by step may give up the first shards of its training tokens once
they were trained on. The manifest then says how many of them are *reclaimed*: their entries and
their ends of documents stay, so that positions in the stream do not change, their tokens are gone.
"""

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxlm.errors import UserError
from jaxlm.files import (
    Lock,
    is_inside,
    refuse_links,
    sha256_of,
    sync_directory,
    sync_file,
    write_atomically,
    write_json,
)

if TYPE_CHECKING:
    from jaxlm.data.teacher import TeacherCache

FORMAT = 3
_MANIFEST_KEYS = {"vocabulary_size", "dtype", "begin_id", "begin_token", "end_id", "end_token"}
_MANIFEST_KEYS |= {"normalization", "tokenizer", "token_bytes", "prefix_bytes", "source", "splits"}
SPLITS = ("train", "validation")

# What must not change under a run, by field name; of tokens a digest for each shard.
Fingerprint = dict[str, str | list[str]]


def token_dtype(vocabulary_size: int) -> np.dtype:
    """The smallest of uint16 and uint32 that holds every id below `vocabulary_size`."""
    return np.dtype(np.uint16 if vocabulary_size <= 2**16 else np.uint32)


# Bytes before the data of our .npy files; numpy leaves room for any length.
_HEADER = 128


def _file_entry(path: Path) -> dict[str, Any]:
    """Sync a file that was just written, and describe it."""
    sync_file(path)
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256_of(path)}


class ArrayFile:
    """A .npy file that grows, under a temporary name until it is whole.

    Args:
        path: of the finished file.
        dtype: of its elements.
        count: elements of the unfinished file that are to stay.
        width: values of an element, which is then a row of a matrix; None: a number.
    """

    def __init__(self, path: Path, dtype: np.dtype, count: int, width: int | None = None):
        self._width = width
        self.path, self.dtype, self.count = path, dtype, count
        self._part = path.with_name(path.name + ".part")
        if count and not self._part.exists():
            if not path.exists():
                raise UserError(
                    f"{path}: is gone (reclaimed?), though its first {count:,} elements are needed "
                    f"to go on from there; a source that was read before must not change"
                )
            os.replace(path, self._part)  # it was finished after the position to return to
        path.unlink(missing_ok=True)
        self._file = self._part.open("r+b" if count else "w+b")
        self._file.truncate(_HEADER + count * (width or 1) * dtype.itemsize)
        self._file.seek(0, os.SEEK_END)

    def append(self, values: np.ndarray) -> None:
        """Write elements at the end."""
        self._file.write(np.ascontiguousarray(values, self.dtype).data)
        self.count += len(values)

    def sync(self) -> None:
        """Make what was written survive a power failure."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def finish(self) -> dict[str, Any]:
        """Give the file its header and its name, and describe it."""
        self._file.seek(0)
        np.lib.format.write_array_header_1_0(
            self._file,
            {
                "descr": self.dtype.str,
                "fortran_order": False,
                "shape": (self.count,) if self._width is None else (self.count, self._width),
            },
        )
        assert self._file.tell() == _HEADER, "numpy pads headers so that they can grow"
        self._file.close()
        os.replace(self._part, self.path)
        return _file_entry(self.path)

    def close(self) -> None:
        """Close the file; nothing stays of one that holds nothing."""
        self._file.close()
        if not self.count:
            self._part.unlink(missing_ok=True)


class SplitWriter:
    """Writes the documents of one split into shards, from any position that was synced.

    Args:
        directory: of the split; made if it is not there.
        vocabulary_size: entries; decides between 16 and 32 bits a token.
        shard_tokens: a shard is finished once it holds this many tokens.
        position: what :meth:`sync` returned; null starts an empty split. Shards and parts of
            shards that were written after it are removed.
    """

    def __init__(
        self,
        directory: Path,
        vocabulary_size: int,
        shard_tokens: int,
        position: dict[str, Any] | None = None,
    ):
        if directory.is_symlink():  # what it leads to may hold files of others
            raise UserError(
                f"{directory}: is a link; prepare into a folder of its own (data.directory may be "
                f"on any disk)"
            )
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.vocabulary_size = vocabulary_size
        self.dtype = token_dtype(vocabulary_size)
        self.shard_tokens = shard_tokens
        position = position or {"shards": [], "tokens": 0, "documents": 0, "text_bytes": 0}
        self.shards: list[dict[str, Any]] = list(position["shards"])
        self.text_bytes: int = position["text_bytes"]
        self._remove_later_shards()
        self._open(position["tokens"], position["documents"])

    def _names(self, number: int) -> tuple[str, str]:
        return f"tokens-{number:05d}.npy", f"ends-{number:05d}.npy"

    def _remove_later_shards(self) -> None:
        """Remove what was written after the position, and no file of anyone else's.

        Shards are written in the order of their numbers, so that those of this writer follow one
        another without a gap; from the last one on, so that none comes of being killed here.
        """
        found: list[Path] = []
        for number in itertools.count(len(self.shards) + 1):
            names = [f"{name}{end}" for name in self._names(number) for end in ("", ".part")]
            there = [path for name in names if (path := self.directory / name).is_file()]
            if not there:
                break
            found += there
        for path in reversed(found):
            path.unlink()

    def _open(self, tokens: int = 0, documents: int = 0) -> None:
        names = self._names(len(self.shards))
        self._tokens = ArrayFile(self.directory / names[0], self.dtype, tokens)
        self._ends = ArrayFile(self.directory / names[1], np.dtype(np.int64), documents)

    @property
    def tokens(self) -> int:
        """Tokens so far."""
        return sum(shard["tokens"] for shard in self.shards) + self._tokens.count

    @property
    def documents(self) -> int:
        """Documents so far."""
        return sum(shard["documents"] for shard in self.shards) + self._ends.count

    def add(self, ids: np.ndarray, text_bytes: int) -> None:
        """Append a document, its end token included."""
        if ids.size == 0:
            raise ValueError("a document needs at least one token")
        if ids.min() < 0 or ids.max() >= self.vocabulary_size:
            raise ValueError(
                f"document {self.documents} of {self.directory.name} has token id "
                f"{ids.max() if ids.max() >= self.vocabulary_size else ids.min()}; "
                f"the vocabulary has {self.vocabulary_size} entries"
            )
        self.text_bytes += text_bytes
        self._tokens.append(ids)
        self._ends.append(np.array([self._tokens.count]))
        if self._tokens.count >= self.shard_tokens:
            self.finish_shard()

    def finish_shard(self) -> None:
        """Close the shard, if anything is in it, and open the next."""
        if self._ends.count:
            counts = {"tokens": self._tokens.count, "documents": self._ends.count}
            files = [self._tokens.finish(), self._ends.finish()]
            sync_directory(self.directory)
            self.shards.append({**counts, "files": files})
            self._open()

    def sync(self) -> dict[str, Any]:
        """Make everything so far survive a power failure; returns the position."""
        self._tokens.sync()
        self._ends.sync()
        sync_directory(self.directory)
        return {
            "shards": list(self.shards),
            "tokens": self._tokens.count,
            "documents": self._ends.count,
            "text_bytes": self.text_bytes,
        }

    def manifest(self, before: dict[str, Any] | None) -> dict[str, Any]:
        """Finish the shard, count the tokens, and return the split's part of the manifest.

        Args:
            before: that part in the manifest of before, where the directory has one.

        Raises:
            UserError: shards that were reclaimed are not those that the split begins with.
        """
        self.finish_shard()
        counts = np.zeros(self.vocabulary_size, np.int64)
        reclaimed = before["reclaimed"] if before else 0
        counted = len(before["shards"]) if before else 0
        if before and before["shards"] == self.shards[:counted]:
            path = self.directory / before["counts"]["file"]
            if sha256_of(path) != before["counts"]["sha256"]:
                raise UserError(f"{path}: damaged (checksum differs); prepare the data again")
            counts += np.load(path)
        elif before and before["shards"][:reclaimed] != self.shards[:reclaimed]:
            raise UserError(
                f"{self.directory}: begins with other shards than those that were reclaimed; "
                f"prepare the data again in another directory"
            )
        elif reclaimed:
            raise UserError(
                f"{self.directory}: shards were replaced after others had been reclaimed, so that "
                f"tokens cannot be counted; prepare the data again in another directory"
            )
        else:
            counted = 0
        for shard in self.shards[counted:]:
            tokens = np.load(self.directory / shard["files"][0]["file"], mmap_mode="r")
            for start in range(0, len(tokens), 2**22):
                piece = tokens[start : start + 2**22]
                counts += np.bincount(piece, minlength=self.vocabulary_size)
        # Under a new name where the split grew: an older manifest still names the older counts.
        path = self.directory / f"counts-{len(self.shards):05d}.npy"
        np.save(path, counts)
        entry = _file_entry(path)
        sync_directory(self.directory)
        return {
            "tokens": self.tokens,
            "documents": self.documents,
            "text_bytes": self.text_bytes,
            "counts": entry,
            "shards": list(self.shards),
            "reclaimed": reclaimed,
        }

    def close(self) -> None:
        """Close the files; the part of a shard stays as it is."""
        self._tokens.close()
        self._ends.close()


def new_manifest(
    directory: Path,
    *,
    vocabulary_size: int,
    end_id: int,
    begin_id: int | None = None,
    end_token: str | None = None,
    begin_token: str | None = None,
    normalization: str = "none",
    tokenizer: tuple[str, bytes] | None = None,
    token_bytes: np.ndarray | None = None,
    prefix_bytes: int = 0,
) -> dict[str, Any]:
    """A manifest without splits; the tokenizer and the bytes of tokens are written.

    Args:
        directory: the data directory.
        vocabulary_size: entries of the vocabulary.
        end_id: id of the token that ends a document.
        begin_id: id of the token that begins a document, if one does.
        end_token: how the end token is written, where there is a tokenizer.
        begin_token: how the begin token is written, where there is one.
        normalization: Unicode normalisation of the text.
        tokenizer: file name and contents of the tokenizer, if there is one.
        token_bytes: [V] int32, bytes each token stands for, if known.
        prefix_bytes: bytes that a document's tokens stand for beyond its text.
    """
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "vocabulary_size": vocabulary_size,
        "dtype": token_dtype(vocabulary_size).name,
        "begin_id": begin_id,
        "begin_token": begin_token,
        "end_id": end_id,
        "end_token": end_token,
        "normalization": normalization,
        "tokenizer": None,
        "token_bytes": None,
        "prefix_bytes": prefix_bytes,
        "source": {},
    }
    if tokenizer is not None:
        path = directory / tokenizer[0]
        write_atomically(path, tokenizer[1])
        manifest["tokenizer"] = _file_entry(path)
    if token_bytes is not None:
        path = directory / "token_bytes.npy"
        np.save(path, token_bytes)
        manifest["token_bytes"] = _file_entry(path)
    return manifest


class ShardWriter:
    """Writes a data directory of documents that are tokenised already.

    Use as a context manager: the manifest, without which nothing is read, is written on a clean
    exit; after an error nothing is left.

    Args:
        directory: the data directory, which must not exist yet.
        vocabulary_size: entries; decides between 16 and 32 bits a token.
        end_id: id of the token that ends a document.
        shard_tokens: a shard is finished once it holds this many tokens.
        manifest: further arguments of :func:`new_manifest`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        vocabulary_size: int,
        end_id: int,
        shard_tokens: int = 2**26,
        **manifest: Any,
    ):
        self._lock = preparation_lock(directory)
        if directory.exists():
            raise UserError(f"{directory}: exists already; remove it, or choose another directory")
        self.directory = directory
        directory.mkdir(parents=True)
        self.manifest = new_manifest(
            directory, vocabulary_size=vocabulary_size, end_id=end_id, **manifest
        )
        self._splits = {
            name: SplitWriter(directory / name, vocabulary_size, shard_tokens) for name in SPLITS
        }

    def add(self, split: str, ids: Iterable[int] | np.ndarray, text_bytes: int = 0) -> None:
        """Append a document's token ids, its end token included if it is to have one."""
        self._splits[split].add(np.asarray(ids, np.int64), text_bytes)

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        done = False
        with self._lock:
            try:
                if kind is None:
                    write_manifest(self.directory, self.manifest, self._splits)
                    done = True
            finally:
                for split in self._splits.values():
                    split.close()
                if not done:
                    shutil.rmtree(self.directory)


def preparation_lock(directory: Path) -> Lock:
    """The lock of whoever writes a data directory, which may be a link but holds none."""
    refuse_links(directory.resolve(), "prepared data")
    return Lock(
        directory.with_name(directory.name + ".lock"),
        f"{directory}: is being prepared by another process; wait for it",
    )


def write_manifest(
    directory: Path, manifest: dict[str, Any], splits: dict[str, SplitWriter]
) -> None:
    """Finish the shards and write manifest.json: from then on they are what is read."""
    path = directory / "manifest.json"
    before = json.loads(path.read_bytes())["splits"] if path.exists() else {}
    manifest["splits"] = {n: split.manifest(before.get(n)) for n, split in splits.items()}
    write_json(path, manifest)
    for name in splits:
        for path in (directory / name).glob("counts-*.npy"):
            if path.name != manifest["splits"][name]["counts"]["file"]:
                path.unlink()


class TokenStream:
    """The tokens of a split as one long array, memory-mapped shard by shard."""

    def __init__(self, shards: list[np.ndarray], ends: list[np.ndarray], reclaimed: int = 0):
        """Join shards.

        Args:
            shards: token ids of each shard.
            ends: end of each document within its shard, ascending.
            reclaimed: how many of the first shards have a length and no contents.
        """
        self._shards = shards
        self._starts = np.cumsum([0, *[len(shard) for shard in shards]], dtype=np.int64)
        # uint16 or uint32.
        self.dtype = shards[0].dtype if shards else np.dtype(np.uint16)
        # [documents] int64: end of each document in the stream, exclusive.
        self.document_ends = np.concatenate(
            [end + start for end, start in zip(ends, self._starts, strict=False)]
            or [np.zeros(0, np.int64)]
        )
        # The first token that can be read.
        self.readable_from = int(self._starts[reclaimed])
        # What a teacher predicts at each position, where a run learns from one.
        self.teacher: TeacherCache | None = None

    def part(self, start: int, stop: int) -> "TokenStream":
        """The documents that lie within tokens [start, stop), as a stream that begins at 0."""
        begins = np.concatenate([[0], self.document_ends])
        first = int(begins[np.searchsorted(begins, start)])
        last = int(begins[np.searchsorted(begins, stop, side="right") - 1])
        if last <= first:
            return TokenStream([np.zeros(0, self.dtype)], [np.zeros(0, np.int64)])
        self._check_readable(first)
        ends = self.document_ends
        chosen = ends[(ends > first) & (ends <= last)]
        return TokenStream([self.read(first, last)], [chosen - first])

    def _check_readable(self, start: int) -> None:
        if start < self.readable_from:
            raise UserError(
                f"token {start:,} of the stream was reclaimed: the first that is left is "
                f"{self.readable_from:,}; raise the start of data.tokens, or prepare the data again"
            )

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop): a view of the mapped file unless the range crosses shards."""
        self._check_readable(start)
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        pieces = []
        for number in range(first, len(self._shards)):
            offset = int(self._starts[number])
            if offset >= stop:
                break
            pieces.append(self._shards[number][max(start - offset, 0) : stop - offset])
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def read_rows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Tokens [start, start + length) of each start, all inside the stream.

        Args:
            starts: [N] int64, N > 0.
            length: tokens a row.

        Returns:
            [N, length] of the stream's type.
        """
        self._check_readable(int(starts.min()))
        shards = np.searchsorted(self._starts, starts, side="right") - 1
        inside = starts + length <= self._starts[shards + 1]
        rows = np.empty((len(starts), length), self.dtype)
        for shard in np.unique(shards[inside]).tolist():
            chosen = np.flatnonzero(inside & (shards == shard))
            tokens = self._shards[shard]
            # Every window of the shard as a row that shares its memory: indexing copies whole rows.
            windows = np.lib.stride_tricks.as_strided(
                tokens,
                (len(tokens) - length + 1, length),
                (tokens.itemsize, tokens.itemsize),
                writeable=False,
            )
            rows[chosen] = windows[starts[chosen] - self._starts[shard]]
        for row in np.flatnonzero(~inside).tolist():  # one a shard, unless shards are tiny
            rows[row] = self.read(int(starts[row]), int(starts[row]) + length)
        return rows

    def read_pieces(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Tokens [start, start + length) of each piece, one after the other.

        Args:
            starts: [P] int64, P > 0.
            lengths: [P] int64; a piece must not cross a shard, as no document does.

        Returns:
            [sum of lengths] of the stream's type.
        """
        self._check_readable(int(starts.min()))
        shards = np.searchsorted(self._starts, starts, side="right") - 1
        begins = starts - self._starts[shards]
        located = zip(shards.tolist(), begins.tolist(), (begins + lengths).tolist(), strict=True)
        # A slice of a plain array is several times cheaper than one of an np.memmap.
        plain = {shard: np.asarray(self._shards[shard]) for shard in np.unique(shards).tolist()}
        return np.concatenate([plain[shard][begin:end] for shard, begin, end in located])


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def meaning_of_ids(manifest: dict[str, Any]) -> dict[str, str]:
    """The fields `tokenizer` and `vocabulary` of a fingerprint: equal ones give ids one meaning.

    Args:
        manifest: uses `tokenizer`, `vocabulary_size`, `begin_id` and `end_id`.
    """
    size, begin, end = (manifest[key] for key in ("vocabulary_size", "begin_id", "end_id"))
    return {
        "tokenizer": _digest(manifest["tokenizer"]),
        "vocabulary": f"{size} entries, begin {begin}, end {end}",
    }


class DataDirectory:
    """A prepared data directory, opened and checked."""

    def __init__(self, directory: Path, verify: bool = True):
        """Open a directory.

        Args:
            directory: where manifest.json is.
            verify: compare every file's checksum (about a second per gigabyte).

        Raises:
            UserError: a directory or file that is missing, damaged, or not what the manifest says.
        """
        manifest_path = directory / "manifest.json"
        if not manifest_path.is_file():
            raise UserError(f"{directory}: holds no prepared data (no manifest.json)")
        try:
            manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{manifest_path}: damaged ({error}); prepare the data again") from None
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            found = manifest.get("format") if isinstance(manifest, dict) else None
            raise UserError(
                f"{manifest_path}: format {found!r}, expected {FORMAT}; prepare the data again"
            )
        missing = _MANIFEST_KEYS - manifest.keys()
        if missing or set(manifest["splits"]) != set(SPLITS):
            raise UserError(
                f"{manifest_path}: damaged (lacks {', '.join(sorted(missing)) or 'a split'}); "
                f"prepare the data again"
            )
        self.directory = directory
        self.manifest = manifest
        self.vocabulary_size: int = manifest["vocabulary_size"]
        self.end_id: int = manifest["end_id"]
        self._verify = verify
        expected = token_dtype(self.vocabulary_size).name
        if manifest["dtype"] != expected:
            raise UserError(
                f"{manifest_path}: tokens are {manifest['dtype']}, but a vocabulary of "
                f"{self.vocabulary_size} needs {expected}; prepare the data again"
            )

    def fingerprint(
        self, tokens: int | None = None, validation_tokens: int | None = None
    ) -> Fingerprint:
        """What must not change under a run, by field name.

        Args:
            tokens: the run reads training tokens below this one, and no others; None: all.
            validation_tokens: the same for validation.

        Returns:
            Texts; of both splits the digest of each shard that holds such tokens. Of a directory
            that grows, those of before are the first of those of after.
        """
        manifest = self.manifest
        fields: Fingerprint = {}
        for name, limit in (("train", tokens), ("validation", validation_tokens)):
            shards = manifest["splits"][name]["shards"]
            begins = np.cumsum([0, *[shard["tokens"] for shard in shards]])[:-1]
            used = len(shards) if limit is None else int(np.searchsorted(begins, limit))
            fields[f"{name} tokens"] = [_digest(shard) for shard in shards[:used]]
        return fields | {"normalization": manifest["normalization"]} | meaning_of_ids(manifest)

    def files(self) -> list[tuple[Path, dict[str, Any]]]:
        """Every file that the manifest names, with its entry."""
        found = []
        for name in SPLITS:
            split = self.manifest["splits"][name]
            kept = [shard["files"][1] for shard in split["shards"][: split["reclaimed"]]]
            entries = kept + [
                entry for shard in split["shards"][split["reclaimed"] :] for entry in shard["files"]
            ]
            found += [(self.directory / name, entry) for entry in (*entries, split["counts"])]
        for entry in (self.manifest["tokenizer"], self.manifest["token_bytes"]):
            if entry is not None:
                found.append((self.directory, entry))
        return [(self._path(folder, entry), entry) for folder, entry in found]

    def _path(self, folder: Path, entry: dict[str, Any]) -> Path:
        if not is_inside(entry["file"]):
            raise UserError(
                f"{self.directory / 'manifest.json'}: names the file {entry['file']!r}, which is "
                f"not in {folder}; prepare the data again"
            )
        return folder / entry["file"]

    def check(self, path: Path, entry: dict[str, Any], checksum: bool = True) -> None:
        """Compare a file with its entry in the manifest.

        Raises:
            UserError: it is missing, or its size or checksum differs.
        """
        if not path.is_file():
            raise UserError(f"{path}: missing, though manifest.json lists it")
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise UserError(f"{path}: {size} bytes, expected {entry['bytes']}; prepare again")
        if checksum and sha256_of(path) != entry["sha256"]:
            raise UserError(f"{path}: damaged (checksum differs); prepare the data again")

    def _checked(self, folder: Path, entry: dict[str, Any]) -> Path:
        path = self._path(folder, entry)
        self.check(path, entry, self._verify)
        return path

    def _load(self, folder: Path, entry: dict[str, Any], dtype: str) -> np.ndarray:
        path = self._checked(folder, entry)
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except ValueError as error:
            raise UserError(f"{path}: not an array of numbers ({error})") from None
        if array.dtype != np.dtype(dtype):
            raise UserError(f"{path}: holds {array.dtype}, the manifest says {dtype}")
        return array

    def stream(self, split: str) -> TokenStream:
        """The tokens of 'train' or 'validation'."""
        folder, dtype = self.directory / split, self.manifest["dtype"]
        reclaimed = self.manifest["splits"][split]["reclaimed"]
        shards, ends = [], []
        for number, shard in enumerate(self.manifest["splits"][split]["shards"]):
            tokens, document_ends = shard["files"]
            if number < reclaimed:
                shards.append(np.broadcast_to(np.zeros((), dtype), shard["tokens"]))
            else:
                shards.append(self._load(folder, tokens, dtype))
            ends.append(np.asarray(self._load(folder, document_ends, "int64")))
        return TokenStream(shards, ends, reclaimed)

    def reclaimable(self, tokens: int) -> list[Path]:
        """The files of training tokens that hold none from number `tokens` on.

        Those that are reclaimed already are among them, whether they are still there or not.
        """
        split, end, found = self.manifest["splits"]["train"], 0, []
        for shard in split["shards"]:
            end += shard["tokens"]
            if end > tokens:
                break
            found.append(self.directory / "train" / shard["files"][0]["file"])
        return found

    def mark_reclaimed(self, shards: int) -> None:
        """Say in the manifest that the contents of the first training shards are not there.

        Whoever removes the files does so afterwards: until then they are merely not read.
        """
        split = self.manifest["splits"]["train"]
        if shards > split["reclaimed"]:
            with preparation_lock(self.directory):
                split["reclaimed"] = shards
                write_json(self.directory / "manifest.json", self.manifest)

    def counts(self, split: str) -> np.ndarray:
        """How often each token occurs in a split: [V] int64."""
        return self._load(self.directory / split, self.manifest["splits"][split]["counts"], "int64")

    def token_bytes(self) -> np.ndarray | None:
        """Bytes each token stands for, [V] int32; None where unknown."""
        entry = self.manifest["token_bytes"]
        return None if entry is None else self._load(self.directory, entry, "int32")

    @property
    def text_prefix(self) -> tuple[int, int] | None:
        """Begin token and bytes that the token after it stands for beyond the text.

        None where there are none, or where no token begins a document: then a document's first
        token is not predicted, and its bytes are not counted.
        """
        begin_id, extra = self.manifest["begin_id"], self.manifest["prefix_bytes"]
        return (begin_id, extra) if begin_id is not None and extra else None

    def tokenizer_path(self) -> Path | None:
        """The tokenizer that made the tokens (tokenizer.json or tokenizer.model), if any."""
        entry = self.manifest["tokenizer"]
        return None if entry is None else self._checked(self.directory, entry)
