"""Sampling text. Every new token recomputes the whole prefix: simple, and quadratic in length."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from jaxlm.config import ModelConfig
from jaxlm.models.build import Params, apply, logits


@functools.partial(jax.jit, static_argnums=0)
def generate(
    model: ModelConfig,
    params: Params,
    tokens_T: Array,
    prompt_length: Array,
    end_id: Array,
    key: Array,
    *,
    depth: Array,
    temperature: Array,
    top_k: Array,
) -> tuple[Array, Array]:
    """Continue one prompt until the end token or until the buffer is full.

    Args:
        model: architecture, static.
        params: parameters.
        tokens_T: [T] int32, the prompt followed by anything.
        prompt_length: tokens of the prompt, at least 1.
        end_id: token that ends a document; negative never stops.
        key: typed random key; equal keys give equal text.
        depth: core steps, traced.
        temperature: 0 takes the likeliest token, otherwise logits are divided by it.
        top_k: sample among this many likeliest tokens; 0 is all.

    Returns:
        The buffer [T] and the number of tokens in it, the end token included.
    """
    length = tokens_T.shape[0]
    positions = jnp.arange(length, dtype=jnp.int32)[None]
    noise_key, sample_key = jax.random.split(key)

    def sample(logits_V: Array, position: Array) -> Array:
        ordered = jnp.sort(logits_V, descending=True)
        limit = jnp.where(top_k > 0, ordered[jnp.clip(top_k - 1, 0, ordered.size - 1)], -jnp.inf)
        kept_V = jnp.where(logits_V >= limit, logits_V, -jnp.inf)
        scaled_V = kept_V / jnp.where(temperature > 0, temperature, 1.0)
        drawn = jax.random.categorical(jax.random.fold_in(sample_key, position), scaled_V)
        return jnp.where(temperature > 0, drawn, jnp.argmax(logits_V)).astype(jnp.int32)

    def unfinished(carry: tuple[Array, Array, Array]) -> Array:
        _, count, ended = carry
        return (count < length) & ~ended

    def extend(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        tokens_T, count, _ = carry
        lm = apply(model, params)
        # Tokens after the prefix are padding: later positions cannot change earlier ones.
        segments = (positions < count).astype(jnp.int32)
        hidden = lm(tokens_T[None], segments, positions, noise_key[None], train=False, depth=depth)
        token = sample(logits(lm, hidden[0, count - 1]), count)
        return tokens_T.at[count].set(token), count + 1, token == end_id

    count = jnp.asarray(prompt_length, jnp.int32)
    start = (tokens_T, count, jnp.asarray(False))
    tokens_T, count, _ = jax.lax.while_loop(unfinished, extend, start)
    return tokens_T, count
