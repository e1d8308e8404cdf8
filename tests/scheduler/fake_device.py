"""A device and an engine loop that compute nothing but keep every promise of the real ones.

The device's KV pool is a dictionary (group, page, offset) -> token. A call first writes all tokens it is fed, in every
page group, and then reads, for each of them, all that its query sees through the row's page tables: the next token is
a hash of what it read. A page given to two requests or back too early, a position planned twice or not at all, a
resumed request fed the wrong tokens: each makes the device read something else than the request's tokens, which is
asserted, and sample something else than a run of the request alone, which tests compare. Results are read one step
late.
"""

import dataclasses
import zlib
from collections.abc import Sequence

from jinfer.config import SamplingParams, ServiceParams
from jinfer.kv import PagePool, pages_touched
from jinfer.scheduler import Request, Scheduler, Status, StepPlan, position_limit

VOCAB = 64  # ids fit a byte


def next_token(seed: int, tokens: Sequence[int]) -> int:
    return zlib.crc32(bytes(tokens), seed) % VOCAB


def make_request(name: str, prompt: list[int], *, max_tokens: int | None, context: int, seed: int = 0,
                 stop_ids: tuple[int, ...] = (), index: int = 0, arrival: float = 0.0, **service) -> Request:
    limit = position_limit(len(prompt), max_tokens, context)
    return Request(id=name, index=index, prompt=prompt, params=SamplingParams(max_tokens=max_tokens),
                   max_position=limit, stop_ids=stop_ids, seed=seed, arrival=arrival, service=ServiceParams(**service))


def make_choices(count: int, name: str, prompt: list[int], *, seed: int = 0, **options) -> list[Request]:
    """n choices of one prompt."""
    requests = [make_request(name, prompt, seed=seed + i, index=i, **options) for i in range(count)]
    for request in requests:
        request.siblings = requests
    return requests


def alone(request: Request, host_stop: int | None = None, sees: int | None = None) -> list[int]:
    """Outputs of a request that nothing interrupts; sees: the largest window, None for everything."""
    tokens = list(request.prompt)
    while len(tokens) < request.max_position:
        token = next_token(request.seed, tokens[-sees:] if sees else tokens)
        tokens.append(token)
        if token in request.stop_ids or token == host_stop:
            break
    return tokens[len(request.prompt):]


class Share:
    """An OutputEstimate that never learns: 0 admits whoever fits now, and must preempt."""

    def __init__(self, ratio: float):
        self.ratio = ratio

    def finished(self, declared: int, actual: int) -> None:
        assert 0 <= actual <= declared

    def preempted(self) -> None:
        pass


@dataclasses.dataclass
class Row:
    """What the device knows of a slot."""

    owner: Request
    tables: list[list[int]]
    history: list[int]  # tokens whose KV is written, as the device was fed them
    last: int = -1
    stopped: bool = False


class FakeDevice:
    """Runs plans in the order of dispatch, at once; the caller keeps the results for a step."""

    def __init__(self, pools: Sequence[PagePool], *, decode_first: bool = False):
        self.page_size = pools[0].page_size
        self.windows = [pool.window for pool in pools]
        self.sees = None if None in self.windows else max(self.windows)
        self.decode_first = decode_first
        self.kv: dict[tuple[int, int, int], int] = {}
        self.host: dict[tuple[int, int], list[int | None]] = {}
        self.rows: dict[int, Row] = {}

    def dispatch(self, plan: StepPlan) -> tuple[list[list[int]], list[list[int]]]:
        """Tokens sampled for each chunk and each row."""
        self._move(plan)
        if self.decode_first:
            decoded = self._decode(plan)
            return self._prefill(plan), decoded
        return self._prefill(plan), self._decode(plan)

    def _move(self, plan: StepPlan) -> None:
        """In the order a StepPlan promises, except that what only touches the host may come in any."""
        slots = [(move.group, move.slot) for move in (*plan.outs, *plan.ins)]
        assert len(slots) == len(set(slots)), "a plan uses a slot twice"
        targets = [(move.group, move.page) for move in plan.ins] + [(move.group, move.target) for move in plan.copies]
        assert len(targets) == len(set(targets)), "a plan fills a page twice"
        for group, page, slot in plan.outs:
            self.host[group, slot] = self._page(group, page)
        for group, slot, page in plan.ins:
            self._fill(group, page, self.host[group, slot])
        for received in plan.received:
            assert received.request.given is not None
            tokens = received.request.given.payload
            for group, pages in enumerate(received.pages):
                for index, page in enumerate(pages):
                    if page:
                        self._fill(group, page, tokens[index * self.page_size:(index + 1) * self.page_size])
        for group, source, target in plan.copies:
            self._fill(group, target, self._page(group, source))

    def _page(self, group: int, page: int) -> list[int | None]:
        assert page > 0
        return [self.kv.get((group, page, offset)) for offset in range(self.page_size)]

    def _fill(self, group: int, page: int, tokens: Sequence[int | None]) -> None:
        assert page > 0
        for offset in range(self.page_size):
            token = tokens[offset] if offset < len(tokens) else None
            if token is None:
                self.kv.pop((group, page, offset), None)
            else:
                self.kv[group, page, offset] = token

    def _prefill(self, plan: StepPlan) -> list[list[int]]:
        for chunk in plan.chunks:
            request = chunk.request
            if chunk.joins:
                self.rows[chunk.slot] = Row(request, [], request.tokens(0, chunk.start))
            row = self.rows[chunk.slot]
            assert row.owner is request
            assert len(row.history) == chunk.start, "a chunk does not continue the one before"
            row.tables = [list(pages) for pages in request.pages]
            tokens = request.tokens(chunk.start, chunk.start + chunk.length)
            assert len(tokens) == chunk.length > 0
            for token in tokens:
                self._write(row, token)
            assert chunk.final == (len(row.history) == len(request.prompt) + len(request.outputs))
        results = []
        for chunk in plan.chunks:
            row = self.rows[chunk.slot]
            seen = [self._read(row, stop) for stop in range(chunk.start + 1, chunk.start + chunk.length + 1)]
            results.append([self._sample(row, seen[-1])] if chunk.samples else [])
        return results

    def _decode(self, plan: StepPlan) -> list[list[int]]:
        results: list[list[int]] = [[] for _ in plan.rows]
        rows = [self.rows[planned.slot] for planned in plan.rows]
        for planned, row in zip(plan.rows, rows, strict=True):
            assert row.owner is planned.request
            for g, index, page in planned.new_pages:
                assert index == len(row.tables[g]), "a page is put into a hole of the table"
                row.tables[g].append(page)
            for known, pages in zip(row.tables, planned.request.pages, strict=True):  # but for those given back
                assert all(page in (0, mine) for page, mine in zip(pages, known, strict=True))
            assert row.stopped or planned.position == len(row.history), "the host is wrong about the position"
        for _ in range(plan.steps):
            running = [(row, sampled) for row, sampled in zip(rows, results, strict=True) if not row.stopped]
            for row, _ in running:
                self._write(row, row.last)
            for row, sampled in running:
                sampled.append(self._sample(row, self._read(row, len(row.history))))
        return results

    def _write(self, row: Row, token: int) -> None:
        index, offset = divmod(len(row.history), self.page_size)
        for g, table in enumerate(row.tables):
            assert index < len(table), "a position without a page"
            assert table[index] > 0, "a write to the null page"
            self.kv[g, table[index], offset] = token
        row.history.append(token)

    def _read(self, row: Row, stop: int) -> list[int]:
        """What the query at stop - 1 sees: in every group the row's own tokens, returned for the longest of them."""
        most: list[int] = []
        for g, (table, window) in enumerate(zip(row.tables, self.windows, strict=True)):
            start = max(0, stop - window) if window else 0
            places = (divmod(i, self.page_size) for i in range(start, stop))
            seen = [self.kv[g, table[index], offset] for index, offset in places]
            assert seen == row.history[start:stop], "the pages of a request hold something else than its tokens"
            most = max(most, seen, key=len)
        return most

    def _sample(self, row: Row, seen: list[int]) -> int:
        row.last = next_token(row.owner.seed, seen)
        row.stopped = row.last in row.owner.stop_ids or len(row.history) + 1 == row.owner.max_position
        return row.last


class Loop:
    """plan(t+1), dispatch(t+1), collect(t), with every plan held against the limits."""

    def __init__(self, scheduler: Scheduler, *, decode_first: bool = False):
        self.scheduler = scheduler
        self.now = 0.0
        self.device = FakeDevice(scheduler.pages.pools, decode_first=decode_first)
        self.pending: tuple[StepPlan, tuple[list[list[int]], list[list[int]]]] | None = None
        self.steps = 0
        self.started: list[Request] = []  # in order of their first chunk
        self.host_stops: dict[Request, int] = {}  # what a stop string is: only the host sees it
        self.scored = lambda request: None  # told who is about to end without a token

    def step(self) -> StepPlan:
        preemptions, before = self.scheduler.preemptions, set(self.scheduler._active)
        self.now += 1.0
        plan = self.scheduler.plan(self.now)
        self._limits(plan)
        if self.scheduler.preemptions > preemptions:
            admitted = set(self.scheduler._active) - before
            assert len(admitted) <= 1, "a plan that evicts admits somebody but the one it made way for"
        results = None if plan.empty else (plan, self.device.dispatch(plan))
        self.collect()
        self.pending = results
        self.steps += 1
        return plan

    def collect(self) -> None:
        """Takes the results of the last dispatch, if they are still out."""
        if self.pending is None:
            return
        plan, (prefilled, decoded) = self.pending
        self.pending = None
        for chunk, tokens in zip(plan.chunks, prefilled, strict=True):
            self._take(chunk.request, tokens)
            if chunk.final and not chunk.samples:
                self.scored(chunk.request)
                self.scheduler.finish(chunk.request, "length")
        for row, tokens in zip(plan.rows, decoded, strict=True):
            self._take(row.request, tokens)
        self.scheduler.collected(plan)

    def run(self, most_steps: int) -> None:
        """Until nothing is left, in at most so many further steps."""
        last = self.steps + most_steps
        while self.scheduler.has_work:
            assert self.steps < last, f"not done after {most_steps} steps"
            self.step()
            self.scheduler.check()

    def _take(self, request: Request, tokens: list[int]) -> None:
        for token in tokens:
            if request.status is Status.FINISHED:
                return
            self.scheduler.append(request, [token])
            if token in request.stop_ids or token == self.host_stops.get(request):
                self.scheduler.finish(request, "stop")
            elif request.length == request.max_position:
                self.scheduler.finish(request, "length")

    def _limits(self, plan: StepPlan) -> None:
        scheduler = self.scheduler
        assert sum(chunk.length for chunk in plan.chunks) <= scheduler.pace.prefill_tokens
        assert len(plan.chunks) <= scheduler.max_chunks
        planned = [part.request for part in (*plan.chunks, *plan.rows)]
        assert len({id(request) for request in planned}) == len(planned), "a request twice in a plan"
        slots = [part.slot for part in (*plan.chunks, *plan.rows)]
        assert len(set(slots)) == len(slots) <= scheduler.max_rows
        assert all(1 <= slot <= scheduler.max_rows for slot in slots)
        self._writes_alone(plan)
        for chunk in plan.chunks:
            self._holds_its_window(chunk.request, chunk.start, chunk.length)
        for row in plan.rows:
            self._holds_its_window(row.request, row.position, scheduler.decode_steps)
        for chunk in plan.chunks:
            if chunk.joins and not chunk.request.preemptions:
                self.started.append(chunk.request)

    def _writes_alone(self, plan: StepPlan) -> None:
        """No page that a call writes to is in the tables of anybody else."""
        spans = [(chunk.request, chunk.start, chunk.start + chunk.length) for chunk in plan.chunks]
        spans += [(row.request, row.position, row.request.computed) for row in plan.rows]
        for request, start, stop in spans:
            for pool, pages in zip(self.scheduler.pages.pools, request.pages, strict=True):
                for page in pages[start // pool.page_size:-(-stop // pool.page_size)]:
                    assert page, "a write to the null page"
                    assert pool.references(page) == 1, "a page is written that somebody else holds"

    def _holds_its_window(self, request: Request, position: int, queries: int) -> None:
        """No page that lies below the window of the next call, and never more than it and a call of its kind need."""
        for pool, pages in zip(self.scheduler.pages.pools, request.pages, strict=True):
            if pool.window:
                below = max(0, position - pool.window + 1) // pool.page_size
                assert not any(pages[:below]), "a page is held past its window"
                assert all(pages[below:]), "a page of the window is gone"
                queries = max(queries, self.scheduler.decode_steps)
                assert len(pages) - below <= pages_touched(pool.window + queries - 1, pool.page_size)


def most_steps(requests: Sequence[Request], scheduler: Scheduler) -> int:
    """Steps that always suffice: each charged to the best-ranked request alive, which nothing holds up.

    It computes at most max_position tokens in chunks, then decodes; its last tokens come a step late. It may have been
    evicted just before it became the best (its tokens still in flight: one step without a plan), or be evicted by
    a more urgent class, as often as is allowed. It may wait for pages kept for protected requests, or for a prefix in
    the making, whose owners move on meanwhile and are charged. Where pages of a window are short, a chunk is no more
    than one of them; where a step has few tokens, decoding rows may leave one for a chunk.
    """
    bound, chunk = 2, scheduler.pace.prefill_tokens if scheduler.pace.step_tokens is None else 1
    if any(pool.window for pool in scheduler.pages.pools):
        chunk = min(chunk, scheduler.pages.page_size)
    for request in requests:
        once = -(-request.max_position // chunk) + 3
        once += -(-(request.max_position - len(request.prompt)) // scheduler.decode_steps)
        bound += once * (scheduler.max_preemptions + 1)
    return bound
