"""One compilation a run: a change of shapes is an error before it costs minutes or memory."""

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
    """

    def __init__(self, name: str):
        self.name = name
        self._first: dict[str, str] | None = None

    def check(self, arguments: Any) -> None:
        """Compare arguments with those of the first call.

        Args:
            arguments: any pytree of arrays.

        Raises:
            RecompilationError: names each argument that changed, with its old and new type.
        """
        signature = _signature(arguments)
        if self._first is None:
            self._first = signature
            return
        if signature == self._first:
            return
        names = [*self._first, *(name for name in signature if name not in self._first)]
        changes = [
            f"{name}: was {self._first.get(name, 'absent')}, is {signature.get(name, 'absent')}"
            for name in names
            if self._first.get(name) != signature.get(name)
        ]
        raise RecompilationError(
            f"{self.name} would be compiled a second time; shapes must not change during a run. "
            + "; ".join(changes)
        )
