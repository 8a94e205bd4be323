"""Values for parameters by the pattern of their path."""

import re
from collections.abc import Sequence
from typing import Any, TypeVar

import jax

Value = TypeVar("Value")


def path_name(path: tuple[Any, ...]) -> str:
    """A pytree path as names joined by slashes, such as ``core/mlp/gate/kernel``."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def match_rules(params: Any, rules: Sequence[tuple[str, Value]]) -> Any:
    """Give every parameter the value of the first rule whose pattern is found in its path.

    Args:
        params: any pytree.
        rules: pairs of a regular expression (searched for, not matched whole) and a value.

    Returns:
        A pytree of `params`' structure holding the values.

    Raises:
        ValueError: parameters that no rule covers, by name.

    Example:
        >>> from jaxlm.optim import match_rules
        >>> match_rules({"w": {"kernel": 0, "bias": 0}}, [("bias$", False), ("kernel$", True)])
        {'w': {'bias': False, 'kernel': True}}
    """
    uncovered: list[str] = []

    def value_of(path: tuple[Any, ...], _: Any) -> Value | None:
        name = path_name(path)
        for pattern, value in rules:
            if re.search(pattern, name):
                return value
        uncovered.append(name)
        return None

    values = jax.tree_util.tree_map_with_path(value_of, params)
    if uncovered:
        raise ValueError(f"no rule covers the parameters {', '.join(uncovered)}")
    return values
