"""What training changes: a frozen dataclass of plain pytrees."""

import dataclasses
from typing import Any

import jax
from jax import Array

from jaxlm.models.build import Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything a training step reads and writes.

    There is no random key: randomness is a function of (seed, update). The 64-bit token count is
    a host integer in the checkpoint's metadata.
    """

    # Windows seen so far, int32 scalar; skipped ones count.
    update: Array
    # Parameters in their storage dtype.
    params: Params
    # Optimizer state; its own count advances with applied updates only.
    opt_state: Any
