"""The router: each domain to its member, in order, and a member that fails takes nobody along."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowgrpo.contracts import Reward, Scored
from flowgrpo.rewards.router import router, score_async
from flowgrpo.types import BadInput, Task


def task(domain: str, number: int = 0) -> Task:
    return Task(f"{domain}{number}", "?", ("1",), domain)


def echo(name: str, calls: list | None = None) -> Reward:
    """A reward whose reason is its own name and the output; with `calls`, for all outputs at once, noted there."""

    def many(tasks, outputs):
        calls.append([task.domain for task in tasks])
        return [Scored(1.0, f"{name} {output}") for output in outputs]

    return Reward(lambda _task, output: Scored(1.0, f"{name} {output}"), None if calls is None else many)


def broken(error: BaseException) -> Reward:
    def fail(*_):
        raise error

    return Reward(fail, fail)


@given(st.lists(st.sampled_from(["code", "math", "other"]), max_size=20))
def test_every_task_goes_to_its_member_and_order_is_kept(domains):
    calls: list = []
    reward = router({"code": echo("c", calls), "math": echo("m")}, default=echo("d"))
    tasks = [task(domain, number) for number, domain in enumerate(domains)]
    scored = reward.many(tasks, [str(number) for number in range(len(tasks))])
    names = {"code": "c", "math": "m", "other": "d"}
    assert [one.reason for one in scored] == [f"{names[domain]} {number}" for number, domain in enumerate(domains)]
    assert calls == [["code"] * domains.count("code")][: "code" in domains]
    assert scored == [reward.score(one, str(number)) for number, one in enumerate(tasks)]


def test_an_unknown_domain_is_invalid_and_names_those_that_there_are():
    reward = router({"code": echo("c"), "math": echo("m")})
    one, two = reward.many([task("maths"), task("code")], ["a", "b"])
    assert one.value is None
    assert one.reason == "task 'maths0' is of domain 'maths', which has no reward; there are 'code', 'math'"
    assert two.value == 1.0
    assert reward.score(task("maths"), "a") == one


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (BadInput("the image is missing; add it"), "failed: the image is missing; add it"),
        (RuntimeError("boom"), "failed: RuntimeError: boom"),
    ],
)
def test_F5_a_member_that_raises_makes_only_its_own_scores_invalid(error, words):
    def once(_task, output):
        if output == "bad":
            raise error
        return Scored(0.5)

    reward = router({"math": echo("m"), "batch": broken(error), "single": Reward(once)})
    tasks = [task("batch"), task("math"), task("single"), task("batch"), task("single")]
    scored = reward.many(tasks, ["w", "x", "bad", "y", "z"])
    assert [one.value for one in scored] == [None, 1.0, None, None, 0.5]
    assert scored[0].reason == reward.score(tasks[0], "w").reason == f"the reward of 'batch' {words}"


def test_a_member_that_gives_too_few_scores_is_invalid():
    short = Reward(lambda *_: Scored(1.0), lambda _tasks, outputs: [Scored(1.0)] * (len(outputs) - 1))
    for scored in router({"a": short}).many([task("a"), task("a")], ["x", "y"]):
        assert scored.value is None
        assert "gave 1 scores for 2 outputs" in scored.reason


def test_interrupts_are_not_swallowed():
    with pytest.raises(KeyboardInterrupt):
        router({"a": broken(KeyboardInterrupt())}).many([task("a")], ["x"])  # type: ignore[arg-type]


def test_what_means_nothing_is_refused():
    with pytest.raises(BadInput, match="no reward"):
        router({})
    with pytest.raises(BadInput, match="2 tasks and 1 outputs"):
        router({"a": echo("a")}).many([task("a"), task("a")], ["x"])
    with ThreadPoolExecutor(1) as pool, pytest.raises(BadInput, match="1 tasks and 2 outputs"):
        score_async(echo("a"), [task("a")], ["x", "y"], pool)


def test_R1_rewards_are_computed_while_the_caller_goes_on():
    """The caller is not held up, and what it changes meanwhile is not seen."""
    begun, over = threading.Event(), threading.Event()

    def score(_task, output):
        begun.set()
        assert over.wait(60)
        return Scored(1.0, output)

    outputs = ["first", "second"]
    with ThreadPoolExecutor(1) as pool:
        future = score_async(router({"a": Reward(score)}), [task("a"), task("a")], outputs, pool)
        assert begun.wait(60)
        assert not future.done()
        outputs[1] = "changed"
        over.set()
        assert [one.reason for one in future.result(60)] == ["first", "second"]
