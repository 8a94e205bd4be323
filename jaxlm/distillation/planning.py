"""What caching a teacher's predictions takes, found out before anything is loaded."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxlm.config import Config
from jaxlm.data.teacher import CacheFormat
from jaxlm.distillation.contexts import Context
from jaxlm.distillation.settings import TeacherConfig
from jaxlm.distillation.teachers import (
    context_of,
    depth_of,
    import_library,
    read_hugging_face_config,
)
from jaxlm.errors import UserError
from jaxlm.memory.devices import Device
from jaxlm.models.flops import flops_per_token
from jaxlm.models.match import stored_parameters
from jaxlm.training.loading import load_resolved

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Bytes a parameter of matrices that bitsandbytes quantises: 8 bits; 4 bits and a float32 scale for
# each 64 of them. Embedding and output matrix stay in 16 bits.
_QUANTISED = {"8 bits": 1.0, "4 bits": 0.5 + 4 / 64}
# Share of a card that weights may take: the rest goes to activations, logits and the CUDA context.
WEIGHT_SHARE = 0.85


@dataclass(frozen=True)
class TeacherSize:
    """What a plan needs to know of a teacher."""

    # Weights in all.
    parameters: int
    # Operations per token that it reads, at its depth: forward pass alone.
    flops: float
    # Entries of its output; None: not known.
    vocabulary: int | None
    # Bytes of the weights, by the forms that they can be loaded in.
    memory: dict[str, int]
    # The form that is asked for.
    form: str


@dataclass(frozen=True)
class CachePlan:
    """Memory, time and disk of a cache. Sizes are in bytes."""

    teacher: TeacherSize
    device: Device
    form: CacheFormat
    # Tokens that are read, and positions that are recorded; overlaps are read twice.
    tokens: int
    records: int
    # Logits of a forward pass, as the model returns them.
    logits: int

    @property
    def flops(self) -> float:
        """Operations in all."""
        return self.teacher.flops * self.tokens

    @property
    def disk(self) -> int:
        """Size of the cache."""
        return self.records * self.form.bytes_per_token

    @property
    def fits(self) -> bool:
        """Whether weights as asked for, and the logits, fit the device."""
        return self.form_fits(self.teacher.form)

    def form_fits(self, form: str) -> bool:
        """Whether weights of a form, and the logits, fit the device."""
        needed = self.teacher.memory[form] + self.logits
        return needed <= WEIGHT_SHARE * self.device.memory_bytes

    def days(self, share: float) -> float:
        """Days at a share of the device's dense bf16 peak."""
        return self.flops / (share * self.device.peak_flops) / 86_400


def size_of(teacher: TeacherConfig) -> TeacherSize:
    """The size of a teacher.

    Raises:
        UserError: there is no such teacher; :func:`size_of_hugging_face`.
    """
    if teacher.run is not None:
        directory = Path(teacher.run)
        config = load_resolved(directory)
        depth = depth_of(config, teacher.depth, directory)
        return size_of_run(config, depth, context_of(teacher))
    assert teacher.hf is not None
    return size_of_hugging_face(
        teacher.hf,
        teacher.revision,
        teacher.weights,
        teacher.quantization,
        None if teacher.parameters is None else round(teacher.parameters),
    )


def logits_bytes(teacher: TeacherConfig, size: TeacherSize, vocabulary_size: int) -> int:
    """Bytes of the logits that exist at one time."""
    if teacher.run is not None:  # no more than those of a chunk, in float32
        return 4 * teacher.chunk_tokens * vocabulary_size
    # A model of Hugging Face gives those of all its rows, in the type that it computes in.
    entries = teacher.rows * context_of(teacher).length * (size.vocabulary or vocabulary_size)
    return _BYTES[teacher.weights] * entries


def size_of_run(config: Config, depth: int | None, context: Context) -> TeacherSize:
    """The size of a run of jaxlm at a depth."""
    model = config.model
    parameters = stored_parameters(model)
    each = {"float64": 8, "float32": 4, "bfloat16": 2}[model.param_dtype]
    attended = (context.length + 1) / 2
    return TeacherSize(
        parameters=parameters,
        flops=flops_per_token(model, attended, depth or 0).forward,
        vocabulary=model.vocabulary,
        memory={model.param_dtype: each * parameters},
        form=model.param_dtype,
    )


def size_of_hugging_face(
    name: str,
    revision: str | None,
    dtype: str,
    quantization: dict[str, Any] | None,
    parameters: int | None,
) -> TeacherSize:
    """The size of a model of Hugging Face.

    Two operations are counted for each parameter and token: of a mixture of experts too many.

    Args:
        name: repository or folder; only its config.json is read.
        revision: branch, tag or commit.
        dtype: type of the weights.
        quantization: as for :func:`load_hugging_face`.
        parameters: their number; None builds the model without memory to count them, which needs
            PyTorch and transformers. With a number neither is needed, and all weights count as
            quantised.
    """
    tables, vocabulary = 0, None
    if parameters is None:
        try:
            torch, transformers = import_library("torch"), import_library("transformers")
            settings = read_hugging_face_config(name, revision)
        except UserError as error:
            raise UserError(f"{error}; or give the number of its parameters, for a plan") from None
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(settings)
        parameters = sum(p.numel() for p in model.parameters())
        text = settings.get_text_config()
        vocabulary = text.vocab_size
        tables = (1 if settings.tie_word_embeddings else 2) * vocabulary * text.hidden_size
    memory = {
        kind: size * parameters for kind, size in {dtype: _BYTES[dtype], "bfloat16": 2}.items()
    }
    for form, each in _QUANTISED.items():
        memory[form] = math.ceil((parameters - tables) * each) + 2 * tables
    form = dtype
    if quantization is not None:
        form = "4 bits" if quantization.get("load_in_4bit") else "8 bits"
    return TeacherSize(parameters, 2.0 * parameters, vocabulary, memory, form)
