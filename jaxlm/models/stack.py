"""Layers stacked along axis 0 of every parameter, and applied one after another by a scan."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxlm.config import ModelConfig
from jaxlm.models.layers import Block, fold_in


def _rematerialise(function: Any, remat: str) -> Any:
    """Wrap a scan body so that its backward pass recomputes what `remat` does not keep."""
    if remat == "none":
        return function
    policies = jax.checkpoint_policies
    policy = policies.dots_with_no_batch_dims_saveable if remat == "dots" else None
    # Common-subexpression elimination cannot undo the recomputation across a scan's iterations.
    return jax.checkpoint(function, prevent_cse=False, policy=policy)


class Stack(nnx.Module):
    """`layers` blocks; each parameter has the layer as its first axis."""

    def __init__(
        self, config: ModelConfig, layers: int, first_layer: int, out_scale: float, rngs: nnx.Rngs
    ):
        @nnx.split_rngs(splits=layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def build(rngs: nnx.Rngs) -> Block:
            return Block(config, out_scale, rngs)

        self.blocks = build(rngs)
        self.layers = layers
        # Dropout keys of different stacks must differ: number layers through the whole model.
        self.first_layer = first_layer
        self.remat = config.remat

    def __call__(
        self, x_BTD: Array, mask: Array, angles: tuple[Array, Array], keys_B: Array | None
    ) -> Array:
        """Apply all layers in turn; arguments as for :class:`Block`."""
        graph, params = nnx.split(self.blocks)

        @jax.named_scope("layer")
        def layer(x_BTD: Array, scanned: tuple[nnx.State, Array]) -> tuple[Array, None]:
            layer_params, layer_id = scanned
            layer_keys = None if keys_B is None else fold_in(keys_B, layer_id)
            return nnx.merge(graph, layer_params)(x_BTD, mask, angles, layer_keys), None

        layer_ids = self.first_layer + jnp.arange(self.layers)
        x_BTD, _ = jax.lax.scan(_rematerialise(layer, self.remat), x_BTD, (params, layer_ids))
        return x_BTD
