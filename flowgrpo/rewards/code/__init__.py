"""The reward of code that passes its tests, which are split so that the code can't cheat.

Modules:

    blocks       The code in an answer: of several fenced blocks, the one that the tests call, with what it needs
    child        Programs that run in the sandbox when code is judged by calls
    reward       Code judged by tests: `code` makes the reward
    runner       Code judged by calls: `split_plan` splits a task's tests, `judge_calls` runs them
    split_scope  Expressions of tests, for `split_tests`
    split_tests  Python tests, split by `split_sources` so that no process has both the code and the expected values
"""
