"""Task sets that are generated without a file, small enough for a pretrained language model on a CPU.

    tasks = TASK_SETS["word_problems"].draw(0, "train", 0, 64)  # seed, split, first, count

Modules:

    alphabet_sort  Names to sort, in one turn without a tool
    reverse_text   Texts to reverse, in one turn without a tool
    task_set       `TaskSet`, and how its kinds of tasks are split: `split_kinds`, `make_draw`
    two_hop        Two-hop questions for an agent that searches a small synthetic corpus
    word_problems  Word problems for an agent with a calculator: everyday stories of one or two operations
"""

from collections.abc import Mapping

from flowgrpo.recipes.task_sets.alphabet_sort import ALPHABET_SORT
from flowgrpo.recipes.task_sets.reverse_text import REVERSE_TEXT
from flowgrpo.recipes.task_sets.task_set import TaskSet
from flowgrpo.recipes.task_sets.two_hop import TWO_HOP
from flowgrpo.recipes.task_sets.word_problems import WORD_PROBLEMS

TASK_SETS: Mapping[str, TaskSet] = {
    task_set.name: task_set for task_set in (WORD_PROBLEMS, TWO_HOP, REVERSE_TEXT, ALPHABET_SORT)
}
