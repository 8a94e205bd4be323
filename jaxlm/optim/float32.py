"""Optimizer arithmetic and state in float32, whatever the dtype of the weights."""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def to_float32(tree: optax.Params) -> optax.Params:
    """Every leaf in float32, or wider where it already is."""
    return jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), tree)


def in_float32(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Show a transform float32 gradients and parameters, so that its state is float32.

    Most optax transforms keep their state in the parameters' dtype. In bfloat16 a second moment
    cannot fall (0.999 rounds to 1) and a first moment loses a part of every gradient. Updates come
    out in float32; end the chain with a rounding transform, or add them with
    :func:`jaxlm.optim.apply_updates`. Under `jit` the float32 copies are fused away.

    Args:
        inner: any transform.

    Returns:
        The transform with `inner`'s state, made for float32 parameters.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from jaxlm.optim import in_float32
        >>> params = {"w": jnp.ones((2, 2), jnp.bfloat16)}
        >>> optax.adam(1e-3).init(params)[0].nu["w"].dtype.name
        'bfloat16'
        >>> in_float32(optax.adam(1e-3)).init(params)[0].nu["w"].dtype.name
        'float32'
    """
    inner = optax.with_extra_args_support(inner)

    def init_fn(params: optax.Params) -> optax.OptState:
        return inner.init(to_float32(params))

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        wide = None if params is None else to_float32(params)
        return inner.update(to_float32(updates), state, wide, **extra_args)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
