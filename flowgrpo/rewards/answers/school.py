"""K-12 answers: `school` is the matcher with the rules of school answers, tried in this order:

    exact, choice, truth, time, date, ratio, numeric, quantity, list, text

The gold answer decides which rule applies: a letter is a choice, `5 km` a quantity, `1, 2, 3` a list, and everything
else text. Each rule is a separate object, so `match_answers` takes any selection of them, and others.

Letters are read as people write them: "(b)", "b. photosynthesis", "The answer is B.", or the text of an option. The
options of a task are `metadata["options"]` or `metadata["choices"]` (texts in order, or a mapping from letters; labels
such as `A. red` are removed), or else those that its query lists as `A) ... B) ...`. Two letters count as none, also in
`B. Actually C.`, and `not B` names none.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction

from flowgrpo.contracts import Reward, RewardResult
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
    right_if,
)
from flowgrpo.rewards.answers.numbers import Close, read_plain, rounded
from flowgrpo.rewards.answers.spelling import LETTERS, bare, plain_text, split_label, words
from flowgrpo.rewards.answers.units import QUANTITY
from flowgrpo.types import BadInput, Task

LETTER_CUES = {"option", "options", "choice", "choices", "answer", "letter", "alternative"}
LETTER_CUES |= {"is", "are", "pick", "choose"}
AFTER_LETTER_A = {"is", "and", "or", "because", "since", "as", "only", "nor"}  # unlike after the article
REFUSALS = DENIALS | {"but", "except", "wrong", "incorrect", "false"}
REASON_WORDS = (" because ", " since ", " as ", " whereas ", " while ")
SWITCH_WORDS = LETTER_CUES | {"or", "and", "actually", "no", "wait", "rather", "maybe", "perhaps", "sorry", "also"}
SWITCH_WORDS |= {"be", "its", "it's", "to", "mean", "meant", "but", "then", "possibly", "instead", "was", "were", "not"}
MAX_QUERY = 4000  # characters of a query that are searched for options
TRUE, FALSE = {"true", "yes", "correct", "right", "t", "y"}, {"false", "no", "incorrect", "wrong", "untrue", "f", "n"}
ORDER_PHRASES = ("in order", "ascending", "descending", "least to greatest", "greatest to least", "sequence")
ORDER_PHRASES += ("ordered pair", "smallest to largest", "largest to smallest", "next", "chronological", "coordinates")
MAX_JUDGED_PARTS = 20  # of a list; longer lists are compared as texts
OPENING, CLOSING = "([{", ")]}"


# Multiple choice ----------------------------------------------------------------------------------------


def options_of(task: Task) -> dict[str, str]:
    """Options of a task by letter; empty if it lists none."""
    listed = task.metadata.get("options", task.metadata.get("choices"))
    if listed is None:
        return _options_of_query(task.query[:MAX_QUERY])
    if isinstance(listed, Mapping):
        return _without_labels({str(letter).strip("(). ").upper(): str(text) for letter, text in listed.items()})
    if isinstance(listed, Sequence) and not isinstance(listed, str) and len(listed) <= len(LETTERS):
        return _without_labels({letter: str(text) for letter, text in zip(LETTERS, listed, strict=False)})
    raise BadInput(
        f"task {task.id!r}: its options must be a list of at most {len(LETTERS)} texts or a mapping from letters"
    )


def _without_labels(options: dict[str, str]) -> dict[str, str]:
    """Remove the labels of texts such as `A. red`, if each has its own letter."""
    texts = {letter: split_label(plain_text(text)) for letter, text in options.items()}
    if any(label != letter or not text for letter, (label, text) in texts.items()):
        return options
    return {letter: text for letter, (_, text) in texts.items()}


def _options_of_query(query: str) -> dict[str, str]:
    """Options that a query lists as `A) ... B) ...`, `(A) ...`, `A. ...` or `A: ...`."""
    starts: list[tuple[int, int]] = []
    for letter in LETTERS:
        label = _find_label(query, letter, starts[-1][1] if starts else 0)
        if label is None:
            break
        starts.append(label)
    if len(starts) < 2:
        return {}
    ends = [start for start, _ in starts[1:]] + [len(query)]
    texts = [query[text_start:end].strip(" \n\t,;") for (_, text_start), end in zip(starts, ends, strict=True)]
    if not any("\n" in text for text in texts[:-1]):
        texts[-1] = texts[-1].partition("\n")[0].strip()  # what follows the options is not part of the last one
    return dict(zip(LETTERS, texts, strict=False))


def _find_label(query: str, letter: str, start: int) -> tuple[int, int] | None:
    """First label of an option from `start` on -> (start of the label, start of the text); None if there is none."""
    for i in range(start, len(query) - 2):
        in_bracket = i > 0 and query[i - 1] == "("
        previous = query[i - 1 - in_bracket] if i - in_bracket > 0 else " "
        if query[i] == letter and query[i + 1] in ").:" and query[i + 2] == " " and not previous.isalnum():
            return i - in_bracket, i + 3
    return None


def same_choice(task: Task, gold: str, answer: str) -> RewardResult | None:
    """Compare the letters that gold and answer name, directly or by an option's text; None if one names none."""
    options = options_of(task)
    gold_letters = _gold_letters(plain_text(gold), options)
    if not gold_letters:
        return None
    text = plain_text(answer)
    by_text = {_comparable(plain_text(option)): letter for letter, option in options.items()}
    letter, content = split_label(text)  # before articles are removed, which would remove the letter of `A. red`
    is_whole_option = not (letter and content) or text in options.values()
    if is_whole_option and _comparable(text) in by_text and len(text) > 1:
        return right_if(gold_letters == {by_text[_comparable(text)]})
    if letter and content:
        option = options.get(letter, split_label(plain_text(gold))[1] if gold_letters == {letter} else "")
        meant_letter = by_text.get(_comparable(content), letter)
        return right_if(
            gold_letters == {letter} == {meant_letter} and not _contradicts(plain_text(option), content, letter)
        )
    letters = named_letters(text)
    if letters is not None:
        return right_if(letters == gold_letters)
    content = split_label(plain_text(gold))[1]  # if gold is `B. photosynthesis`, its text suffices
    return RIGHT if content and bare(content) == bare(text) else None


def _contradicts(option: str, content: str, letter: str) -> bool:
    """Whether the text after a letter is another number than its option's, or names another letter.

    A letter after a noun (`Vitamin A`), a denied one, and one within a reason are not named.
    """
    number, other_number = read_plain(option), read_plain(content)
    if number is not None and other_number is not None and number.value != other_number.value:
        return True
    if option and content.lower().startswith(option.lower()):
        content = content[len(option) :]
    for reason in REASON_WORDS:
        content = content.partition(reason)[0]
    tokens = content.replace(",", " , ").replace("/", " / ").replace(";", " ; ").split()
    words = [token.strip("()[]{}*.:;,/!?\"'") for token in tokens]
    refused_index = -9
    for i, word in enumerate(words):
        is_label = tokens[i].lstrip("([*")[1:2] in tuple(")]:.") and i + 1 < len(words)
        if word not in tuple(LETTERS) or not (is_label or _is_letter(words, tokens, i)):
            continue
        previous, preceding = tokens[i - 1] if i else ".", words[max(i - 3, 0) : i]
        is_joined = refused_index >= i - 3 and words[i - 1].lower() in ("or", "nor", "and", "")
        if is_joined or any(denial.lower() in REFUSALS - {"no", "but"} for denial in preceding):
            refused_index = i
            continue
        is_named = is_label or previous[-1] in ",;.:!?/(-" or words[i - 1].lower() in SWITCH_WORDS or "(" in tokens[i]
        if word != letter and is_named and REFUSALS.isdisjoint(words[i + 1 : i + 3]):
            return True
    return False


def _gold_letters(gold: str, options: Mapping[str, str]) -> set[str]:
    """Letters of a gold answer: a label, a label with its text, several labels, or the text of an option."""
    letter, content = split_label(gold)
    if letter and (content or not options or letter in options):
        return {letter}
    pieces = gold.replace(" and ", ",").replace(";", ",").replace("&", ",").split(",")
    letters = {split_label(piece.strip())[0] for piece in pieces if split_label(piece.strip())[1] == ""}
    if len(pieces) > 1 and len(letters) == len(pieces) and "" not in letters:
        return letters
    return {letter for letter, text in options.items() if _comparable(plain_text(text)) == _comparable(gold)}


def _comparable(text: str) -> str:
    """`bare` of an option; one of signs only, such as `↑ ↓`, stays as it is."""
    return bare(text) or text


def named_letters(text: str) -> set[str] | None:
    """Letters that a plain sentence names and does not deny; None if it names none at all."""
    tokens = text.replace("/", " or ").replace(",", " , ").replace("&", " and ").split()
    words = [token.strip("()[]{}*.:;!?,\"'") for token in tokens]
    letters: set[str] = set()
    is_denied = False
    for i, word in enumerate(words):
        if not _is_letter(words, tokens, i):
            continue
        is_refused = any(
            previous.lower() in REFUSALS and (previous.lower() != "no" or tokens[j + 1] != ",")  # "no, B" corrects
            for j, previous in enumerate(words[:i])
            if j >= i - 3
        )
        is_refused |= words[i + 1 : i + 2] == ["is"] and not REFUSALS.isdisjoint(words[i + 2 : i + 3])
        is_denied |= is_refused
        letters |= set() if is_refused else {word.upper()}
    doubts = {word.lower() for word in words} & {"or", "nor", "neither", "either"}
    if is_denied and doubts:
        return set()
    return letters if letters or is_denied else None


def _is_letter(words: list[str], tokens: list[str], i: int) -> bool:
    """Whether a word is the letter of an option, and neither an article nor a pronoun."""
    word, token = words[i], tokens[i]
    if len(word) != 1 or word.upper() not in LETTERS:
        return False
    if "(" + word + ")" in token or len(words) == 1 or (i and words[i - 1].lower() in LETTER_CUES - {"is", "are"}):
        return True
    following = words[i + 1] if i + 1 < len(words) else ""
    if word in "AI" and len(following) > 1 and following.isalpha() and following.lower() not in AFTER_LETTER_A:
        return False
    return word.isupper() and not (word == "I" and following in AFTER_LETTER_A)


def whole_if_letters_named(answers: Sequence[str]) -> Sequence[str]:
    """Only the whole answer if it names letters: the end of `B is better than A` names another."""
    return answers if named_letters(plain_text(answers[0])) is None else answers[:1]


# Truth and ratios ---------------------------------------------------------------------------------------


def read_truth(text: str) -> bool | None:
    """Whether a plain text says yes (True) or no (False); None if it says neither, or both."""
    tokens = words(text)
    if not tokens:
        return None
    first, following = tokens[0].strip(".:"), tokens[1:]
    if first in DENIALS and first not in FALSE and following and following[0] in TRUE | FALSE:
        return following[0] in FALSE
    if (first not in TRUE | FALSE) or (len(first) == 1 and following):
        return None
    opposite = FALSE if first in TRUE else TRUE
    is_torn = len(following) > 1 and following[0] in ("and", "or", "but") and following[1] in opposite
    is_complete = (
        not following or text[len(first) : len(first) + 1] in ",.;:!" or following[0] in ("because", "since", "it")
    )
    return first in TRUE if is_complete and not is_torn else None


def same_truth(task: Task, gold: str, answer: str) -> RewardResult | None:  # noqa: ARG001
    """Compare answers of yes or no, true or false; None if one is neither, or gold has more than one word."""
    gold_truth, answer_truth = read_truth(plain_text(gold)), read_truth(plain_text(answer))
    if gold_truth is None or len(words(plain_text(gold))) > 1 or answer_truth is None:
        return None
    return right_if(gold_truth == answer_truth)


def read_ratio(text: str) -> tuple[Fraction, ...] | None:
    """Parse `3:4` or `3 to 4` -> the terms, divided by the first; None if the text is no ratio."""
    terms = text.replace(" to ", ":").split(":")
    numbers = [read_plain(term) for term in terms]
    if not 2 <= len(terms) <= 6 or any(number is None or number.value <= 0 for number in numbers):
        return None
    values = [number.value for number in numbers if number is not None]
    return tuple(value / values[0] for value in values)


def same_ratio(task: Task, gold: str, answer: str) -> RewardResult | None:  # noqa: ARG001
    """Compare ratios; a fraction counts as a ratio of two terms. None if gold is no ratio."""
    gold_ratio, answer_ratio = read_ratio(plain_text(gold)), read_ratio(plain_text(answer))
    if gold_ratio is None:
        return None
    fraction = read_plain(plain_text(answer)) if answer_ratio is None else None
    if fraction is not None and fraction.value > 0:
        answer_ratio = (Fraction(1), 1 / fraction.value)
    return None if answer_ratio is None else right_if(gold_ratio == answer_ratio)


# Lists --------------------------------------------------------------------------------------------------


def split_list(text: str) -> tuple[str, list[str]]:
    """Split a list -> the brackets around it (`()`), its parts; a text that is no list is one part."""
    brackets = ""
    if len(text) > 2 and text[0] in OPENING and text[-1] in CLOSING and _is_one_pair(text):
        brackets, text = text[0] + text[-1], text[1:-1]
    for separator in ("<", ">", "→", "->", ";"):
        if separator in text:
            return brackets or (separator if separator != ";" else ""), _split_outside_brackets(text, separator)
    text = text.replace(", and ", ", ").replace(" and ", ", ").replace(" & ", ", ")
    return brackets, _split_outside_brackets(text, ", " if ", " in text else ",")


def brackets_differ(gold_brackets: str, answer_brackets: str, parts: int) -> bool:
    """Whether brackets mean different things: a point or an open interval, a closed one, a set of two."""
    if not gold_brackets or not answer_brackets or gold_brackets == answer_brackets:
        return False
    both = {gold_brackets, answer_brackets}
    return bool(both & {"()", "(]", "[)"}) or (both == {"[]", "{}"} and parts == 2)


def _is_one_pair(text: str) -> bool:
    """Whether the bracket that opens the text is closed by its last character."""
    depth = 0
    for i, char in enumerate(text):
        depth += (char in OPENING) - (char in CLOSING)
        if depth == 0:
            return i == len(text) - 1
    return False


def _split_outside_brackets(text: str, separator: str) -> list[str]:
    """Split a text at a separator, but not within brackets."""
    parts, depth, start, i = [], 0, 0, 0
    while i < len(text):
        depth += (text[i] in OPENING) - (text[i] in CLOSING)
        if depth <= 0 and text.startswith(separator, i):
            parts.append(text[start:i].strip())
            start = i + len(separator)
            i = start
            continue
        i += 1
    return [*parts, text[start:].strip()]


def same_list(task: Task, gold: str, answer: str, *, rules: Sequence[Rule]) -> RewardResult | None:
    """Compare two lists part by part, each by `rules`.

    Order matters if gold is a pair `(1, 2)`, if either is a chain `1 < 2`, or if the question asks for it. None if gold
    is no list or a part can't be judged; wrong if the brackets mean different things, as in `(1, 2)` and `[1, 2]`.
    """
    gold_text = plain_text(gold)
    gold_brackets, gold_parts = split_list(gold_text)
    answer_brackets, answer_parts = split_list(
        plain_text(answer).replace(" or ", ", ") if " or " in gold_text else plain_text(answer)
    )
    gold_parts = [part for text in gold_parts for part in text.split(" or ")]
    if len(gold_parts) < 2 or not all(gold_parts):
        return None
    chains = [sign for sign in (gold_brackets, answer_brackets) if sign in ("<", ">", "→", "->")]
    if (
        len(gold_parts) != len(answer_parts)
        or brackets_differ(gold_brackets, answer_brackets, len(gold_parts))
        or len(set(chains)) > 1
    ):
        return right_if(False)
    is_asked, declared = any(phrase in task.query.lower() for phrase in ORDER_PHRASES), task.metadata.get("ordered")
    in_order = bool(chains) or gold_brackets == "()" or bool(is_asked if declared is None else declared)
    if len(gold_parts) > MAX_JUDGED_PARTS:
        sides = [[bare(part) for part in side] for side in (gold_parts, answer_parts)]
        return right_if(sides[0] == sides[1] if in_order else Counter(sides[0]) == Counter(sides[1]))
    return _parts_match(task, gold_parts, answer_parts, rules, in_order)


def _parts_match(
    task: Task, gold_parts: list[str], answer_parts: list[str], rules: Sequence[Rule], in_order: bool
) -> RewardResult | None:
    """Right if every part of gold matches a different part of the answer; None if a part could not be judged."""
    unmatched = list(range(len(answer_parts)))
    is_unknown = False
    for i, part in enumerate(gold_parts):
        for j in [i] if in_order else unmatched:
            name, result = judge_by_rules(rules, task, part, (answer_parts[j],))
            is_unknown |= name == "no rule"
            if result.value:
                unmatched.remove(j)
                break
        else:
            return None if is_unknown else right_if(False)
    return right_if(True)


def list_rule(rules: Sequence[Rule]) -> Rule:
    """Make the rule of lists whose parts are compared by `rules`."""
    return Rule("list", lambda task, gold, answer: same_list(task, gold, answer, rules=rules))


# The rules ----------------------------------------------------------------------------------------------

TRUTH, RATIO = Rule("truth", same_truth), Rule("ratio", same_ratio)
CHOICE = Rule("choice", same_choice, whole_if_letters_named)
ELEMENTS = (EXACT, TRUTH, DATE, RATIO, NUMERIC, QUANTITY, TEXT)


def school(*, close: Close = rounded) -> Reward:
    """Give 1 if the final answer of an output equals a gold answer by the rules of school answers, else 0.

    `close(gold, answer)` decides whether two numbers count as equal.
    """
    elements = list_rule(ELEMENTS)
    return match_answers((EXACT, CHOICE, TRUTH, TIME, DATE, RATIO, numeric_rule(close), QUANTITY, elements, TEXT))
