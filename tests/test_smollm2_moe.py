"""Experts with real weights (scripts/make_smollm2_moe.py), end to end: greedy ids against transformers'."""

import hashlib
import importlib.util

import pytest

from jinfer import LLM, SamplingParams
from tests.engines import golden

pytestmark = [pytest.mark.slow, pytest.mark.download]
GOLDEN = golden("smollm2_moe_greedy")
SURE = 0.01  # below this gap between the two best logits the order of additions may decide


@pytest.fixture(scope="module")
def folder(pytestconfig, tmp_path_factory):
    path = pytestconfig.rootpath / "scripts" / "make_smollm2_moe.py"
    spec = importlib.util.spec_from_file_location("make_smollm2_moe", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    folder = tmp_path_factory.mktemp("moe")
    script.make(folder)
    yield folder
    (folder / "model.safetensors").unlink()  # 750 MB


def test_greedy_ids(folder, pytestconfig):
    stored = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert stored == GOLDEN["about"]["sha256"], "these are not the weights the golden ids were made with"
    config = {"dtype": "float32", "max_rows": 4, "kv_pages": 65, "prefill_tokens": 64, "warmup": False,
              "compilation_cache": pytestconfig.rootpath / ".cache" / "xla"}
    with LLM(folder, **config) as llm:
        cases = list(GOLDEN["cases"].values())
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        outputs = llm.generate([case["prompt_ids"] for case in cases], params)
        for output, case in zip(outputs, cases, strict=True):
            sure = next((i for i, gap in enumerate(case["gaps"]) if gap < SURE), len(case["gaps"]))
            assert sure > 12
            assert output.completions[0].token_ids[:sure] == case["greedy_ids"][:sure]
            assert llm.tokenizer.encode(case["prompt"], add_special=False) == case["prompt_ids"]
        answer = llm.chat([{"role": "user", "content": "What is the capital of France?"}],
                          SamplingParams(temperature=0, max_tokens=16))
        assert answer.text == "The capital of France is Paris."
