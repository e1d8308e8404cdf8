"""Counters of one engine. Plain numbers, updated by the loop, read by everything that reports."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from jinfer.kv.pool import PagePool


class GroupPages(NamedTuple):
    """Pages of one page group; window: tokens its layers see, None is all. peak: most held at once."""

    window: int | None
    total: int
    free: int
    peak: int


@dataclasses.dataclass(slots=True)
class Metrics:
    """Totals since the engine was built (gauges are marked). Times in seconds, sizes in bytes.

    Attributes:
      requests_waiting, requests_running: gauges. requests_finished, requests_cancelled, requests_failed,
      preemptions: requests.
      prompt_tokens: of accepted requests. prefill_tokens: computed by prefill calls (recomputation included).
      padded_prefill_tokens, padded_decode_rows: bucket padding computed for nothing.
      output_tokens: sampled and kept. steps: turns of the loop with work. prefill_calls, decode_calls.
      prefill_seconds, decode_seconds: device time of the calls, measured where results arrive.
      pages_swapped_out, pages_swapped_in, swap_out_bytes, swap_in_bytes: to the host tier and back, where started;
      swap_seconds: on the link, of those that have ended. move_seconds: calls waited for pages from the host or from
      another engine. forked_pages: copied for another choice of a request.
      host_seconds: CPU time of the loop's thread for planning, packing,
      dispatching and post-processing.
      pages_total, pages_free: gauges. pages_peak: most pages held at once. All are sums over page_groups (gauges),
      which may peak at different times.
      weight_bytes, kv_bytes, state_bytes, workspace_bytes: memory by class (workspace: largest program's temporaries).
      load_bytes: of the checkpoint's tensors as stored, read in load_seconds.
      warmup_compilations: programs compiled or loaded before serving; warmup_seconds; compilations: programs
      compiled after warm-up (0 when all is well).
    """

    requests_waiting: int = 0
    requests_running: int = 0
    requests_finished: int = 0
    requests_cancelled: int = 0
    requests_failed: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    prefill_tokens: int = 0
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
    host_seconds: float = 0.0
    pages_total: int = 0
    pages_free: int = 0
    pages_peak: int = 0
    page_groups: tuple[GroupPages, ...] = ()
    weight_bytes: int = 0
    kv_bytes: int = 0
    state_bytes: int = 0
    workspace_bytes: int = 0
    load_bytes: int = 0
    load_seconds: float = 0.0
    warmup_compilations: int = 0
    warmup_seconds: float = 0.0
    compilations: int = 0

    def count_pages(self, pools: Sequence[PagePool]) -> None:
        """Takes the gauges of pages from the pools of all page groups."""
        self.page_groups = tuple([GroupPages(p.window, p.num_pages - 1, p.available, p.peak) for p in pools])
        _, totals, free, peaks = zip(*self.page_groups, strict=True)
        self.pages_total, self.pages_free, self.pages_peak = sum(totals), sum(free), sum(peaks)

    def snapshot(self) -> "Metrics":
        """A copy that no longer changes."""
        return dataclasses.replace(self)

    def since(self, before: "Metrics") -> "Metrics":
        """Counters minus those of an earlier snapshot; gauges, peaks and sizes as they are now."""
        kept = {"requests_waiting", "requests_running", "pages_total", "pages_free", "pages_peak", "page_groups",
                "weight_bytes", "kv_bytes", "state_bytes", "workspace_bytes", "load_bytes", "load_seconds",
                "warmup_compilations", "warmup_seconds"}
        return dataclasses.replace(self, **{
            f.name: getattr(self, f.name) - getattr(before, f.name)
            for f in dataclasses.fields(self) if f.name not in kept})
