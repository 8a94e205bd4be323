"""Teachers: what predicts the training tokens.

Shape legend: N positions, k tokens that a record names, B rows, T positions of a row, W tokens of
the longest window of a batch.
"""

import functools
import hashlib
import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxlm.config import Config, ModelConfig
from jaxlm.data.pipeline import Batch, PackedRows
from jaxlm.data.shards import DataDirectory, TokenStream
from jaxlm.data.teacher import Vocabulary, refuse_other_vocabulary, vocabulary_of
from jaxlm.distillation.contexts import Context, DocumentContext, PackedContext, Spans
from jaxlm.distillation.settings import TeacherConfig
from jaxlm.errors import UserError
from jaxlm.evaluation.evaluate import model_inputs
from jaxlm.losses import TeacherRecords, top_log_probabilities
from jaxlm.models.build import Params, apply
from jaxlm.training.loading import load_resolved, load_weights, read_fingerprint
from jaxlm.training.manifest import MANIFEST

# Batches of windows that are sorted by length together, so that little of a batch is padding.
_SORTED_BATCHES = 8


class Records(NamedTuple):
    """Records of consecutive positions."""

    # [N, k] token ids.
    ids: np.ndarray
    # [N, k] float32, log-probability of each.
    log_probs: np.ndarray
    # [N] float32, log of the mass of all other tokens.
    log_tail: np.ndarray


class Teacher(ABC):
    """Predicts the tokens of spans of a training stream."""

    # Which tokens it sees.
    context: Context
    # What the manifest says of it: kind, name, depth, and whatever else tells its weights apart.
    identity: dict[str, Any]
    # Fingerprint of the vocabulary that it shares with the data; None where the data has no
    # tokenizer.
    vocabulary: str | None

    @property
    @abstractmethod
    def group(self) -> int:
        """Spans that are predicted together; between groups work may stop and go on."""

    @abstractmethod
    def predict(self, stream: TokenStream, spans: Spans) -> Records:
        """Records of all positions of a group of consecutive spans."""


# ---------------------------------------------------------------- by settings


def context_of(teacher: TeacherConfig) -> Context:
    """What a teacher sees.

    Raises:
        UserError: there is no such run.
    """
    if teacher.run is not None:
        length = teacher.length or load_resolved(Path(teacher.run)).data.sequence_length
        return PackedContext(length)
    length = teacher.length or 2048
    return DocumentContext(length, length // 8 if teacher.overlap is None else teacher.overlap)


def check_teacher(teacher: TeacherConfig, vocabulary: Vocabulary) -> None:
    """Find out, before weights are loaded, whether a teacher can predict tokens of a vocabulary.

    Raises:
        UserError: there is no such teacher, it has another vocabulary, or settings that do not go
            with it.
    """
    if teacher.k > vocabulary.size:
        raise UserError(
            f"the teacher's k is {teacher.k}: the vocabulary of {vocabulary.source} has "
            f"{vocabulary.size:,} entries"
        )
    if teacher.run is not None:
        directory = Path(teacher.run)
        depth_of(load_resolved(directory), teacher.depth, directory)
        _refuse_other_tokenizer(directory, read_fingerprint(directory), vocabulary)
        return
    assert teacher.hf is not None
    _refuse_long_windows(teacher.hf, teacher.revision, context_of(teacher).length)
    _refuse_other_pieces(teacher.hf, teacher.revision, vocabulary)


def load_teacher(
    teacher: TeacherConfig,
    data: DataDirectory,
    update: int | None = None,
    device_map: str | None = None,
) -> Teacher:
    """A teacher that is ready to predict the training tokens of a data directory.

    Args:
        teacher: settings.
        data: the tokens.
        update: which checkpoint of a run; None takes the newest.
        device_map: where the weights of a model of Hugging Face go.

    Raises:
        UserError: as :func:`load_jaxlm` and :func:`load_hugging_face`.
    """
    if teacher.run is not None:
        return load_jaxlm(
            Path(teacher.run),
            data,
            update=update,
            depth=teacher.depth,
            length=teacher.length,
            k=teacher.k,
            batch_rows=teacher.rows,
            chunk_tokens=teacher.chunk_tokens,
        )
    context = context_of(teacher)
    assert teacher.hf is not None
    assert isinstance(context, DocumentContext)
    return load_hugging_face(
        teacher.hf,
        data,
        revision=teacher.revision,
        dtype=teacher.weights,
        quantization=teacher.quantization,
        device_map=device_map,
        context=context,
        k=teacher.k,
        batch_rows=teacher.rows,
        chunk_tokens=teacher.chunk_tokens,
    )


# ---------------------------------------------------------------- a run of jaxlm


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _predict_rows(
    model: ModelConfig,
    vocabulary: int,
    k: int,
    chunk_tokens: int,
    params: Params,
    batch: Batch,
    depth: Array,
) -> TeacherRecords:
    """Records of the targets of rows [B, T + 1]: leaves [B, T, ...]."""
    tokens, segments, positions, keys_B = model_inputs(batch)
    lm = apply(model, params)
    hidden_BTD = lm(
        tokens[:, :-1], segments[:, :-1], positions[:, :-1], keys_B, train=False, depth=depth
    )
    records = top_log_probabilities(
        hidden_BTD.reshape(-1, hidden_BTD.shape[-1]),
        lm.head()[:vocabulary],
        k=k,
        chunk_tokens=chunk_tokens,
    )
    return jax.tree.map(lambda x: x.reshape(*hidden_BTD.shape[:2], *x.shape[1:]), records)


@dataclass
class JaxlmTeacher(Teacher):
    """A run's checkpoint at one depth, on the rows of the packed layout."""

    model: ModelConfig
    params: Params
    depth: int | None
    # Entries of the data's vocabulary; rows of the output matrix beyond are no tokens.
    vocabulary_size: int
    k: int
    # Rows of a forward pass.
    batch_rows: int
    # Tokens whose logits exist at one time.
    chunk_tokens: int
    context: Context
    identity: dict[str, Any]
    vocabulary: str | None

    @property
    def group(self) -> int:
        """Rows of a forward pass."""
        return self.batch_rows

    def predict(self, stream: TokenStream, spans: Spans) -> Records:
        """Records of consecutive rows; see :class:`Teacher`."""
        rows = np.full(self.batch_rows, -1)  # one shape for all passes
        rows[: len(spans)] = spans.starts // self.context.length
        batch = PackedRows(stream, self.context.length).read(rows)
        found = jax.device_get(
            _predict_rows(
                self.model,
                self.vocabulary_size,
                self.k,
                self.chunk_tokens,
                self.params,
                {name: batch[name] for name in ("tokens", "segment_ids", "positions", "block")},
                jnp.asarray(self.depth or 0, jnp.int32),
            )
        )
        parts = zip(
            (spans.first - spans.starts - 1).tolist(),
            (spans.stops - spans.starts - 1).tolist(),
            strict=True,
        )
        chosen = [(row, slice(*bounds)) for row, bounds in enumerate(parts)]
        return Records(*(np.concatenate([x[row, kept] for row, kept in chosen]) for x in found))


def depth_of(config: Config, depth: int | None, directory: Path) -> int | None:
    """The depth that a run predicts at: the one asked for, or its mean depth of training.

    Raises:
        UserError: a depth for a model that has none.
    """
    if config.model.kind == "recurrent":
        return depth or round(config.depth.mean)
    if depth is not None:
        raise UserError(f"depth goes with a recurrent model; {directory} is a transformer")
    return None


def _refuse_other_tokenizer(
    directory: Path, theirs: dict[str, Any], vocabulary: Vocabulary
) -> None:
    """Refuse a run whose tokenizer is not that of the data, given the fingerprint of its own."""
    ours = vocabulary.meaning
    if any(theirs[field] != ours[field] for field in ("tokenizer", "vocabulary")):
        raise UserError(
            f"{vocabulary.source}: its tokenizer ({ours['tokenizer'][:16]}, {ours['vocabulary']}) "
            f"is not that of {directory} ({theirs['tokenizer'][:16]}, {theirs['vocabulary']}); "
            f"prepare the data with the teacher's tokenizer"
        )


def load_jaxlm(
    directory: Path,
    data: DataDirectory,
    *,
    update: int | None,
    depth: int | None,
    length: int | None,
    k: int,
    batch_rows: int,
    chunk_tokens: int,
) -> JaxlmTeacher:
    """A run's checkpoint as a teacher.

    Args:
        directory: the run.
        data: what it is to predict; it must have the run's tokenizer, not its texts.
        update: which checkpoint; None takes the newest.
        depth: core steps; None takes the mean depth of its training.
        length: T of the rows; None takes the run's.
        k: tokens that a record names.
        batch_rows: rows of a forward pass.
        chunk_tokens: tokens whose logits exist at one time.

    Raises:
        UserError: no run, or one of another tokenizer.
    """
    run, vocabulary = load_weights(directory, update), vocabulary_of(data)
    _refuse_other_tokenizer(directory, run.data_fingerprint, vocabulary)
    depth = depth_of(run.config, depth, directory)
    manifest = directory / "checkpoints" / str(run.update) / MANIFEST
    weights = hashlib.sha256(manifest.read_bytes()).hexdigest() if manifest.is_file() else None
    return JaxlmTeacher(
        model=run.config.model,
        params=run.params,
        depth=depth,
        vocabulary_size=data.vocabulary_size,
        k=k,
        batch_rows=batch_rows,
        chunk_tokens=chunk_tokens,
        context=PackedContext(length or run.config.data.sequence_length),
        identity={
            "kind": "jaxlm",
            "name": directory.resolve().name,
            "update": run.update,
            "weights": weights,
            "depth": depth,
        },
        vocabulary=vocabulary.fingerprint,
    )


# ---------------------------------------------------------------- Hugging Face


def import_library(name: str) -> Any:
    """A library that only this teacher needs.

    Raises:
        UserError: it is missing.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(
            f"a teacher of Hugging Face needs {name}, which cannot be imported; "
            f"run: pip install 'jaxlm[hf]'"
        ) from None


@dataclass
class HuggingFaceTeacher(Teacher):
    """A causal language model with the interface of transformers, on windows of documents."""

    # Called with input_ids and attention_mask [B, W]; its result has `logits` [B, W, V].
    model: Any
    # The module torch.
    torch: Any
    # Entries of the data's vocabulary; logits beyond are padding.
    vocabulary_size: int
    k: int
    # Windows of a forward pass.
    batch_rows: int
    # Positions whose logits are sorted at one time, in float32.
    chunk_tokens: int
    context: Context
    identity: dict[str, Any]
    vocabulary: str | None

    @property
    def group(self) -> int:
        """Windows that are sorted by length together."""
        return self.batch_rows * _SORTED_BATCHES

    def predict(self, stream: TokenStream, spans: Spans) -> Records:
        """Records of consecutive windows; see :class:`Teacher`."""
        found: list[Records | None] = [None] * len(spans)
        longest_first = np.argsort(spans.starts - spans.stops, kind="stable")
        for start in range(0, len(spans), self.batch_rows):
            chosen = longest_first[start : start + self.batch_rows]
            windows = [
                stream.read(*bounds)
                for bounds in zip(
                    spans.starts[chosen].tolist(), spans.stops[chosen].tolist(), strict=True
                )
            ]
            skipped = (spans.first - spans.starts)[chosen].tolist()
            for number, records in zip(chosen.tolist(), self._batch(windows, skipped), strict=True):
                found[number] = records
        whole = [records for records in found if records is not None]
        return Records(*(np.concatenate(parts) for parts in zip(*whole, strict=True)))

    def _batch(self, windows: list[np.ndarray], skipped: list[int]) -> list[Records]:
        """Records of each window, from its token number `skipped` on."""
        torch = self.torch
        # The last token is predicted and not read; of one token alone nothing is predicted.
        width = max(1, *(len(window) - 1 for window in windows))
        tokens = np.zeros((len(windows), width), np.int64)
        mask = np.zeros((len(windows), width), np.int64)
        for row, window in enumerate(windows):
            tokens[row, : len(window) - 1] = window[:-1]
            # Padding stands on the right, where causal attention does not look.
            mask[row, : max(1, len(window) - 1)] = 1
        with torch.inference_mode():
            logits = self.model(
                input_ids=torch.as_tensor(tokens, device=self.model.device),
                attention_mask=torch.as_tensor(mask, device=self.model.device),
                use_cache=False,
            ).logits
            if logits.shape[-1] < self.vocabulary_size:
                raise UserError(
                    f"{self.identity['name']}: gives {logits.shape[-1]:,} logits, the data has "
                    f"{self.vocabulary_size:,} ids; prepare the data with the teacher's tokenizer"
                )
            return [
                self._records(logits[row, max(skip - 1, 0) : len(window) - 1], first=skip == 0)
                for row, (window, skip) in enumerate(zip(windows, skipped, strict=True))
            ]

    def _records(self, logits_NV: Any, first: bool) -> Records:
        """Records from logits; `first`: after an empty one, for a document's first token."""
        torch, k = self.torch, self.k
        parts = [
            (np.zeros((1, k), np.int64), np.zeros((1, k), np.float32), np.zeros(1, np.float32))
        ]
        for start in range(0, logits_NV.shape[0], self.chunk_tokens):
            logits = logits_NV[start : start + self.chunk_tokens, : self.vocabulary_size].float()
            log_partition = torch.logsumexp(logits, -1)
            chosen, ids = torch.topk(logits, k, -1)
            rest = torch.logsumexp(logits.scatter(-1, ids, -float("inf")), -1)
            values = (ids, chosen - log_partition[:, None], rest - log_partition)
            parts.append(tuple(x.cpu().numpy() for x in values))
        return Records(*map(np.concatenate, zip(*(parts if first else parts[1:]), strict=True)))


def load_hugging_face(
    name: str,
    data: DataDirectory,
    *,
    revision: str | None,
    dtype: str,
    quantization: dict[str, Any] | None,
    device_map: str | None,
    context: DocumentContext,
    k: int,
    batch_rows: int,
    chunk_tokens: int,
) -> HuggingFaceTeacher:
    """A model from the Hub or a folder as a teacher; no code of its repository is run.

    Args:
        name: repository, or folder.
        data: what it is to predict; it must have the model's vocabulary.
        revision: branch, tag or commit of the repository.
        dtype: type of the weights, such as bfloat16.
        quantization: arguments of transformers.BitsAndBytesConfig.
        device_map: where the weights go; None: the GPU if there is one, else the CPU.
        context: windows of documents.
        k: tokens that a record names.
        batch_rows: windows of a forward pass.
        chunk_tokens: positions whose logits are sorted at one time.

    Raises:
        UserError: PyTorch or transformers is missing, no such model, another vocabulary, or windows
            longer than the model reads.
    """
    torch, transformers = import_library("torch"), import_library("transformers")
    _refuse_long_windows(name, revision, context.length)
    vocabulary = _refuse_other_pieces(name, revision, vocabulary_of(data))
    try:
        options: dict[str, Any] = {"revision": revision, "dtype": getattr(torch, dtype)}
        if device_map is None and torch.cuda.is_available():
            device_map = "auto"
        if device_map is not None:
            options["device_map"] = device_map
        if quantization is not None:
            options["quantization_config"] = transformers.BitsAndBytesConfig(**quantization)
        model = transformers.AutoModelForCausalLM.from_pretrained(name, **options)
    except (OSError, ValueError, ImportError, TypeError) as error:
        raise UserError(f"{name}: cannot be loaded ({' '.join(str(error).split())})") from None
    model.eval()
    return HuggingFaceTeacher(
        model=model,
        torch=torch,
        vocabulary_size=data.vocabulary_size,
        k=k,
        batch_rows=batch_rows,
        chunk_tokens=chunk_tokens,
        context=context,
        identity={
            "kind": "huggingface",
            # Of a folder its name alone: it may be elsewhere on the machine that goes on.
            "name": Path(name).resolve().name if Path(name).is_dir() else name,
            "revision": getattr(model.config, "_commit_hash", None) or revision,
            "weights": dtype,
            "quantization": quantization,
            "depth": None,
        },
        vocabulary=vocabulary,
    )


def _refuse_long_windows(name: str, revision: str | None, length: int) -> None:
    """Refuse windows that are longer than a model of Hugging Face reads."""
    settings = read_hugging_face_config(name, revision).get_text_config()
    limit = getattr(settings, "max_position_embeddings", None)
    if limit is not None and length > limit:
        raise UserError(f"length {length}: {name} reads at most {limit:,} tokens")


def _refuse_other_pieces(name: str, revision: str | None, vocabulary: Vocabulary) -> str:
    """The fingerprint of the vocabulary that data and a model of Hugging Face share."""
    transformers = import_library("transformers")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, revision=revision)
        pieces = {i: piece for piece, i in tokenizer.get_vocab().items()}
    except (OSError, ValueError, ImportError) as error:
        text = " ".join(str(error).split())
        raise UserError(f"{name}: its tokenizer cannot be loaded ({text})") from None
    return refuse_other_vocabulary(vocabulary, name, pieces)


def read_hugging_face_config(name: str, revision: str | None) -> Any:
    """The settings of a model, without its weights.

    Raises:
        UserError: transformers is missing, or there is no such model.
    """
    transformers = import_library("transformers")
    try:
        return transformers.AutoConfig.from_pretrained(name, revision=revision)
    except (OSError, ValueError) as error:
        raise UserError(f"{name}: cannot be read ({' '.join(str(error).split())})") from None
