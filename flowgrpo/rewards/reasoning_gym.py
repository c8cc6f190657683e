"""The verifiers of reasoning-gym as a reward: `reasoning(sandbox.call)`, for tasks read from "reasoning_gym:NAME".

`call` is `Sandbox.call` of a sandbox made with `preload=PRELOAD`: it calls a trusted function with hostile arguments in
a forked child that is killed at its deadline. An answer that hangs or breaks the verifier scores 0.
"""

from collections.abc import Callable, Mapping
from typing import Any

from flowgrpo.contracts import Reward, RewardResult
from flowgrpo.rewards.answers.extract import find_answer
from flowgrpo.sandbox import CallFailed, SandboxFailure
from flowgrpo.types import Task

CHILD = "flowgrpo.rewards.reasoning_gym_child"
PRELOAD = (CHILD,)  # for `Sandbox(preload=...)`
MAX_CHARACTERS = 1 << 16  # of an answer


def reasoning(call: Callable[..., Any], *, seconds: float = 5.0) -> Reward:
    """Score by reasoning-gym's own verifier of the final answer of an output, from 0 to 1."""

    def score(task: Task, output: str) -> RewardResult:
        source = task.metadata.get("reasoning_gym")
        if not isinstance(source, Mapping):
            problem = "doesn't say how reasoning_gym made it; read it with reasoning_gym:NAME"
            return RewardResult(None, f"task {task.id!r} {problem}")
        answer, name = find_answer(output).text, source["name"]
        if not answer.strip() or len(answer) > MAX_CHARACTERS:
            return RewardResult(0.0, "there is no answer" if not answer.strip() else "the answer is too long")
        try:
            value = call(f"{CHILD}:verify", name, dict(source["options"]), source["index"], answer, seconds=seconds)
        except TimeoutError:
            return RewardResult(0.0, "the verifier ran out of time over the answer")
        except CallFailed as error:
            is_answers_doing = error.kind in ("ProcessDied", "MemoryError", "RecursionError")
            return RewardResult(0.0 if is_answers_doing else None, f"the verifier of {name} failed: {error}")
        except SandboxFailure as error:
            return RewardResult(None, f"the sandbox failed: {error}")
        return RewardResult(float(value), f"the verifier of {name} gives {value:g}")

    return Reward(score)
