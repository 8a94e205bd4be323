"""The formula against XLA's own count on models that are written out without loops."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers import layers_one_by_one
from jax.extend.core import jaxprs_in_params
from jax.interpreters import partial_eval

from jaxlm.config import ModelConfig, RecurrentConfig, TransformerConfig
from jaxlm.losses import chunked_cross_entropy
from jaxlm.models import layers
from jaxlm.models.build import apply, init_params
from jaxlm.models.flops import flops_per_token
from jaxlm.models.layers import attention_mask, rotary_angles

T = 32


def model(kind, **settings):
    return ModelConfig(
        kind=kind,
        vocabulary_size=512,
        width=256,
        heads=4,
        kv_heads=2,
        feed_forward=768,
        recurrent=RecurrentConfig(prelude_layers=1, core_layers=2, coda_layers=1, **settings),
        transformer=TransformerConfig(layers=3),
    )


def loss(config, params, tokens, depth, backprop):
    lm = apply(config, params)
    mask = attention_mask(jnp.ones_like(tokens))
    positions = jnp.broadcast_to(jnp.arange(T), tokens.shape)
    angles = rotary_angles(positions, config.head_size, config.rope_base)

    def stack(stack, x):
        return layers_one_by_one(stack, x, mask, angles)

    x = lm.embedding(tokens)
    if config.kind == "transformer":
        x = stack(lm.stack, x)
    else:
        e = stack(lm.prelude, x)
        x = jnp.zeros_like(e)
        for step in range(depth):
            if step < depth - backprop:
                frozen = jax.lax.stop_gradient(nnx.state(lm.core))
                core = nnx.merge(nnx.graphdef(lm.core), frozen)
                x = stack(core.stack, core.injection(x, jax.lax.stop_gradient(e)))
            else:
                x = stack(lm.core.stack, lm.core.injection(x, e))
        x = stack(lm.coda, x)
    logits = lm.final_norm(x) @ lm.head().T
    return jnp.sum(jax.nn.logsumexp(logits, axis=-1) - logits[..., 0])


def count(function, *arguments):
    analysis = jax.jit(function).lower(*arguments).compile().cost_analysis()
    return analysis["flops"] / T


@pytest.mark.parametrize(
    ("config", "depth", "backprop"),
    [
        (model("transformer"), 0, 0),
        (model("recurrent", injection="concat"), 3, 1),
        (model("recurrent", injection="add"), 2, 2),
        (model("recurrent", injection="diagonal"), 3, 2),
    ],
    ids=["transformer", "concat", "add", "diagonal"],
)
def test_formula_equals_xla_within_2_percent(config, depth, backprop):
    params = init_params(config, 3.0, jax.random.key(0))
    tokens = jnp.zeros((1, T), jnp.int32)
    # XLA counts the body of a loop of traced length once: nothing is recomputed, and no loop made
    # by hand. Its attention computes the whole square of T keys a query.
    config = dataclasses.replace(config, remat="none")
    flops = flops_per_token(config, T, depth, backprop)
    forward = count(lambda p: loss(config, p, tokens, depth, backprop), params)
    assert flops.forward == pytest.approx(forward, rel=0.02)
    both = count(jax.value_and_grad(lambda p: loss(config, p, tokens, depth, backprop)), params)
    assert flops.training == pytest.approx(both, rel=0.02)


def test_by_hand():
    """Width 256, 4 heads of 64, 2 of them for keys, MLP 768, vocabulary 512, 3 layers, 32 keys."""
    layer = 2 * (256 * 256 * 2 + 256 * 128 * 2 + 2 * 256 * 32 + 3 * 256 * 768)
    head = 2 * 256 * 512
    flops = flops_per_token(model("transformer"), 32)
    assert flops.forward == 3 * layer + head
    assert flops.backward == 2 * flops.forward
    recurrent = flops_per_token(
        model("recurrent", injection="concat"), 32, depth=12, backprop_depth=4
    )
    core = 2 * layer + 2 * 2 * 256 * 256
    assert recurrent.forward == 2 * layer + 12 * core + head
    assert recurrent.backward == 2 * (2 * layer + 4 * core + head)


def products(jaxpr) -> float:
    """Operations of the matrix products in a jaxpr, loops counted as often as they run."""
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            contracted = equation.params["dimension_numbers"][0][0]
            shape = equation.invars[0].aval.shape
            total += 2 * equation.outvars[0].aval.size * math.prod(shape[i] for i in contracted)
        elif equation.primitive.name == "while":
            continue  # the loop without gradient, which does not run here
        else:
            times = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
            inner = [products(sub) for sub in jaxprs_in_params(equation.params)]
            # The branch of a conditional that works is the one that counts.
            total += (
                max(inner, default=0) if equation.primitive.name == "cond" else times * sum(inner)
            )
    return total


@pytest.mark.parametrize(
    ("remat", "scores_at_once"), [("none", 0), ("dots", 0), ("full", 0), ("full", 2**20)]
)
@pytest.mark.parametrize("kind", ["recurrent", "transformer"])
def test_rematerialisation_costs_what_the_formula_says(kind, remat, scores_at_once, monkeypatch):
    """The training loss as it is, scans and all: every step has gradient."""
    monkeypatch.setattr(layers, "SCORES_AT_ONCE", scores_at_once)
    config = dataclasses.replace(model(kind), remat=remat)

    def summed(params):
        lm = apply(config, params)
        tokens = jnp.zeros((1, T), jnp.int32)
        keys = jax.random.split(jax.random.key(0), 1)
        hidden = lm(
            tokens,
            tokens + 1,
            tokens,
            keys,
            train=True,
            depth=3,
            backprop_depth=3,
            max_backprop_depth=3,
        )
        sums = chunked_cross_entropy(
            hidden[0], lm.head(), tokens[0], tokens[0] + 1, chunk_tokens=16
        )
        return sums.cross_entropy

    params = jax.eval_shape(lambda: init_params(config, 3.0, jax.random.key(0)))
    jaxpr = jax.make_jaxpr(jax.value_and_grad(summed))(params).jaxpr
    jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    flops = flops_per_token(config, T, 3, 3)
    assert products(jaxpr) / T == pytest.approx(flops.executed, rel=0.01)


def test_recomputation_by_hand():
    """The models of test_by_hand. The chunked loss computes its logits again in any case."""
    head, attention = 2 * 256 * 512, 2 * 2 * 256 * 32
    layer = 2 * (256 * 256 * 2 + 256 * 128 * 2 + 3 * 256 * 768) + attention
    again = {"none": 0, "dots": attention, "full": layer - 2 * 256 * 768 + attention // 2}
    for remat, per_layer in again.items():
        transformer = dataclasses.replace(model("transformer"), remat=remat)
        flops = flops_per_token(transformer, 32)
        assert flops.recomputed == 3 * per_layer + head
        assert flops.executed == 3 * (3 * layer + head) + flops.recomputed
        # Twelve steps of two core layers, of which four with gradient, are repeated only there.
        recurrent = dataclasses.replace(model("recurrent"), remat=remat)
        flops = flops_per_token(recurrent, 32, depth=12, backprop_depth=4)
        assert flops.recomputed == (2 + 4 * 2) * per_layer + head
