"""Every setting of a run: typed, documented, validated, and with its default here alone.

A run is described by YAML files and ``key=value`` words that are merged from left to right and
then read into :class:`Config`, a tree of frozen dataclasses. Reading is strict: an unknown or
repeated key, a wrong type, a value out of range or a contradiction is a :class:`UserError` that
names the file, the line, the key and, where one is near, the key that was meant.

YAML scalars follow the JSON-like core of YAML 1.2 rather than YAML 1.1, so that ``1e-4`` is a
number while ``no``, ``012``, ``3:20`` and ``2026-01-01`` stay text.
"""

import dataclasses
import difflib
import json
import re
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from jaxlm.errors import UserError

T = typing.TypeVar("T")
_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

Count = Annotated[int, Field(ge=0)]
# JAX keys take 32 bits of a seed: larger ones would silently be cut.
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Positive = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(ge=0.0)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Dtype = Literal["float32", "bfloat16", "float64"]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Text = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$")]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, config=_STRICT)
class RunConfig:
    """Name and place of a run."""

    # Directory name of the run under `directory`.
    name: Name = "run"
    # Parent directory of all runs.
    directory: Text = "runs"
    # Seed of weights, dropout, initial states and depth draws.
    seed: Seed = 42


@dataclass(frozen=True, config=_STRICT)
class PrepareConfig:
    """How raw text becomes token shards (scripts/prepare_data.py)."""

    # Files, folders (every file in them whose name says that it can be read) or globs of .txt, .md,
    # .jsonl and .parquet, each plain, .gz or .zst; `package:NAME/GLOB` reads the files of an
    # installed Python package without importing it.
    inputs: tuple[Text, ...] = ()
    # Seed of the order in which the files are read.
    seed: Seed = 42
    # Where the text is in a JSON object or Parquet row; a dot goes into nested ones: meta.body.
    text_key: Text = "text"
    # What a document of a text file is: the whole file, a paragraph (blank lines between), a line.
    text_documents: Literal["file", "paragraph", "line"] = "file"
    # Unicode normalisation: none, NFC, or NFKC (half-width katakana and the like become standard).
    normalization: Literal["none", "NFC", "NFKC"] = "none"
    # Bytes that are not UTF-8 and lone surrogates: replace each by U+FFFD, or skip the document.
    invalid_text: Literal["replace", "skip"] = "replace"
    # Zero-width characters (U+200B, U+2060, U+FEFF): remove or keep.
    zero_width: Literal["remove", "keep"] = "remove"
    # Documents of fewer characters, after cleaning, are skipped.
    minimum_characters: Positive = 1
    # Documents of more characters, after cleaning, are skipped.
    maximum_characters: Positive = 10_000_000
    # Skip a document whose cleaned text came before.
    deduplicate: bool = True
    # Skip a document of which so large a share of 5-character shingles (Jaccard similarity) is that
    # of an earlier one, by MinHash; null looks for equal texts only.
    near_duplicates: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    # A Hugging Face tokenizer.json or a SentencePiece .model; null trains one on the training
    # documents.
    tokenizer: Text | None = None
    # The kind trained here: byte-level BPE, or unigram with byte fallback.
    train: Literal["bpe", "unigram"] = "bpe"
    # Bytes of text that it is trained on: the first of the training documents.
    train_bytes: Positive = 100_000_000
    # Entries of a tokenizer trained here, special tokens and 256 bytes included.
    vocabulary_size: Annotated[int, Field(ge=257)] = 4096
    # The entry of the vocabulary that begins a document; null: none does.
    begin_token: Text | None = None
    # The entry of the vocabulary that ends a document.
    end_token: Text = "<|endoftext|>"
    # Share of documents held out for validation, chosen by a hash of each document's text.
    validation_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.02
    # Tokens per shard file.
    shard_tokens: Positive = 2**26
    # Processes that clean and tokenise; null is one a core. The result does not depend on it.
    processes: Positive | None = None

    def __post_init__(self) -> None:
        _require(
            self.minimum_characters <= self.maximum_characters,
            f"minimum_characters ({self.minimum_characters}) is above maximum_characters "
            f"({self.maximum_characters})",
        )
        _require(
            self.deduplicate or self.near_duplicates is None,
            "near_duplicates goes with deduplicate: true",
        )


@dataclass(frozen=True, config=_STRICT)
class SourceConfig:
    """One of several data directories that are mixed."""

    # Directory of prepared shards with its manifest.json.
    directory: Text
    # Share of the tokens, relative to the other sources' weights.
    weight: Annotated[float, Field(gt=0.0)]


@dataclass(frozen=True, config=_STRICT)
class DataConfig:
    """Which tokens are read, and in which order."""

    # Directory of prepared shards with its manifest.json.
    directory: Text = "prepared/data"
    # Several data directories of one tokenizer, mixed by weight; empty reads `directory` alone.
    # Validation is `directory`'s.
    sources: tuple[SourceConfig, ...] = ()
    # Range of the stream's tokens to train on, such as [200000000, 400000000]; null is all.
    tokens: tuple[Count, Positive] | None = None
    # Validation reads the documents among so many first tokens of its split, so that it stays what
    # it was when the directory grows; null reads all.
    validation_tokens: Positive | None = None
    # Tokens a row: the context length in training.
    sequence_length: Positive = 1024
    # packed: rows are consecutive windows of the token stream, documents kept apart by segment
    # ids. best_fit: whole documents, and pieces of long ones, put together so that few rows have
    # padding. padded: one document a row (long ones in pieces), padded on the right.
    layout: Literal["packed", "best_fit", "padded"] = "packed"
    # Row lengths below sequence_length that short documents are padded to (padded only): windows
    # then hold rows of one length, the more of them the shorter they are.
    buckets: tuple[Positive, ...] = ()
    # Rows are shuffled among so many consecutive tokens of the stream; null shuffles all. A run on
    # a range of the stream is in the order of a run on the whole where both ends of the range are
    # multiples of it.
    shuffle_tokens: Positive | None = None
    # Passes over the training rows, each in a new order. 1 is a single pass.
    epochs: Positive = 1
    # Seed of the order of rows.
    seed: Seed = 42
    # Windows prepared ahead on the host, and as many again on the device.
    prefetch: Positive = 2

    def __post_init__(self) -> None:
        _require(
            self.tokens is None or self.tokens[0] < self.tokens[1],
            f"tokens {self.tokens}: the first must be below the last",
        )
        _require(
            not self.buckets or self.layout == "padded",
            f"buckets go with layout: padded; layout is {self.layout}",
        )
        _require(
            all(b < self.sequence_length for b in self.buckets)
            and tuple(sorted(set(self.buckets))) == self.buckets,
            f"buckets {self.buckets} must ascend and be below sequence_length "
            f"({self.sequence_length})",
        )


@dataclass(frozen=True, config=_STRICT)
class RecurrentConfig:
    """The parts of a recurrent-depth model (used when model.kind is recurrent)."""

    # Layers before the recurrence, applied once.
    prelude_layers: Positive = 2
    # Layers of the weight-shared core, applied `depth` times.
    core_layers: Positive = 4
    # Layers after the recurrence, applied once.
    coda_layers: Positive = 2
    # How the prelude's output enters each core step: add; concat (linear map of [state, input]);
    # diagonal (contractive, per-channel decay below 1).
    injection: Literal["add", "concat", "diagonal"] = "concat"
    # State before the first core step: truncated normal noise, zeros, or the prelude's output.
    initial_state: Literal["normal", "zero", "prelude"] = "normal"


@dataclass(frozen=True, config=_STRICT)
class TransformerConfig:
    """The plain Transformer (used when model.kind is transformer)."""

    # Number of layers.
    layers: Positive = 8


@dataclass(frozen=True, config=_STRICT)
class ModelConfig:
    """Architecture."""

    # recurrent (prelude, weight-shared core, coda) or transformer.
    kind: Literal["recurrent", "transformer"] = "recurrent"
    # Entries of the embedding; null takes the vocabulary size of the data.
    vocabulary_size: Positive | None = None
    # Width of the residual stream.
    width: Positive = 512
    # Query heads.
    heads: Positive = 8
    # Key and value heads (grouped-query attention); null means one per query head.
    kv_heads: Positive | None = None
    # Width of the gated MLP's hidden layer.
    feed_forward: Positive = 1536
    # pre: norm before each branch, a norm on the prelude's output and on the state.
    # sandwich: norms before each branch and on the residual stream after it (Huginn).
    norm: Literal["pre", "sandwich"] = "pre"
    # RMS norm of queries and keys, per head, before the rotation.
    qk_norm: bool = True
    # Share one matrix between the embedding and the output head.
    tie_embeddings: bool = True
    # Base of the rotary position embedding.
    rope_base: Annotated[float, Field(gt=1.0)] = 50000.0
    # Added to the mean square in RMS norms.
    norm_epsilon: Annotated[float, Field(gt=0.0)] = 1e-6
    # Dropout rate on the embedding and on each residual branch.
    dropout: Fraction = 0.0
    # auto: cuDNN flash attention on a GPU in 16-bit precision, XLA elsewhere.
    attention: Literal["auto", "xla", "cudnn"] = "auto"
    # Rematerialisation of each layer: none keeps all activations; dots keeps matrix products; full
    # keeps the layer's input only.
    remat: Literal["none", "dots", "full"] = "full"
    # Storage type of the weights.
    param_dtype: Dtype = "float32"
    # Type of activations and matrix products (norms, softmax and loss are at least float32).
    compute_dtype: Dtype = "float32"
    recurrent: RecurrentConfig = RecurrentConfig()
    transformer: TransformerConfig = TransformerConfig()

    def __post_init__(self) -> None:
        _require(
            self.width % self.heads == 0,
            f"width ({self.width}) must be a multiple of heads ({self.heads})",
        )
        _require(
            self.head_size % 2 == 0,
            f"width / heads is {self.head_size}; rotary embeddings need an even head size",
        )
        _require(
            self.heads % self.key_value_heads == 0,
            f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})",
        )

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.width // self.heads

    @property
    def key_value_heads(self) -> int:
        """Number of key and value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def vocabulary(self) -> int:
        """The vocabulary size, which must be known by now."""
        if self.vocabulary_size is None:
            raise ValueError("model.vocabulary_size is still null: set it, or read the data first")
        return self.vocabulary_size


@dataclass(frozen=True, config=_STRICT)
class DepthConfig:
    """Core iterations per training update (ignored by a transformer)."""

    # fixed: always `mean`. uniform: integers from minimum to 2 * mean - minimum.
    # lognormal_poisson: 1 + Poisson(exp(normal)), with the mean asked for.
    distribution: Literal["fixed", "uniform", "lognormal_poisson"] = "lognormal_poisson"
    # Mean depth before the cap.
    mean: Annotated[float, Field(ge=1.0)] = 6.0
    # Standard deviation of the normal inside lognormal_poisson.
    sigma: Rate = 0.5
    # Draws below this are raised to it.
    minimum: Positive = 1
    # Draws above this are lowered to it (the cap).
    maximum: Positive = 16
    # Last core iterations that carry gradient: a number, or full for all of them.
    backprop: Positive | Literal["full"] = 4

    def __post_init__(self) -> None:
        _require(
            self.minimum <= self.mean <= self.maximum,
            f"minimum ({self.minimum}) <= mean ({self.mean:g}) <= maximum ({self.maximum}) "
            "must hold",
        )
        _require(
            self.distribution != "fixed" or float(self.mean).is_integer(),
            f"mean ({self.mean:g}) must be a whole number when distribution is fixed",
        )
        _require(
            self.distribution != "uniform" or float(2 * self.mean).is_integer(),
            f"mean ({self.mean:g}) must be a multiple of 0.5 when distribution is uniform",
        )
        _require(
            self.backprop == "full" or self.backprop <= self.maximum,
            f"backprop ({self.backprop}) is above maximum ({self.maximum}); use full for all steps",
        )

    @property
    def max_backprop(self) -> int:
        """Largest gradient depth of any update: the static length of the gradient scan."""
        return self.maximum if self.backprop == "full" else self.backprop

    def backprop_depth(self, depth: int) -> int:
        """Gradient depth of an update of the given depth."""
        return min(depth, self.max_backprop)


@dataclass(frozen=True, config=_STRICT)
class LossConfig:
    """Training loss."""

    # Tokens whose logits exist at one time.
    chunk_tokens: Positive = 512
    # Weight of the mean squared log-partition (z-loss); 0 is off.
    z_loss: Rate = 0.0


@dataclass(frozen=True, config=_STRICT)
class DistillationConfig:
    """Learning from a teacher's cached log-probabilities, see docs/distillation.md.

    The loss is alpha * T^2 * KL(teacher || student) + (1 - alpha) * cross-entropy, the divergence
    over the k tokens that the teacher names and one bucket for all others.
    """

    # Folder that scripts/cache_teacher.py wrote; null: no distillation.
    cache: Text | None = None
    # Share of the divergence in the loss; 0 only measures it.
    alpha: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    # Temperature T of teacher and student; above 1 the less likely tokens weigh more.
    temperature: Annotated[float, Field(gt=0.0)] = 1.0


@dataclass(frozen=True, config=_STRICT)
class OptimConfig:
    """Optimizer, learning rate, clipping and accumulation."""

    # adafactor (jaxlm's: factored over stacked layers, float32 statistics, 0.01 bytes a parameter);
    # adamw (8 bytes); adamw_8bit (2 bytes); muon (4 bytes, matrices orthogonalised, the rest by
    # Adam); or optax_adafactor, the stock one.
    name: Literal["adafactor", "adamw", "adamw_8bit", "muon", "optax_adafactor"] = "adafactor"
    # How bf16 weights take an update that was computed in float32: stochastic is right on average;
    # residual adds 8 bits (1 byte) and kahan a second bf16 (2 bytes) to each weight; nearest loses
    # updates below half a step. Weights in float32 know no difference.
    rounding: Literal["stochastic", "residual", "kahan", "nearest"] = "stochastic"
    # Peak learning rate; adafactor's is relative to the scale of each layer's weights.
    learning_rate: Annotated[float, Field(gt=0.0)] = 1e-2
    # After the warm-up: cosine decay to the end of the run, constant, or warmup_stable_decay
    # (constant, then linear over the last `decay_updates`).
    schedule: Literal["cosine", "constant", "warmup_stable_decay"] = "cosine"
    # Updates of linear warm-up: update i (from 0) uses peak * (i + 1) / warmup_updates.
    warmup_updates: Count = 0
    # Updates of the final linear decay (warmup_stable_decay only).
    decay_updates: Count = 0
    # Learning rate at the end of the decay.
    end_learning_rate: Rate = 0.0
    # Decay rate of the first moment (adamw, adamw_8bit, muon's Adam).
    beta1: Fraction = 0.9
    # Decay rate of the second moment (adamw, adamw_8bit, muon's Adam).
    beta2: Fraction = 0.95
    # Added to the root of the second moment (adamw, adamw_8bit, muon).
    epsilon: Annotated[float, Field(gt=0.0)] = 1e-8
    # Decay rate of the running mean of updates (adafactor); 0 keeps none.
    momentum: Fraction = 0.0
    # Storage type of that mean: 4, 2 or 1 byte a parameter.
    momentum_dtype: Literal["float32", "bfloat16", "int8"] = "bfloat16"
    # Tokens after which a squared gradient counts half in adafactor's second moment; null lets the
    # decay grow with the updates, up to 0.999.
    half_life_tokens: Positive | None = None
    # Decoupled weight decay, multiplied by the learning rate; matrices and embeddings only.
    weight_decay: Rate = 0.1
    # global: scale the gradient to a global norm of at most max_norm. rms: only adafactor's own
    # limit on each layer's update. off: never scale. With training.update: in_backward, whose
    # gradients never exist together, not global but two_pass (the same, for a second backward
    # pass), previous_norm (scale by the last update's norm), rms or off.
    clip: Literal["global", "rms", "two_pass", "previous_norm", "off"] = "global"
    # Largest global gradient norm after clipping.
    max_norm: Annotated[float, Field(gt=0.0)] = 1.0
    # token_weighted: sum gradients over micro-batches and divide once. optax_multisteps: the same
    # mean through a stock optax.MultiSteps, which keeps its own float32 accumulator.
    accumulation: Literal["token_weighted", "optax_multisteps"] = "token_weighted"
    # Type of the sum over micro-batches (token_weighted): bfloat16 halves its memory and rounds
    # stochastically, unbiased, with an error of about 3 % over 512 micro-batches.
    accumulator_dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        _require(
            self.end_learning_rate <= self.learning_rate,
            f"end_learning_rate ({self.end_learning_rate:g}) is above "
            f"learning_rate ({self.learning_rate:g})",
        )
        _require(
            self.clip != "rms" or self.name == "adafactor",
            f"clip: rms is adafactor's own limit; name is {self.name}",
        )
        _require(
            self.name == "adafactor" or not (self.momentum or self.half_life_tokens),
            f"momentum and half_life_tokens go with name: adafactor; name is {self.name}",
        )
        _require(
            self.accumulation == "token_weighted" or self.accumulator_dtype == "float32",
            "accumulator_dtype: bfloat16 goes with accumulation: token_weighted; "
            "optax.MultiSteps sums in float32",
        )
        _require(
            (self.schedule == "warmup_stable_decay") == (self.decay_updates > 0),
            f"decay_updates ({self.decay_updates}) goes with schedule: warmup_stable_decay, which "
            f"needs at least 1; schedule is {self.schedule}",
        )


@dataclass(frozen=True, config=_STRICT)
class TrainingConfig:
    """Size and number of updates."""

    # Weight updates in all; null takes what data.epochs gives.
    updates: Positive | None = None
    # Rows a forward pass sees.
    micro_batch_rows: Positive = 8
    # Micro-batches an update; rows a window = micro_batch_rows * micro_batches.
    micro_batches: Positive = 1
    # after_backward: all gradients, then the optimizer. in_backward: the optimizer runs on each
    # layer as the backward pass reaches it, so that no full gradient ever exists.
    update: Literal["after_backward", "in_backward"] = "after_backward"
    # Where in_backward keeps the inputs of layers between its passes: on the device, or in pinned
    # host memory.
    block_inputs: Literal["device", "host"] = "device"
    # Updates in a row that may be skipped for a non-finite loss or gradient before the run stops.
    max_nonfinite_updates: Positive = 10

    @property
    def window_rows(self) -> int:
        """Rows of one update."""
        return self.micro_batch_rows * self.micro_batches


@dataclass(frozen=True, config=_STRICT)
class EvaluationConfig:
    """Validation during and after training."""

    # Updates between validation passes; 0 evaluates at the end only.
    every: Count = 500
    # Depths of the final evaluation (a recurrent model; a transformer has one).
    depths: Annotated[tuple[Positive, ...], Field(min_length=1)] = (1, 3, 6, 12)
    # Rows a forward pass sees.
    batch_rows: Positive = 8
    # Rows of validation passes during training; the final one reads all. null means all.
    rows: Positive | None = None

    def __post_init__(self) -> None:
        _require(len(set(self.depths)) == len(self.depths), "depths repeats a value")


@dataclass(frozen=True, config=_STRICT)
class CheckpointConfig:
    """Checkpoints."""

    # Updates between checkpoints; the end of the run and an interruption always save.
    every: Positive = 500
    # Newest checkpoints kept. Beside them stays the one with the best validation loss, of those
    # that were evaluated at their own update (see evaluation.every).
    keep: Positive = 2
    # Keep for good the first checkpoint at or after each multiple of so many target tokens; null
    # keeps none for good.
    keep_every_tokens: Positive | None = None


@dataclass(frozen=True, config=_STRICT)
class CurriculumConfig:
    """Depth, or gradient depth, grows over the first updates."""

    # Which controller this is.
    kind: Literal["curriculum"] = "curriculum"
    # mean_depth: from depth.minimum to depth.mean. backprop_depth: from 1 to depth.backprop.
    quantity: Literal["mean_depth", "backprop_depth"] = "mean_depth"
    # Share of the way after a share x of the updates: linear, x; one_minus_sqrt, 1 - sqrt(1 - x),
    # which stays low for longer.
    shape: Literal["linear", "one_minus_sqrt"] = "linear"
    # Updates that the growth takes.
    updates: Positive = 1000


@dataclass(frozen=True, config=_STRICT)
class RateByDepthConfig:
    """The learning rate of an update is multiplied by (mean depth / depth drawn) ** power."""

    # Which controller this is.
    kind: Literal["rate_by_depth"] = "rate_by_depth"
    # Exponent; 0.5 gives an update of half the mean depth 1.4 times the rate.
    power: Annotated[float, Field(gt=0.0)] = 0.5


@dataclass(frozen=True, config=_STRICT)
class PlateauConfig:
    """The learning rate falls, and stays down, when the validation loss stands still."""

    # Which controller this is.
    kind: Literal["plateau"] = "plateau"
    # A loss that is not lower by so much (nats) than the best one that was is no improvement.
    improvement: Rate = 0.005
    # Validation passes in a row without improvement before the rate falls.
    patience: Positive = 4
    # Validation passes after a fall that do not count.
    cooldown: Count = 2
    # What the multiplier is multiplied by.
    factor: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    # Floor of the multiplier.
    minimum: Annotated[float, Field(gt=0.0, le=1.0)] = 0.01


@dataclass(frozen=True, config=_STRICT)
class SpikeConfig:
    """The learning rate is lower for some updates after the training loss has jumped up."""

    # Which controller this is.
    kind: Literal["spike"] = "spike"
    # Updates that the running median is taken over; none are judged before there are so many.
    window: Annotated[int, Field(ge=2)] = 100
    # A loss above median + deviations * (median absolute deviation) is a spike, and so is one that
    # is not finite.
    deviations: Annotated[float, Field(gt=0.0)] = 8.0
    # The multiplier after a spike.
    factor: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    # Updates that the multiplier applies to.
    updates: Positive = 50


@dataclass(frozen=True, config=_STRICT)
class GradientNormConfig:
    """The learning rate is lower while gradients are larger than they used to be.

    The multiplier is (usual norm / recent norm) ** power, at most 1, from the moment that the
    recent norm is above `begin` times the usual one until it is below `end` times it.
    """

    # Which controller this is.
    kind: Literal["gradient_norm"] = "gradient_norm"
    # Updates that the recent norm is the median of.
    recent: Positive = 20
    # Updates before those that the usual norm is the median of; nothing is judged before there are
    # so many.
    usual: Positive = 200
    # Recent over usual norm at which the multiplier begins to follow, and below which it ends.
    begin: Annotated[float, Field(gt=1.0)] = 2.0
    # See begin.
    end: Annotated[float, Field(gt=0.0)] = 1.25
    # Exponent.
    power: Annotated[float, Field(gt=0.0)] = 1.0
    # Floor of the multiplier.
    minimum: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1

    def __post_init__(self) -> None:
        _require(self.end < self.begin, f"end ({self.end:g}) must be below begin ({self.begin:g})")


ControllerConfig = Annotated[
    CurriculumConfig | RateByDepthConfig | PlateauConfig | SpikeConfig | GradientNormConfig,
    Field(discriminator="kind"),
]


@dataclass(frozen=True, config=_STRICT)
class ControlConfig:
    """What is changed during training beside the schedule, see docs/control.md."""

    # Controllers, such as [{kind: spike}, {kind: curriculum, updates: 2000}]; learning-rate
    # multipliers of several are multiplied.
    controllers: tuple[ControllerConfig, ...] = ()

    def __post_init__(self) -> None:
        grown = [c.quantity for c in self.controllers if isinstance(c, CurriculumConfig)]
        _require(len(set(grown)) == len(grown), "two curricula set one quantity")


@dataclass(frozen=True, config=_STRICT)
class RewindConfig:
    """What follows when the training loss has jumped up and does not come back."""

    # skip_data: go back to the last checkpoint of before and pass over the data read since.
    # lower_rate: go back and read it again at a lower learning rate. off: go on.
    response: Literal["off", "skip_data", "lower_rate"] = "off"
    # Updates that the running median of losses is taken over.
    window: Annotated[int, Field(ge=2)] = 100
    # A loss above median + deviations * (median absolute deviation) is beyond.
    deviations: Annotated[float, Field(gt=0.0)] = 8.0
    # Updates in a row that must be beyond, or not finite.
    patience: Positive = 10
    # Factor of the learning rate after going back (lower_rate).
    rate_factor: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    # Updates that it applies to.
    rate_updates: Positive = 200
    # Rewinds after which the run stops instead.
    maximum: Positive = 3


@dataclass(frozen=True, config=_STRICT)
class ProfileConfig:
    """Where the time of an update goes."""

    # Updates of a new run that are timed by phase, each with all its phases once more after it:
    # every second one after the compilation. 0 times none.
    updates: Count = 0
    # Updates [first, last) whose JAX profiler trace is written to the run's trace folder, for
    # TensorBoard or Perfetto; null writes none.
    trace: tuple[Count, Positive] | None = None

    def __post_init__(self) -> None:
        _require(
            self.trace is None or self.trace[0] < self.trace[1],
            f"trace {self.trace}: the first must be below the last",
        )


# Monitors that raise an alarm, see docs/control.md.
Monitor = Literal[
    "token_correlation",
    "depth_gain",
    "idle_residual",
    "state_growth",
    "overthinking",
    "state_gain",
    "core_ratio",
]


@dataclass(frozen=True, config=_STRICT)
class MonitorsConfig:
    """What is watched of a recurrent model during training.

    Each monitor is a figure with a threshold; null watches without raising an alarm. An alarm is
    raised when the figure has been beyond its threshold at every pass of the last `window` updates,
    and once more only after it has been back. With these defaults it comes at most 200 updates
    after the figure went beyond.
    """

    # Updates between passes, beside those at each validation pass; 0 or null has only these.
    every: Count | None = 100
    # Validation rows that monitors look at; 0 turns them off.
    rows: Count = 16
    # Nothing counts before this update, nor during optim.warmup_updates.
    after_updates: Count = 500
    # Updates that a figure must be beyond its threshold for.
    window: Count = 100
    # Above: all positions have become alike (mean cosine of their states less that of chance).
    token_correlation: Rate | None = 0.9
    # Below: depth changes nothing (loss at depth 1 less the loss at the mean depth, nats).
    depth_gain: Rate | None = 0.02
    # Below: the state stands still after the first step (largest relative residual of steps 2 to
    # the mean depth). A single step with a residual below it counts as idle (`first_idle_step`).
    idle_residual: Rate | None = 0.03
    # Above: the state grows with depth (its norm after 4 times the mean depth, over the norm after
    # the first step).
    state_growth: Rate | None = 4.0
    # Above: more steps than in training do harm (the worse of the losses at 2 and 4 times the mean
    # depth, less the loss at the mean depth, nats).
    overthinking: Rate | None = 0.02
    # Above: the injection amplifies the state (largest singular value of its map from state to
    # state). At the start that of `concat` is 1.3, of `diagonal` 0.45, of `add` always 1.
    state_gain: Rate | None = 4.0
    # Above: the core learns too fast (change over weights of the core, over the same of the rest).
    core_ratio: Rate | None = 10.0
    # Monitors whose alarm saves a checkpoint and stops the run; the others only warn.
    stop: tuple[Monitor, ...] = ()


@dataclass(frozen=True, config=_STRICT)
class PreflightConfig:
    """Trials before a long run and their thresholds (scripts/preflight.py, docs/preflight.md)."""

    # Updates of each trial: one at the run's learning rate, one each at 0.1 and 10 times it.
    updates: Annotated[int, Field(ge=8)] = 30
    # Operations of a trial's update (forward and backward); larger runs are tried on fewer tokens
    # and, where that is not enough, on a smaller model. null: 5e10 on a CPU, 2e14 elsewhere.
    update_flops: Annotated[float, Field(gt=0.0)] | None = None
    # Tokens of each split that are read to check ids and duplicates, from the first.
    data_tokens: Positive = 50_000_000
    # Decoded documents that are shown.
    samples: Count = 2
    # Share of training documents, of training rows, or of validation documents among the training
    # ones, that may repeat an earlier one exactly.
    duplicates: Fraction = 0.01
    # Share of characters of decoded text that may be U+FFFD.
    replacement_characters: Fraction = 0.01
    # Share of tokens that encoding the decoded text must give again.
    encoded_again: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9
    # Mean loss (nats) that two tiny documents must get below, and in how many epochs.
    overfit_loss: Annotated[float, Field(gt=0.0)] = 0.1
    # Updates on the two documents.
    overfit_epochs: Positive = 60
    # Relative difference between the loss in training and the same loss in NumPy.
    loss_difference: Annotated[float, Field(gt=0.0)] = 1e-3
    # Largest change of an output, relative to the largest output, when later tokens change.
    causality: Rate = 1e-6
    # Distance of the first loss from ln(vocabulary), nats.
    initial_loss: Annotated[float, Field(gt=0.0)] = 0.25
    # What the loss must fall by in the trial, nats.
    loss_fall: Annotated[float, Field(gt=0.0)] = 0.2
    # Largest share of time spent waiting for data.
    data_wait: Fraction = 0.02
    # Days that the run may take; null reports them only.
    days: Annotated[float, Field(gt=0.0)] | None = None
    # How far the loss at the mean depth may be above that at depth 1 (nats); recurrent models.
    depth_order: Rate = 0.05
    # The trial's fall of the loss must be this share of the best of the three rates: a rate for
    # weeks falls by less in its first updates than ten times that rate.
    rate_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05
    # Largest change of an update relative to the weights, of the trial's median update.
    update_ratio_maximum: Annotated[float, Field(gt=0.0)] = 0.3
    # Smallest such change.
    update_ratio_minimum: Annotated[float, Field(gt=0.0)] = 1e-3
    # Share of a finished run's updates that may have been skipped for a loss, gradient or change
    # that was not finite.
    skipped_updates: Fraction = 0.01

    def __post_init__(self) -> None:
        _require(
            self.update_ratio_minimum < self.update_ratio_maximum,
            f"update_ratio_minimum ({self.update_ratio_minimum:g}) must be below "
            f"update_ratio_maximum ({self.update_ratio_maximum:g})",
        )


@dataclass(frozen=True, config=_STRICT)
class LoggingConfig:
    """What is shown and recorded beside metrics.jsonl."""

    # Updates between lines where the output is not a terminal.
    every: Positive = 50
    # Write TensorBoard event files.
    tensorboard: bool = True


@dataclass(frozen=True, config=_STRICT)
class Config:
    """A run."""

    run: RunConfig = RunConfig()
    prepare: PrepareConfig = PrepareConfig()
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    depth: DepthConfig = DepthConfig()
    loss: LossConfig = LossConfig()
    distillation: DistillationConfig = DistillationConfig()
    optim: OptimConfig = OptimConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    monitors: MonitorsConfig = MonitorsConfig()
    control: ControlConfig = ControlConfig()
    rewind: RewindConfig = RewindConfig()
    profile: ProfileConfig = ProfileConfig()
    preflight: PreflightConfig = PreflightConfig()
    logging: LoggingConfig = LoggingConfig()

    def __post_init__(self) -> None:
        if self.training.updates is not None:
            check_horizon(self, self.training.updates)
        _require(
            self.distillation.cache is None or not self.data.sources,
            "distillation.cache belongs to one data directory; data.sources mixes several",
        )
        for controller in self.control.controllers:
            if isinstance(controller, (CurriculumConfig, RateByDepthConfig)):
                _require(
                    self.model.kind == "recurrent",
                    f"control.controllers: {controller.kind} goes with model.kind: recurrent",
                )
            if isinstance(controller, PlateauConfig):
                _require(
                    self.evaluation.every > 0,
                    "control.controllers: plateau reads the validation passes during training; "
                    "evaluation.every is 0",
                )
        optim, training = self.optim, self.training
        if training.update == "after_backward":
            _require(
                optim.clip not in ("two_pass", "previous_norm"),
                f"optim.clip: {optim.clip} goes with training.update: in_backward; "
                "after_backward clips by the global norm itself (optim.clip: global)",
            )
            _require(
                training.block_inputs == "device",
                "training.block_inputs: host goes with training.update: in_backward",
            )
            return
        _require(
            optim.clip != "global",
            "optim.clip: global needs all gradients at once, which training.update: in_backward "
            "never has; use two_pass (exact, costs a second backward pass), previous_norm, rms "
            "(adafactor) or off",
        )
        _require(
            optim.name != "optax_adafactor",
            "optim.name: optax_adafactor mixes the layers of a stack, which training.update: "
            "in_backward updates one by one; use adafactor",
        )
        _require(
            optim.accumulation == "token_weighted" and optim.accumulator_dtype == "float32",
            "training.update: in_backward sums each layer's gradient in float32 itself; leave "
            "optim.accumulation and optim.accumulator_dtype at their defaults",
        )
        _require(
            self.model.remat == "full",
            "training.update: in_backward keeps the inputs of layers and nothing else; it needs "
            f"model.remat: full, not {self.model.remat}",
        )


def check_horizon(config: Config, updates: int) -> None:
    """Raise ValueError unless the learning-rate schedule fits into `updates` updates."""
    optim = config.optim
    _require(
        optim.warmup_updates < updates,
        f"optim.warmup_updates ({optim.warmup_updates}) must be below training.updates ({updates})",
    )
    _require(
        optim.warmup_updates + optim.decay_updates <= updates,
        f"optim.warmup_updates ({optim.warmup_updates}) + optim.decay_updates "
        f"({optim.decay_updates}) exceed training.updates ({updates})",
    )


# --------------------------------------------------------------------------------------------
# Reading


class _Loader(yaml.SafeLoader):
    """YAML with the scalars of YAML 1.2's core schema, refusing repeated keys and tags."""

    # None of YAML 1.1's guesses about scalars; those of YAML 1.2 are added below.
    yaml_implicit_resolvers: typing.ClassVar[dict] = {}  # pyright: ignore[reportIncompatibleVariableOverride]

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if getattr(event, "anchor", None) or getattr(event, "tag", None):
            problem = "anchors, aliases and tags (& * !) are not supported; write the value out"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key!r} is not text", problem_mark=key_node.start_mark
                )
            if "." in key:
                raise yaml.MarkedYAMLError(
                    problem=f"the key '{key}' has a dot: in a file, nest the key in its section",
                    problem_mark=key_node.start_mark,
                )
            if key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key '{key}' stands twice (first on line {seen[key]})",
                    problem_mark=key_node.start_mark,
                )
            seen[key] = line
        return super().construct_mapping(node, deep=deep)


_INTEGER = re.compile(r"^[-+]?(0|[1-9][0-9]*)$")
_FLOAT = re.compile(r"^[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?$")
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:null", re.compile(r"^(null|Null|NULL|~|)$"), ["n", "N", "~", ""]
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INTEGER, list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
# YAML 1.1's own number constructors read 012 as octal and 3:20 in base 60.
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))
_Loader.add_constructor("tag:yaml.org,2002:float", lambda loader, node: float(node.value))


class _Dumper(yaml.SafeDumper):
    """Quotes exactly the text that :class:`_Loader` would read as something else."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def _parse_yaml(text: str, source: str) -> tuple[Any, dict[str, int]]:
    """Return the value of a YAML text and the line of each dotted key."""
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return {}, {}
        lines: dict[str, int] = {}

        def walk(node: yaml.Node, path: str) -> None:
            if isinstance(node, yaml.MappingNode):
                for key_node, value_node in node.value:
                    key = f"{path}.{key_node.value}" if path else str(key_node.value)
                    lines.setdefault(key, key_node.start_mark.line + 1)
                    walk(value_node, key)

        walk(node, "")
        return loader.construct_document(node), lines
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{source}{line}: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{source}: not valid YAML ({' '.join(str(error).split())})") from None
    finally:
        if loader is not None:
            loader.dispose()


def _merge(
    base: dict, extra: dict, where: dict[str, str], origin: typing.Callable, path: str
) -> None:
    for key, value in extra.items():
        dotted = f"{path}.{key}" if path else key
        where[dotted] = origin(dotted)
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merge(base[key], value, where, origin, dotted)
        elif isinstance(value, dict):
            base[key] = {}
            _merge(base[key], value, where, origin, dotted)
        else:
            base[key] = value


def _valid_keys(cls: type = Config, path: str = "") -> dict[str, str]:
    """Map each dotted key to its kind: 'section' or 'setting'."""
    keys: dict[str, str] = {}
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        dotted, hint = f"{path}{field.name}", hints[field.name]
        if type(None) in (members := typing.get_args(hint)):  # a section that may be absent
            hint = next(member for member in members if member is not type(None))
        if dataclasses.is_dataclass(hint):
            keys[dotted] = "section"
            keys |= _valid_keys(typing.cast(type, hint), f"{dotted}.")
        else:
            keys[dotted] = "setting"
    return keys


def _nearest(dotted: str, valid: dict[str, str]) -> str:
    """The valid key that was probably meant, as a phrase."""
    section, _, leaf = dotted.rpartition(".")
    same_leaf = [key for key in valid if key.rpartition(".")[2] == leaf]
    siblings = [key for key in valid if key.rpartition(".")[0] == section]
    names = [key.rpartition(".")[2] for key in siblings]
    initials = [name for name in names if "".join(word[0] for word in name.split("_")) == leaf]
    close_leaf = initials or difflib.get_close_matches(leaf, names, 1, 0.7)
    if close_leaf:
        return f"; did you mean '{f'{section}.' if section else ''}{close_leaf[0]}'?"
    if same_leaf:
        return f"; did you mean '{same_leaf[0]}'?"
    close = difflib.get_close_matches(dotted, valid, 1, 0.6)
    if not close:
        leaves = {key.rpartition(".")[2]: key for key in valid}
        close = [leaves[name] for name in difflib.get_close_matches(leaf, leaves, 1, 0.75)]
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; valid keys here: {', '.join(names)}" if names else ""


def _describe(error: Any, where: dict[str, str], valid: dict[str, str]) -> str:
    """One line for one of pydantic's errors."""
    path, dotted = [], ""
    for part in error["loc"]:
        # A union appends the names of its members, a tuple the index, to the key.
        candidate = ".".join([*path, str(part)])
        if candidate in valid or error["type"] == "unexpected_keyword_argument":
            path.append(str(part))
    dotted = ".".join(path)
    at = where.get(dotted)
    prefix = f"{at}: " if at else ""
    if error["type"] == "unexpected_keyword_argument":
        return f"{prefix}unknown key '{dotted}'{_nearest(dotted, valid)}"
    if error["type"] == "missing":
        return f"{prefix}'{'.'.join(map(str, error['loc']))}' is missing"
    if error["type"] == "value_error":  # a contradiction found by one of the checks above
        section = f"{dotted}: " if dotted else ""
        # A section that comes from several files has no place of its own.
        places = {w.split(":")[0] for key, w in where.items() if w and key.startswith(dotted)}
        files = f"{', '.join(sorted(places))}: " if places else ""
        return f"{files}{section}{error['ctx']['error']}"
    # Pydantic says "Input should be ...", "String should match ...": keep what should be done.
    message = error["msg"].partition(" should ")[2] or error["msg"]
    if error["type"] == "string_type" and not isinstance(error["input"], (dict, list, type(None))):
        message += "; put it in quotes"
    item = "".join(f"[{part}]" for part in error["loc"] if isinstance(part, int))
    return f"{prefix}'{dotted}{item}' is {json.dumps(error['input'])}: should {message}"


def _explain(error: ValidationError, where: dict[str, str], valid: dict[str, str]) -> str:
    lines: dict[str, str] = {}
    for item in error.errors(include_url=False):
        line = _describe(item, where, valid)
        subject, found, message = line.partition(": should ")
        if found and subject in lines:  # the members of a union each complain; say so in one line
            lines[subject] += f", or {message}"
        else:
            lines[subject if found else line] = line
    return "\n".join(lines.values())


def read_tree(cls: type[T], tree: dict[str, Any], where: dict[str, str]) -> T:
    """Read a tree of plain values into a dataclass of settings; see :func:`from_tree`."""
    try:
        return TypeAdapter(cls).validate_json(json.dumps(tree))
    except ValidationError as error:
        raise UserError(_explain(error, where, _valid_keys(cls))) from None


def from_tree(tree: dict[str, Any], where: dict[str, str] | None = None) -> Config:
    """Read a tree of plain values (dicts, lists, numbers, text, null) into a Config.

    Args:
        tree: nested settings, as parsed from YAML or JSON.
        where: file and line of each dotted key, for messages.

    Raises:
        UserError: one line for each thing that is wrong.
    """
    return read_tree(Config, tree, where or {})


def read_yaml(path: str | Path) -> tuple[dict[str, Any], dict[str, str]]:
    """A YAML file of settings as a tree of plain values, and file and line of each dotted key.

    Raises:
        UserError: it cannot be read, or is no mapping.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot read the configuration ({error.strerror})") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text") from None
    value, lines = _parse_yaml(text, str(path))
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected settings as 'key: value', found {type(value).__name__}")
    return value, {key: f"{path}:{line}" for key, line in lines.items()}


def merged(
    layers: Sequence[tuple[dict[str, Any], dict[str, str]]],
) -> tuple[dict[str, Any], dict[str, str]]:
    """Trees of settings, and the places of their keys, merged from left to right."""
    tree: dict[str, Any] = {}
    where: dict[str, str] = {}
    for value, places in layers:
        _merge(tree, value, where, lambda key, p=places: p.get(key, ""), "")
    return tree, where


def read_word(word: str) -> tuple[dict[str, Any], dict[str, str]]:
    """A ``key=value`` word as :func:`read_yaml` gives a file; the value is read as YAML."""
    key, equals, text = word.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][\w.]*", key):
        raise UserError(f"command line: expected key=value, found '{word}'")
    value, _ = _parse_yaml(text, f"command line: {key}")
    setting: Any = value if text.strip() else None
    for part in reversed(key.split(".")):
        setting = {part: setting}
    return setting, {key: "command line"}


def load(paths: Sequence[str | Path], overrides: Sequence[str] = ()) -> Config:
    """Read YAML files, then ``key=value`` words, merged from left to right.

    Args:
        paths: YAML files; later ones win.
        overrides: words such as ``optim.learning_rate=1e-4``; the value is read as YAML.

    Raises:
        UserError: a file that cannot be read, or anything that is wrong in it.
    """
    layers = [*(read_yaml(path) for path in paths), *(read_word(word) for word in overrides)]
    return from_tree(*merged(layers))


def to_tree(config: Config) -> dict[str, Any]:
    """The configuration as nested plain values, with every default filled in."""
    return TypeAdapter(Config).dump_python(config, mode="json")


def tree_to_yaml(tree: dict[str, Any]) -> str:
    """Plain values as YAML that :func:`read_yaml` reads back to equal ones."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def to_yaml(config: Config) -> str:
    """The configuration as YAML that :func:`load` reads back to an equal Config."""
    return tree_to_yaml(to_tree(config))
