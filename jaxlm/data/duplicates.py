"""Near-duplicate documents by MinHash and locality-sensitive hashing.

A document is the set of its 5-character shingles. For a random order of all shingles, two documents
begin with the same one with probability equal to their Jaccard similarity; the share of 128 orders
in which they do estimates it, with standard error sqrt(J (1 - J) / 128), at most 0.044. Documents
that agree in one band of the signature are candidates (Broder, "On the resemblance and containment
of documents", 1997; Leskovec, Rajaraman, Ullman, "Mining of Massive Datasets", chapter 3).
"""

import hashlib

import numpy as np

SHINGLE = 5
PERMUTATIONS = 128

# Share of the pairs exactly at the threshold that may go unseen by the bands.
_MISSED = 0.05

# Shingles hashed together: [PERMUTATIONS, _CHUNK] uint32 is half a megabyte, which stays in cache.
_CHUNK = 1024
# Stands after the end of a text shorter than a shingle; no character has this code.
_PADDING = 0x110000

# Constants that signatures depend on: a change makes old signatures incomparable.
_RNG = np.random.Generator(np.random.PCG64(0x6A61786C6D))
_POSITION = _RNG.integers(2**64, size=SHINGLE, dtype=np.uint64) | np.uint64(1)
_MIX = _RNG.integers(2**64, size=2, dtype=np.uint64) | np.uint64(1)
# An odd factor and any addend permute the integers modulo 2**32.
_FACTOR = _RNG.integers(2**32, size=(PERMUTATIONS, 1), dtype=np.uint32) | np.uint32(1)
_ADDEND = _RNG.integers(2**32, size=(PERMUTATIONS, 1), dtype=np.uint32)


def _hashes(codes: np.ndarray) -> np.ndarray:
    """Hash of each shingle of code points [N] uint32: [N - 4] uint32."""
    count = len(codes) - SHINGLE + 1
    hashed = np.zeros(count, np.uint64)
    for place, factor in enumerate(_POSITION):
        hashed += codes[place : place + count].astype(np.uint64) * factor
    # The permutations below are linear: they need hashes without structure. Two rounds of shift
    # and multiplication spread every bit of the linear sum over the upper half.
    for factor in _MIX:
        hashed ^= hashed >> np.uint64(32)
        hashed *= factor
    return (hashed >> np.uint64(32)).astype(np.uint32)


def signature(text: str) -> np.ndarray:
    """MinHash signature [128] uint32 of a text, the same in every process.

    A text shorter than 5 characters is one shingle. Memory is bounded but for the text's own
    code points.
    """
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    if len(codes) < SHINGLE:
        codes = np.pad(codes, (0, SHINGLE - len(codes)), constant_values=_PADDING)
    smallest = np.full(PERMUTATIONS, 2**32 - 1, np.uint32)
    for start in range(0, len(codes) - SHINGLE + 1, _CHUNK):
        permuted = _hashes(codes[start : start + _CHUNK + SHINGLE - 1]) * _FACTOR
        permuted += _ADDEND
        np.minimum(smallest, permuted.min(axis=1), out=smallest)
    return smallest


def similarity(a: np.ndarray, b: np.ndarray) -> float:
    """Estimate of the Jaccard similarity behind two signatures."""
    return float(np.mean(a == b))


def bands(threshold: float) -> tuple[int, int]:
    """Number of bands and rows a band for a wanted similarity.

    Two documents of similarity s agree in at least one of b bands of r rows with probability
    1 - (1 - s^r)^b, an S-curve that climbs near (1/b)^(1/r). The rows are as many as leave at most
    5 % of the pairs exactly at the threshold unseen: that puts the climb below the threshold, and
    pairs above it are missed less. What the bands find below it, :func:`similarity` turns away.

    Args:
        threshold: Jaccard similarity, between 0 and 1.
    """
    for rows in range(PERMUTATIONS, 1, -1):
        number = PERMUTATIONS // rows
        if (1 - threshold**rows) ** number <= _MISSED:
            return number, rows
    return PERMUTATIONS, 1


def band_keys(signature: np.ndarray, number: int, rows: int) -> list[bytes]:
    """8-byte keys of a signature's bands; the key of one band equals none of another's.

    Args:
        signature: [128] uint32.
        number: bands.
        rows: entries of the signature a band; number * rows is at most 128.
    """
    data = signature.astype("<u4").tobytes()
    size = 4 * rows
    return [
        hashlib.blake2b(
            data[band * size : (band + 1) * size], digest_size=8, salt=band.to_bytes(2, "little")
        ).digest()
        for band in range(number)
    ]
