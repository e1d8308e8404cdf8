"""ProgramCatalog: every program of a configuration, compiled ahead of time and never by accident."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jinfer.engine.buckets import Buckets
from jinfer.engine.host_store import STAGED
from jinfer.engine.packing import Packing
from jinfer.engine.page_moves import BLOCKS, COPIES, PageMoves
from jinfer.engine.programs import Programs
from jinfer.engine.state import DeviceState
from jinfer.errors import RetraceError
from jinfer.kv.groups import page_groups
from jinfer.models.context import KVPages, KVPools
from jinfer.observe.metrics import Metrics
from jinfer.sampling.penalties import new_counts
from jinfer.sharding import Layout
from pallas_kernels.pages import pool_shapes

Weights = Sequence[jax.Array] | Sequence[jax.ShapeDtypeStruct]
EXCHANGES: tuple[Literal["gather", "scatter"], ...] = ("gather", "scatter")
COMPILERS = 2  # programs compiled at once; XLA itself uses more threads


class Key(NamedTuple):
    """Which program: kind, bucket size (0 for `prepare`), and the page group of a `gather` or a `scatter`."""

    kind: Literal["prefill", "decode", "prepare", "copy", "gather", "scatter"]
    size: int
    group: int = 0


class ProgramCatalog:
    """Holds compiled executables, so that a call with other shapes is an error instead of a retrace.

    A program asked for after warm-up that is not there is compiled and counted, or raises RetraceError if
    the configuration forbids it.
    """

    def __init__(self, programs: Programs, buckets: Buckets, weights: Weights, kv_dtype: jnp.dtype, *,
                 rows: int, metrics: Metrics, forbid: bool, exchanges: bool = False):
        """weights: arrays, or what they will be (`Assembly.abstract_weights`).

        exchanges: pages leave the pool and come back, so `gather` and `scatter` belong to the configuration.
        """
        self.programs = programs
        self.moves = PageMoves.of(programs.config)
        self.exchanges = exchanges
        self.buckets = buckets
        self.metrics = metrics
        self.forbid = forbid
        self.warm = False
        self.weights = weights
        self.kv_dtype = kv_dtype
        self._rows = rows
        self._compiled: dict[Key, jax.stages.Compiled] = {}
        self._lock = threading.Lock()

    def keys(self) -> list[Key]:
        """All programs of the configuration, the ones a first request needs first."""
        prefill = [Key("prefill", size) for size in self.buckets.prefill]
        decode = [Key("decode", size) for size in self.buckets.decode]
        exchanges = [Key(kind, size, group) for kind in EXCHANGES for size in BLOCKS
                     for group in range(len(self.moves.layers))] if self.exchanges else []
        return [*reversed(prefill), *decode, Key("prepare", 0), Key("copy", COPIES), *exchanges]

    def abstract_kv(self, pages: Sequence[int]) -> KVPools:
        """Shapes and shardings of the pool with so many pages (P) a layer, by page group."""
        p = self.programs
        sharding = p.layout.sharding(None, "kv_heads")

        def one(layers: int, count: int) -> KVPages:
            pool = pool_shapes(layers * count, p.layout.kv_heads(p.config), p.page_size, p.config.cache_width,
                               self.kv_dtype, p.layout.platform)
            pool = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), pool)
            return KVPages(pool, None if p.config.latent else pool)

        groups = page_groups(p.config.layer_kinds)
        return tuple(one(len(group.layers), count) for group, count in zip(groups, pages, strict=True))

    def abstract_block(self, group: int, count: int) -> KVPages:
        """Shapes and shardings of `count` pages of a group outside the pool: leaves [count, L, K, S, H]."""
        sharding = self.programs.layout.sharding(None, None, "kv_heads")
        pool = self.abstract_kv((1,) * len(self.moves.layers))[group]
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape), x.dtype, sharding=sharding), pool)

    def page_bytes(self) -> tuple[int, ...]:
        """Bytes of a page of each group in all its layers, on all devices together: what a host slot takes."""
        return tuple(sum(shard_bytes(x) for x in jax.tree.leaves(self.abstract_block(group, 1)))
                     * self.programs.layout.mesh.size for group in range(len(self.moves.layers)))

    def staged_bytes(self) -> int:
        """Memory on a device for pages on their way to the host or back, of the group with the largest ones."""
        return STAGED * max(self.page_bytes()) // self.programs.layout.mesh.size if self.exchanges else 0

    def abstract_state(self) -> DeviceState:
        p, slots = self.programs, self._rows + 1
        counts = jax.eval_shape(lambda: new_counts(self._rows, p.layout.padded_vocab(p.config)))

        def array(shape: tuple[int, ...], dtype: Any) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=whole(p.layout))

        return DeviceState(
            rows=array((slots, p.record_width), jnp.int32),
            page_table=array((p.groups, slots, p.table_width), jnp.int32),
            counts=array(counts.shape, counts.dtype), bias_ids=array((slots, p.max_bias), jnp.int32),
            bias_values=array((slots, p.max_bias), jnp.float32))

    def warm_up(self, pages: tuple[int, ...], on_progress: Callable[[str], None] | None = None) -> None:
        """Compiles every program (from the persistent cache where it can) for a pool of `pages`."""
        start, keys = time.perf_counter(), self.keys()
        done = 0

        def one(key: Key) -> None:
            nonlocal done
            compiled = self.compile(key, pages)
            with self._lock:
                self._compiled[key] = compiled
                done += 1
                if on_progress is not None:
                    on_progress(f"compiling programs {done}/{len(keys)}")

        with ThreadPoolExecutor(COMPILERS) as pool:
            list(pool.map(one, keys))
        self.metrics.warmup_compilations += len(keys)
        self.metrics.warmup_seconds += time.perf_counter() - start
        largest = max(workspace_bytes(c) for c in self._compiled.values())
        self.metrics.workspace_bytes = max(self.metrics.workspace_bytes, largest)
        self.warm = True

    def workspace(self) -> int:
        """Bytes of temporaries a device needs for the largest calls; they do not depend on the pool."""
        pages = (2,) * self.programs.groups
        return max(workspace_bytes(self.compile(key, pages)) for key in self.largest()) + self.staged_bytes()

    def largest(self) -> list[Key]:
        """The programs that need most memory, one of each regime."""
        return [Key("prefill", self.buckets.prefill[-1]), Key("decode", self.buckets.decode[-1])]

    def get(self, key: Key, pages: tuple[int, ...]) -> jax.stages.Compiled:
        compiled = self._compiled.get(key)
        if compiled is None:
            if self.forbid and self.warm:
                raise RetraceError(f"program {key.kind}[{key.size}] was not compiled at warm-up")
            compiled = self._compiled[key] = self.compile(key, pages)
            self.metrics.compilations += 1
        return compiled

    def packing(self, key: Key) -> Packing:
        """How a program's upload is laid out; asked by the runner, and by the compiler for its size."""
        p = self.programs
        match key.kind:
            case "prefill":
                return p.prefill_packing(key.size, self.chunks(key.size))
            case "decode":
                return p.decode_packing(key.size)
            case "prepare":
                return p.prepare_packing()
            case "copy":
                return self.moves.copy_packing(key.size)
            case "gather" | "scatter":
                return self.moves.block_packing(key.size)

    def chunks(self, tokens: int) -> int:
        """Q of a prefill call of this size: a chunk holds a token at least."""
        return min(self.buckets.max_chunks, tokens)

    def compile(self, key: Key, pages: tuple[int, ...]) -> jax.stages.Compiled:
        """The executable of one program for a pool of `pages`: what every call runs and every plan reads."""
        compiled = self.lower(key, pages).compile()
        kv = self.abstract_kv(pages)
        match key.kind:
            case "prefill" | "decode" | "copy":
                assert_donated(compiled, kv)
            case "scatter":
                assert_donated(compiled, (kv[key.group],))
        return compiled

    def lower(self, key: Key, pages: tuple[int, ...]) -> jax.stages.Lowered:
        """The traced program, not yet compiled; needs shapes and a mesh, no device and no weights."""
        p = self.programs
        kv, state, upload = self.abstract_kv(pages), self.abstract_state(), whole(p.layout)
        packed = jax.ShapeDtypeStruct((self.packing(key).size,), jnp.int32, sharding=upload)
        kept = jax.tree.map(lambda x: x.sharding, (kv, state))
        function: Any
        match key.kind:
            case "prefill":
                function, static = p.prefill, {"tokens": key.size, "chunks": self.chunks(key.size)}
                out: Any = (*kept, upload, upload)
            case "decode":
                function, static = p.decode, {"rows": key.size}
                out = (*kept, upload)
            case "prepare":
                return jax.jit(p.prepare, donate_argnums=0, out_shardings=kept[1]).lower(state, packed)
            case _:
                return self._lower_move(key, kv, packed)
        jitted = jax.jit(function, static_argnames=tuple(static), donate_argnums=(1, 2), out_shardings=out)
        return jitted.lower(self.weights, kv, state, packed, **static)


    def _lower_move(self, key: Key, kv: KVPools, packed: jax.ShapeDtypeStruct) -> jax.stages.Lowered:
        if key.kind == "copy":
            kept = jax.tree.map(lambda x: x.sharding, kv)
            jitted = jax.jit(self.moves.copy, static_argnames="count", donate_argnums=0, out_shardings=kept)
            return jitted.lower(kv, packed, count=key.size)
        pool, block = kv[key.group], self.abstract_block(key.group, key.size)
        inside, outside = (jax.tree.map(lambda x: x.sharding, pages) for pages in (pool, block))
        static = {"group": key.group, "count": key.size}
        if key.kind == "gather":
            jitted = jax.jit(self.moves.gather, static_argnames=tuple(static), out_shardings=outside)
            return jitted.lower(pool, packed, **static)
        jitted = jax.jit(self.moves.scatter, static_argnames=tuple(static), donate_argnums=0,
                         out_shardings=(inside, packed.sharding))
        return jitted.lower(pool, block, packed, **static)


def whole(layout: Layout) -> jax.sharding.NamedSharding:
    """Replicated on every device of the mesh."""
    return layout.sharding()


def workspace_bytes(compiled: jax.stages.Compiled) -> int:
    """Temporaries and unaliased outputs of one call on one device, as far as the backend says."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return 0
    return analysis.temp_size_in_bytes + max(0, analysis.output_size_in_bytes - analysis.alias_size_in_bytes)


def assert_donated(compiled: jax.stages.Compiled, kv: KVPools) -> None:
    """The pool must be updated in place: a program that copies it is refused at warm-up."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return
    pool = sum(shard_bytes(x) for x in jax.tree.leaves(kv))
    assert analysis.alias_size_in_bytes >= pool, (
        f"the KV pool is not donated: {analysis.alias_size_in_bytes} bytes aliased of {pool}")


def shard_bytes(x: Any) -> int:
    """Bytes of an array, concrete or abstract, on one device."""
    shape = x.sharding.shard_shape(x.shape)
    return int(jnp.dtype(x.dtype).itemsize * math.prod(shape))
