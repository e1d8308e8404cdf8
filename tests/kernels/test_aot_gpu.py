"""The GPU kernels through the real compiler for an H100 that is not here, inside shard_map."""

import functools
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import Pages, flash_attention, kv_update, paged_attention
from pallas_kernels.aot.topology import gpu_devices

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(importlib.util.find_spec("jax_plugins.xla_cuda13") is None,
                       reason="NOT COMPILED FOR GPU: jax-cuda13-plugin and jax-cuda13-pjrt are not installed"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]
KV_HEADS, PAGE, PAGES_A_ROW = 4, 16, 64
HEADS = PartitionSpec(None, "model")
VECTOR = PartitionSpec("model")
WHOLE = PartitionSpec()


@functools.cache
def mesh():
    config = (Path(__file__).parents[1] / "data" / "h100.txtpb").read_text()
    return Mesh(np.array(gpu_devices(config, 2)), ("model",))


def array(shape, dtype, spec=WHOLE):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh(), spec))


def pool(width, dtype):
    shape = (4096, KV_HEADS, PAGE, width)
    scales = array(shape[:-1], jnp.float32, HEADS) if jnp.dtype(dtype).itemsize == 1 else None
    return Pages(array(shape, dtype, HEADS), scales)


def sequences(count):
    return (array((count, PAGES_A_ROW), jnp.int32), array((count + 1,), jnp.int32), array((count,), jnp.int32))


def compiled(function, *args, specs, outputs, donate=()):
    sharded = jax.shard_map(function, mesh=mesh(), in_specs=specs, out_specs=outputs, check_vma=False)
    return jax.jit(sharded, donate_argnums=donate).lower(*args).compile()


@pytest.mark.parametrize(("decode", "tokens", "group", "width", "dtype", "formats", "options"), [
    (True, 64, 4, 128, "bfloat16", ("bfloat16", "bfloat16"), {}),
    (True, 8, 8, 64, "bfloat16", ("int8", "float8_e4m3fn"), {"window": 100, "soft_cap": 30.0}),
    (True, 8, 3, 80, "float32", ("float32", "float32"), {}),
    (False, 512, 4, 128, "bfloat16", ("bfloat16", "bfloat16"), {"window": 100, "soft_cap": 30.0}),
    (False, 512, 1, 256, "bfloat16", ("float8_e4m3fn", "int8"), {}),
    (False, 32, 16, 192, "float16", ("float16", "int8"), {}),
])
def test_a_step_updates_the_pool_in_place(decode, tokens, group, width, dtype, formats, options):
    """kv_update and paged_attention as a layer calls them: no copy of a pool, no collective."""

    def layer(q, k, v, sinks, k_pages, v_pages, places, first_page):
        pages = kv_update(k_pages, v_pages, k, v, *places, first_page=first_page, decode=decode)
        out = paged_attention(q, *pages, *places, scale=0.1, sinks=sinks, first_page=first_page, decode=decode,
                              **options)
        return out, *pages

    heads = KV_HEADS * group
    count = tokens if decode else 8
    pools = [pool(width, f) for f in formats]
    new = array((tokens, KV_HEADS, width), dtype, HEADS)
    result = compiled(
        layer, array((tokens, heads, width), dtype, HEADS), new, new, array((heads,), jnp.float32, VECTOR),
        *pools, sequences(count), array((), jnp.int32),
        specs=(HEADS, HEADS, HEADS, VECTOR, HEADS, HEADS, WHOLE, WHOLE), outputs=HEADS, donate=(4, 5))
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pools)) // 2
    memory, text = result.memory_analysis(), result.as_text()
    assert memory.alias_size_in_bytes == held
    assert memory.temp_size_in_bytes < held / 2
    assert text.count("__gpu$xla.gpu.triton") == 2
    assert not any(word in text for word in ("all-reduce", "all-gather", "collective-permute"))


@pytest.mark.parametrize(("group", "width", "dtype"), [(4, 128, "bfloat16"), (1, 96, "float32")])
def test_flash_attention_compiles(group, width, dtype):
    run = functools.partial(flash_attention, scale=0.1, window=300, soft_cap=20.0)
    new = array((512, KV_HEADS, width), dtype, HEADS)
    result = compiled(run, array((512, KV_HEADS * group, width), dtype, HEADS), new, new, array((5,), jnp.int32),
                      specs=(HEADS, HEADS, HEADS, WHOLE), outputs=HEADS)
    assert result.as_text().count("__gpu$xla.gpu.triton") == 1
