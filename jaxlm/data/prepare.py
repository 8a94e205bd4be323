"""From raw text to a data directory: tokenizer, split, shards, manifest.

The files are read in an order drawn from a seed, each from its beginning to its end, and their
documents are appended to the shards in that order; nothing depends on the number of processes or on
interruptions. Every few seconds what was written is synced and the position is committed to the
journal; a preparation that was killed, at any moment, continues from there. A preparation may also
be paused at a number of training tokens and continued later: documents that came before are known
to the journal, so that a later part repeats none.
"""

import collections
import contextlib
import hashlib
import os
import shutil
import time
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pydantic

from jaxlm.config import Config, PrepareConfig
from jaxlm.console import progress
from jaxlm.data.cleaning import digest, is_validation
from jaxlm.data.journal import Journal
from jaxlm.data.shards import (
    SPLITS,
    DataDirectory,
    SplitWriter,
    new_manifest,
    preparation_lock,
    write_manifest,
)
from jaxlm.data.sources import Reader, Record, Source, find_sources
from jaxlm.data.tokenizer import Tokenizer, read_tokenizer, train_tokenizer
from jaxlm.data.work import Document, Workers, cleaned
from jaxlm.errors import UserError
from jaxlm.files import sha256_of, sync_directory

JOURNAL = "preparation.sqlite"
# A batch ends with the record that makes it this large, or this long.
_BATCH_BYTES, _BATCH_RECORDS = 2**18, 1024
_COMMIT_SECONDS = 10.0
# Bytes of a character at most, as UTF-8 or as an escape of JSON, and room for JSON's other keys.
_CHARACTER_BYTES, _OTHER_BYTES = 6, 2**20
# Smaller inputs are not worth the start of processes.
_ALONE_BYTES = 2**22
# Offsets of invalid text that are kept for each file.
_OFFSETS = 5


def ensure_prepared(config: Config) -> DataDirectory:
    """Open the data directory of a configuration; make it if it is not there.

    Raises:
        UserError: as :func:`prepare`.
    """
    directory = Path(config.data.directory)
    if (directory / "manifest.json").exists() or not config.prepare.inputs:
        if not directory.exists():
            raise UserError(
                f"data.directory '{directory}' does not exist and prepare.inputs is empty: "
                f"name the text files, or a directory of prepared data"
            )
        data = DataDirectory(directory)
        _check_source(data, config.prepare)
        return data
    return prepare(config)


def prepare(config: Config, tokens: int | None = None) -> DataDirectory:
    """Make the data directory of a configuration, or go on making it.

    Args:
        config: uses `prepare` and `data.directory`.
        tokens: stop once there are so many training tokens; null reads all sources.

    Raises:
        UserError: no inputs, an unreadable or damaged input, an empty split, or a directory that
            was prepared with other settings or from other files. What was prepared before stays.
    """
    directory = Path(config.data.directory)
    if not config.prepare.inputs:
        return ensure_prepared(config)
    if (directory / "manifest.json").exists():
        data = DataDirectory(directory)
        enough = tokens is not None and data.manifest["splits"]["train"]["tokens"] >= tokens
        if enough or data.manifest["source"].get("complete", True):
            _check_source(data, config.prepare)
            return data
        if not (directory / JOURNAL).exists():
            raise UserError(
                f"{directory / JOURNAL}: missing, so that it is not known where to go on; bring it "
                f"back from a copy, or prepare the data again in another directory"
            )
    elif directory.exists() and any(directory.iterdir()) and not (directory / JOURNAL).exists():
        raise UserError(f"{directory}: holds other files; choose another data.directory")
    sources = _in_order(find_sources(config.prepare.inputs), config.prepare.seed)
    with preparation_lock(directory):
        started_here = not directory.exists()
        small = sum(source.path.stat().st_size for source in sources) < _ALONE_BYTES
        try:
            with _Preparation(directory, config.prepare, sources) as preparation:
                preparation.run(tokens)
        except UserError:
            # With no more than seconds of work in it, the next attempt may have other settings.
            if started_here and (small or not (directory / "train").exists()):
                shutil.rmtree(directory)
            raise
    return DataDirectory(directory)


def _in_order(sources: list[Source], seed: int) -> list[Source]:
    """Sources in the order of the seed, whatever folder they are in and however they were named."""
    ordered = sorted(sources, key=lambda source: (source.path.name, str(source.path)))
    order = np.random.Generator(np.random.Philox(seed)).permutation(len(ordered))
    return [ordered[i] for i in order]


def identity(path: Path) -> str:
    """What tells a file's contents apart: its size, and a hash of its first and last 64 KiB."""
    edge = 2**16
    with path.open("rb") as file:
        first = file.read(edge)
        size = os.fstat(file.fileno()).st_size
        file.seek(max(size - edge, 0))
        ends = hashlib.sha256(first + file.read(edge))
    return f"{size} bytes, {ends.hexdigest()[:16]}"


def _settings(prepare: PrepareConfig) -> dict[str, Any]:
    """What the tokens depend on: the settings, and the tokenizer file's contents."""
    settings = typing.cast(
        dict[str, Any], pydantic.TypeAdapter(PrepareConfig).dump_python(prepare, mode="json")
    )
    del settings["processes"]
    if prepare.tokenizer is not None and Path(prepare.tokenizer).is_file():
        settings["tokenizer"] = sha256_of(Path(prepare.tokenizer))
    return settings


def _differences(stored: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    return [
        f"prepare.{key} was {stored.get(key)!r}, is {wanted.get(key)!r}"
        for key in dict.fromkeys((*stored, *wanted))
        if stored.get(key) != wanted.get(key)
    ]


def _refuse(directory: Path, different: list[str]) -> typing.NoReturn:
    raise UserError(
        f"{directory}: was prepared differently ({'; '.join(different)}); remove the "
        f"directory, or set data.directory to a new one"
    )


def _check_source(data: DataDirectory, settings: PrepareConfig) -> None:
    stored = data.manifest["source"]
    if "settings" not in stored or not settings.inputs:
        return  # data that was made elsewhere, or is only to be read
    different = _differences(stored["settings"], _settings(settings))
    if not different:
        try:
            sources = find_sources(settings.inputs)
        except UserError:
            return  # the sources are gone; the data stands for itself
        # In the order of reading; names and ends of files cost little to compare.
        now = [(s.path.name, identity(s.path)) for s in _in_order(sources, settings.seed)]
        if now != [(file["file"], file["identity"]) for file in stored["files"]]:
            different = ["files behind prepare.inputs were added, removed or changed"]
    if different:
        _refuse(data.directory, different)


def _new_outcome() -> dict[str, Any]:
    """Counts of one source; `in` is the sum of train, validation and skipped."""
    return {
        "in": 0,
        "train": 0,
        "validation": 0,
        "skipped": {},
        "replaced": 0,
        "first_invalid": [],
        "removed_zero_width": 0,
        "removed_nul": 0,
    }


def _sum(outcomes: Iterable[dict[str, Any]]) -> dict[str, Any]:
    total, skipped = _new_outcome(), collections.Counter()
    del total["first_invalid"]
    for outcome in outcomes:
        skipped.update(outcome["skipped"])
        for key in total.keys() - {"skipped"}:
            total[key] += outcome[key]
    total["skipped"] = dict(sorted(skipped.items()))
    return total


class _Preparation:
    """A data directory in the making.

    The journal's `position` holds what a restart needs: the number of the source, the records of
    it that were handled, the position in the shards, and its outcome so far; `start` is the same
    for the beginning of the source, or for the pause within it, to return to if the source turns
    out to be damaged: what a manifest names stays. `damaged` is the number of such a source.
    """

    def __init__(self, directory: Path, settings: PrepareConfig, sources: list[Source]):
        self.directory, self.settings, self.sources = directory, settings, sources
        directory.mkdir(parents=True, exist_ok=True)
        self.journal = Journal(directory / JOURNAL)
        self.identities = [identity(source.path) for source in sources]
        self.sizes = [source.path.stat().st_size for source in sources]
        self._splits: dict[str, SplitWriter] = {}
        self._committed = time.monotonic()

    def __enter__(self) -> "_Preparation":
        return self

    def __exit__(self, *_: object) -> None:
        for split in self._splits.values():
            split.close()
        self.journal.close()

    def run(self, tokens: int | None) -> None:
        """Read sources until there are enough training tokens, and write the manifest."""
        self._check_or_begin()
        tokenizer = self._tokenizer()
        self._open(tokenizer)
        processes = self.settings.processes or len(os.sched_getaffinity(0))
        workers = Workers(
            self.settings,
            self.directory / tokenizer.file_name,
            1 if sum(self.sizes) < _ALONE_BYTES else processes,
        )
        with contextlib.closing(workers), self._progress() as advance:
            while self.position["source"] < len(self.sources) and not self._enough(tokens):
                self._read(workers, tokens, advance)
        self._finish(tokenizer)

    # ------------------------------------------------------------------ beginning

    def _check_or_begin(self) -> None:
        """Compare with what the journal began with; files that were read must be the same."""
        settings = _settings(self.settings)
        files = [[s.path.name, i] for s, i in zip(self.sources, self.identities, strict=True)]
        if self.journal["settings"] is None:
            self.journal["settings"], self.journal["files"] = settings, files
            self.journal["outcomes"] = []
            self.journal.commit()
            return
        different = _differences(self.journal["settings"], settings)
        before = self.journal["files"]
        position = self.journal["position"] or {"source": 0}
        read = position["source"]
        if [name for name, _ in before] != [name for name, _ in files]:
            different.append("files behind prepare.inputs were added or removed")
        else:
            different += [
                f"{source.path} changed after it was read"
                for source, old, new in zip(self.sources[:read], before, files, strict=False)
                if old != new
            ]
        if different:
            _refuse(self.directory, different)
        start = self.journal["start"]
        if read < len(files) and before[read] != files[read] and start:
            # A part of it stays; whoever was told to bring a whole copy may do so.
            if start["records"] and self.journal["damaged"] != read:
                path = self.sources[read].path
                _refuse(self.directory, [f"{path} changed after a part of it was read"])
            self._return_to_start()
        self.journal["files"] = files
        self.journal.commit()

    def _tokenizer(self) -> Tokenizer:
        """The tokenizer, which is saved in the directory before anything is encoded."""
        settings = self.settings
        name = self.journal["tokenizer"]
        if name is None:
            if settings.tokenizer is not None:
                tokenizer = read_tokenizer(
                    Path(settings.tokenizer), settings.end_token, settings.begin_token
                )
            else:
                tokenizer = train_tokenizer(
                    self._training_texts(),
                    settings.vocabulary_size,
                    settings.end_token,
                    settings.begin_token,
                    settings.train,
                )
            name = tokenizer.file_name
            new_manifest(
                self.directory,
                vocabulary_size=tokenizer.vocabulary_size,
                end_id=tokenizer.end_id,
                tokenizer=(name, tokenizer.content),
            )
            self.journal["tokenizer"] = name
            self.journal.commit()
        return read_tokenizer(self.directory / name, settings.end_token, settings.begin_token)

    def _training_texts(self) -> Iterator[str]:
        """Cleaned training documents from the first sources, up to `train_bytes`."""
        left, total = self.settings.train_bytes, sum(self.sizes)
        with progress("Reading for the tokenizer (kB)", min(left, total) // 1000) as advance:
            for source in self.sources:
                with self._reader(source) as reader:
                    for record in reader:
                        text = cleaned(record, source.kind, self.settings)
                        if isinstance(text, str) or text.reason is not None:
                            continue
                        if is_validation(digest(text.text), self.settings.validation_fraction):
                            continue
                        size = len(text.text.encode("utf-8"))
                        advance(left // 1000 - (left - size) // 1000, "")
                        left -= size
                        yield text.text
                        if left <= 0:
                            return

    def _open(self, tokenizer: Tokenizer) -> None:
        position = self.journal["position"]
        self._splits = {
            name: SplitWriter(
                self.directory / name,
                tokenizer.vocabulary_size,
                self.settings.shard_tokens,
                position and position["splits"][name],
            )
            for name in SPLITS
        }
        sync_directory(self.directory)
        self.position: dict[str, Any] = position or {
            "source": 0,
            "records": 0,
            "outcome": _new_outcome(),
            "bytes_add_up": True,
        }
        if position is None:
            self._commit(start=True)

    # ------------------------------------------------------------------ reading

    def _reader(self, source: Source) -> Reader:
        longest = _CHARACTER_BYTES * self.settings.maximum_characters + _OTHER_BYTES
        return Reader(
            source, self.settings.text_key, self.settings.text_documents, longest, self.directory
        )

    @contextlib.contextmanager
    def _progress(self) -> Iterator[Any]:
        """Yields a function of the bytes of the current source that were read."""
        before = np.cumsum([0, *self.sizes])
        shown = int(before[self.position["source"]]) // 1000
        title = f"Preparing {self.directory} (kB)"
        with progress(title, int(before[-1]) // 1000, shown) as advance:

            def show(source: int, bytes_read: int) -> None:
                nonlocal shown
                now = int(before[source] + bytes_read) // 1000
                if now > shown:
                    advance(now - shown, f"{self._splits['train'].tokens:,} tokens")
                    shown = now

            yield show

    def _enough(self, tokens: int | None) -> bool:
        return tokens is not None and self._splits["train"].tokens >= tokens

    def _read(self, workers: Workers, tokens: int | None, advance: Any) -> None:
        """Read the current source on from its position, to its end or until there are enough."""
        number = self.position["source"]
        source = self.sources[number]
        try:
            with self._reader(source) as reader:
                batches = _batches(reader, self.position["records"])
                for documents in workers.documents(source.kind, batches):
                    for document in documents:
                        self._take(document)
                        if self._enough(tokens):
                            self._commit()
                            return
                    advance(number, reader.bytes_read)
                    if time.monotonic() - self._committed > _COMMIT_SECONDS:
                        self._commit()
        except UserError:
            self.journal.rollback()
            self.journal["damaged"] = number
            self._return_to_start()
            raise
        outcomes = [*self.journal["outcomes"], self.position["outcome"]]
        self.journal["outcomes"] = outcomes
        self.position |= {"source": number + 1, "records": 0, "outcome": _new_outcome()}
        self._commit(start=True)

    def _take(self, document: Document) -> None:
        """Count a document, and append it to its split unless it came before."""
        outcome, source = self.position["outcome"], self.position["source"]
        self.position["records"] += 1
        outcome["in"] += 1
        outcome["replaced"] += document.replaced
        outcome["removed_zero_width"] += document.removed_zero_width
        outcome["removed_nul"] += document.removed_nul
        if document.first_invalid is not None and len(outcome["first_invalid"]) < _OFFSETS:
            outcome["first_invalid"].append(document.first_invalid)
        reason = document.reason or self._repeats(document, source)
        if reason is not None:
            outcome["skipped"][reason] = outcome["skipped"].get(reason, 0) + 1
            return
        split = "validation" if document.held_out else "train"
        outcome[split] += 1
        assert document.ids is not None
        self._splits[split].add(document.ids, document.text_bytes)
        self.position["bytes_add_up"] &= document.bytes_add_up

    def _repeats(self, document: Document, source: int) -> str | None:
        if self.settings.deduplicate and not self.journal.is_new(document.digest, source):
            return "duplicate"
        threshold = self.settings.near_duplicates
        if threshold is None or document.signature is None:
            return None
        unlike = self.journal.is_unlike_all(document.signature, threshold, source)
        return None if unlike else "near_duplicate"

    # ------------------------------------------------------------------ positions

    def _commit(self, start: bool = False) -> None:
        """Sync the shards, then make the position in them and the documents seen permanent."""
        self.position["splits"] = {name: split.sync() for name, split in self._splits.items()}
        self.journal["position"] = self.position
        if start:
            self.journal["start"] = self.position
        self.journal.commit()
        self._committed = time.monotonic()

    def _return_to_start(self) -> None:
        """Forget the current source, which is damaged or was replaced."""
        start = self.journal["start"]
        self.journal.forget(start["source"])
        self.journal["position"] = start
        self.journal.commit()

    def _finish(self, tokenizer: Tokenizer) -> None:
        """Write the manifest."""
        complete = self.position["source"] == len(self.sources)
        outcomes = [*self.journal["outcomes"]]
        if not complete:
            outcomes.append(self.position["outcome"])
        documents = _sum(outcomes)
        self._check_splits(documents, complete)
        for split in self._splits.values():
            split.finish_shard()
        self.journal.settle()
        self._commit(start=True)
        manifest = new_manifest(
            self.directory,
            vocabulary_size=tokenizer.vocabulary_size,
            begin_id=tokenizer.begin_id,
            end_id=tokenizer.end_id,
            end_token=tokenizer.end_token,
            begin_token=tokenizer.begin_token,
            normalization=self.settings.normalization,
            tokenizer=(tokenizer.file_name, tokenizer.content),
            # Bytes of tokens that are not the text's bytes tell nothing.
            token_bytes=tokenizer.token_bytes() if self.position["bytes_add_up"] else None,
            prefix_bytes=tokenizer.prefix_bytes,
        )
        manifest["source"] = {
            "settings": self.journal["settings"],
            "complete": complete,
            # Every document that came in is accounted for.
            "documents": documents,
            "files": [
                {
                    "file": source.path.name,
                    "identity": self.identities[i],
                    # null: not read yet, or read in part where the preparation is not complete.
                    "outcome": outcomes[i] if i < len(outcomes) else None,
                }
                for i, source in enumerate(self.sources)
            ],
        }
        write_manifest(self.directory, manifest, self._splits)

    def _check_splits(self, documents: dict[str, Any], complete: bool) -> None:
        kept = documents["train"] + documents["validation"]
        fraction = self.settings.validation_fraction
        if kept < 2:
            raise UserError(
                f"prepare.inputs: {kept} of {documents['in']} documents hold text that is kept; at "
                "least two are needed, one to train on and one to validate with (text_documents: "
                "line or paragraph makes documents of a text file's parts)"
            )
        for split in SPLITS:
            if documents[split] == 0:
                change = "lower" if split == "train" else "raise"
                raise UserError(
                    f"no document of {kept} falls into {split} at prepare.validation_fraction "
                    f"{fraction:g}; {change} it" + ("" if complete else ", or read more tokens")
                )


def _batches(reader: Reader, skip: int) -> Iterator[list[Record]]:
    """Records in batches, without the first `skip`, which were handled before."""
    batch, size = [], 0
    for number, record in enumerate(reader):
        if number < skip:
            continue
        batch.append(record)
        size += len(record.data)
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_RECORDS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
