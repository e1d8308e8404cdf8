"""Public bug reports replayed on a model whose every output is known (cases C01, C03, C05 to C07, C09 to C11, C14).

The request files are written for HTTP; here each step goes through the engine, and its stream is compared with its
plain result by `drain`.
"""

import json
from typing import Any

import numpy as np
import pytest

from jinfer.config import SamplingParams
from jinfer.engine.outputs import RequestOutput
from jinfer.errors import CapacityError, RequestError
from tests.engines import DATA, drain, golden, one, run

NAMES = {"include_stop_str_in_output": "include_stop"}
OWN = {"model", "prompt", "messages", "echo"}


def _steps() -> list[Any]:
    cases = [json.loads(p.read_text()) for p in sorted((DATA / "requests").glob("*.json"))]
    return [pytest.param(step, id=f"{case['case']} {step['name']}") for case in cases for step in case["steps"]]


@pytest.fixture(scope="module")
def engine(engines):
    return engines.get("table_open")


def _params(body: dict[str, Any], **extra: Any) -> SamplingParams:
    values = {NAMES.get(k, k): v for k, v in body.items() if k not in OWN} | extra
    if body.get("echo"):
        values["prompt_logprobs"] = values["logprobs"]
    return SamplingParams.from_dict(values)


def _submit(engine, body: dict[str, Any], **extra: Any) -> str:
    if "messages" in body:
        text = engine.tokenizer.chat.render(body["messages"], add_generation_prompt=True)
        return engine.submit(text, _params(body, **extra), add_special=False)
    return engine.submit(body["prompt"], _params(body, **extra))


def _many(engine, body: dict[str, Any], seeds: list[int | None]) -> list[RequestOutput]:
    ids = [_submit(engine, body, seed=seed) for seed in seeds]
    outputs, _ = drain(engine)
    return [outputs[i] for i in ids]


@pytest.mark.parametrize("step", _steps())
def test_step(engine, step):
    body, expect = step["body"], step["expect"]
    if expect.get("error_body"):
        with pytest.raises(RequestError):
            _submit(engine, body)
        assert one(engine, [256, 32], temperature=0, max_tokens=1).finished
        return
    if "support" in expect:
        seen = {o.text for o in _many(engine, body, list(range(expect["repeat"])))}
        probabilities = {"a": 0.5, "b": 0.3, "c": 0.15, "d": 0.05}
        assert seen <= set(expect["support"])
        assert {t for t in expect["support"] if probabilities[t] > 0.1} <= seen
        return
    if "vary_field" in expect:
        texts = [o.text for o in _many(engine, body, expect["vary_field"][1])]
        assert len(set(texts)) >= expect["min_distinct"]
        return
    if "distinct_across_repeats" in expect:
        count = expect["distinct_across_repeats"]
        assert len({o.text for o in _many(engine, body, [None] * count)}) == count
        return
    output = _many(engine, body, [body.get("seed")])[0]
    texts = [c.text for c in output.completions]
    _check(expect, output, texts)
    for again in _many(engine, body, [body.get("seed")] * expect.get("same_across_repeats", 1)):
        assert [c.text for c in again.completions] == texts or (body.get("temperature") != 0 and body.get("seed") is None)


def _check(expect: dict[str, Any], output: RequestOutput, texts: list[str]) -> None:
    completion_tokens = sum(len(c.token_ids) for c in output.completions)
    for key, value in expect.items():
        match key:
            case "text":
                assert set(texts) == {value}
            case "text_in" | "text_in_if_200":
                assert texts[0] in value
            case "finish_reason":
                assert {c.finish_reason for c in output.completions} == {value}
            case "no_fffd":
                assert "\ufffd" not in texts[0]
            case "no_leak" | "not_contains":
                assert all(value not in t for t in texts)
            case "n":
                assert len(texts) == value
            case "indices":
                assert [c.index for c in output.completions] == value
            case "distinct_choices":
                assert len(set(texts)) == value
            case "prompt_tokens":
                assert len(output.prompt_token_ids) == value
            case "prompt_tokens_in":
                assert len(output.prompt_token_ids) in value
            case "completion_tokens":
                assert completion_tokens == value
            case "completion_tokens_in":
                assert completion_tokens in value
            case "echo_logprobs":
                got = [e.logprob for e in output.prompt_logprobs]
                assert got[0] is None
                np.testing.assert_allclose(got[1:], value["token_logprobs"][1:], atol=0.02)
            case "gen_logprobs":
                top = dict(output.completions[0].logprobs[0].top)
                for letter, want in value[0].items():
                    assert abs(top[ord(letter)] - want) < 0.005
            case "has_token_logprobs":
                assert all(e.logprob is not None for e in output.completions[0].logprobs)
            case "json_strict":
                json.dumps([e.logprob for e in output.completions[0].logprobs], allow_nan=False)
            case "status" | "status_in" | "same_across_repeats" | "note" | "atol":
                pass
            case _:
                raise AssertionError(f"no check for {key}")


def test_chat_prompt_ids_are_exact(engine):
    chat = golden("table_open_expected")["chat"]
    text = engine.tokenizer.chat.render(chat["messages"], add_generation_prompt=True)
    assert engine.tokenizer.encode(text, add_special=False) == chat["right_ids"]


def test_a_seeded_request_is_the_same_at_every_place_in_a_batch(engine):
    """Case C10."""
    seeded = SamplingParams(temperature=1.0, seed=42, max_tokens=24)
    alone = run(engine, ["R"], seeded)[0].text
    for place in range(0, 16, 5):
        noise = [SamplingParams(temperature=0.7, top_k=5, max_tokens=20, presence_penalty=0.3, n=1 + i % 2) for i in range(15)]
        params = [*noise[:place], seeded, *noise[place:]]
        assert run(engine, ["R"] * 16, params)[place].text == alone


def test_penalties_survive_preemption(engines):
    """The counts of prompt and output are rebuilt on the device when a request resumes (cases C09, C18)."""
    roomy, tight = engines.get("table_open"), engines.get("table_open", kv_pages=33)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, frequency_penalty=0.5, repetition_penalty=1.1,
                            logit_bias={ord("z"): 1.5})
    prompts = ["pppP" + "x" * (3 * i) for i in range(8)]
    before = tight.metrics.preemptions
    want = [o.completions[0].token_ids for o in run(roomy, prompts, params)]
    assert [o.completions[0].token_ids for o in run(tight, prompts, params)] == want
    assert tight.metrics.preemptions > before
    assert len({tuple(ids) for ids in want}) > 1 or len(set(want[0])) > 3


@pytest.mark.parametrize(("prompt", "max_tokens", "text", "reason"), [
    ([76], None, "yz", "stop"),
    ([256] + [114] * 254, 16, "r", "length"),  # context - 1: one token
    ([256] + [114] * 253, 16, "rr", "length"),
    ([256] + [114] * 240, 200, "r" * 15, "length"),  # prompt + max_tokens over the context: ends when full
    ("L", 10**9, "yz", "stop"),
    ("", 2, None, None),  # the tokenizer adds BOS
    ([256] + [114] * 255, 0, "", "length"),  # exactly full: only to be scored
])
def test_lengths(engine, prompt, max_tokens, text, reason):
    """Case C14 on a context of 256."""
    output = one(engine, prompt, temperature=0, max_tokens=max_tokens)
    assert output.finished
    assert reason is None or output.completions[0].finish_reason == reason
    assert text is None or output.text == text


@pytest.mark.parametrize(("prompt", "params", "error", "field", "message"), [
    ([], {}, RequestError, "prompt", "is empty"),
    ([256] + [114] * 256, {}, CapacityError, "prompt", "257 tokens are more than the context of 256"),
    ([256] + [114] * 255, {}, CapacityError, "prompt", "leave no room to generate"),
    ("r" * 5000, {}, CapacityError, "prompt", "5001 tokens"),
    ([275], {}, RequestError, "prompt", "275 is outside the vocabulary of 275"),
    ([-1], {}, RequestError, "prompt", "-1 is outside"),
    ([True], {}, RequestError, "prompt", "must be integers"),
    ([1.5], {}, RequestError, "prompt", "must be integers"),
    (17, {}, RequestError, "prompt", "must be text or a list"),
    ("L", {"logit_bias": {275: 1.0}}, RequestError, "logit_bias", "outside the vocabulary"),
    ("L", {"stop_token_ids": [300]}, RequestError, "stop_token_ids", "outside the vocabulary"),
    ("L", {"stop_token_ids": list(range(20))}, RequestError, "stop_token_ids", "max_stop_ids 16"),
    ("L", {"logprobs": 21}, RequestError, "logprobs", "21 is more than the engine's max_logprobs 20"),
    ("L", {"prompt_logprobs": 99}, RequestError, "prompt_logprobs", "max_logprobs"),
])
def test_refused_requests_disturb_nobody(engine, prompt, params, error, field, message):
    other = engine.submit("T", SamplingParams(temperature=0))
    with pytest.raises(error, match=message) as caught:
        engine.submit(prompt, SamplingParams(**params))
    assert caught.value.field == field
    outputs, _ = drain(engine)
    assert outputs[other].text == "HIJK"


@pytest.mark.parametrize(("values", "field"), [
    ({"temperature": float("nan")}, "temperature"), ({"temperature": -0.1}, "temperature"), ({"temperature": "1"}, "temperature"),
    ({"top_p": 1.5}, "top_p"), ({"top_p": float("nan")}, "top_p"), ({"min_p": -1}, "min_p"), ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"), ({"n": 0}, "n"), ({"n": 10**6}, "n"), ({"max_tokens": -1}, "max_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"), ({"stop": [""]}, "stop"), ({"stop": 5}, "stop"),
    ({"repetition_penalty": 0}, "repetition_penalty"), ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": float("inf")}, "frequency_penalty"), ({"logit_bias": {"AI": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"), ({"logit_bias": {1: float("nan")}}, "logit_bias"), ({"seed": 1.5}, "seed"),
    ({"temperature": 10**400}, "temperature"), ({"top_p": -(10**400)}, "top_p"), ({"logit_bias": {1: 10**400}}, "logit_bias"),
    ({"logit_bias": {1.5: 1}}, "logit_bias"), ({"logit_bias": {float("inf"): 1}}, "logit_bias"),
    ({"seed": 2**64}, "seed"), ({"logprobs": -1}, "logprobs"), ({"ignore_eos": 1}, "ignore_eos"), ({"best_of": 2}, "best_of"),
])
def test_bad_sampling_values_name_the_field(values, field):
    with pytest.raises(RequestError) as caught:
        SamplingParams.from_dict(values)
    assert caught.value.field == field
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("other", ["zx", "yzx", "Q"])
def test_a_named_stop_that_is_kept_stands_behind_text_held_back(engine, other):
    """The text `other` could begin is undecided until the end token arrives."""
    output = one(engine, "L", temperature=0, stop=("</s>", other), include_stop=True)
    assert output.text == "yz</s>"
    assert output.completions[0].stop_reason == "</s>"


def test_null_means_default():
    assert SamplingParams.from_dict({"temperature": None, "stop": None, "seed": None}) == SamplingParams()
