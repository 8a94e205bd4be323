import hashlib
import itertools
import json
import subprocess
import sys
import unicodedata

import pytest

from jaxlm.config import PrepareConfig
from jaxlm.data.cleaning import clean, digest, is_validation

FORMS = ("none", "NFC", "NFKC")

# Before, after NFC, after NFKC: code points by hand from the Unicode charts. "none" changes none.
GOLDEN = {
    "half-width katakana, voiced": ("ｶﾞｷﾞ", "ｶﾞｷﾞ", "\u30ac\u30ae"),
    "half-width katakana, semi-voiced": ("\uff8a\uff9f", "\uff8a\uff9f", "\u30d1"),
    "half-width punctuation": ("\uff62\uff71\uff63\uff61", "\uff62\uff71\uff63\uff61", "「ア」。"),
    "NFD hiragana": ("\u304b\u3099", "\u304c", "\u304c"),
    "NFD katakana": ("\u30cf\u309a", "\u30d1", "\u30d1"),
    "voiced mark, spacing": ("\u304b\u309b", "\u304b\u309b", "\u304b\u0020\u3099"),
    "circled digit": ("\u2460", "\u2460", "1"),
    "era name": ("\u337b", "\u337b", "\u5e73\u6210"),
    "Roman numeral": ("\u2162", "\u2162", "III"),
    "ideographic space": ("\u3000", "\u3000", " "),
    "full-width digits and letters": ("２Ａｚ", "２Ａｚ", "2Az"),
    "wave dash stays": ("\u301c", "\u301c", "\u301c"),
    "full-width tilde": ("\uff5e", "\uff5e", "~"),
    "minus sign stays": ("\u2212", "\u2212", "\u2212"),
    "full-width hyphen-minus": ("\uff0d", "\uff0d", "-"),
    "hyphen and dashes stay": ("\u2010\u2013\u2014\u2015", *["\u2010\u2013\u2014\u2015"] * 2),
    "non-breaking hyphen": ("\u2011", "\u2011", "\u2010"),
    "long vowel mark stays": ("\u30fc", "\u30fc", "\u30fc"),
    "half-width long vowel mark": ("\uff70", "\uff70", "\u30fc"),
    "CJK compatibility ideograph": ("\ufa19", "\u795e", "\u795e"),
    "e and acute": ("e\u0301", "\u00e9", "\u00e9"),
    "ligature": ("\ufb01", "\ufb01", "fi"),
    "no-break space": ("\u00a0", "\u00a0", " "),
    "square kilometre": ("\u33a2", "\u33a2", "km2"),
}


def settings(**values):
    return PrepareConfig(**values)


def cleaned(text, **values):
    return clean(text, settings(**values)).text


@pytest.mark.parametrize(("before", "nfc", "nfkc"), GOLDEN.values(), ids=GOLDEN)
def test_normalisation(before, nfc, nfkc):
    for form, after in zip(FORMS, (before, nfc, nfkc), strict=True):
        # A letter beside it: white space alone would be an empty document.
        found = cleaned(f"x{before}", normalization=form)
        assert found == f"x{after}"
        assert cleaned(found, normalization=form) == found


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a\r\nb\rc\nd", "a\nb\nc\nd"),
        ("a\r\r\nb\r", "a\n\nb\n"),
        ("a\0b\0", "ab"),
        ("\ufeffa\u200b\u2060b\ufeff", "ab"),
        # Joiners carry meaning, and white space is kept exactly.
        ("👩\u200d💻 می\u200cخواهم", "👩\u200d💻 می\u200cخواهم"),
        ("  a\t \n\n b  \n", "  a\t \n\n b  \n"),
        ("\u00a0\u2028x\u0085\x0c", "\u00a0\u2028x\u0085\x0c"),
        # What is taken out may have kept two characters from composing: NFC comes after it.
        ("か\u200b\u3099", "が"),
        ("か\0\u3099", "が"),
    ],
)
def test_what_changes_and_what_stays(before, after):
    assert cleaned(before, normalization="NFC") == after
    assert cleaned(before.encode(), normalization="NFC") == after


def test_removed_characters_are_counted_and_may_be_kept():
    found = clean("\ufeffa\u200bb\0", settings())
    assert (found.text, found.removed_zero_width, found.removed_nul) == ("ab", 2, 1)
    found = clean("\ufeffa\u200bb\0", settings(zero_width="keep"))
    assert (found.text, found.removed_zero_width, found.removed_nul) == ("\ufeffa\u200bb", 0, 1)


def everything():
    """All assigned code points, and mixtures of what the rules look for and what composes."""
    for code in range(0x110000):
        if unicodedata.category(chr(code)) not in ("Cn", "Co", "Cs"):
            yield chr(code)
    parts = ["e", "か", "ｶ", "ﾞ", "\u1100", "\u1161", "①", "\u0301", "\u0323", "\u3099", "\ufdfa"]
    for few in itertools.product([*parts, *"\r\n\0\u200b\ufeff\u200d"], repeat=3):
        yield "".join(few)


@pytest.mark.parametrize("form", FORMS)
def test_cleaning_twice_changes_nothing(form):
    chosen = settings(normalization=form)
    for text in everything():
        once = clean(text, chosen)
        if once.reason is None:
            twice = clean(once.text, chosen)
            assert twice.text == once.text, ascii(text)
            assert (twice.removed_zero_width, twice.removed_nul, twice.replaced) == (0, 0, 0)
            assert not set(once.text) & set("\r\0\u200b\u2060\ufeff"), ascii(text)
            assert form == "none" or unicodedata.is_normalized(form, once.text)


@pytest.mark.parametrize(
    ("data", "after", "replaced", "first"),
    [
        (b"ab\xffcd", "ab\ufffdcd", 1, 2),
        (b"\xc0\x80x", "\ufffd\ufffdx", 2, 0),
        # A character cut short is one subsequence, a surrogate in UTF-8 is three.
        ("あ".encode()[:2] + b"x", "\ufffdx", 1, 0),
        (b"x\xed\xa0\x80", "x\ufffd\ufffd\ufffd", 3, 1),
        (b"\xf0\x9f\x98", "\ufffd", 1, 0),
        (b"\xf5\x80", "\ufffd\ufffd", 2, 0),
        ("é\ufffd".encode() + b"\xe9", "é\ufffd\ufffd", 1, 5),
        ("はい\ufffd".encode(), "はい\ufffd", 0, None),
    ],
)
def test_invalid_bytes(data, after, replaced, first):
    # The same bytes inside a line of JSON, where the reader escapes what it cannot decode.
    escaped = json.loads('["' + data.decode("utf-8", "surrogateescape") + '"]')[0]
    for text in (data, escaped):
        found = clean(text, settings())
        assert (found.text, found.replaced, found.first_invalid) == (after, replaced, first)
        skipped = clean(text, settings(invalid_text="skip"))
        assert skipped.reason == ("invalid_text" if replaced else None)
        assert (skipped.replaced, skipped.first_invalid) == (replaced, first)


@pytest.mark.parametrize(
    ("text", "after", "replaced", "first"),
    [
        (json.loads(r'"x\ud83d\ude00"'), "x😀", 0, None),
        # Two surrogates that json.loads would have joined spell the same character.
        ("x\ud83d" + "\ude00", "x😀", 0, None),
        ("x\ud83d" + "\udc80", "x💀", 0, None),
        ("é\ud83dx", "é\ufffdx", 1, 2),
        ("\ude00\ud83d", "\ufffd\ufffd", 2, 0),
        ("\ud83d\ud83d\ude00", "\ufffd😀", 1, 0),
        ("あ\udcff\ud800", "あ\ufffd\ufffd", 2, 3),
        ("あ\ud800\udfff\ud800", "あ\U000103ff\ufffd", 1, 7),
    ],
)
def test_surrogates(text, after, replaced, first):
    found = clean(text, settings())
    assert (found.text, found.replaced, found.first_invalid) == (after, replaced, first)
    assert found.text.encode().decode() == found.text
    assert clean(text, settings(invalid_text="skip")).reason == (
        "invalid_text" if replaced else None
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        (" \t\r\n\u3000\u00a0", "empty"),
        ("\ufeff\u200b\0", "empty"),
        ("ab", "too_short"),
        ("a\u200bb\u200b", "too_short"),
        ("abc", None),
        (" a ", None),
        ("あいうえお", None),
        ("あいうえお\0", None),
        ("abcdef", "too_long"),
        # Five characters before normalisation, six after.
        ("x㍻123", "too_long"),
        ("e\u0301" * 5, None),
    ],
)
def test_skipped_documents(text, reason):
    found = clean(text, settings(minimum_characters=3, maximum_characters=5, normalization="NFKC"))
    assert found.reason == reason
    assert (found.text == "") == (reason is not None)


def test_the_identity_is_the_texts_alone():
    variants = ["ガギ\nx", "\ufeffガギ\r\nx", "ｶﾞｷﾞ\rx", "カ\u3099キ\u3099\n\u200bx\0"]
    found = {digest(cleaned(text, normalization="NFKC")) for text in variants}
    assert found == {hashlib.sha256("ガギ\nx".encode()).digest()[:16]}


def test_the_split_follows_the_hash():
    # SHA-256 of "abc" begins with ba7816bf (FIPS 180-2, appendix B.1): 0.7284 of the range.
    assert not is_validation(digest("abc"), 0.728)
    assert is_validation(digest("abc"), 0.729)
    texts = [f"文書 {i}" for i in range(4000)]
    held_out = {text for text in texts if is_validation(digest(text), 0.1)}
    assert len(held_out) == pytest.approx(400, abs=5 * (4000 * 0.1 * 0.9) ** 0.5)
    assert held_out <= {text for text in texts if is_validation(digest(text), 0.2)}


def test_workers_do_not_load_jax():
    code = (
        "import sys, jaxlm.data.cleaning, jaxlm.data.duplicates, jaxlm.data.tokenizer; "
        "sys.exit(bool({'jax', 'flax', 'orbax'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
