"""The final answer in a long output: `find_answer` says what it is and where it stood, `readings` how it may be read.

Looked for in this order, the last of each, in the last `LOOK` characters and after the end of any thinking:

    <answer> ... </answer>    \\boxed{ ... }    #### ...    Answer: ... / the answer is ...    the last line

Boxes that share a line are one answer of several parts, so that naming two answers names both. What was found is looked
into again, so a box inside a tag is opened. One pass over bounded text, without regular expressions.
"""

import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

from flowgrpo.rewards.answers.spelling import ASCII_LOWER, drop_invisible, peel

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


class Found(NamedTuple):
    """An answer, and where it was found."""

    text: str
    where: str


def find_answer(output: str) -> Found:
    """Find the final answer of an output; empty where there is none."""
    text = unicodedata.normalize("NFC", drop_invisible(output[-LOOK:]))
    text = text[_after(text.translate(ASCII_LOWER), THINKING) :]
    last_line = text.strip().rpartition("\n")[2].strip()
    found = _tagged(text) or _boxed(text) or _marked(text) or Found(last_line, "last line")
    if found.where == "tag":
        found = Found((_boxed(found.text) or found).text.strip(), "tag")
    return found


def readings(found: Found) -> tuple[str, ...]:
    """List the readings of an answer: all of it, and the value that a sentence states last ("so we get 5", "it is 5").

    A sentence that hedges or asks is read only whole, so that naming two answers is naming none.
    """
    text = peel(found.text[:SHORT])
    if len(found.text) > SHORT or hedges(text) or text.endswith("?"):
        return (text,) if len(found.text) <= SHORT else ()
    base = _without(text, CLOSINGS).partition(", not ")[0]
    cuts = [_claim(base, marks) for marks in (STATES, OPENERS, VERBS)]
    spans = [text, base, *(base[cut:] for cut in cuts if cut)]
    if not _names(base) and (cut := _claim(base, EQUALS)):
        spans.append(base[cut:])
    spans += [_without(span, TAILS) for span in spans if _counts(span)]
    spans += [span.partition(" ")[2] for span in spans if span.partition(" ")[0].lower() in QUALIFIERS]
    around = base[max(cuts) :].split("$")
    if len(around) == 3 and not denies(base) and not set("=≈") & set(around[0] + around[2]):
        spans.append(around[1])
    return tuple(dict.fromkeys(peel(span) for span in spans if peel(span)))


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
    # A subject of which the same was said before: "it is 5 and it is 6", but not "y = 2, so x + y = 5".
    *others, subject = clause.split() or [""]
    earlier = (sentence if marks is VERBS else before).replace("=", " = ").split()
    again = f" {subject} {mark.strip()} " in f" {' '.join(earlier)} " and all(word.isalpha() for word in others[-1:])
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
    return Found(_first_line(text[best:]), "marker") if best >= 0 else None


def _linked(lower: str, at: int) -> int:
    """Find the index after a link (`:`, `is`) that begins at `at`, stars aside; -1 where there is none."""
    start = at + (lower[at : at + 1] == "s")
    rest = lower[start : start + 40].lstrip(" *")
    link = next((link for link in LINKS if rest.startswith(link)), None)
    if link is None or (link.isalpha() and rest[len(link) : len(link) + 1].isalnum()):
        return -1
    end = lower.index(link, start) + len(link)
    while lower[end : end + 1] in ("*", " ", ":") and end < len(lower):
        end += 1
    return end


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0].strip()
