"""One compilation a run: a change of shapes is an error before it costs minutes or memory."""

import time
from collections.abc import Hashable, Sequence
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
        variants: what may be told apart at a call, such as the lengths of rows: each has one
            compilation of its own.
    """

    def __init__(self, function: Any, static: Any, variants: Sequence[Hashable] = (None,)):
        self.function, self.static = function, static
        self._first: dict[Hashable, dict[str, str]] = {variant: {} for variant in variants}
        self._programs: dict[Hashable, jax.stages.Compiled] = {}
        # Bytes that XLA plans for the largest program so far, on the device and in pinned host
        # memory; what a run holds besides, such as windows that are prefetched, is not in it.
        self.planned = (0, 0)
        # Seconds spent compiling so far.
        self.seconds = 0.0

    def __call__(self, *arguments: Any, variant: Hashable = None) -> Any:
        """Call the function.

        Args:
            arguments: pytrees of arrays; those that the function donates are gone afterwards.
            variant: one of `variants`.

        Raises:
            RecompilationError: names each argument that changed, with its old and new type, or the
                variant that is none of those announced.
        """
        if variant not in self._first:
            announced = ", ".join(str(known) for known in self._first)
            raise RecompilationError(
                f"{self.function.__name__} would be compiled once more, for {variant}; expected "
                f"{announced}"
            )
        signature = _signature(arguments)
        if variant not in self._programs:
            self._compile(signature, arguments, variant)
        if signature != self._first[variant]:
            self._refuse(signature, self._first[variant])
        return self._programs[variant](*arguments)

    def _compile(self, signature: dict[str, str], arguments: Any, variant: Hashable) -> None:
        key = (self.function, self.static, tuple(signature.items()))
        began = time.perf_counter()
        if key not in _PROGRAMS:
            _PROGRAMS[key] = self.function.lower(self.static, *arguments).compile()
        self.seconds += time.perf_counter() - began
        self._first[variant], self._programs[variant] = signature, _PROGRAMS[key]
        self.planned = max(planned_bytes(program) for program in self._programs.values())

    def _refuse(self, signature: dict[str, str], first: dict[str, str]) -> None:
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
