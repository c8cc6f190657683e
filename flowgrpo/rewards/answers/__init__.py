"""Rewards that compare an answer with gold answers: the matcher, and parsers of numbers, units, dates and formulas.

Modules:

    dates           Dates and times of day
    extract         The final answer of a long output
    game24          The game of 24
    intervals       Intervals and their unions, written with brackets or as inequalities
    match           The answer matcher: `match_answers` makes a reward from rules, `answer` is the plain one
    numbers         Numbers as people write them: `read_plain` parses a text into an exact `Number`
    school          K-12 answers: `school` is the matcher with the rules of school answers
    similarity      Similarity of an answer to gold, raised to a power: `similarity`
    spelling        Normalised text for comparisons: `plain_text`, `bare`
    symbolic        Symbolic mathematics: `mathematics` is the matcher with math-verify
    symbolic_child  math-verify on pairs of strings, in a process that can be killed
    units           Quantities: `read_quantity` parses a number with its unit
"""
