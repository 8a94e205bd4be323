"""The blocks that both models are built from.

Shape legend: B rows, T positions, D width, H query heads, K key and value heads, F hidden width of
the MLP, S head size. Arrays are in `compute_dtype` unless a comment says otherwise.
"""

import math
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxlm.config import ModelConfig

# Purposes that random keys of a row are folded with; core step i uses FIRST_STEP + i.
EMBEDDING_DROPOUT, INITIAL_STATE, LAYERS, FIRST_STEP = 0, 1, 2, 3

# Attention's scores of one layer, float32, that may exist together with `remat: full`. The backward
# pass holds about five arrays of their size.
SCORES_AT_ONCE = 16 * 2**20

# Standard deviation of weights at width D: "small init" (Nguyen & Salazar 2019; Takase et al.
# 2023, "Spike No More"), which Huginn uses as well.
WEIGHT_SCALE = math.sqrt(2 / 5)


def truncated_normal(std: float) -> nnx.Initializer:
    """Normal noise of standard deviation `std`, redrawn beyond three of them."""
    draw = jax.nn.initializers.truncated_normal(1.0, lower=-3.0, upper=3.0)
    # Cutting at 3 sigma leaves a variance of 1 - 6 phi(3) / (2 Phi(3) - 1) = 0.98658^2.
    scale = std / 0.98657717

    def init(key: Array, shape, dtype=jnp.float32, out_sharding=None) -> Array:
        del out_sharding  # no sharding inside the model
        return (scale * draw(key, shape, jnp.promote_types(dtype, jnp.float32))).astype(dtype)

    return init


def flat_product(x: Array, kernel: Array, dimensions, **settings) -> Array:
    """`jax.lax.dot_general` of x [..., D] and kernel [D, F], as one product of two matrices.

    The gradient of the kernel is then one matrix product too. With x's leading axes kept, XLA
    contracts two axes at once, for which its CPU backend has no matrix routine: a backward pass
    took up to twice the time (benchmarks/profile.py). A GPU runs the same operations either way.
    """
    assert dimensions == (((x.ndim - 1,), (0,)), ((), ())), dimensions
    flat = x.reshape(-1, x.shape[-1])
    product = jax.lax.dot_general(flat, kernel, (((1,), (0,)), ((), ())), **settings)
    return product.reshape(*x.shape[:-1], kernel.shape[-1])


def linear(
    config: ModelConfig, inputs: int, outputs: int, rngs: nnx.Rngs, scale: float = 1.0
) -> nnx.Linear:
    """A bias-free linear map with small init, times `scale`."""
    return nnx.Linear(
        inputs,
        outputs,
        use_bias=False,
        kernel_init=truncated_normal(scale * WEIGHT_SCALE / math.sqrt(config.width)),
        dtype=jnp.dtype(config.compute_dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        dot_general=flat_product,
        rngs=rngs,
    )


class RMSNorm(nnx.Module):
    """Root mean square norm with a learned scale (Zhang & Sennrich 2019), at least in float32."""

    def __init__(self, config: ModelConfig, size: int, rngs: nnx.Rngs):
        del rngs  # the scale starts at one
        self.scale = nnx.Param(jnp.ones((size,), config.param_dtype))
        self.epsilon = config.norm_epsilon

    def __call__(self, x: Array) -> Array:
        """Normalise the last axis; shape and dtype are kept."""
        wide = jnp.promote_types(x.dtype, jnp.float32)
        x_wide = x.astype(wide)
        mean_square = jnp.mean(jnp.square(x_wide), axis=-1, keepdims=True)
        y = x_wide * jax.lax.rsqrt(mean_square + self.epsilon) * self.scale[...].astype(wide)
        return y.astype(x.dtype)


def rotary_angles(positions_BT: Array, head_size: int, base: float) -> tuple[Array, Array]:
    """Cosine and sine of RoPE's angles (Su et al. 2021), each [B, T, 1, S/2] in float32."""
    frequency = base ** (-jnp.arange(0, head_size, 2, dtype=jnp.float32) / head_size)
    angle = positions_BT[..., None, None].astype(jnp.float32) * frequency
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x_BTHS: Array, angles: tuple[Array, Array]) -> Array:
    """Rotate the pairs (x[i], x[i + S/2]) by their position's angles."""
    cos, sin = angles
    first, second = jnp.split(x_BTHS.astype(jnp.promote_types(x_BTHS.dtype, jnp.float32)), 2, -1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTHS.dtype)


def attention_mask(segment_ids_BT: Array) -> Array:
    """Which keys (axis 3) are of a query's (axis 2) document: bool [B, 1, T, T].

    Attention is causal besides. Padding is segment 0 and sees padding before it, so that every
    query sees at least itself and a row that is all padding gives finite numbers.
    """
    return (segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :])[:, None]


def attention_implementation(config: ModelConfig, length: int) -> Literal["xla", "cudnn"]:
    """Resolve `auto` for the default backend: 'cudnn' or 'xla'.

    cuDNN's flash attention takes 16-bit inputs, below compute capability 9.0 head sizes of at most
    128 that are multiples of 8, and with a mask an even number of positions.
    """
    if config.attention != "auto":
        return config.attention
    fits = config.head_size <= 128 and config.head_size % 8 == 0 and length % 2 == 0
    on_gpu = jax.default_backend() == "gpu"
    return "cudnn" if on_gpu and fits and config.compute_dtype == "bfloat16" else "xla"


def float64_attention(q_BTHS: Array, k_BTKS: Array, v_BTKS: Array, mask: Array) -> Array:
    """Plain causal attention; `jax.nn.dot_product_attention` computes in float32 at most."""
    rows, length, heads, size = q_BTHS.shape
    groups = k_BTKS.shape[2]
    mask = mask & jnp.tril(jnp.ones((length, length), bool))
    q_BTKGS = q_BTHS.reshape(rows, length, groups, heads // groups, size)
    scores = jnp.einsum("btkgs,buks->bkgtu", q_BTKGS, k_BTKS) / math.sqrt(size)
    weights = jax.nn.softmax(jnp.where(mask[:, :, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bkgtu,buks->btkgs", weights, v_BTKS).reshape(q_BTHS.shape)


def attention_by_groups(q_BTHS: Array, k_BTKS: Array, v_BTKS: Array, mask: Array) -> Array:
    """Causal attention, large scores for one key-value head with its queries after another.

    Scores exist for one group at a time, [B, H/K, T, T], and are computed again in the backward
    pass: at 32 heads and 2,048 positions that takes 1.3 GB off an update. Where those of all
    groups take `SCORES_AT_ONCE` bytes or less there is no loop, which would save little.
    """

    @jax.checkpoint
    def attend(q_BTHS: Array, k_BTKS: Array, v_BTKS: Array) -> Array:
        return jax.nn.dot_product_attention(
            q_BTHS, k_BTKS, v_BTKS, mask=mask, is_causal=True, implementation="xla"
        )

    rows, length, heads, size = q_BTHS.shape
    if 4 * rows * heads * length**2 <= SCORES_AT_ONCE:
        return attend(q_BTHS, k_BTKS, v_BTKS)
    groups = k_BTKS.shape[2]
    q_KBTGS = jnp.moveaxis(q_BTHS.reshape(rows, length, groups, heads // groups, size), 2, 0)
    y_KBTGS = jax.lax.map(
        lambda group: attend(group[0], group[1][:, :, None], group[2][:, :, None]),
        (q_KBTGS, jnp.moveaxis(k_BTKS, 2, 0), jnp.moveaxis(v_BTKS, 2, 0)),
    )
    return jnp.moveaxis(y_KBTGS, 0, 2).reshape(q_BTHS.shape)


def fold_in(keys_B: Array, data: int | Array) -> Array:
    """`jax.random.fold_in` on one key per row."""
    return jax.vmap(lambda key: jax.random.fold_in(key, data))(keys_B)


def dropout(x_BTD: Array, rate: float, keys_B: Array | None) -> Array:
    """Zero a share `rate` of the elements and scale up the rest; no keys means no dropout.

    Each row draws from its own key and each position from its own counter, so the noise of a
    token depends neither on the other rows of its batch nor on the padding after it.
    """
    if keys_B is None or rate == 0.0:
        return x_BTD
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 1.0 - rate, x_BTD.shape[1:]))(keys_B)
    return jnp.where(keep, x_BTD / jnp.asarray(1.0 - rate, x_BTD.dtype), 0)


def final_norm(config: ModelConfig, rngs: nnx.Rngs) -> RMSNorm:
    """The norm before the head, started so that the loss begins near log V.

    The scale starts at 1/2: random logits then have a standard deviation of 0.32 and cost 0.05
    nats above log V. With tied embeddings its signs alternate besides. At the start the residual
    stream is close to the input's own embedding, and a head made of the same rows would give the
    input itself a logit of sqrt(2 D / 5), 35 at width 3,072; with the signs, the products of a
    row with itself cancel at any width. Nothing else changes: the scale is learned anyway, and
    any directions would do as well.
    """
    norm = RMSNorm(config, config.width, rngs)
    signs = 1 - 2 * (jnp.arange(config.width) % 2) if config.tie_embeddings else 1
    norm.scale.set_value((norm.scale[...] * signs / 2).astype(config.param_dtype))
    return norm


class Attention(nnx.Module):
    """Causal multi-head attention with rotary positions and grouped queries."""

    def __init__(self, config: ModelConfig, out_scale: float, rngs: nnx.Rngs):
        size, width = config.head_size, config.width
        self.query = linear(config, width, config.heads * size, rngs)
        self.key = linear(config, width, config.key_value_heads * size, rngs)
        self.value = linear(config, width, config.key_value_heads * size, rngs)
        self.out = linear(config, width, width, rngs, out_scale)
        if config.qk_norm:
            self.query_norm = RMSNorm(config, size, rngs)
            self.key_norm = RMSNorm(config, size, rngs)
        self.config = config

    def __call__(self, x_BTD: Array, mask: Array, angles: tuple[Array, Array]) -> Array:
        """Mix positions. `mask` is [B, 1, T, T]; returns [B, T, D]."""
        config = self.config
        rows, length, width = x_BTD.shape
        heads_shape = (rows, length, -1, config.head_size)
        q_BTHS = self.query(x_BTD).reshape(heads_shape)
        k_BTKS = self.key(x_BTD).reshape(heads_shape)
        v_BTKS = self.value(x_BTD).reshape(heads_shape)
        if config.qk_norm:
            q_BTHS, k_BTKS = self.query_norm(q_BTHS), self.key_norm(k_BTKS)
        q_BTHS, k_BTKS = rotate(q_BTHS, angles), rotate(k_BTKS, angles)
        implementation = attention_implementation(config, length)
        if x_BTD.dtype == jnp.float64:
            y_BTHS = float64_attention(q_BTHS, k_BTKS, v_BTKS, mask)
        elif implementation == "xla" and config.remat == "full":
            y_BTHS = attention_by_groups(q_BTHS, k_BTKS, v_BTKS, mask)
        else:
            y_BTHS = jax.nn.dot_product_attention(
                q_BTHS, k_BTKS, v_BTKS, mask=mask, is_causal=True, implementation=implementation
            )
        return self.out(y_BTHS.reshape(rows, length, width))


class GatedMLP(nnx.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, out_scale: float, rngs: nnx.Rngs):
        self.gate = linear(config, config.width, config.feed_forward, rngs)
        self.up = linear(config, config.width, config.feed_forward, rngs)
        self.down = linear(config, config.feed_forward, config.width, rngs, out_scale)

    def __call__(self, x_BTD: Array) -> Array:
        """Map each position on its own; returns [B, T, D]."""
        return self.down(jax.nn.silu(self.gate(x_BTD)) * self.up(x_BTD))


class Block(nnx.Module):
    """One layer: attention, then MLP, on a residual stream.

    With norm 'pre': x + f(norm(x)) for each branch f. With 'sandwich': norm(x + f(norm(x))), the
    form of Huginn (Geiping et al. 2025), where the second norm is on the residual stream itself.
    """

    def __init__(self, config: ModelConfig, out_scale: float, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config, config.width, rngs)
        self.attention = Attention(config, out_scale, rngs)
        self.mlp_norm = RMSNorm(config, config.width, rngs)
        self.mlp = GatedMLP(config, out_scale, rngs)
        if config.norm == "sandwich":
            self.attention_out_norm = RMSNorm(config, config.width, rngs)
            self.mlp_out_norm = RMSNorm(config, config.width, rngs)
        self.config = config

    def __call__(
        self, x_BTD: Array, mask: Array, angles: tuple[Array, Array], keys_B: Array | None
    ) -> Array:
        """Apply the layer. `keys_B` holds a random key per row for dropout, None without."""
        rate = self.config.dropout
        sandwich = self.config.norm == "sandwich"
        attention_keys = None if keys_B is None else fold_in(keys_B, 0)
        mlp_keys = None if keys_B is None else fold_in(keys_B, 1)
        with jax.named_scope("attention"):
            branch = self.attention(self.attention_norm(x_BTD), mask, angles)
        x_BTD = x_BTD + dropout(branch, rate, attention_keys)
        x_BTD = self.attention_out_norm(x_BTD) if sandwich else x_BTD
        with jax.named_scope("mlp"):
            branch = self.mlp(self.mlp_norm(x_BTD))
        x_BTD = x_BTD + dropout(branch, rate, mlp_keys)
        return self.mlp_out_norm(x_BTD) if sandwich else x_BTD


@jax.custom_vjp
def look_up(table_VD: Array, tokens: Array) -> Array:
    """Rows of a table; the gradient of each row is summed in at least float32.

    The transpose of plain indexing adds up in the table's dtype: in bfloat16, the gradient of a
    token that occurs 2,000 times with gradient 1 would stop at 256.
    """
    return table_VD[tokens]


def _look_up_forward(table_VD: Array, tokens: Array) -> tuple[Array, tuple[Array, Array]]:
    # Of the table only shape and dtype are used, which keeps no copy alive.
    return table_VD[tokens], (table_VD, tokens)


def _look_up_backward(residuals: tuple[Array, Array], grad: Array) -> tuple[Array, None]:
    table_VD, tokens = residuals
    wide = jnp.promote_types(table_VD.dtype, jnp.float32)
    # Summed for the N tokens that are there, then put into place: a float32 table would be the
    # largest temporary of a small batch.
    size = min(tokens.size, table_VD.shape[0])
    rows_N, place = jnp.unique(tokens, size=size, fill_value=len(table_VD), return_inverse=True)
    summed_ND = jnp.zeros((size, table_VD.shape[1]), wide).at[place].add(grad.astype(wide))
    grad_VD = jnp.zeros_like(table_VD).at[rows_N].set(summed_ND.astype(table_VD.dtype), mode="drop")
    return grad_VD, None


look_up.defvjp(_look_up_forward, _look_up_backward)


class Embedding(nnx.Module):
    """Token embedding, and the output head where the two are tied.

    Rows start with standard deviation sqrt(2 / (5 D)) and are scaled by sqrt(D) on the way in.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        shape = (config.vocabulary, config.width)
        init = truncated_normal(WEIGHT_SCALE / math.sqrt(config.width))
        self.table = nnx.Param(init(rngs.params(), shape, jnp.dtype(config.param_dtype)))
        self.config = config

    @jax.named_scope("embedding")
    def __call__(self, tokens_BT: Array) -> Array:
        """Look up tokens; returns [B, T, D]."""
        x_BTD = look_up(self.table[...], tokens_BT).astype(self.config.compute_dtype)
        return x_BTD * jnp.asarray(math.sqrt(self.config.width), x_BTD.dtype)
