"""Text as it is compared: `plain_text` takes off typography, `bare` also what school forgives.

    "\\text{Caf\\'es}"  ->  plain: "Cafés"  ->  bare: "cafe"

Typography is LaTeX wrappers and spacing, Unicode's many signs and spaces, Markdown, the stop at the end. School
forgives case, accents, articles, plurals, punctuation between words. `drop_emphasis` takes off Markdown where it stands
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

VULGAR = {"½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅖": "2/5", "⅗": "3/5", "⅘": "4/5"}
VULGAR |= {"⅙": "1/6", "⅚": "5/6", "⅐": "1/7", "⅛": "1/8", "⅜": "3/8", "⅝": "5/8", "⅞": "7/8", "⅑": "1/9", "⅒": "1/10"}
RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-", strict=True))
MARKS = {"−": "-", "–": "-", "‐": "-", "‑": "-", "﹣": "-", "－": "-", "×": "*", "·": "*", "⋅": "*", "∙": "*"}  # noqa: RUF001
MARKS |= {"’": "'", "‘": "'", "“": '"', "”": '"', "⁄": "/", "∕": "/", "÷": "/", "∶": ":", "％": "%", "º": "°"}  # noqa: RUF001
TABLE = str.maketrans(MARKS | {mark: f" {fraction}" for mark, fraction in VULGAR.items()})
# What nobody sees: fillers that are letters to Unicode read as spaces, selectors and joiners as nothing.
HIDDEN: dict[int, str | None] = dict.fromkeys((0x115F, 0x1160, 0x2800, 0x3164, 0xFFA0), " ")
HIDDEN |= dict.fromkeys(
    (0x34F, 0x17B4, 0x17B5, *range(0x180B, 0x1810), *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))
)
ASCII_LOWER = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)  # keeps every position

PAIRS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("`", "`"), ('"', '"'), ("'", "'"))
EMPHASIS_TAGS = tuple(f"<{end}{name}>" for name in ("b", "i", "em", "strong", "code", "u") for end in ("", "/"))
ENDINGS = " \t\n\r.,;:"  # not `!`, which is a factorial after a number

REMEMBERED = 2000  # characters of a text whose plain form is remembered
LETTERS = "ABCDEFGHIJ"  # of options
ARTICLES = {"a", "an", "the"}
IRREGULAR = {"children": "child", "men": "man", "women": "woman", "people": "person", "feet": "foot", "teeth": "tooth"}
IRREGULAR |= {"mice": "mouse", "geese": "goose", "leaves": "leaf", "wolves": "wolf", "halves": "half", "lives": "life"}
IRREGULAR |= {"knives": "knife", "mitochondria": "mitochondrion", "bacteria": "bacterium", "nuclei": "nucleus"}
IRREGULAR |= {"cacti": "cactus", "fungi": "fungus", "vertices": "vertex", "indices": "index", "oxen": "ox"}
SINGULAR_ENDS = ("ss", "us", "is", "news", "series", "species")


def plain_text(text: str) -> str:
    """Take the typography off a text, and put it on one line."""
    return _remembered(text) if len(text) <= REMEMBERED else _plain_text(text)


def _plain_text(text: str) -> str:
    text = _raise(peel(drop_invisible(text))).translate(TABLE)
    text = unlatex(text)
    composed = unicodedata.normalize("NFKC", text)
    text = (composed if len(composed) <= 2 * len(text) + 64 else text).translate(TABLE)  # one sign can become eighteen
    return peel(" ".join(drop_invisible(text).split()))


_remembered = lru_cache(maxsize=1024)(_plain_text)  # rules read the same gold and answer again and again


def drop_invisible(text: str) -> str:
    """Drop characters that show nothing, such as soft hyphens, tags and Hangul fillers; spaces stay."""
    return "".join(mark for mark in text.translate(HIDDEN) if mark.isspace() or mark.isprintable())


def peel(text: str) -> str:
    """Take off surrounding signs of mathematics, emphasis or quotation, and a stop at the end."""
    before = None
    while text != before:
        before = text
        text = text.strip().rstrip(ENDINGS)
        text = text[:-1].rstrip() if _is_picture(text[-1:]) else text[1:].lstrip() if _is_picture(text[:1]) else text
        text = text[:-1] if text.endswith("\\") and not text.endswith("\\\\") else text  # of `\,` at the end
        text = text.rstrip("!") if text.endswith("!!!") else text
        for left, right in PAIRS:
            inside = text[len(left) : -len(right)]
            if len(text) > len(left) + len(right) and text.startswith(left) and text.endswith(right):
                text = inside if left not in inside.replace("\\$", "") else text
    return text


def _is_picture(mark: str) -> bool:
    """Say whether a character is a dingbat or an emoji."""
    return "\u2600" <= mark <= "\u27bf" or "\U0001f300" <= mark <= "\U0001faff"


def drop_emphasis(text: str) -> str:
    """Take Markdown's emphasis off, closed or not: `The answer is **18**` is `The answer is 18`, and `2**3` stays.

    Backticks go, and two stars or more, unless they stand between operands. A single star or underscores go together
    with their partner in the same line, so that `2*3`, `x_1` and `snake_case` stay.
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
    """Find the runs of a mark that emphasise -> (start, end) of each."""
    cuts: list[tuple[int, int]] = []
    opened: list[tuple[int, int]] = []
    end = 0
    while (start := text.find(mark, end)) >= 0:
        end = start + 1
        while text[end : end + 1] == mark:
            end += 1
        before, after = text[start - 1 : start] if start else "", text[end : end + 1]
        if mark == "*" and end - start > 1:
            cuts += [] if end - start == 2 and _between_operands(text, start, end) else [(start, end)]
            continue
        if before in tuple("^_{\\"):  # `a^*`, and a mark that is escaped
            continue
        partner = opened[-1] if opened else (end, end)
        closes = before.strip() and not after.isalnum() and after not in tuple("([{\\")
        if closes and end - start == partner[1] - partner[0] and "\n" not in text[partner[1] : start]:
            cuts += [opened.pop(), (start, end)]
        elif after.strip() and not before.isalnum() and not _between_operands(text, start, end):
            opened.append((start, end))
    return cuts


def _between_operands(text: str, start: int, end: int) -> bool:
    """Say whether what stands on both sides of a run of stars can be multiplied: `2**3`, `x ** 2`, `2 *3`."""
    left, right = start, end
    while left and text[left - 1] == " ":
        left -= 1
    while text[right : right + 1] == " ":
        right += 1
    before, after = text[left - 1 : left] if left else "", text[right : right + 1]
    even = (left == start) == (right == end)  # emphasis has its space on one side
    operands = (before.isalnum() or before in tuple(")]}")) and (after.isalnum() or after in tuple("([{\\-"))
    return operands and (even or (end - start == 1 and not before.isalpha()))


def unlatex(text: str) -> str:
    """Drop the wrappers and spacing of LaTeX; `\\frac` and whatever else has a meaning stays."""
    out: list[str] = []
    wrapped: list[bool] = []  # for each open brace, whether it belongs to a wrapper
    at = 0
    while at < len(text):
        mark = text[at]
        if mark == "\\" and at + 1 < len(text):
            piece, at, opens = _command(text, at + 1)
            out.append(piece)
            wrapped += [True] * opens
            continue
        if mark == "{":
            wrapped.append(False)
        elif mark == "}" and wrapped and wrapped.pop():
            mark = ""
        out.append(" " if mark == "~" else mark)
        at += 1
    return "".join(out).replace("{,}", ",").replace("^{°}", "°").replace("^°", "°")


def _command(text: str, at: int) -> tuple[str, int, bool]:
    """Translate the command whose name begins at `at` -> (replacement, index after it, whether a wrapper opened)."""
    end = at
    while end < len(text) and text[end] in string.ascii_letters:
        end += 1
    name = text[at:end]
    if not name:  # \$ \% \{ are the sign itself; \, \; and the like are space; \( \[ stay, to be peeled off
        mark = text[at]
        plain = mark if mark in "$%{}&#_" else "" if mark == "!" else " " if mark in ",;: \\" else "\\" + mark
        return plain, at + 1, False
    if name in WRAPPERS:
        opens = end < len(text) and text[end] == "{"
        return "", end + opens, opens
    if name in SPACING:
        return " " if "quad" in name else "", end, False
    return SIGNS.get(name) or FRACTIONS.get(name) or "\\" + name, end, False


def _raise(text: str) -> str:
    """Write superscript digits as a power: `10⁵` is `10^5`."""
    out: list[str] = []
    raised = False
    for mark in text:
        digit = RAISED.get(mark)
        out.append(mark if digit is None else digit if raised else "^" + digit)
        raised = digit is not None
    return "".join(out)


def words(text: str) -> list[str]:
    """Split a plain text into words, in lower case, without accents; signs that carry a meaning count as words."""
    text = unicodedata.normalize("NFKD", text.casefold())
    text = "".join(mark for mark in text if not unicodedata.combining(mark))
    text = text.replace("n't", " not").replace("'s", "").replace("s'", "s")
    return "".join(mark if mark.isalnum() or mark in "+-/<>=^%.°:" else " " for mark in text).split()


def singular(word: str) -> str:
    """Drop the plural ending of a word, near enough to compare."""
    if word in IRREGULAR:
        return IRREGULAR[word]
    if len(word) < 4 or not word.endswith("s") or word.endswith(SINGULAR_ENDS):
        return word
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    return word[:-2] if word.endswith(("xes", "ches", "shes", "sses", "oes")) else word[:-1]


def american(word: str) -> str:
    """Give one spelling to words that British and American English spell in two."""
    for british, spelled, least in (("our", "or", 5), ("tre", "ter", 5), ("ise", "ize", 7)):
        if word.endswith(british) and len(word) >= least:
            return word[: -len(british)] + spelled
    return word


def bare(text: str) -> str:
    """Strip a plain text of what doesn't count: case, accents, articles, plurals, punctuation, British spelling."""
    found = [_trimmed(word) for word in words(text.replace("-", " ") if not _signed(text) else text)]
    kept = [american(singular(word)) for word in found if word not in ARTICLES and word]
    return " ".join(kept or found)


def _trimmed(word: str) -> str:
    """Drop punctuation around a word; the sign of a number stays."""
    kept = word.strip(".:-")
    return "-" + kept if word.startswith("-") and kept[:1].isdigit() else kept


def _signed(text: str) -> bool:
    """Say whether a hyphen is a minus: one that stands before a digit, at the beginning or after a space."""
    spots = (at for at, mark in enumerate(text[:-1]) if mark == "-")
    return any(text[at + 1].isdigit() and (at == 0 or not text[at - 1].isalnum()) for at in spots)


def labelled(text: str) -> tuple[str, str]:
    """Read the letter at the beginning of a plain text that serves as a label -> the letter, the text after it."""
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
