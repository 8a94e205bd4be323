"""Floating-point operations per token, with depth and gradient depth counted.

A multiply-add is two operations. Matrix products alone are counted: norms, softmax, rotations
and the embedding look-up are below 2 % at any useful width. The backward pass of a matrix product
takes twice its forward pass. Under truncated backpropagation the core costs its forward pass n
times and its backward pass k times (6 * parameters * tokens is wrong there).
"""

from dataclasses import dataclass

from jaxlm.config import ModelConfig


@dataclass(frozen=True)
class FlopsPerToken:
    """Operations per token of one pass, in units of one (not giga)."""

    # Forward pass: everything once, the core n times.
    forward: float
    # Backward pass: twice the forward pass of what carries gradient.
    backward: float
    # What the backward pass computes again: the logits, and what `config.remat` does not keep of
    # the layers with gradient. With full that is all but their last product, whose result nothing
    # needs, and once more attention's scores; with dots it is attention's two products over
    # positions.
    recomputed: float

    @property
    def training(self) -> float:
        """Forward and backward, without recomputation: the numerator of MFU."""
        return self.forward + self.backward

    @property
    def executed(self) -> float:
        """Forward and backward, with recomputation: what the device has to do."""
        return self.training + self.recomputed


def layer_flops(config: ModelConfig, attended: float) -> float:
    """Forward operations per token of one layer.

    Args:
        config: architecture.
        attended: keys that a query is multiplied with, on average: T for attention that computes
            the full square and masks it, (T + 1) / 2 for causal attention's need.
    """
    width, size = config.width, config.head_size
    projections = width * size * (2 * config.heads + 2 * config.key_value_heads)
    mlp = 3 * width * config.feed_forward
    return 2.0 * (projections + mlp) + attention_flops(config, attended)


def attention_flops(config: ModelConfig, attended: float) -> float:
    """Forward operations per token of one layer's products over positions; see above."""
    return 2.0 * 2 * config.heads * config.head_size * attended


def recomputed_layer_flops(config: ModelConfig, attended: float) -> float:
    """Forward operations per token of one layer that its backward pass repeats."""
    if config.remat == "none":
        return 0.0
    if config.remat == "dots":
        return attention_flops(config, attended)
    again = attention_flops(config, attended) / 2  # scores, within the recomputation
    return layer_flops(config, attended) - 2.0 * config.width * config.feed_forward + again


def injection_flops(config: ModelConfig) -> float:
    """Forward operations per token of one input injection."""
    maps = {"add": 0, "concat": 2, "diagonal": 1}[config.recurrent.injection]
    return 2.0 * maps * config.width**2


def flops_per_token(
    config: ModelConfig, attended: float, depth: float = 0, backprop_depth: float = 0
) -> FlopsPerToken:
    """Count the operations per token.

    Args:
        config: architecture, with `vocabulary_size` set.
        attended: see :func:`layer_flops`.
        depth: core steps n, or their mean (recurrent models).
        backprop_depth: core steps with gradient k, or their mean.

    Returns:
        Operations of the forward pass, the backward pass and recomputation.
    """
    layer = layer_flops(config, attended)
    again = recomputed_layer_flops(config, attended)
    head = 2.0 * config.width * config.vocabulary
    if config.kind == "transformer":
        layers = config.transformer.layers
        once = layers * layer + head
        return FlopsPerToken(once, 2 * once, layers * again + head)
    parts = config.recurrent
    once = (parts.prelude_layers + parts.coda_layers) * layer
    injection = injection_flops(config)
    core = parts.core_layers * layer + injection
    with_gradient = once + backprop_depth * core + head
    # Rematerialisation is per layer: an injection's operands are kept.
    layers = parts.prelude_layers + parts.coda_layers + backprop_depth * parts.core_layers
    return FlopsPerToken(once + depth * core + head, 2 * with_gradient, layers * again + head)
