"""Memory of the chunked and of the plain cross-entropy on an RTX 3090, by XLA's own plan.

    python benchmarks/loss_memory.py

Needs the extra `plan`; no GPU. Value and gradient for 8,192 tokens, width 3,072, vocabulary
100,352, bf16 weights and activations.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"

import jax
import jax.numpy as jnp

from jaxlm.losses import chunked_cross_entropy
from jaxlm.memory.devices import RTX3090
from jaxlm.memory.plan import compile_for

TOKENS, WIDTH, VOCABULARY = 8192, 3072, 100_352


def plain(hidden, head, targets, mask):
    """Cross-entropy with all logits at once."""
    logits = jnp.einsum("nd,vd->nv", hidden, head, preferred_element_type=jnp.float32)
    losses = jax.nn.logsumexp(logits, axis=-1) - logits[jnp.arange(TOKENS), targets]
    return jnp.sum(losses * mask)


def main() -> None:
    """Print one table."""
    arguments = (
        jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.bfloat16),
        jax.ShapeDtypeStruct((VOCABULARY, WIDTH), jnp.bfloat16),
        jax.ShapeDtypeStruct((TOKENS,), jnp.int32),
        jax.ShapeDtypeStruct((TOKENS,), jnp.bool_),
    )
    accumulator = 4 * VOCABULARY * WIDTH
    print(f"{'form':<22}{'temporaries':>14}{'without the float32 accumulator':>34}")
    for chunk in (256, 512, 1024, 2048, None):

        def loss(hidden, head, targets, mask, chunk=chunk):
            if chunk is None:
                return plain(hidden, head, targets, mask)
            sums = chunked_cross_entropy(hidden, head, targets, mask, chunk_tokens=chunk)
            return sums.cross_entropy

        compiled = compile_for(RTX3090, jax.value_and_grad(loss, argnums=(0, 1)), *arguments)
        analysis = compiled.memory_analysis()
        assert analysis is not None
        size = analysis.temp_size_in_bytes
        name = "plain" if chunk is None else f"chunks of {chunk} tokens"
        beyond = "-" if chunk is None else f"{(size - accumulator) / 1e9:.2f} GB"
        print(f"{name:<22}{size / 1e9:>11.2f} GB{beyond:>34}")


if __name__ == "__main__":
    main()
