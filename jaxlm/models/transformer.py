"""Plain Transformer language model, from the same blocks as the recurrent-depth model.

Shape legend: B rows, T positions, D width, V vocabulary.
"""

import math

import jax
from flax import nnx
from jax import Array

from jaxlm.config import ModelConfig
from jaxlm.models.layers import (
    EMBEDDING_DROPOUT,
    LAYERS,
    Embedding,
    attention_mask,
    dropout,
    final_norm,
    fold_in,
    rotary_angles,
)
from jaxlm.models.stack import Stack


class TransformerLM(nnx.Module):
    """Embedding, `config.transformer.layers` blocks, final norm."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        layers = config.transformer.layers
        self.embedding = Embedding(config, rngs)
        self.stack = Stack(config, layers, 0, 1.0 / math.sqrt(2.0 * layers), rngs)
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
        depth: int | Array = 0,
        backprop_depth: int | Array = 0,
        max_backprop_depth: int = 0,
    ) -> Array:
        """Compute hidden states [B, T, D]; arguments as for RecurrentDepthLM, depths unused."""
        del depth, backprop_depth, max_backprop_depth  # a transformer has one depth
        config = self.config
        mask = attention_mask(segment_ids_BT)
        angles = rotary_angles(positions_BT, config.head_size, config.rope_base)
        x_BTD = self.embedding(tokens_BT)
        x_BTD = dropout(
            x_BTD, config.dropout, fold_in(keys_B, EMBEDDING_DROPOUT) if train else None
        )
        with jax.named_scope("stack"):
            x_BTD = self.stack(x_BTD, mask, angles, fold_in(keys_B, LAYERS) if train else None)
        with jax.named_scope("final_norm"):
            return self.final_norm(x_BTD)

    def head(self) -> Array:
        """The output matrix [V, D]: logits are hidden states times its transpose."""
        table = self.embedding if self.config.tie_embeddings else self.output
        return table.table[...]
