"""Eight bits a number with a float32 scale per block of the last axis, for optimizer state."""

import math
import re
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

# Largest code of a signed and of an unsigned number.
SIGNED, UNSIGNED = 127, 255


def _blocks(x: Array, block: int) -> Array:
    """[..., n] as [..., ceil(n / block), block], with zeros after the end."""
    padding = -x.shape[-1] % block
    if padding:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)])
    return x.reshape(*x.shape[:-1], -1, block)


def spread(scale: Array, block: int, size: int) -> Array:
    """[..., blocks] repeated to the elements they scale, [..., size]."""
    return jnp.repeat(scale, block, axis=-1)[..., :size]


def quantize(
    x: Array, block: int, *, largest: int = SIGNED, noise: Array | None = None
) -> tuple[Array, Array]:
    """Code numbers linearly between minus and plus the largest magnitude of their block.

    Args:
        x: float32, [..., n]. Not negative where `largest` is 255.
        block: numbers of the last axis that share a scale; the last block may be shorter.
        largest: code of the largest magnitude, 127 (int8) or 255 (uint8).
        noise: uniform in (0, 1), the shape of x: rounds down or up at random, right on average and
            at most one step of scale / largest off. None rounds to nearest, at most half a step
            off. A number that has a code keeps it either way; zero's is 0.

    Returns:
        Codes, [..., n], and scales, float32 [..., ceil(n / block)].

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxlm.optim.quantization import quantize
        >>> codes, scale = quantize(jnp.array([0.0, 1.0, -2.0, 8.0, 3.0]), block=4)
        >>> codes.tolist(), scale.tolist()
        ([0, 16, -32, 127, 127], [8.0, 3.0])
    """
    scale = jnp.max(jnp.abs(_blocks(x, block)), axis=-1)
    steps = largest / jnp.where(scale > 0, scale, 1.0)
    # The smallest scales have no finite reciprocal; what they scale is as good as zero.
    steps = jnp.where(jnp.isfinite(steps), steps, 0.0)
    scaled = x * spread(steps, block, x.shape[-1])
    codes = jnp.round(scaled) if noise is None else jnp.floor(scaled + noise)
    lowest = -largest if largest == SIGNED else 0
    codes = jnp.clip(codes, lowest, largest)
    return codes.astype(jnp.int8 if largest == SIGNED else jnp.uint8), scale


def dequantize(codes: Array, scale: Array, block: int) -> Array:
    """The numbers that :func:`quantize` coded, float32, [..., n]."""
    largest = SIGNED if codes.dtype == jnp.int8 else UNSIGNED
    return codes.astype(jnp.float32) * spread(scale / largest, block, codes.shape[-1])


def is_quantized(
    name: str, shape: tuple[int, ...], layers: int, min_size: int, full_precision: Sequence[str]
) -> bool:
    """Whether a leaf's state is kept in 8 bits.

    It is for matrices of at least `min_size` elements (in one layer, where layers are stacked)
    whose path has none of the patterns `full_precision`. Vectors are too few to matter, and rows
    of embeddings get too few gradients.

    Args:
        name: path of the leaf.
        shape: its shape.
        layers: number of leading axes that are stacked layers.
        min_size: smaller matrices stay in float32.
        full_precision: regular expressions searched for in the path.
    """
    one = shape[layers:]
    return (
        len(one) >= 2
        and math.prod(one) >= min_size
        and not any(re.search(pattern, name) for pattern in full_precision)
    )
