"""Recurrent-depth language model: prelude, a core that repeats, coda.

After Geiping et al. 2025, "Scaling up Test-Time Compute with Latent Reasoning: A Recurrent Depth
Approach" (Huginn). The number of core steps is a traced integer, so that one compiled program
serves every depth.

Shape legend: B rows, T positions, D width, V vocabulary.
"""

import math
from typing import NamedTuple, cast

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


class Trace(NamedTuple):
    """What the state does from step to step; see :meth:`RecurrentDepthLM.trace`.

    Means are over tokens that are not padding. R is the static bound of the number of steps; index
    r - 1 belongs to step r, and what lies behind the last step is zero.
    """

    # Mean norm of a token's state, float32 [R].
    state_norm: Array
    # Mean of |s_r - s_(r-1)| / |s_r|, float32 [R].
    relative_residual: Array
    # Token correlation of the state, see :func:`token_correlation`, float32 [R].
    state_correlation: Array
    # Token correlation of the final hidden states, of the depth asked for, float32 scalar.
    hidden_correlation: Array
    # Tokens that are not padding, float32 scalar.
    tokens: Array


def token_correlation(x_BTD: Array, real_BT: Array) -> Array:
    """How alike the positions of a row are: 0 by chance, near 1 when all are the same.

    Mean cosine of all pairs of tokens, each with itself included, after each token's mean over
    the width is taken off; less 1/S, what S unrelated tokens have by their own share. Rows count by
    their tokens. This is what Huginn's code logs as `recurrent_state_token_corr`.

    Args:
        x_BTD: states.
        real_BT: bool, tokens that are not padding.

    Returns:
        A float32 scalar; 0 where no token is real.
    """
    x_BTD = x_BTD.astype(jnp.float32)
    x_BTD -= jnp.mean(x_BTD, axis=-1, keepdims=True)
    norm_BT1 = jnp.maximum(jnp.linalg.norm(x_BTD, axis=-1, keepdims=True), 1e-8)
    unit_BTD = jnp.where(real_BT[..., None], x_BTD / norm_BT1, 0.0)
    size_B = jnp.sum(real_BT, axis=-1).astype(jnp.float32)
    # The sum of all pairs' cosines is the squared norm of the sum.
    pairs_B = jnp.sum(jnp.square(jnp.sum(unit_BTD, axis=1)), axis=-1)
    row_B = pairs_B / jnp.maximum(size_B, 1.0) - 1.0  # the mean over pairs less chance, times S
    return jnp.sum(jnp.where(size_B > 0, row_B, 0.0)) / jnp.maximum(jnp.sum(size_B), 1.0)


def spectral_norm(matrix: Array, iterations: int = 50) -> Array:
    """Largest singular value by power iteration, a float32 scalar; from below, within about 2 %."""
    matrix = matrix.astype(jnp.float32)
    start = jax.random.normal(jax.random.key(0), (matrix.shape[1],))

    def iterate(_: int, v: Array) -> Array:
        v = matrix.T @ (matrix @ v)
        return v / jnp.maximum(jnp.linalg.norm(v), 1e-30)

    return jnp.linalg.norm(matrix @ jax.lax.fori_loop(0, iterations, iterate, start))


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
        decay, step = self.rates(wide)
        # Wide products: a decay above 0.998 would round to 1 in bfloat16.
        mixed_BTD = s_BTD.astype(wide) * decay + self.input(e_BTD).astype(wide) * step
        return mixed_BTD.astype(s_BTD.dtype)

    def rates(self, dtype: jnp.dtype) -> tuple[Array, Array]:
        """The factors a and b of each channel, [D] each."""
        step = jax.nn.softplus(self.step_size[...].astype(dtype))
        return jnp.exp(-step * jnp.exp(self.log_rate[...].astype(dtype))), step

    def gains(self) -> tuple[Array, Array]:
        """Spectral norms of the maps from state and from input, float32 scalars."""
        decay, step = self.rates(jnp.dtype(jnp.float32))
        return jnp.max(decay), spectral_norm(self.input.kernel[...] * step)


class ConcatInjection(nnx.Module):
    """s <- W [s, e] (the adapter of Huginn)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.adapter = linear(config, 2 * config.width, config.width, rngs)

    def __call__(self, s_BTD: Array, e_BTD: Array) -> Array:
        """Mix the state with the input; returns [B, T, D]."""
        return self.adapter(jnp.concatenate([s_BTD, e_BTD], axis=-1))

    def gains(self) -> tuple[Array, Array]:
        """Spectral norms of the maps from state and from input, float32 scalars."""
        state_DD, input_DD = jnp.split(self.adapter.kernel[...], 2)
        return spectral_norm(state_DD), spectral_norm(input_DD)


class AddInjection(nnx.Module):
    """s <- s + e."""

    def __call__(self, s_BTD: Array, e_BTD: Array) -> Array:
        """Mix the state with the input; returns [B, T, D]."""
        return s_BTD + e_BTD

    def gains(self) -> tuple[Array, Array]:
        """Spectral norms of the maps from state and from input, float32 scalars."""
        return jnp.ones(()), jnp.ones(())


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
        e_BTD = self._prelude(x_BTD, mask, angles, layer_keys)

        graph, core_params = nnx.split(self.core)

        @jax.named_scope("step")
        def step(params: nnx.State, s_BTD: Array, e_BTD: Array, i: Array) -> Array:
            step_keys = fold_in(keys_B, FIRST_STEP + i) if train else None
            return nnx.merge(graph, params)(s_BTD, e_BTD, mask, angles, step_keys)

        # Steps without gradient: a loop of traced length over constants.
        start_BTD = self.initial_state(e_BTD, keys_B)
        free_steps = jnp.asarray(depth, jnp.int32) - jnp.asarray(backprop_depth, jnp.int32)
        frozen = jax.lax.stop_gradient((core_params, start_BTD, e_BTD))
        with jax.named_scope("core"):
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
            with jax.named_scope("core"):
                s_BTD = cast(
                    Array, unroll(core, params, s_BTD, e_BTD, rows, free_steps, backprop_depth)
                )
        else:
            # What an iteration keeps goes through the branch's outputs, weights too: the scan
            # stacks a copy of the core's weights for each step.
            with jax.named_scope("core"):
                s_BTD, _ = jax.lax.scan(gradient_step, s_BTD, jnp.arange(max_backprop_depth))

        with jax.named_scope("coda"):
            x_BTD = self.coda(s_BTD, mask, angles, layer_keys)
        with jax.named_scope("final_norm"):
            return self.final_norm(x_BTD)

    @jax.named_scope("prelude")
    def _prelude(
        self, x_BTD: Array, mask: Array, angles: tuple[Array, Array], layer_keys: Array | None
    ) -> Array:
        e_BTD = self.prelude(x_BTD, mask, angles, layer_keys)
        return self.prelude_norm(e_BTD) if self.config.norm == "pre" else e_BTD

    def trace(
        self,
        tokens_BT: Array,
        segment_ids_BT: Array,
        positions_BT: Array,
        keys_B: Array,
        *,
        depth: Array,
        steps: Array,
        max_steps: int,
    ) -> Trace:
        """Follow the state through `steps` core steps, without dropout or gradient.

        Args:
            tokens_BT: as for a call; so are the next three.
            segment_ids_BT: 0 for padding, which no figure counts.
            positions_BT: int32.
            keys_B: one random key per row.
            depth: steps after which the coda reads the state, traced int32, at most `steps`.
            steps: traced int32, at most `max_steps`.
            max_steps: static length of the figures.
        """
        mask = attention_mask(segment_ids_BT)
        angles = rotary_angles(positions_BT, self.config.head_size, self.config.rope_base)
        real_BT = segment_ids_BT > 0
        tokens = jnp.sum(real_BT).astype(jnp.float32)
        e_BTD = self._prelude(self.embedding(tokens_BT), mask, angles, None)
        graph, params = nnx.split(self.core)

        def mean(x_BT: Array) -> Array:
            return jnp.sum(jnp.where(real_BT, x_BT, 0.0)) / jnp.maximum(tokens, 1.0)

        def step(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            before_BTD, read_BTD, figures_3R = carry
            s_BTD = nnx.merge(graph, params)(before_BTD, e_BTD, mask, angles, None)
            now_BTD, then_BTD = s_BTD.astype(jnp.float32), before_BTD.astype(jnp.float32)
            norm_BT = jnp.linalg.norm(now_BTD, axis=-1)
            residual_BT = jnp.linalg.norm(now_BTD - then_BTD, axis=-1)
            figures_3 = jnp.stack(
                [
                    mean(norm_BT),
                    mean(residual_BT / jnp.maximum(norm_BT, 1e-8)),
                    token_correlation(s_BTD, real_BT),
                ]
            )
            read_BTD = jnp.where(i + 1 == depth, s_BTD, read_BTD)
            return s_BTD, read_BTD, figures_3R.at[:, i].set(figures_3)

        start_BTD = self.initial_state(e_BTD, keys_B)
        figures_3R = jnp.zeros((3, max_steps), jnp.float32)
        carry = (start_BTD, start_BTD, figures_3R)
        _, read_BTD, figures_3R = jax.lax.fori_loop(0, steps, step, carry)
        hidden_BTD = self.final_norm(self.coda(read_BTD, mask, angles, None))
        norm_R, residual_R, correlation_R = figures_3R
        hidden = token_correlation(hidden_BTD, real_BT)
        return Trace(norm_R, residual_R, correlation_R, hidden, tokens)

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
