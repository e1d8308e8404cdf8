"""Makes tests/data/golden/smollm2_moe_greedy.json: what transformers answers on the experts made out of SmolLM2.

Run by hand, in the environment of make_goldens.py, on the folder that make_smollm2_moe.py makes:

    /tmp/golden/bin/python scripts/make_goldens_moe.py FOLDER tests/data/golden/smollm2_moe_greedy.json
"""

import argparse
import hashlib
import json
from pathlib import Path

import torch
import transformers
from make_goldens import greedy

NEW_TOKENS = 24
SMOLLM2 = Path(__file__).parents[1] / "tests/data/golden/smollm2_greedy.json"
NAMES = ("france", "story-opening", "chat-france", "one-token")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.folder, dtype=torch.float32, attn_implementation="eager").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.folder)
    prompts = json.loads(SMOLLM2.read_text())["cases"]
    cases = {}
    for name in NAMES:
        ids = prompts[name]["prompt_ids"]
        case = {"prompt": prompts[name]["prompt"], "prompt_ids": ids, **greedy(model, ids, NEW_TOKENS)}
        case["text"] = tokenizer.decode(case["greedy_ids"])
        cases[name] = case
        print(f"{name}: smallest gap {min(case['gaps'])}: {case['text'][:70]!r}", flush=True)
    weights = hashlib.sha256((args.folder / "model.safetensors").read_bytes()).hexdigest()
    about = {"model": "scripts/make_smollm2_moe.py", "sha256": weights, "torch": torch.__version__,
             "transformers": transformers.__version__, "dtype": "float32"}
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(case)}" for name, case in cases.items())
    args.output.write_text(f'{{"about": {json.dumps(about)},\n"cases": {{\n{lines}\n}}}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
