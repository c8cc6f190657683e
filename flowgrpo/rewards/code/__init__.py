"""Code judged by tests, which are split so that they cannot be cheated.

Modules:

    blocks       The code in an answer: of several fenced blocks, the one that the tests call, with what it needs
    child        Programs that run inside the sandbox when code is judged by calls
    reward       Code judged by tests: `code` makes the reward
    runner       Code judged by calls: `split_plan` splits a task's tests
    split_scope  Expressions of tests, for `split_tests`
    split_tests  Tests in Python, split by `split_sources` so that the model's code and what they expect are never in
"""
