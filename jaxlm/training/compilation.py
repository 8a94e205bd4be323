"""One compilation a run: a change of shapes is an error before it costs minutes or memory."""

from collections.abc import Hashable, Sequence
from typing import Any

import jax

from jaxlm.optim.rules import path_name


class RecompilationError(RuntimeError):
    """A compiled step was called with arguments that need a second compilation."""


def _signature(arguments: Any) -> dict[str, str]:
    """What the compilation of a call depends on, by argument path."""

    def describe(x: Any) -> str:
        aval = jax.typeof(x)
        weak = " (weakly typed)" if getattr(aval, "weak_type", False) else ""
        placed = f" on {x.sharding}" if isinstance(x, jax.Array) and x.committed else ""
        return f"{aval.str_short()}{weak}{placed}"

    leaves = jax.tree_util.tree_flatten_with_path(arguments)[0]
    return {path_name(path): describe(leaf) for path, leaf in leaves}


class CompileOnce:
    """Remembers the argument types of a jitted function's first call and insists on them.

    Args:
        name: the function's name, for messages.
        variants: what may be told apart at a call, such as the lengths of rows: each has one
            compilation of its own.
    """

    def __init__(self, name: str, variants: Sequence[Hashable] = (None,)):
        self.name = name
        self._first: dict[Hashable, dict[str, str] | None] = dict.fromkeys(variants)

    def check(self, arguments: Any, variant: Hashable = None) -> None:
        """Compare arguments with those of the variant's first call.

        Args:
            arguments: any pytree of arrays.
            variant: one of `variants`.

        Raises:
            RecompilationError: names each argument that changed, with its old and new type, or the
                variant that is none of those announced.
        """
        if variant not in self._first:
            announced = ", ".join(str(known) for known in self._first)
            raise RecompilationError(
                f"{self.name} would be compiled once more, for {variant}; expected {announced}"
            )
        signature, first = _signature(arguments), self._first[variant]
        if first is None:
            self._first[variant] = signature
            return
        if signature == first:
            return
        names = [*first, *(name for name in signature if name not in first)]
        changes = [
            f"{name}: was {first.get(name, 'absent')}, is {signature.get(name, 'absent')}"
            for name in names
            if first.get(name) != signature.get(name)
        ]
        raise RecompilationError(
            f"{self.name} would be compiled a second time; shapes must not change during a run. "
            + "; ".join(changes)
        )
