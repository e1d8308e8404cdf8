"""Counters of one engine. Plain numbers, updated by the loop, read by everything that reports."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from jinfer.kv.pool import PagePool
from jinfer.observe.stalls import Cause
from jinfer.scheduler import Scheduler


class GroupPages(NamedTuple):
    """Pages of one page group.

    window: tokens its layers see, None is all. free: held by nobody. peak: most held at once. cached: of the free ones,
    those that hold what the prefix cache knows. size: bytes of a page in all layers of the group.
    """

    window: int | None
    total: int
    free: int
    peak: int
    cached: int = 0
    size: int = 0


@dataclasses.dataclass(slots=True)
class Metrics:
    """Totals since the engine was built (gauges are marked). Times in seconds, sizes in bytes.

    Attributes:
      requests_waiting, requests_running: gauges, choices one by one. requests_finished, requests_cancelled,
      requests_failed, requests_timed_out: by how they ended. requests_rejected: not taken, the queue was full or the
      engine drained. requests_handed_back: taken, then given back by a drain.
      preemptions: times a request lost its pages; swaps: of them, those after which pages came back from the host.
      recomputed_tokens: positions computed again after it; restored_tokens: positions that were still cached or came
      back from the host.
      prompt_tokens: of accepted requests. prefill_tokens: computed by prefill calls (recomputation included).
      prefix_queries: tokens looked up in the prefix cache, by requests that use it. prefix_hits: found there,
      prefix_host_hits: of these in host memory. saved_tokens: positions no prefill call had to compute, because they
      were cached or shared.
      evictions: cached pages given to others. admission_ratio (gauge): what admission reserves of the longest outputs
      requests could have.
      stalls_preemption, stalls_prefill, stalls_other: gaps between tokens that were far longer than usual or than the
      request's itl_target (`jinfer.observe.stalls`), by what went on: the request was computed again, a prefill call
      ran in the same step, neither.
      padded_prefill_tokens, padded_decode_rows: bucket padding computed for nothing.
      output_tokens: sampled and kept. steps: turns of the loop with work. prefill_calls, decode_calls.
      prefill_seconds, decode_seconds: device time of the calls, measured where results arrive.
      pages_swapped_out, pages_swapped_in, swap_out_bytes, swap_in_bytes: to the host tier and back, where started;
      swap_seconds: on the link, of those that have ended. move_seconds: calls waited for pages from the host or from
      another engine. forked_pages: copied for another choice of a request.
      transfers, transfer_bytes: KV that went from prefill to decode workers; transfer_seconds: from its dispatch until
      the loop saw it arrive. workers_lost: device groups that failed and were given up.
      host_seconds: CPU time of the loop's thread for planning, packing,
      dispatching and post-processing.
      pages_total, pages_free, pages_cached: gauges; those that are cached are free, too. pages_peak: most pages held at
      once. All are sums over page_groups (gauges), which may peak at different times. kv_unfilled: gauge, bytes of held
      pages that hold no token yet, every few steps.
      weight_bytes, kv_bytes, state_bytes, workspace_bytes: memory by class (workspace: largest program's temporaries);
      page_bytes: of a page of each page group. host_kv_bytes, host_kv_used: the host tier and what of it holds pages.
      `memory()` is the whole account.
      load_bytes: of the checkpoint's tensors as stored, read in load_seconds.
      warmup_compilations: programs compiled or loaded before serving; warmup_seconds; compilations: programs
      compiled after warm-up (0 when all is well).
    """

    requests_waiting: int = 0
    requests_running: int = 0
    requests_finished: int = 0
    requests_cancelled: int = 0
    requests_failed: int = 0
    requests_timed_out: int = 0
    requests_rejected: int = 0
    requests_handed_back: int = 0
    preemptions: int = 0
    swaps: int = 0
    recomputed_tokens: int = 0
    restored_tokens: int = 0
    prompt_tokens: int = 0
    prefill_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prefix_host_hits: int = 0
    saved_tokens: int = 0
    evictions: int = 0
    admission_ratio: float = 1.0
    stalls_preemption: int = 0
    stalls_prefill: int = 0
    stalls_other: int = 0
    padded_prefill_tokens: int = 0
    padded_decode_rows: int = 0
    output_tokens: int = 0
    steps: int = 0
    prefill_calls: int = 0
    decode_calls: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    pages_swapped_out: int = 0
    pages_swapped_in: int = 0
    swap_out_bytes: int = 0
    swap_in_bytes: int = 0
    swap_seconds: float = 0.0
    move_seconds: float = 0.0
    forked_pages: int = 0
    transfers: int = 0
    transfer_bytes: int = 0
    transfer_seconds: float = 0.0
    workers_lost: int = 0
    host_seconds: float = 0.0
    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    pages_peak: int = 0
    page_groups: tuple[GroupPages, ...] = ()
    kv_unfilled: int = 0
    weight_bytes: int = 0
    kv_bytes: int = 0
    state_bytes: int = 0
    workspace_bytes: int = 0
    page_bytes: tuple[int, ...] = ()
    host_kv_bytes: int = 0
    host_kv_used: int = 0
    load_bytes: int = 0
    load_seconds: float = 0.0
    warmup_compilations: int = 0
    warmup_seconds: float = 0.0
    compilations: int = 0

    def count_pages(self, pools: Sequence[PagePool]) -> None:
        """Takes the gauges of pages from the pools of all page groups."""
        sizes = itertools.cycle(self.page_bytes or (0,))
        self.page_groups = tuple([GroupPages(p.window, p.num_pages - 1, p.available, p.peak, p.cached, size)
                                  for p, size in zip(pools, sizes, strict=False)])
        _, totals, free, peaks, cached, _ = zip(*self.page_groups, strict=True)
        self.pages_total, self.pages_free, self.pages_peak = sum(totals), sum(free), sum(peaks)
        self.pages_cached = sum(cached)

    def count_scheduling(self, schedulers: Sequence[Scheduler], *, unfilled: bool) -> None:
        """Takes the counters of schedulers and their prefix caches; unfilled: also the gauge that costs O(rows)."""
        preemptions = swaps = queried = hit = host_hit = evictions = host_bytes = host_used = 0
        ratio = 0.0
        for scheduler in schedulers:  # one loop: every step pays for it
            index = scheduler.pages.index
            preemptions += scheduler.preemptions
            swaps += scheduler.swaps
            queried += index.queried
            hit += index.hit
            host_hit += index.host_hit
            for pool in index.pools:
                evictions += pool.evictions
            ratio = max(ratio, scheduler.estimate.ratio)
            if index.host is not None:
                host_bytes += index.host.budget
                host_used += index.host.used
        self.preemptions, self.swaps, self.evictions, self.admission_ratio = preemptions, swaps, evictions, ratio
        self.prefix_queries, self.prefix_hits, self.prefix_host_hits = queried, hit, host_hit
        self.host_kv_bytes, self.host_kv_used = host_bytes, host_used
        if unfilled:
            positions = [count for scheduler in schedulers for count in scheduler.unfilled()]
            filled = zip(positions, itertools.cycle(self.page_bytes), strict=False)  # workers hold the same model
            self.kv_unfilled = sum(count * size for count, size in filled) // schedulers[0].pages.page_size

    def count_stall(self, cause: Cause) -> None:
        if cause == "preemption":
            self.stalls_preemption += 1
        elif cause == "prefill":
            self.stalls_prefill += 1
        else:
            self.stalls_other += 1

    @property
    def pages_held(self) -> int:
        """Pages of requests and pins."""
        return self.pages_total - self.pages_free

    @property
    def hit_rate(self) -> float | None:
        """Share of the tokens looked up that the prefix cache had; None when none were."""
        return self.prefix_hits / self.prefix_queries if self.prefix_queries else None

    @property
    def stalls(self) -> int:
        """Of all causes."""
        return self.stalls_preemption + self.stalls_prefill + self.stalls_other

    def memory(self) -> dict[str, int]:
        """Bytes by class, which do not overlap; an array counts once, however many devices hold copies of it.

        weights; kv_held: pages of requests and pins, positions that hold a token; kv_fragmentation: the other
        positions of these pages; kv_cached: pages of the prefix cache alone; kv_free; kv_null: the null pages; state:
        of the rows; workspace: temporaries of the largest program, allocated while it runs; host_kv: pages in host
        memory, and host_kv_free: room for more there.
        """
        free = sum((group.free - group.cached) * group.size for group in self.page_groups)
        cached = sum(group.cached * group.size for group in self.page_groups)
        held = sum((group.total - group.free) * group.size for group in self.page_groups)
        unfilled = min(self.kv_unfilled, held)
        return {
            "weights": self.weight_bytes, "kv_held": held - unfilled, "kv_fragmentation": unfilled, "kv_cached": cached,
            "kv_free": free, "kv_null": sum(group.size for group in self.page_groups), "state": self.state_bytes,
            "workspace": self.workspace_bytes, "host_kv": self.host_kv_used,
            "host_kv_free": self.host_kv_bytes - self.host_kv_used}

    def snapshot(self) -> "Metrics":
        """A copy that no longer changes."""
        return dataclasses.replace(self)

    def since(self, before: "Metrics") -> "Metrics":
        """Counters minus those of an earlier snapshot; gauges, peaks and sizes as they are now."""
        kept = {"requests_waiting", "requests_running", "admission_ratio", "pages_total", "pages_free", "pages_cached",
                "pages_peak", "page_groups", "kv_unfilled", "weight_bytes", "kv_bytes", "state_bytes",
                "workspace_bytes", "page_bytes", "host_kv_bytes", "host_kv_used", "load_bytes", "load_seconds",
                "warmup_compilations", "warmup_seconds"}
        return dataclasses.replace(self, **{
            f.name: getattr(self, f.name) - getattr(before, f.name)
            for f in dataclasses.fields(self) if f.name not in kept})
