"""A bench module with a kernel that compiles, one that cannot, and one that is none."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.bench import Case


def sweep(platform: str) -> list[Case]:
    return [_case("sound", _kernel(lambda x: x + 1)), _case("sorts", _kernel(lambda x: jnp.sort(x, axis=0))),
            _case("plain", lambda x, implementation: x + 1)]


def _case(name: str, function: Callable[..., Any]) -> Case:
    return Case(name, function, lambda key: (jax.random.normal(key, (8, 128)),), lambda arguments, out: (out,), 8192, 0)


def _kernel(body: Callable[[jax.Array], jax.Array]) -> Callable[..., Any]:
    def kernel(x_ref, out_ref):
        out_ref[...] = body(x_ref[...])

    return lambda x, implementation: pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
