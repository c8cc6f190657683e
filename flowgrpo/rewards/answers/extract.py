"""The final answer in a long output: `find_answer` says what it is and where it stood, `readings` how it may be read.

Looked for in this order, the last of each, in the last `LOOK` characters and after the end of any thinking:

    <answer> ... </answer>    \\boxed{ ... }    #### ...    Answer: ... / the answer is ...    the last line

Boxes that share a line are one answer of several parts, so that naming two answers names both. What was found is looked
into again, so a box inside a tag is opened. Markdown's emphasis is taken off before that, wherever it opens and closes,
but for the inside of a tag, which is given as it is. One pass over bounded text, without regular expressions.
"""

import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

from flowgrpo.rewards.answers.numbers import read_plain
from flowgrpo.rewards.answers.spelling import (
    ASCII_LOWER,
    ENDINGS,
    drop_emphasis,
    drop_invisible,
    peel,
)

LOOK = 2000  # characters of the end of an output that are looked at
SHORT = 400  # characters of an answer up to which its parts are read too
THINKING = ("</think>", "</thinking>", "</reasoning>")
LEADS = ("final answer", "answer", "correct option", "correct choice", "result", "solution")
LINKS = ("is", "are", "was", "=", ":", "would be", "must be", "should be", "will be", "equals")
HEDGES = {"or", "either", "maybe", "perhaps", "possibly", "alternatively", "probably", "might", "could", "unsure"}
# What may stand before the value that a sentence states; after a verb it has a digit: "fish have gills" states none.
STATES = (" is ", " are ", " was ", ": ")
OPENERS = tuple(f" {word}{sign} " for word in ("so", "thus", "hence", "therefore", "finally") for sign in ("", ","))
VERBS = "get gets got give gives make makes yield yields obtain have has equals find leaves pays costs takes needs"
VERBS = tuple(f" {verb} " for verb in VERBS.split())
VERBS += (" must be ", " will be ", " comes to ", " amounts to ", " adds up to ", " turns out to be ", " left with ")
EQUALS = ("=", "≈")
CLOSINGS = (" is the answer", " is the final answer", " is the result")
TAILS = (" in total", " in all", " altogether", " overall", " left", " remain", " of them")  # behind a number
STOPS, BREAKS = (". ", "; ", "! "), (", ", " so ", " but ", " then ")  # of sentences, and of clauses
QUALIFIERS = {"approximately", "about", "approx", "roughly", "exactly", "just", "only", "in", "on", "at"}
DENIALS = {"not", "never", "neither", "nor", "cannot", "no", "isn't", "aren't", "wasn't", "don't", "doesn't", "can't"}
UNSAID = DENIALS | {"didn't", "won't", "nobody", "false", "wrong", "incorrect", "hardly", "rarely", "doubt", "fails"}
UNSAID |= {"let", "suppose", "supposing", "assume", "assuming", "unless"}
CONTRACTIONS = {"it's": "it is", "it\u2019s": "it is", "that's": "that is", "that\u2019s": "that is"}


class Found(NamedTuple):
    """An answer, and where it was found."""

    text: str
    where: str


def find_answer(output: str) -> Found:
    """Find the final answer of an output; empty where there is none."""
    text = unicodedata.normalize("NFC", drop_invisible(output[-LOOK:]))
    text = text[_after(text.translate(ASCII_LOWER), THINKING) :]
    tagged = _tagged(text)
    if tagged is not None:
        return Found((_boxed(tagged.text) or tagged).text.strip(), "tag")
    text = drop_emphasis(text)
    return _boxed(text) or _marked(text) or Found(_last_line(text), "last line")


def readings(found: Found) -> tuple[str, ...]:
    """List the readings of an answer: all of it, and the value that a sentence states last ("so we get 5", "it is 5").

    A sentence that hedges or asks is read only whole, so that naming two answers is naming none.
    """
    text = peel(drop_emphasis(found.text[:SHORT]))
    if len(found.text) > SHORT or hedges(text) or text.endswith("?"):
        return (text,) if len(found.text) <= SHORT else ()
    base = " ".join(CONTRACTIONS.get(word.translate(ASCII_LOWER), word) for word in text.split(" "))
    base = _without(base, CLOSINGS).partition(", not ")[0]
    cuts = [_claim(base, marks) for marks in (STATES, OPENERS, VERBS)]
    spans = [text, base, *(base[cut:] for cut in cuts if cut)]
    if not _names(base) and (cut := _claim(base, EQUALS)):
        spans.append(base[cut:])
    spans += [_without(span, TAILS) for span in spans if _counts(span)]
    spans += [span.partition(" ")[2] for span in spans if span.partition(" ")[0].lower() in QUALIFIERS]
    spans += [_corrected(base), *(_explained(span) for span in spans)]
    spoken = found.where == "marker" and _exclaims(found.text.rstrip(ENDINGS))  # within `$5!$` it is a factorial
    spans += [span[:-1] for span in spans if _exclaims(span) and (spoken or span != text)]
    around = base[max(cuts) :].split("$")
    if len(around) == 3 and not denies(base) and not set("=≈") & set(around[0] + around[2]):
        spans.append(around[1])
    return tuple(dict.fromkeys(peel(span) for span in spans if peel(span)))


def _corrected(text: str) -> str:
    """Read what `not 41 but 42` says instead; "" where nothing is denied, or something else than a value."""
    before, but, after = text.rpartition(" but ")
    _, denial, value = f" {before}".rpartition(" not ")
    same_kind = _counts(value) == _counts(after) and len(value.split()) == 1
    return after if but and denial and same_kind and not denies(after) else ""


def _explained(text: str) -> str:
    """Read `18 (dollars)` as `18 dollars`, and `3/4 (0.75)` as the number that it says twice; else ""."""
    value, bracket, inside = text.rpartition(" (")
    if not bracket or not inside.endswith(")") or not _counts(value):
        return ""
    inside = inside[:-1]
    number, again = read_plain(value), read_plain(inside)
    if number is not None and again is not None:
        return value if number.value == again.value else ""
    return f"{value} {inside}" if all(word.isalpha() for word in inside.split()) else ""


def _exclaims(text: str) -> bool:
    """Say whether a text ends as an exclamation does; after a number it may be a factorial, too."""
    return text.endswith("!") and not text.endswith("!!")


def _claim(text: str, marks: Sequence[str]) -> int:
    """Find where the value behind the last of the marks begins; 0 where it is denied or supposed, or stated twice."""
    lower = f" {text.translate(ASCII_LOWER)}"
    at, mark = max((lower.rfind(mark), mark) for mark in marks)
    end = at + len(mark) - 1
    if at < 0 or (marks is VERBS and not _counts(text[end:])) or lower[:at].endswith((" to", "!", "<", ">", "~")):
        return 0
    before = lower[:at]
    sentence = before[_after(before, STOPS) :]
    clause = sentence[_after(sentence, BREAKS) :]
    said = _tokens(clause)
    # "The one that is not prime is 9" says 9; "it is not true that x is 9" doesn't.
    heard = said if marks is not STATES else said[: said.index("that")] if "that" in said else said[:1]
    if set(heard) & UNSAID or (marks is not STATES and "if" in heard):
        return 0
    # A subject of which the same was said before: "it is 5 and it is 6", but not "y = 2, so x + y = 5", and not "it is
    # not 5, it is 6", which names one.
    *others, subject = clause.split() or [""]
    earlier = (sentence if marks is VERBS else before).replace("=", " = ").split()
    _, *values = f" {' '.join(earlier)} ".split(f" {subject} {mark.strip()} ")
    again = any(value.split()[:1] != ["not"] for value in values) and all(word.isalpha() for word in others[-1:])
    return 0 if again else end


def _without(text: str, endings: Sequence[str]) -> str:
    """Drop the first of these endings that a text has."""
    ending = next((ending for ending in endings if text.translate(ASCII_LOWER).endswith(ending)), "")
    return text[: len(text) - len(ending)]


def _counts(text: str) -> bool:
    return any(mark.isdigit() for mark in text)


def _names(text: str) -> bool:
    """Say whether a text assigns a variable (`x = 5`), which rules read for themselves."""
    return len(text.partition("=")[0].strip()) == 1 and text.count("=") == 1


def _tokens(text: str) -> list[str]:
    return "".join(
        mark if mark.isalnum() or mark == "'" else " " for mark in text.lower().replace("\u2019", "'")
    ).split()


def hedges(text: str) -> bool:
    """Say whether a text doubts."""
    return bool(set(_tokens(text)) & HEDGES)


def denies(text: str) -> bool:
    """Say whether a text denies something."""
    return bool(set(_tokens(text)) & DENIALS)


def _after(lower: str, marks: tuple[str, ...]) -> int:
    """Find the index after the last of these marks in the text; 0 where none is in it."""
    return max((lower.rfind(mark) + len(mark) for mark in marks if mark in lower), default=0)


def _tagged(text: str) -> Found | None:
    lower = text.translate(ASCII_LOWER)
    end = lower.rfind("</answer>")
    start = lower.rfind("<answer>", 0, end) if end >= 0 else -1
    return Found(text[start + len("<answer>") : end], "tag") if start >= 0 else None


def _boxed(text: str) -> Found | None:
    """Find the boxes of the last line that has any."""
    closing = _closing_braces(text)
    boxes: list[tuple[int, int]] = []
    for name in ("\\boxed{", "\\fbox{"):
        at = text.find(name)
        while at >= 0:
            brace = at + len(name) - 1
            if brace in closing:
                boxes.append((brace + 1, closing[brace]))
            at = text.find(name, brace)
    boxes.sort()
    outer = [box for place, box in enumerate(boxes) if box[0] > max((end for _, end in boxes[:place]), default=-1)]
    if not outer:
        return None
    line = text.rfind("\n", 0, outer[-1][0])
    return Found(", ".join(text[start:end].strip() for start, end in outer if start > line), "box")


def _closing_braces(text: str) -> dict[int, int]:
    """Find the closing brace of each open one that has one."""
    closing: dict[int, int] = {}
    open_braces: list[int] = []
    skip = False
    for at, mark in enumerate(text):
        if skip:
            skip = False
        elif mark == "\\":
            skip = True
        elif mark == "{":
            open_braces.append(at)
        elif mark == "}" and open_braces:
            closing[open_braces.pop()] = at
    return closing


def _marked(text: str) -> Found | None:
    """Find the line after the last `####`, else after the last of `LEADS` (such as `answer`) that a link follows."""
    lower = text.translate(ASCII_LOWER)
    hashes = lower.rfind("####")
    if hashes >= 0 and text[hashes + 4 :].strip():
        return Found(_first_line(text[hashes + 4 :]), "marker")
    best = -1
    for lead in LEADS:
        at = lower.rfind(lead)
        while at >= 0:
            start = _linked(lower, at + len(lead))
            if start >= 0 and text[start:].strip():
                best = max(best, start)
                break
            at = lower.rfind(lead, 0, at)
    if best < 0:
        return None
    return Found(_cell(text, best) or _unclosed(text, best, _first_line(text[best:])), "marker")


def _unclosed(text: str, at: int, line: str) -> str:
    """Take off what closes a formula or a brace that opened before the marker: `\\textbf{Answer: 18}`, `$x: 18$`."""
    before = text[text.rfind("\n", 0, at) + 1 : at]
    if line.startswith("}") and before.count("{") > before.count("}"):
        line, before = line[1:].lstrip(), before + "}"
    for opening, closing in (("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("{", "}"), ("$", "$")):
        end = line.rstrip(ENDINGS)
        opened = before.count(opening) % 2 if opening == closing else before.count(opening) > before.count(closing)
        closed = line.count(closing) % 2 if opening == closing else line.count(closing) > line.count(opening)
        if opened and closed and end.endswith(closing):
            line = end[: -len(closing)]
    return line


def _linked(lower: str, at: int) -> int:
    """Find the index after a link (`:`, `is`, the border of a cell) that begins at `at`; -1 where there is none."""
    start = at + (lower[at : at + 1] == "s")
    rest = lower[start : start + 40].lstrip(" *")
    links = (*LINKS, "|") if _in_table(lower, at) else LINKS
    link = next((link for link in links if rest.startswith(link)), None)
    if link is None or (link.isalpha() and rest[len(link) : len(link) + 1].isalnum()):
        return -1
    end = lower.index(link, start) + len(link)
    while lower[end : end + 1] in ("*", " ", ":") and end < len(lower):
        end += 1
    return end


def _in_table(text: str, at: int) -> bool:
    """Say whether a place is in a row of a table, as Markdown writes it."""
    return text[text.rfind("\n", 0, at) + 1 : at].lstrip(" ").startswith("|")


def _cell(text: str, at: int) -> str:
    """Read the cells of a row from a place on; "" where it is in no table."""
    line = text[at:].partition("\n")[0].strip()
    return line.strip("| ") if line.endswith("|") and _in_table(text, at) else ""


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0].strip()


def _last_line(text: str) -> str:
    """Take the last line, without the mark of a heading or of a list before it."""
    line = text.strip().rpartition("\n")[2].strip()
    mark, space, rest = line.partition(" ")
    return rest.strip() if space and (mark in ("*", "•") or not mark.strip("#")) else line
