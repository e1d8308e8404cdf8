"""How the vocabularies inside GGUF files cut text before merging, by the name in `tokenizer.ggml.pre`.

The patterns are those of the models' own tokenizer.json files; which name stands for which is told by llama.cpp's
converter (convert_hf_to_gguf.py, get_vocab_base_pre) and its llama-vocab.cpp.
"""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is cut before merging.

    Attributes:
      patterns: regular expressions; each splits the pieces of the one before, matches stand alone.
      ignore_merges: a piece that is a token as a whole is taken without merging.
      add_bos: the default when the file does not say.
      nfc: text is put into Unicode normal form C first.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CASELESS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_LINES = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|"
_SLASHES = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"

_LLAMA3 = _CASELESS + r"\p{N}{1,3}" + _LINES
# Character classes of DeepSeek's tokenizer.json files.
_HAN = "\u4e00-\u9fa5"
_EAST_ASIAN = f"[{_HAN}\u0800-\u4e00\uac00-\ud7ff]+"
_SIGNS = r"!-/:-~" + "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
_CASED_LETTERS = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376-\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183-\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2-\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943")
_DEEPSEEK_V3 = (r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
                r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")

_KINDS: dict[PreTokenizer, tuple[str, ...]] = {
    PreTokenizer((_GPT2,)): (
        "gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat", "roberta-bpe", "a.x-4.0", "mellum"),
    PreTokenizer((r"\p{N}", _GPT2)): (
        "smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
    PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True): (
        "llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    PreTokenizer((_LLAMA3,)): ("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"),
    PreTokenizer((_CASELESS + r"\p{N}" + _LINES,), nfc=True): (
        "qwen2", "stablelm2", "deepseek-r1-qwen", "megrez"),
    PreTokenizer((_CASED % ("", "") + r"\p{N}" + _SLASHES,), ignore_merges=True, add_bos=True): ("tekken",),
    PreTokenizer((_CASED % (_CONTRACTION, _CONTRACTION) + r"\p{N}{1,3}" + _SLASHES,)): ("gpt-4o", "llama4"),
    PreTokenizer((r"\p{N}{1,3}", f"[{_HAN}\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK_V3)): (
        "deepseek-v3", "hunyuan-dense"),
    PreTokenizer(("[\r\n]", rf"\s?[{_CASED_LETTERS}]+", rf"\s?[{_SIGNS}]+", r"\s+$", _EAST_ASIAN, r"\p{N}+")): (
        "deepseek-llm",),
    PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")): ("deepseek-coder",),
    # What llama.cpp falls back to; files that name no pre-tokeniser were made for it.
    PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")): ("default",),
}
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {name: kind for kind, names in _KINDS.items() for name in names}
