"""Which teacher, what it sees, and what is kept of its predictions."""

import dataclasses
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from jaxlm.config import Count, Name, Positive, Text
from jaxlm.data.teacher import CacheFormat

_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
# Settings that belong to one of the two kinds of teachers.
_OF_RUN = ("depth",)
_OF_HUGGING_FACE = ("overlap", "weights", "quantization", "revision", "parameters")


@dataclass(frozen=True, config=_STRICT)
class TeacherConfig:
    """A teacher, and the cache of its predictions."""

    # The teacher: folder of a run of jaxlm.
    run: Text | None = None
    # Or: a causal language model of Hugging Face, by repository or folder.
    hf: Text | None = None
    # Name of the cache; null is that of the run's folder, or of the model without its organisation.
    name: Name | None = None
    # Tokens that a record names.
    k: Positive = 32
    # Type of their log-probabilities.
    dtype: Literal["float16", "float32"] = "float16"
    # Tokens that are read at one time; null is the run's sequence_length, or 2,048.
    length: Positive | None = None
    # Rows, or windows, of a forward pass; null is 8 for a run, 1 for Hugging Face.
    batch_rows: Positive | None = None
    # Tokens whose logits are sorted at one time.
    chunk_tokens: Positive = 512
    # Core steps of a recurrent run; null is the mean depth of its training.
    depth: Positive | None = None
    # Of Hugging Face: tokens that a window of a long document shares with the one before; null is
    # an eighth of `length`.
    overlap: Count | None = None
    # Of Hugging Face: type of the weights.
    weights: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    # Of Hugging Face: arguments of transformers.BitsAndBytesConfig.
    quantization: dict[str, Any] | None = None
    # Of Hugging Face: branch, tag or commit.
    revision: Text | None = None
    # Of Hugging Face: number of parameters, for plans; null counts them.
    parameters: Annotated[float, Field(ge=1.0)] | None = None

    def __post_init__(self) -> None:
        if (self.run is None) == (self.hf is None):
            raise ValueError("name one teacher: a run, or hf, a model of Hugging Face")
        kind, others = ("run", _OF_HUGGING_FACE) if self.hf is None else ("hf", _OF_RUN)
        defaults = {field.name: field.default for field in dataclasses.fields(type(self))}
        for key in others:
            if getattr(self, key) != defaults[key]:
                raise ValueError(f"{key} does not go with {kind}")
        length, overlap = self.length or 2048, self.overlap
        if overlap is not None and overlap >= length:
            raise ValueError(
                f"overlap {overlap}: expected a number from 0 to below length {length}"
            )
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.cache_name):
            raise ValueError(
                f"'{self.cache_name}' is no name for a cache: letters, digits, dots, dashes and "
                f"underscores are; give another one"
            )

    @property
    def cache_name(self) -> str:
        """The name of the cache."""
        if self.name is not None:
            return self.name
        if self.run is not None:
            return Path(self.run).resolve().name
        assert self.hf is not None
        return self.hf.rstrip("/").rpartition("/")[2]

    @property
    def rows(self) -> int:
        """Rows, or windows, of a forward pass."""
        return self.batch_rows or (8 if self.hf is None else 1)

    def form(self, vocabulary_size: int) -> CacheFormat:
        """Size and types of the cache's records."""
        return CacheFormat(self.k, self.dtype, vocabulary_size)
