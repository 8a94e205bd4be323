"""Whether a study's teacher has seen what the study validates with."""

import dataclasses
from pathlib import Path
from typing import Any

from jaxlm.data.pipeline import fingerprint_of
from jaxlm.data.shards import DataDirectory
from jaxlm.study.settings import Study
from jaxlm.training.loading import load_resolved, read_fingerprint
from jaxlm.training.resume import data_changes

# What decides a document's cleaned text, whose hash decides whether it is held out.
_OF_THE_TEXT = ("text_documents", "text_key", "normalization", "zero_width")


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """How documents were cut out and held out."""

    settings: dict[str, Any]
    # Name and identity of each source file; None where none was looked at yet.
    files: set[tuple[str, str]] | None


def unseen(study: Study) -> str:
    """A sentence: whether the teacher's training documents can hold the study's validation ones.

    A document is held out by a hash of its own text, whatever file it stands in. So documents that
    were cut out and cleaned alike are held out alike, and of two shares the smaller one's are among
    the larger one's. They were cut alike where they came from the same files: elsewhere a text may
    be a part of a longer document.
    """
    teacher = study.teacher
    assert teacher is not None
    if teacher.run is None:
        return (
            f"Whether {teacher.hf} was trained on the study's validation documents is not known; "
            f"its students may profit if it was."
        )
    theirs, ours = _of_teacher(Path(teacher.run)), _of_study(study)
    if theirs is None:
        why = [
            "its data.directory no longer holds what it was trained on, or does not say how that "
            "was prepared"
        ]
    elif ours is None:
        why = ["it is not known how the study's data were prepared"]
    else:
        why = [
            f"prepare.{key} was {theirs.settings[key]!r}, the study's is {ours.settings[key]!r}"
            for key in _OF_THE_TEXT
            if theirs.settings[key] != ours.settings[key]
        ]
        shares = theirs.settings["validation_fraction"], ours.settings["validation_fraction"]
        if shares[0] < shares[1]:
            why.append(
                f"prepare.validation_fraction was {shares[0]:g}, below the study's {shares[1]:g}"
            )
        if not why:
            none = (
                f"None of the study's validation documents was among the training documents of "
                f"{teacher.run}"
            )
            held_out = f"by a hash of the same text, {shares[0]:g} and {shares[1]:g} of them"
            if theirs.files == ours.files:
                return f"{none}: both cut them from the same files and held them out {held_out}."
            shown = "not known yet" if ours.files is None else "not shown: their files differ"
            return (
                f"{none} if both cut them alike, which is {shown}; both held them out {held_out}."
            )
    return (
        f"It is not shown that {teacher.run} was not trained on the study's validation documents "
        f"({'; '.join(why)}); its students may profit if it was."
    )


def _of_teacher(run: Path) -> _Prepared | None:
    """How a run's documents were prepared; None where that is not known.

    What lies in its data directory tells it only if that is what it was trained on.
    """
    config = load_resolved(run)
    directory = Path(config.data.directory)
    if config.data.sources or not (directory / "manifest.json").is_file():
        return None
    data = DataDirectory(directory, verify=False)
    fingerprint, now = read_fingerprint(run), fingerprint_of(data, config.data)
    stored = {field: fingerprint[field] for field in now}
    if data_changes(stored, now, config.data.tokens is not None):
        return None
    return _of_manifest(data)


def _of_study(study: Study) -> _Prepared | None:
    """How the study's documents are prepared; None where that is not known."""
    if (study.data_directory / "manifest.json").is_file():
        return _of_manifest(DataDirectory(study.data_directory, verify=False))
    return _Prepared(dataclasses.asdict(study.first.prepare), None)


def _of_manifest(data: DataDirectory) -> _Prepared | None:
    source = data.manifest["source"]
    if "settings" not in source:  # written by something else
        return None
    files = {(file["file"], file["identity"]) for file in source["files"]}
    return _Prepared(source["settings"], files)
