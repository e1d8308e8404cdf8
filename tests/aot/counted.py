"""A kernel whose loop is as long as a scalar says and whose every other turn does more: for counting its cycles."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


def loop(turns: int) -> tuple[Callable[..., Any], Any, Callable[[], Any]]:
    """A target of `Compiler.compile`."""

    def kernel(turns_ref, flags_ref, x_ref, out_ref):
        out_ref[...] = x_ref[...]

        def turn(i, _):
            @pl.when(flags_ref[i % 8, i % 4] == 1)
            def _more():
                for _ in range(4):
                    out_ref[...] = jnp.exp(out_ref[...])

            out_ref[...] += 1.0
            return 0

        jax.lax.fori_loop(0, turns_ref[0], turn, 0)

    def make():
        flags = (jnp.arange(8, dtype=jnp.int32)[:, None] + jnp.zeros((8, 4), jnp.int32)) % 2
        return jnp.full((1,), turns, jnp.int32), flags, jnp.zeros((8, 128))

    def call(turns, flags, x):
        spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2, grid=(1,), in_specs=[pl.BlockSpec((8, 128), lambda *_: (0, 0))],
            out_specs=pl.BlockSpec((8, 128), lambda *_: (0, 0)))
        return pl.pallas_call(kernel, grid_spec=spec, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(turns, flags, x)

    return call, jax.eval_shape(make), make
