"""The verifiers of reasoning-gym as a reward: `reasoning(sandbox.call)`, for tasks read from "reasoning_gym:NAME".

The call is `Sandbox.call`, of a sandbox that is made with `preload=PRELOAD`: a trusted function over hostile arguments,
in a forked child that is killed at its deadline. What hangs or breaks a verifier is the answer's doing, and worth 0.
"""

from collections.abc import Callable, Mapping
from typing import Any

from flowgrpo.contracts import Reward, Scored
from flowgrpo.rewards.answers.extract import find_answer
from flowgrpo.sandbox import CallFailed, SandboxFailure
from flowgrpo.types import Task

CHILD = "flowgrpo.rewards.reasoning_gym_child"
PRELOAD = (CHILD,)  # what the sandbox is to preload
LONGEST = 1 << 16  # characters of an answer


def reasoning(call: Callable[..., Any], *, seconds: float = 5.0) -> Reward:
    """Give the score of reasoning-gym's own verifier for the final answer of an output, from 0 to 1."""

    def score(task: Task, output: str) -> Scored:
        made = task.metadata.get("reasoning_gym")
        if not isinstance(made, Mapping):
            why = "doesn't say how reasoning_gym made it; read it with reasoning_gym:NAME"
            return Scored(None, f"task {task.id!r} {why}")
        answer, name = find_answer(output).text, made["name"]
        if not answer.strip() or len(answer) > LONGEST:
            return Scored(0.0, "there is no answer" if not answer.strip() else "the answer is too long")
        try:
            value = call(f"{CHILD}:verify", name, dict(made["options"]), made["index"], answer, seconds=seconds)
        except TimeoutError:
            return Scored(0.0, "the verifier ran out of time over the answer")
        except CallFailed as error:
            died = error.kind in ("ProcessDied", "MemoryError", "RecursionError")
            return Scored(0.0 if died else None, f"the verifier of {name} failed: {error}")
        except SandboxFailure as error:
            return Scored(None, f"the sandbox failed: {error}")
        return Scored(float(value), f"the verifier of {name} gives {value:g}")

    return Reward(score)
