"""Which inputs of a traced program reach its output, layer by layer.

A parameter that a model holds but does not use has a gradient of zero, and so has one whose
gradient happens to vanish on a batch. The traced program tells the two apart: its equations are
walked backwards from the output, and what is never met has no part in it, whatever the numbers.

What is known of a variable is a boolean for each index along its first axis (one for a scalar), so
that a single layer of a stack can be missed. Slices along that axis and loops over it are followed
exactly; any other equation is taken to use all of its inputs for all of its outputs. An input that
is named as unused is unused; the reverse is not promised.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

# Equations that keep the first axis: what is used of the output is used of the input.
_KEEP_AXIS = ("convert_element_type", "copy", "copy_p", "stop_gradient", "reduce_precision")


def reached(function: Callable[..., Any], *arguments: Any, gradient: bool = False) -> list[Any]:
    """Trace a function, and find out which of its inputs its outputs can depend on.

    Args:
        function: of pytrees of arrays; its output is a pytree.
        arguments: arrays or `jax.ShapeDtypeStruct`s.
        gradient: follow only what a gradient flows through: neither `stop_gradient` nor integers
            nor booleans. (A custom gradient is taken to be that of its function.)

    Returns:
        For each argument a pytree of its structure with, for each leaf, a boolean array: one
        element for each index along its first axis, or a single one for a scalar.
    """
    traced = jax.make_jaxpr(function)(*arguments)
    walk = _Walk(gradient)
    outputs = [walk.everything(variable) for variable in traced.jaxpr.outvars]
    live = walk.inputs(traced.jaxpr, outputs)
    leaves, structure = jax.tree.flatten(arguments)
    assert len(leaves) == len(live)
    return list(jax.tree.unflatten(structure, live))


class _Walk:
    """One direction of reading: from outputs to inputs."""

    def __init__(self, gradient: bool):
        self.gradient = gradient

    def carries(self, variable: Any) -> bool:
        """Whether a variable of this type can matter at all."""
        return not self.gradient or jnp.issubdtype(variable.aval.dtype, jnp.inexact)

    def nothing(self, variable: Any) -> np.ndarray:
        shape = getattr(variable.aval, "shape", ())
        return np.zeros(shape[0] if shape else 1, bool)

    def everything(self, variable: Any) -> np.ndarray:
        return self.nothing(variable) | self.carries(variable)

    def inputs(self, jaxpr: Jaxpr, outputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """What is used of a program's inputs, given what is used of its outputs."""
        live: dict[Var, np.ndarray] = {}

        def use(variable: Any, mask: np.ndarray) -> None:
            if not isinstance(variable, Literal) and self.carries(variable):
                live[variable] = live.get(variable, self.nothing(variable)) | mask

        for variable, mask in zip(jaxpr.outvars, outputs, strict=True):
            use(variable, mask)
        for equation in reversed(jaxpr.eqns):
            masks = [live.get(v, self.nothing(v)) for v in equation.outvars]
            if any(mask.any() for mask in masks):
                for variable, mask in zip(
                    equation.invars, self._equation(equation, masks), strict=True
                ):
                    use(variable, mask)
        return [live.get(v, self.nothing(v)) for v in jaxpr.invars]

    def _equation(self, equation: JaxprEqn, outputs: list[np.ndarray]) -> list[np.ndarray]:
        name, params = equation.primitive.name, equation.params
        if name == "stop_gradient" and self.gradient:
            return [self.nothing(v) for v in equation.invars]
        if name in _KEEP_AXIS:
            return outputs
        if name == "slice" and len(equation.invars) == 1:
            return [self._slice(equation, outputs[0])]
        if name == "scan":
            return self._scan(equation, outputs)
        if name == "while":
            return self._while(equation, outputs)
        if name == "cond":
            return self._cond(equation, outputs)
        inner = [p for p in map(_open, params.values()) if p is not None]
        same = [
            p
            for p in inner
            if len(p.invars) == len(equation.invars) and len(p.outvars) == len(outputs)
        ]
        if same:  # jit, checkpoint, custom_vjp_call and the like: the function itself comes first
            return self.inputs(same[0], outputs)
        return [self.everything(v) for v in equation.invars]

    def _slice(self, equation: JaxprEqn, output: np.ndarray) -> np.ndarray:
        mask = self.nothing(equation.invars[0])
        start, limit = (equation.params[k][0] for k in ("start_indices", "limit_indices"))
        strides = equation.params["strides"]
        mask[start : limit : strides[0] if strides else 1] = output
        return mask

    def _scan(self, equation: JaxprEqn, outputs: list[np.ndarray]) -> list[np.ndarray]:
        params = equation.params
        consts, carries = params["num_consts"], params["num_carry"]
        body = params["jaxpr"].jaxpr
        stacked = [
            self.everything(v) if mask.any() else self.nothing(v)
            for v, mask in zip(body.outvars[carries:], outputs[carries:], strict=True)
        ]
        carried, used = self._until_stable(
            outputs[:carries],
            lambda carried: self.inputs(body, [*carried, *stacked]),
            slice(consts, consts + carries),
        )
        elements = zip(equation.invars[consts + carries :], used[consts + carries :], strict=True)
        return [
            *used[:consts],
            *carried,
            *(self.everything(v) if mask.any() else self.nothing(v) for v, mask in elements),
        ]

    def _while(self, equation: JaxprEqn, outputs: list[np.ndarray]) -> list[np.ndarray]:
        params = equation.params
        consts, tests = params["body_nconsts"], params["cond_nconsts"]
        test = params["cond_jaxpr"].jaxpr
        tested = self.inputs(test, [self.everything(v) for v in test.outvars])
        start = [a | b for a, b in zip(outputs, tested[tests:], strict=True)]
        carried, used = self._until_stable(
            start,
            lambda carried: self.inputs(params["body_jaxpr"].jaxpr, carried),
            slice(consts, None),
        )
        return [*tested[:tests], *used[:consts], *carried]

    def _until_stable(
        self,
        carried: Sequence[np.ndarray],
        body: Callable[[list[np.ndarray]], list[np.ndarray]],
        where: slice,
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """What a loop uses of its carry, and of all of its body's inputs: grows until it stays."""
        now = list(carried)
        while True:
            used = body(now)
            more = [a | b for a, b in zip(now, used[where], strict=True)]
            if all((a == b).all() for a, b in zip(now, more, strict=True)):
                return more, used
            now = more

    def _cond(self, equation: JaxprEqn, outputs: list[np.ndarray]) -> list[np.ndarray]:
        branches = [self.inputs(b.jaxpr, outputs) for b in equation.params["branches"]]
        used = [np.any(masks, axis=0) for masks in zip(*branches, strict=True)]
        return [self.everything(equation.invars[0]), *used]


def _open(value: Any) -> Jaxpr | None:
    """The program in a parameter of an equation, if it is one."""
    value = getattr(value, "jaxpr", value)
    return value if isinstance(value, Jaxpr) else None
