"""Rows of tokens, shuffled, mixed, grouped into the windows of updates, and moved to the device.

A *row* holds T + 1 tokens: inputs are its first T, targets its last T. A *block* id names a row's
exact tokens. A *window* is what one update sees: M micro-batches of B rows of one length. Its
arrays:

    tokens       [M, B, T+1]  uint16 or uint32, 0 for padding
    segment_ids  [M, B, T+1]  int32, 1, 2, ... by document within the row, 0 for padding
    positions    [M, B, T+1]  int32, position within the document (from the row's start)
    block        [M, B]       int32, block id, -1 for a row that fills up a window

and where the run learns from a teacher's cache (data/teacher.py), for the T targets of each row:

    teacher_ids        [M, B, T, k]  uint16 or uint32, the tokens it finds most likely
    teacher_log_probs  [M, B, T, k]  float16 or float32, log-probability of each
    teacher_log_tail   [M, B, T]     float16, log of the mass of all others

A position carries loss when it and the next one are of the same segment and not padding: token
ids, the end token's included, have no part in that.

Block ids. In the packed layout a row's id is its number in the whole stream: it begins at token
id * T. In the others it is the number of the row's first piece, counted over the whole stream (a
document of n tokens is ceil((n - 1) / T) pieces, at least one). With several sources the ids of
each begin where those of the sources before it end. An id does not depend on `data.tokens`.

Order. Training rows are one long sequence, which windows cut into pieces, so that it does not
depend on micro-batches. A source's rows are shuffled within groups of `data.shuffle_tokens` tokens
of its stream, as a function of (data.seed, epoch, source, group) alone; epochs follow one another
without a gap. Several sources take turns so that each one's share of any first n rows is within
one row of its weight, a row counting as T tokens whatever its padding; the sequence ends where a
source would need one pass more than `data.epochs`. With buckets each row length has such a
sequence of its own, and the windows of an epoch are shuffled; an epoch then ends with a window
that is filled up, for each length.

Ranges. `data.tokens: [a, b]` trains on tokens [a, b) of the stream. Packed: rows a / T to b / T,
the last of which takes its final target from token b. Otherwise: the documents that begin in the
range, whole. Of several sources, each gives the rows that it has in that part of the mixture.

A packed stream may still be arriving, and so may what a teacher predicts for it: with a range that
ends where they do not reach yet, a run up to an update whose rows are there is the beginning of the
run on all of the range.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm
from pathlib import Path
from typing import Any

import grain
import numpy as np

from jaxlm.config import DataConfig
from jaxlm.data.shards import DataDirectory, Fingerprint, TokenStream
from jaxlm.data.teacher import TeacherCache, covered, read_manifest
from jaxlm.errors import UserError

Batch = dict[str, np.ndarray]

# Tokens of the stream whose documents best_fit puts together where data.shuffle_tokens is null.
FIT_TOKENS = 2**20


# ---------------------------------------------------------------- rows


def _expand(first: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The ranges [first, first + count), one after the other."""
    return np.arange(counts.sum()) + np.repeat(first - (np.cumsum(counts) - counts), counts)


def _segments(
    width: int, used: np.ndarray, row: np.ndarray, offset: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Segment ids and positions of rows.

    Args:
        width: T + 1.
        used: [N] tokens of each row; the rest is padding.
        row: [K] row of each document that begins inside a row, ascending.
        offset: [K] where in that row, above 0 and ascending within a row.

    Returns:
        Two int32 arrays [N, width].
    """
    rows = np.arange(len(used)) * width
    padding = (rows + used)[used < width]
    begins = np.unique(np.concatenate([rows, row * width + offset, padding]))
    lengths = np.diff(begins, append=len(used) * width)
    first = np.searchsorted(begins, rows)
    ids = np.arange(1, len(begins) + 1) - np.repeat(first, np.diff(first, append=len(begins)))
    ids[np.searchsorted(begins, padding)] = 0
    segment_ids = np.repeat(ids.astype(np.int32), lengths)
    positions = np.arange(len(used) * width, dtype=np.int32)
    positions -= np.repeat(begins.astype(np.int32), lengths)
    if len(padding):
        positions[segment_ids == 0] = 0
    return segment_ids.reshape(-1, width), positions.reshape(-1, width)


class PackedRows:
    """Row i is tokens [i T, i T + T] of the stream: every token but the first is predicted once.

    (Predictions across documents carry no loss: the first token of a document is never a target.)

    Only the stream's last row has padding. Documents are told apart by segment ids; a document
    that began in an earlier row starts again at position 0.
    """

    def __init__(self, stream: TokenStream, sequence_length: int, first: int = 0, stop: int = -1):
        """Rows of a stream.

        Args:
            stream: tokens.
            sequence_length: T.
            first: number of the first row.
            stop: number after the last row; -1 takes all.
        """
        self.stream = stream
        self.length = sequence_length
        # Block ids of the whole stream are [0, ids).
        self.ids = -(-max(len(stream) - 1, 0) // sequence_length)
        self._first = first
        self._rows = (self.ids if stop < 0 else stop) - first

    def __len__(self) -> int:
        return self._rows

    def begins(self) -> np.ndarray:
        """Where in the stream each row begins: [rows] int64, ascending."""
        return (np.arange(self._rows) + self._first) * self.length

    def tokens(self) -> int:
        """Tokens in all rows, not counting padding; an edge token that two rows share is two."""
        last = (self._first + self._rows) * self.length + 1
        missing = last - len(self.stream)
        # Only the stream's last row is padded; more is missing where rows have not arrived yet.
        padding = missing if 0 < missing <= self.length else 0
        return self._rows * (self.length + 1) - padding

    def read(self, rows: np.ndarray) -> Batch:
        """The arrays of rows, [N, T + 1] and `block` [N].

        Args:
            rows: [N] int64; -1 is a row of padding.
        """
        width = self.length + 1
        starts = (rows + self._first) * self.length
        used = np.where(rows < 0, 0, np.minimum(width, len(self.stream) - starts))
        assert used.min(initial=0) >= 0, "rows that have not arrived are refused beforehand"
        full = used == width
        if full.all():
            tokens = self.stream.read_rows(starts, width)
        else:
            tokens = np.zeros((len(rows), width), self.stream.dtype)
            if full.any():
                tokens[full] = self.stream.read_rows(starts[full], width)
            for i in np.flatnonzero((used > 0) & ~full).tolist():  # the stream's last row
                tokens[i, : used[i]] = self.stream.read(int(starts[i]), len(self.stream))
        ends = self.stream.document_ends
        first = np.searchsorted(ends, starts, side="right")
        # Where a document ends within the row, the next one begins.
        counts = np.searchsorted(ends, starts + used - 1, side="right") - first
        counts[used == 0] = 0
        row = np.repeat(np.arange(len(rows)), counts)
        offset = ends[_expand(first, counts)] - starts[row]
        segment_ids, positions = _segments(width, used, row, offset)
        block = np.where(rows < 0, -1, rows + self._first).astype(np.int32)
        batch = {
            "tokens": tokens,
            "segment_ids": segment_ids,
            "positions": positions,
            "block": block,
        }
        if self.stream.teacher is not None:
            each, none = np.arange(len(rows)), np.zeros(len(rows), np.int64)
            targets = np.maximum(used - 1, 0)
            shape = (len(rows), self.length)
            batch |= self.stream.teacher.read(shape, each, none, starts + 1, targets)
        return batch

    def documents(self, rows: np.ndarray, segment_ids: np.ndarray) -> np.ndarray:
        """Number in the stream of the document that each token is of, -1 for padding.

        Args:
            rows: [N] int64; -1 is a row of padding.
            segment_ids: [N, T + 1], as :meth:`read` gives them for these rows.

        Returns:
            [N, T + 1] int64.
        """
        starts = (rows + self._first) * self.length
        first = np.searchsorted(self.stream.document_ends, starts, side="right")
        return np.where(segment_ids > 0, first[:, None] + segment_ids - 1, -1)


@dataclass(frozen=True)
class _Pieces:
    """Documents cut into pieces of at most T + 1 tokens, which share their edge token."""

    # [P] int64: where each piece begins in the stream.
    starts: np.ndarray
    # [P] int64: tokens of each piece.
    lengths: np.ndarray
    # [P] int64: where the piece's document begins in the stream.
    documents: np.ndarray
    # [P] int64: number of each piece within the whole stream.
    ids: np.ndarray
    # Pieces of the whole stream.
    total: int

    def take(self, chosen: np.ndarray) -> "_Pieces":
        """Some of the pieces."""
        return _Pieces(
            self.starts[chosen],
            self.lengths[chosen],
            self.documents[chosen],
            self.ids[chosen],
            self.total,
        )


def _pieces(stream: TokenStream, length: int, tokens: tuple[int, int] | None) -> _Pieces:
    """The pieces of the documents that begin in a range of the stream; None is all of it."""
    ends = stream.document_ends
    starts = np.concatenate([[0], ends])[:-1]
    counts = np.maximum(1, -(-(ends - starts - 1) // length))
    first, stop = (0, len(ends)) if tokens is None else np.searchsorted(starts, tokens).tolist()
    document = np.repeat(np.arange(first, stop), counts[first:stop])
    number = _expand(np.zeros(stop - first, np.int64), counts[first:stop])
    begins = starts[document] + number * length
    return _Pieces(
        starts=begins,
        lengths=np.minimum(length + 1, ends[document] - begins),
        documents=starts[document],
        ids=np.arange(len(document)) + counts[:first].sum(),
        total=int(counts.sum()),
    )


def _best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Put pieces into rows, long ones first, each into the fullest row that still holds it.

    Args:
        lengths: [P] tokens of each piece, at most `capacity`.
        capacity: tokens a row holds.

    Returns:
        [P] int64, row of each piece: 0, 1, ... in the order in which rows were begun.
    """
    order = np.argsort(-lengths, kind="stable")
    # Rows by the room left in them, and a number whose bit r is set where some row has room r.
    by_room: dict[int, list[int]] = {}
    rooms = 0
    row_of = np.empty(len(lengths), np.int64)
    rows = 0
    for piece, size in zip(order.tolist(), lengths[order].tolist(), strict=True):
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
        else:
            room, row = capacity, rows
            rows += 1
        row_of[piece] = row
        if room > size:
            by_room.setdefault(room - size, []).append(row)
            rooms |= 1 << (room - size)
    return row_of


class PieceRows:
    """Rows that hold whole documents and pieces of long ones, padded on the right."""

    def __init__(
        self, stream: TokenStream, length: int, pieces: _Pieces, row_of: np.ndarray | None = None
    ):
        """Put pieces into rows.

        Args:
            stream: tokens.
            length: T.
            pieces: of at most T + 1 tokens each.
            row_of: [P] a number for each piece, the same for those of one row; None gives each
                piece its own row.
        """
        self.stream = stream
        self.length = length
        # Block ids of the whole stream are [0, ids).
        self.ids = pieces.total
        if row_of is None:
            self._first = np.arange(len(pieces.starts) + 1)
        else:
            # Rows in the order of their first pieces, and pieces in the stream's within a row.
            _, first, row, counts = np.unique(
                row_of, return_index=True, return_inverse=True, return_counts=True
            )
            pieces = pieces.take(np.argsort(first[row], kind="stable"))
            self._first = np.concatenate([[0], np.cumsum(counts[np.argsort(first)])])
        self._pieces = pieces

    def __len__(self) -> int:
        return len(self._first) - 1

    def begins(self) -> np.ndarray:
        """Where the document of each row's first piece begins: [rows] int64, ascending."""
        return self._pieces.documents[self._first[:-1]]

    def tokens(self) -> int:
        """Tokens in all rows, not counting padding; an edge token that two pieces share is two."""
        return int(self._pieces.lengths.sum())

    def read(self, rows: np.ndarray) -> Batch:
        """The arrays of rows, [N, T + 1] and `block` [N].

        Args:
            rows: [N] int64; -1 is a row of padding.
        """
        width = self.length + 1
        first = np.where(rows < 0, 0, self._first[rows])
        counts = np.where(rows < 0, 0, self._first[rows + 1] - first)
        pieces = _expand(first, counts)
        lengths = self._pieces.lengths[pieces]
        row = np.repeat(np.arange(len(rows)), counts)
        ends = np.concatenate([[0], np.cumsum(lengths)])
        stop = np.cumsum(counts)
        used = ends[stop] - ends[stop - counts]
        offset = ends[:-1] - np.repeat(ends[stop - counts], counts)
        inner = offset > 0
        segment_ids, positions = _segments(width, used, row[inner], offset[inner])
        tokens = np.zeros((len(rows), width), self.stream.dtype)
        tokens[segment_ids > 0] = self.stream.read_pieces(self._pieces.starts[pieces], lengths)
        block = np.where(rows < 0, -1, self._pieces.ids[first]).astype(np.int32)
        batch = {
            "tokens": tokens,
            "segment_ids": segment_ids,
            "positions": positions,
            "block": block,
        }
        if self.stream.teacher is not None:
            shape = (len(rows), self.length)
            starts = self._pieces.starts[pieces] + 1
            batch |= self.stream.teacher.read(shape, row, offset, starts, lengths - 1)
        return batch

    def documents(self, rows: np.ndarray, segment_ids: np.ndarray) -> np.ndarray:
        """Number in the stream of the document that each token is of, -1 for padding.

        Args:
            rows: [N] int64; -1 is a row of padding.
            segment_ids: [N, T + 1], as :meth:`read` gives them for these rows.

        Returns:
            [N, T + 1] int64.
        """
        used = segment_ids > 0
        pieces = np.where(used, self._first[rows][:, None] + segment_ids - 1, 0)
        begins = self._pieces.documents[pieces]
        ends = self.stream.document_ends
        return np.where(used, np.searchsorted(ends, begins, side="right"), -1)


Rows = PackedRows | PieceRows


def _fitted(stream: TokenStream, config: DataConfig, pieces: _Pieces) -> PieceRows:
    """Rows of the best_fit layout.

    Documents that begin in the same group share rows: rows stay within the groups of the order, and
    none of them needs the memory or the time of the whole stream.
    """
    group = pieces.documents // (config.shuffle_tokens or FIT_TOKENS)
    edges = [*np.flatnonzero(np.diff(group, prepend=-1)).tolist(), len(group)]
    row_of = np.empty(len(group), np.int64)
    for start, stop in itertools.pairwise(edges):
        fitted = _best_fit(pieces.lengths[start:stop], config.sequence_length + 1)
        row_of[start:stop] = start + fitted  # below `stop`: no number comes twice
    return PieceRows(stream, config.sequence_length, pieces, row_of)


def _piece_rows(
    stream: TokenStream, config: DataConfig, tokens: tuple[int, int] | None
) -> PieceRows:
    pieces = _pieces(stream, config.sequence_length, tokens)
    if config.layout == "best_fit":
        return _fitted(stream, config, pieces)
    return PieceRows(stream, config.sequence_length, pieces)


def _bucket_rows(
    stream: TokenStream, config: DataConfig, tokens: tuple[int, int] | None
) -> list[PieceRows]:
    """Rows of one piece each by the smallest bucket that holds them, without empty buckets."""
    pieces = _pieces(stream, config.sequence_length, tokens)
    lengths = (*config.buckets, config.sequence_length)
    bucket_of = np.searchsorted(np.array(lengths) + 1, pieces.lengths)
    return [
        PieceRows(stream, length, pieces.take(np.flatnonzero(bucket_of == bucket)))
        for bucket, length in enumerate(lengths)
        if (bucket_of == bucket).any()
    ]


def rows_of(stream: TokenStream, config: DataConfig) -> Rows:
    """All rows of a stream in the layout asked for, of `sequence_length` whatever the buckets."""
    if config.layout == "packed":
        return PackedRows(stream, config.sequence_length)
    return _piece_rows(stream, config, None)


# ---------------------------------------------------------------- order


def _permutation(size: int, *key: int) -> np.ndarray:
    """A permutation of `size` numbers, int64, from the seed and whatever else `key` names.

    It sorts the raw output of a counter-based generator, which unlike numpy's own permutations is
    the same in every version: a run may be continued under another one.
    """
    raw = np.random.Philox(np.random.SeedSequence(key)).random_raw(size)
    return np.argsort(raw, kind="stable")


class _Shuffled:
    """One source's rows, epoch after epoch, shuffled within groups of its stream.

    Args:
        rows: the rows.
        number: tells this source's (or bucket's) permutations from those of the others.
        config: uses `seed` and `shuffle_tokens`.
    """

    def __init__(self, rows: Rows, number: int, config: DataConfig):
        self.rows = rows
        group = np.zeros(len(rows), np.int64)
        if config.shuffle_tokens is not None:
            group = rows.begins() // config.shuffle_tokens
        starts = np.flatnonzero(np.diff(group, prepend=-1))
        # Groups are numbered in the whole stream, so that a range of it has the same order.
        self._groups = group[starts]
        self._edges = np.append(starts, len(rows))
        self._seed, self._number = config.seed, number
        # A window may read the end of one group, or epoch, and the beginning of the next.
        self._order = functools.lru_cache(maxsize=2)(self._draw)

    def _draw(self, epoch: int, group: int) -> np.ndarray:
        start, stop = self._edges[group : group + 2].tolist()
        key = (self._seed, epoch, self._number, int(self._groups[group]))
        return start + _permutation(stop - start, *key)

    def take(self, start: int, stop: int) -> np.ndarray:
        """Rows at places [start, stop) of the sequence: [stop - start] int64."""
        taken = [np.zeros(0, np.int64)]
        while start < stop:
            epoch, place = divmod(start, len(self.rows))
            group = int(np.searchsorted(self._edges, place, side="right")) - 1
            begin, end = self._edges[group : group + 2].tolist()
            end = min(end, place + stop - start)
            taken.append(self._order(epoch, group)[place - begin : end - begin])
            start += end - place
        return np.concatenate(taken)


class _Turns:
    """Which source each row of a mixture comes from.

    After any n rows each source has given its share of n, give or take less than one row. Row i of
    a source with share w must for that come after more than i / w - 1 rows and among the first
    ceil((i + 1) / w); of the sources whose turn may come, the one with the earliest such deadline
    is taken, which meets all of them. Weights are whole numbers of rows in a period, after which
    the pattern repeats.

    Args:
        weights: of each source.
        rows: rows of each source in all its passes; the pattern reaches as far as they do.
    """

    def __init__(self, weights: Sequence[float], rows: Sequence[int]):
        exact = [Fraction(repr(weight)) for weight in weights]  # as written: 0.1 is a tenth
        scale = lcm(*(weight.denominator for weight in exact))
        whole = [int(weight * scale) for weight in exact]
        self.weights = [weight // gcd(*whole) for weight in whole]
        self.period = sum(self.weights)
        bound = min(
            (count + 1) * self.period // weight + 2
            for count, weight in zip(rows, self.weights, strict=True)
        )
        length = min(self.period, bound)
        # [length] int16: source of each row of the pattern.
        self.pattern = np.zeros(length, np.int16)
        sources = range(len(whole))
        given = [0] * len(whole)
        deadlines = [-(-self.period // weight) for weight in self.weights]
        for n in range(length):
            source = min(
                (s for s in sources if (n + 1) * self.weights[s] > given[s] * self.period),
                key=deadlines.__getitem__,
            )
            self.pattern[n] = source
            given[source] += 1
            deadlines[source] = -(-(given[source] + 1) * self.period // self.weights[source])
        self._places = [np.flatnonzero(self.pattern == source) for source in sources]

    def sources(self, start: int, stop: int) -> np.ndarray:
        """Sources of rows [start, stop) of the mixture: [stop - start] int16."""
        return self.pattern[np.arange(start, stop) % self.period]

    def before(self, n: int) -> list[int]:
        """Rows that each source has given among the first n."""
        periods, rest = divmod(n, self.period)
        return [
            periods * weight + int(np.searchsorted(places, rest))
            for weight, places in zip(self.weights, self._places, strict=True)
        ]

    def end(self, rows: Sequence[int]) -> tuple[int, int]:
        """Rows of the mixture before a source gives more than `rows`, and the number of it."""
        ends = []
        for source, (count, weight) in enumerate(zip(rows, self.weights, strict=True)):
            periods, rest = divmod(count, weight)
            places = self._places[source]
            if rest < len(places):  # otherwise beyond the pattern, which reaches the first end
                ends.append((periods * self.period + int(places[rest]), source))
        return min(ends)


class _Sequence:
    """Training rows in their order: sources take turns, each one's rows shuffled.

    Args:
        parts: rows of each source that may be trained on, all of one length.
        number: the first part's in :class:`_Shuffled`.
        turns: how the sources alternate.
        skip: rows of the mixture before the first one of here.
        config: uses `seed`, `epochs` and `shuffle_tokens`.
    """

    def __init__(
        self,
        parts: Sequence[Rows],
        number: int,
        turns: _Turns,
        skip: int,
        config: DataConfig,
    ):
        self.parts = parts
        self.length = parts[0].length
        self._shuffled = [
            _Shuffled(rows, number + source, config) for source, rows in enumerate(parts)
        ]
        self._turns, self._skip = turns, skip
        self._skipped = turns.before(skip)
        limits = [
            skipped + config.epochs * len(rows)
            for skipped, rows in zip(self._skipped, parts, strict=True)
        ]
        end, self.ends_with = turns.end(limits)
        self._rows = end - skip
        # Block ids of a source begin where those of the sources before it end.
        self._ids = np.cumsum([0, *[rows.ids for rows in parts]]).tolist()

    def __len__(self) -> int:
        return self._rows

    def given(self, n: int) -> list[int]:
        """Rows of each source among the first n."""
        before = self._turns.before(self._skip + n)
        return [count - skipped for count, skipped in zip(before, self._skipped, strict=True)]

    def highest_row(self, n: int) -> int:
        """The highest number, in the stream of a single packed source, of the first n rows."""
        (rows,) = self.parts
        return int(self._shuffled[0].take(0, n).max()) + int(rows.begins()[0]) // rows.length

    def read(self, start: int, stop: int, size: int) -> Batch:
        """Rows [start, stop) of the sequence, filled up to `size` rows with padding."""
        first, last = self.given(start), self.given(stop)
        padding = np.full(size - (stop - start), -1)
        if len(self.parts) == 1:
            rows = self._shuffled[0].take(first[0], last[0])
            return self.parts[0].read(np.concatenate([rows, padding]))
        source_of = self._turns.sources(self._skip + start, self._skip + stop)
        source_of = np.concatenate([source_of, np.zeros_like(padding)])  # source 0 pads
        batch: Batch = {}
        for source, part in enumerate(self.parts):
            rows = self._shuffled[source].take(first[source], last[source])
            if source == 0:
                rows = np.concatenate([rows, padding])
            if not len(rows):
                continue
            read = part.read(rows)
            read["block"][rows >= 0] += self._ids[source]
            chosen = source_of == source
            for name, values in read.items():
                batch.setdefault(name, np.empty((size, *values.shape[1:]), values.dtype))
                batch[name][chosen] = values
        return batch


# ---------------------------------------------------------------- sources


@dataclass(frozen=True)
class Source:
    """A stream of training tokens."""

    # Directory, for messages.
    name: str
    # The tokens.
    stream: TokenStream
    # Share of the rows, relative to the other sources.
    weight: float
    # DataDirectory.fingerprint.
    fingerprint: Fingerprint


def open_sources(
    config: DataConfig,
    data: DataDirectory,
    teacher: str | None = None,
    until: int | None = None,
) -> list[Source]:
    """The streams that a run trains on: those of `data.sources`, or else that of `data`.

    Args:
        config: names the sources, and the range of tokens.
        data: what is read where there are none.
        teacher: folder of a teacher's cache for the training tokens of `data`.
        until: as for :func:`training_windows`; the cache may then end before the range does.

    Raises:
        UserError: a source that is missing or damaged, that was not made with the tokenizer,
            vocabulary and normalization of `data`, or that stands there twice; a cache that does
            not belong to these tokens, or lacks some of them.
    """
    own = data.fingerprint(_last_token(config), config.validation_tokens)
    if not config.sources:
        stream = data.stream("train")
        if teacher is not None:
            first, stop = _target_range(stream, config)
            if until is not None and config.layout == "packed":
                stop = min(stop, covered(read_manifest(Path(teacher)))[1])
            stream.teacher = TeacherCache(Path(teacher), data, stream, first, stop)
        return [Source(str(data.directory), stream, 1.0, own)]
    sources: list[Source] = []
    for setting in config.sources:
        directory = DataDirectory(Path(setting.directory))
        fingerprint = directory.fingerprint(None, None)
        for field in ("tokenizer", "normalization", "vocabulary"):
            if fingerprint[field] != own[field]:
                raise UserError(
                    f"data.sources: {setting.directory} differs from {data.directory} in its "
                    f"{field}; prepare both with the same tokenizer and normalization"
                )
        for other in sources:
            if other.fingerprint["train tokens"] == fingerprint["train tokens"]:
                raise UserError(
                    f"data.sources: {setting.directory} holds the same tokens as {other.name}; "
                    f"name each once, with the sum of the weights"
                )
        sources.append(
            Source(setting.directory, directory.stream("train"), setting.weight, fingerprint)
        )
    return sources


def _last_token(config: DataConfig) -> int | None:
    """Training tokens of `data.directory` that a run may read, its last target included."""
    return None if config.tokens is None or config.sources else config.tokens[1] + 1


def _target_range(stream: TokenStream, config: DataConfig) -> tuple[int, int]:
    """Positions [first, stop) of the stream that hold all targets of a run."""
    first, stop = config.tokens or (0, len(stream))
    stop = min(stop, len(stream))  # a range beyond it is refused where rows are made
    if config.layout != "packed":  # documents that begin in the range, whole
        begun = int(np.searchsorted(np.append(0, stream.document_ends), stop))
        stop = int(stream.document_ends[begun - 1]) - 1
    return first + 1, min(stop + 1, len(stream))


def fingerprint_of(
    data: DataDirectory, config: DataConfig, sources: Sequence[Source] = ()
) -> Fingerprint:
    """What must not change under a run.

    That of `data`, the tokens of every other source, and a teacher and its records.
    """
    fields = data.fingerprint(_last_token(config), config.validation_tokens)
    if config.sources:
        whole = data.fingerprint(None, None)["train tokens"]
        for number, source in enumerate(sources):
            if source.fingerprint["train tokens"] != whole:
                fields[f"sources[{number}] train tokens"] = source.fingerprint["train tokens"]
    for source in sources:
        if source.stream.teacher is not None:
            fields |= source.stream.teacher.fingerprint
    return fields


def validation_stream(data: DataDirectory, config: DataConfig) -> TokenStream:
    """The validation documents of a run: all, or those of the first `validation_tokens`.

    Raises:
        UserError: there are not as many.
    """
    stream, limit = data.stream("validation"), config.validation_tokens
    if limit is None:
        return stream
    if limit > len(stream):
        raise UserError(
            f"data.validation_tokens ({limit:,}) is above the {len(stream):,} validation tokens of "
            f"{data.directory}"
        )
    return stream.part(0, limit)


# ---------------------------------------------------------------- windows


class Windows:
    """All windows of a run by number, each the same however it is reached.

    Args:
        sequences: rows by length: one sequence, or one for each bucket.
        shapes: M and B of the windows of each sequence.
        config: the settings of the order.
        sources: what the sequences were made of, for messages.
    """

    def __init__(
        self,
        sequences: Sequence[_Sequence],
        shapes: Sequence[tuple[int, int]],
        config: DataConfig,
        sources: Sequence[Source],
    ):
        self._sequences, self._shapes = sequences, shapes
        self._config, self._sources = config, sources
        # Windows of an epoch for each bucket. Without buckets windows cross from epoch to epoch.
        self._counts = [
            -(-len(sequence.parts[0]) // (micro_batches * rows))
            for sequence, (micro_batches, rows) in zip(sequences, shapes, strict=True)
        ]
        self._order = functools.lru_cache(maxsize=2)(self._draw)

    @property
    def lengths(self) -> list[int]:
        """The row lengths T that windows may have."""
        return [sequence.length for sequence in self._sequences]

    @property
    def rows(self) -> int:
        """Rows in all epochs."""
        return sum(len(sequence) for sequence in self._sequences)

    @property
    def padding(self) -> float:
        """Share of padding among the T + 1 tokens of each row, rows that fill up windows aside."""
        parts = [rows for sequence in self._sequences for rows in sequence.parts]
        places = sum(len(rows) * (rows.length + 1) for rows in parts)
        return 1 - sum(rows.tokens() for rows in parts) / places

    def describe(self) -> str:
        """One line: rows, padding, and what each of several sources gives."""
        sequences, layout = self._sequences, self._config.layout
        counts = ", ".join(f"{len(s):,} rows of {s.length:,} tokens" for s in sequences)
        text = f"{counts} ({layout}, {self.padding:.2%} padding, {self._config.epochs} pass(es))"
        if len(self._sources) > 1:
            given = sequences[0].given(len(sequences[0]))
            parts = zip(self._sources, given, sequences[0].parts, strict=True)
            shares = [f"{n:,} from the {len(r):,} of {s.name}" for s, n, r in parts]
            text += f": {', '.join(shares)}; ends with {self._sources[sequences[0].ends_with].name}"
        return text

    def __len__(self) -> int:
        if self._config.buckets:
            return self._config.epochs * sum(self._counts)
        micro_batches, rows = self._shapes[0]
        return -(-len(self._sequences[0]) // (micro_batches * rows))

    def __repr__(self) -> str:
        return f"Windows({len(self)}: {self.describe()})"

    def _draw(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The bucket of each window of an epoch, and its number among the bucket's."""
        buckets = np.repeat(np.arange(len(self._counts)), self._counts)
        # Buckets shuffle their rows under the numbers below len(self._counts).
        key = (self._config.seed, epoch, len(self._counts), 0)
        buckets = buckets[_permutation(len(buckets), *key)]
        numbers = np.empty_like(buckets)
        for bucket, count in enumerate(self._counts):
            numbers[buckets == bucket] = np.arange(count)
        return buckets, numbers

    def __getitem__(self, index: int) -> Batch:
        """Window number `index`, see the top of the file."""
        bucket, number, first, stop = 0, int(index), 0, len(self._sequences[0])
        if self._config.buckets:
            epoch, place = divmod(int(index), sum(self._counts))
            buckets, numbers = self._order(epoch)
            bucket, number = int(buckets[place]), int(numbers[place])
            rows = len(self._sequences[bucket].parts[0])
            first, stop = epoch * rows, (epoch + 1) * rows
        micro_batches, micro_batch_rows = self._shapes[bucket]
        size = micro_batches * micro_batch_rows
        start = first + number * size
        batch = self._sequences[bucket].read(start, min(start + size, stop), size)
        return {
            name: values.reshape(micro_batches, micro_batch_rows, *values.shape[1:])
            for name, values in batch.items()
        }


def rows_by_length(length: int, buckets: Sequence[int], micro_batch_rows: int) -> dict[int, int]:
    """Rows B of a micro-batch by row length, for about as many tokens as in the longest rows."""
    return {n: round(micro_batch_rows * length / n) for n in (*buckets, length)}


def _check_range(config: DataConfig, tokens: int, what: str) -> None:
    if config.tokens is not None and config.tokens[1] > tokens:
        raise UserError(
            f"data.tokens: asks for tokens up to {config.tokens[1]:,}, but {what} has only "
            f"{tokens:,}; lower the end of the range"
        )


def _row_range(config: DataConfig, tokens: int, rows: int) -> tuple[int, int]:
    """Rows [first, stop) of the range of tokens asked for, of all `tokens` and `rows`."""
    if config.tokens is None:
        return 0, rows
    length = config.sequence_length
    for value in config.tokens:
        if value % length and value != tokens:
            low = value // length * length
            raise UserError(
                f"data.tokens: {value:,} is not a multiple of data.sequence_length ({length:,}); "
                f"the nearest are {low:,} and {low + length:,}"
            )
    first, stop = (min(-(-value // length), rows) for value in config.tokens)
    return first, stop


def _packed_sequence(sources: Sequence[Source], config: DataConfig, arriving: bool) -> _Sequence:
    """Rows of the packed layout; a range of several sources is one of their mixture."""
    rows_of_all = [len(PackedRows(source.stream, config.sequence_length)) for source in sources]
    if arriving:
        assert config.tokens is not None
        rows_of_all = [-(-config.tokens[1] // config.sequence_length)]
    turns = _Turns([s.weight for s in sources], [config.epochs * n for n in rows_of_all])
    rows, ends_with = turns.end(rows_of_all)
    if arriving:
        assert config.tokens is not None
        tokens, what = config.tokens[1], sources[0].name
    elif len(sources) == 1:
        tokens, what = len(sources[0].stream), sources[0].name
    else:
        tokens = rows * config.sequence_length
        what = f"the mixture, which ends with {sources[ends_with].name},"
    _check_range(config, tokens, what)
    first, stop = _row_range(config, tokens, rows)
    # Without a range, later passes read what the mixture has not come to before it ends.
    stops = rows_of_all if config.tokens is None else turns.before(stop)
    parts = [
        PackedRows(source.stream, config.sequence_length, begin, end)
        for source, begin, end in zip(sources, turns.before(first), stops, strict=True)
    ]
    return _Sequence(parts, 0, turns, first, config)


def _piece_sequences(sources: Sequence[Source], config: DataConfig) -> list[_Sequence]:
    """Rows of the other layouts: one sequence, or one for each bucket."""
    if len(sources) > 1 and (config.tokens or config.buckets):
        key = "tokens" if config.tokens else "buckets"
        raise UserError(
            f"data.{key}: with data.layout {config.layout} it is for one source; remove "
            f"data.{key}, or name one of data.sources"
        )
    if config.tokens:
        _check_range(config, len(sources[0].stream), sources[0].name)
    if config.buckets:
        of_sequences = [[rows] for rows in _bucket_rows(sources[0].stream, config, config.tokens)]
    else:
        of_sequences = [[_piece_rows(s.stream, config, config.tokens) for s in sources]]
    weights = [source.weight for source in sources]
    return [
        _Sequence(
            parts, number, _Turns(weights, [config.epochs * len(r) for r in parts]), 0, config
        )
        for number, parts in enumerate(of_sequences)
    ]


def training_windows(
    sources: Sequence[Source],
    config: DataConfig,
    micro_batches: int,
    micro_batch_rows: int,
    until: int | None = None,
) -> Windows:
    """All windows of a run.

    Args:
        sources: from :func:`open_sources`.
        config: layout, range and order.
        micro_batches: M.
        micro_batch_rows: B of rows of `sequence_length`; of shorter rows it is larger.
        until: no more than the first so many windows will be read. Then the end of `data.tokens`,
            in the packed layout and of one source, need not be there yet, nor a teacher's records.

    Raises:
        UserError: a range of tokens that is not there, settings that do not go together, no row to
            train on, or more rows than block ids.
    """
    if config.layout == "packed":
        arriving = (
            len(sources) == 1
            and config.tokens is not None
            and config.tokens[1] > len(sources[0].stream)
        )
        sequences = [_packed_sequence(sources, config, arriving and until is not None)]
        if until and (arriving or sources[0].stream.teacher is not None):
            rows = until * micro_batches * micro_batch_rows
            _check_arrived(sources[0], sequences[0], rows, complete=not arriving)
    else:
        sequences = _piece_sequences(sources, config)
    names = " and ".join(source.name for source in sources)
    if not all(len(sequence) for sequence in sequences) or not sequences:
        where = f"tokens {list(config.tokens)} of " if config.tokens else ""
        raise UserError(f"data: no row to train on in {where}{names}; prepare more text")
    if sum(rows.ids for rows in sequences[0].parts) >= 2**31:
        raise UserError(
            f"data: {names} have more rows than block ids, which are below 2**31; raise "
            f"data.sequence_length"
        )
    sizes = rows_by_length(config.sequence_length, config.buckets, micro_batch_rows)
    shapes = [(micro_batches, sizes[sequence.length]) for sequence in sequences]
    return Windows(sequences, shapes, config, sources)


def _check_arrived(source: Source, sequence: _Sequence, rows: int, complete: bool) -> None:
    """Refuse to read rows of a packed sequence, the first `rows` of it, that are not there yet.

    Where the stream is complete, its last row may be shorter than the others.
    """
    needed = sequence.highest_row(min(rows, len(sequence))) * sequence.length + sequence.length + 1
    if complete:
        needed = min(needed, len(source.stream))
    if needed > len(source.stream):
        raise UserError(
            f"data.tokens: the rows up to there reach to token {needed:,} of the stream, and "
            f"{source.name} has {len(source.stream):,} so far; prepare more "
            f"(scripts/prepare_data.py --tokens {needed}), or end at an earlier update"
        )
    cache = source.stream.teacher
    if cache is not None and needed > cache.stop:
        raise UserError(
            f"{cache.directory}: the rows up to there need the records of positions below "
            f"{needed:,}, and it has those below {cache.stop:,} so far; go on with "
            f"scripts/cache_teacher.py, or end at an earlier update"
        )


def device_iterator(
    windows: Windows, prefetch: int, sharding: Any, until: int | None = None
) -> Any:
    """An iterator that prepares windows in a thread and copies them to the device ahead of use.

    Its `get_state` counts windows that were handed out, not those prepared ahead; `set_state` goes
    to any of them. It ends after the first `until` windows; None reads all.
    """
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch)
    dataset = grain.experimental.device_put(
        grain.MapDataset.source(windows)[:until].to_iter_dataset(options),
        sharding,
        cpu_buffer_size=prefetch,
        device_buffer_size=prefetch,
    )
    return iter(dataset)
