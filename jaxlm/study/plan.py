"""What a study will take, before it begins: disk by phase, days by phase, memory of each model."""

import dataclasses
import functools
from pathlib import Path

import jax

from jaxlm.config import Config
from jaxlm.data.shards import DataDirectory, token_dtype
from jaxlm.data.tokenizer import read_tokenizer
from jaxlm.distillation.planning import size_of
from jaxlm.files import size_text
from jaxlm.memory.devices import Device
from jaxlm.models.flops import flops_per_token
from jaxlm.models.match import mean_depths
from jaxlm.study.settings import Study
from jaxlm.training.checkpoint import checkpoint_bytes
from jaxlm.training.spec import step_spec
from jaxlm.training.step import init_state

# Estimates where nothing was measured yet. Documents: docs/data.md gives 33 bytes a document kept
# for its end and its hash, and about 750 for near-duplicates; documents of 250 tokens are short.
_TOKENS_A_DOCUMENT, _BYTES_A_DOCUMENT, _BYTES_NEAR_DUPLICATES = 250, 33, 750
# Of a run's records: one line of metrics and TensorBoard an update, 9 bytes a row of blocks.
_BYTES_AN_UPDATE, _BYTES_A_ROW = 2_500, 9
# Preparing with a byte-level BPE on two cores, `python benchmarks/data.py prepare`; bytes of text
# that a token stands for.
_BYTES_A_SECOND, _BYTES_A_TOKEN = 1.78e6, 4.5
# At the end of a study all checkpoints of a run: those kept, the best, and one being written.
_BEST_AND_BEING_WRITTEN = 2


@dataclasses.dataclass(frozen=True)
class DiskNeeds:
    """Bytes on disk, in the study's folder."""

    # Training tokens of a cycle, and the shard of the one before that reaches into it.
    window: int
    # Training tokens that are there at one time.
    tokens: int
    # Validation tokens, ends of documents, and the journal of the preparation.
    beside_tokens: int
    # The teacher's record of a token, and the records of a cycle; 0 without a teacher.
    teacher_record: int
    teacher_window: int
    # The teacher's records that are there at one time.
    teacher: int
    # The largest checkpoint.
    checkpoint: int
    # Checkpoints of each model, all seeds, by model.
    checkpoints: dict[str, int]
    # Metrics, block ids, TensorBoard and evaluations of all runs.
    records: int

    @property
    def peak(self) -> int:
        """All of it at the fullest moment."""
        return (
            self.tokens
            + self.beside_tokens
            + self.teacher
            + sum(self.checkpoints.values())
            + self.records
        )

    def text(self) -> str:
        """The parts in one line."""
        teacher = f"a teacher's predictions {size_text(self.teacher)}, " if self.teacher else ""
        return (
            f"tokens {size_text(self.tokens)}, {teacher}checkpoints "
            f"{size_text(sum(self.checkpoints.values()))}, the rest "
            f"{size_text(self.beside_tokens + self.records)}"
        )


def vocabulary_of(study: Study) -> int:
    """Entries of the vocabulary, or of the embeddings, without preparing anything."""
    first = study.first
    given = [config.model.vocabulary_size for config in study.models.values()]
    if None not in given:
        return max(size for size in given if size is not None)
    if (study.data_directory / "manifest.json").is_file():
        return DataDirectory(study.data_directory).vocabulary_size
    if first.prepare.tokenizer is None:
        return first.prepare.vocabulary_size
    settings = first.prepare
    assert settings.tokenizer is not None
    tokenizer = read_tokenizer(Path(settings.tokenizer), settings.end_token, settings.begin_token)
    return tokenizer.vocabulary_size


def with_vocabulary(config: Config, vocabulary: int) -> Config:
    """A configuration whose vocabulary size is set."""
    entries = config.model.vocabulary_size or vocabulary
    return dataclasses.replace(
        config, model=dataclasses.replace(config.model, vocabulary_size=entries)
    )


@functools.lru_cache(maxsize=32)
def _checkpoint_bytes(config: Config) -> int:
    assert config.training.updates is not None
    spec = step_spec(config, config.model.vocabulary, config.training.updates)
    return checkpoint_bytes(jax.eval_shape(lambda: init_state(spec)))


def _kept_for_good(study: Study, model: Config) -> int:
    """Checkpoints of a run that checkpoint.keep_every_tokens keeps, at most."""
    settings = model.checkpoint
    if settings.keep_every_tokens is None:
        return 0
    saved = study.updates // settings.every + study.config.cycles
    return min(study.tokens // settings.keep_every_tokens, saved)


def disk_needs(study: Study) -> DiskNeeds:
    """Estimate the disk that a study takes; sources and data prepared elsewhere are not counted."""
    first, config = study.first, study.config
    vocabulary = vocabulary_of(study)
    item = token_dtype(vocabulary).itemsize
    window = tokens = beside = 0
    if study.own_data:
        shard = min(first.prepare.shard_tokens, study.tokens)
        window = (config.tokens_per_cycle + shard) * item
        tokens = min(window, study.tokens * item) if config.reclaim else study.tokens * item
        share = first.prepare.validation_fraction / (1 - first.prepare.validation_fraction)
        a_document = _BYTES_A_DOCUMENT
        a_document += _BYTES_NEAR_DUPLICATES if first.prepare.near_duplicates else 0
        beside = round(study.tokens * share * item)
        beside += study.tokens * a_document // _TOKENS_A_DOCUMENT
    record = 0 if study.teacher is None else study.teacher.form(vocabulary).bytes_per_token
    # A cycle's shards end with its tokens.
    records_of_cycle = config.tokens_per_cycle * record
    teacher = records_of_cycle if config.reclaim else config.cycles * records_of_cycle
    checkpoints, largest = {}, 0
    seeds = len(config.seeds)
    for name, model in study.models.items():
        one = _checkpoint_bytes(with_vocabulary(model, vocabulary))
        largest = max(largest, one)
        number = model.checkpoint.keep + _BEST_AND_BEING_WRITTEN + _kept_for_good(study, model)
        checkpoints[name] = one * seeds * number
    rows = first.training.window_rows
    records = study.updates * (_BYTES_AN_UPDATE + _BYTES_A_ROW * rows) * len(study.runs)
    return DiskNeeds(
        window, tokens, beside, record, records_of_cycle, teacher, largest, checkpoints, records
    )


@dataclasses.dataclass(frozen=True)
class PhaseTime:
    """How long a phase of one cycle takes at least."""

    # What is done.
    phase: str
    # Model, or None.
    model: str | None
    # Seconds a cycle, all seeds.
    seconds: float
    # What the figure comes from.
    basis: str


def phase_times(study: Study, device: Device) -> list[PhaseTime]:
    """Lower bounds of the time of each phase of a cycle on a device.

    Training, evaluation and a teacher's predictions at the device's dense bf16 peak, so that none
    is faster; preparing at the speed of docs/data.md on two cores.
    """
    config, times = study.config, []
    vocabulary = vocabulary_of(study)
    if study.own_data:
        seconds = config.tokens_per_cycle * _BYTES_A_TOKEN / _BYTES_A_SECOND
        basis = f"{_BYTES_A_SECOND / 1e6:.2f} MB/s, {_BYTES_A_TOKEN} bytes a token"
        times.append(PhaseTime("prepare", None, seconds, basis))
    if study.teacher is not None:
        each = size_of(study.teacher).flops
        times.append(
            PhaseTime(
                "cache teacher",
                None,
                config.tokens_per_cycle * each / device.peak_flops,
                f"{each:.3g} FLOP a token at {device.peak_flops / 1e12:.4g} TFLOP/s",
            )
        )
    share = study.first.prepare.validation_fraction
    validation = config.tokens_per_cycle * share / (1 - share)
    for name, plain in study.models.items():
        model = with_vocabulary(plain, vocabulary)
        attended = (model.data.sequence_length + 1) / 2
        depth = backprop = 0.0
        depths: tuple[int, ...] = (0,)
        if model.model.kind == "recurrent":
            depth, backprop = mean_depths(model, study.updates)
            depths = config.depths
        flops = flops_per_token(model.model, attended, depth, backprop).executed
        speed = device.peak_flops / flops
        seeds = len(config.seeds)
        times.append(
            PhaseTime(
                "train",
                name,
                seeds * config.tokens_per_cycle / speed,
                f"at most {speed:,.0f} tok/s at {device.peak_flops / 1e12:.4g} TFLOP/s",
            )
        )
        forward = sum(flops_per_token(model.model, attended, n, 0).forward for n in depths)
        times.append(
            PhaseTime(
                "evaluate",
                name,
                seeds * validation * forward / device.peak_flops,
                f"about {validation:,.0f} validation tokens at {len(depths)} depth(s)",
            )
        )
    return times
