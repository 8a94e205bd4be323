"""What may differ between a run and its continuation."""

import re
from collections.abc import Collection, Iterable
from typing import Any

from jaxlm.config import Config, from_tree, to_tree
from jaxlm.data.pipeline import rows_by_length
from jaxlm.data.shards import Fingerprint

# Changes nothing that is learned beyond rounding: where things are, what is shown, how a window
# is cut into micro-batches, what is recomputed.
FREE = (
    r"run\.(name|directory)",
    r"prepare\..*",  # the data itself is compared by its fingerprint
    r"data\.(directory|prefetch)",
    r"model\.(attention|remat)",
    r"loss\.chunk_tokens",
    r"distillation\.cache",  # its contents are compared by the data's fingerprint
    r"training\.(micro_batch_rows|micro_batches|block_inputs|max_nonfinite_updates)",
    r"(evaluation|checkpoint|monitors|logging|profile|preflight)\..*",
)
# Another experiment from here on: allowed when asked for by name, and recorded in the run.
ON_REQUEST = {
    "horizon": (
        r"training\.updates|data\.epochs|"
        r"optim\.(schedule|warmup_updates|decay_updates|end_learning_rate)"
    ),
    "rate": r"optim\.learning_rate",
    "clipping": r"optim\.(clip|max_norm)",
    "engine": r"training\.update",  # the state is the same in both
    "depth": r"depth\..*",
    "control": r"(control|rewind)\..*|evaluation\.(every|rows)",
}
# The rest is frozen: architecture, seeds, order of the data, loss and optimizer.


def _leaves(tree: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {path: tree}
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= _leaves(value, f"{path}.{key}" if path else key)
    return leaves


def _covers(patterns: tuple[str, ...], key: str) -> bool:
    return any(re.fullmatch(pattern, key) for pattern in patterns)


def _window_rows(tree: dict[str, Any]) -> list[int]:
    """Rows of a window, for each row length."""
    data, training = tree["data"], tree["training"]
    rows = rows_by_length(data["sequence_length"], data["buckets"], training["micro_batch_rows"])
    return [training["micro_batches"] * count for count in rows.values()]


def _kind(key: str) -> str | None:
    return next((name for name, one in ON_REQUEST.items() if re.fullmatch(one, key)), None)


def config_changes(
    stored: dict[str, Any], config: Config, allowed: Collection[str] = ()
) -> tuple[list[str], list[dict[str, Any]]]:
    """Compare a stored configuration tree with the one of now.

    Args:
        stored: from the checkpoint.
        config: of now.
        allowed: names of ON_REQUEST.

    Returns:
        Lines ``key: was X, is Y`` for changes that are refused, and records (`change`, one of
        ON_REQUEST; `key`, `was`, `is`) of those that are allowed. Free changes are left out.
    """
    old, new = _leaves(stored), _leaves(to_tree(config))
    refused: list[str] = []
    made: list[dict[str, Any]] = []
    for key in [*old, *(key for key in new if key not in old)]:
        was, now = old.get(key), new.get(key)
        kind = _kind(key)
        # A plateau is one of validation passes: with others it lowers the rate at other times.
        steers = kind == "control" and any(c.kind == "plateau" for c in config.control.controllers)
        if was == now or (_covers(FREE, key) and not steers):
            continue
        if kind in allowed:
            made.append({"change": kind, "key": key, "was": was, "is": now})
        else:
            line = f"{key}: was {was!r}, is {now!r}"
            refused.append(line if kind is None else f"{line} (--allow-changes {kind} allows it)")
    was, now = _window_rows(stored), _window_rows(to_tree(config))
    if was != now:
        refused.append(
            "training.micro_batch_rows * training.micro_batches: "
            f"was {'/'.join(map(str, was))} rows an update, is {'/'.join(map(str, now))}"
            + (" (by row length, see data.buckets)" if config.data.buckets else "")
        )
    return refused, made


def config_at(config: Config, changes: Iterable[dict[str, Any]], update: int) -> Config:
    """The settings that an update was made under.

    Args:
        config: of now.
        changes: the run's records of changes, in their order. Free ones leave none.
        update: counts from 0.
    """
    tree = to_tree(config)
    for change in reversed([one for one in changes if one["update"] > update]):
        *sections, name = change["key"].split(".")
        section = tree
        for one in sections:
            section = section[one]
        section[name] = change["was"]
    return from_tree(tree)


def data_changes(stored: Fingerprint, now: Fingerprint, may_grow: bool) -> list[str]:
    """Lines that name what of the data differs from the data of the run.

    Args:
        stored: the run's fingerprint.
        now: that of the data as it is.
        may_grow: training tokens after those of the run change nothing: it reads a range of them.
    """
    changes = []
    for field in dict.fromkeys((*stored, *now)):  # a teacher may come or go
        was, found = stored.get(field), now.get(field)
        if found == was:
            continue
        grew = isinstance(was, list) and isinstance(found, list) and found[: len(was)] == was
        if grew and field in ("train tokens", "teacher records"):
            if may_grow:
                continue
            changes.append(
                f"data: {field} have grown; a run on data that grows needs data.tokens, the range "
                f"that it trains on"
            )
        elif grew:
            changes.append(
                f"data: {field} have grown; data.validation_tokens keeps a run to the first of them"
            )
        else:
            changes.append(f"data: {field} changed")
    return changes
