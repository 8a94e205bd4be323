"""Recurrent-depth language model: prelude, a core that repeats, coda.

After Geiping et al. 2025, "Scaling up Test-Time Compute with Latent Reasoning: A Recurrent Depth
Approach" (Huginn). The number of core steps is a traced integer, so that one compiled program
serves every depth.

Shape legend: B rows, T positions, D width, V vocabulary.
"""

import math
from typing import cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxlm.config import ModelConfig
from jaxlm.models.layers import (
    EMBEDDING_DROPOUT,
    FIRST_STEP,
    INITIAL_STATE,
    LAYERS,
    WEIGHT_SCALE,
    Embedding,
    RMSNorm,
    attention_mask,
    dropout,
    final_norm,
    fold_in,
    linear,
    rotary_angles,
    truncated_normal,
)
from jaxlm.models.stack import Stack
from jaxlm.models.unroll import CoreSteps, Rows, unroll


class DiagonalInjection(nnx.Module):
    """s <- a * s + b * (W e), with 0 < a < 1 per channel (Parcae, Prairie et al. 2026).

    a = exp(-softplus(dt) * exp(log_rate)) and b = softplus(dt). At the start a = sqrt(1/5) and W
    is the identity. The map from s to s contracts whatever the parameters are.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.input = linear(config, config.width, config.width, rngs)
        self.input.kernel.set_value(jnp.eye(config.width, dtype=config.param_dtype))
        start = math.log(math.expm1(0.5 * math.log(5.0)))  # softplus(start) = -log(sqrt(1/5))
        self.step_size = nnx.Param(jnp.full((config.width,), start, config.param_dtype))
        self.log_rate = nnx.Param(jnp.zeros((config.width,), config.param_dtype))

    def __call__(self, s_BTD: Array, e_BTD: Array) -> Array:
        """Mix the state with the input; returns [B, T, D]."""
        wide = jnp.promote_types(s_BTD.dtype, jnp.float32)
        step = jax.nn.softplus(self.step_size[...].astype(wide))
        decay = jnp.exp(-step * jnp.exp(self.log_rate[...].astype(wide)))
        # Wide products: a decay above 0.998 would round to 1 in bfloat16.
        mixed_BTD = s_BTD.astype(wide) * decay + self.input(e_BTD).astype(wide) * step
        return mixed_BTD.astype(s_BTD.dtype)


class ConcatInjection(nnx.Module):
    """s <- W [s, e] (the adapter of Huginn)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.adapter = linear(config, 2 * config.width, config.width, rngs)

    def __call__(self, s_BTD: Array, e_BTD: Array) -> Array:
        """Mix the state with the input; returns [B, T, D]."""
        return self.adapter(jnp.concatenate([s_BTD, e_BTD], axis=-1))


class AddInjection(nnx.Module):
    """s <- s + e."""

    def __call__(self, s_BTD: Array, e_BTD: Array) -> Array:
        """Mix the state with the input; returns [B, T, D]."""
        return s_BTD + e_BTD


class Core(nnx.Module):
    """One step of the recurrence: inject the prelude's output, then the core's layers."""

    def __init__(self, config: ModelConfig, out_scale: float, rngs: nnx.Rngs):
        parts = config.recurrent
        if parts.injection == "add":
            self.injection = AddInjection()
        elif parts.injection == "concat":
            self.injection = ConcatInjection(config, rngs)
        else:
            self.injection = DiagonalInjection(config, rngs)
        self.stack = Stack(config, parts.core_layers, parts.prelude_layers, out_scale, rngs)
        if config.norm == "pre":
            # Sandwich blocks leave a normalised stream; pre-norm ones would let the state grow.
            self.state_norm = RMSNorm(config, config.width, rngs)
        self.norm = config.norm

    def __call__(
        self,
        s_BTD: Array,
        e_BTD: Array,
        mask: Array,
        angles: tuple[Array, Array],
        keys_B: Array | None,
    ) -> Array:
        """Take one step; returns the next state, [B, T, D]."""
        s_BTD = self.stack(self.injection(s_BTD, e_BTD), mask, angles, keys_B)
        return self.state_norm(s_BTD) if self.norm == "pre" else s_BTD


class RecurrentDepthLM(nnx.Module):
    """Prelude, weight-shared core, coda; depth chosen at each call."""

    def __init__(self, config: ModelConfig, expected_depth: float, rngs: nnx.Rngs):
        """Build the model.

        Args:
            config: architecture; `config.vocabulary_size` must be set.
            expected_depth: mean number of core steps in training; the maps that write into the
                residual stream start at 1 / sqrt(2 * unrolled layers) of the usual size, so that
                the stream's variance does not grow with depth.
            rngs: stream `params` for the weights.
        """
        parts = config.recurrent
        unrolled = parts.prelude_layers + parts.core_layers * expected_depth + parts.coda_layers
        out_scale = 1.0 / math.sqrt(2.0 * unrolled)
        self.embedding = Embedding(config, rngs)
        self.prelude = Stack(config, parts.prelude_layers, 0, out_scale, rngs)
        self.core = Core(config, out_scale, rngs)
        first_coda_layer = parts.prelude_layers + parts.core_layers
        self.coda = Stack(config, parts.coda_layers, first_coda_layer, out_scale, rngs)
        if config.norm == "pre":
            self.prelude_norm = RMSNorm(config, config.width, rngs)
        self.final_norm = final_norm(config, rngs)
        if not config.tie_embeddings:
            self.output = Embedding(config, rngs)
        self.config = config

    def __call__(
        self,
        tokens_BT: Array,
        segment_ids_BT: Array,
        positions_BT: Array,
        keys_B: Array,
        *,
        train: bool,
        depth: int | Array,
        backprop_depth: int | Array = 0,
        max_backprop_depth: int = 0,
    ) -> Array:
        """Compute the hidden states that :meth:`head` turns into logits.

        Args:
            tokens_BT: int, token ids.
            segment_ids_BT: int32, 0 for padding; positions see only their own segment.
            positions_BT: int32, position within the document.
            keys_B: one random key per row, for the initial state and for dropout.
            train: whether dropout is on.
            depth: number of core steps n >= 1, traced.
            backprop_depth: the last k steps, through which gradient flows, traced; at most
                min(n, max_backprop_depth).
            max_backprop_depth: static bound of k: the length of the scan with gradient.

        Returns:
            [B, T, D] in `compute_dtype`, after the final norm.
        """
        config = self.config
        mask = attention_mask(segment_ids_BT)
        angles = rotary_angles(positions_BT, config.head_size, config.rope_base)
        layer_keys = fold_in(keys_B, LAYERS) if train else None

        x_BTD = self.embedding(tokens_BT)
        x_BTD = dropout(
            x_BTD, config.dropout, fold_in(keys_B, EMBEDDING_DROPOUT) if train else None
        )
        e_BTD = self.prelude(x_BTD, mask, angles, layer_keys)
        e_BTD = self.prelude_norm(e_BTD) if config.norm == "pre" else e_BTD

        graph, core_params = nnx.split(self.core)

        def step(params: nnx.State, s_BTD: Array, e_BTD: Array, i: Array) -> Array:
            step_keys = fold_in(keys_B, FIRST_STEP + i) if train else None
            return nnx.merge(graph, params)(s_BTD, e_BTD, mask, angles, step_keys)

        # Steps without gradient: a loop of traced length over constants.
        start_BTD = self.initial_state(e_BTD, keys_B)
        free_steps = jnp.asarray(depth, jnp.int32) - jnp.asarray(backprop_depth, jnp.int32)
        frozen = jax.lax.stop_gradient((core_params, start_BTD, e_BTD))
        free_BTD = jax.lax.fori_loop(
            0, free_steps, lambda i, s: step(frozen[0], s, frozen[2], i), frozen[1]
        )
        # Without free steps, gradient also reaches the start, which may be the prelude's output.
        s_BTD = jnp.where(free_steps > 0, free_BTD, start_BTD)

        # Steps with gradient: loops of fixed length, of which the first k iterations are real.
        def gradient_step(s_BTD: Array, j: Array) -> tuple[Array, None]:
            def advance(s_BTD: Array) -> Array:
                return step(core_params, s_BTD, e_BTD, free_steps + j)

            return jax.lax.cond(j < backprop_depth, advance, lambda s: s, s_BTD), None

        if config.remat == "full":
            keys_MB = keys_B[None] if train else None
            rows = Rows(segment_ids_BT[None], positions_BT[None], keys_MB)
            params = nnx.to_pure_dict(core_params)
            core = self.gradient_steps(max_backprop_depth)
            s_BTD = cast(
                Array, unroll(core, params, s_BTD, e_BTD, rows, free_steps, backprop_depth)
            )
        else:
            # What an iteration keeps goes through the branch's outputs, weights too: the scan
            # stacks a copy of the core's weights for each step.
            s_BTD, _ = jax.lax.scan(gradient_step, s_BTD, jnp.arange(max_backprop_depth))

        return self.final_norm(self.coda(s_BTD, mask, angles, layer_keys))

    def gradient_steps(self, max_steps: int, on_host: bool = False) -> CoreSteps:
        """How the core steps with gradient are run, forwards and backwards."""
        core = self.core
        norm = nnx.split(core.state_norm)[0] if core.norm == "pre" else None
        return CoreSteps(
            config=self.config,
            injection=nnx.split(core.injection)[0],
            block=nnx.split(core.stack.blocks)[0],
            norm=norm,
            first_layer=core.stack.first_layer,
            max_steps=max_steps,
            on_host=on_host,
        )

    def initial_state(self, e_BTD: Array, keys_B: Array) -> Array:
        """The state before the first core step, [B, T, D], from the prelude's output."""
        kind = self.config.recurrent.initial_state
        if kind == "zero":
            return jnp.zeros_like(e_BTD)
        if kind == "prelude":
            return e_BTD
        noise = truncated_normal(WEIGHT_SCALE)
        keys_B = fold_in(keys_B, INITIAL_STATE)
        return jax.vmap(lambda key: noise(key, e_BTD.shape[1:], e_BTD.dtype))(keys_B)

    def head(self) -> Array:
        """The output matrix [V, D]: logits are hidden states times its transpose."""
        table = self.embedding if self.config.tie_embeddings else self.output
        return table.table[...]
