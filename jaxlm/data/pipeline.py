"""Rows of tokens, shuffled, grouped into the windows of updates, and moved to the device.

A *row* holds T + 1 tokens: inputs are its first T, targets its last T. A *block* id names a row's
exact tokens within a data directory. A *window* is what one update sees: `micro_batches` times
`micro_batch_rows` rows. Arrays of a window, with M micro-batches of B rows:

    tokens       [M, B, T+1]  uint16 or uint32
    segment_ids  [M, B, T+1]  int32, 1, 2, ... by document within the row, 0 for padding
    positions    [M, B, T+1]  int32, position within the document (from the row's start)
    block        [M, B]       int32, block id, -1 for a row that fills up the last window

A position carries loss when it and the next one are of the same segment and not padding.
"""

from collections.abc import Sequence
from typing import Any

import grain
import numpy as np

from jaxlm.config import DataConfig
from jaxlm.data.shards import TokenStream

Row = dict[str, np.ndarray]


def _row(tokens: np.ndarray, starts: np.ndarray, length: int, block: int) -> Row:
    """Build a row from at most `length` tokens and the offsets where documents start in it."""
    used = len(tokens)
    segment_ids, positions = np.zeros(length, np.int32), np.zeros(length, np.int32)
    marks = np.zeros(used, np.int32)
    marks[starts] = 1
    marks[0] = 1
    segment_ids[:used] = np.cumsum(marks)
    begins = np.flatnonzero(marks)
    positions[:used] = np.arange(used) - begins[segment_ids[:used] - 1]
    if used < length:
        tokens = np.concatenate([tokens, np.zeros(length - used, tokens.dtype)])
    return {
        "tokens": tokens,
        "segment_ids": segment_ids,
        "positions": positions,
        "block": np.asarray(block, np.int32),
    }


class PackedRows:
    """Row i is tokens [i T, i T + T] of the stream: every token but the first is predicted once.

    (Predictions across documents carry no loss: the first token of a document is never a target.)

    The last row is padded. Documents are told apart by segment ids; a document that began in an
    earlier row starts again at position 0.
    """

    def __init__(self, stream: TokenStream, sequence_length: int):
        self._stream = stream
        self._length = sequence_length

    def __len__(self) -> int:
        return -(-max(len(self._stream) - 1, 0) // self._length)

    def __getitem__(self, index: int) -> Row:
        start = int(index) * self._length
        stop = min(start + self._length + 1, len(self._stream))
        ends = self._stream.document_ends
        first, last = np.searchsorted(ends, [start, stop - 1], side="right")
        starts = ends[first:last] - start
        return _row(self._stream.read(start, stop), starts, self._length + 1, int(index))

    def __repr__(self) -> str:
        return f"PackedRows(tokens={len(self._stream)}, sequence_length={self._length})"


class PaddedRows:
    """One document a row, in pieces of T + 1 tokens that share their edge token, padded."""

    def __init__(self, stream: TokenStream, sequence_length: int):
        self._stream = stream
        self._length = sequence_length
        starts = np.concatenate([[0], stream.document_ends[:-1]]).astype(np.int64)
        pieces = np.maximum(1, -(-(stream.document_ends - starts - 1) // sequence_length))
        self._starts = starts
        self._first_row = np.cumsum(pieces) - pieces
        self._rows = int(pieces.sum())

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> Row:
        document = int(np.searchsorted(self._first_row, index, side="right")) - 1
        piece = int(index) - int(self._first_row[document])
        start = int(self._starts[document]) + piece * self._length
        stop = min(start + self._length + 1, int(self._stream.document_ends[document]))
        tokens = self._stream.read(start, stop)
        return _row(tokens, np.zeros(0, np.int64), self._length + 1, int(index))

    def __repr__(self) -> str:
        return f"PaddedRows(rows={self._rows}, sequence_length={self._length})"


def rows_of(stream: TokenStream, config: DataConfig) -> PackedRows | PaddedRows:
    """The rows of a split in the layout asked for."""
    rows = PackedRows if config.layout == "packed" else PaddedRows
    return rows(stream, config.sequence_length)


def stack_rows(rows: Sequence[Row], micro_batches: int, micro_batch_rows: int) -> Row:
    """Stack rows into [M, B, ...], filling up with rows of padding whose block is -1."""
    empty = {name: np.zeros_like(value) for name, value in rows[0].items()}
    empty["block"] = np.asarray(-1, np.int32)
    filled = [*rows, *[empty] * (micro_batches * micro_batch_rows - len(rows))]
    return {
        name: np.stack([row[name] for row in filled]).reshape(
            (micro_batches, micro_batch_rows, *rows[0][name].shape)
        )
        for name in rows[0]
    }


def training_windows(
    rows: PackedRows | PaddedRows,
    config: DataConfig,
    micro_batches: int,
    micro_batch_rows: int,
) -> grain.MapDataset:
    """All windows of a run: epoch after epoch, each in its own order drawn from the seed.

    The order of rows is that of one long sequence, which windows cut into pieces; it does not
    depend on how a window is split into micro-batches. Windows cross from one epoch to the next,
    and only the very last may hold rows of padding.
    """
    return (
        grain.MapDataset.source(rows)
        .seed(config.seed)
        .shuffle()
        .repeat(config.epochs)
        .batch(
            micro_batches * micro_batch_rows,
            batch_fn=lambda batch: stack_rows(batch, micro_batches, micro_batch_rows),
        )
    )


def device_iterator(windows: grain.MapDataset, prefetch: int, sharding: Any) -> Any:
    """An iterator that prepares windows in a thread and copies them to the device ahead of use.

    Its `get_state` counts windows that were handed out, not those prepared ahead.
    """
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch)
    dataset = grain.experimental.device_put(
        windows.to_iter_dataset(options),
        sharding,
        cpu_buffer_size=prefetch,
        device_buffer_size=prefetch,
    )
    return iter(dataset)
