"""K-12 answers: `school` is the matcher with the rules of a school, in the order in which they are asked.

    exact, choice, truth, time, date, ratio, numeric, quantity, list, text

The gold answer decides which rule speaks: a letter is a choice, `5 km` a quantity, `1, 2, 3` a list, and what is
nothing else is text. Each rule is a function of its own, so that `match_answers` takes any of them, and others beside
them.

Letters are read as people name them: "(b)", "b. photosynthesis", "The answer is B.", or the text of an option. The
options of a task are `metadata["options"]` or `metadata["choices"]` (texts in order, or a mapping from letters; labels
such as `A. red` are taken off), or else what its query lists as `A) ... B) ...`. Naming two letters is not naming one,
not even as `B. Actually C.`, and `not B` names none.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction

from flowgrpo.contracts import Reward, Scored
from flowgrpo.rewards.answers.dates import DATE, TIME
from flowgrpo.rewards.answers.extract import DENIALS
from flowgrpo.rewards.answers.match import (
    EXACT,
    NUMERIC,
    RIGHT,
    TEXT,
    Rule,
    judge_by_rules,
    match_answers,
    numeric_rule,
    verdict,
)
from flowgrpo.rewards.answers.numbers import Close, read_plain, rounded
from flowgrpo.rewards.answers.spelling import LETTERS, bare, labelled, plain_text, words
from flowgrpo.rewards.answers.units import QUANTITY
from flowgrpo.types import BadInput, Task

CALLED = {"option", "options", "choice", "choices", "answer", "letter", "alternative", "is", "are", "pick", "choose"}
AFTER_A = {"is", "and", "or", "because", "since", "as", "only", "nor"}  # what tells the letter A from the article
REFUSALS = DENIALS | {"but", "except", "wrong", "incorrect", "false"}
REASONS = (" because ", " since ", " as ", " whereas ", " while ")
SWITCHES = CALLED | {"or", "and", "actually", "no", "wait", "rather", "maybe", "perhaps", "sorry", "also", "be", "its"}
SWITCHES |= {"it's", "to", "mean", "meant", "but", "then", "possibly", "instead", "was", "were", "not"}
QUERY_MOST = 4000  # characters of a query in which options are looked for
TRUE, FALSE = {"true", "yes", "correct", "right", "t", "y"}, {"false", "no", "incorrect", "wrong", "untrue", "f", "n"}
ORDERED = ("in order", "ascending", "descending", "least to greatest", "greatest to least", "sequence", "ordered pair")
ORDERED += ("smallest to largest", "largest to smallest", "next", "chronological", "coordinates")
PARTS = 20  # of a list; longer ones are compared word by word
OPENED, CLOSED = "([{", ")]}"


# Multiple choice ----------------------------------------------------------------------------------------


def options_of(task: Task) -> dict[str, str]:
    """Find the options of a task by letter; empty where a task lists none."""
    listed = task.metadata.get("options", task.metadata.get("choices"))
    if listed is None:
        return _options_in(task.query[:QUERY_MOST])
    if isinstance(listed, Mapping):
        return _unlabelled({str(letter).strip("(). ").upper(): str(text) for letter, text in listed.items()})
    if isinstance(listed, Sequence) and not isinstance(listed, str) and len(listed) <= len(LETTERS):
        return _unlabelled({letter: str(text) for letter, text in zip(LETTERS, listed, strict=False)})
    wanted = f"a list of at most {len(LETTERS)} texts or a mapping from letters"
    raise BadInput(f"task {task.id!r}: its options must be {wanted}")


def _unlabelled(options: dict[str, str]) -> dict[str, str]:
    """Take the labels off texts such as `A. red`, where each carries its own letter."""
    texts = {letter: labelled(plain_text(text)) for letter, text in options.items()}
    if any(label != letter or not rest for letter, (label, rest) in texts.items()):
        return options
    return {letter: rest for letter, (_, rest) in texts.items()}


def _options_in(query: str) -> dict[str, str]:
    """Find the options of a query that lists them as `A) ... B) ...`, `(A) ...`, `A. ...` or `A: ...`."""
    starts: list[tuple[int, int]] = []
    for letter in LETTERS:
        found = _label_at(query, letter, starts[-1][1] if starts else 0)
        if found is None:
            break
        starts.append(found)
    if len(starts) < 2:
        return {}
    ends = [start for start, _ in starts[1:]] + [len(query)]
    texts = [query[after:end].strip(" \n\t,;") for (_, after), end in zip(starts, ends, strict=True)]
    if not any("\n" in text for text in texts[:-1]):
        texts[-1] = texts[-1].partition("\n")[0].strip()  # what follows the options is none of the last
    return dict(zip(LETTERS, texts, strict=False))


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
    wanted = _wanted(plain_text(gold), options)
    if not wanted:
        return None
    text = plain_text(answer)
    by_text = {_key(plain_text(option)): letter for letter, option in options.items()}
    letter, rest = labelled(text)  # before articles are dropped, of which `A. red` would lose its letter
    whole = not (letter and rest) or text in options.values()
    if whole and _key(text) in by_text and len(text) > 1:
        return verdict(wanted == {by_text[_key(text)]})
    if letter and rest:
        option = options.get(letter, labelled(plain_text(gold))[1] if wanted == {letter} else "")
        meant = by_text.get(_key(rest), letter)
        return verdict(wanted == {letter} == {meant} and not _contradicts(plain_text(option), rest, letter))
    named = named_letters(text)
    if named is not None:
        return verdict(named == wanted)
    rest = labelled(plain_text(gold))[1]  # where gold is `B. photosynthesis`, its text will do
    return RIGHT if rest and bare(rest) == bare(text) else None


def _contradicts(option: str, rest: str, letter: str) -> bool:
    """Say whether what follows a letter is another number than its option's, or names another letter.

    A letter that a noun precedes (`Vitamin A`), that is denied, or that a reason mentions is not named.
    """
    number, other = read_plain(option), read_plain(rest)
    if number is not None and other is not None and number.value != other.value:
        return True
    if option and rest.lower().startswith(option.lower()):
        rest = rest[len(option) :]
    for reason in REASONS:
        rest = rest.partition(reason)[0]
    marks = rest.replace(",", " , ").replace("/", " / ").replace(";", " ; ").split()
    words = [mark.strip("()[]{}*.:;,/!?\"'") for mark in marks]
    refused_at = -9
    for place, word in enumerate(words):
        label = marks[place].lstrip("([*")[1:2] in tuple(")]:.") and place + 1 < len(words)
        if word not in tuple(LETTERS) or not (label or _is_letter(words, marks, place)):
            continue
        before, earlier = marks[place - 1] if place else ".", words[max(place - 3, 0) : place]
        joined = refused_at >= place - 3 and words[place - 1].lower() in ("or", "nor", "and", "")
        if joined or any(denial.lower() in REFUSALS - {"no", "but"} for denial in earlier):
            refused_at = place
            continue
        named = label or before[-1] in ",;.:!?/(-" or words[place - 1].lower() in SWITCHES or "(" in marks[place]
        if word != letter and named and REFUSALS.isdisjoint(words[place + 1 : place + 3]):
            return True
    return False


def _wanted(gold: str, options: Mapping[str, str]) -> set[str]:
    """Read the letters of a gold answer: a label, a label with its text, several labels, or the text of an option."""
    letter, rest = labelled(gold)
    if letter and (rest or not options or letter in options):
        return {letter}
    marks = gold.replace(" and ", ",").replace(";", ",").replace("&", ",").split(",")
    several = {labelled(mark.strip())[0] for mark in marks if labelled(mark.strip())[1] == ""}
    if len(marks) > 1 and len(several) == len(marks) and "" not in several:
        return several
    return {letter for letter, text in options.items() if _key(plain_text(text)) == _key(gold)}


def _key(text: str) -> str:
    """Strip an option of what doesn't count; one of signs alone, such as `↑ ↓`, stays as it is."""
    return bare(text) or text


def named_letters(text: str) -> set[str] | None:
    """Read the letters that a plain sentence names and does not deny; None where it names none at all."""
    marks = text.replace("/", " or ").replace(",", " , ").replace("&", " and ").split()
    words = [mark.strip("()[]{}*.:;!?,\"'") for mark in marks]
    named: set[str] = set()
    denied = False
    for place, word in enumerate(words):
        if not _is_letter(words, marks, place):
            continue
        refused = any(
            before.lower() in REFUSALS and (before.lower() != "no" or marks[at + 1] != ",")  # "no, B" corrects
            for at, before in enumerate(words[:place])
            if at >= place - 3
        )
        refused |= words[place + 1 : place + 2] == ["is"] and not REFUSALS.isdisjoint(words[place + 2 : place + 3])
        denied |= refused
        named |= set() if refused else {word.upper()}
    doubts = {word.lower() for word in words} & {"or", "nor", "neither", "either"}
    if denied and doubts:
        return set()
    return named if named or denied else None


def _is_letter(words: list[str], marks: list[str], place: int) -> bool:
    """Say whether a word is the letter of an option, and neither an article nor a pronoun."""
    word, mark = words[place], marks[place]
    if len(word) != 1 or word.upper() not in LETTERS:
        return False
    if "(" + word + ")" in mark or len(words) == 1 or (place and words[place - 1].lower() in CALLED - {"is", "are"}):
        return True
    following = words[place + 1] if place + 1 < len(words) else ""
    if word in "AI" and len(following) > 1 and following.isalpha() and following.lower() not in AFTER_A:
        return False
    return word.isupper() and not (word == "I" and following in AFTER_A)


def whole_where_named(answers: Sequence[str]) -> Sequence[str]:
    """Read the whole answer alone where it names letters: the end of `B is better than A` names another."""
    return answers if named_letters(plain_text(answers[0])) is None else answers[:1]


# Truth and ratios ---------------------------------------------------------------------------------------


def read_truth(text: str) -> bool | None:
    """Say whether a plain text says yes or no; None where it says neither, or both."""
    found = words(text)
    if not found:
        return None
    first, rest = found[0].strip(".:"), found[1:]
    if first in DENIALS and first not in FALSE and rest and rest[0] in TRUE | FALSE:
        return rest[0] in FALSE
    if (first not in TRUE | FALSE) or (len(first) == 1 and rest):
        return None
    opposite = FALSE if first in TRUE else TRUE
    torn = len(rest) > 1 and rest[0] in ("and", "or", "but") and rest[1] in opposite
    stops = not rest or text[len(first) : len(first) + 1] in ",.;:!" or rest[0] in ("because", "since", "it")
    return first in TRUE if stops and not torn else None


def truth(task: Task, gold: str, answer: str) -> Scored | None:  # noqa: ARG001
    """Compare answers of yes or no, true or false; None where one is neither, or gold has more than one word."""
    wanted, given = read_truth(plain_text(gold)), read_truth(plain_text(answer))
    if wanted is None or len(words(plain_text(gold))) > 1 or given is None:
        return None
    return verdict(wanted == given)


def read_ratio(text: str) -> tuple[Fraction, ...] | None:
    """Read the terms of `3:4` or `3 to 4`, the first made one; None where the text is no ratio."""
    terms = text.replace(" to ", ":").split(":")
    numbers = [read_plain(term) for term in terms]
    if not 2 <= len(terms) <= 6 or any(number is None or number.value <= 0 for number in numbers):
        return None
    values = [number.value for number in numbers if number is not None]
    return tuple(value / values[0] for value in values)


def ratio(task: Task, gold: str, answer: str) -> Scored | None:  # noqa: ARG001
    """Compare proportional terms; a fraction stands for a ratio of two. None where gold is no ratio."""
    wanted, given = read_ratio(plain_text(gold)), read_ratio(plain_text(answer))
    if wanted is None:
        return None
    fraction = read_plain(plain_text(answer)) if given is None else None
    if fraction is not None and fraction.value > 0:
        given = (Fraction(1), 1 / fraction.value)
    return None if given is None else verdict(wanted == given)


# Lists --------------------------------------------------------------------------------------------------


def split_list(text: str) -> tuple[str, list[str]]:
    """Take a list apart -> the brackets around it (`()`), its parts; one part where a text is no list."""
    kind = ""
    if len(text) > 2 and text[0] in OPENED and text[-1] in CLOSED and _one_pair(text):
        kind, text = text[0] + text[-1], text[1:-1]
    for sign in ("<", ">", "→", "->", ";"):
        if sign in text:
            return kind or (sign if sign != ";" else ""), _cut(text, sign)
    text = text.replace(", and ", ", ").replace(" and ", ", ").replace(" & ", ", ")
    return kind, _cut(text, ", " if ", " in text else ",")


def other_brackets(kind: str, other: str, parts: int) -> bool:
    """Say whether brackets mean different things: a point or an open interval, a closed one, a set of two."""
    differ = bool(kind and other) and kind != other
    return differ and bool({kind, other} & {"()", "(]", "[)"} or ({kind, other} == {"[]", "{}"} and parts == 2))


def _one_pair(text: str) -> bool:
    """Say whether the bracket that opens the text is closed by its last character."""
    depth = 0
    for at, mark in enumerate(text):
        depth += (mark in OPENED) - (mark in CLOSED)
        if depth == 0:
            return at == len(text) - 1
    return False


def _cut(text: str, sign: str) -> list[str]:
    """Cut a text at a sign, but not within brackets."""
    parts, depth, start, at = [], 0, 0, 0
    while at < len(text):
        depth += (text[at] in OPENED) - (text[at] in CLOSED)
        if depth <= 0 and text.startswith(sign, at):
            parts.append(text[start:at].strip())
            start = at + len(sign)
            at = start
            continue
        at += 1
    return [*parts, text[start:].strip()]


def same_list(task: Task, gold: str, answer: str, *, rules: Sequence[Rule]) -> Scored | None:
    """Compare two lists part by part, each by the given rules.

    Order counts where gold is a pair `(1, 2)`, where either is a chain `1 < 2`, or where the question asks for it. None
    where gold is no list or a part can't be judged; wrong where brackets differ in what they may mean, as `(1, 2)` and
    `[1, 2]` do.
    """
    spelled = plain_text(gold)
    kind, wanted = split_list(spelled)
    given_kind, given = split_list(
        plain_text(answer).replace(" or ", ", ") if " or " in spelled else plain_text(answer)
    )
    wanted = [part for whole in wanted for part in whole.split(" or ")]
    if len(wanted) < 2 or not all(wanted):
        return None
    chains = [sign for sign in (kind, given_kind) if sign in ("<", ">", "→", "->")]
    if len(wanted) != len(given) or other_brackets(kind, given_kind, len(wanted)) or len(set(chains)) > 1:
        return verdict(False)
    asked, declared = any(phrase in task.query.lower() for phrase in ORDERED), task.metadata.get("ordered")
    in_order = bool(chains) or kind == "()" or bool(asked if declared is None else declared)
    if len(wanted) > PARTS:
        sides = [[bare(part) for part in side] for side in (wanted, given)]
        return verdict(sides[0] == sides[1] if in_order else Counter(sides[0]) == Counter(sides[1]))
    return _matched(task, wanted, given, rules, in_order)


def _matched(task: Task, wanted: list[str], given: list[str], rules: Sequence[Rule], in_order: bool) -> Scored | None:
    """Say right where every part of gold has one of the answer; None where a part could not be judged."""
    left = list(range(len(given)))
    unknown = False
    for place, part in enumerate(wanted):
        for other in [place] if in_order else left:
            name, said = judge_by_rules(rules, task, part, (given[other],))
            unknown |= name == "no rule"
            if said.value:
                left.remove(other)
                break
        else:
            return None if unknown else verdict(False)
    return verdict(True)


def list_rule(rules: Sequence[Rule]) -> Rule:
    """Make the rule of lists whose parts are the same by one of the rules."""
    return Rule("list", lambda task, gold, answer: same_list(task, gold, answer, rules=rules))


# The rules ----------------------------------------------------------------------------------------------

TRUTH, RATIO = Rule("truth", truth), Rule("ratio", ratio)
CHOICE = Rule("choice", choice, whole_where_named)
ELEMENTS = (EXACT, TRUTH, DATE, RATIO, NUMERIC, QUANTITY, TEXT)


def school(*, close: Close = rounded) -> Reward:
    """Give 1 where the final answer of an output is a gold answer by the rules of a school, else 0.

    `close` says when two numbers are the same.
    """
    elements = list_rule(ELEMENTS)
    return match_answers((EXACT, CHOICE, TRUTH, TIME, DATE, RATIO, numeric_rule(close), QUANTITY, elements, TEXT))
