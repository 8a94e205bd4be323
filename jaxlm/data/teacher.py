"""What a teacher predicts at each position of a data directory's training tokens, on disk.

A cache is a folder, usually DATA/teacher-NAME::

    manifest.json           which teacher, what it sees, and what is here: sizes and checksums
    ids-00000.npy           [n, k] uint16 or uint32, the k tokens, by falling probability
    log_probs-00000.npy     [n, k] float16 or float32, log-probability of each, nats
    log_tail-00000.npy      [n] float16, log of the mass of all other tokens; -inf: none is left
    progress.json           of a cache in the making: how far its last shard is

Masses are those at temperature 1. The k + 1 of them sum to 1 up to the rounding of their storage,
and are normalised by whoever reads them (losses.py).

The record of position p is about token p of the training stream: what the teacher makes of the
tokens before it. So any layout, order and range of rows finds its records by position. Records are
there without a gap from the first position of the first shard to the last of the last one. That of
a document's first token, which is never a target, means nothing.

Shards that are finished never change, and a cache that goes on begins a new one. Each carries a
digest of the tokens that it belongs to, so that a cache cannot be read beside other tokens. Names
in the manifest are those of files in the folder, which can be moved and copied.

Like a data directory, a cache may give up its first shards once they were learned from: the
manifest then says how many are `reclaimed`; their entries stay, their files are gone.
"""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.data.shards import (
    ArrayFile,
    DataDirectory,
    TokenStream,
    meaning_of_ids,
    token_dtype,
)
from jaxlm.data.tokenizer import read_tokenizer
from jaxlm.errors import UserError
from jaxlm.files import (
    FileSum,
    Lock,
    differences,
    refuse_links,
    sum_files,
    sync_directory,
    write_json,
)

FORMAT = 1
MANIFEST, PROGRESS = "manifest.json", "progress.json"
ARRAYS = ("ids", "log_probs", "log_tail")
# What a cache was made of: all of it must be the same where one goes on.
_DESCRIPTION = ("teacher", "context", "tokenizer", "vocabulary", "vocabulary_size", "k", "dtype")
_TAIL = np.dtype(np.float16)


@dataclass(frozen=True)
class CacheFormat:
    """Size and types of a record."""

    # Tokens that a record names.
    k: int = 32
    # Type of their log-probabilities: float16 or float32.
    dtype: str = "float16"
    # Entries of the vocabulary: up to 65,536 an id takes 2 bytes, above 4.
    vocabulary_size: int = 2**16

    @property
    def dtypes(self) -> dict[str, np.dtype]:
        """Types of the arrays, by the names of ARRAYS."""
        return dict(
            zip(
                ARRAYS,
                (token_dtype(self.vocabulary_size), np.dtype(self.dtype), _TAIL),
                strict=True,
            )
        )

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a record."""
        ids, log_probs, tail = self.dtypes.values()
        return self.k * (ids.itemsize + log_probs.itemsize) + tail.itemsize


# ---------------------------------------------------------------- vocabularies


def vocabulary_fingerprint(pieces: dict[int, str], size: int) -> str:
    """A digest of what the ids below `size` stand for."""
    entries = [[i, pieces[i]] for i in sorted(pieces) if i < size]
    return hashlib.sha256(json.dumps(entries, ensure_ascii=True).encode()).hexdigest()


@dataclass(frozen=True)
class Vocabulary:
    """What token ids stand for."""

    # The data directory, or the tokenizer's file: for messages.
    source: Path
    # Entries.
    size: int
    # shards.meaning_of_ids.
    meaning: dict[str, str]
    # How each id is written; None where there is no tokenizer.
    pieces: dict[int, str] | None

    @property
    def fingerprint(self) -> str | None:
        """:func:`vocabulary_fingerprint`; None where there is no tokenizer."""
        return None if self.pieces is None else vocabulary_fingerprint(self.pieces, self.size)


def vocabulary_of(data: DataDirectory) -> Vocabulary:
    """The vocabulary of a data directory."""
    path, manifest = data.tokenizer_path(), data.manifest
    pieces = None
    if path is not None:
        pieces = read_tokenizer(path, manifest["end_token"], manifest["begin_token"]).pieces()
    return Vocabulary(data.directory, data.vocabulary_size, meaning_of_ids(manifest), pieces)


def vocabulary_of_file(path: Path, end_token: str, begin_token: str | None) -> Vocabulary:
    """The vocabulary of data that are still to be prepared with a tokenizer."""
    tokenizer = read_tokenizer(path, end_token, begin_token)
    entry = {
        "file": tokenizer.file_name,
        "bytes": len(tokenizer.content),
        "sha256": hashlib.sha256(tokenizer.content).hexdigest(),
    }
    meaning = meaning_of_ids(
        {
            "tokenizer": entry,
            "vocabulary_size": tokenizer.vocabulary_size,
            "begin_id": tokenizer.begin_id,
            "end_id": tokenizer.end_id,
        }
    )
    return Vocabulary(path, tokenizer.vocabulary_size, meaning, tokenizer.pieces())


def refuse_other_vocabulary(vocabulary: Vocabulary, teacher: str, pieces: dict[int, str]) -> str:
    """The fingerprint of the vocabulary that data and a teacher share.

    Args:
        vocabulary: of the data.
        teacher: its name, for messages.
        pieces: how the teacher's tokenizer writes each id. Ids that the data does not have are
            allowed: they are never predicted.

    Raises:
        UserError: an id stands for something else, or the data has no tokenizer to compare.
    """
    own, size = vocabulary.pieces, vocabulary.size
    if own is None:
        raise UserError(
            f"{vocabulary.source}: has no tokenizer to compare with that of {teacher}; prepare the "
            f"data with prepare.tokenizer"
        )
    ours, theirs = vocabulary_fingerprint(own, size), vocabulary_fingerprint(pieces, size)
    if ours == theirs:
        return ours
    i = next(i for i in range(size) if own.get(i) != pieces.get(i))
    raise UserError(
        f"{vocabulary.source}: its tokenizer ({ours[:16]}, {size:,} ids) is not that of {teacher} "
        f"({theirs[:16]}, {len(pieces):,} ids): id {i} is {own.get(i)!r} here and "
        f"{pieces.get(i)!r} there; prepare the data with the teacher's tokenizer"
    )


# ---------------------------------------------------------------- files


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def tokens_digest(stream: TokenStream, first: int, stop: int) -> str:
    """A digest of tokens [first, stop) of a stream and of where documents end among them."""
    digest = hashlib.sha256()
    for start in range(first, stop, 2**22):
        digest.update(np.ascontiguousarray(stream.read(start, min(start + 2**22, stop))).data)
    ends = stream.document_ends
    digest.update((ends[(ends > first) & (ends <= stop)] - first).data)
    return digest.hexdigest()


def _names(number: int) -> dict[str, str]:
    return {name: f"{name}-{number:05d}.npy" for name in ARRAYS}


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a cache.

    Raises:
        UserError: there is none, or it is damaged or made by another version.
    """
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(
            f"{directory}: holds no teacher's predictions (no {MANIFEST}); make them with "
            f"scripts/cache_teacher.py"
        ) from None
    except ValueError:
        raise UserError(f"{path}: damaged; make the cache again") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise UserError(f"{path}: not of format {FORMAT}; make the cache again")
    missing = {"shards", *_DESCRIPTION} - manifest.keys()
    if missing:
        raise UserError(f"{path}: damaged (lacks {', '.join(sorted(missing))}); make it again")
    for number, shard in enumerate(manifest["shards"]):
        if set(shard["files"]) != set(_names(number).values()):
            raise UserError(f"{path}: names files that are not those of shard {number}")
    return manifest


def format_of(manifest: dict[str, Any]) -> CacheFormat:
    """Size and types of a cache's records."""
    return CacheFormat(manifest["k"], manifest["dtype"], manifest["vocabulary_size"])


def covered(manifest: dict[str, Any]) -> tuple[int, int]:
    """Positions [first, stop) that a cache's finished shards have records of."""
    shards = manifest["shards"]
    if not shards:
        return 0, 0
    return shards[0]["first"], shards[-1]["first"] + shards[-1]["records"]


def cached_until(directory: Path) -> int:
    """Position after the last record, those of an unfinished shard included; 0 without a cache."""
    if not (directory / MANIFEST).exists():
        return 0
    manifest = read_manifest(directory)
    end = covered(manifest)[1] if manifest["shards"] else manifest["begins"]
    if not (directory / PROGRESS).exists():
        return end
    progress = json.loads((directory / PROGRESS).read_bytes())
    return end + (progress["records"] if progress["shard"] == len(manifest["shards"]) else 0)


def files_of(manifest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Size and checksum of the files of all finished shards, by name; reclaimed ones included."""
    return {name: entry for shard in manifest["shards"] for name, entry in shard["files"].items()}


def reclaimable(manifest: dict[str, Any], position: int) -> int:
    """How many of the first shards have no record of a position from this one on."""
    return sum(shard["first"] + shard["records"] <= position for shard in manifest["shards"])


def mark_reclaimed(directory: Path, shards: int) -> None:
    """Say in the manifest that the files of the first shards are not there.

    Whoever removes them does so afterwards: until then they are merely not read.
    """
    with cache_lock(directory):
        manifest = read_manifest(directory)
        if shards > manifest.get("reclaimed", 0):
            write_json(directory / MANIFEST, manifest | {"reclaimed": shards})


def lock_path(directory: Path) -> Path:
    """The file that whoever writes a cache has locked."""
    return directory.with_name(directory.name + ".lock")


def cache_lock(directory: Path) -> Lock:
    """The lock of whoever writes a cache, which may be a link but holds none."""
    refuse_links(directory.resolve(), "a teacher's predictions")
    return Lock(lock_path(directory), f"{directory}: another process is writing this cache")


class CacheWriter:
    """Makes a cache, or goes on with one, in order of positions. Use as a context manager.

    Args:
        directory: of the cache.
        description: what it is made of: teacher, context, tokenizer, vocabulary, vocabulary_size,
            k and dtype, as plain values.
        stream: the training tokens.
        first: position of the first record.
        shard_tokens: a shard is finished once it has so many records.

    Raises:
        UserError: the folder holds something else, was made of something else, or begins elsewhere.
    """

    def __init__(
        self,
        directory: Path,
        description: dict[str, Any],
        stream: TokenStream,
        first: int,
        shard_tokens: int = 2**20,
    ):
        self.directory, self.stream, self.shard_tokens = directory, stream, shard_tokens
        self._lock = cache_lock(directory)
        self._files: dict[str, ArrayFile] = {}
        # As it is read back, where tuples are lists.
        description = json.loads(json.dumps(description))
        assert set(description) == set(_DESCRIPTION)
        if not (directory / MANIFEST).exists():
            # A writer that was killed at once may have left the beginning of a manifest.
            found = directory.iterdir() if directory.exists() else ()
            if any(path.name != f"{MANIFEST}.tmp" for path in found):
                raise UserError(f"{directory}: holds other files; choose another name")
            directory.mkdir(parents=True, exist_ok=True)
            self.manifest = {"format": FORMAT, **description, "begins": first, "shards": []}
            write_json(directory / MANIFEST, self.manifest)
        self.manifest = read_manifest(directory)
        self._format = format_of(self.manifest)
        self._check(description, first)
        shards = self.manifest["shards"]
        # Position of the first record of the open shard.
        self._first = covered(self.manifest)[1] if shards else self.manifest["begins"]
        done = 0
        if (directory / PROGRESS).exists():
            progress = json.loads((directory / PROGRESS).read_bytes())
            done = progress["records"] if progress["shard"] == len(shards) else 0
        self._open(done)
        if self.full:  # a writer was killed while it finished this shard
            self.finish_shard()

    def _check(self, description: dict[str, Any], first: int) -> None:
        different = [
            f"{key} was {json.dumps(self.manifest[key])}, is {json.dumps(description[key])}"
            for key in _DESCRIPTION
            if self.manifest[key] != description[key]
        ]
        if different:
            raise UserError(
                f"{self.directory}: was made differently ({'; '.join(different)}); choose another "
                f"name, or remove the folder"
            )
        begins, (_, stop) = self.manifest["begins"], covered(self.manifest)
        if first < begins or first > max(stop, begins):
            raise UserError(
                f"{self.directory}: has positions from {begins:,} to {stop:,} and cannot begin at "
                f"{first:,}; choose another name"
            )

    def _open(self, records: int) -> None:
        dtypes, number = self._format.dtypes, len(self.manifest["shards"])
        self._files = {
            name: ArrayFile(
                self.directory / file,
                dtypes[name],
                records,
                None if name == "log_tail" else self._format.k,
            )
            for name, file in _names(number).items()
        }

    @property
    def position(self) -> int:
        """The position whose record comes next."""
        return self._first + self._files["ids"].count

    @property
    def full(self) -> bool:
        """Whether the next commit finishes the shard."""
        return self._files["ids"].count >= self.shard_tokens

    def append(self, ids: np.ndarray, log_probs: np.ndarray, log_tail: np.ndarray) -> None:
        """Write records: [n, k], [n, k] and [n].

        Raises:
            ValueError: values that are no log-probabilities, or ids that are not in the vocabulary.
        """
        if not (np.isfinite(log_probs).all() and not np.isnan(log_tail).any()):
            raise ValueError(f"the teacher's output at position {self.position:,} is not finite")
        if ids.min() < 0 or ids.max() >= self._format.vocabulary_size:
            raise ValueError(f"a token id near position {self.position:,} is not in the vocabulary")
        for name, values in zip(ARRAYS, (ids, log_probs, log_tail), strict=True):
            self._files[name].append(values)

    def commit(self) -> None:
        """Make all records so far survive a power failure; finish the shard if it is full."""
        if self.full:
            self.finish_shard()
            return
        for file in self._files.values():
            file.sync()
        sync_directory(self.directory)
        progress = {"shard": len(self.manifest["shards"]), "records": self._files["ids"].count}
        write_json(self.directory / PROGRESS, progress)

    def finish_shard(self) -> None:
        """Close the open shard, if anything is in it, name it in the manifest, and open the next.

        The position in it is on disk before its files get their names, so that a writer that is
        killed in between takes them up again.
        """
        records = self._files["ids"].count
        if not records:
            return
        for file in self._files.values():
            file.sync()
        shards = self.manifest["shards"]
        write_json(self.directory / PROGRESS, {"shard": len(shards), "records": records})
        for file in self._files.values():
            file.finish()
        sync_directory(self.directory)
        sums = sum_files(self.directory, _names(len(shards)).values())
        shards.append(
            {
                "first": self._first,
                "records": records,
                "tokens": tokens_digest(self.stream, self._first, self._first + records),
                "files": {n: {"bytes": s.bytes, "sha256": s.sha256} for n, s in sums.items()},
            }
        )
        write_json(self.directory / MANIFEST, self.manifest)
        self._first += records
        self._open(0)

    def finish(self) -> None:
        """Finish the shard: everything so far can be read."""
        self.finish_shard()
        self.close()
        (self.directory / PROGRESS).unlink(missing_ok=True)
        sync_directory(self.directory)

    def close(self) -> None:
        """Close the files; the part of a shard stays as it is."""
        for file in self._files.values():
            file.close()
        self._files = {}

    def __enter__(self) -> "CacheWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._lock.__exit__()


class TeacherCache:
    """The records of a cache for some positions, memory-mapped.

    Args:
        directory: of the cache.
        data: the data directory whose training tokens they are about.
        stream: those tokens.
        first: first position that will be asked for.
        stop: position after the last one. Shards outside are not looked at, and may be gone; so may
            reclaimed ones within, as long as nothing of them is asked for.
        verify: compare the checksums of all files that will be read.

    Raises:
        UserError: no cache, one of another tokenizer or other tokens, one that does not reach that
            far, or damaged files.
    """

    def __init__(
        self,
        directory: Path,
        data: DataDirectory,
        stream: TokenStream,
        first: int,
        stop: int,
        verify: bool = True,
    ):
        self.directory = directory
        # Position after the last one that can be read.
        self.stop = stop
        self.manifest = manifest = read_manifest(directory)
        self.format = format_of(manifest)
        theirs, ours = manifest["tokenizer"], tokenizer_digest(data)
        sizes = manifest["vocabulary_size"], data.vocabulary_size
        if theirs != ours or sizes[0] != sizes[1]:
            raise UserError(
                f"{directory}: was made for the tokenizer {str(theirs)[:16]} ({sizes[0]:,} ids), "
                f"{data.directory} has {str(ours)[:16]} ({sizes[1]:,} ids); make the cache again "
                f"from this data"
            )
        begin, end = covered(manifest)
        if first < begin or stop > end:
            raise UserError(
                f"{directory}: has positions {begin:,} to {end:,}, and {first:,} to {stop:,} are "
                f"needed; go on with scripts/cache_teacher.py, or change data.tokens"
            )
        shards = manifest["shards"]
        used = [
            number
            for number, shard in enumerate(shards)
            if shard["first"] < stop and shard["first"] + shard["records"] > first
        ]
        # Without the key nothing was reclaimed.
        there = [number for number in used if number >= manifest.get("reclaimed", 0)]
        self._check_files({k: v for n in there for k, v in shards[n]["files"].items()}, verify)
        self._check_tokens(stream, [shards[n] for n in there])
        # What must not change under a run; the records shard by shard, so that those of a longer
        # range begin with those of a shorter one.
        self.fingerprint: dict[str, str | list[str]] = {
            "teacher": _digest([manifest[key] for key in _DESCRIPTION]),
            "teacher records": [_digest(shards[number]) for number in used],
        }
        self._starts = np.array([shards[n]["first"] for n in there], np.int64)
        self._stops = self._starts + np.array([shards[n]["records"] for n in there], np.int64)
        self._shards = [self._map(number) for number in there]
        # The first position that can be read.
        self.readable_from = int(self._starts[0]) if there else stop

    def _check_files(self, files: dict[str, Any], verify: bool) -> None:
        expected = {name: FileSum(**entry) for name, entry in files.items()}
        damage = differences(self.directory, expected, verify)
        if damage:
            more = f"; and {len(damage) - 3} files more" if len(damage) > 3 else ""
            raise UserError(
                f"{self.directory}: damaged ({'; '.join(damage[:3])}{more}); copy or make it again"
            )

    def _check_tokens(self, stream: TokenStream, shards: list[dict[str, Any]]) -> None:
        def same(shard: dict[str, Any]) -> bool:
            first, stop = shard["first"], shard["first"] + shard["records"]
            return stop <= len(stream) and tokens_digest(stream, first, stop) == shard["tokens"]

        with ThreadPoolExecutor() as threads:
            for shard, ok in zip(shards, threads.map(same, shards), strict=True):
                if not ok:
                    raise UserError(
                        f"{self.directory}: belongs to other training tokens (from position "
                        f"{shard['first']:,} on); make it again from this data"
                    )

    def _map(self, number: int) -> dict[str, np.ndarray]:
        arrays, dtypes = {}, self.format.dtypes
        for name, file in _names(number).items():
            # A slice of a plain array is several times cheaper than one of an np.memmap.
            array = np.asarray(np.load(self.directory / file, mmap_mode="r"))
            shape = (self.manifest["shards"][number]["records"], self.format.k)[: array.ndim]
            if array.dtype != dtypes[name] or array.shape != shape:
                raise UserError(
                    f"{self.directory / file}: holds {array.dtype} {list(array.shape)}, the "
                    f"manifest says {dtypes[name]} {list(shape)}"
                )
            arrays[name] = array
        return arrays

    def describe(self) -> str:
        """One line: who, how much of its distribution, from which context."""
        teacher, context = self.manifest["teacher"], self.manifest["context"]
        depth = "" if teacher.get("depth") is None else f" at depth {teacher['depth']}"
        return (
            f"{teacher['name']} ({teacher['kind']}){depth}, k = {self.format.k}, "
            f"{self.format.dtype}, {context['kind']} of {context['length']:,} tokens"
        )

    def read(
        self,
        shape: tuple[int, int],
        row: np.ndarray,
        offset: np.ndarray,
        start: np.ndarray,
        length: np.ndarray,
    ) -> dict[str, np.ndarray]:
        """Records laid out in rows of targets; zeros where there is nothing.

        Args:
            shape: N rows of T targets.
            row: [P] row of each piece.
            offset: [P] where in its row it begins.
            start: [P] position of its first target in the stream.
            length: [P] its targets.

        Returns:
            `teacher_ids` [N, T, k], `teacher_log_probs` [N, T, k], `teacher_log_tail` [N, T], in
            the types of the cache.
        """
        first = int(start[length > 0].min(initial=self.stop))
        if first < self.readable_from:
            raise UserError(
                f"{self.directory}: the record of position {first:,} was reclaimed: the first that "
                f"is left is that of {self.readable_from:,}; make the cache again"
            )
        k, dtypes = self.format.k, self.format.dtypes
        found = {
            name: np.zeros(shape if name == "log_tail" else (*shape, k), dtypes[name])
            for name in ARRAYS
        }
        shards = np.searchsorted(self._starts, start, side="right") - 1
        pieces = (shards, row, offset, start, length)
        for shard, r, o, position, count in zip(*(x.tolist() for x in pieces), strict=True):
            stop = position + count
            while position < stop:  # once, unless the piece crosses shards
                end = min(stop, int(self._stops[shard]))
                begin, first = position - int(self._starts[shard]), o + count - (stop - position)
                for name, values in found.items():
                    values[r, first : first + end - position] = self._shards[shard][name][
                        begin : begin + end - position
                    ]
                position, shard = end, shard + 1
        return {f"teacher_{name}": values for name, values in found.items()}


def tokenizer_digest(data: DataDirectory) -> str | None:
    """The checksum of a data directory's tokenizer file; None where it has none."""
    entry = data.manifest["tokenizer"]
    return None if entry is None else entry["sha256"]
