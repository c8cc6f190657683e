"""The router: each domain to its reward, in order; one that fails affects no other."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowgrpo.contracts import Reward, RewardResult
from flowgrpo.rewards.combine import router, score_async
from flowgrpo.types import BadInput, Task

ECHO = Reward(lambda task, output: RewardResult(1.0, f"{task.domain} {output}"))


def tasks(*domains: str) -> list[Task]:
    return [Task(f"{domain}{number}", "?", ("1",), domain) for number, domain in enumerate(domains)]


def broken(error: BaseException) -> Reward:
    """Fails on whatever is not fine."""

    def score(_, output):
        if output != "fine":
            raise error
        return RewardResult(0.5)

    return Reward(score)


@given(st.lists(st.sampled_from(["code", "math", "other"]), max_size=20))
def test_every_task_goes_to_the_reward_of_its_domain_and_order_is_kept(domains):
    calls: list = []

    def many(batch, outputs):
        calls.append([task.domain for task in batch])
        return [ECHO.score(*pair) for pair in zip(batch, outputs, strict=True)]

    reward = router({"code": Reward(broken(AssertionError()).score, many), "math": ECHO}, default=ECHO)
    outputs = [str(number) for number in range(len(domains))]
    results = reward.score_all(tasks(*domains), outputs)
    assert [result.reason for result in results] == [
        f"{domain} {output}" for domain, output in zip(domains, outputs, strict=True)
    ]
    assert calls == [["code"] * domains.count("code")][: "code" in domains]


def test_F5_an_unknown_domain_and_a_reward_that_raises_are_invalid_alone():
    short = Reward(ECHO.score, lambda _tasks, outputs: [RewardResult(1.0)] * (len(outputs) - 1))
    bad_input, boom = broken(BadInput("the image is missing; add it")), broken(RuntimeError("boom"))
    batch = boom._replace(score_many=boom.score)
    reward = router({"math": ECHO, "batch": batch, "image": bad_input, "few": short})
    mixed = tasks("batch", "math", "image", "batch", "image", "few", "few", "maths")
    scored = reward.score_all(mixed, ["w", "x", "bad", "y", "fine", "p", "q", "r"])
    assert [result.value for result in scored] == [None, 1.0, None, None, 0.5, None, None, None]
    assert scored[0].reason == reward.score(mixed[0], "w").reason == "the reward of 'batch' failed: RuntimeError: boom"
    assert scored[2].reason == "the reward of 'image' failed: the image is missing; add it"
    assert "gave 1 scores for 2 outputs" in scored[5].reason
    known = "there are 'math', 'batch', 'image', 'few'"
    assert scored[7].reason == f"task 'maths7' is of domain 'maths', which has no reward; {known}"
    assert reward.score(mixed[7], "r") == scored[7]


def test_interrupts_are_not_swallowed_and_senseless_arguments_are_refused():
    with pytest.raises(KeyboardInterrupt):
        router({"a": broken(KeyboardInterrupt())}).score_all(tasks("a"), ["x"])
    with pytest.raises(BadInput, match="no reward"):
        router({})
    with pytest.raises(BadInput, match="2 tasks and 1 outputs"):
        router({"a": ECHO}).score_all(tasks("a", "a"), ["x"])
    with ThreadPoolExecutor(1) as pool, pytest.raises(BadInput, match="1 tasks and 2 outputs"):
        score_async(ECHO, tasks("a"), ["x", "y"], pool)


def test_R1_rewards_are_computed_while_the_caller_continues():
    """The caller is not blocked, and its later changes are not seen."""
    started, may_end = threading.Event(), threading.Event()

    def score(_task, output):
        started.set()
        assert may_end.wait(60)
        return RewardResult(1.0, output)

    outputs = ["first", "second"]
    with ThreadPoolExecutor(1) as pool:
        future = score_async(router({"a": Reward(score)}), tasks("a", "a"), outputs, pool)
        assert started.wait(60)
        assert not future.done()
        outputs[1] = "changed"
        may_end.set()
        assert [result.reason for result in future.result(60)] == ["first", "second"]
