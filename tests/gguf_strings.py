"""Strings that tokenizers disagree on: digits, code, emoji, scripts, runs of white space, special tokens in text."""

import random

WORDS = ["the", "cat", "sat", "on", "a mat", "it's", "we'll", "they've", "I'd", "can't", "DON'T", "lambda", "print"]
WORDS += ["hello", "Paris", "naïve", "café", "straße", "Ünïcode"]
SCRIPTS = [
    "日本語のテスト",
    "中文字符测试",
    "한국어 문장",
    "русский текст",
    "ελληνικά",
    "العربية نص",
    "हिन्दी पाठ",
    "ไทย",
]
SCRIPTS += [
    "עברית",
    "ქართული",
    "አማርኛ",
    "தமிழ்",
    "🎉🎉",
    "👩‍👩‍👧‍👦",
    "🇩🇪🇫🇷",
    "e\u0301",
    "\u200d",
    "\ufeff",
    "\u00a0",
    "\u3000",
]
SCRIPTS += ["\u00bd\u00b2\u00b3", "①②", "٣٤٥", "१२३", "\U0001f9d1\U0001f3fd"]
CODE = [
    "def f(x):\n    return x**2\n",
    "for (int i=0;i<10;++i) {\n\tfoo();\n}",
    '<div class="a">',
    '{"a": [1, 2.5, -3e10]}',
]
CODE += [
    "SELECT * FROM t;",
    "#!/bin/bash\n",
    "https://example.com/a?b=c&d=%20",
    "a_b-c.d@e",
    "$x += 1;",
    "\\frac{1}{2}",
]
CODE += ["-->", "!=", "===", "...", "''''", '"""']
SPACES = [" ", "  ", "   ", "    ", "\t", "\t\t", "\n", "\n\n", "\n\n\n", "\r\n", "\r", " \n", "\n ", " \t ", " " * 10]
SPACES += ["\n" * 6, " \n \n "]
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<pad>"]
SPECIAL += ["<unk>", "<unused7>", "<file_sep>", "[multimodal]", "<0x41>", "<s>", "</s>", "<table>", "<|", "|>"]
PLANES = [(33, 0x2FFF), (0x1F300, 0x1FAFF), (0xAC00, 0xD7A3)]


def make_strings(count: int, seed: int = 0) -> list[str]:
    """Random strings of one to twelve pieces."""
    draw = random.Random(seed)

    def piece() -> str:
        kinds = [WORDS, SCRIPTS, CODE, SPACES, SPECIAL, ["number"], ["letter"]]
        kind = draw.choices(kinds, [30, 15, 11, 18, 7, 12, 7])[0]
        drawn = draw.choice(kind)
        if drawn == "number":
            return str(draw.randint(0, 10 ** draw.randint(1, 12)))
        return chr(draw.randint(*draw.choice(PLANES))) if drawn == "letter" else drawn

    return ["".join(piece() + " " * (draw.random() < 0.4) for _ in range(draw.randint(1, 12))) for _ in range(count)]
