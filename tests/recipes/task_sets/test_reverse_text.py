"""Texts to reverse: their words, and the reward of their domain."""

from itertools import combinations

from flowgrpo.recipes.registry import DOMAINS, RewardContext
from flowgrpo.recipes.task_sets.reverse_text import COUNTS, REVERSE_TEXT, THEMES
from flowgrpo.recipes.task_sets.task_set import SPLITS


def test_a_text_has_words_of_its_theme_and_is_reversed():
    for task in [task for split in SPLITS for task in REVERSE_TEXT.draw(1, split, 0, 40)]:
        count, theme = task.metadata["kind"].split(", ")
        words = task.query.removeprefix("Reverse the text character-by-character. Text: ").split()
        assert len(words) == len(set(words)) == COUNTS[count]
        assert set(words) <= set(THEMES[theme])
        assert task.answers == (" ".join(words)[::-1],)


def test_no_two_themes_share_a_word_and_no_example_has_one_of_them():
    assert not [pair for pair in combinations(THEMES.values(), 2) if set(pair[0]) & set(pair[1])]
    words = {word for theme in THEMES.values() for word in theme}
    assert not words & {word for task in REVERSE_TEXT.examples for word in task.answers[0][::-1].split()}


def test_the_reversed_text_scores_1_and_a_similar_one_less():
    reward = DOMAINS["reverse_text"].make(RewardContext(sandbox=None))  # no sandbox judges a text
    for task in REVERSE_TEXT.draw(2, "train", 0, 40):
        gold = task.answers[0]
        assert reward.score(task, gold).value == reward.score(task, f"<answer>{gold}</answer>").value == 1.0
        assert 0 < reward.score(task, gold[:-1]).value < 1.0
