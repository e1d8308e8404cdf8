"""EngineConfig: how a model is run. Every field can be set from YAML and from `--set field=value`."""

import dataclasses
import difflib
from pathlib import Path
from typing import Literal

from jinfer.config.layout import DisaggregationConfig, LayoutConfig
from jinfer.errors import ConfigError

DType = Literal["auto", "float32", "bfloat16"]
POLICIES = ("fcfs", "priority", "deadline", "longest-prefix", "static")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Attributes:
      dtype: of weights and activations; auto is bfloat16 on TPU and GPU, float32 on CPU.
      kv_dtype: of the KV pages; auto follows dtype, but is bfloat16 for an int8 model.
      quantization: int8 stores weights as int8 with one scale per output channel and multiplies by int8
        activations scaled per token (W8A8); None keeps dtype.
      max_rows: B, requests decoded together.
      max_context: longest sequence, prompt and output; None takes the model's.
      page_size: S, token positions in a KV page.
      kv_pages: pages in the pool, the null page included; None sizes it from memory. Where layers differ in what they
        see, pages of the largest page group: a window gets as many, but no more than it can use.
      kv_memory_gb: memory for the KV pool in GiB; None takes what is left (accelerators: of
        memory_utilization) or what max_rows full contexts need, whichever is smaller.
      memory_utilization: share of device memory jinfer may use.
      prefill_tokens: most prompt tokens computed in one step (the chunk budget).
      decode_steps: tokens generated in one dispatch; more is less host work but coarser streaming.
      decode_rows: most rows decoded in a step; None is max_rows.
      step_tokens: most tokens of a step, prefill and decode together, more than decode_rows take; None is no limit.
      itl_target: seconds a step may take while rows decode; prefill chunks shrink to keep it. None is no limit.
      policy: in which order requests are served: fcfs, priority, deadline, longest-prefix, static, or the
        `package.module:name` of a Policy of your own.
      ageing: seconds of waiting that outweigh one class of priority.
      admission: `optimistic` reserves KV for the output lengths seen so far, `reserving` for the declared ones.
      max_preemptions: how often a request may lose its pages; after that it is admitted with all it can need.
      max_waiting: requests that may wait; more are refused. None is no limit.
      prefix_cache: keep the pages of ended requests for others that begin alike.
      host_kv_gb: host memory in GiB for pages that the pool has no room for; 0 is no host tier.
      max_logprobs: most alternatives a request may ask for.
      max_stop_ids: most end and stop token ids a request may have.
      max_logit_bias: most biased tokens a request may have.
      warmup: compile every program before the first request.
      forbid_compilation: after warm-up a compilation raises instead of counting.
      compilation_cache: directory of the persistent compilation cache; None is
        `<user cache>/jinfer/xla`; the empty string switches it off.
      layout: mesh and sharding rules.
      disaggregation: separate device groups for prefill and decode, in place of `layout`; None is one group for both.
    """

    dtype: DType = "auto"
    kv_dtype: DType = "auto"
    quantization: Literal["int8"] | None = None
    max_rows: int = 64
    max_context: int | None = None
    page_size: int = 64
    kv_pages: int | None = None
    kv_memory_gb: float | None = None
    memory_utilization: float = 0.9
    prefill_tokens: int = 512
    decode_steps: int = 1
    decode_rows: int | None = None
    step_tokens: int | None = None
    itl_target: float | None = None
    policy: str = "priority"
    ageing: float = 60.0
    admission: Literal["optimistic", "reserving"] = "optimistic"
    max_preemptions: int = 3
    max_waiting: int | None = None
    prefix_cache: bool = True
    host_kv_gb: float = 0.0
    max_logprobs: int = 20
    max_stop_ids: int = 16
    max_logit_bias: int = 304
    warmup: bool = True
    forbid_compilation: bool = False
    compilation_cache: str | Path | None = None
    layout: LayoutConfig = dataclasses.field(default_factory=LayoutConfig)
    disaggregation: DisaggregationConfig | None = None

    def __post_init__(self) -> None:
        for name in ("max_rows", "page_size", "prefill_tokens", "decode_steps", "max_stop_ids"):
            _positive(name, getattr(self, name))
        for name in ("max_context", "kv_pages", "decode_rows", "step_tokens", "max_waiting"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        if self.kv_pages == 1:
            raise ConfigError("kv_pages: 1 is the null page alone; give at least 2")
        for name in ("max_logprobs", "max_logit_bias", "max_preemptions"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigError(f"{name}: must be an integer of at least 0, got {value!r}")
        for name in ("dtype", "kv_dtype"):
            if getattr(self, name) not in ("auto", "float32", "bfloat16"):
                raise ConfigError(f"{name}: must be auto, float32 or bfloat16, got {getattr(self, name)!r}")
        if self.quantization not in (None, "int8"):
            raise ConfigError(f"quantization: must be int8 or null, got {self.quantization!r}")
        if not 0.0 < self.memory_utilization <= 1.0:
            raise ConfigError(f"memory_utilization: must be in (0, 1], got {self.memory_utilization!r}")
        if self.kv_memory_gb is not None and not 0.0 < self.kv_memory_gb < float("inf"):
            raise ConfigError(f"kv_memory_gb: must be positive, got {self.kv_memory_gb!r}")
        if self.policy not in POLICIES and not _is_path(self.policy):
            close = difflib.get_close_matches(str(self.policy), POLICIES, n=1)
            raise ConfigError(f"policy: must be {', '.join(POLICIES)} or package.module:name, got {self.policy!r}"
                              + (f"; did you mean {close[0]}?" if close else ""))
        if self.decode_rows is not None and self.decode_rows > self.max_rows:
            raise ConfigError(f"decode_rows: {self.decode_rows} is more than max_rows {self.max_rows}")
        tokens = (self.decode_rows or self.max_rows) * self.decode_steps
        if self.step_tokens is not None and self.step_tokens <= tokens:
            raise ConfigError(f"step_tokens: {self.step_tokens} leaves nothing for prompts beside rows that decode "
                              f"{tokens} tokens a step; give more, or set decode_rows")
        for name in ("prefix_cache", "warmup", "forbid_compilation"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}: must be true or false, got {getattr(self, name)!r}")
        if self.admission not in ("optimistic", "reserving"):
            raise ConfigError(f"admission: must be optimistic or reserving, got {self.admission!r}")
        if self.itl_target is not None and not 0.0 < self.itl_target < float("inf"):
            raise ConfigError(f"itl_target: must be a positive number of seconds, got {self.itl_target!r}")
        if not 0.0 < self.ageing < float("inf"):
            raise ConfigError(f"ageing: must be a positive number of seconds, got {self.ageing!r}")
        if not 0.0 <= self.host_kv_gb < float("inf"):
            raise ConfigError(f"host_kv_gb: must be 0 or more, got {self.host_kv_gb!r}")
        if self.decode_steps > self.page_size:
            raise ConfigError(f"decode_steps: {self.decode_steps} is more than page_size {self.page_size}; "
                              "a row takes at most one new page a dispatch")
        if self.disaggregation is not None and self.layout != LayoutConfig():
            raise ConfigError("layout: with disaggregation the meshes are disaggregation.prefill and .decode; "
                              "leave layout out")


def _is_path(policy: object) -> bool:
    """Looks like package.module:name."""
    module, separator, name = str(policy).partition(":")
    return bool(separator) and name.isidentifier() and all(part.isidentifier() for part in module.split("."))


def _positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name}: must be a positive integer, got {value!r}")
