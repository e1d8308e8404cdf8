"""Engines on tiny models for tests: built once a configuration, programs compiled when first needed."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jinfer.config import EngineConfig, SamplingParams
from jinfer.engine.engine import Engine
from jinfer.engine.outputs import Delta, RequestOutput
from jinfer.kv import HostTier, PagePool
from jinfer.scheduler.pages import RequestPages

DATA = Path(__file__).parent / "data"
SMALL = {"page_size": 8, "kv_pages": 129, "max_rows": 8, "prefill_tokens": 32, "warmup": False}


class Engines:
    """A cache of engines. Each leaves with no request in it."""

    def __init__(self, cache: Path):
        self._cache = cache
        self._built: dict[str, Engine] = {}

    def get(self, model: str | Path, **overrides: Any) -> Engine:
        """model: a name under tests/data/models or a path; overrides: EngineConfig fields."""
        key = repr((model, sorted(overrides.items())))
        if key not in self._built:
            path = DATA / "models" / model if isinstance(model, str) else model
            config = EngineConfig(**{**SMALL, "compilation_cache": self._cache, **overrides})
            self._built[key] = Engine(path, config)
        engine = self._built[key]
        assert not engine.has_work, "an earlier test left requests behind"
        return engine

    def forget(self, engine: Engine) -> None:
        """The next test gets a new one."""
        self._built = {key: built for key, built in self._built.items() if built is not engine}

    def close(self) -> None:
        for engine in self._built.values():
            engine.close()
        self._built.clear()


class Bold:
    """An OutputEstimate that expects no output at all: admits whoever fits now."""

    ratio = 0.0

    def finished(self, declared: int, actual: int) -> None:
        pass

    def preempted(self) -> None:
        pass


@contextlib.contextmanager
def bold(engine: Engine) -> Iterator[None]:
    """Inside, admission keeps no page for what requests may still generate."""
    before = [worker.scheduler.estimate for worker in engine.workers]
    for worker in engine.workers:
        worker.scheduler.estimate = Bold()
    try:
        yield
    finally:
        for worker, estimate in zip(engine.workers, before, strict=True):
            worker.scheduler.estimate = estimate


@contextlib.contextmanager
def short_of_pages(engine: Engine, pages: int, host_pages: int = 0, *, preempts: bool = True) -> Iterator[None]:
    """Inside, the engine gives out so many pages of its pool only, and must preempt somebody; nothing is compiled anew.

    The prefix cache is empty at its beginning, and at its end: the pages have had other owners.
    host_pages: for so many the host tier has room (the engine needs one).
    """
    (worker,) = engine.workers
    scheduler, before = worker.scheduler, engine.metrics.preemptions
    whole = scheduler.pages
    sizes = worker.runner.catalog.page_bytes()
    host = HostTier(host_pages * sum(sizes), sizes) if host_pages else None
    scheduler.pages = RequestPages(
        [PagePool(min(pages + 1, pool.num_pages), pool.page_size, pool.window) for pool in whole.pools],
        scheduler.decode_steps, host)
    try:
        with bold(engine):
            yield
        assert not preempts or engine.metrics.preemptions > before, "nobody was preempted"
    finally:
        scheduler.pages = RequestPages(
            [PagePool(pool.num_pages, pool.page_size, pool.window) for pool in whole.pools], scheduler.decode_steps,
            HostTier(whole.index.host.budget, sizes) if whole.index.host else None)
        engine.metrics.count_pages(scheduler.pages.pools)


def golden(name: str) -> dict[str, Any]:
    return json.loads((DATA / "golden" / f"{name}.json").read_text())


def drain(engine: Engine, earlier: Sequence[Delta] = ()) -> tuple[dict[str, RequestOutput], list[Delta]]:
    """Runs until idle; checks the accounting; returns outputs by id, and every delta in order.

    earlier: deltas of steps the test ran itself.
    """
    outputs = {d.request_id: d.output for d in earlier if d.request_finished}
    deltas = list(earlier)
    while engine.has_work:
        for delta in engine.step():
            deltas.append(delta)
            if delta.request_finished:
                assert delta.request_id not in outputs, "finished twice"
                outputs[delta.request_id] = delta.output
    engine.check()
    assert engine.metrics.pages_free == engine.metrics.pages_total
    for request_id, output in outputs.items():
        for choice in output.completions:
            mine = [d for d in deltas if d.request_id == request_id and d.index == choice.index]
            assert "".join(d.text for d in mine) == choice.text
            assert [t for d in mine for t in d.token_ids] == choice.token_ids
            assert [d.finish_reason for d in mine if d.finish_reason] == [choice.finish_reason]
    return outputs, deltas


def run(engine: Engine, prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams]) -> list[RequestOutput]:
    """Submits all at once and runs them; results in order."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    ids = [engine.submit(prompt, p) for prompt, p in zip(prompts, each, strict=True)]
    outputs, _ = drain(engine)
    return [outputs[i] for i in ids]


def one(engine: Engine, prompt: str | Sequence[int], **params: Any) -> RequestOutput:
    return run(engine, [prompt], SamplingParams(**params))[0]
