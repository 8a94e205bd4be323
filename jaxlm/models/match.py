"""Transformers that a recurrent-depth model can be compared with fairly.

Looping buys quality per stored parameter and costs compute, so one comparison is never enough: a
baseline of equal stored parameters is cheaper to run, one of equal training compute is larger.
"""

import dataclasses
from typing import Literal

from jaxlm.config import Config, ModelConfig, TransformerConfig
from jaxlm.models.depth import draw_depth, planned_depths
from jaxlm.models.flops import flops_per_token


def stored_parameters(config: ModelConfig) -> int:
    """Number of parameters of a model, from its configuration alone (the core counts once)."""
    width, size = config.width, config.head_size
    norms = (4 if config.norm == "sandwich" else 2) * width + (2 * size if config.qk_norm else 0)
    heads = 2 * config.heads + 2 * config.key_value_heads
    layer = width * size * heads + 3 * width * config.feed_forward + norms
    tables = (1 if config.tie_embeddings else 2) * config.vocabulary * width
    outside = tables + width  # the final norm
    if config.kind == "transformer":
        return config.transformer.layers * layer + outside
    parts = config.recurrent
    layers = parts.prelude_layers + parts.core_layers + parts.coda_layers
    injection = {"add": 0, "concat": 2 * width**2, "diagonal": width**2 + 2 * width}
    pre_norms = 2 * width if config.norm == "pre" else 0  # of the prelude's output and the state
    return layers * layer + injection[parts.injection] + pre_norms + outside


def mean_depths(config: Config, updates: int) -> tuple[float, float]:
    """Mean depth n and gradient depth k over the draws that a run of `updates` will make."""
    total = total_gradient = 0
    for update in range(updates):
        mean, bound = planned_depths(config, update)
        depth = draw_depth(config.depth, config.run.seed, update, mean)
        total, total_gradient = total + depth, total_gradient + min(depth, bound)
    return total / updates, total_gradient / updates


def training_flops(config: Config, updates: int) -> float:
    """Operations per token of training, causal attention's need, averaged over a run's draws."""
    attended = (config.data.sequence_length + 1) / 2
    depth, backprop = (0.0, 0.0)
    if config.model.kind == "recurrent":
        depth, backprop = mean_depths(config, updates)
    return flops_per_token(config.model, attended, depth, backprop).training


def matching_transformer(
    config: Config, by: Literal["parameters", "flops"], updates: int
) -> ModelConfig:
    """The Transformer of equal stored parameters, or of equal training operations per token.

    Width, heads, vocabulary and everything else stay; the number of layers is the one whose MLP
    comes closest to the recurrent model's, and the MLP's hidden width, a multiple of 8, makes up
    the rest.

    Args:
        config: a recurrent model with `vocabulary_size` set, its depths and sequence length.
        by: what is to be equal.
        updates: length of the run over which sampled depths are averaged.

    Returns:
        The Transformer's configuration. It differs from the target by less than half a step of 8
        in its MLPs.

    Raises:
        ValueError: the model is not recurrent, or is too small for any such Transformer.
    """
    if config.model.kind != "recurrent":
        raise ValueError("only a recurrent model is matched with a Transformer")

    def cost(layers: int, feed_forward: int) -> float:
        model = dataclasses.replace(
            config.model,
            kind="transformer",
            feed_forward=feed_forward,
            transformer=TransformerConfig(layers=layers),
        )
        if by == "parameters":
            return float(stored_parameters(model))
        return training_flops(dataclasses.replace(config, model=model), updates)

    target = (
        float(stored_parameters(config.model))
        if by == "parameters"
        else training_flops(config, updates)
    )
    wanted = config.model.feed_forward
    best: tuple[float, int, int] | None = None
    layers = 1
    while cost(layers, 8) <= target:
        slope = (cost(layers, 16) - cost(layers, 8)) / 8
        feed_forward = 8 * max(1, round((8 + (target - cost(layers, 8)) / slope) / 8))
        distance = max(feed_forward / wanted, wanted / feed_forward)
        if best is None or distance < best[0]:
            best = (distance, layers, feed_forward)
        layers += 1
    if best is None:
        raise ValueError(f"no Transformer of width {config.model.width} is as small as this model")
    return dataclasses.replace(
        config.model,
        kind="transformer",
        feed_forward=best[2],
        transformer=TransformerConfig(layers=best[1]),
    )
