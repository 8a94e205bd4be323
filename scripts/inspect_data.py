"""Show what a prepared data directory holds.

    python scripts/inspect_data.py prepared/shakespeare
    python scripts/inspect_data.py prepared/shakespeare --samples 3 --files
    python scripts/inspect_data.py prepared/shakespeare --verify

Prints counts, why documents were skipped, a histogram of document lengths, and documents drawn at
random. Exit code 0; 1: --verify found damage; 2: not a data directory.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import rich.markup
import rich.table

from jaxlm.cli import run_script
from jaxlm.console import console, tracked
from jaxlm.data.shards import SPLITS, DataDirectory
from jaxlm.data.tokenizer import read_tokenizer
from jaxlm.errors import UserError

_SHOWN = 400  # characters of a sample
_BAR = 40  # characters of the longest bar


def arguments() -> argparse.Namespace:
    """The command line."""
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("directory", type=Path, help="where manifest.json is")
    result.add_argument("--verify", action="store_true", help="compare every file's checksum")
    result.add_argument("--files", action="store_true", help="list what became of each source file")
    result.add_argument(
        "--samples", type=int, default=0, metavar="N", help="show N documents drawn at random"
    )
    result.add_argument("--seed", type=int, default=0, help="of the samples; default: 0")
    result.add_argument("--json", action="store_true", help="print the counts as JSON instead")
    return result.parse_args()


def verify(data: DataDirectory) -> int:
    """Check every file; print each that is damaged. Returns the exit code."""
    files = data.files()
    damaged = []
    for path, entry in tracked(files, "Verifying", len(files)):
        try:
            data.check(path, entry)
        except UserError as error:
            damaged.append(str(error))
    for line in damaged:
        print(line)
    size = sum(entry["bytes"] for _, entry in files)
    print(f"{len(files) - len(damaged)} of {len(files)} files are whole ({size:,} bytes in all)")
    return 1 if damaged else 0


def lengths_of(data: DataDirectory, split: str) -> np.ndarray:
    """Tokens of each document of a split."""
    return np.diff(data.stream(split).document_ends, prepend=0)


def summary(data: DataDirectory) -> dict[str, Any]:
    """All counts as plain values."""
    manifest = data.manifest
    keys = ("vocabulary_size", "dtype", "begin_token", "end_token", "normalization")
    result: dict[str, Any] = {key: manifest[key] for key in keys}
    result["bytes_per_token_known"] = manifest["token_bytes"] is not None
    result["complete"] = manifest["source"].get("complete", True)
    result["documents"] = manifest["source"].get("documents")
    for split in SPLITS:
        lengths = lengths_of(data, split)
        found = manifest["splits"][split]
        result[split] = {
            "shards": len(found["shards"]),
            "documents": found["documents"],
            "tokens": found["tokens"],
            "text_bytes": found["text_bytes"],
            "median_tokens": float(np.median(lengths)) if len(lengths) else None,
            "longest_tokens": int(lengths.max(initial=0)),
        }
    return result


def print_counts(counts: dict[str, Any]) -> None:
    """Tables of splits and of documents."""
    out = console()
    out.print(
        f"vocabulary {counts['vocabulary_size']:,} ({counts['dtype']}), documents begin with "
        f"{counts['begin_token']} and end with {counts['end_token']}, normalisation "
        f"{counts['normalization']}",
        markup=False,
    )
    table = rich.table.Table("split", *["shards", "documents", "tokens", "bytes of text"])
    table.add_column("tokens a document: median")
    table.add_column("longest")
    for split in SPLITS:
        row = counts[split]
        table.add_row(split, *[f"{x:,}" if x is not None else "-" for x in row.values()])
    for column in table.columns[1:]:
        column.justify = "right"
    out.print(table)
    documents = counts["documents"]
    if documents is None:
        return
    rows = {key: documents[key] for key in ("in", "train", "validation")}
    rows |= {f"skipped: {why}": number for why, number in documents["skipped"].items()}
    table = rich.table.Table("documents", "")
    table.columns[1].justify = "right"
    for name, number in rows.items():
        table.add_row(name, f"{number:,}")
    out.print(table)
    for key, what in (
        ("replaced", "invalid sequences replaced by U+FFFD"),
        ("removed_zero_width", "zero-width characters removed"),
        ("removed_nul", "NUL characters removed"),
    ):
        if documents[key]:
            out.print(f"{documents[key]:,} {what}")
    if not counts["complete"]:
        out.print("The preparation was paused: not all sources were read.")


def print_histogram(lengths: np.ndarray) -> None:
    """Training documents by length, in doubling bins."""
    if not len(lengths):
        return
    bins = np.floor(np.log2(lengths)).astype(int)
    table = rich.table.Table("tokens a document", "documents", "", "share of tokens")
    table.columns[1].justify = table.columns[3].justify = "right"
    counts = np.bincount(bins)
    tokens = np.bincount(bins, weights=lengths)
    for i in range(bins.min(), bins.max() + 1):
        bar = "#" * round(_BAR * counts[i] / counts.max())
        share = f"{tokens[i] / lengths.sum():.1%}"
        table.add_row(f"{2**i:,} to {2 ** (i + 1) - 1:,}", f"{counts[i]:,}", bar, share)
    console().print(table)


def print_samples(data: DataDirectory, number: int, seed: int) -> None:
    """Training documents drawn at random, decoded."""
    path, stream = data.tokenizer_path(), data.stream("train")
    if path is None:
        raise UserError(f"{data.directory}: has no tokenizer, so that samples cannot be decoded")
    tokenizer = read_tokenizer(path, data.manifest["end_token"], data.manifest["begin_token"])
    ends = stream.document_ends
    chosen = np.random.default_rng(seed).choice(len(ends), min(number, len(ends)), replace=False)
    for i in sorted(chosen.tolist()):
        start = int(ends[i - 1]) if i else 0
        text = tokenizer.decode(stream.read(start, int(ends[i])))
        console().rule(f"document {i:,}: {int(ends[i]) - start:,} tokens, {len(text):,} characters")
        console().print(
            text[:_SHOWN] + (" ..." if len(text) > _SHOWN else ""), markup=False, soft_wrap=True
        )


def print_files(data: DataDirectory) -> None:
    """What became of each source file, in the order in which they were read."""
    table = rich.table.Table("file", "in", "train", "validation", "skipped", "invalid at")
    for file in data.manifest["source"].get("files", []):
        outcome = file["outcome"]
        if outcome is None:
            table.add_row(rich.markup.escape(file["file"]), "not read yet")
            continue
        skipped = ", ".join(f"{n:,} {why}" for why, n in outcome["skipped"].items())
        counts = [f"{outcome[key]:,}" for key in ("in", "train", "validation")]
        invalid = ", ".join(f"{offset:,}" for offset in outcome["first_invalid"])
        table.add_row(rich.markup.escape(file["file"]), *counts, skipped, invalid)
    console().print(table)


def main() -> int:
    """Show or verify a directory."""
    options = arguments()
    data = DataDirectory(options.directory, verify=False)
    if options.verify:
        return verify(data)
    counts = summary(data)
    if options.json:
        print(json.dumps(counts, indent=2, ensure_ascii=False))
        return 0
    print_counts(counts)
    print_histogram(lengths_of(data, "train"))
    if options.files:
        print_files(data)
    if options.samples:
        print_samples(data, options.samples, options.seed)
    return 0


if __name__ == "__main__":
    run_script(main)
