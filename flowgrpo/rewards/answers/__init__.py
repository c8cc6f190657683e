"""Answers held against gold: the matcher, and how numbers, units, dates and formulas may be written.

Modules:

    dates           Dates and times of day
    extract         The final answer in a long output
    game24          The game of 24
    intervals       Intervals and their unions, as brackets and as inequalities write them
    match           The answer matcher: `match_answers` makes a reward of rules, `answer` the plain one
    numbers         Numbers as people write them: `read_plain` reads a text as an exact `Number`
    school          K-12 answers: `school` is the matcher with the rules of a school
    similarity      Similarity to gold: `similarity` pays how much of two texts is alike, raised to a power
    spelling        Text as it is compared: `plain_text` takes off typography, `bare` also what school forgives
    symbolic        Symbolic mathematics: `mathematics` is the matcher with math-verify
    symbolic_child  Verdicts of math-verify on pairs of strings, reached in a process that can be killed
    units           Quantities: `read_quantity` reads a number with its unit
"""
