"""Summary: what a job did, by its outputs and the engine's counters; for `jinfer batch` and the demo."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Self

from jinfer.engine.outputs import RequestOutput
from jinfer.observe.metrics import GroupPages, Metrics

if TYPE_CHECKING:
    from rich.table import Table


@dataclasses.dataclass(frozen=True, slots=True)
class Percentiles:
    """50th, 95th and 99th percentile of some latencies, seconds; None when there were none."""

    p50: float | None
    p95: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        ordered = sorted(values)
        return cls(*(percentile(ordered, q) for q in (0.50, 0.95, 0.99)))


def percentile(ordered: Sequence[float], q: float) -> float | None:
    """The q-quantile (0..1) of sorted values, interpolated linearly like numpy.quantile; None of nothing."""
    if not ordered:
        return None
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """One job in numbers.

    Attributes:
      requests: that ran to their end. failed: refused or ended by an error. timed_out: of the requests, ended by their
      timeout. preemptions: times a request lost its pages; swaps: of them, with pages back from the host tier;
      recomputed_tokens, restored_tokens: positions computed again after it, and positions that were not.
      cached_tokens: of the prompts, from the prefix cache; saved_tokens: positions no prefill call computed, those that
      choices of one prompt share included; hit_rate: share of the tokens looked up that the cache had, None when none
      were. evictions: cached pages given to others. stalls: gaps between tokens that were far longer than usual, by
      cause.
      prompt_tokens, output_tokens: of the requests that ran. wall_seconds: of the whole job.
      prefill_rate: prompt tokens computed a second of prefill calls. decode_rate: tokens made by decode calls
      a second of decode calls (the first token of a choice is made by prefill). output_rate: output tokens a
      second of the job. Rates are None when nothing of their kind ran.
      ttft: time to first token, queueing included. itl: between tokens.
      pages_peak, pages_total: of the KV pool, kv_bytes: its size; page_groups: its parts. memory: bytes by class at the
      end (`Metrics.memory`).
      load_bytes, load_seconds: stored weights, and how long it took to place them on the devices.
      warmup_compilations, warmup_seconds: before serving. compilations: after it.
    """

    requests: int
    failed: int
    timed_out: int
    preemptions: int
    swaps: int
    recomputed_tokens: int
    restored_tokens: int
    cached_tokens: int
    saved_tokens: int
    hit_rate: float | None
    evictions: int
    stalls: dict[str, int]
    prompt_tokens: int
    output_tokens: int
    wall_seconds: float
    prefill_rate: float | None
    decode_rate: float | None
    output_rate: float | None
    ttft: Percentiles
    itl: Percentiles
    pages_peak: int
    pages_total: int
    page_groups: tuple[GroupPages, ...]
    kv_bytes: int
    memory: dict[str, int]
    load_bytes: int
    load_seconds: float
    warmup_compilations: int
    warmup_seconds: float
    compilations: int


class Report:
    """Collects outputs as they finish; keeps numbers, not texts, so a long job stays small."""

    def __init__(self) -> None:
        self._requests = self._prompt_tokens = self._output_tokens = self._first_tokens = self._cached_tokens = 0
        self._ttft: list[float] = []
        self._itl: list[float] = []

    def add(self, output: RequestOutput) -> None:
        if output.error is not None:
            return
        self._requests += 1
        self._prompt_tokens += len(output.prompt_token_ids)
        self._cached_tokens += output.cached_tokens
        self._output_tokens += sum(len(choice.token_ids) for choice in output.completions)
        self._first_tokens += sum(bool(choice.token_ids) for choice in output.completions)
        if output.timing.ttft is not None:
            self._ttft.append(output.timing.ttft)
        self._itl.extend(output.timing.itls)

    def summary(self, metrics: Metrics, wall_seconds: float, failed: int = 0) -> Summary:
        """metrics: what the job added, `engine.metrics.since(<snapshot before>)`."""
        # A preempted request samples its next token from the prefill that recomputes it.
        by_decode = self._output_tokens - self._first_tokens - metrics.preemptions
        return Summary(
            requests=self._requests, failed=failed, timed_out=metrics.requests_timed_out,
            preemptions=metrics.preemptions, swaps=metrics.swaps, recomputed_tokens=metrics.recomputed_tokens,
            restored_tokens=metrics.restored_tokens, cached_tokens=self._cached_tokens,
            saved_tokens=metrics.saved_tokens, hit_rate=metrics.hit_rate, evictions=metrics.evictions,
            stalls={"recomputed": metrics.stalls_preemption, "beside a prefill": metrics.stalls_prefill,
                    "other": metrics.stalls_other},
            prompt_tokens=self._prompt_tokens, output_tokens=self._output_tokens, wall_seconds=wall_seconds,
            prefill_rate=_rate(metrics.prefill_tokens, metrics.prefill_seconds),
            decode_rate=_rate(by_decode, metrics.decode_seconds),
            output_rate=_rate(self._output_tokens, wall_seconds),
            ttft=Percentiles.of(self._ttft), itl=Percentiles.of(self._itl),
            pages_peak=metrics.pages_peak, pages_total=metrics.pages_total,
            page_groups=metrics.page_groups, kv_bytes=metrics.kv_bytes, memory=metrics.memory(),
            load_bytes=metrics.load_bytes, load_seconds=metrics.load_seconds,
            warmup_compilations=metrics.warmup_compilations, warmup_seconds=metrics.warmup_seconds,
            compilations=metrics.compilations)


def summary_table(summary: Summary, title: str) -> "Table":
    """The summary as a rich table of two columns."""
    from rich.table import Table
    s = summary
    used = s.pages_peak / s.pages_total if s.pages_total else 0.0
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in (
            ("requests", f"{s.requests:,}" + _listed({"failed": s.failed, "timed out": s.timed_out})),
            ("prompt tokens", f"{s.prompt_tokens:,}"),
            ("output tokens", f"{s.output_tokens:,}"),
            ("wall time", f"{s.wall_seconds:,.1f} s ({_number(s.output_rate)} output tok/s)"),
            ("prefill", f"{_number(s.prefill_rate)} tok/s"),
            ("decode", f"{_number(s.decode_rate)} tok/s"),
            ("TTFT p50 / p95 / p99", _milliseconds(s.ttft)),
            ("ITL p50 / p95 / p99", _milliseconds(s.itl)),
            ("KV pool, peak use", f"{s.pages_peak:,} of {s.pages_total:,} pages "
                                  f"({used:.0%} of {s.kv_bytes / 2**20:,.0f} MiB)"),
            *(_group(group) for group in s.page_groups if len(s.page_groups) > 1),
            ("prefix cache", f"{s.cached_tokens:,} prompt tokens, hit rate {_share(s.hit_rate)}, "
                             f"{s.evictions:,} evictions"),
            ("prefill saved", f"{s.saved_tokens:,} tokens"),
            ("preemptions", f"{s.preemptions:,}" + _listed(
                {"swaps": s.swaps, "tokens recomputed": s.recomputed_tokens, "restored": s.restored_tokens})),
            ("stalls", f"{sum(s.stalls.values()):,}" + _listed(s.stalls)),
            ("memory", f"{sum(s.memory.values()) / 2**20:,.1f} MiB"),
            *((f"  {name.replace('_', ' ')}", f"{size / 2**20:,.1f} MiB") for name, size in s.memory.items() if size),
            ("weights loaded", f"{s.load_bytes / 1e9:,.2f} GB in {s.load_seconds:,.1f} s "
                               f"({_number(_rate(s.load_bytes / 1e9, s.load_seconds))} GB/s)"),
            ("compilations", f"{s.warmup_compilations:,} in warm-up ({s.warmup_seconds:.1f} s), "
                             f"{s.compilations:,} after")):
        table.add_row(name, value)
    return table


def _group(group: GroupPages) -> tuple[str, str]:
    name = "full attention" if group.window is None else f"window of {group.window:,}"
    return f"  {name}", f"{group.peak:,} of {group.total:,} pages"


def _listed(counts: Mapping[str, int]) -> str:
    """` (3 failed, 1 timed out)`, without those that are 0."""
    parts = [f"{count:,} {name}" for name, count in counts.items() if count]
    return f" ({', '.join(parts)})" if parts else ""


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _rate(amount: float, seconds: float) -> float | None:
    return amount / seconds if amount > 0 and seconds > 0.0 else None


def _number(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:,.1f}"


def _milliseconds(values: Percentiles) -> str:
    parts = ["-" if v is None else f"{v * 1e3:,.1f}" for v in (values.p50, values.p95, values.p99)]
    return " / ".join(parts) + " ms"
