"""From a prompt and SamplingParams to scheduler requests: everything that can be refused is refused here."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jinfer.config import EngineConfig, ModelConfig, SamplingParams, ServiceParams
from jinfer.errors import CapacityError, RequestError
from jinfer.models.rope import prompt_regime
from jinfer.sampling.seeds import choice_seed
from jinfer.scheduler import Request, position_limit
from jinfer.scheduler.request import DEFAULT_SERVICE
from jinfer.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, slots=True)
class Admission:
    """What requests are checked against.

    Attributes:
      eos_ids: end tokens of checkpoint and tokenizer. max_context: tokens, prompt and output.
    """

    config: EngineConfig
    model: ModelConfig
    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]
    max_context: int

    def tokens(self, prompt: str | Sequence[int], add_special: bool) -> list[int]:
        """Token ids of a prompt. Raises RequestError: no tokenizer, wrong type, empty, an id out of range."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("prompt", "is text, but the model has no tokenizer; give token ids")
            ids = self.tokenizer.encode(prompt, add_special=add_special)
        elif isinstance(prompt, Sequence | np.ndarray):
            ids = [self._token("prompt", token) for token in prompt]
        else:
            raise RequestError("prompt", f"must be text or a list of token ids, got {type(prompt).__name__}")
        if not ids:
            raise RequestError("prompt", "is empty")
        if len(ids) > self.max_context:
            raise CapacityError("prompt", f"{len(ids)} tokens are more than the context of {self.max_context}")
        return ids

    def named_stops(self, params: SamplingParams) -> dict[int, str]:
        """Stop strings that are exactly a special token: its id ends the request, the text never shows it."""
        if self.tokenizer is None:
            return {}
        found = ((self.tokenizer.token_id(text), text) for text in params.stop)
        return {token: text for token, text in found if token is not None and token in self.tokenizer.special_ids}

    def requests(self, request_id: str, prompt: list[int], params: SamplingParams, arrival: float,
                 service: ServiceParams = DEFAULT_SERVICE) -> list[Request]:
        """One request a choice. Raises RequestError naming the parameter."""
        if self.tokenizer is None and params.stop:
            raise RequestError("stop", "needs a tokenizer, the model has none")
        for field, asked in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if asked is not None and asked > self.config.max_logprobs:
                raise RequestError(field, f"{asked} is more than the engine's max_logprobs {self.config.max_logprobs}")
        for token in params.logit_bias:
            self._token("logit_bias", token)
        if len(params.logit_bias) > self.config.max_logit_bias:
            raise RequestError("logit_bias", f"{len(params.logit_bias)} tokens are more than the engine's "
                                             f"max_logit_bias {self.config.max_logit_bias}")
        for token in params.stop_token_ids:
            self._token("stop_token_ids", token)
        stops = dict.fromkeys((() if params.ignore_eos else self.eos_ids) + params.stop_token_ids)
        stops.update(dict.fromkeys(self.named_stops(params)))
        if len(stops) > self.config.max_stop_ids:
            raise RequestError("stop_token_ids", f"{len(stops)} end and stop tokens are more than the engine's "
                                                 f"max_stop_ids {self.config.max_stop_ids}")
        limit = position_limit(len(prompt), params.max_tokens, self.max_context)
        ids, count = tuple(stops), params.n if params.max_tokens != 0 else 1
        most = self.config.max_waiting
        if most is not None and count > most:
            raise RequestError("n", f"{count} choices are more than the queue ever takes (max_waiting {most})")
        if not self.config.prefix_cache:
            service = dataclasses.replace(service, cache=False)
        requests = [
            Request(request_id, index, prompt, params, limit, ids, choice_seed(params.seed, index), arrival, service,
                    prompt_regime(self.model.rope, len(prompt)))
            for index in range(count)]
        if count > 1:
            siblings = list(requests)  # a list of their own: who leaves the scheduler leaves it
            for request in requests:
                request.siblings = siblings
        return requests

    def _token(self, field: str, token: object) -> int:
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            raise RequestError(field, f"token ids must be integers, got {token!r}")
        if not 0 <= token < self.model.vocab_size:
            raise RequestError(field, f"token id {token} is outside the vocabulary of {self.model.vocab_size}")
        return int(token)
