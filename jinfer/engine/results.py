"""StepResults: what a collected step brought, request by request."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from jinfer.engine.outputs import TokenLogprob
from jinfer.engine.runner import Sampled
from jinfer.scheduler import Chunk, Request, StepPlan

# A request and its tokens, in order; log-probabilities, one each if it asked for them; its logits were numbers. A bare
# tuple, for there is one for each row of every step.
RequestTokens = tuple[Request, list[int], list[TokenLogprob], bool]


@dataclasses.dataclass(frozen=True, slots=True)
class StepResults:
    """A plan and what its calls gave, on the host; requests that ended meanwhile are the caller's to skip.

    Attributes:
      prefill: one row a chunk, [Q]. scores: of prompt tokens, [T, 1 + 2C] int32, see programs.pack_logprobs.
      decode: one column a row of the plan, [n, R].
    """

    plan: StepPlan
    prefill: Sampled | None
    scores: np.ndarray | None
    decode: Sampled | None

    def scored(self) -> Iterator[tuple[Chunk, np.ndarray]]:
        """Chunks whose requests asked for prompt logprobs, and their rows of `scores`."""
        begin = 0
        for chunk in self.plan.chunks:
            if self.scores is not None and chunk.request.scores_prompt:
                yield chunk, self.scores[begin : begin + chunk.length]
            begin += chunk.length

    def sampled(self) -> Iterator[RequestTokens]:
        """What was sampled: of chunks that end known tokens, then of decode rows; rows that had ended have none."""
        if self.prefill is not None:
            for i, chunk in enumerate(self.plan.chunks):
                if chunk.samples:
                    tokens = [int(self.prefill.tokens[i])]
                    logprobs = _logprobs(chunk.request, tokens, self.prefill, (slice(i, i + 1),))
                    yield chunk.request, tokens, logprobs, bool(self.prefill.finite[i])
        if self.decode is not None:
            # One conversion for all rows: indexing arrays row by row costs more than the rest of this loop.
            columns = self.decode.tokens.T.tolist()
            broken = None if self.decode.finite.all() else self.decode.finite.T
            for i, row in enumerate(self.plan.rows):
                tokens = columns[i]
                if tokens[-1] < 0:  # none: the row had ended
                    tokens = [token for token in tokens if token >= 0]
                if tokens:
                    request, finite = row.request, broken is None or bool(broken[i].all())
                    asked = request.params.logprobs is not None
                    logprobs = _logprobs(request, tokens, self.decode, (slice(None), i)) if asked else []
                    yield request, tokens, logprobs, finite


def _logprobs(request: Request, tokens: list[int], sampled: Sampled, at: tuple) -> list[TokenLogprob]:
    count = request.params.logprobs
    if count is None:
        return []
    values, ids, tops = sampled.logprob[at], sampled.top_ids[at][:, :count], sampled.top_logprobs[at][:, :count]
    return [TokenLogprob(token, float(values[i]), tuple(zip(ids[i].tolist(), tops[i].tolist(), strict=True)))
            for i, token in enumerate(tokens)]


def score_prompt(entries: list[TokenLogprob], request: Request, start: int, scores: np.ndarray) -> bool:
    """Puts logprobs of a chunk from `start` into the entries of a prompt: row t is about the token after it.

    Recomputation repeats them. Returns False if one is no number.
    """
    most = (scores.shape[1] - 1) // 2
    asked = request.params.prompt_logprobs or 0
    values, tops = scores[:, 0].view(np.float32), scores[:, 1 + most :].view(np.float32)
    count = max(0, min(len(scores), len(request.prompt) - start - 1))
    for t in range(count):
        pairs = zip(scores[t, 1 : 1 + asked].tolist(), tops[t, :asked].tolist(), strict=True)
        entries[start + t + 1] = TokenLogprob(request.prompt[start + t + 1], float(values[t]), tuple(pairs))
    return not np.isnan(values[:count]).any()
