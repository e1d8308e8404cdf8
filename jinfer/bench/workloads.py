"""The offline workloads W1 to W4: fixed random prompts, so that every engine can be given the same."""

import dataclasses

import numpy as np

from jinfer.config import SamplingParams


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """Attributes:
      prompts: token ids. outputs: tokens to generate for each; end tokens are ignored.
    """

    name: str
    title: str
    prompts: list[list[int]]
    outputs: list[int]

    def params(self) -> list[SamplingParams]:
        """Greedy, exactly the asked number of tokens."""
        return [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in self.outputs]


def build(vocab: int, seed: int = 0) -> list[Workload]:
    """All four; ids are drawn from the vocabulary above its first 1000 (special) tokens."""
    rng = np.random.default_rng(seed)

    def tokens(count: int) -> list[int]:
        return rng.integers(min(1000, vocab // 2), vocab, count).tolist()

    def lengths(mean: float, most: int, count: int) -> list[int]:
        sigma = 0.6
        draws = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
        return np.clip(np.rint(draws), 1, most).astype(int).tolist()

    prompts = [tokens(n) for n in lengths(160, 512, 64)]
    outputs = lengths(100, 256, 64)
    prefix = tokens(256)
    return [
        Workload("W1", "one request, 128 in, 128 out", [tokens(128)], [128]),
        Workload("W2", "64 requests, prompts mean 160, outputs mean 100", prompts, outputs),
        Workload("W3", "one prefill of 1024 tokens", [tokens(1024)], [1]),
        Workload("W4", "W2 behind a shared prefix of 256 tokens", [prefix + p for p in prompts], outputs),
    ]
