"""From raw text to the text that is tokenised, the same in every process.

The steps, in their order: decode; CRLF and lone CR become LF; NUL is removed; zero-width characters
are removed; Unicode normalisation. Nothing else changes: no white space is stripped, so a document
is kept exactly but for these steps. Normalisation comes last and makes none of the removed
characters, so that cleaning cleaned text changes nothing.
"""

import hashlib
import re
import unicodedata
from dataclasses import dataclass
from typing import Literal

from jaxlm.config import PrepareConfig

# ZERO WIDTH SPACE, WORD JOINER and the byte-order mark. Joiner and non-joiner (U+200D, U+200C)
# stay: emoji sequences and Persian or Indic words are written with them.
ZERO_WIDTH = "\u200b\u2060\ufeff"

_REPLACEMENT = "\ufffd"
_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
# Surrogates that no byte was escaped to (those are U+DC80 to U+DCFF).
_LONE = re.compile("[\ud800-\udc7f\udd00-\udfff]")

Reason = Literal["invalid_text", "empty", "too_short", "too_long"]


@dataclass(frozen=True)
class Cleaned:
    """A cleaned document, or why it is skipped."""

    # Empty where the document is skipped.
    text: str
    # Why it is skipped; None where it is kept.
    reason: Reason | None
    # Invalid byte sequences and lone surrogates that became U+FFFD (or would have).
    replaced: int
    # Byte offset of the first of them in the document's UTF-8 form.
    first_invalid: int | None
    # Zero-width characters and NULs taken out.
    removed_zero_width: int
    removed_nul: int


def _decode_bytes(data: bytes) -> tuple[str, int, int | None]:
    """Text, number of replacements and offset of the first."""
    try:
        return data.decode("utf-8"), 0, None
    except UnicodeDecodeError as error:
        text = data.decode("utf-8", "replace")
        # U+FFFD that the data hold as such is no replacement.
        return text, text.count(_REPLACEMENT) - data.count(b"\xef\xbf\xbd"), error.start


def _join_pair(pair: re.Match[str]) -> str:
    return pair[0].encode("utf-16-le", "surrogatepass").decode("utf-16-le")


def _decode(text: str | bytes) -> tuple[str, int, int | None]:
    """Text without surrogates, number of replacements and offset of the first.

    Each maximal invalid subsequence of bytes becomes one U+FFFD, as in Python's decoder and in the
    Unicode standard (section 3.9, "U+FFFD Substitution of Maximal Subparts"): C0 80 gives two.

    In a str, two surrogates that are a pair are joined to the character that they spell: nothing
    is lost, and no valid text holds them apart. U+DC80 to U+DCFF on their own are bytes 80 to FF
    that a reader escaped (``surrogateescape``): they are put back and decoded as bytes. Any other
    surrogate becomes one U+FFFD.
    """
    if isinstance(text, bytes):
        return _decode_bytes(text)
    if text.isascii():
        return text, 0, None
    try:
        text.encode("utf-8")
        return text, 0, None
    except UnicodeEncodeError:
        text = _PAIR.sub(_join_pair, text)
        first = _LONE.search(text)
        # Offset before the lone surrogate is replaced: what stands before it has none.
        at = first and len(text[: first.start()].encode("utf-8", "surrogateescape"))
        text, lone = _LONE.subn(_REPLACEMENT, text)
        text, escaped, start = _decode_bytes(text.encode("utf-8", "surrogateescape"))
        offsets = [offset for offset in (at, start) if offset is not None]
        return text, lone + escaped, min(offsets, default=None)


def _remove(text: str, characters: str) -> tuple[str, int]:
    """Text without `characters`, and how many there were."""
    before = len(text)
    for character in characters:
        if character in text:
            text = text.replace(character, "")
    return text, before - len(text)


def clean(text: str | bytes, settings: PrepareConfig) -> Cleaned:
    """Clean one document.

    Args:
        text: UTF-8 bytes, or a str that may hold surrogates (from JSON escapes, or from invalid
            bytes decoded with ``surrogateescape``).
        settings: uses `invalid_text`, `zero_width`, `normalization`, `minimum_characters` and
            `maximum_characters`; the limits count the characters of the cleaned text.
    """
    text, replaced, first_invalid = _decode(text)
    if replaced and settings.invalid_text == "skip":
        return Cleaned("", "invalid_text", replaced, first_invalid, 0, 0)
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    text, nul = _remove(text, "\0")
    zero_width = 0
    if not text.isascii():
        if settings.zero_width == "remove":
            text, zero_width = _remove(text, ZERO_WIDTH)
        if settings.normalization != "none":
            # Checks first, and returns the text itself where it is normalised.
            text = unicodedata.normalize(settings.normalization, text)
    reason: Reason | None = None
    if not text or text.isspace():
        reason = "empty"
    elif len(text) < settings.minimum_characters:
        reason = "too_short"
    elif len(text) > settings.maximum_characters:
        reason = "too_long"
    return Cleaned("" if reason else text, reason, replaced, first_invalid, zero_width, nul)


def digest(text: str) -> bytes:
    """The identity of a cleaned text: 16 bytes of the SHA-256 of its UTF-8 form."""
    return hashlib.sha256(text.encode("utf-8")).digest()[:16]


def is_validation(digest: bytes, fraction: float) -> bool:
    """Whether a document is held out: decided by its text alone.

    Equal documents land on the same side, and neither order nor other documents matter.

    Args:
        digest: :func:`digest` of the cleaned text; its first 8 bytes decide.
        fraction: share of documents held out.
    """
    return int.from_bytes(digest[:8], "big") < fraction * 2**64
