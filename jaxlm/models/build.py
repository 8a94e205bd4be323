"""From a configuration to parameters and to a model that applies them.

Parameters are a nested dict of arrays with ordinary names, such as
``params["core"]["stack"]["blocks"]["mlp"]["gate"]["kernel"]``; modules exist only while a
function is traced.
"""

import functools
from typing import Any

import jax
from flax import nnx
from jax import Array

from jaxlm.config import ModelConfig
from jaxlm.models.recurrent import RecurrentDepthLM
from jaxlm.models.transformer import TransformerLM

Params = dict[str, Any]


def _construct(
    config: ModelConfig, expected_depth: float, key: Array
) -> RecurrentDepthLM | TransformerLM:
    rngs = nnx.Rngs(params=key)
    if config.kind == "recurrent":
        return RecurrentDepthLM(config, expected_depth, rngs)
    return TransformerLM(config, rngs)


def init_params(config: ModelConfig, expected_depth: float, key: Array) -> Params:
    """Draw the parameters of a model.

    Args:
        config: architecture, with `vocabulary_size` set.
        expected_depth: mean number of core steps in training (scales the init).
        key: typed random key.

    Returns:
        Nested dict of arrays in `config.param_dtype`; stacked layers along axis 0.
    """
    return nnx.to_pure_dict(nnx.state(_construct(config, expected_depth, key), nnx.Param))


@functools.lru_cache(maxsize=32)
def _graph(config: ModelConfig) -> nnx.GraphDef:
    abstract = nnx.eval_shape(lambda: _construct(config, 1.0, jax.random.key(0)))
    return nnx.split(abstract)[0]


def apply(config: ModelConfig, params: Params) -> RecurrentDepthLM | TransformerLM:
    """The model that computes with `params`; cheap, meant for use inside traced functions."""
    return nnx.merge(_graph(config), params)


def logits(model: RecurrentDepthLM | TransformerLM, hidden: Array) -> Array:
    """Logits [..., V] in at least float32, for few positions; training uses losses.py."""
    head = model.head().astype(hidden.dtype)
    return jax.numpy.einsum(
        "...d,vd->...v",
        hidden,
        head,
        preferred_element_type=jax.numpy.promote_types(hidden.dtype, jax.numpy.float32),
    )
