"""From text files to a data directory: tokenizer, split, shards, manifest."""

import hashlib
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pydantic

from jaxlm.config import Config, PrepareConfig
from jaxlm.console import tracked
from jaxlm.data.shards import DataDirectory, ShardWriter
from jaxlm.data.text import find_inputs, read_document
from jaxlm.data.tokenizer import Tokenizer, read_tokenizer, train_tokenizer
from jaxlm.errors import UserError
from jaxlm.files import sha256_of

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
    """What the tokens depend on: the settings, and the tokenizer file's contents."""
    settings = typing.cast(
        dict[str, Any], pydantic.TypeAdapter(PrepareConfig).dump_python(prepare, mode="json")
    )
    if prepare.tokenizer is not None and Path(prepare.tokenizer).is_file():
        settings["tokenizer"] = sha256_of(Path(prepare.tokenizer))
    return settings


def _sources(paths: list[Path]) -> str:
    """A digest of the input files' names and sizes, which costs no reading."""
    names = sorted(f"{path.name} {path.stat().st_size}" for path in paths)
    return hashlib.sha256("\n".join(names).encode()).hexdigest()


def prepare(config: Config) -> DataDirectory:
    """Make the data directory of a configuration, or open it if it is there.

    Args:
        config: uses `prepare` and `data.directory`.

    Raises:
        UserError: no inputs, an unreadable input, an empty split, or a directory that was prepared
            with other settings or from other files.
    """
    settings, directory = config.prepare, Path(config.data.directory)
    if directory.exists():
        data = DataDirectory(directory)
        _check_source(data, settings)
        return data
    if not settings.inputs:
        raise UserError(
            f"data.directory '{directory}' does not exist and prepare.inputs is empty: "
            f"name the text files, or a directory of prepared data"
        )
    paths = find_inputs(settings.inputs)
    documents = _count_documents(paths, settings.validation_fraction)
    if settings.tokenizer is not None:
        tokenizer = read_tokenizer(Path(settings.tokenizer), settings.end_token)
    else:
        texts = (
            text
            for batch in _batches(paths)
            for text in batch
            if not is_validation(text, settings.validation_fraction)
        )
        tokenizer = train_tokenizer(texts, settings.vocabulary_size, settings.end_token)
    _write(directory, settings, paths, documents, tokenizer)
    return DataDirectory(directory)


def _count_documents(paths: list[Path], fraction: float) -> dict[str, int]:
    """Read everything once, before the long work, and count where documents will go."""
    counts = {"in": len(paths), "train": 0, "validation": 0, "skipped_empty": 0}
    for texts in tracked(_batches(paths), "Reading", -(-len(paths) // BATCH_DOCUMENTS)):
        for text in texts:
            if not text.strip():
                counts["skipped_empty"] += 1
            else:
                counts["validation" if is_validation(text, fraction) else "train"] += 1
    kept = counts["train"] + counts["validation"]
    if kept < 2:
        raise UserError(
            f"prepare.inputs: {kept} of {len(paths)} files hold text; at least two documents are "
            f"needed, one to train on and one to validate with (split a large file into documents)"
        )
    for split in ("train", "validation"):
        if counts[split] == 0:
            raise UserError(
                f"no document of {kept} falls into {split} at prepare.validation_fraction "
                f"{fraction:g}; {'lower' if split == 'train' else 'raise'} it"
            )
    return counts


def _write(
    directory: Path,
    settings: PrepareConfig,
    paths: list[Path],
    documents: dict[str, int],
    tokenizer: Tokenizer,
) -> None:
    token_bytes = tokenizer.token_bytes()
    writer = ShardWriter(
        directory,
        vocabulary_size=tokenizer.vocabulary_size,
        end_id=tokenizer.end_id,
        end_token=tokenizer.end_token,
        shard_tokens=settings.shard_tokens,
        tokenizer_json=tokenizer.to_json(),
        token_bytes=token_bytes,
        # Every document that came in is accounted for.
        source={"settings": _settings(settings), "files": _sources(paths), "documents": documents},
    )
    written = {"train": 0, "validation": 0}
    with writer:
        for texts in tracked(_batches(paths), "Tokenizing", -(-len(paths) // BATCH_DOCUMENTS)):
            texts = [text for text in texts if text.strip()]
            for text, ids in zip(texts, tokenizer.encode(texts), strict=True):
                held_out = is_validation(text, settings.validation_fraction)
                split = "validation" if held_out else "train"
                size = len(text.encode("utf-8"))
                if token_bytes is not None and token_bytes[ids].sum() != size:
                    # The tokenizer changes text: bytes of tokens are not bytes of the text.
                    token_bytes = None
                    writer.drop_token_bytes()
                writer.add(split, np.append(ids, tokenizer.end_id), size)
                written[split] += 1
        if any(written[split] != documents[split] for split in written):
            raise UserError(f"{directory}: the input files changed while they were read; try again")


def _check_source(data: DataDirectory, settings: PrepareConfig) -> None:
    stored = data.manifest["source"]
    if "settings" not in stored or not settings.inputs:
        return  # data that was made elsewhere, or is only to be read
    wanted = _settings(settings)
    different = [
        f"prepare.{key} was {stored['settings'][key]!r}, is {wanted[key]!r}"
        for key in stored["settings"]
        if stored["settings"][key] != wanted.get(key)
    ]
    if not different:
        try:
            paths = find_inputs(settings.inputs)
        except UserError:
            return  # the sources are gone; the data stands for itself
        if _sources(paths) != stored["files"]:
            different = ["files behind prepare.inputs were added, removed or changed in size"]
    if different:
        raise UserError(
            f"{data.directory}: was prepared differently ({'; '.join(different)}); remove the "
            f"directory, or set data.directory to a new one"
        )
