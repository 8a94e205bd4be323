"""A run made small enough to be tried in minutes, and what was changed for it."""

import dataclasses

import jax

from jaxlm.config import (
    Config,
    ControlConfig,
    ModelConfig,
    ProfileConfig,
    RewindConfig,
    RunConfig,
)
from jaxlm.models.match import stored_parameters, training_flops

# Shape of a model that stands for one too large to be tried, as in configs/small.yaml.
_WIDTH, _HEADS, _LAYERS_OUTSIDE, _LAYERS_INSIDE, _LAYERS = 128, 4, 2, 4, 4
# Fewest micro-batches and tokens of a row that still try what several of them do.
_MICRO_BATCHES, _ROW_TOKENS = 2, 128
# Operations of an update of a trial, see PreflightConfig.update_flops.
CPU_FLOPS, OTHER_FLOPS = 5e10, 2e14
# Updates over which sampled depths are averaged.
_DRAWS = 100


def update_flops(config: Config) -> float:
    """Operations of an update, forward and backward, at the mean depth."""
    tokens = config.training.window_rows * config.data.sequence_length
    return training_flops(config, _DRAWS) * tokens


def affordable_flops(config: Config) -> float:
    """Operations that an update of a trial may take on the default device."""
    given = config.preflight.update_flops
    on_cpu = jax.default_backend() == "cpu"
    return given if given is not None else CPU_FLOPS if on_cpu else OTHER_FLOPS


def small_model(model: ModelConfig) -> ModelConfig:
    """A model of the same parts with few layers and a small width."""
    width = min(model.width, _WIDTH)
    heads = min(model.heads, _HEADS)
    groups = max(1, round(heads * model.key_value_heads / model.heads))
    while heads % groups:
        groups += 1
    parts = model.recurrent
    return dataclasses.replace(
        model,
        width=width,
        heads=heads,
        kv_heads=groups,
        feed_forward=max(8, round(model.feed_forward * width / model.width / 8) * 8),
        recurrent=dataclasses.replace(
            parts,
            prelude_layers=min(parts.prelude_layers, _LAYERS_OUTSIDE),
            core_layers=min(parts.core_layers, _LAYERS_INSIDE),
            coda_layers=min(parts.coda_layers, _LAYERS_OUTSIDE),
        ),
        transformer=dataclasses.replace(
            model.transformer, layers=min(model.transformer.layers, _LAYERS)
        ),
    )


def _with_batch(config: Config, micro_batches: int, rows: int, length: int) -> Config:
    return dataclasses.replace(
        config,
        data=dataclasses.replace(
            config.data,
            sequence_length=length,
            buckets=tuple(b for b in config.data.buckets if b < length),
        ),
        training=dataclasses.replace(
            config.training, micro_batches=micro_batches, micro_batch_rows=rows
        ),
    )


def scaled(config: Config, flops: float) -> tuple[Config, list[str]]:
    """Make an update of a run cost at most so many operations, where that is possible.

    The model is replaced where not even a few short rows of it are affordable; then micro-batches,
    rows and tokens a row are halved. Rates of Adam are for a width: they are multiplied by the
    width's ratio (Yang & Hu 2021, muP).

    Args:
        config: with a vocabulary size.
        flops: operations of an update.

    Returns:
        The configuration, and a line for each thing that was changed.
    """
    notes: list[str] = []
    micro_batches, rows = config.training.micro_batches, config.training.micro_batch_rows
    length = config.data.sequence_length
    fewest = _with_batch(config, min(micro_batches, _MICRO_BATCHES), 1, min(length, _ROW_TOKENS))
    if update_flops(fewest) > flops:
        was, model = config.model, small_model(config.model)
        notes.append(
            f"model: {stored_parameters(was):,} -> {stored_parameters(model):,} parameters, width "
            f"{was.width:,} -> {model.width:,}, {_layers(was)} -> {_layers(model)}"
        )
        config = dataclasses.replace(config, model=model)
        if config.optim.name in ("adamw", "adamw_8bit"):
            ratio = was.width / model.width
            rate = config.optim.learning_rate * ratio
            notes.append(
                f"learning rate: {config.optim.learning_rate:g} -> {rate:g}, times the ratio of "
                f"widths as Adam's rates go"
            )
            config = dataclasses.replace(
                config, optim=dataclasses.replace(config.optim, learning_rate=rate)
            )
    before = f"{micro_batches} x {rows} x {length:,}"
    while update_flops(config) > flops:
        if micro_batches > _MICRO_BATCHES:
            micro_batches = max(micro_batches // 2, _MICRO_BATCHES)
        elif rows > 1:
            rows //= 2
        elif length >= 2 * _ROW_TOKENS and length % 2 == 0:
            length //= 2  # an exact half: ends of data.tokens stay multiples of it
        else:
            break
        config = _with_batch(config, micro_batches, rows, length)
    after = f"{micro_batches} x {rows} x {length:,}"
    if after != before:
        notes.append(f"an update's micro-batches x rows x tokens: {before} -> {after}")
    return config, notes


def _layers(model: ModelConfig) -> str:
    if model.kind == "transformer":
        return f"{model.transformer.layers} layers"
    parts = model.recurrent
    return f"{parts.prelude_layers} + {parts.core_layers} + {parts.coda_layers} layers"


def trial_config(config: Config, directory: str, epochs: int) -> Config:
    """The run of a trial: the run's own settings but for its length, its schedule and its records.

    Args:
        config: from :func:`scaled`.
        directory: where the trial's run goes.
        epochs: passes over the data that give enough windows.
    """
    updates, optim = config.preflight.updates, config.optim
    warmup = min(optim.warmup_updates, updates // 4)
    return dataclasses.replace(
        config,
        run=RunConfig(name="trial", directory=directory, seed=config.run.seed),
        data=dataclasses.replace(config.data, epochs=epochs),
        optim=dataclasses.replace(
            optim,
            schedule="constant",
            warmup_updates=warmup,
            decay_updates=0,
            end_learning_rate=0.0,
        ),
        training=dataclasses.replace(
            config.training, updates=updates, max_nonfinite_updates=updates + 1
        ),
        control=ControlConfig(),
        rewind=RewindConfig(),
        profile=ProfileConfig(),
        logging=dataclasses.replace(config.logging, tensorboard=False),
    )
