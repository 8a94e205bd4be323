"""Token shards on disk: plain .npy files and a manifest that names and checks them.

A data directory holds::

    manifest.json             what is here: sizes, checksums, vocabulary, tokenizer
    tokenizer.json            absent where the tokens came from elsewhere
    token_bytes.npy           [V] int32, bytes each token stands for; absent if unknown
    train/tokens-00000.npy    token ids, uint16 or uint32
    train/ends-00000.npy      int64, end of each document within the shard's tokens
    train/counts.npy          [V] int64, how often each token occurs in the split
    validation/...            the same

A document never crosses a shard. Tokens are memory-mapped and read as slices.
"""

import hashlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.errors import UserError
from jaxlm.files import Lock, sha256_of, sync_directory, sync_file, write_atomically, write_json

FORMAT = 1
_MANIFEST_KEYS = {"vocabulary_size", "dtype", "end_id", "end_token", "normalization", "tokenizer"}
_MANIFEST_KEYS |= {"token_bytes", "source", "splits"}
SPLITS = ("train", "validation")


def token_dtype(vocabulary_size: int) -> np.dtype:
    """The smallest of uint16 and uint32 that holds every id below `vocabulary_size`."""
    return np.dtype(np.uint16 if vocabulary_size <= 2**16 else np.uint32)


def _file_entry(path: Path) -> dict[str, Any]:
    """Sync a file that was just written, and describe it."""
    sync_file(path)
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256_of(path)}


class _SplitWriter:
    """Writes the documents of one split, a shard at a time."""

    def __init__(self, directory: Path, vocabulary_size: int, shard_tokens: int):
        directory.mkdir(parents=True)
        self.directory = directory
        self.dtype = token_dtype(vocabulary_size)
        self.shard_tokens = shard_tokens
        self.counts = np.zeros(vocabulary_size, np.int64)
        self.shards: list[dict[str, Any]] = []
        self.documents = 0
        self.text_bytes = 0
        self._pending: list[np.ndarray] = []
        self._pending_tokens = 0

    def add(self, ids: np.ndarray, text_bytes: int) -> None:
        """Append a document, its end token included."""
        vocabulary_size = len(self.counts)
        if ids.size == 0:
            raise ValueError("a document needs at least one token")
        if ids.min() < 0 or ids.max() >= vocabulary_size:
            raise ValueError(
                f"document {self.documents} of {self.directory.name} has token id "
                f"{ids.max() if ids.max() >= vocabulary_size else ids.min()}; "
                f"the vocabulary has {vocabulary_size} entries"
            )
        self.counts += np.bincount(ids, minlength=vocabulary_size)
        self.documents += 1
        self.text_bytes += text_bytes
        self._pending.append(ids.astype(self.dtype))
        self._pending_tokens += ids.size
        if self._pending_tokens >= self.shard_tokens:
            self._write_shard()

    def _write_shard(self) -> None:
        number = len(self.shards)
        tokens_path = self.directory / f"tokens-{number:05d}.npy"
        ends_path = self.directory / f"ends-{number:05d}.npy"
        np.save(tokens_path, np.concatenate(self._pending))
        np.save(ends_path, np.cumsum([len(ids) for ids in self._pending], dtype=np.int64))
        self.shards.append(
            {
                "tokens": self._pending_tokens,
                "documents": len(self._pending),
                "files": [_file_entry(tokens_path), _file_entry(ends_path)],
            }
        )
        self._pending, self._pending_tokens = [], 0

    def close(self) -> dict[str, Any]:
        """Write what is left and return the split's part of the manifest."""
        if self._pending:
            self._write_shard()
        counts_path = self.directory / "counts.npy"
        np.save(counts_path, self.counts)
        counts = _file_entry(counts_path)
        sync_directory(self.directory)
        return {
            "tokens": sum(shard["tokens"] for shard in self.shards),
            "documents": self.documents,
            "text_bytes": self.text_bytes,
            "counts": counts,
            "shards": self.shards,
        }


class ShardWriter:
    """Writes a data directory that appears complete or not at all.

    Use as a context manager. The directory is built beside its final place and renamed on a clean
    exit; after an error nothing is left.

    Args:
        directory: the data directory, which must not exist yet.
        vocabulary_size: entries; decides between 16 and 32 bits a token.
        end_id: id of the token that ends a document.
        end_token: how that token is written, where there is a tokenizer.
        shard_tokens: a shard is closed once it holds this many tokens.
        tokenizer_json: text of tokenizer.json, if there is one.
        token_bytes: [V] int32, bytes each token stands for, if known.
        source: plain values that describe where the text came from; not part of the fingerprint.
    """

    def __init__(
        self,
        directory: Path,
        *,
        vocabulary_size: int,
        end_id: int,
        end_token: str | None = None,
        shard_tokens: int = 2**26,
        tokenizer_json: str | None = None,
        token_bytes: np.ndarray | None = None,
        source: dict[str, Any] | None = None,
    ):
        if directory.exists():
            raise UserError(f"{directory}: exists already; remove it, or choose another directory")
        self._lock = Lock(
            directory.with_name(directory.name + ".lock"),
            f"{directory}: is being prepared by another process; wait for it",
        )
        self.final = directory
        self.building = directory.with_name(directory.name + ".building")
        shutil.rmtree(self.building, ignore_errors=True)  # what a killed preparation left
        self.building.mkdir(parents=True)
        self.manifest: dict[str, Any] = {
            "format": FORMAT,
            "vocabulary_size": vocabulary_size,
            "dtype": token_dtype(vocabulary_size).name,
            "end_id": end_id,
            "end_token": end_token,
            "normalization": "none",
            "tokenizer": None,
            "token_bytes": None,
            "source": source or {},
        }
        if tokenizer_json is not None:
            path = self.building / "tokenizer.json"
            write_atomically(path, tokenizer_json)
            self.manifest["tokenizer"] = _file_entry(path)
        if token_bytes is not None:
            path = self.building / "token_bytes.npy"
            np.save(path, token_bytes)
            self.manifest["token_bytes"] = _file_entry(path)
        self._splits = {
            name: _SplitWriter(self.building / name, vocabulary_size, shard_tokens)
            for name in SPLITS
        }

    def add(self, split: str, ids: Iterable[int] | np.ndarray, text_bytes: int = 0) -> None:
        """Append a document's token ids, its end token included if it is to have one."""
        self._splits[split].add(np.asarray(ids, np.int64), text_bytes)

    def drop_token_bytes(self) -> None:
        """Leave the bytes of tokens unknown: they do not add up to the text's."""
        (self.building / "token_bytes.npy").unlink()
        self.manifest["token_bytes"] = None

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._lock:
            try:
                if kind is None:
                    self._finish()
            finally:
                shutil.rmtree(self.building, ignore_errors=True)

    def _finish(self) -> None:
        self.manifest["splits"] = {name: split.close() for name, split in self._splits.items()}
        write_json(self.building / "manifest.json", self.manifest)
        self.building.rename(self.final)
        sync_directory(self.final.parent)


class TokenStream:
    """The tokens of a split as one long array, memory-mapped shard by shard."""

    def __init__(self, shards: list[np.ndarray], ends: list[np.ndarray]):
        """Join shards.

        Args:
            shards: token ids of each shard.
            ends: end of each document within its shard, ascending.
        """
        self._shards = shards
        self._starts = np.cumsum([0, *[len(shard) for shard in shards]], dtype=np.int64)
        # [documents] int64: end of each document in the stream, exclusive.
        self.document_ends = np.concatenate(
            [end + start for end, start in zip(ends, self._starts, strict=False)]
            or [np.zeros(0, np.int64)]
        )

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop): a view of the mapped file unless the range crosses shards."""
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        pieces = []
        for number in range(first, len(self._shards)):
            offset = int(self._starts[number])
            if offset >= stop:
                break
            pieces.append(self._shards[number][max(start - offset, 0) : stop - offset])
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


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

    @property
    def fingerprint(self) -> dict[str, str]:
        """What must not change under a run: digests by field name."""

        def digest(value: Any) -> str:
            text = json.dumps(value, sort_keys=True, ensure_ascii=True)
            return hashlib.sha256(text.encode()).hexdigest()

        manifest = self.manifest
        fields = {f"{name} tokens": digest(manifest["splits"][name]) for name in SPLITS}
        fields["tokenizer"] = digest(manifest["tokenizer"])
        fields["normalization"] = manifest["normalization"]
        fields["vocabulary"] = f"{self.vocabulary_size} entries, end {self.end_id}"
        return fields

    def _checked(self, folder: Path, entry: dict[str, Any]) -> Path:
        path = folder / entry["file"]
        if not path.is_file():
            raise UserError(f"{path}: missing, though manifest.json lists it")
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise UserError(f"{path}: {size} bytes, expected {entry['bytes']}; prepare again")
        if self._verify and sha256_of(path) != entry["sha256"]:
            raise UserError(f"{path}: damaged (checksum differs); prepare the data again")
        return path

    def _load(self, folder: Path, entry: dict[str, Any], dtype: str) -> np.ndarray:
        path = self._checked(folder, entry)
        array = np.load(path, mmap_mode="r")
        if array.dtype != np.dtype(dtype):
            raise UserError(f"{path}: holds {array.dtype}, the manifest says {dtype}")
        return array

    def stream(self, split: str) -> TokenStream:
        """The tokens of 'train' or 'validation'."""
        folder = self.directory / split
        shards, ends = [], []
        for shard in self.manifest["splits"][split]["shards"]:
            tokens, document_ends = shard["files"]
            shards.append(self._load(folder, tokens, self.manifest["dtype"]))
            ends.append(np.asarray(self._load(folder, document_ends, "int64")))
        return TokenStream(shards, ends)

    def counts(self, split: str) -> np.ndarray:
        """How often each token occurs in a split: [V] int64."""
        return self._load(self.directory / split, self.manifest["splits"][split]["counts"], "int64")

    def token_bytes(self) -> np.ndarray | None:
        """Bytes each token stands for, [V] int32; None where unknown."""
        entry = self.manifest["token_bytes"]
        return None if entry is None else self._load(self.directory, entry, "int32")

    def tokenizer_path(self) -> Path | None:
        """The tokenizer.json that made the tokens, if any."""
        entry = self.manifest["tokenizer"]
        return None if entry is None else self._checked(self.directory, entry)
