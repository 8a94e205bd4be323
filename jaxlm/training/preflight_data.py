"""Checks of prepared data before a run: ids, targets, repeats, tokenizer.

What rows, segments and targets should be is worked out here a second time, in plain NumPy from the
shards' own files, in another way than data/pipeline.py does.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.config import Config, DataConfig
from jaxlm.data.pipeline import FIT_TOKENS, Batch, Windows
from jaxlm.data.shards import SPLITS, DataDirectory
from jaxlm.data.tokenizer import Tokenizer, read_tokenizer
from jaxlm.errors import UserError
from jaxlm.files import sha256_of
from jaxlm.losses import target_mask
from jaxlm.training.checks import Cause, Result, result, skipped

# Tokens of a document that are decoded and encoded again; and those at a cut that may differ.
_SAMPLE_TOKENS, _EDGE_TOKENS = 512, 8
# Documents of the tokenizer check, and tokens of the check of targets.
_DOCUMENTS, _TARGET_TOKENS = 32, 2**20


class Split:
    """A split's tokens and documents, read from the shards' files without the pipeline.

    Args:
        data: prepared data.
        split: train or validation.
        limit: use the first documents that fit into so many tokens, and one at least.
    """

    def __init__(self, data: DataDirectory, split: str, limit: int | None = None):
        shards = data.manifest["splits"][split]["shards"]
        paths = [[data.directory / split / file["file"] for file in s["files"]] for s in shards]
        self._shards = [np.load(tokens, mmap_mode="r") for tokens, _ in paths]
        self._first = [0]
        ends = [np.zeros(0, np.int64)]
        for tokens, (_, path) in zip(self._shards, paths, strict=True):
            ends.append(np.load(path) + self._first[-1])
            self._first.append(self._first[-1] + len(tokens))
        # [D] int64: end of each document, exclusive.
        self.ends = np.concatenate(ends)
        if limit is not None:
            self.ends = self.ends[: max(1, int(np.searchsorted(self.ends, limit, side="right")))]

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop)."""
        parts = [
            tokens[max(start - first, 0) : max(stop - first, 0)]
            for tokens, first in zip(self._shards, self._first[:-1], strict=True)
            if first < stop and first + len(tokens) > start
        ]
        return np.concatenate(parts) if parts else np.zeros(0, np.uint16)

    def document(self, number: int) -> np.ndarray:
        """Tokens of a document."""
        start = int(self.ends[number - 1]) if number else 0
        return self.read(start, int(self.ends[number]))

    def documents(self) -> Iterator[np.ndarray]:
        """The tokens of each document."""
        for number in range(len(self.ends)):
            yield self.document(number)


# ---------------------------------------------------------------- ids


def check_ids(data: DataDirectory, vocabulary: int, limit: int) -> Result:
    """Every id is below the vocabulary's size."""
    name = "ids"
    outside = highest = total = 0
    where = ""
    for split in SPLITS:
        held = Split(data, split, limit)
        tokens = held.read(0, len(held))
        total += len(tokens)
        highest = max(highest, int(tokens.max(initial=0)))
        found = np.flatnonzero(tokens >= vocabulary)
        if len(found) and not outside:
            where = f"first in {split} at token {found[0]:,}: {tokens[found[0]]:,}"
        outside += len(found)
    causes = [
        Cause(
            "ids",
            f"the data holds ids that the model has no entry for ({outside:,} of {total:,}, "
            f"{where}): it was made with another tokenizer than its manifest says, or is damaged",
            0.98,
        )
    ]
    return result(
        name,
        outside == 0,
        f"highest id {highest:,} of {total:,} tokens",
        f"< {vocabulary:,} entries",
        causes,
        f"vocabulary_size in {data.directory / 'manifest.json'}; prepare the data again",
        highest=highest,
        outside=outside,
        tokens=total,
    )


# ---------------------------------------------------------------- targets


@dataclasses.dataclass(frozen=True)
class _Expected:
    """What a row should hold: three arrays [T + 1], and which of its T positions carry loss."""

    tokens: np.ndarray
    documents: np.ndarray  # number of each token's document, -1 for padding
    positions: np.ndarray
    mask: np.ndarray


def _expected(pieces: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]], width: int) -> _Expected:
    """A row from its pieces: tokens, document numbers and positions of each."""
    tokens = np.zeros(width, np.int64)
    documents, positions = np.full(width, -1), np.zeros(width, np.int64)
    place = 0
    for ids, numbers, offsets in pieces:
        stop = place + len(ids)
        tokens[place:stop], documents[place:stop] = ids, numbers
        positions[place:stop] = offsets
        place = stop
    mask = (documents[1:] == documents[:-1]) & (documents[1:] >= 0)
    return _Expected(tokens, documents, positions, mask)


class _Reference:
    """Rows of one source by block id, worked out from its shards."""

    def __init__(self, split: Split, config: DataConfig):
        self.split, self.config = split, config
        self.starts = np.concatenate([np.zeros(1, np.int64), split.ends])[:-1]
        # A document of n tokens is cut at multiples of T below n - 1, and is one piece at least.
        cuts = -(-(split.ends - self.starts - 1) // config.sequence_length)
        self.first_piece = np.concatenate([[0], np.cumsum(np.maximum(cuts, 1))])

    @property
    def blocks(self) -> int:
        """Number of block ids."""
        if self.config.layout == "packed":
            return -(-max(len(self.split) - 1, 0) // self.config.sequence_length)
        return int(self.first_piece[-1])

    def packed(self, block: int) -> _Expected:
        """A row of the packed layout."""
        length = self.config.sequence_length
        start = block * length
        stop = min(start + length + 1, len(self.split))
        documents = np.searchsorted(self.split.ends, np.arange(start, stop), side="right")
        begins = np.maximum(self.starts[documents], start)
        piece = (self.split.read(start, stop), documents, np.arange(start, stop) - begins)
        return _expected([piece], length + 1)

    def piece(self, number: int) -> np.ndarray:
        """Tokens of a piece of a document."""
        length = self.config.sequence_length
        document = int(np.searchsorted(self.first_piece, number, side="right")) - 1
        start = int(self.starts[document] + (number - self.first_piece[document]) * length)
        return self.split.read(start, min(start + length + 1, int(self.split.ends[document])))

    def pieces(self, block: int, tokens: np.ndarray, segments: np.ndarray) -> _Expected | None:
        """A row of pieces: the first by its number, the others by what they hold.

        They are of documents that begin in the same group of the stream as the first piece's.
        """
        document = int(np.searchsorted(self.first_piece, block, side="right")) - 1
        group = self.config.shuffle_tokens or FIT_TOKENS
        begin = self.starts[document] // group * group
        first, last = np.searchsorted(self.starts, [begin, begin + group]).tolist()
        numbers = range(*self.first_piece[[first, last]].tolist())
        edges = [0, *(np.flatnonzero(np.diff(segments)) + 1).tolist(), len(segments)]
        spans = [(a, b) for a, b in itertools.pairwise(edges) if segments[a] > 0]
        row = [self.piece(block)]
        if len(spans) > 1:
            known = {self.piece(number).tobytes() for number in numbers}
            for a, b in spans[1:]:
                held = tokens[a:b].astype(row[0].dtype)
                if held.tobytes() not in known:
                    return None
                row.append(held)
        if sum(map(len, row)) > len(tokens):
            return None
        return _expected(
            [(ids, np.full(len(ids), i), np.arange(len(ids))) for i, ids in enumerate(row)],
            len(tokens),
        )


def _rows(window: Batch) -> Iterator[dict[str, np.ndarray]]:
    """The rows of a window that are not there to fill it up."""
    width = window["tokens"].shape[-1]
    for i, block in enumerate(window["block"].reshape(-1).tolist()):
        if block >= 0:
            fields = ("tokens", "segment_ids", "positions")
            yield {
                **{name: window[name].reshape(-1, width)[i] for name in fields},
                "mask": np.asarray(target_mask(window["segment_ids"].reshape(-1, width)[i])),
                "block": np.asarray(block),
            }


def _first_windows(windows: Windows) -> Iterator[Batch]:
    """The first windows of a run, about as many as the check of targets reads."""
    tokens = 0
    for number in range(len(windows)):
        if tokens >= _TARGET_TOKENS:
            return
        window = windows[number]
        tokens += window["tokens"].size
        yield window


def check_targets(config: Config, data: DataDirectory, windows: Windows) -> Result:
    """Rows, segments, positions and loss mask are those of the shards' files."""
    name = "targets"
    directories = [DataDirectory(Path(s.directory), verify=False) for s in config.data.sources]
    references = [
        _Reference(Split(source, "train"), config.data) for source in directories or [data]
    ]
    first_ids = np.cumsum([0, *[reference.blocks for reference in references]])
    wrong: dict[str, int] = dict.fromkeys(("tokens", "segments", "positions", "mask"), 0)
    rows = shifted = merged = padded = edges = 0
    for window in _first_windows(windows):
        for row in _rows(window):
            rows += 1
            block = int(row["block"])
            source = int(np.searchsorted(first_ids, block, side="right")) - 1
            reference, block = references[source], block - int(first_ids[source])
            if config.data.layout == "packed":
                expected = reference.packed(block)
            else:
                expected = reference.pieces(block, row["tokens"], row["segment_ids"])
            if expected is None:
                wrong["tokens"] += 1
                continue
            real = expected.documents >= 0
            same = _changes(row["segment_ids"], real) == _changes(expected.documents, real)
            found = {
                "tokens": (row["tokens"] != expected.tokens)[real].any(),
                "segments": not same or ((row["segment_ids"] > 0) != real).any(),
                "positions": (row["positions"] != expected.positions)[real].any(),
                "mask": (row["mask"] != expected.mask).any(),
            }
            for kind, is_wrong in found.items():
                wrong[kind] += bool(is_wrong)
            shifted += bool(found["tokens"]) and _is_shifted(row["tokens"], expected.tokens)
            merged += bool((row["mask"] & ~expected.mask)[real[1:]].any())
            edges += int((real[1:] & ~expected.mask).sum())
            padded += bool(row["mask"][~real[1:]].any())
    return _targets_result(name, rows, edges, wrong, shifted, merged, padded)


def _changes(labels: np.ndarray, real: np.ndarray) -> list[int]:
    """Where the label of neighbouring real tokens changes."""
    return np.flatnonzero((labels[1:] != labels[:-1]) & real[1:] & real[:-1]).tolist()


def _is_shifted(tokens: np.ndarray, expected: np.ndarray) -> bool:
    """Whether tokens are those expected one or two places on or back."""
    return any(
        np.array_equal(tokens[by:], expected[:-by]) or np.array_equal(tokens[:-by], expected[by:])
        for by in (1, 2)
    )


def _targets_result(
    name: str,
    rows: int,
    edges: int,
    wrong: dict[str, int],
    shifted: int,
    merged: int,
    padded: int,
) -> Result:
    causes = []
    if shifted:
        causes.append(
            Cause(
                "labels_shifted",
                f"{shifted} of {rows} rows are the stream's tokens moved by one or two places: "
                f"inputs and targets do not stand one token apart",
                0.9 + 0.09 * shifted / rows,
            )
        )
    if wrong["tokens"] - shifted > 0:
        causes.append(
            Cause(
                "wrong_rows",
                f"{wrong['tokens'] - shifted} of {rows} rows hold other tokens than the stream has "
                f"at their block id",
                0.9,
            )
        )
    if merged:
        causes.append(
            Cause(
                "mask_ignored",
                f"in {merged} of {rows} rows a document's last token has the next document's first "
                f"as its target",
                0.9 + 0.05 * merged / rows,
            )
        )
    if padded:
        causes.append(
            Cause("mask_ignored", f"in {padded} of {rows} rows padding carries loss", 0.95)
        )
    if wrong["mask"] and not merged and not padded:
        causes.append(
            Cause("mask_lost", f"in {wrong['mask']} of {rows} rows real targets carry no loss", 0.9)
        )
    if wrong["segments"]:
        causes.append(
            Cause(
                "segments",
                f"in {wrong['segments']} of {rows} rows segment ids do not change where documents "
                f"do: packed documents see one another",
                0.85,
            )
        )
    if wrong["positions"]:
        causes.append(
            Cause(
                "positions", f"in {wrong['positions']} of {rows} rows positions do not restart", 0.8
            )
        )
    bad = max(wrong.values())
    return result(
        name,
        bad == 0 and rows > 0,
        f"{rows - bad:,} of {rows:,} rows, {edges:,} ends of documents, as the shards have them",
        "all",
        causes,
        "scripts/inspect_data.py --samples 3; `target_mask` in jaxlm/losses.py; the row's block "
        "id in blocks.jsonl",
        rows=rows,
        **wrong,
    )


# ---------------------------------------------------------------- repeats


def _digests(rows: Iterator[np.ndarray]) -> list[bytes]:
    """What tells rows apart, in 16 bytes each."""
    return [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in rows]


def check_duplicates(config: Config, data: DataDirectory) -> Result:
    """Exact repeats of documents and rows, and validation documents in training."""
    limit, length = config.preflight.data_tokens, config.data.sequence_length
    train, held_out = (Split(data, split, limit) for split in SPLITS)
    of_train, of_held_out = (_digests(split.documents()) for split in (train, held_out))
    starts = range(0, len(train) - length + 1, length)
    of_rows = _digests(train.read(i, i + length) for i in starts)
    known = set(of_train)
    documents, repeated = len(of_train), len(of_train) - len(known)
    rows, repeated_rows = len(of_rows), len(of_rows) - len(set(of_rows))
    leaked = sum(digest in known for digest in of_held_out)
    shares = {
        "documents": repeated / max(documents, 1),
        "rows": repeated_rows / max(rows, 1),
        "validation": leaked / max(len(held_out.ends), 1),
    }
    most = config.preflight.duplicates
    causes = []
    if shares["documents"] > most or shares["rows"] > most:
        causes.append(
            Cause(
                "duplicates",
                f"{repeated:,} of {documents:,} training documents and {repeated_rows:,} of "
                f"{rows:,} rows of {length:,} tokens repeat an earlier one exactly: the data was "
                f"prepared without prepare.deduplicate, or holds boilerplate",
                0.95,
            )
        )
    if shares["validation"] > most:
        causes.append(
            Cause(
                "leaked_validation",
                f"{leaked:,} of {len(held_out.ends):,} validation documents are in training too: "
                f"the validation loss will be too low",
                0.95,
            )
        )
    return result(
        "duplicates",
        not causes,
        f"documents {shares['documents']:.2%}, rows {shares['rows']:.2%}, validation in training "
        f"{shares['validation']:.2%}",
        f"<= {most:.2%}",
        causes,
        "prepare.deduplicate and prepare.near_duplicates; scripts/inspect_data.py --samples 10",
        **shares,
    )


# ---------------------------------------------------------------- tokenizer


def _sample(split: Split, count: int) -> list[tuple[int, np.ndarray]]:
    """Documents evenly spread over a split."""
    chosen = np.unique(np.linspace(0, len(split.ends) - 1, count).astype(int)).tolist()
    return [(i, split.document(i)) for i in chosen]


def _agreement(tokenizer: Tokenizer, document: np.ndarray) -> tuple[str, float]:
    """Text of a document's first tokens, and the share of them that encoding gives again."""
    ids = document[:_SAMPLE_TOKENS].astype(np.int64)
    begin = int(tokenizer.begin_id is not None and ids[:1] == tokenizer.begin_id)
    whole = len(document) <= _SAMPLE_TOKENS
    body = ids[begin : -1 if whole and ids[-1] == tokenizer.end_id else None]
    text = tokenizer.decode(body)
    again = tokenizer.encode_prompt(text)
    again = again[int(tokenizer.begin_id is not None) :]
    counted = body if whole else body[:-_EDGE_TOKENS]
    same = np.zeros(len(counted), bool)
    shared = min(len(again), len(counted))
    same[:shared] = np.logical_and.accumulate(again[:shared] == counted[:shared])
    return text, float(same.mean()) if len(same) else 1.0


def check_tokenizer(config: Config, data: DataDirectory) -> tuple[Result, list[str]]:
    """The tokenizer is the data's. Returns samples of decoded text too."""
    name, settings = "tokenizer", config.preflight
    entry = data.manifest["tokenizer"]
    if entry is None:
        return skipped(name, "the data names no tokenizer: its ids came from elsewhere"), []
    path = data.directory / entry["file"]
    files = {"the data's own": path}
    if config.prepare.tokenizer is not None and Path(config.prepare.tokenizer).is_file():
        files["prepare.tokenizer"] = Path(config.prepare.tokenizer)
    foreign = [
        f"{what} ({file})"
        for what, file in files.items()
        if not file.is_file() or sha256_of(file) != entry["sha256"]
    ]
    if foreign:
        text = " and ".join(foreign) + " is not the one that made the tokens: fingerprints differ"
        return (
            result(
                name,
                False,
                f"fingerprint differs: {foreign[0]}",
                f"sha256 {entry['sha256'][:12]}...",
                [Cause("wrong_tokenizer", text, 0.98)],
                f"{data.directory / 'manifest.json'}; bring the tokenizer back, or prepare again",
            ),
            [],
        )
    try:
        manifest = data.manifest
        tokenizer = read_tokenizer(path, manifest["end_token"], manifest["begin_token"])
    except UserError as error:
        cause = Cause("wrong_tokenizer", str(error), 0.95)
        return result(name, False, str(error), "", [cause], str(path)), []
    documents = _sample(Split(data, "train"), _DOCUMENTS)
    outside = sum(int((d >= tokenizer.vocabulary_size).sum()) for _, d in documents)
    decoded = [
        (i, *_agreement(tokenizer, np.minimum(d, tokenizer.vocabulary_size - 1)))
        for i, d in documents
    ]
    characters = sum(len(text) for _, text, _ in decoded)
    replaced = sum(text.count("\ufffd") for _, text, _ in decoded) / max(characters, 1)
    again = float(np.mean([share for _, _, share in decoded])) if decoded else 1.0
    causes: list[Cause] = []
    if again < settings.encoded_again or replaced > settings.replacement_characters or outside:
        strength = max(
            1 - again / settings.encoded_again,
            min(1.0, replaced / 0.2),
            float(outside > 0),
        )
        causes.append(
            Cause(
                "wrong_tokenizer",
                f"decoded text encodes to other ids ({again:.1%} of tokens come back), "
                f"{replaced:.1%} of its characters are U+FFFD and {outside:,} ids are none of this "
                f"tokenizer's: the tokens were made with another one",
                0.5 + 0.47 * strength,
            )
        )
    if again < settings.encoded_again and replaced <= settings.replacement_characters:
        causes.append(
            Cause(
                "lossy_tokenizer",
                f"the tokenizer changes text ({again:.1%} of tokens come back): it normalises, or "
                f"ids were sampled at random when they were made",
                0.6 * again,
            )
        )
    samples = [f"document {i:,}: {_one_line(text)}" for i, text, _ in decoded[: settings.samples]]
    found = result(
        name,
        not causes,
        f"{again:.1%} of tokens come back, {replaced:.2%} U+FFFD",
        f">= {settings.encoded_again:.0%}, <= {settings.replacement_characters:.0%}",
        causes,
        f"the samples; tokenizer in {data.directory / 'manifest.json'}; prepare.tokenizer",
        encoded_again=again,
        replacement_characters=replaced,
        ids_outside=outside,
    )
    return found, samples


def _one_line(text: str, most: int = 160) -> str:
    shown: Any = " ".join(text.split())
    return shown[:most] + (" ..." if len(shown) > most else "")
