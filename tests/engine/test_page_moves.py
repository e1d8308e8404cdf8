"""Pages that leave the pool come back bit for bit, in every model's pool and over every mesh, and disturb no others."""

import contextlib
import dataclasses
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfer.config import EngineConfig, LayoutConfig, SamplingParams
from jinfer.engine import host_store
from jinfer.engine.assembly import Assembly
from jinfer.engine.catalog import Key
from jinfer.engine.page_moves import BLOCKS, COPIES, blocks
from jinfer.engine.runner import Runner
from jinfer.errors import JinferError
from jinfer.observe.metrics import Metrics
from jinfer.plan import checks
from jinfer.plan.hlo import Module
from jinfer.scheduler import StepPlan
from jinfer.scheduler.plan import PageCopy, PageIn, PageOut, Received
from jinfer.sharding import Layout
from jinfer.weights import open_checkpoint
from tests.engines import DATA, drain

POOLS = [("llama_plain", "float32", 1), ("llama_plain", "bfloat16", 2), ("gemma2", "float32", 1), ("gemma2", "bfloat16", 2),
         ("deepseek_v2", "float32", 2), ("llama_plain", "int8", 2)]
PAGES, SLOTS = 41, 12
IDS = ["-".join(map(str, pool)) for pool in POOLS]


def build(name: str, dtype: str, tensor: int = 1, first: int = 0) -> Runner:
    """A runner without weights whose pool holds random bits. first: of its devices."""
    config = EngineConfig(page_size=8, max_rows=2, prefill_tokens=16, forbid_compilation=True, host_kv_gb=1.0,
                          layout=LayoutConfig(mesh={"tensor": tensor}))
    model = open_checkpoint(DATA / "models" / name).config
    parts = Assembly.build(model, config, Layout.build(config.layout, jax.devices()[first:]))
    catalog = parts.catalog(parts.abstract_weights(), Metrics())
    catalog.kv_dtype = jnp.dtype(dtype)
    pages = tuple(PAGES - 8 * group for group in range(len(catalog.moves.layers)))
    for key in move_keys(catalog):
        catalog.get(key, pages)
    catalog.warm = True
    runner = Runner(catalog, [], pages, Metrics())
    rng = np.random.default_rng(0)
    runner.kv = jax.tree.map(lambda x: jax.device_put(random_bits(rng, x), x.sharding), runner.kv)
    runner.host.verify = True
    return runner


@pytest.fixture
def runner(request):
    built = build(*request.param)
    yield built
    built.close()


def move_keys(catalog):
    keys = catalog.keys()
    return [key for key in keys if key.kind in ("copy", "gather", "scatter")]


def random_bits(rng, x):
    """Numbers of all kinds, NaN included."""
    return rng.integers(0, 256, x.nbytes, np.uint8).view(x.dtype).reshape(x.shape)


def bits(runner):
    """Of each group, the pool's arrays as bytes: [L, P, bytes of a page in a layer and an array]."""
    return [[np.array(x).view(np.uint8).reshape(layers, count, -1) for x in jax.tree.leaves(pool)]
            for pool, layers, count in zip(runner.kv, runner.catalog.moves.layers, runner.pages, strict=True)]


def assert_pools_equal(found, wanted):
    for mine, others in zip(found, wanted, strict=True):
        for x, y in zip(mine, others, strict=True):
            np.testing.assert_array_equal(x[:, 1:], y[:, 1:])  # the null page may hold anything


def moves(**lists) -> StepPlan:
    return StepPlan((), (), 1, **lists)


def received(payload, pages) -> Received:
    return Received(SimpleNamespace(given=SimpleNamespace(payload=payload)), pages)


def random_plan(rng, runner, used):
    """A plan in which no slot is both read and written. used: slots of each group that hold something."""
    outs, ins, copies = [], [], []
    for group, count in enumerate(runner.pages):
        slots = rng.permutation(SLOTS).tolist()
        writes = slots[: rng.integers(0, 6)]
        outs += [PageOut(group, int(rng.integers(1, count)), slot) for slot in writes]
        reads = [slot for slot in slots if slot in used[group] and slot not in writes][: rng.integers(0, 6)]
        targets = rng.permutation(np.arange(1, count))[: len(reads)].tolist()
        ins += [PageIn(group, slot, page) for slot, page in zip(reads, targets, strict=True)]
        copies += [PageCopy(group, *rng.integers(1, count, 2).tolist()) for _ in range(rng.integers(0, 10))]
        used[group].update(writes)
    return moves(outs=tuple(outs), ins=tuple(ins), copies=tuple(copies))


@pytest.mark.parametrize("runner", POOLS, ids=IDS, indirect=True)
def test_random_plans_do_what_the_lists_say_and_nothing_else(runner):
    rng = np.random.default_rng(1)
    pool, slots, used = bits(runner), {}, [set() for _ in runner.pages]
    plans = [random_plan(rng, runner, used) for _ in range(8)]
    for plan in plans:
        runner.collect(runner.dispatch(plan))
        for out in plan.outs:
            slots[out.group, out.slot] = [x[:, out.page].copy() for x in pool[out.group]]
        for move in plan.ins:
            for x, page in zip(pool[move.group], slots[move.group, move.slot], strict=True):
                x[:, move.page] = page
        for copy in plan.copies:
            for x in pool[copy.group]:
                x[:, copy.target] = x[:, copy.source]
    assert_pools_equal(bits(runner), pool)
    stored = jax.tree.leaves(runner.host._slots)
    assert {x.sharding.memory_kind for x in stored} == {"pinned_host"}
    assert all(len(x.sharding.device_set) == runner.catalog.programs.layout.mesh.size for x in stored)
    # Bytes: of a page in all its layers.
    page = [sum(x[:, 0].nbytes for x in group) for group in pool]
    assert runner.catalog.page_bytes() == tuple(page)
    metrics = runner.metrics
    outs, ins = [m for p in plans for m in p.outs], [m for p in plans for m in p.ins]
    assert (metrics.pages_swapped_out, metrics.pages_swapped_in) == (len(outs), len(ins))
    assert metrics.swap_out_bytes == sum(page[m.group] for m in outs)
    assert metrics.swap_in_bytes == sum(page[m.group] for m in ins)
    assert metrics.forked_pages == sum(len(p.copies) for p in plans)
    assert metrics.compilations == 0  # the keys hold all that ran
    # The time on the link, of both directions.
    runner.host.wait()
    transfers = runner.transfers()
    for direction, total in (("out", metrics.swap_out_bytes), ("in", metrics.swap_in_bytes)):
        mine = [t for t in transfers if t.direction == direction]
        assert sum(t.bytes for t in mine) == total
        assert all(t.seconds > 0 for t in mine)
    assert metrics.swap_seconds == pytest.approx(sum(t.seconds for t in transfers))
    assert runner.transfers() == []
    assert metrics.move_seconds > 0
    assert metrics.prefill_seconds == metrics.decode_seconds == 0


@pytest.mark.parametrize("runner", [("gemma2", "bfloat16", 2)], indirect=True)
def test_copies_are_made_in_their_order_however_many(runner):
    """A chain longer than a call: the last page gets what the first one held. Then one of the other group."""
    pool = bits(runner)
    for x in pool[1]:
        x[:, 2:] = x[:, 1:2]
    for x in pool[0]:
        x[:, 4] = x[:, 3]
    last = runner.pages[1] - 1
    chain = [PageCopy(1, page, page + 1) for page in range(1, last)]
    chain += [PageCopy(1, 1, last)] * (COPIES - len(chain))
    runner.dispatch(moves(copies=(*chain, PageCopy(0, 3, 4))))
    assert_pools_equal(bits(runner), pool)


@pytest.mark.parametrize("runner", [("llama_plain", "float32", 1)], indirect=True)
def test_outs_come_before_ins_and_ins_before_copies(runner):
    pool = bits(runner)
    runner.dispatch(moves(outs=(PageOut(0, 1, 0),)))
    # The page is given away, filled from a slot, and forked, all at once; the old content is safe in the host.
    runner.dispatch(moves(outs=(PageOut(0, 2, 1),), ins=(PageIn(0, 0, 2),), copies=(PageCopy(0, 2, 3),)))
    runner.dispatch(moves(ins=(PageIn(0, 1, 4),)))
    for x in pool[0]:
        x[:, 4] = x[:, 2]
        x[:, 2] = x[:, 3] = x[:, 1]
    assert_pools_equal(bits(runner), pool)


@pytest.mark.parametrize("runner", [("llama_plain", "float32", 1)], indirect=True)
def test_a_slot_written_again_gives_its_memory_back(runner):
    for page in (1, 2, 3):
        runner.dispatch(moves(outs=(PageOut(0, page, 7), PageOut(0, page + 3, 8))))
    runner.host.wait()
    kept = jax.tree.leaves(runner.host._slots)
    assert len(kept) == 2 * len(jax.tree.leaves(runner.kv))
    # Nobody else keeps an old one: all arrays of the process in the host's pinned memory are of a slot, or staged yet.
    runner.host._make_room(host_store.STAGED)
    runner.host.wait()
    pinned = [x for x in jax.live_arrays() if x.sharding.memory_kind == "pinned_host"]
    assert {id(x) for x in pinned} <= {id(x) for x in kept}
    with pytest.raises(JinferError, match="host slot 9 of page group 0 holds nothing"):
        runner.dispatch(moves(ins=(PageIn(0, 9, 1),)))


@pytest.mark.parametrize("runner", [("llama_plain", "float32", 2)], indirect=True)
def test_a_page_that_comes_back_changed_is_noticed(runner):
    runner.dispatch(moves(outs=(PageOut(0, 1, 0),)))
    page = runner.host._slots[0][0]
    changed = np.asarray(page.v.data).copy()
    changed.view(np.uint8).flat[5] ^= 1
    runner.host._slots[0][0] = page._replace(v=page.v._replace(data=jax.device_put(changed, page.v.data.sharding)))
    with pytest.raises(AssertionError, match=r"PageIn.*came back changed"):
        runner.dispatch(moves(ins=(PageIn(0, 0, 1),)))


@contextlib.contextmanager
def waits(monkeypatch):
    """Counts what this thread waits for."""
    found = []
    wait = jax.block_until_ready

    def counted(x):
        if threading.current_thread() is threading.main_thread():
            found.append(x)
        return wait(x)

    with monkeypatch.context() as patch:
        patch.setattr(jax, "block_until_ready", counted)
        yield found


@pytest.mark.parametrize("runner", [("llama_plain", "float32", 1)], indirect=True)
def test_nothing_waits_until_too_many_pages_are_under_way(runner, monkeypatch):
    runner.host.verify = False
    few = moves(outs=tuple(PageOut(0, 1 + i, i) for i in range(8)), ins=tuple(PageIn(0, i, 1 + i) for i in range(8)))
    pool = bits(runner)
    ready = host_store._ready
    monkeypatch.setattr(host_store, "_ready", lambda arrays: False)  # the slowest link there is
    with waits(monkeypatch) as found:
        runner.dispatch(few)
        assert runner.host._staged_pages == 16
        assert found == []
    with waits(monkeypatch) as found:
        monkeypatch.setattr(host_store, "STAGED", 4)
        runner.dispatch(few)
        assert found
        assert runner.host._staged_pages <= 4
    monkeypatch.setattr(host_store, "_ready", ready)
    assert_pools_equal(bits(runner), pool)


@pytest.mark.parametrize("pool", POOLS[2:5:2], ids=IDS[2:5:2])
def test_pages_go_to_an_engine_on_other_devices(pool):
    """A window's early pages are gone at the sender's, and the receiver has some of the others."""
    runner, other = build(*pool), build(*pool, first=4)
    rng = np.random.default_rng(2)
    sent = [rng.permutation(np.arange(1, count))[:19].tolist() for count in runner.pages]
    targets = [rng.permutation(np.arange(1, count))[:19].tolist() for count in runner.pages]
    sent[-1][:7] = targets[-1][:7] = [0] * 7
    targets[0][:2] = [0, 0]
    wanted = bits(other)
    for mine, theirs, pages, at in zip(bits(runner), wanted, sent, targets, strict=True):
        for x, y in zip(mine, theirs, strict=True):
            y[:, at] = x[:, pages]
    before = bits(runner)
    payload = other.place(runner.export(sent))
    assert payload.nbytes == sum(x[:, [page for page in pages if page]].nbytes
                                 for group, pages in zip(before, sent, strict=True) for x in group)
    other.dispatch(moves(received=(received(payload, tuple(map(tuple, targets))),)))
    assert_pools_equal(bits(other), wanted)
    assert_pools_equal(bits(runner), before)
    runner.close()
    other.close()


def test_lists_are_cut_into_the_sizes_there_are():
    for count in range(30):
        parts = list(blocks(range(count)))
        assert [i for part in parts for i in part] == list(range(count))
        assert {len(part) for part in parts} <= set(BLOCKS)


@pytest.mark.parametrize("runner", [("gemma2", "float32", 2)], indirect=True)
def test_programs_move_pages_in_place_and_between_no_devices(runner, monkeypatch):
    catalog = runner.catalog
    page = max(sum(x.nbytes for x in jax.tree.leaves(pool)) // count
               for pool, count in zip(runner.kv, runner.pages, strict=True))
    for key in move_keys(catalog):
        compiled = catalog.get(key, runner.pages)
        assert compiled.memory_analysis().temp_size_in_bytes < page + 4096, key
        assert not checks.collectives(Module(compiled.as_text())), key
    assert catalog.staged_bytes() == host_store.STAGED * page // 2  # on one of two devices
    monkeypatch.setattr(catalog, "largest", lambda: [Key("copy", COPIES)])  # the others take seconds to compile
    assert 0 <= catalog.workspace() - catalog.staged_bytes() < page + 4096


@pytest.mark.parametrize(("name", "overrides"), [
    ("llama_plain", {"max_rows": 3}), ("gemma2", {"max_context": 48, "max_rows": 2, "prefill_tokens": 8, "page_size": 4,
                                                  "kv_pages": 18})])
def test_a_request_goes_on_after_its_pages_were_away(engines, name, overrides):
    """Between two steps all pages go to the host, the pool is lost, and they come back. Before, moves cost nothing."""
    engine = engines.get(name, **overrides)
    prompt, params = list(range(3, 17)), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    engine.submit(prompt, params)
    want = next(iter(drain(engine)[0].values())).completions[0].token_ids
    runner, deltas = engine.workers[0].runner, []
    assert move_keys(runner.catalog) == [Key("copy", COPIES)]
    assert not {key.kind for key in runner.catalog._compiled} & {"copy", "gather", "scatter"}
    assert not any(watcher._threads for watcher in runner.host._watchers.values())
    names = {field.name for field in dataclasses.fields(Metrics) if "swap" in field.name or "fork" in field.name}
    assert all(getattr(engine.metrics, name) == 0 for name in names)
    engine.submit(prompt, params)
    while engine.has_work:
        deltas += engine.step()
        held = [(g, page) for r in engine._by_request for g, pages in enumerate(r.pages) for page in pages if page]
        runner.dispatch(moves(outs=tuple(PageOut(g, page, i) for i, (g, page) in enumerate(held))))
        runner.kv = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan, device=x.sharding), runner.kv)
        runner.dispatch(moves(ins=tuple(PageIn(g, i, page) for i, (g, page) in enumerate(held))))
    outputs, _ = drain(engine, deltas)
    assert next(iter(outputs.values())).completions[0].token_ids == want
    assert engine.metrics.pages_swapped_in == engine.metrics.pages_swapped_out > 20
