"""Writing a teacher's predictions beside the tokens that they are about."""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jaxlm.console import progress
from jaxlm.data.shards import DataDirectory, TokenStream
from jaxlm.data.teacher import (
    CacheFormat,
    CacheWriter,
    TeacherCache,
    covered,
    read_manifest,
    tokenizer_digest,
)
from jaxlm.distillation.contexts import Context, Spans
from jaxlm.distillation.teachers import Teacher
from jaxlm.errors import Failure, UserError
from jaxlm.files import size_text

# Between two positions that a killed process goes on from.
_COMMIT_SECONDS = 10.0


def cache_directory(data: DataDirectory, name: str) -> Path:
    """Where the cache of a teacher of this name is."""
    return data.directory / f"teacher-{name}"


@dataclass(frozen=True)
class Work:
    """What a cache is to hold, and what of it is left to do."""

    # All spans of the range asked for.
    spans: Spans
    # Those with records that are not there yet.
    left: Spans

    @property
    def first(self) -> int:
        """Position of the first record."""
        return int(self.spans.first[0])

    @property
    def stop(self) -> int:
        """Position after the last record."""
        return int(self.spans.stops[-1])


def work_of(
    directory: Path,
    stream: TokenStream,
    context: Context,
    tokens: tuple[int, int] | None,
    exact: bool = False,
) -> Work:
    """What is to be done for a range of training tokens; None is all of them.

    Finished shards alone count as done. See :func:`cache_teacher` for `exact`.

    Raises:
        UserError: the range holds nothing to predict.
    """
    first, stop = tokens or (0, len(stream))
    if stop > len(stream) or first >= stop:
        raise UserError(
            f"--tokens {first}:{stop}: the training tokens are 0 to {len(stream)}; choose a range "
            f"within"
        )
    spans = context.spans(stream, first, stop)
    if exact:
        spans = spans.before(stop + 1)
    if not len(spans):
        raise UserError(f"{directory.parent}: no token to predict in {first:,} to {stop:,}")
    done = covered(read_manifest(directory))[1] if (directory / "manifest.json").exists() else 0
    return Work(spans, spans.after(done))


def check_space(directory: Path, needed: int) -> None:
    """Raise Failure where the disk has less room than the records that are left need."""
    place = directory
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed:
        raise Failure(
            f"{directory}: the records that are left take {size_text(needed)}, the disk has "
            f"{size_text(free)}; make room, or lower --k, --dtype or --tokens"
        )


def cache_teacher(
    data: DataDirectory,
    teacher: Teacher,
    directory: Path,
    form: CacheFormat,
    tokens: tuple[int, int] | None = None,
    shard_tokens: int = 2**20,
    *,
    exact: bool = False,
    stopping: Callable[[], bool] = lambda: False,
) -> bool:
    """Make a cache, or go on with it; the same call after a kill gives the same bytes.

    Args:
        data: the data directory.
        teacher: predicts its training tokens.
        directory: of the cache, see :func:`cache_directory`.
        form: size and types of its records.
        tokens: range [first, stop) of the training tokens whose targets are predicted, the last
            one's included where it is there; None takes all.
        shard_tokens: records of a shard.
        exact: end with the record of the last target of packed rows that end with the range, in the
            middle of a document or of the teacher's row if need be. What a later call adds begins
            there, so that shards end where ranges do; records are the same.
        stopping: asked between groups; once it says so, everything is saved and left.

    Returns:
        Whether the range is whole: not where `stopping` ended it.

    Raises:
        UserError: see :class:`CacheWriter`; a range that is not there.
        Failure: too little room on the disk.
    """
    stream = data.stream("train")
    work = work_of(directory, stream, teacher.context, tokens, exact)
    check_space(directory, work.left.records * form.bytes_per_token)
    description = {
        "teacher": teacher.identity,
        "context": teacher.context.describe(),
        "tokenizer": tokenizer_digest(data),
        "vocabulary": teacher.vocabulary,
        "vocabulary_size": data.vocabulary_size,
        "k": form.k,
        "dtype": form.dtype,
    }
    with CacheWriter(directory, description, stream, work.first, shard_tokens) as writer:
        left = work.spans.after(writer.position)
        if not _write(writer, teacher, left, work, stopping):
            return False
        writer.finish()
    return True


def _write(
    writer: CacheWriter, teacher: Teacher, left: Spans, work: Work, stopping: Callable[[], bool]
) -> bool:
    total = work.stop - work.first
    began = committed = time.monotonic()
    read = 0
    title = f"Predicting by {teacher.identity['name']} (tokens)"
    with progress(title, total, total - left.records) as advance:
        for group in left.groups(teacher.group):
            if stopping():
                writer.commit()
                return False
            writer.append(*teacher.predict(writer.stream, group))
            read += group.records
            now = time.monotonic()
            advance(group.records, f"{read / (now - began):,.0f} tok/s")
            if now - committed > _COMMIT_SECONDS or writer.full:
                writer.commit()
                committed = now
    return True


def verify(data: DataDirectory, directory: Path) -> TeacherCache:
    """Open all of a cache, with every checksum compared.

    Raises:
        UserError: damage, or other tokens than those it was made for.
    """
    first, stop = covered(read_manifest(directory))
    return TeacherCache(directory, data, data.stream("train"), first, stop)
