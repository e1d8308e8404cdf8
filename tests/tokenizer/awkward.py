"""Awkward texts, always the same ones: all scripts, emoji, spaces, digits, control characters and control tokens."""

import random
import unicodedata

LISTED = (
    "", " ", "  ", "   ", "\n", "\n\n\n", "\t", "\r\n", " \n ", " hello", "hello ", "  hello  world  ", "he ",
    "trailing   ", "a\n\n\n\nb\t\t\tc      d", "\t\tx = 0;\r\n", " " * 40, "\n" * 20, "a" + " " * 17 + "b",
    "x1y22z333", "1234567890", "3.14159e-10", "1,000,000.00", "0x1F4A9", "½²٣४ⅷ①", "٠١٢٣٤٥", "०१२३", "１２３",
    "don't I'LL we've 'S you'RE", "''''", "it’s", "O'Neill's", "...!!!???", "—–-‐", "«»„“”‘’", "#@$%^&*()_+[]{}|\\;:\"<>?/~`",
    "https://x.y/z?q=1&r=2#f", "def f(x):\n    return x**2  # c\n", "<html><b>bold</b></html>", "a_b_c-d-e", "ÀÉÎõü",
    "e\u0301 é", "o\u0308\u0323 a\u0327", "\u1112\u1161\u11ab 한", "ﬁ ﬂ ﬃ", "Å Å", "ſß ẞ", "İstanbul ı", "Ǆ ǅ ǆ",
    "漢字かな交じり文", "你好，世界。", "繁體中文", "日本語のテスト", "한국어 텍스트", "ภาษาไทย", "ລາວ", "မြန်မာ", "ខ្មែរ",
    "हिन्दी", "বাংলা", "ਪੰਜਾਬੀ", "ગુજરાતી", "தமிழ்", "తెలుగు", "ಕನ್ನಡ", "മലയാളം", "සිංහල", "ქართული", "Հայերեն",
    "Ελληνικά ΆΈΉ", "Русский язык", "Українська ї", "עברית שָׁלוֹם", "مرحبا بالعالم", "فارسی می‌خواهم", "አማርኛ", "ᏣᎳᎩ", "ᠮᠣᠩᠭᠣᠯ",
    "བོད་ཡིག", "ⵜⴰⵎⴰⵣⵉⵖⵜ", "𐍈𐌰𐌽", "𝕳𝖊𝖑𝖑𝖔 𝟙𝟚𝟛", "𠀀𠀁", "ꙮ", "☃☂☀", "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋", "∑∫√∞≠≤",
    "😀😃", "👨\u200d👩\u200d👧\u200d👦", "🏳️\u200d🌈", "👍🏽", "🇩🇪🇫🇷", "1️⃣2️⃣", "❤️ ❤", "🫠🫡", "a😀b 😀 c",
    "\u200b\ufeff", "a\u200bb\u200cc\u200dd", "\u202e rtl", "a\u00a0b\u2003c\u3000d", "\u2028\u2029\x85", "\x00\x01\x7f",
    "a\x00b", "\x1b[31mred\x1b[0m", "\u0000", "\ufffd", "\ufffe\uffff", "\U0010ffff", "\ue000",
    "\u2581", "\u2581\u2581a\u2581", "a\u2581 b", "<0x0A>", "<0xE2>", "<unk>", "<s>", "</s>", "<pad>", "<bos>hi<eos>",
    "<s> a</s> b", "<|im_start|>user\nhi<|im_end|>", "<|im_end|> b", "<start_of_turn>user\nhi<end_of_turn>\n",
    "<|begin_of_text|>x<|eot_id|>", "[INST] hi [/INST]", "[TOOL_CALLS]", "<think>\n</think>", "<|endoftext|>",
    "<unused7>", "[multimodal]", "<|end|", "<|", "Ġ", "Ċ", "aĠb", "Hello World HELLO hELLO helloWorld HTTPServer",
    "supercalifragilisticexpialidocious", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "ababababababab", "zq" * 25,
)
_POOLS = (
    "abcdefgh ", "ABC def 0123456789 .,", " \n\t\r", "éèü漢字😀½٣ ", "'s't're!?\"", "_-<|>im_endsta/", "the of and in ",
    "".join(map(chr, range(0x20, 0x2FF))), "\u2581 ▁ab", "\u200d\ufe0f👩👨👧🏽❤", "𝐀𝐁𐍈𠀀 ", "０１２ａｂｃ",
)


def awkward_texts(count: int) -> list[str]:
    """The listed texts and `count` drawn ones: from pools that provoke merges, and from all of Unicode."""
    draw = random.Random(0)
    drawn = ["".join(draw.choice(draw.choice(_POOLS)) for _ in range(draw.randrange(1, 40))) for _ in range(count)]
    for i in range(0, count, 3):  # every third one of assigned characters of any script, spaces between
        drawn[i] = "".join(_any_character(draw) if draw.random() < 0.8 else " " for _ in range(draw.randrange(1, 12)))
    return [*LISTED, *drawn]


def _any_character(draw: random.Random) -> str:
    while True:
        char = chr(draw.randrange(0x110000) if draw.random() < 0.3 else draw.randrange(0x3000))
        if unicodedata.category(char) not in ("Cn", "Cs", "Co"):
            return char
