"""Find the first operation of a computation whose output is not finite.

The computation is traced and run equation by equation. Equations that contain others (loops,
branches, calls) are run as a whole, and opened only where their output is not finite; so most of a
large model still runs as compiled loops.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

import jaxlm

# These move numbers and make none: minus infinity is how masks and maxima begin, and is harmless
# until an operation makes NaN of it.
_MOVES = {
    "broadcast_in_dim",
    "concatenate",
    "convert_element_type",
    "copy",
    "device_put",
    "dynamic_slice",
    "dynamic_update_slice",
    "gather",
    "neg",
    "optimization_barrier",
    "pad",
    "reduce_max",
    "reshape",
    "rev",
    "scatter",
    "select_n",
    "slice",
    "squeeze",
    "stop_gradient",
    "transpose",
}
# Scopes that a loop's iterations are called by.
_ITERATIONS = ("micro_batch", "layer", "step", "gradient_step", "chunk")
_PACKAGE = Path(jaxlm.__file__).parent


@dataclasses.dataclass(frozen=True)
class Culprit:
    """The first operation whose output is not finite though its inputs are."""

    # Parts of the model from the outside in, such as ("core", "step 3", "layer 2 of 4", "mlp").
    where: tuple[str, ...]
    # Whether differentiation made it: the backward pass, or what is prepared for it.
    backward: bool
    # Name of the operation in JAX, such as dot_general.
    operation: str
    # File, line and function in jaxlm that it comes from; empty if unknown.
    source: str
    # Shape and dtype of the output; how many of its numbers are NaN, and how many infinite.
    output: str
    nan: int
    infinite: int
    # The largest magnitude among its finite inputs; None if it has none.
    largest_input: float | None

    def line(self) -> str:
        """One line for people."""
        place = ", ".join(self.where) or "outside of the model's parts"
        largest = "" if self.largest_input is None else f"; largest input {self.largest_input:.4g}"
        return (
            f"{'backward pass' if self.backward else 'forward pass'}, {place}: {self.operation} -> "
            f"{self.output} with {self.nan} NaN and {self.infinite} infinite{largest}"
            + (f" ({self.source})" if self.source else "")
        )


def first_not_finite(function: Callable[..., Any], *arguments: Any) -> Culprit | None:
    """Run a function of arrays and find where its numbers stop being finite; None if they do not.

    Args:
        function: traceable; all its arguments are arrays or pytrees of arrays.
        arguments: what it is called with.
    """
    closed = jax.make_jaxpr(function)(*arguments)
    return _look(closed.jaxpr, closed.consts, jax.tree.leaves(arguments), ())[1]


def _numbers(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _bad(values: Sequence[Any], moves: bool) -> bool:
    """Whether any value has a NaN or an infinity that an operation made."""
    for x in values:
        if not _numbers(x):
            continue
        wrong = jnp.isnan(x) if moves else ~jnp.isfinite(x)
        if bool(jnp.any(wrong)):
            return True
    return False


def _look(
    jaxpr: jex.Jaxpr, consts: Sequence[Any], arguments: Sequence[Any], where: tuple[str, ...]
) -> tuple[list[Any], Culprit | None]:
    """Run a jaxpr; stop at the first culprit."""
    values: dict[Any, Any] = {}
    last_use = {}
    for number, eqn in enumerate(jaxpr.eqns):
        last_use |= {v: number for v in eqn.invars if isinstance(v, jex.Var)}
    last_use |= {v: len(jaxpr.eqns) for v in jaxpr.outvars if isinstance(v, jex.Var)}

    def read(v: Any) -> Any:
        return v.val if isinstance(v, jex.Literal) else values[v]

    values |= zip(jaxpr.constvars, consts, strict=True)
    values |= zip(jaxpr.invars, arguments, strict=True)
    for number, eqn in enumerate(jaxpr.eqns):
        inputs = [read(v) for v in eqn.invars]
        outputs = _run(eqn, inputs)
        inside = _contains(eqn)
        moves = eqn.primitive.name in _MOVES or _bad(inputs, False)
        if _bad(outputs, moves) and not _bad(inputs, True):
            here = where + _scopes(eqn)
            if inside:
                found = _open(eqn, inputs, here)
                if found is not None:
                    return [], found
            else:
                return [], _culprit(eqn, inputs, outputs, here)
        values |= zip(_used(eqn), outputs, strict=True)
        for v in {v for v in eqn.invars if isinstance(v, jex.Var)}:
            if last_use[v] == number:
                del values[v]  # as a compiled program would, so that large models fit
    return [read(v) for v in jaxpr.outvars], None


def _used(eqn: jex.JaxprEqn) -> list[jex.Var]:
    return [v for v in eqn.outvars if not isinstance(v, jex.DropVar)]


def _run(eqn: jex.JaxprEqn, inputs: list[Any]) -> list[Any]:
    """The outputs of one equation that something uses."""
    used = _used(eqn)
    given = {v: x for v, x in zip(eqn.invars, inputs, strict=True) if isinstance(v, jex.Var)}
    names = jax.api_util.debug_info(
        "equation", _run, tuple(given.values()), {}, result_paths_thunk=lambda: ("",) * len(used)
    )
    alone = jex.Jaxpr((), list(given), used, [eqn], eqn.effects, names)
    return list(jex.jaxpr_as_fun(jex.ClosedJaxpr(alone, ()))(*given.values()))


def _contains(eqn: jex.JaxprEqn) -> bool:
    """Whether it is a loop, a branch or a call.

    Others may hold a jaxpr as well, such as how a scatter combines two numbers: they are single
    operations.
    """
    calls = ("jaxpr", "call_jaxpr")
    return eqn.primitive.name in ("scan", "while", "cond") or any(k in eqn.params for k in calls)


def _closed(jaxpr: Any) -> tuple[jex.Jaxpr, Sequence[Any]]:
    return (jaxpr.jaxpr, jaxpr.consts) if isinstance(jaxpr, jex.ClosedJaxpr) else (jaxpr, ())


def _open(eqn: jex.JaxprEqn, inputs: list[Any], where: tuple[str, ...]) -> Culprit | None:
    """Look inside a loop, a branch or a call."""
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        return _open_scan(params, inputs, where)
    if name == "while":
        return _open_while(params, inputs, where)
    if name == "cond":
        jaxpr, consts = _closed(params["branches"][int(inputs[0])])
        return _look(jaxpr, consts, inputs[1:], where)[1]
    called = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
    return _look(*_closed(called), inputs, where)[1]


def _open_scan(params: dict[str, Any], inputs: list[Any], where: tuple[str, ...]) -> Culprit | None:
    jaxpr, consts = _closed(params["jaxpr"])
    fixed, carried = params["num_consts"], params["num_carry"]
    own, carry = inputs[:fixed], inputs[fixed : fixed + carried]
    scanned, length = inputs[fixed + carried :], params["length"]
    for i in reversed(range(length)) if params["reverse"] else range(length):
        arguments = [*own, *carry, *[x[i] for x in scanned]]
        outputs, found = _look(jaxpr, consts, arguments, (*where, f"iteration {i + 1} of {length}"))
        if found is not None:
            return found
        carry = outputs[:carried]
    return None


def _open_while(
    params: dict[str, Any], inputs: list[Any], where: tuple[str, ...]
) -> Culprit | None:
    tests, bodies = params["cond_nconsts"], params["body_nconsts"]
    test_own, body_own = inputs[:tests], inputs[tests : tests + bodies]
    carry, i = inputs[tests + bodies :], 0
    while bool(_look(*_closed(params["cond_jaxpr"]), [*test_own, *carry], where)[0][0]):
        i += 1
        here = (*where, f"iteration {i}")
        carry, found = _look(*_closed(params["body_jaxpr"]), [*body_own, *carry], here)
        if found is not None:
            return found
    return None


def _scopes(eqn: jex.JaxprEqn) -> tuple[str, ...]:
    """Names of the model's parts that an equation is in, with differentiation kept as a mark."""
    return tuple(part for part in str(eqn.source_info.name_stack).split("/") if part)


def _plain(part: str) -> str:
    return re.sub(r"\w+\((.*?)\)+", r"\1", part)


def _where(parts: tuple[str, ...]) -> tuple[str, ...]:
    """Parts for people: iterations go by what they iterate over."""
    result: list[str] = []
    for part in parts:
        name = _plain(part)
        if name in _ITERATIONS and result and result[-1].startswith("iteration "):
            result[-1] = name.replace("_", " ") + result[-1].removeprefix("iteration")
        elif name and name != (result[-1] if result else ""):
            result.append(name)
    return tuple(result)


def _culprit(
    eqn: jex.JaxprEqn, inputs: list[Any], outputs: list[Any], where: tuple[str, ...]
) -> Culprit:
    (output,) = [x for x in outputs if _numbers(x) and bool(jnp.any(~jnp.isfinite(x)))][:1]
    finite = [jnp.where(jnp.isfinite(x), x, 0) for x in map(jnp.asarray, inputs) if _numbers(x)]
    return Culprit(
        where=_where(where),
        backward=any("jvp(" in part for part in where),
        operation=eqn.primitive.name,
        source=_source(eqn),
        output=f"{output.dtype}{list(output.shape)}",
        nan=int(jnp.sum(jnp.isnan(output))),
        infinite=int(jnp.sum(jnp.isinf(output))),
        largest_input=max((float(jnp.max(jnp.abs(x), initial=0)) for x in finite), default=None),
    )


def _source(eqn: jex.JaxprEqn) -> str:
    """The innermost place in this package that the operation comes from."""
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        path = Path(frame.file_name)
        if path.is_relative_to(_PACKAGE) and path != Path(__file__):
            name = frame.function_name.rpartition("<locals>.")[2]
            return f"{path.relative_to(_PACKAGE.parent)}:{frame.line_num}, {name}"
    return ""
