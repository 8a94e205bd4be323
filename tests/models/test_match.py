import dataclasses

import jax
import pytest
from helpers import params_of, tiny_model

from jaxlm.config import Config, DataConfig, DepthConfig, ModelConfig, RecurrentConfig
from jaxlm.models.match import (
    matching_transformer,
    mean_depths,
    stored_parameters,
    training_flops,
)

RECURRENT = Config(
    data=DataConfig(sequence_length=2048),
    model=ModelConfig(
        vocabulary_size=100_352,
        width=1024,
        heads=16,
        feed_forward=2816,
        recurrent=RecurrentConfig(prelude_layers=2, core_layers=4, coda_layers=2),
    ),
    depth=DepthConfig(mean=6.0, maximum=12, backprop=4),
)


@pytest.mark.parametrize(
    "config",
    [
        tiny_model(),
        tiny_model(injection="add", norm="sandwich", kv_heads=2),
        tiny_model(injection="diagonal", qk_norm=False, tie_embeddings=False),
        tiny_model("transformer"),
        tiny_model("transformer", norm="sandwich", tie_embeddings=False, kv_heads=1),
    ],
)
def test_the_count_is_that_of_the_model(config):
    assert stored_parameters(config) == sum(x.size for x in jax.tree.leaves(params_of(config)))


def test_means_are_those_of_the_draws():
    fixed = dataclasses.replace(RECURRENT, depth=DepthConfig(distribution="fixed", mean=5.0))
    assert mean_depths(fixed, 10) == (5.0, 4.0)
    depth, backprop = mean_depths(RECURRENT, 5000)
    assert depth == pytest.approx(5.8, abs=0.15)  # the cap of 12 takes 0.2 off the mean of 6
    assert 3 < backprop < 4


@pytest.mark.parametrize("by", ["parameters", "flops"])
def test_the_match_is_close_and_shaped_alike(by):
    model = matching_transformer(RECURRENT, by, 1000)
    matched = dataclasses.replace(RECURRENT, model=model)
    if by == "parameters":
        assert stored_parameters(model) == pytest.approx(
            stored_parameters(RECURRENT.model), rel=1e-3
        )
        assert model.transformer.layers == 8
    else:
        assert training_flops(matched, 1000) == pytest.approx(
            training_flops(RECURRENT, 1000), rel=1e-3
        )
        # 4 layers run once; 4 run 5.8 times forwards and 3.5 times backwards.
        assert model.transformer.layers in range(20, 24)
    assert model.feed_forward == pytest.approx(2816, rel=0.15)
    assert model.feed_forward % 8 == 0
    assert (model.width, model.heads, model.vocabulary_size) == (1024, 16, 100_352)


def test_only_recurrent_models_are_matched():
    with pytest.raises(ValueError, match="only a recurrent model"):
        matching_transformer(
            dataclasses.replace(RECURRENT, model=tiny_model("transformer")), "flops", 10
        )
