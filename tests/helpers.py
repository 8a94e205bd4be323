"""What several test files use."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlm.config import ModelConfig, RecurrentConfig, TransformerConfig
from jaxlm.data.shards import ShardWriter
from jaxlm.models.build import apply, init_params, logits


def long(*values):
    """A case of a parametrized test that only `make test-long` runs."""
    return pytest.param(*values, marks=pytest.mark.long)


def write_documents(directory: Path, train, validation, vocabulary_size: int, **kwargs) -> Path:
    with ShardWriter(directory, vocabulary_size=vocabulary_size, end_id=0, **kwargs) as writer:
        for ids in train:
            writer.add("train", ids)
        for ids in validation:
            writer.add("validation", ids)
    return directory


def tiny_model(kind: str = "recurrent", **settings) -> ModelConfig:
    parts = {k: settings.pop(k) for k in ("injection", "initial_state") if k in settings}
    settings = {
        "vocabulary_size": 64,
        "width": 32,
        "heads": 4,
        "feed_forward": 64,
        "remat": "none",
        **settings,
    }
    return ModelConfig(
        kind=kind,
        recurrent=RecurrentConfig(prelude_layers=1, core_layers=2, coda_layers=1, **parts),
        transformer=TransformerConfig(layers=2),
        **settings,
    )


_init = jax.jit(lambda config, key: init_params(config, 6.0, key), static_argnums=0)


def params_of(config: ModelConfig, seed: int = 0):
    return _init(config, jax.random.key(seed))


def row_keys_of(rows: int):
    return jax.random.split(jax.random.key(7), rows)


@functools.partial(jax.jit, static_argnums=0)
def _logits(config, params, tokens, segments, positions, depth):
    model = apply(config, params)
    keys = row_keys_of(tokens.shape[0])
    return logits(model, model(tokens, segments, positions, keys, train=False, depth=depth))


def logits_of(config, params, tokens, segments=None, positions=None, depth=3):
    """Logits [B, T, V] of the whole batch, without dropout."""
    tokens = jnp.asarray(tokens)
    rows, length = tokens.shape
    segments = jnp.ones_like(tokens) if segments is None else jnp.asarray(segments)
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(length), (rows, length))
    return _logits(config, params, tokens, segments, jnp.asarray(positions), jnp.int32(depth))


def layers_one_by_one(stack, x, mask, angles):
    """What a Stack computes, in plain Python: no scan, no rematerialisation, no dropout."""
    graph, state = nnx.split(stack.blocks)
    for layer in range(stack.layers):
        x = nnx.merge(graph, jax.tree.map(lambda p, i=layer: p[i], state))(x, mask, angles, None)
    return x


def largest_difference(a, b) -> float:
    """Largest |a - b| relative to the largest |a| of its leaf, over all leaves."""

    def leaf(x, y):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        return np.max(np.abs(x - y)) / max(np.max(np.abs(x)), 1e-30)

    return max(jax.tree.leaves(jax.tree.map(leaf, a, b)))
