"""One compilation a run: a change of shapes is an error before it costs minutes or memory."""

from typing import Any

import jax

from jaxlm.memory.plan import planned_bytes
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


# Programs by function, static settings and argument types: runs in one process share them.
_PROGRAMS: dict[Any, jax.stages.Compiled] = {}


class CompileOnce:
    """Calls a jitted function, and insists on the argument types of the first call.

    Args:
        function: a jitted function whose first argument is static.
        static: that argument, hashable.
    """

    def __init__(self, function: Any, static: Any):
        self.function, self.static = function, static
        self._first: dict[str, str] = {}
        self._program: jax.stages.Compiled | None = None
        # Bytes that XLA plans for the program on the device and in pinned host memory; what a run
        # holds besides, such as windows that are prefetched, is not in it. 0 before the first call.
        self.planned = (0, 0)

    def __call__(self, *arguments: Any) -> Any:
        """Call the function.

        Args:
            arguments: pytrees of arrays; those that the function donates are gone afterwards.

        Raises:
            RecompilationError: names each argument that changed, with its old and new type.
        """
        signature = _signature(arguments)
        if self._program is None:
            key = (self.function, self.static, tuple(signature.items()))
            if key not in _PROGRAMS:
                _PROGRAMS[key] = self.function.lower(self.static, *arguments).compile()
            self._first, self._program = signature, _PROGRAMS[key]
            self.planned = planned_bytes(self._program)
        if signature != self._first:
            self._refuse(signature)
        return self._program(*arguments)

    def _refuse(self, signature: dict[str, str]) -> None:
        first = self._first
        names = [*first, *(name for name in signature if name not in first)]
        changes = [
            f"{name}: was {first.get(name, 'absent')}, is {signature.get(name, 'absent')}"
            for name in names
            if first.get(name) != signature.get(name)
        ]
        raise RecompilationError(
            f"{self.function.__name__} would be compiled a second time; shapes must not change "
            "during a run. " + "; ".join(changes)
        )
