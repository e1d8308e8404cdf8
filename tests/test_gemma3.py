"""Gemma 3 270M out of its GGUF file, end to end: greedy ids against transformers' (scripts/make_goldens_gemma3.py)."""

import pytest

from jinfer import LLM, SamplingParams
from tests.engines import golden

pytestmark = [pytest.mark.slow, pytest.mark.download]
CASES = golden("gemma3_270m_greedy")["cases"]
SURE = 0.01  # below this gap between the two best logits the order of additions may decide


@pytest.fixture(scope="module")
def llm(pytestconfig):
    config = {"dtype": "float32", "max_rows": 8, "kv_pages": 129, "prefill_tokens": 256, "warmup": False,
              "compilation_cache": pytestconfig.rootpath / ".cache" / "xla"}
    with LLM("gemma3-270m", **config) as llm:
        yield llm


def test_tokenizer(llm):
    for case in CASES.values():
        assert llm.tokenizer.encode(case["prompt"]) == case["prompt_ids"]
        assert llm.tokenizer.decode(case["greedy_ids"], skip_special=False) == case["text"]


def test_greedy_ids(llm):
    """One batch: short prompts, and one longer than the window of the local layers."""
    assert len(CASES["beyond-the-window"]["prompt_ids"]) > 512
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=10)
    outputs = llm.generate([case["prompt_ids"] for case in CASES.values()], params)
    for output, (name, case) in zip(outputs, CASES.items(), strict=True):
        assert min(case["gaps"]) > SURE
        assert output.completions[0].token_ids == case["greedy_ids"], name
        top = {entry[0]: entry[1] for entry in output.completions[0].logprobs[0].top}
        offset = max(top.values()) - case["last_top10"][0][1]  # golden values are logits
        for token, logit in case["last_top10"][:5]:
            assert top[token] == pytest.approx(logit + offset, abs=2e-3), name
