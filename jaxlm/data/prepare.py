"""From text files to a data directory: tokenizer, split, shards, manifest."""

import hashlib
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pydantic

from jaxlm.config import Config, PrepareConfig
from jaxlm.console import tracked
from jaxlm.data.shards import DataDirectory, ShardWriter
from jaxlm.data.text import find_inputs, read_document
from jaxlm.data.tokenizer import Tokenizer, read_tokenizer, train_tokenizer
from jaxlm.errors import UserError

# Documents that are read and encoded together.
BATCH_DOCUMENTS = 256


def is_validation(text: str, fraction: float) -> bool:
    """Whether a document is held out: decided by its text alone.

    Equal documents land on the same side, and neither order nor other documents matter.
    """
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def _batches(paths: list[Path]) -> Iterator[list[str]]:
    for start in range(0, len(paths), BATCH_DOCUMENTS):
        yield [read_document(path) for path in paths[start : start + BATCH_DOCUMENTS]]


def _settings(prepare: PrepareConfig) -> dict[str, Any]:
    return typing.cast(
        dict[str, Any], pydantic.TypeAdapter(PrepareConfig).dump_python(prepare, mode="json")
    )


def _training_texts(paths: list[Path], fraction: float) -> Iterator[str]:
    for texts in tracked(_batches(paths), "Reading", -(-len(paths) // BATCH_DOCUMENTS)):
        yield from (text for text in texts if not is_validation(text, fraction))


def prepare(config: Config) -> DataDirectory:
    """Make the data directory of a configuration, or open it if it is there.

    Args:
        config: uses `prepare` and `data.directory`.

    Raises:
        UserError: no inputs, an unreadable input, an empty split, or a directory that was prepared
            with other settings.
    """
    settings, directory = config.prepare, Path(config.data.directory)
    if directory.exists():
        data = DataDirectory(directory)
        _check_settings(data, settings)
        return data
    if not settings.inputs:
        raise UserError(
            f"data.directory '{directory}' does not exist and prepare.inputs is empty: "
            f"name the text files, or a directory of prepared data"
        )
    paths = find_inputs(settings.inputs)
    fraction = settings.validation_fraction
    if settings.tokenizer is not None:
        tokenizer = read_tokenizer(Path(settings.tokenizer), settings.end_token)
    else:
        tokenizer = train_tokenizer(_training_texts(paths, fraction), settings.vocabulary_size)
    _write(directory, settings, paths, tokenizer)
    return DataDirectory(directory)


def _write(
    directory: Path, settings: PrepareConfig, paths: list[Path], tokenizer: Tokenizer
) -> None:
    writer = ShardWriter(
        directory,
        vocabulary_size=tokenizer.vocabulary_size,
        end_id=tokenizer.end_id,
        shard_tokens=settings.shard_tokens,
        tokenizer_json=tokenizer.to_json(),
        token_bytes=tokenizer.token_bytes(),
        source={"settings": _settings(settings)},
    )
    kept = {"train": 0, "validation": 0}
    with writer:
        for texts in tracked(_batches(paths), "Tokenizing", -(-len(paths) // BATCH_DOCUMENTS)):
            texts = [text for text in texts if text.strip()]
            for text, ids in zip(texts, tokenizer.encode(texts), strict=True):
                held_out = is_validation(text, settings.validation_fraction)
                split = "validation" if held_out else "train"
                writer.add(split, [*ids, tokenizer.end_id], len(text.encode("utf-8")))
                kept[split] += 1
        for split, documents in kept.items():
            if documents == 0:
                raise UserError(
                    f"no document of {len(paths)} falls into {split} at "
                    f"prepare.validation_fraction {settings.validation_fraction:g}; change it"
                )
        # Every document that came in is accounted for.
        writer.manifest["source"]["documents"] = {
            "in": len(paths),
            "kept": sum(kept.values()),
            "skipped_empty": len(paths) - sum(kept.values()),
        }


def _check_settings(data: DataDirectory, settings: PrepareConfig) -> None:
    stored = data.manifest["source"].get("settings")
    if stored is None or not settings.inputs:
        return  # data that was made elsewhere, or is only to be read
    wanted = _settings(settings)
    different = [key for key in wanted if stored.get(key) != wanted[key]]
    if different:
        detail = "; ".join(
            f"prepare.{k} was {stored.get(k)!r}, is {wanted[k]!r}" for k in different
        )
        raise UserError(
            f"{data.directory}: was prepared with other settings ({detail}); remove the directory, "
            f"or set data.directory to a new one"
        )
