"""The router: each domain to its member, in order, and a member that fails takes nobody along."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowgrpo.contracts import Reward, Scored
from flowgrpo.rewards.combine import router, score_async
from flowgrpo.types import BadInput, Task

ECHO = Reward(lambda task, output: Scored(1.0, f"{task.domain} {output}"))


def tasks(*domains: str) -> list[Task]:
    return [Task(f"{domain}{number}", "?", ("1",), domain) for number, domain in enumerate(domains)]


def broken(error: BaseException) -> Reward:
    """Fails on whatever is not fine."""

    def score(_, output):
        if output != "fine":
            raise error
        return Scored(0.5)

    return Reward(score)


@given(st.lists(st.sampled_from(["code", "math", "other"]), max_size=20))
def test_every_task_goes_to_its_member_and_order_is_kept(domains):
    calls: list = []

    def many(given, outputs):
        calls.append([task.domain for task in given])
        return [ECHO.score(*pair) for pair in zip(given, outputs, strict=True)]

    reward = router({"code": Reward(broken(AssertionError()).score, many), "math": ECHO}, default=ECHO)
    outputs = [str(number) for number in range(len(domains))]
    scored = reward.many(tasks(*domains), outputs)
    assert [one.reason for one in scored] == [
        f"{domain} {output}" for domain, output in zip(domains, outputs, strict=True)
    ]
    assert calls == [["code"] * domains.count("code")][: "code" in domains]


def test_F5_an_unknown_domain_and_a_member_that_raises_are_invalid_alone_and_say_why():
    short = Reward(ECHO.score, lambda _tasks, outputs: [Scored(1.0)] * (len(outputs) - 1))
    bad_input, boom = broken(BadInput("the image is missing; add it")), broken(RuntimeError("boom"))
    batch = boom._replace(score_many=boom.score)
    reward = router({"math": ECHO, "batch": batch, "image": bad_input, "few": short})
    given = tasks("batch", "math", "image", "batch", "image", "few", "few", "maths")
    scored = reward.many(given, ["w", "x", "bad", "y", "fine", "p", "q", "r"])
    assert [one.value for one in scored] == [None, 1.0, None, None, 0.5, None, None, None]
    assert scored[0].reason == reward.score(given[0], "w").reason == "the reward of 'batch' failed: RuntimeError: boom"
    assert scored[2].reason == "the reward of 'image' failed: the image is missing; add it"
    assert "gave 1 scores for 2 outputs" in scored[5].reason
    there = "there are 'math', 'batch', 'image', 'few'"
    assert scored[7].reason == f"task 'maths7' is of domain 'maths', which has no reward; {there}"
    assert reward.score(given[7], "r") == scored[7]


def test_interrupts_are_not_swallowed_and_what_means_nothing_is_refused():
    with pytest.raises(KeyboardInterrupt):
        router({"a": broken(KeyboardInterrupt())}).many(tasks("a"), ["x"])
    with pytest.raises(BadInput, match="no reward"):
        router({})
    with pytest.raises(BadInput, match="2 tasks and 1 outputs"):
        router({"a": ECHO}).many(tasks("a", "a"), ["x"])
    with ThreadPoolExecutor(1) as pool, pytest.raises(BadInput, match="1 tasks and 2 outputs"):
        score_async(ECHO, tasks("a"), ["x", "y"], pool)


def test_R1_rewards_are_computed_while_the_caller_goes_on():
    """The caller is not held up, and what it changes meanwhile is not seen."""
    begun, over = threading.Event(), threading.Event()

    def score(_task, output):
        begun.set()
        assert over.wait(60)
        return Scored(1.0, output)

    outputs = ["first", "second"]
    with ThreadPoolExecutor(1) as pool:
        future = score_async(router({"a": Reward(score)}), tasks("a", "a"), outputs, pool)
        assert begun.wait(60)
        assert not future.done()
        outputs[1] = "changed"
        over.set()
        assert [one.reason for one in future.result(60)] == ["first", "second"]
