"""Adafactor for stacked layers and bf16 weights: float32 statistics, factored over two axes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxlm.optim.ema import ema_8bit
from jaxlm.optim.rules import LayerRules, layer_axes, path_name, unused, unzip


def decay_of_half_life(half_life: float, per_update: float) -> float:
    """Decay rate beta of a running mean whose weights halve every `half_life`.

    Args:
        half_life: after how much a number counts half, for example 10 million tokens.
        per_update: how much of it an update makes, for example 131,072 tokens.

    Example:
        >>> from jaxlm.optim import decay_of_half_life
        >>> round(decay_of_half_life(10e6, 131_072), 5)
        0.99096

    References:
        Marek et al., "Small Batch Size Training for Language Models", 2025: a half-life of the
        second moment in tokens carries over between batch sizes where a beta2 does not.
    """
    return 0.5 ** (per_update / half_life)


class FactoredRmsState(NamedTuple):
    """State of :func:`scale_by_factored_rms`."""

    # Updates made, int32.
    step: Array
    # Per leaf: mean over columns of the squared gradient, [..., m]; [..., 1] where not factored.
    row: optax.Updates
    # Per leaf: mean over rows of the squared gradient, [..., n]; [..., 1] where not factored.
    column: optax.Updates
    # Per leaf: squared gradient of each element; [..., 1] where factored.
    full: optax.Updates


def _is_factored(shape: tuple[int, ...], layers: int, min_factored: int) -> bool:
    matrix = shape[layers:]
    return len(matrix) == 2 and min(matrix) >= min_factored


def scale_by_factored_rms(
    *,
    decay_exponent: float = 0.8,
    max_decay: float = 0.999,
    fixed_decay: float | None = None,
    min_factored: int = 32,
    epsilon: float = 1e-30,
    clipping_threshold: float | None = 1.0,
    layer_rules: LayerRules = (),
) -> optax.GradientTransformation:
    """Divide updates by the root of a factored running mean of their squares.

    For a matrix G of m rows and n columns, with R and C the running means of its squares over
    columns and rows, the estimate is V = R C' / mean(R), and U = G / sqrt(V) is scaled down to a
    root mean square of at most `clipping_threshold`. State is m + n numbers instead of m n.

    Differences from the paper (Algorithm 4) and from `optax.scale_by_factored_rms`:
      1. Statistics are float32 whatever the parameters are. In bfloat16 a running mean whose
         weight 1 - beta2 is below 1/512 can no longer fall.
      2. Factored axes are the last two after the stacked layers, not the two largest; clipping is
         per layer of a stacked leaf, not over the leaf.
      3. beta2 = min(1 - t^-decay_exponent, max_decay): uncapped, after 100,000 updates the mean
         reaches back over 10,000 of them.
      4. With `fixed_decay`, beta2 is that number, corrected for the empty start as in Adam:
         beta2 (1 - beta2^(t-1)) / (1 - beta2^t).
      5. Row and column statistics are means where the paper has sums (equal after division).

    Args:
        decay_exponent: exponent of beta2's approach to one.
        max_decay: upper limit of beta2.
        fixed_decay: beta2 of every update instead of the growing one; see
            :func:`decay_of_half_life`.
        min_factored: matrices with a smaller side keep a full second moment.
        epsilon: added to squared gradients; keeps zero gradients at zero.
        clipping_threshold: largest root mean square of a layer's update; None is off.
        layer_rules: see :func:`jaxlm.optim.rules.layer_axes`.

    Returns:
        A transform with state :class:`FactoredRmsState`; updates are float32 (or wider).

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxlm.optim import scale_by_factored_rms
        >>> tx = scale_by_factored_rms()
        >>> grads = {"w": jnp.full((64, 128), -3.0, jnp.bfloat16)}
        >>> updates, state = tx.update(grads, tx.init(grads))
        >>> float(updates["w"][0, 0]), state.row["w"].shape, state.column["w"].shape
        (-1.0, (64,), (128,))

    References:
        Shazeer & Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", 2018.
        Zhai et al., "Scaling Vision Transformers", 2022 (the cap on beta2).
    """

    def init_fn(params: optax.Params) -> FactoredRmsState:
        def leaf(path: tuple, p: Array) -> tuple[Array, Array, Array]:
            wide = jnp.promote_types(p.dtype, jnp.float32)
            layers = layer_axes(path_name(path), p.ndim, layer_rules)

            def none() -> Array:
                return unused(p.shape[:layers], wide)

            if _is_factored(p.shape, layers, min_factored):
                row, column = p.shape[:-1], (*p.shape[:-2], p.shape[-1])
                return jnp.zeros(row, wide), jnp.zeros(column, wide), none()
            return none(), none(), jnp.zeros(p.shape, wide)

        leaves = jax.tree_util.tree_map_with_path(leaf, params)
        return FactoredRmsState(jnp.zeros((), jnp.int32), *unzip(params, leaves, 3))

    def update_fn(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, FactoredRmsState]:
        del params
        assert isinstance(state, FactoredRmsState)
        step = jnp.asarray(optax.safe_increment(state.step))
        t = step.astype(jnp.result_type(float))  # float64 where that is on
        if fixed_decay is None:
            beta2 = jnp.minimum(1.0 - t**-decay_exponent, max_decay)
        else:
            beta2 = fixed_decay * (1 - fixed_decay ** (t - 1)) / (1 - fixed_decay**t)

        def leaf(path: tuple, g: Array, row: Array, column: Array, full: Array):
            layers = layer_axes(path_name(path), g.ndim, layer_rules)
            wide = jnp.promote_types(g.dtype, jnp.float32)
            decay = beta2.astype(wide)
            g = g.astype(wide)
            square = jnp.square(g) + epsilon
            if _is_factored(g.shape, layers, min_factored):
                row = decay * row + (1 - decay) * jnp.mean(square, axis=-1)
                column = decay * column + (1 - decay) * jnp.mean(square, axis=-2)
                of_row = jax.lax.rsqrt(row / jnp.mean(row, axis=-1, keepdims=True))
                u = g * of_row[..., :, None] * jax.lax.rsqrt(column)[..., None, :]
            else:
                full = decay * full + (1 - decay) * square
                u = g * jax.lax.rsqrt(full)
            if clipping_threshold is not None:
                u /= jnp.maximum(1.0, _layer_rms(u, layers) / clipping_threshold)
            return u, row, column, full

        leaves = jax.tree_util.tree_map_with_path(
            leaf, updates, state.row, state.column, state.full
        )
        scaled, row, column, full = unzip(updates, leaves, 4)
        return scaled, FactoredRmsState(step, row, column, full)

    return optax.GradientTransformation(init_fn, update_fn)


def _layer_rms(x: Array, layers: int) -> Array:
    """Root mean square of each layer, with the axes kept."""
    axes = tuple(range(layers, x.ndim))
    return jnp.sqrt(jnp.mean(jnp.square(x), axis=axes, keepdims=True))


def scale_by_param_rms(
    min_scale: float = 1e-3, layer_rules: LayerRules = ()
) -> optax.GradientTransformation:
    """Multiply updates by the root mean square of their parameter, layer by layer.

    Args:
        min_scale: smallest factor, so that parameters that are zero can leave it.
        layer_rules: see :func:`jaxlm.optim.rules.layer_axes`.

    Returns:
        A transform without state; `params` must be given to `update`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxlm.optim import scale_by_param_rms
        >>> tx = scale_by_param_rms()
        >>> params = {"w": jnp.array([3.0, 4.0])}  # root mean square sqrt(12.5)
        >>> updates, _ = tx.update({"w": jnp.ones(2)}, tx.init(params), params)
        >>> round(float(updates["w"][0]), 5)
        3.53553

    References:
        Shazeer & Stern 2018, section 8 ("relative step size").
    """

    def update_fn(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        if params is None:
            raise ValueError(
                "scale_by_param_rms needs the parameters: update(updates, state, params)"
            )

        def leaf(path: tuple, u: Array, p: Array) -> Array:
            layers = layer_axes(path_name(path), p.ndim, layer_rules)
            wide = jnp.promote_types(p.dtype, jnp.float32)
            return u * jnp.maximum(_layer_rms(p.astype(wide), layers), min_scale)

        return jax.tree_util.tree_map_with_path(leaf, updates, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update_fn)


def adafactor(
    learning_rate: optax.ScalarOrSchedule,
    *,
    decay_exponent: float = 0.8,
    max_decay: float = 0.999,
    fixed_decay: float | None = None,
    min_factored: int = 32,
    epsilon: float = 1e-30,
    clipping_threshold: float | None = 1.0,
    multiply_by_param_scale: bool = True,
    min_param_scale: float = 1e-3,
    momentum: float | None = None,
    momentum_dtype: jax.typing.DTypeLike = jnp.bfloat16,
    weight_decay: float = 0.0,
    mask: optax.MaskOrFn = None,
    layer_rules: LayerRules = (),
) -> optax.GradientTransformationExtraArgs:
    """Adafactor with float32 statistics, per-layer clipping and decay scaled by the rate.

    Weight decay is decoupled and multiplied by the learning rate, as in AdamW and unlike
    `optax.adafactor`: at rate 1e-2 and decay 0.1 a weight of 1 moves by -1e-3. It is not multiplied
    by the parameter's scale. Momentum, if any, averages the scaled updates before the rate, so that
    a change of rate acts at once. `optax.inject_hyperparams` needs
    ``static_args=("min_factored", "momentum_dtype")``, which decide shapes and types.

    PyTorch's Adafactor factors every matrix and limits the relative rate to 1 / sqrt(t): with
    ``min_factored=1`` and rates below that limit the updates are the same.

    Args:
        learning_rate: rate or schedule; relative to the parameters' scale unless
            `multiply_by_param_scale` is False.
        decay_exponent: see :func:`scale_by_factored_rms`.
        max_decay: see :func:`scale_by_factored_rms`.
        fixed_decay: see :func:`scale_by_factored_rms`.
        min_factored: see :func:`scale_by_factored_rms`.
        epsilon: see :func:`scale_by_factored_rms`.
        clipping_threshold: see :func:`scale_by_factored_rms`.
        multiply_by_param_scale: multiply by the root mean square of each layer's parameters.
        min_param_scale: smallest such factor.
        momentum: decay rate of the running mean of updates; None keeps none.
        momentum_dtype: its storage type: float32, bfloat16 (2 bytes a parameter) or int8 (1 byte,
            see :func:`ema_8bit`).
        weight_decay: decay per unit of learning rate.
        mask: which parameters decay, a tree of bools or a function of the parameters; None is all.
        layer_rules: see :func:`jaxlm.optim.rules.layer_axes`.

    Returns:
        A transform; `params` must be given to `update`.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from jaxlm.optim import adafactor
        >>> tx = adafactor(1e-2, weight_decay=0.1)
        >>> params = {"w": jnp.ones((64, 64))}
        >>> updates, _ = tx.update({"w": jnp.zeros((64, 64))}, tx.init(params), params)
        >>> round(float(updates["w"][0, 0]), 6)
        -0.001

    References:
        Shazeer & Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", 2018.
    """
    transforms = [
        scale_by_factored_rms(
            decay_exponent=decay_exponent,
            max_decay=max_decay,
            fixed_decay=fixed_decay,
            min_factored=min_factored,
            epsilon=epsilon,
            clipping_threshold=clipping_threshold,
            layer_rules=layer_rules,
        )
    ]
    if multiply_by_param_scale:
        transforms.append(scale_by_param_rms(min_param_scale, layer_rules))
    if momentum is not None and jnp.dtype(momentum_dtype) == jnp.int8:
        transforms.append(ema_8bit(momentum, layer_rules=layer_rules))
    elif momentum is not None:
        transforms.append(optax.ema(momentum, debias=False, accumulator_dtype=momentum_dtype))
    transforms.append(optax.add_decayed_weights(weight_decay, mask))
    transforms.append(optax.scale_by_learning_rate(learning_rate))
    return optax.chain(*transforms)
