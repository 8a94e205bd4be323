"""Tokens per second of the training stream, beside bare NumPy and PyTorch's DataLoader.

    python benchmarks/data_stream.py [--json FILE]

Writes shards of random tokens to a temporary folder (0.4 GB) and reads windows of 16 rows of
1,024 and of 2,048 tokens in a random order, on the CPU, each form in one thread of its own and all
of them in one run. The PyTorch rows need torch, which jaxlm does not depend on. The last table is
the share of time that a loop waits for data when its step takes 50 ms.
"""

import argparse
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import grain
import jax
import numpy as np

from jaxlm.config import DataConfig
from jaxlm.data.pipeline import Source, Windows, device_iterator, training_windows
from jaxlm.data.shards import TokenStream
from jaxlm.files import write_json

try:
    import torch
except ImportError:
    torch = None

TOKENS, SHARDS, VOCABULARY = 100_000_000, 2, 100_000
ROWS, LENGTHS, SECONDS = 16, (1024, 2048), 4.0
STEP_SECONDS, STEPS = 0.05, 100


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


# ---------------------------------------------------------------- forms


def ours(windows: Windows) -> Iterator[Any]:
    """Windows through grain, on the host."""
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    return iter(grain.MapDataset.source(windows).to_iter_dataset(options))


def ours_on_device(windows: Windows) -> Iterator[Any]:
    """Windows as a run gets them: through grain and jax.device_put."""
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
        assert torch is not None
        start = row * self.length
        ids = self.tokens[start : start + self.length + 1].tolist()
        return torch.tensor(ids[:-1]), torch.tensor(ids[1:])


class TensorRows(ListRows):
    """The same by slices of one tensor that shares the shard's memory."""

    def __getitem__(self, row: int) -> Any:
        """Inputs and targets of a row."""
        assert torch is not None
        start = row * self.length
        ids = torch.from_numpy(self.tokens[start : start + self.length + 1].astype(np.int64))
        return ids[:-1], ids[1:]


def torch_loader(rows: ListRows) -> Iterator[Any]:
    """PyTorch's DataLoader in this process, shuffled, again and again."""
    assert torch is not None
    loader = torch.utils.data.DataLoader(rows, batch_size=ROWS, shuffle=True, drop_last=True)  # pyright: ignore[reportArgumentType]
    return itertools.chain.from_iterable(itertools.repeat(loader))


# ---------------------------------------------------------------- tables


def measure(stream: TokenStream, shard: np.ndarray, length: int) -> dict[str, float | None]:
    """Tokens per second of each form; None for one that needs torch where there is none."""
    config = DataConfig(sequence_length=length, epochs=100)
    source = Source("benchmark", stream, 1.0, {})
    windows = training_windows([source], config, 1, ROWS)
    forms: dict[str, Callable[[], Iterator[Any]] | None] = {
        "jaxlm through grain, without device_put": lambda: ours(windows),
        "jaxlm through grain, with device_put (CPU)": lambda: ours_on_device(windows),
        "NumPy, one fancy index a batch, tokens alone": lambda: bare_numpy(shard, length),
    }
    list_form = "PyTorch DataLoader, Python lists sample by sample"
    tensor_form = "PyTorch DataLoader, slices of a tensor"
    if torch is None:
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
    config = DataConfig(sequence_length=length)
    windows = training_windows([Source("benchmark", stream, 1.0, {})], config, 1, ROWS)
    iterator = ours_on_device(windows)
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


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    arguments = parser.parse_args()
    if torch is not None:
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        stream = write_stream(Path(folder))
        shard = np.load(Path(folder) / "tokens-0.npy", mmap_mode="r")
        stream.read_rows(np.arange(0, len(stream) - 1024, 1024), 1024)  # into the page cache
        speeds = {length: measure(stream, shard, length) for length in LENGTHS}
        waits = {length: data_wait_fraction(stream, length) for length in LENGTHS}
    print(f"{'million tokens/s, 16 rows a window':<52}" + "".join(f"{n:>10,}" for n in LENGTHS))
    for name in speeds[LENGTHS[0]]:
        figures = [speeds[length][name] for length in LENGTHS]
        cells = ["no torch" if x is None else f"{x / 1e6:.1f}" for x in figures]
        print(f"{name:<52}" + "".join(f"{cell:>10}" for cell in cells))
    print(f"{'data_wait_fraction, steps of 50 ms':<52}", end="")
    print("".join(f"{waits[length]:>10.2%}" for length in LENGTHS))
    if arguments.json is not None:
        write_json(arguments.json, {"tokens_per_second": speeds, "data_wait_fraction": waits})


if __name__ == "__main__":
    main()
