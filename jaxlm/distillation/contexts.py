"""Which tokens a teacher sees before it predicts one.

A *span* is a piece of the training stream that a teacher reads at one time. It predicts every
token of the span but the first. The records of a span begin at or after its first token, so that
those of all spans in turn are those of all positions, each once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxlm.data.shards import TokenStream


@dataclass(frozen=True)
class Spans:
    """Spans in the order of the stream; arrays are [N] int64."""

    # Position of the first token that is read.
    starts: np.ndarray
    # Position after the last token that is read, which is predicted and is no input.
    stops: np.ndarray
    # Position of the first record; the last one's is stop - 1.
    first: np.ndarray

    def __len__(self) -> int:
        return len(self.starts)

    def after(self, position: int) -> "Spans":
        """The spans with records from a position on, the first of them cut to those."""
        kept = slice(int(np.searchsorted(self.stops, position, side="right")), None)
        return Spans(self.starts[kept], self.stops[kept], np.maximum(self.first[kept], position))

    def before(self, position: int) -> "Spans":
        """The spans with records before a position, the last of them cut to those."""
        kept = self.first < position
        return Spans(self.starts[kept], np.minimum(self.stops[kept], position), self.first[kept])

    def groups(self, size: int) -> Iterator["Spans"]:
        """Consecutive spans, `size` at a time."""
        for start in range(0, len(self), size):
            kept = slice(start, start + size)
            yield Spans(self.starts[kept], self.stops[kept], self.first[kept])

    @property
    def tokens(self) -> int:
        """Tokens that are read in all."""
        return int(np.sum(self.stops - self.starts - 1))

    @property
    def records(self) -> int:
        """Records in all."""
        return int(np.sum(self.stops - self.first))


@dataclass(frozen=True)
class PackedContext:
    """The rows of the packed layout: a student of equal row length sees exactly the same.

    Row i is tokens [i T, i T + T], and its last T are predicted. Documents in a row do not see each
    other, and one that began in an earlier row starts anew at position 0.
    """

    # T.
    length: int

    def describe(self) -> dict[str, Any]:
        """For the manifest."""
        return {"kind": "packed rows", "length": self.length, "overlap": 0}

    def spans(self, stream: TokenStream, first: int, stop: int) -> Spans:
        """The rows that targets of tokens [first, stop) are in, and token `stop` if it is there."""
        rows = np.arange(first // self.length, -(-stop // self.length), dtype=np.int64)
        starts = rows * self.length
        stops = np.minimum(starts + self.length + 1, len(stream))
        kept = stops > starts + 1
        return Spans(starts[kept], stops[kept], starts[kept] + 1)


@dataclass(frozen=True)
class DocumentContext:
    """Whole documents; long ones in windows that overlap.

    A document of at most T + 1 tokens is one window. Of a longer one each window begins
    T - overlap after the one before, and only what that did not predict is recorded: every token
    but the first T of a document is predicted from at least `overlap` tokens of its own.
    """

    # T: tokens that are read at one time.
    length: int
    # Tokens that a window shares with the one before.
    overlap: int

    def describe(self) -> dict[str, Any]:
        """For the manifest."""
        return {"kind": "windows of documents", "length": self.length, "overlap": self.overlap}

    def spans(self, stream: TokenStream, first: int, stop: int) -> Spans:
        """The windows of all documents that hold one of the tokens [first, stop], whole."""
        ends = stream.document_ends
        begins = np.concatenate([[0], ends])[:-1]
        chosen = slice(
            int(np.searchsorted(ends, first, side="right")),
            int(np.searchsorted(begins, stop, side="right")),
        )
        begins, ends = begins[chosen], ends[chosen]
        step = self.length - self.overlap
        counts = 1 + np.maximum(0, -(-(ends - begins - 1 - self.length) // step))
        document = np.repeat(np.arange(len(begins)), counts)
        number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = begins[document] + number * step
        stops = np.minimum(starts + self.length + 1, ends[document])
        recorded = np.where(number == 0, begins[document], starts + self.overlap + 1)
        return Spans(starts, stops, recorded)


Context = PackedContext | DocumentContext
