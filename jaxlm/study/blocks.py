"""Which rows of the data each model saw: read from the runs' logs, and compared.

The digest of a span of updates does not depend on how windows were cut into micro-batches: two
runs have the same one exactly where every update saw the same rows in the same order.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from jaxlm.errors import Failure


def read_blocks(path: Path, updates: int) -> list[list[int]]:
    """Block ids of each of the first `updates` updates, as a run's blocks.jsonl has them.

    Raises:
        Failure: a line that no run writes, or updates that are missing or out of order.
    """
    blocks: list[list[int]] = []
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        raise Failure(f"{path}: missing; which blocks this run saw cannot be told") from None
    batch = 0
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            update, micro_batch, ids = record["update"], record["micro_batch"], record["blocks"]
            if not all(type(x) is int for x in (update, micro_batch, *ids)):
                raise TypeError
        except (ValueError, KeyError, TypeError, RecursionError):
            raise Failure(f"{path}:{number}: is not what a run writes there") from None
        if update >= updates:
            break
        if micro_batch == 0 and update == len(blocks):
            blocks.append([])
            batch = 0
        if update != len(blocks) - 1 or micro_batch != batch:
            raise Failure(f"{path}:{number}: update {update} is missing, repeated or out of order")
        blocks[-1].extend(ids)
        batch += 1
    if len(blocks) < updates:
        raise Failure(f"{path}: has {len(blocks)} of {updates} updates")
    return blocks


def digest_of(blocks: Sequence[Sequence[int]]) -> str:
    """Hex digest of the rows of consecutive updates."""
    found = hashlib.sha256()
    for ids in blocks:
        found.update((",".join(map(str, ids)) + "\n").encode())
    return found.hexdigest()


def first_difference(a: Sequence[Sequence[int]], b: Sequence[Sequence[int]]) -> int | None:
    """The first update whose rows differ, or None."""
    for update, (one, other) in enumerate(zip(a, b, strict=False)):
        if list(one) != list(other):
            return update
    return None if len(a) == len(b) else min(len(a), len(b))
