"""Cases of the race, and the words and prompts that all systems share; needs only the standard library.

Single turn: prompts of 32 random words -> 8 answers each -> fraction of digits among the words -> one step of AdamW, of
a float32 model. An answer has at most 64 words; one id in 512 ends it early. Three turns: a calculator answers the
first two, and each word ends its turn with probability 1/16; an episode then has 64 words on average, without the
prompt. Each system's file describes how it does that.
"""

import random
from typing import NamedTuple

# Words by number: special ones, the marks of a dialogue, ten digits, and others up to the vocabulary's end.
VOCABULARY = 512
PAD, END, TOOL, MODEL, EQUALS, DIGIT, OTHER = 0, 1, 2, 3, 4, 5, 15
OTHERS = (f"w{number}" for number in range(OTHER, VOCABULARY))
WORDS = ("<pad>", "<end>", "<tool>", "<model>", "=", *"0123456789", *OTHERS)

GROUP, PROMPTS, PROMPT = 8, 8, 32  # answers to a prompt, prompts of a step, words of a prompt
EPISODES = GROUP * PROMPTS  # of a step
ANSWER = 64  # most words of a single turn
RATE, CLIP = 1e-4, 1.0  # of AdamW, and the largest norm of its gradient


class Training(NamedTuple):
    """Steps of GRPO."""

    turns: int
    beta: float  # weight of the KL term; no reference if 0


class Decoding(NamedTuple):
    """Tokens after prompts of `PROMPT` words, in rows that all run to the end."""

    rows: int
    tokens: int


CASES: dict[str, Training | Decoding] = {
    "single": Training(1, 0.0),
    "single_kl": Training(1, 0.04),
    "three_turns": Training(3, 0.0),
    "decode_64x64": Decoding(64, 64),
    "decode_16x128": Decoding(16, 128),
}


def training(case: str) -> Training:
    """A training case by name."""
    training_case = CASES[case]
    assert isinstance(training_case, Training)
    return training_case


def decoding(case: str) -> Decoding:
    """A decoding case by name."""
    decoding_case = CASES[case]
    assert isinstance(decoding_case, Decoding)
    return decoding_case


def trains(case: str) -> bool:
    """Whether a case trains."""
    return isinstance(CASES[case], Training)


def random_ids(number: int, seed: int = 0) -> list[list[int]]:
    """Random prompts that end with the word that invites the model to answer."""
    rng = random.Random(seed)
    return [[*(rng.randrange(OTHER, VOCABULARY) for _ in range(PROMPT - 1)), MODEL] for _ in range(number)]


def spell(ids: list[int]) -> str:
    """Text of words, separated by spaces."""
    return " ".join(WORDS[word] for word in ids)


def fraction_of_digits(ids: list[int]) -> float:
    """Reward of an answer."""
    return sum(DIGIT <= word < OTHER for word in ids) / max(len(ids), 1)


def open_tokenizer():
    """A tokenizer of transformers that splits at spaces."""
    import tokenizers
    import transformers

    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token=WORDS[-1])
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    special = {"pad_token": WORDS[PAD], "eos_token": WORDS[END]}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, padding_side="left", **special)
