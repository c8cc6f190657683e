"""Normalised text for comparisons: `plain_text` removes typography, `bare` also what school answers may vary in.

    "\\text{Caf\\'es}"  ->  plain: "Cafés"  ->  bare: "cafe"

Typography is LaTeX wrappers and spacing, Unicode's many signs and spaces, Markdown, the full stop at the end. School
answers may vary in case, accents, articles, plurals, and punctuation between words. `drop_emphasis` removes Markdown
inside a text. Everything is one pass over the characters, without regular expressions. Callers bound the length.
"""

import string
import unicodedata
from functools import lru_cache

WRAPPERS = {"text", "textbf", "textit", "textrm", "mathrm", "mathbf", "mathit", "mathsf"}
WRAPPERS |= {"mbox", "operatorname", "emph"}
SPACING = {"left", "right", "big", "Big", "displaystyle", "quad", "qquad", "limits", "bigl", "bigr"}
SIGNS = {"times": "*", "cdot": "*", "degree": "°", "circ": "°", "pounds": "£", "euro": "€", "div": "/", "colon": ":"}
FRACTIONS = {"dfrac": "\\frac", "tfrac": "\\frac", "cfrac": "\\frac"}

VULGAR_FRACTIONS = {
    "½": "1/2",
    "⅓": "1/3",
    "⅔": "2/3",
    "¼": "1/4",
    "¾": "3/4",
    "⅕": "1/5",
    "⅖": "2/5",
    "⅗": "3/5",
    "⅘": "4/5",
}
VULGAR_FRACTIONS |= {
    "⅙": "1/6",
    "⅚": "5/6",
    "⅐": "1/7",
    "⅛": "1/8",
    "⅜": "3/8",
    "⅝": "5/8",
    "⅞": "7/8",
    "⅑": "1/9",
    "⅒": "1/10",
}
SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-", strict=True))
LOOKALIKES = {"−": "-", "–": "-", "‐": "-", "‑": "-", "﹣": "-", "－": "-", "×": "*", "·": "*", "⋅": "*", "∙": "*"}  # noqa: RUF001
LOOKALIKES |= {"’": "'", "‘": "'", "“": '"', "”": '"', "⁄": "/", "∕": "/", "÷": "/", "∶": ":", "％": "%", "º": "°"}  # noqa: RUF001
TRANSLATION = str.maketrans(LOOKALIKES | {mark: f" {fraction}" for mark, fraction in VULGAR_FRACTIONS.items()})
# Invisible characters: fillers that Unicode calls letters become spaces, selectors and joiners nothing.
HIDDEN: dict[int, str | None] = dict.fromkeys((0x115F, 0x1160, 0x2800, 0x3164, 0xFFA0), " ")
HIDDEN |= dict.fromkeys(
    (0x34F, 0x17B4, 0x17B5, *range(0x180B, 0x1810), *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))
)
ASCII_LOWER = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)  # keeps every position

PAIRS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("`", "`"), ('"', '"'), ("'", "'"))
EMPHASIS_TAGS = tuple(f"<{end}{name}>" for name in ("b", "i", "em", "strong", "code", "u") for end in ("", "/"))
ENDINGS = " \t\n\r.,;:"  # not `!`, which is a factorial after a number

MAX_CACHED = 2000  # characters of a text whose plain form is cached
LETTERS = "ABCDEFGHIJ"  # of options
ARTICLES = {"a", "an", "the"}
IRREGULAR = {"children": "child", "men": "man", "women": "woman", "people": "person", "feet": "foot", "teeth": "tooth"}
IRREGULAR |= {"mice": "mouse", "geese": "goose", "leaves": "leaf", "wolves": "wolf", "halves": "half", "lives": "life"}
IRREGULAR |= {"knives": "knife", "mitochondria": "mitochondrion", "bacteria": "bacterium", "nuclei": "nucleus"}
IRREGULAR |= {"cacti": "cactus", "fungi": "fungus", "vertices": "vertex", "indices": "index", "oxen": "ox"}
SINGULAR_ENDS = ("ss", "us", "is", "news", "series", "species")


def plain_text(text: str) -> str:
    """A text without its typography, on one line."""
    return _cached_plain_text(text) if len(text) <= MAX_CACHED else _plain_text(text)


def _plain_text(text: str) -> str:
    text = _superscripts_to_powers(peel(drop_invisible(text))).translate(TRANSLATION)
    text = unlatex(text)
    composed = unicodedata.normalize("NFKC", text)
    text = (composed if len(composed) <= 2 * len(text) + 64 else text).translate(
        TRANSLATION
    )  # one character can become eighteen
    return peel(" ".join(drop_invisible(text).split()))


_cached_plain_text = lru_cache(maxsize=1024)(_plain_text)  # rules read the same gold and answer repeatedly


def drop_invisible(text: str) -> str:
    """Remove invisible characters, such as soft hyphens, tags and Hangul fillers; spaces stay."""
    return "".join(char for char in text.translate(HIDDEN) if char.isspace() or char.isprintable())


def peel(text: str) -> str:
    """Remove surrounding signs of mathematics, emphasis or quotation, and punctuation at the end."""
    previous = None
    while text != previous:
        previous = text
        text = text.strip().rstrip(ENDINGS)
        text = text[:-1].rstrip() if _is_emoji(text[-1:]) else text[1:].lstrip() if _is_emoji(text[:1]) else text
        text = text[:-1] if text.endswith("\\") and not text.endswith("\\\\") else text  # of `\,` at the end
        text = text.rstrip("!") if text.endswith("!!!") else text
        for left, right in PAIRS:
            inside = text[len(left) : -len(right)]
            if len(text) > len(left) + len(right) and text.startswith(left) and text.endswith(right):
                text = inside if left not in inside.replace("\\$", "") else text
    return text


def _is_emoji(char: str) -> bool:
    """Whether a character is a dingbat or an emoji."""
    return "\u2600" <= char <= "\u27bf" or "\U0001f300" <= char <= "\U0001faff"


def drop_emphasis(text: str) -> str:
    """Remove Markdown emphasis, closed or not: `The answer is **18**` becomes `The answer is 18`, and `2**3` stays.

    Backticks are removed, and two stars or more, unless they are between operands. A single star or underscores are
    removed together with their partner on the same line, so that `2*3`, `x_1` and `snake_case` stay.
    """
    for tag in EMPHASIS_TAGS if "<" in text and ">" in text else ():
        text = text.replace(tag, "").replace(tag.upper(), "")
    text = text.replace("`", "")
    cuts = [*_emphasis_runs(text, "*"), *_emphasis_runs(text, "_")]
    if not cuts:
        return text
    pieces, start = [], 0
    for cut, end in sorted(cuts):
        pieces.append(text[start:cut])
        start = end
    return "".join(pieces) + text[start:]


def _emphasis_runs(text: str, mark: str) -> list[tuple[int, int]]:
    """Runs of a mark that emphasise -> (start, end) of each."""
    cuts: list[tuple[int, int]] = []
    open_runs: list[tuple[int, int]] = []
    end = 0
    while (start := text.find(mark, end)) >= 0:
        end = start + 1
        while text[end : end + 1] == mark:
            end += 1
        before, after = text[start - 1 : start] if start else "", text[end : end + 1]
        if mark == "*" and end - start > 1:
            cuts += [] if end - start == 2 and _between_operands(text, start, end) else [(start, end)]
            continue
        if before in tuple("^_{\\"):  # `a^*`, and an escaped mark
            continue
        partner = open_runs[-1] if open_runs else (end, end)
        closes = before.strip() and not after.isalnum() and after not in tuple("([{\\")
        if closes and end - start == partner[1] - partner[0] and "\n" not in text[partner[1] : start]:
            cuts += [open_runs.pop(), (start, end)]
        elif after.strip() and not before.isalnum() and not _between_operands(text, start, end):
            open_runs.append((start, end))
    return cuts


def _between_operands(text: str, start: int, end: int) -> bool:
    """Whether both sides of a run of stars can be operands: `2**3`, `x ** 2`, `2 *3`."""
    left, right = start, end
    while left and text[left - 1] == " ":
        left -= 1
    while text[right : right + 1] == " ":
        right += 1
    before, after = text[left - 1 : left] if left else "", text[right : right + 1]
    is_symmetric = (left == start) == (right == end)  # emphasis has its space on one side
    are_operands = (before.isalnum() or before in tuple(")]}")) and (after.isalnum() or after in tuple("([{\\-"))
    return are_operands and (is_symmetric or (end - start == 1 and not before.isalpha()))


def unlatex(text: str) -> str:
    """Remove LaTeX wrappers and spacing; `\\frac` and everything else with a meaning stays."""
    pieces: list[str] = []
    is_wrapper: list[bool] = []  # for each open brace, whether it belongs to a wrapper
    i = 0
    while i < len(text):
        char = text[i]
        if char == "\\" and i + 1 < len(text):
            piece, i, opens = _command(text, i + 1)
            pieces.append(piece)
            is_wrapper += [True] * opens
            continue
        if char == "{":
            is_wrapper.append(False)
        elif char == "}" and is_wrapper and is_wrapper.pop():
            char = ""
        pieces.append(" " if char == "~" else char)
        i += 1
    return "".join(pieces).replace("{,}", ",").replace("^{°}", "°").replace("^°", "°")


def _command(text: str, start: int) -> tuple[str, int, bool]:
    """Translate the command whose name begins at `start` -> replacement, index after it, whether a wrapper opened."""
    end = start
    while end < len(text) and text[end] in string.ascii_letters:
        end += 1
    name = text[start:end]
    if not name:  # \$ \% \{ are the sign itself; \, \; and the like are space; \( \[ stay, to be peeled off
        char = text[start]
        plain = char if char in "$%{}&#_" else "" if char == "!" else " " if char in ",;: \\" else "\\" + char
        return plain, start + 1, False
    if name in WRAPPERS:
        opens = end < len(text) and text[end] == "{"
        return "", end + opens, opens
    if name in SPACING:
        return " " if "quad" in name else "", end, False
    return SIGNS.get(name) or FRACTIONS.get(name) or "\\" + name, end, False


def _superscripts_to_powers(text: str) -> str:
    """Rewrite superscript digits as a power: `10⁵` becomes `10^5`."""
    pieces: list[str] = []
    is_raised = False
    for char in text:
        digit = SUPERSCRIPTS.get(char)
        pieces.append(char if digit is None else digit if is_raised else "^" + digit)
        is_raised = digit is not None
    return "".join(pieces)


def words(text: str) -> list[str]:
    """Words of a plain text, in lower case, without accents; signs with a meaning count as words."""
    text = unicodedata.normalize("NFKD", text.casefold())
    text = "".join(char for char in text if not unicodedata.combining(char))
    text = text.replace("n't", " not").replace("'s", "").replace("s'", "s")
    return "".join(char if char.isalnum() or char in "+-/<>=^%.°:" else " " for char in text).split()


def singular(word: str) -> str:
    """A word without its plural ending, by rules good enough for a comparison."""
    if word in IRREGULAR:
        return IRREGULAR[word]
    if len(word) < 4 or not word.endswith("s") or word.endswith(SINGULAR_ENDS):
        return word
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    return word[:-2] if word.endswith(("xes", "ches", "shes", "sses", "oes")) else word[:-1]


def american(word: str) -> str:
    """American spelling of a British word."""
    for british, ending, min_length in (("our", "or", 5), ("tre", "ter", 5), ("ise", "ize", 7)):
        if word.endswith(british) and len(word) >= min_length:
            return word[: -len(british)] + ending
    return word


def bare(text: str) -> str:
    """A plain text without case, accents, articles, plurals, punctuation and British spelling."""
    trimmed = [_strip_punctuation(word) for word in words(text.replace("-", " ") if not _has_minus(text) else text)]
    content = [american(singular(word)) for word in trimmed if word not in ARTICLES and word]
    return " ".join(content or trimmed)


def _strip_punctuation(word: str) -> str:
    """A word without punctuation around it; the sign of a number stays."""
    stripped = word.strip(".:-")
    return "-" + stripped if word.startswith("-") and stripped[:1].isdigit() else stripped


def _has_minus(text: str) -> bool:
    """Whether a text has a minus: a hyphen before a digit, at the beginning or after a space."""
    hyphens = (i for i, char in enumerate(text[:-1]) if char == "-")
    return any(text[i + 1].isdigit() and (i == 0 or not text[i - 1].isalnum()) for i in hyphens)


def split_label(text: str) -> tuple[str, str]:
    """Split the letter label at the beginning of a plain text (`B. red`) -> letter, text; the letter is "" if none."""
    inside = text.strip("()[]{}*.:,; ")
    if len(inside) == 1 and inside.upper() in LETTERS:
        return inside.upper(), ""
    start = text.lstrip("([*")
    if len(start) < 3 or start[0].upper() not in LETTERS:
        return "", text
    after = start[1:].lstrip("*")
    if after[:1] in (")", "]", ".", ":") and (after[1:2] in (" ", "*")):
        return start[0].upper(), after[1:].strip("* ")
    if start[0].isupper() and after[:3] in (" - ", " = "):
        return start[0].upper(), after[3:].strip()
    return "", text
