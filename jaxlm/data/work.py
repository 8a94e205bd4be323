"""Cleaning and tokenising batches of records, in this process or in several.

Results come in the order of the batches, so that nothing depends on the number of processes.
"""

import collections
import multiprocessing
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxlm.config import PrepareConfig
from jaxlm.data.cleaning import Cleaned, clean, digest, is_validation
from jaxlm.data.duplicates import signature
from jaxlm.data.shards import token_dtype
from jaxlm.data.sources import Record, Unusable, json_text
from jaxlm.data.tokenizer import Tokenizer, read_tokenizer
from jaxlm.errors import Failure

# Batches that wait for a process, or are done and wait for their turn.
_AHEAD = 3


class Document(NamedTuple):
    """What becomes of a record."""

    # Why it is skipped; None where it is kept.
    reason: str | None
    # Invalid sequences that were replaced, and where the first is: a byte of the uncompressed file
    # for text files; the record's own offset for JSONL and Parquet.
    replaced: int = 0
    first_invalid: int | None = None
    # Characters taken out.
    removed_zero_width: int = 0
    removed_nul: int = 0
    # Token ids, begin and end token included, uint16 or uint32.
    ids: np.ndarray | None = None
    # UTF-8 bytes of the cleaned text, and whether the bytes of its tokens add up to them.
    text_bytes: int = 0
    bytes_add_up: bool = True
    # Identity of the cleaned text.
    digest: bytes = b""
    held_out: bool = False
    # MinHash signature, where near-duplicates are looked for.
    signature: np.ndarray | None = None


def cleaned(record: Record, kind: str, settings: PrepareConfig) -> Cleaned | str:
    """The record's text after cleaning, or why it has none."""
    if record.reason is not None:
        return record.reason
    if kind != "jsonl":
        return clean(record.data, settings)
    try:
        return clean(json_text(record.data, settings.text_key), settings)
    except Unusable as unusable:
        return unusable.reason


class Worker:
    """Turns records into documents.

    Args:
        settings: of the preparation.
        tokenizer: encodes the text.
    """

    def __init__(self, settings: PrepareConfig, tokenizer: Tokenizer):
        self.settings, self.tokenizer = settings, tokenizer
        self.dtype = token_dtype(tokenizer.vocabulary_size)
        self.token_bytes = tokenizer.token_bytes()

    def documents(self, kind: str, records: list[Record]) -> list[Document]:
        """What becomes of each record of a source of the kind."""
        found = [cleaned(record, kind, self.settings) for record in records]
        kept = [text.text for text in found if isinstance(text, Cleaned) and text.reason is None]
        encoded = iter(self.tokenizer.encode(kept))
        return [
            self._document(text, record.offset, kind, encoded)
            for text, record in zip(found, records, strict=True)
        ]

    def _document(
        self, found: Cleaned | str, offset: int, kind: str, encoded: Iterator[np.ndarray]
    ) -> Document:
        if isinstance(found, str):
            return Document(found)
        first = found.first_invalid
        if first is not None:
            first = offset + first if kind == "text" else offset
        counts = (found.replaced, first, found.removed_zero_width, found.removed_nul)
        if found.reason is not None:
            return Document(found.reason, *counts)
        ids = next(encoded)
        text_bytes = len(found.text.encode("utf-8"))
        identity = digest(found.text)
        add_up = True
        if self.token_bytes is not None:
            total = int(self.token_bytes[ids].sum()) - self.tokenizer.prefix_bytes
            add_up = total == text_bytes
        near = self.settings.near_duplicates is not None
        return Document(
            None,
            *counts,
            ids=ids.astype(self.dtype),
            text_bytes=text_bytes,
            bytes_add_up=add_up,
            digest=identity,
            held_out=is_validation(identity, self.settings.validation_fraction),
            signature=signature(found.text) if near else None,
        )


_worker: Worker | None = None  # of a process of the pool


def _start(settings: PrepareConfig, tokenizer_path: Path) -> None:
    global _worker
    # One thread a process: the processes share the cores already.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = Worker(
        settings, read_tokenizer(tokenizer_path, settings.end_token, settings.begin_token)
    )
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        wait([parent.sentinel])  # a parent that is killed does not stop its pool
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _work(kind: str, records: list[Record]) -> list[Document]:
    assert _worker is not None
    return _worker.documents(kind, records)


class Workers:
    """Processes that clean and tokenise; one of them is this process itself.

    Args:
        settings: of the preparation.
        tokenizer_path: what the processes read the tokenizer from.
        processes: how many; 1 works here.
    """

    def __init__(self, settings: PrepareConfig, tokenizer_path: Path, processes: int):
        self._pool = self._worker = None
        if processes == 1:
            tokenizer = read_tokenizer(tokenizer_path, settings.end_token, settings.begin_token)
            self._worker = Worker(settings, tokenizer)
            return
        self._ahead = _AHEAD * processes
        # Not forked: threads of this process, such as JAX's, would be missing in the child.
        self._pool = ProcessPoolExecutor(
            processes,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start,
            initargs=(settings, tokenizer_path),
        )

    def documents(self, kind: str, batches: Iterable[list[Record]]) -> Iterator[list[Document]]:
        """Documents of each batch, in order, a few batches ahead of what is asked for.

        Raises:
            Failure: a process ended, such as for want of memory.
        """
        if self._worker is not None:
            for records in batches:
                yield self._worker.documents(kind, records)
            return
        assert self._pool is not None
        waiting: collections.deque = collections.deque()
        try:
            for records in batches:
                waiting.append(self._pool.submit(_work, kind, records))
                if len(waiting) > self._ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise Failure(
                "a process that tokenises ended unasked (was memory short?); the same command "
                "goes on from the last position, and a lower prepare.processes takes less memory"
            ) from None

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
