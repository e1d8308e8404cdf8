"""What a kernel's bench.py declares: shapes worth compiling and timing."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One shape of one operation.

    Attributes:
      name: unique within the operation, such as 'decode rows=64 context=1024 llama-8b bfloat16'.
      function: called with what `make` returns; takes `implementation` by keyword.
      make: from a PRNG key to the arguments, in JAX only: `jax.eval_shape(make, key)` gives their shapes.
      bytes: HBM bytes the operation has to move. flops: operations it has to do.
    """

    name: str
    function: Callable[..., Any]
    make: Callable[[jax.Array], tuple[Any, ...]]
    bytes: int
    flops: int
