"""Tokenizers: reading a Hugging Face tokenizer.json, and training one."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxlm.errors import UserError

END_OF_TEXT = "<|endoftext|>"


class Tokenizer:
    """Text to token ids and back, with one token that ends every document."""

    def __init__(self, backend: tokenizers.Tokenizer, end_token: str, source: str):
        """Wrap a tokenizer.

        Args:
            backend: the tokenizer.
            end_token: the vocabulary entry that ends a document.
            source: file name or description, for messages.

        Raises:
            UserError: the vocabulary lacks `end_token`.
        """
        end_id = backend.token_to_id(end_token)
        if end_id is None:
            special = [t.content for t in backend.get_added_tokens_decoder().values() if t.special]
            raise UserError(
                f"{source}: has no token '{end_token}' to end a document with; set "
                f"prepare.end_token to one of its special tokens: {', '.join(special) or 'none'}"
            )
        # Text that spells a special token stays text: a document cannot end itself early.
        backend.encode_special_tokens = True
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self.end_token = end_token
        self.end_id: int = end_id
        self.vocabulary_size: int = max(backend.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Token ids (int64) of each text, in parallel; no special token is added."""
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int64) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids; special tokens are left out."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=True)

    def token_bytes(self) -> np.ndarray | None:
        """UTF-8 bytes each token stands for, [V] int32; special tokens stand for none.

        None where the tokenizer is not byte-level, so that single tokens have no byte count. A
        tokenizer that changes the text (normalizer, added space) makes the sum over a text differ
        from its bytes; whoever has both must compare them.
        """
        if not isinstance(self._backend.decoder, decoders.ByteLevel):
            return None
        # In a byte-level vocabulary each character of an entry is one byte.
        lengths = np.zeros(self.vocabulary_size, np.int32)
        added = self._backend.get_added_tokens_decoder()
        for token, i in self._backend.get_vocab(with_added_tokens=True).items():
            lengths[i] = len(token)
        for i, token in added.items():  # these are stored as plain text
            lengths[i] = 0 if token.special else len(token.content.encode("utf-8"))
        return lengths

    def to_json(self) -> str:
        """The tokenizer.json text."""
        return self._backend.to_str(pretty=False)


def read_tokenizer(path: Path, end_token: str = END_OF_TEXT) -> Tokenizer:
    """Read a Hugging Face tokenizer.json.

    Raises:
        UserError: a file that is missing, is not a tokenizer, or lacks the end token.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such tokenizer file")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the binding raises bare Exception for bad files
        raise UserError(f"{path}: not a Hugging Face tokenizer.json ({error})") from None
    return Tokenizer(backend, end_token, str(path))


def train_tokenizer(
    texts: Iterable[str], vocabulary_size: int, end_token: str = END_OF_TEXT
) -> Tokenizer:
    """Train a byte-level BPE: any text can be encoded, and decodes to itself.

    Args:
        texts: training documents.
        vocabulary_size: entries in all: the end token, 256 bytes, and merges.
        end_token: the entry that ends a document.

    Raises:
        UserError: the text is too small for so many entries.
    """
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[end_token],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    if backend.get_vocab_size() < vocabulary_size:
        raise UserError(
            f"prepare.vocabulary_size is {vocabulary_size}, but the text gives only "
            f"{backend.get_vocab_size()} entries; lower it, or add text"
        )
    return Tokenizer(backend, end_token, "the trained tokenizer")
