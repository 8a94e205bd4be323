"""Caches whose records tell their position; without JAX, so that processes can be forked."""

import numpy as np

from jaxlm.data.teacher import CacheWriter

V, K = 65_000, 3


def description(**changes):
    base = {
        "teacher": {"kind": "jaxlm", "name": "t", "depth": 4},
        "context": {"kind": "packed rows", "length": 32, "overlap": 0},
        "tokenizer": None,
        "vocabulary": None,
        "vocabulary_size": V,
        "k": K,
        "dtype": "float16",
    }
    return {**base, **changes}


def records(first, stop):
    """Records that tell their position."""
    positions = np.arange(first, stop)
    ids = positions[:, None] + np.arange(K)
    return ids, -0.5 * (positions[:, None] % 64 + np.arange(K)), -1.0 - positions % 128


def write(directory, stream, stop, first=1, batch=17, shard_tokens=100, **changes):
    """A cache of positions [first, stop), in batches, some of them committed."""
    form = description(**changes)
    with CacheWriter(directory, form, stream, first, shard_tokens) as writer:
        while writer.position < stop:
            writer.append(*records(writer.position, min(writer.position + batch, stop)))
            if writer.position % 3 == 0 or writer.full:
                writer.commit()
        writer.finish()
    return directory
