"""Tokenizers: Hugging Face tokenizer.json, SentencePiece .model, and training one.

Whatever a file's own settings say, a document is [begin token, if one is declared] + tokens of its
text + [end token], and text that spells a control token stays text.

Worker processes: Hugging Face tokenizers starts a thread a core in each process, which
``TOKENIZERS_PARALLELISM=false`` (or ``RAYON_NUM_THREADS=1``) in the environment prevents; it must
stand before the first text is encoded. SentencePiece is used with one thread.
"""

import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxlm.errors import UserError

END_OF_TEXT = "<|endoftext|>"
UNKNOWN = "<unk>"

# How SentencePiece and its relatives write a space.
_SPACE = "\u2581"
_BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]
_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")
# Words of GPT-2's byte-level BPE: a word carries the space before it.
_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Share of the training text's characters that a unigram vocabulary has pieces for; rarer ones are
# written in bytes. The default of SentencePiece for Japanese and Chinese.
_COVERAGE = 0.9995


class Tokenizer(ABC):
    """Text to token ids and back, with a token that ends every document and maybe one before."""

    # Name and content of the file that read_tokenizer reads this tokenizer from.
    file_name: str
    content: bytes
    # Largest id + 1.
    vocabulary_size: int
    # The entries that end and begin a document, and their ids; None where none begins it.
    end_token: str
    end_id: int
    begin_token: str | None
    begin_id: int | None
    # Bytes that a document's tokens stand for beyond its text: 1 where a space is put before every
    # text, else 0. Where it is put before some texts only (those that begin with none), or where
    # text is normalised, sum(token_bytes()[ids]) - prefix_bytes differs from the text's bytes for
    # the texts that are changed, and decode gives another text.
    prefix_bytes: int

    @abstractmethod
    def _encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text alone, with no control token among them."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids; control tokens are left out."""

    @abstractmethod
    def pieces(self) -> dict[int, str]:
        """How the vocabulary writes each id; two tokenizers with equal ones give equal meanings."""

    @abstractmethod
    def token_bytes(self) -> np.ndarray | None:
        """UTF-8 bytes each token stands for, [V] int32; control and unknown tokens stand for none.

        None where single tokens have no byte count. Whoever has text and tokens must compare their
        bytes (see `prefix_bytes`): the tokenizer may change the text.
        """

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Token ids (int64) of each text as a document: begin token if any, text, end token."""
        begin = [] if self.begin_id is None else [self.begin_id]
        return [np.asarray([*begin, *ids, self.end_id], np.int64) for ids in self._encode(texts)]

    def encode_prompt(self, text: str) -> np.ndarray:
        """Token ids (int64) of a document's beginning: as in `encode`, without the end token."""
        return self.encode([text])[0][:-1]


def _check_control(
    source: str, end_token: str, begin_token: str | None, ids: dict[str, int], special: list[str]
) -> None:
    """Both tokens are entries, and two: an end that is a beginning too would end nothing."""
    for key, token in (("end_token", end_token), ("begin_token", begin_token)):
        if token is not None and token not in ids:
            raise UserError(
                f"{source}: has no token '{token}' to {key.removesuffix('_token')} a document "
                f"with; set prepare.{key} to one of its special tokens: "
                f"{', '.join(special) or 'none'}"
            )
    if begin_token == end_token:
        raise UserError(f"prepare.begin_token and prepare.end_token are both '{end_token}'")


def _guard(model: dict[str, Any], special: set[str]) -> str | None:
    """A regex of places to cut text at, so that no control token can be made of its characters.

    ``encode_special_tokens`` stops the look-up of special tokens in the raw text, but the model may
    have them in its vocabulary too: Unigram, WordLevel and WordPiece would take them like any
    piece, and so would Unigram the pieces for bytes, which SentencePiece itself never does. BPE
    makes only what its merges lead to. Each match is the first character of such a spelling.

    Args:
        model: the model of a tokenizer.json.
        special: special tokens that are in the model's vocabulary.
    """
    if model["type"] == "BPE" and not model["ignore_merges"]:
        special = special & {"".join(pair) for pair in model["merges"]}
    elif model.get("byte_fallback"):
        special = special | set(_BYTE_PIECES)
    tails: dict[str, list[str]] = {}
    for token in sorted(special):
        if len(token) > 1:
            tails.setdefault(token[0], []).append(re.escape(token[1:]))
    cuts = [f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in tails.items()]
    return "|".join(cuts) or None


def _spaces(decoder: dict[str, Any] | None) -> str | None:
    """Characters that a decoder turns into spaces; None for a decoder that is not known here."""
    found = ""
    for step in _flat(decoder):
        kind = step["type"]
        if kind == "Metaspace":
            found += step["replacement"]
        elif kind == "Replace" and step["content"] == " ":
            found += next(iter(step["pattern"].values()))
        # What is taken from the beginning of a text is the space that was put there.
        elif kind == "Replace" and step["pattern"] == {"Regex": "^ "} and not step["content"]:
            continue
        elif kind not in ("ByteFallback", "Fuse", "Strip"):
            return None
    return found if decoder is not None and set(found) <= {_SPACE} else None


def _flat(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a decoder of a tokenizer.json, sequences unfolded."""
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _flat(part)]
    return [decoder]


class _HuggingFace(Tokenizer):
    """A tokenizer of the library ``tokenizers``."""

    file_name = "tokenizer.json"

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        end_token: str,
        begin_token: str | None,
        source: str,
        content: bytes,
    ):
        """Wrap `backend`; `source` is the file's name or a description, for messages.

        Raises:
            UserError: the vocabulary lacks one of the tokens, or text cannot be kept from it.
        """
        special = [t.content for t in backend.get_added_tokens_decoder().values() if t.special]
        vocabulary = backend.get_vocab(with_added_tokens=True)
        _check_control(source, end_token, begin_token, vocabulary, special)
        control = [end_token] if begin_token is None else [end_token, begin_token]
        # An ordinary entry that begins or ends documents becomes a special token, with its id.
        backend.add_special_tokens(control)
        # Text that spells a special token stays text: a document cannot end itself early.
        backend.encode_special_tokens = True
        backend.no_padding()
        backend.no_truncation()
        state = json.loads(backend.to_str())
        in_model = {*special, *control} & set(backend.get_vocab(with_added_tokens=False))
        for token in control:
            if token in in_model and len(token) == 1:
                raise UserError(
                    f"{source}: '{token}' cannot begin or end documents, since every text may "
                    f"hold this character"
                )
        guard = _guard(state["model"], in_model)
        if guard is not None:
            cut = pre_tokenizers.Split(tokenizers.Regex(guard), "isolated")
            first = backend.pre_tokenizer
            backend.pre_tokenizer = cut if first is None else pre_tokenizers.Sequence([first, cut])
        self._backend = backend
        self.content = content
        self.end_token, self.begin_token = end_token, begin_token
        self.end_id = vocabulary[end_token]
        self.begin_id = None if begin_token is None else vocabulary[begin_token]
        self.vocabulary_size = max(vocabulary.values()) + 1
        self._pieces = {i: piece for piece, i in vocabulary.items()}
        self._lengths = self._piece_lengths(state, vocabulary)
        self.prefix_bytes = 0
        if self._lengths is not None:
            # Two bytes of tokens for one letter mean that a space was put before it.
            self.prefix_bytes = int(self._lengths[self._encode(["a"])[0]].sum() == 2)

    def _encode(self, texts: list[str]) -> list[list[int]]:
        # The "fast" form leaves out offsets into the text.
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids; special tokens are left out."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=True)

    def pieces(self) -> dict[int, str]:
        """How the vocabulary writes each id."""
        return self._pieces

    def token_bytes(self) -> np.ndarray | None:
        """UTF-8 bytes each token stands for, [V] int32, or None; see :class:`Tokenizer`."""
        return self._lengths

    def _piece_lengths(
        self, state: dict[str, Any], vocabulary: dict[str, int]
    ) -> np.ndarray | None:
        model, decoder = state["model"], state["decoder"]
        byte_level = {step["type"] for step in _flat(decoder)} == {"ByteLevel"}
        spaces = _spaces(decoder)
        if not byte_level and spaces is None:
            return None
        lengths = np.zeros(self.vocabulary_size, np.int32)
        for piece, i in vocabulary.items():
            if byte_level:  # each character of an entry is one byte
                lengths[i] = len(piece)
            elif model.get("byte_fallback") and _BYTE_PIECE.fullmatch(piece):
                lengths[i] = 1
            else:
                shown = piece.replace(_SPACE, " ") if spaces else piece
                lengths[i] = len(shown.encode("utf-8"))
        if model["type"] == "Unigram" and model["unk_id"] is not None:
            lengths[model["unk_id"]] = 0
        elif model.get("unk_token") in vocabulary:
            lengths[vocabulary[model["unk_token"]]] = 0
        for i, token in self._backend.get_added_tokens_decoder().items():
            # These are stored as plain text.
            lengths[i] = 0 if token.special else len(token.content.encode("utf-8"))
        return lengths


class _SentencePiece(Tokenizer):
    """A SentencePiece model."""

    file_name = "tokenizer.model"

    def __init__(self, content: bytes, end_token: str, begin_token: str | None, source: str):
        """Read a model from the bytes of its file.

        Raises:
            UserError: bytes that are no model, a model that lacks one of the tokens, or
                SentencePiece is not installed.
        """
        try:
            import sentencepiece
            from google.protobuf.message import DecodeError
            from sentencepiece import sentencepiece_model_pb2
        except ImportError:
            raise UserError(
                f"{source}: needs SentencePiece; run: pip install 'jaxlm[data]'"
            ) from None
        try:
            # Its classes are made when it is imported, where a type checker does not see them.
            schema: Any = sentencepiece_model_pb2.ModelProto  # pyright: ignore
            proto = schema.FromString(content)
            sentencepiece.SentencePieceProcessor(model_proto=content)
        except (DecodeError, RuntimeError):
            raise UserError(f"{source}: not a SentencePiece model, or damaged") from None
        kinds = schema.SentencePiece
        ids = {piece.piece: i for i, piece in enumerate(proto.pieces)}
        special = [piece.piece for piece in proto.pieces if piece.type == kinds.CONTROL]
        _check_control(source, end_token, begin_token, ids, special)
        for token in (end_token, begin_token):
            # Ordinary and user-defined pieces are found in text; control pieces never are.
            if token is not None:
                proto.pieces[ids[token]].type = kinds.CONTROL
        self.content = content
        self.end_token, self.begin_token = end_token, begin_token
        self.end_id = ids[end_token]
        self.begin_id = None if begin_token is None else ids[begin_token]
        self.vocabulary_size = len(proto.pieces)
        self._pieces = {i: piece for piece, i in ids.items()}
        self.prefix_bytes = int(proto.normalizer_spec.add_dummy_prefix)
        self._processor = sentencepiece.SentencePieceProcessor(
            model_proto=proto.SerializeToString()
        )
        proto.normalizer_spec.add_dummy_prefix = False
        # The same model, for text that stands in the middle.
        self._inner = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
        # The bytes of U+2581, where the model has pieces for bytes.
        self._bar = [ids[piece] for piece in ("<0xE2>", "<0x96>", "<0x81>") if piece in ids]
        self._lengths = np.zeros(self.vocabulary_size, np.int32)
        for i, piece in enumerate(proto.pieces):
            if piece.type == kinds.BYTE:
                self._lengths[i] = 1
            elif piece.type in (kinds.NORMAL, kinds.USER_DEFINED):
                self._lengths[i] = len(piece.piece.replace(_SPACE, " ").encode("utf-8"))

    def _encode(self, texts: list[str]) -> list[list[int]]:
        encoded = self._processor.encode(texts, out_type=int, num_threads=1)
        if self._bar:
            for i, text in enumerate(texts):
                if _SPACE in text:
                    encoded[i] = self._around_bars(text)
        return encoded

    def _around_bars(self, text: str) -> list[int]:
        """Ids of a text that has U+2581, which SentencePiece would read as a space, as bytes."""
        first, *rest = text.split(_SPACE)
        if first:
            ids = self._processor.encode(first, out_type=int)
        else:  # an empty text gets no space put before it, this one does
            ids = self._inner.encode(" " * self.prefix_bytes, out_type=int)
        for part in rest:
            ids = [*ids, *self._bar, *self._inner.encode(part, out_type=int)]
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids; control tokens are left out."""
        return self._processor.decode([int(i) for i in ids])

    def pieces(self) -> dict[int, str]:
        """How the vocabulary writes each id."""
        return self._pieces

    def token_bytes(self) -> np.ndarray:
        """UTF-8 bytes each token stands for, [V] int32; see :class:`Tokenizer`."""
        return self._lengths


def read_tokenizer(
    path: Path, end_token: str = END_OF_TEXT, begin_token: str | None = None
) -> Tokenizer:
    """Read a Hugging Face tokenizer.json or a SentencePiece .model, by the file's name.

    Raises:
        UserError: a file that is missing, is no tokenizer, or lacks one of the tokens.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such tokenizer file")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if path.suffix == ".model":
        return _SentencePiece(content, end_token, begin_token, str(path))
    if path.suffix != ".json":
        raise UserError(
            f"{path}: neither a Hugging Face tokenizer.json nor a SentencePiece .model by its name"
        )
    try:
        backend = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # noqa: BLE001 - the binding raises bare Exception for bad files
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: not a Hugging Face tokenizer.json ({reason})") from None
    return _HuggingFace(backend, end_token, begin_token, str(path), content)


def train_tokenizer(
    texts: Iterable[str],
    vocabulary_size: int,
    end_token: str = END_OF_TEXT,
    begin_token: str | None = None,
    kind: Literal["bpe", "unigram"] = "bpe",
) -> Tokenizer:
    """Train a tokenizer: any text can be encoded, and decodes to itself.

    Equal texts in equal order give an equal tokenizer.

    Args:
        texts: training documents; "unigram" holds them in memory, several times over.
        vocabulary_size: entries in all: the control tokens, 256 bytes, and what is learnt;
            "unigram" has "<unk>" besides, which it never uses.
        end_token: the entry that ends a document.
        begin_token: the entry that begins a document, if any.
        kind: byte-level BPE, or unigram pieces with bytes for characters that have none.

    Raises:
        UserError: the text is too small for so many entries, or there are fewer than needed.
    """
    control = [end_token] if begin_token is None else [end_token, begin_token]
    if kind == "unigram":
        control.append(UNKNOWN)
    learnt = vocabulary_size - len(control) - 256
    if learnt < (0 if kind == "bpe" else 1):
        raise UserError(
            f"prepare.vocabulary_size is {vocabulary_size}; 256 bytes and {len(control)} special "
            f"tokens need more"
        )
    backend = (
        _train_bpe(texts, vocabulary_size, control)
        if kind == "bpe"
        else _train_unigram(texts, learnt, control)
    )
    if backend.get_vocab_size() < vocabulary_size:
        raise UserError(
            f"prepare.vocabulary_size is {vocabulary_size}, but the text gives only "
            f"{backend.get_vocab_size()} entries; lower it, or add text"
        )
    content = backend.to_str(pretty=False).encode("utf-8")
    return _HuggingFace(backend, end_token, begin_token, "the trained tokenizer", content)


def _train_bpe(
    texts: Iterable[str], vocabulary_size: int, control: list[str]
) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=control,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return backend


def _frequent(texts: list[str], most: int) -> set[str]:
    """The most frequent characters that together cover enough of the text."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    # Equally frequent ones by code point, so that the choice depends on the texts alone.
    order = sorted(counts, key=lambda character: (-counts[character], character))
    covered = np.cumsum([counts[character] for character in order])
    wanted = int(np.searchsorted(covered, _COVERAGE * sum(counts.values()))) + 1
    return set(order[: min(wanted, most)])


def _train_unigram(texts: Iterable[str], learnt: int, control: list[str]) -> tokenizers.Tokenizer:
    """Unigram pieces that hold spaces as they are, so that joining pieces restores the text."""
    texts = list(texts)
    # The trainer keeps every character that it sees: rare ones must be taken out before. Half of
    # the pieces at most are single characters. Text is cut there, and at spellings of entries that
    # are made below, which no piece may equal.
    kept = _frequent(texts, most=learnt // 2)
    rare = sorted(set().union(*texts) - kept)
    cuts = [*map(re.escape, control), _BYTE_PIECE.pattern]
    if rare:
        cuts.append(f"[{''.join(map(re.escape, rare))}]")
    cut = re.compile("|".join(cuts))
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(_WORDS), "isolated")
    trainer = trainers.UnigramTrainer(
        vocab_size=learnt, special_tokens=[], unk_token=None, show_progress=False
    )
    backend.train_from_iterator((part for text in texts for part in cut.split(text)), trainer)
    pieces: list[tuple[str, float]] = [
        (piece, score) for piece, score in json.loads(backend.to_str())["model"]["vocab"]
    ]
    # Characters that only longer pieces use get scores just above the lowest, in an order that
    # differs from run to run, and the last digits of the others differ: what is kept must not.
    lowest = min((score for _, score in pieces), default=0.0)
    unused = lowest + 1e-4 * len(kept)
    scored = [
        (piece, round(lowest if len(piece) == 1 and score <= unused else score, 6))
        for piece, score in pieces
    ]
    scored.sort(key=lambda entry: (-entry[1], entry[0]))
    reserved = [(piece, 0.0) for piece in (*control, *_BYTE_PIECES)]
    backend.model = models.Unigram(
        [*reserved, *scored], unk_id=control.index(UNKNOWN), byte_fallback=True
    )
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(control)
    return backend
