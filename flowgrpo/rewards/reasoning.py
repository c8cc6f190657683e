"""The verifiers of reasoning-gym: a task that `read_tasks("reasoning_gym:NAME")` made and an output in, its score out.

`call(function, *arguments, seconds=...)` is `Sandbox.call`: a trusted function over hostile arguments, in a forked
child that is killed at its deadline. Its sandbox is made with `preload=PRELOAD`. What hangs or
breaks a verifier is the answer's doing, and worth 0.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from flowgrpo.contracts import Reward, Scored
from flowgrpo.rewards.final import find_answer
from flowgrpo.sandbox import CallFailed, SandboxFailure
from flowgrpo.types import Task

CHILD = "flowgrpo.rewards.reasoning_child"
PRELOAD = (CHILD,)  # what the sandbox is to preload
LONGEST = 1 << 16  # characters of an answer


def reasoning(
    call: Callable[..., Any],
    *,
    seconds: float = 5.0,
    find: Callable[[str], str] = lambda output: find_answer(output).text,
) -> Reward:
    """The score that reasoning-gym's own verifier gives the final answer of an output, from 0 to 1."""
    return Reward(partial(_score, call, seconds, find))


def _score(call: Callable[..., Any], seconds: float, find: Callable[[str], str], task: Task, output: str) -> Scored:
    made = task.metadata.get("reasoning_gym")
    if not isinstance(made, Mapping):
        return Scored(None, f"task {task.id!r} doesn't say how reasoning_gym made it; read it with reasoning_gym:NAME")
    answer = find(output)
    if not answer.strip() or len(answer) > LONGEST:
        return Scored(0.0, "there is no answer" if not answer.strip() else "the answer is too long")
    try:
        value = call(f"{CHILD}:verify", made["name"], dict(made["options"]), made["index"], answer, seconds=seconds)
    except TimeoutError:
        return Scored(0.0, "the verifier ran out of time over the answer")
    except CallFailed as error:
        died = error.kind in ("ProcessDied", "MemoryError", "RecursionError")
        return Scored(0.0 if died else None, f"the verifier of {made['name']} failed: {error}")
    except SandboxFailure as error:
        return Scored(None, f"the sandbox failed: {error}")
    return Scored(float(value), f"the verifier of {made['name']} gives {value:g}")
