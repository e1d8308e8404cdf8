"""The embedded model end to end: greedy ids against transformers' (scripts/make_goldens.py)."""

import pytest

from jinfer import LLM, SamplingParams
from tests.engines import golden

pytestmark = [pytest.mark.slow, pytest.mark.download]
CASES = golden("smollm2_greedy")["cases"]
SURE = 0.01  # below this gap between the two best logits the order of additions may decide


@pytest.fixture(scope="module")
def llm(pytestconfig):
    config = {"dtype": "float32", "max_rows": 16, "kv_pages": 513, "prefill_tokens": 256, "warmup": False,
              "compilation_cache": pytestconfig.rootpath / ".cache" / "xla"}
    with LLM("smollm2-135m", **config) as llm:
        yield llm


def agrees(output, case):
    """Compares up to the first position where the golden model itself was nearly undecided."""
    sure = next((i for i, gap in enumerate(case["gaps"]) if gap < SURE), len(case["gaps"]))
    assert sure > 4
    return output.completions[0].token_ids[:sure] == case["greedy_ids"][:sure]


def test_tokenizer(llm):
    for case in CASES.values():
        assert llm.tokenizer.encode(case["prompt"], add_special=False) == case["prompt_ids"]


def test_chat_template(llm):
    for case in CASES.values():
        if "messages" in case:
            assert llm.tokenizer.chat.render(case["messages"], add_generation_prompt=True) == case["prompt"]


@pytest.mark.parametrize("name", CASES)
def test_alone(llm, name):
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, logprobs=10)
    output = llm.generate(CASES[name]["prompt_ids"], params)
    assert agrees(output, CASES[name])
    top = output.completions[0].logprobs[0].top
    right = CASES[name]["last_top10"]
    offset = right[0][1] - top[0][1]  # golden values are logits, these are log-probabilities
    for (token, logprob), (right_token, logit) in zip(top, right, strict=True):
        assert logprob + offset == pytest.approx(logit, abs=2e-3)
        assert token == right_token or any(abs(logit - other) < 2e-3 for t, other in right if t == token)


def test_as_a_batch(llm):
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    outputs = llm.generate([case["prompt_ids"] for case in CASES.values()] * 2, params)  # more than the rows
    for output, case in zip(outputs, list(CASES.values()) * 2, strict=True):
        assert agrees(output, case)


def test_known_answers(llm):
    greedy = SamplingParams(temperature=0, max_tokens=20)
    answer = llm.chat([{"role": "user", "content": "What is the capital of France?"}], greedy)
    assert (answer.text, answer.completions[0].finish_reason) == ("The capital of France is Paris.", "stop")
    text = llm.generate("The capital of France is", greedy).text
    assert text.startswith(" Paris.\n\nThe answer is: 2018-01-22")


def test_perplexity_of_a_sentence(llm):
    """Natural text scores far better than the same words in reverse."""
    text = "The capital of France is Paris, and the capital of Italy is Rome."
    plain, turned = (
        sum(entry.logprob for entry in output.prompt_logprobs[1:]) / (len(output.prompt_logprobs) - 1)
        for output in llm.score([text, " ".join(reversed(text.split()))]))
    assert plain > turned + 1.0
