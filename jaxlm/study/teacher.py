"""Whether a study's teacher has seen what the study validates with."""

import dataclasses
from pathlib import Path
from typing import Any

from jaxlm.config import Config
from jaxlm.data.shards import DataDirectory
from jaxlm.study.settings import Study
from jaxlm.training.loading import load_resolved

# What decides a document's cleaned text, whose hash decides whether it is held out.
_OF_THE_TEXT = ("text_documents", "text_key", "normalization", "zero_width")


def unseen(study: Study) -> str:
    """A sentence: whether the teacher's training documents can hold the study's validation ones.

    A document is held out by a hash of its own text, whatever file it stands in. So documents that
    were cut out and cleaned alike are held out alike, and of two shares the smaller one's are among
    the larger one's.
    """
    teacher = study.teacher
    assert teacher is not None
    if teacher.run is None:
        return (
            f"Whether {teacher.hf} was trained on the study's validation documents is not known; "
            f"its students may profit if it was."
        )
    theirs = _settings(load_resolved(Path(teacher.run)))
    data = dataclasses.replace(study.first.data, directory=str(study.data_directory))
    ours = _settings(dataclasses.replace(study.first, data=data))
    why = ["it is not known how its data, or the study's, were prepared"]
    if theirs is not None and ours is not None:
        why = [
            f"prepare.{key} was {theirs[key]!r}, the study's is {ours[key]!r}"
            for key in _OF_THE_TEXT
            if theirs[key] != ours[key]
        ]
        shares = theirs["validation_fraction"], ours["validation_fraction"]
        if shares[0] < shares[1]:
            why.append(
                f"prepare.validation_fraction was {shares[0]:g}, below the study's {shares[1]:g}"
            )
        if not why:
            return (
                f"None of the study's validation documents was among the training documents of "
                f"{teacher.run}: both held documents out by a hash of the same text, {shares[0]:g} "
                f"and {shares[1]:g} of them."
            )
    return (
        f"It is not shown that {teacher.run} was not trained on the study's validation documents "
        f"({'; '.join(why)}); its students may profit if it was."
    )


def _settings(config: Config) -> dict[str, Any] | None:
    """How a run's training documents were prepared; None where that is not known."""
    if config.data.sources:
        return None
    directory = Path(config.data.directory)
    if (directory / "manifest.json").is_file():
        return DataDirectory(directory, verify=False).manifest["source"].get("settings")
    if not config.prepare.inputs:
        return None
    fields = dataclasses.fields(config.prepare)
    return {field.name: getattr(config.prepare, field.name) for field in fields}
