"""The final answer of a long output: `find_answer` extracts it, `readings` lists the ways to read it.

Searched in this order, the last match of each, in the last `MAX_TAIL` characters and after the end of any thinking:

    <answer> ... </answer>    \\boxed{ ... }    #### ...    Answer: ... / the answer is ...    the last line

Boxes on one line are one answer of several parts, so two boxed answers count as both. A box inside a tag is opened.
Markdown emphasis is removed first, except inside a tag, whose content is taken as it is. One pass over bounded text,
without regular expressions.
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

MAX_TAIL = 2000  # characters at the end of an output that are searched
MAX_PARSED = 400  # characters; a longer answer has no reading
THINKING_ENDS = ("</think>", "</thinking>", "</reasoning>")
LEAD_WORDS = ("final answer", "answer", "correct option", "correct choice", "result", "solution")
LINK_WORDS = ("is", "are", "was", "=", ":", "would be", "must be", "should be", "will be", "equals")
HEDGES = {"or", "either", "maybe", "perhaps", "possibly", "alternatively", "probably", "might", "could", "unsure"}
# Phrases before the value that a sentence states; after a verb it must have a digit: "fish have gills" states none.
STATING = (" is ", " are ", " was ", ": ")
CONCLUDING = tuple(f" {word}{sign} " for word in ("so", "thus", "hence", "therefore", "finally") for sign in ("", ","))
VERBS = "get gets got give gives make makes yield yields obtain have has equals find leaves pays costs takes needs"
VERBS = tuple(f" {verb} " for verb in VERBS.split())
VERBS += (" must be ", " will be ", " comes to ", " amounts to ", " adds up to ", " turns out to be ", " left with ")
EQUALS = ("=", "≈")
CLOSING_PHRASES = (" is the answer", " is the final answer", " is the result")
TRAILING_PHRASES = (" in total", " in all", " altogether", " overall", " left", " remain", " of them")  # after a number
SENTENCE_ENDS, CLAUSE_ENDS = (". ", "; ", "! "), (", ", " so ", " but ", " then ")
QUALIFIERS = {"approximately", "about", "approx", "roughly", "exactly", "just", "only", "in", "on", "at"}
DENIALS = {"not", "never", "neither", "nor", "cannot", "no", "isn't", "aren't", "wasn't", "don't", "doesn't", "can't"}
UNCLAIMED = DENIALS | {"didn't", "won't", "nobody", "false", "wrong", "incorrect", "hardly", "rarely", "doubt", "fails"}
UNCLAIMED |= {"let", "suppose", "supposing", "assume", "assuming", "unless"}
CONTRACTIONS = {"it's": "it is", "it\u2019s": "it is", "that's": "that is", "that\u2019s": "that is"}


class FoundAnswer(NamedTuple):
    """An answer and where it was found."""

    text: str
    source: str  # "tag", "box", "marker" or "last line"


def find_answer(output: str) -> FoundAnswer:
    """Extract the final answer of an output; its text is empty if there is none."""
    text = unicodedata.normalize("NFC", drop_invisible(output[-MAX_TAIL:]))
    text = text[_after_last(text.translate(ASCII_LOWER), THINKING_ENDS) :]
    tag = _find_tag(text)
    if tag is not None:
        return FoundAnswer((_find_box(tag.text) or tag).text.strip(), "tag")
    text = drop_emphasis(text)
    return _find_box(text) or _find_marker(text) or FoundAnswer(_last_line(text), "last line")


def readings(answer: FoundAnswer) -> tuple[str, ...]:
    """Readings of an answer: the whole text, and the value that a sentence states last ("so we get 5", "it is 5").

    A sentence that hedges or asks is only read as a whole, so that naming two answers counts as naming none.
    """
    text = peel(drop_emphasis(answer.text[:MAX_PARSED]))
    if len(answer.text) > MAX_PARSED or hedges(text) or text.endswith("?"):
        return (text,) if len(answer.text) <= MAX_PARSED else ()
    sentence = " ".join(CONTRACTIONS.get(word.translate(ASCII_LOWER), word) for word in text.split(" "))
    sentence = _without_ending(sentence, CLOSING_PHRASES).partition(", not ")[0]
    starts = [_claim_start(sentence, marks) for marks in (STATING, CONCLUDING, VERBS)]
    spans = [text, sentence, *(sentence[start:] for start in starts if start)]
    if not _assigns_variable(sentence) and (start := _claim_start(sentence, EQUALS)):
        spans.append(sentence[start:])
    spans += [_without_ending(span, TRAILING_PHRASES) for span in spans if _has_digit(span)]
    spans += [span.partition(" ")[2] for span in spans if span.partition(" ")[0].lower() in QUALIFIERS]
    spans += [_correction(sentence), *(_explanation(span) for span in spans)]
    # within `$5!$` it is a factorial
    is_exclaimed = answer.source == "marker" and _is_exclamation(answer.text.rstrip(ENDINGS))
    spans += [span[:-1] for span in spans if _is_exclamation(span) and (is_exclaimed or span != text)]
    pieces = sentence[max(starts) :].split("$")
    if len(pieces) == 3 and not denies(sentence) and not set("=≈") & set(pieces[0] + pieces[2]):
        spans.append(pieces[1])
    return tuple(dict.fromkeys(peel(span) for span in spans if peel(span)))


def _correction(text: str) -> str:
    """The value after `but` in `not 41 but 42`; "" if no value is denied."""
    head, conjunction, correction = text.rpartition(" but ")
    _, negation, value = f" {head}".rpartition(" not ")
    is_same_kind = _has_digit(value) == _has_digit(correction) and len(value.split()) == 1
    return correction if conjunction and negation and is_same_kind and not denies(correction) else ""


def _explanation(text: str) -> str:
    """Rewrite `18 (dollars)` as `18 dollars`, and `3/4 (0.75)`, a number given twice, as `3/4`; else ""."""
    value, bracket, inside = text.rpartition(" (")
    if not bracket or not inside.endswith(")") or not _has_digit(value):
        return ""
    inside = inside[:-1]
    number, repeated = read_plain(value), read_plain(inside)
    if number is not None and repeated is not None:
        return value if number.value == repeated.value else ""
    return f"{value} {inside}" if all(word.isalpha() for word in inside.split()) else ""


def _is_exclamation(text: str) -> bool:
    """Whether a text ends with one `!`; after a number it may also be a factorial."""
    return text.endswith("!") and not text.endswith("!!")


def _claim_start(text: str, phrases: Sequence[str]) -> int:
    """Index of the value after the last of these phrases; 0 if it is denied, supposed or stated twice."""
    lower = f" {text.translate(ASCII_LOWER)}"
    index, phrase = max((lower.rfind(phrase), phrase) for phrase in phrases)
    end = index + len(phrase) - 1
    if (
        index < 0
        or (phrases is VERBS and not _has_digit(text[end:]))
        or lower[:index].endswith((" to", "!", "<", ">", "~"))
    ):
        return 0
    head = lower[:index]
    sentence = head[_after_last(head, SENTENCE_ENDS) :]
    clause = sentence[_after_last(sentence, CLAUSE_ENDS) :]
    words = _tokens(clause)
    # "The one that is not prime is 9" states 9; "it is not true that x is 9" doesn't.
    governing = words if phrases is not STATING else words[: words.index("that")] if "that" in words else words[:1]
    if set(governing) & UNCLAIMED or (phrases is not STATING and "if" in governing):
        return 0
    # A subject with two values: "it is 5 and it is 6", but not "y = 2, so x + y = 5", and not "it is not 5, it is 6",
    # which states one.
    *preceding, subject = clause.split() or [""]
    context = (sentence if phrases is VERBS else head).replace("=", " = ").split()
    _, *values = f" {' '.join(context)} ".split(f" {subject} {phrase.strip()} ")
    is_restated = any(value.split()[:1] != ["not"] for value in values)
    return 0 if is_restated and all(word.isalpha() for word in preceding[-1:]) else end


def _without_ending(text: str, endings: Sequence[str]) -> str:
    """Remove the first of these endings that a text has."""
    ending = next((ending for ending in endings if text.translate(ASCII_LOWER).endswith(ending)), "")
    return text[: len(text) - len(ending)]


def _has_digit(text: str) -> bool:
    return any(char.isdigit() for char in text)


def _assigns_variable(text: str) -> bool:
    """Whether a text assigns a variable (`x = 5`), which the rules parse themselves."""
    return len(text.partition("=")[0].strip()) == 1 and text.count("=") == 1


def _tokens(text: str) -> list[str]:
    return "".join(
        char if char.isalnum() or char == "'" else " " for char in text.lower().replace("\u2019", "'")
    ).split()


def hedges(text: str) -> bool:
    """Whether a text expresses doubt."""
    return bool(set(_tokens(text)) & HEDGES)


def denies(text: str) -> bool:
    """Whether a text denies something."""
    return bool(set(_tokens(text)) & DENIALS)


def _after_last(lower: str, marks: tuple[str, ...]) -> int:
    """Index after the last occurrence of any of these marks; 0 if there is none."""
    return max((lower.rfind(mark) + len(mark) for mark in marks if mark in lower), default=0)


def _find_tag(text: str) -> FoundAnswer | None:
    lower = text.translate(ASCII_LOWER)
    end = lower.rfind("</answer>")
    start = lower.rfind("<answer>", 0, end) if end >= 0 else -1
    return FoundAnswer(text[start + len("<answer>") : end], "tag") if start >= 0 else None


def _find_box(text: str) -> FoundAnswer | None:
    """Contents of the boxes on the last line that has one."""
    closing = _closing_braces(text)
    boxes: list[tuple[int, int]] = []
    for name in ("\\boxed{", "\\fbox{"):
        index = text.find(name)
        while index >= 0:
            brace = index + len(name) - 1
            if brace in closing:
                boxes.append((brace + 1, closing[brace]))
            index = text.find(name, brace)
    boxes.sort()
    outer = [box for i, box in enumerate(boxes) if box[0] > max((end for _, end in boxes[:i]), default=-1)]
    if not outer:
        return None
    line = text.rfind("\n", 0, outer[-1][0])
    return FoundAnswer(", ".join(text[start:end].strip() for start, end in outer if start > line), "box")


def _closing_braces(text: str) -> dict[int, int]:
    """Index of the closing brace of each opening brace that is closed."""
    closing: dict[int, int] = {}
    open_braces: list[int] = []
    skip = False
    for index, char in enumerate(text):
        if skip:
            skip = False
        elif char == "\\":
            skip = True
        elif char == "{":
            open_braces.append(index)
        elif char == "}" and open_braces:
            closing[open_braces.pop()] = index
    return closing


def _find_marker(text: str) -> FoundAnswer | None:
    """The line after the last `####`, else after the last of `LEAD_WORDS` that a link word follows (`answer is`)."""
    lower = text.translate(ASCII_LOWER)
    hashes = lower.rfind("####")
    if hashes >= 0 and text[hashes + 4 :].strip():
        return FoundAnswer(_first_line(text[hashes + 4 :]), "marker")
    best = -1
    for lead in LEAD_WORDS:
        index = lower.rfind(lead)
        while index >= 0:
            start = _after_link(lower, index + len(lead))
            if start >= 0 and text[start:].strip():
                best = max(best, start)
                break
            index = lower.rfind(lead, 0, index)
    if best < 0:
        return None
    return FoundAnswer(_table_cells(text, best) or _without_closing(text, best, _first_line(text[best:])), "marker")


def _without_closing(text: str, index: int, line: str) -> str:
    """Remove what closes a formula or a brace opened before the marker: `\\textbf{Answer: 18}`, `$x: 18$`."""
    prefix = text[text.rfind("\n", 0, index) + 1 : index]
    if line.startswith("}") and prefix.count("{") > prefix.count("}"):
        line, prefix = line[1:].lstrip(), prefix + "}"
    for opening, closing in (("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("{", "}"), ("$", "$")):
        end = line.rstrip(ENDINGS)
        is_opened = prefix.count(opening) % 2 if opening == closing else prefix.count(opening) > prefix.count(closing)
        is_closed = line.count(closing) % 2 if opening == closing else line.count(closing) > line.count(opening)
        if is_opened and is_closed and end.endswith(closing):
            line = end[: -len(closing)]
    return line


def _after_link(lower: str, index: int) -> int:
    """Index after a link (`:`, `is`, the border of a cell) that begins at `index`; -1 if there is none."""
    start = index + (lower[index : index + 1] == "s")
    following = lower[start : start + 40].lstrip(" *")
    links = (*LINK_WORDS, "|") if _is_in_table(lower, index) else LINK_WORDS
    link = next((link for link in links if following.startswith(link)), None)
    if link is None or (link.isalpha() and following[len(link) : len(link) + 1].isalnum()):
        return -1
    end = lower.index(link, start) + len(link)
    while lower[end : end + 1] in ("*", " ", ":") and end < len(lower):
        end += 1
    return end


def _is_in_table(text: str, index: int) -> bool:
    """Whether an index is inside a row of a Markdown table."""
    return text[text.rfind("\n", 0, index) + 1 : index].lstrip(" ").startswith("|")


def _table_cells(text: str, index: int) -> str:
    """Cells of a table row from `index` on; "" if it is in no table."""
    line = text[index:].partition("\n")[0].strip()
    return line.strip("| ") if line.endswith("|") and _is_in_table(text, index) else ""


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0].strip()


def _last_line(text: str) -> str:
    """Last line, without the mark of a heading or a list item."""
    line = text.strip().rpartition("\n")[2].strip()
    bullet, space, text_after = line.partition(" ")
    return text_after.strip() if space and (bullet in ("*", "•") or not bullet.strip("#")) else line
