import random
import tracemalloc

import numpy as np
import pytest

from jaxlm.data.duplicates import band_keys, bands, signature, similarity


def shingles(text):
    return {text[i : i + 5] for i in range(len(text) - 4)}


def jaccard(a, b):
    return len(shingles(a) & shingles(b)) / len(shingles(a) | shingles(b))


def pair(rng, length, changed):
    """A random text and the same with other characters in the last `changed` places."""
    letters = [chr(code) for code in (*range(0x3041, 0x3097), *range(0x4E00, 0x4E80))]
    same = "".join(rng.choices(letters, k=length - changed))
    return [same + "".join(rng.choices(letters, k=changed)) for _ in range(2)]


@pytest.mark.parametrize("changed", [5, 30, 100, 300, 600, 990])
def test_estimates_are_binomial_around_the_exact_similarity(changed):
    rng = random.Random(changed)
    errors, deviations = [], []
    for _ in range(60):
        a, b = pair(rng, 1000, changed)
        exact = jaccard(a, b)
        deviation = (exact * (1 - exact) / 128) ** 0.5
        errors.append(similarity(signature(a), signature(b)) - exact)
        deviations.append(deviation)
    assert np.all(np.abs(errors) < 5 * np.array(deviations))
    # The mean over independent pairs has no bias, and its spread is that of 128 draws.
    assert abs(np.mean(errors)) < 4 * np.mean(deviations) / 60**0.5
    assert np.std(errors) / np.mean(deviations) == pytest.approx(1.0, abs=0.35)


def test_order_and_repetition_of_text_count_as_shingles_do():
    rng = random.Random(1)
    sentences = [pair(rng, 40, 1)[0] for _ in range(40)]
    a = "".join(sentences)
    rng.shuffle(sentences)
    b = "".join(sentences)
    assert similarity(signature(a), signature(b)) == pytest.approx(jaccard(a, b), abs=0.16)
    # A period of five characters has five shingles, however long the text is.
    assert (signature("あいうえお" * 2) == signature("あいうえお" * 900)).all()


def test_signatures_are_the_same_everywhere():
    # Frozen: signatures of other versions or processes are compared with these.
    found = signature("吾輩は猫である。名前はまだ無い。")
    assert (found.shape, found.dtype) == ((128,), np.uint32)
    assert found[:4].tolist() == [340014119, 185682657, 99342286, 72428488]
    assert signature("")[:2].tolist() != signature("a")[:2].tolist()


def test_short_texts_are_one_shingle():
    texts = ["", "a", "b", "ab", "abc", "abcd", "abcde", "aaaa", "aaaaa", "猫", "\0", "\0\0\0\0\0"]
    for a in texts:
        for b in texts:
            assert similarity(signature(a), signature(b)) == (1.0 if a == b else 0.0)


def test_where_a_shingle_stands_changes_nothing():
    # Long texts are hashed in pieces: shingles across their borders count as others do.
    near = signature("あ" * 9 + "い" + "あ" * 9)
    for place in (*range(1015, 1035), 2047, 2048, 2049):
        text = "あ" * place + "い" + "あ" * 1100
        assert len(shingles(text)) == 6
        assert (signature(text) == near).all()


def test_memory_is_bounded():
    text = "".join(map(chr, range(0x4E00, 0x9E00))) * 50  # a million characters
    tracemalloc.start()
    signature(text)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * len(text) + 4e6


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99])
def test_bands_climb_below_the_threshold(threshold):
    number, rows = bands(threshold)
    assert number * rows <= 128
    assert (1 / number) ** (1 / rows) < threshold
    assert (1 - threshold**rows) ** number <= 0.05
    # More rows would miss more.
    assert (1 - threshold ** (rows + 1)) ** (128 // (rows + 1)) > 0.05


def test_bands_by_hand():
    # 1 - (1 - 0.8^7)^18 = 0.9855 is found; with 8 rows, 1 - (1 - 0.8^8)^16 = 0.9471.
    assert bands(0.8) == (18, 7)
    assert bands(0.001) == (128, 1)


def test_pairs_are_found_as_often_as_the_curve_says():
    rng = random.Random(3)
    number, rows = 16, 8
    found, expected = 0, 0.0
    for _ in range(300):
        a, b = pair(rng, 400, 70)
        keys = [band_keys(signature(text), number, rows) for text in (a, b)]
        found += bool(set(keys[0]) & set(keys[1]))
        expected += 1 - (1 - jaccard(a, b) ** rows) ** number
    assert 60 < expected < 240  # on the slope
    assert found == pytest.approx(expected, abs=4 * (300 * 0.25) ** 0.5)


def test_keys_are_of_their_band():
    keys = band_keys(np.full(128, 7, np.uint32), 18, 7)
    assert len(set(keys)) == 18  # equal entries, yet no band is taken for another
    assert {len(key) for key in keys} == {8}
    changed = np.full(128, 7, np.uint32)
    changed[[0, 13, 127]] = 8  # bands 0 and 1; the last two entries are in no band
    same = [a == b for a, b in zip(keys, band_keys(changed, 18, 7), strict=True)]
    assert same == [False, False] + [True] * 16
