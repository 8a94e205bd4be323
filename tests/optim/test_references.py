"""The same 20 updates as PyTorch, whose results tests/references/torch_optimizers.py wrote."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlm.config import OptimConfig
from jaxlm.optim import adafactor, adamw_8bit, clip_by_global_norm, in_float32
from jaxlm.training.optimizer import build_optimizer

sys.path.insert(0, str(Path(__file__).parents[1] / "references"))
import torch_optimizers as torch_reference

FILE = Path(__file__).parents[1] / "testdata" / "torch_optimizers.npz"
ADAMW = {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def trainer_chain():
    """The chain of a run with these settings."""
    config = OptimConfig(name="adamw", learning_rate=3e-3, schedule="constant", beta2=0.95)
    return build_optimizer(
        config, updates=20, micro_batches=1, window_tokens=1, key=jax.random.key(0)
    )


CASES = {
    "adamw": lambda: in_float32(optax.adamw(3e-3, **ADAMW)),
    # With every leaf too small to be coded, the 8-bit form is AdamW.
    "adamw (8 bits, nothing coded)": lambda: adamw_8bit(3e-3, **ADAMW, min_size=10**9),
    "adamw_clipped": lambda: optax.chain(clip_by_global_norm(1.0), optax.adamw(3e-3, **ADAMW)),
    "adamw_clipped (the trainer's chain)": trainer_chain,
    "adafactor": lambda: adafactor(1e-2, weight_decay=0.1, min_factored=1),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-10)])
def test_twenty_updates_like_pytorch(case, dtype, tolerance):
    if dtype == "float64" and "trainer" in case:
        tolerance = 1e-6  # its rate is a float32 in the state
    with jax.enable_x64(dtype == "float64"):
        tx = CASES[case]()
        params = {k: jnp.asarray(v, dtype) for k, v in torch_reference.weights().items()}
        state = tx.init(params)
        update = jax.jit(tx.update)
        for step in range(torch_reference.STEPS):
            grads = {k: jnp.asarray(v, dtype) for k, v in torch_reference.gradients(step).items()}
            updates, state = update(grads, state, params)
            params = optax.apply_updates(params, updates)
        reference = np.load(FILE)
        for name, weight in params.items():
            expected = reference[f"{case.split()[0]}/{dtype}/{name}"]
            assert weight.dtype == expected.dtype == dtype
            difference = np.abs(np.asarray(weight) - expected).max()
            assert difference <= tolerance * np.abs(expected).max(), name
