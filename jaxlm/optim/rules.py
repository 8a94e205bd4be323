"""Values for parameters by the pattern of their path."""

import re
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

Value = TypeVar("Value")


# Pairs of a pattern, searched for in a parameter's path, and its number of stacked leading axes.
LayerRules = Sequence[tuple[str, int]]


def layer_axes(name: str, ndim: int, rules: LayerRules) -> int:
    """Number of leading axes of a leaf that are stacked layers.

    The first rule that matches the path decides; without one, every axis before the last two
    counts, so that vectors and matrices have none.
    """
    for pattern, axes in rules:
        if re.search(pattern, name):
            return axes
    return max(ndim - 2, 0)


def path_name(path: tuple[Any, ...]) -> str:
    """A pytree path as names joined by slashes, such as ``core/mlp/gate/kernel``."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def unused(layers: tuple[int, ...], dtype: Any) -> Array:
    """Stands in a state for what a leaf does not need: zeros [*layers, 1].

    The leading axes are the leaf's, so that a layer's state is a slice; one number, because
    checkpoints refuse arrays without any; a buffer of its own, because a donated one must not stand
    in a state twice.
    """
    return jnp.zeros((*layers, 1), dtype)


def unzip(like: Any, tree: Any, parts: int) -> tuple[Any, ...]:
    """A tree of `like`'s structure with tuples for leaves, as a tuple of `parts` trees."""
    structure = jax.tree.structure(like)
    leaves = structure.flatten_up_to(tree)
    return tuple(structure.unflatten([leaf[i] for leaf in leaves]) for i in range(parts))


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
