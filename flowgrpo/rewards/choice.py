"""Multiple choice: which letters a text names, in the many ways in which people name them.

    "B"  "(b)"  "B)"  "b. photosynthesis"  "option B"  "The answer is B."  "photosynthesis" (an option)

The options of a task are `metadata["options"]` or `metadata["choices"]` (texts in order, or a mapping from letters),
or else what its query lists as `A) ... B) ...`. Naming two letters is not naming one of them, and `not B` names none.
"""

from collections.abc import Mapping, Sequence

from flowgrpo.contracts import Scored
from flowgrpo.rewards.answer import RIGHT, Rule, verdict
from flowgrpo.rewards.final import DENIALS
from flowgrpo.rewards.spelling import bare, plain
from flowgrpo.types import BadInput, Task

LETTERS = "ABCDEFGHIJ"
CALLED = {"option", "options", "choice", "choices", "answer", "letter", "alternative", "is", "are", "pick", "choose"}
AFTER_A = {"is", "and", "or", "because", "since", "as", "only", "nor"}  # what tells the letter A from the article
REFUSALS = DENIALS | {"but", "except", "wrong", "incorrect", "false"}
QUERY_MOST = 4000  # characters of a query in which options are looked for


def options_of(task: Task) -> dict[str, str]:
    """The options by letter; empty where a task lists none."""
    listed = task.metadata.get("options", task.metadata.get("choices"))
    if listed is None:
        return _options_in(task.query[:QUERY_MOST])
    if isinstance(listed, Mapping):
        return {str(letter).strip("(). ").upper(): str(text) for letter, text in listed.items()}
    if isinstance(listed, Sequence) and not isinstance(listed, str) and len(listed) <= len(LETTERS):
        return {letter: str(text) for letter, text in zip(LETTERS, listed, strict=False)}
    raise BadInput(
        f"task {task.id!r}: its options must be a list of at most {len(LETTERS)} texts or a mapping from letters"
    )


def _options_in(query: str) -> dict[str, str]:
    """The options of a query that lists them as `A) ... B) ...`, `(A) ...`, `A. ...` or `A: ...`."""
    starts: list[tuple[int, int]] = []
    for letter in LETTERS:
        found = _label_at(query, letter, starts[-1][1] if starts else 0)
        if found is None:
            break
        starts.append(found)
    if len(starts) < 2:
        return {}
    ends = [start for start, _ in starts[1:]] + [len(query)]
    return {
        letter: query[after:end].strip(" \n\t,;")
        for letter, (_, after), end in zip(LETTERS, starts, ends, strict=False)
    }


def _label_at(query: str, letter: str, start: int) -> tuple[int, int] | None:
    """Find an option's label from `start` on -> (start of the label, start of the text); None where there is none."""
    for at in range(start, len(query) - 2):
        opened = at > 0 and query[at - 1] == "("
        before = query[at - 1 - opened] if at - opened > 0 else " "
        if query[at] == letter and query[at + 1] in ").:" and query[at + 2] == " " and not before.isalnum():
            return at - opened, at + 3
    return None


def choice(task: Task, gold: str, answer: str) -> Scored | None:
    """Compare the letters that gold and answer name, as such or by an option's text; None where one mentions none."""
    options = options_of(task)
    wanted = _wanted(plain(gold), options)
    if not wanted:
        return None
    text = plain(answer)
    by_text = {bare(plain(option)): letter for letter, option in options.items()}
    if bare(text) in by_text and len(text) > 1:
        return verdict(wanted == {by_text[bare(text)]})
    letter, rest = labelled(text)
    if letter and rest:
        meant = by_text.get(bare(rest), letter)
        return verdict(wanted == {letter} == {meant} and not _several(rest))
    named = named_letters(text)
    if named is None:
        return _as_gold_text(gold, text)
    return verdict(named == wanted)


def _as_gold_text(gold: str, text: str) -> Scored | None:
    """Right where gold is `B. photosynthesis` and the answer its text; else there is nothing to say."""
    rest = labelled(plain(gold))[1]
    return RIGHT if rest and bare(rest) == bare(text) else None


def _wanted(gold: str, options: Mapping[str, str]) -> set[str]:
    """The letters of a gold answer: a label, a label with its text, several labels, or the text of an option."""
    letter, rest = labelled(gold)
    if letter and (rest or not options or letter in options):
        return {letter}
    marks = gold.replace(" and ", ",").replace(";", ",").replace("&", ",").split(",")
    several = {labelled(mark.strip())[0] for mark in marks if labelled(mark.strip())[1] == ""}
    if len(marks) > 1 and len(several) == len(marks) and "" not in several:
        return several
    return {letter for letter, text in options.items() if bare(plain(text)) == bare(gold)}


def labelled(text: str) -> tuple[str, str]:
    """The letter at the beginning of a plain text that serves as a label, and the text after it."""
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


def named_letters(text: str) -> set[str] | None:
    """The letters that a plain sentence names and does not deny; None where it names none at all."""
    marks = text.replace("/", " or ").replace(",", " , ").replace("&", " and ").split()
    words = [mark.strip("()[]{}*.:;!?,\"'") for mark in marks]
    named: set[str] = set()
    denied = False
    for place, word in enumerate(words):
        if not _is_letter(words, marks, place):
            continue
        refused = any(before.lower() in REFUSALS for before in words[max(place - 3, 0) : place])
        refused |= words[place + 1 : place + 2] == ["is"] and words[place + 2 : place + 3][:1] in (
            [w] for w in REFUSALS
        )
        denied |= refused
        named |= set() if refused else {word.upper()}
    doubts = {word.lower() for word in words} & {"or", "nor", "neither", "either"}
    if denied and doubts:
        return set()
    return named if named or denied else None


def _is_letter(words: list[str], marks: list[str], place: int) -> bool:
    """Whether a word is the letter of an option, and neither an article nor a pronoun."""
    word, mark = words[place], marks[place]
    if len(word) != 1 or word.upper() not in LETTERS:
        return False
    if "(" + word + ")" in mark or len(words) == 1 or (place and words[place - 1].lower() in CALLED - {"is", "are"}):
        return True
    following = words[place + 1] if place + 1 < len(words) else ""
    if word in "AI" and len(following) > 1 and following.isalpha() and following.lower() not in AFTER_A:
        return False
    return word.isupper() and not (word == "I" and following in AFTER_A)


def _several(rest: str) -> bool:
    """Whether the text after a label names another letter."""
    named = named_letters(rest)
    return bool(named) and any(word in rest.split() for word in ("or", "and", "or,"))


def whole_where_named(answers: Sequence[str]) -> Sequence[str]:
    """The whole answer alone where it names letters: the end of `B is better than A` names another."""
    return answers if named_letters(plain(answers[0])) is None else answers[:1]


CHOICE = Rule("choice", choice, whole_where_named)
