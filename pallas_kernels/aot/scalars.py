"""The scalars that come with every Pallas kernel of a program, computed on the CPU.

Only what they depend on is computed: the pools of a kernel's other arguments never exist.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

Thunk = Callable[[], Any]


class Call(NamedTuple):
    """A kernel's name ('' if it has none), the bounds of its grid that are computed, its scalar-prefetch arguments."""

    name: str
    bounds: list[np.ndarray]
    scalars: list[np.ndarray]


def calls(program: Callable[[], Any]) -> list[Call]:
    """The kernels that `program`, a function without arguments, calls, in its order."""
    closed = jax.make_jaxpr(program)()
    found: list[tuple[str, int, list[Thunk]]] = []
    _trace(closed.jaxpr, [functools.partial(_same, const) for const in closed.consts], [], found)
    values = [(name, bounds, [np.asarray(thunk()) for thunk in thunks]) for name, bounds, thunks in found]
    return [Call(name, known[:bounds], known[bounds:]) for name, bounds, known in values]


def _trace(jaxpr: Jaxpr, consts: Sequence[Thunk], arguments: Sequence[Thunk],
           found: list[tuple[str, int, list[Thunk]]]) -> list[Thunk]:
    """Thunks of the outputs; kernels met on the way go to `found`."""
    known: dict[Any, Thunk] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))

    def read(atom: Any) -> Thunk:
        return functools.partial(_same, atom.val) if isinstance(atom, Literal) else known[atom]

    for eqn in jaxpr.eqns:
        inputs = [read(atom) for atom in eqn.invars]
        inner = next(_jaxprs(eqn.params), None)
        if eqn.primitive.name == "pallas_call":
            mapping = eqn.params["grid_mapping"]
            bounds = mapping.num_dynamic_grid_bounds
            found.append((eqn.params.get("name") or "", bounds, inputs[:bounds + mapping.num_index_operands]))
            outputs: list[Thunk] = [_unknown] * len(eqn.outvars)
        elif inner is not None and _has_kernel(inner):
            body = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
            held = inner.consts if isinstance(inner, ClosedJaxpr) else ()
            outputs = _trace(body, [functools.partial(_same, const) for const in held], inputs, found)
        else:
            run = functools.cache(functools.partial(_run, eqn, inputs))
            outputs = [functools.partial(_pick, run, index) for index in range(len(eqn.outvars))]
        known |= zip(eqn.outvars, outputs, strict=True)
    return [read(atom) for atom in jaxpr.outvars]


def _run(eqn: Any, inputs: Sequence[Thunk]) -> Sequence[Any]:
    result = eqn.primitive.bind(*(thunk() for thunk in inputs), **eqn.primitive.get_bind_params(eqn.params))
    return result if eqn.primitive.multiple_results else [result]


def _pick(run: Callable[[], Sequence[Any]], index: int) -> Any:
    return run()[index]


def _same(value: Any) -> Any:
    return value


def _unknown() -> Any:
    raise ValueError("a kernel's scalar arguments depend on another kernel's result")


def _jaxprs(parameters: dict[str, Any]) -> Iterator[Jaxpr | ClosedJaxpr]:
    yield from (value for value in parameters.values() if isinstance(value, Jaxpr | ClosedJaxpr))


def _has_kernel(jaxpr: Jaxpr | ClosedJaxpr) -> bool:
    body = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    return any(eqn.primitive.name == "pallas_call" or any(_has_kernel(inner) for inner in _jaxprs(eqn.params))
               for eqn in body.eqns)
