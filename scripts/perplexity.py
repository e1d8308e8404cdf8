#!/usr/bin/env python
"""Perplexity of a text under a configuration: windows scored one by one, positions 1.. of each.

    .venv/bin/python scripts/perplexity.py TEXT.txt --set quantization=int8
    .venv/bin/python scripts/perplexity.py TEXT.txt --model gemma3-270m --set dtype=float32

If the tokenizer puts a beginning-of-sequence token first, one stands before each window, all of which is scored then.
"""

import argparse
import math
from pathlib import Path

from jinfer import LLM, EngineConfig
from jinfer.config.loading import load_config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--window", type=int, default=512, help="tokens a window")
    parser.add_argument("--windows", type=int, default=2, help="how many, from the start of the text")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any field of EngineConfig")
    options = parser.parse_args()
    config = load_config(EngineConfig, None, ["warmup=false", "max_rows=4", *options.set])
    with LLM(options.model, config) as llm:
        assert llm.tokenizer is not None
        ids = llm.tokenizer.encode(options.text.read_text(), add_special=False)
        first = list(llm.tokenizer.prefix)
        parts = [[*first, *ids[i * options.window : (i + 1) * options.window]] for i in range(options.windows)]
        entries = [e for output in llm.score(parts) for e in (output.prompt_logprobs or [])[1:]]
        nll = -sum(e.logprob for e in entries if e.logprob is not None) / len(entries)
        print(f"{options.text.name}: nll {nll:.5f}, perplexity {math.exp(nll):.2f} over {len(entries)} tokens")


if __name__ == "__main__":
    main()
