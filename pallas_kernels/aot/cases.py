"""A bench case as something `Compiler.compile` can name: 'pallas_kernels.aot.cases:case'."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.bench import cases
from pallas_kernels.platform import Implementation

TARGET = "pallas_kernels.aot.cases:case"


def case(operation: str, kind: str, name: str, implementation: Implementation) -> tuple[
        Callable[..., Any], Any, Callable[[], Any]]:
    """(function, abstract arguments, make) of the case of that name; kind is 'sweep' or 'timing'."""
    found = {case.name: case for case in cases(operation, kind, implementation)}[name]
    shapes = jax.eval_shape(found.make, jax.random.key(0))
    function = functools.partial(found.function, implementation=implementation)
    return function, shapes, lambda: found.make(jax.random.key(0))
