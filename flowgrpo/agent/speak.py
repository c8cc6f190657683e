"""Speakers of the roles that are not trained: functions from a `Call` to a `Result`.

    do = either(tools_do, {"verifier": speaker(text, engine.generate), "generator": remote_speaker(complete)})

A role is a `Call("role", name, {"messages": [...]}, seed)`. What a model writes, however odd, is its `Result`, and the
role's own `parse` says whether it can be read. A model that is down, too slow, or gives no text at all is a failure of
the infrastructure. A prompt that is too long is not: it grew from what the policy wrote, which must not escape so.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

import jax
import numpy as np

from flowgrpo.agent.rendering import first_tokens
from flowgrpo.contracts import Call, Completion, Do, Generate, Request, Result
from flowgrpo.text import Text, guard
from flowgrpo.types import BadInput, check_range

LONGEST_FAILURE = 300  # characters of a failure's sentence
Complete = Callable[..., Any]  # (messages=, max_tokens=, temperature=, seed=, deadline=) -> with text and error


def speaker(
    text: Text,
    generate: Generate,
    *,
    max_tokens: int = 512,
    prompt_tokens: int = 8192,
    temperature: float = 1.0,
    top_k: int = 64,
    deadline: float | None = 60.0,
) -> Do:
    """A frozen model on an engine, of which a slot holds `prompt_tokens` and `max_tokens` together.

    Its key follows from the seed of the call. `top_k=1` is greedy, and needs an engine with `kept`. A prompt of more
    than `prompt_tokens`, or one that its template refuses, is an error of the caller.
    """
    for name, value in (("max_tokens", max_tokens), ("prompt_tokens", prompt_tokens), ("top_k", top_k)):
        check_range("speaker", name, value, 1, whole=True)
    check_range("speaker", "temperature", temperature, 0.0, exclusive=True)
    check_range("speaker", "deadline", deadline, 0.0, exclusive=True, optional=True)
    settings = {"max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "deadline": deadline}
    return partial(_speak, guard(text), generate, prompt_tokens, settings)


def remote_speaker(
    complete: Complete, *, max_tokens: int = 512, temperature: float = 1.0, deadline: float = 60.0
) -> Do:
    """A model behind an endpoint: `complete=lambda **asked: remote.generate([TextRequest(**asked)])[0]`.

    `complete` answers with what has a `text`, and an `error` of one sentence where there is none.
    """
    check_range("remote_speaker", "max_tokens", max_tokens, 1, whole=True)
    check_range("remote_speaker", "temperature", temperature, 0.0)
    check_range("remote_speaker", "deadline", deadline, 0.0, exclusive=True)
    settings = {"max_tokens": max_tokens, "temperature": temperature, "deadline": deadline}
    return partial(_speak_remotely, complete, settings)


def either(tools: Do, roles: Mapping[str, Do]) -> Do:
    """Calls of tools go to `tools`, those of roles to the one who speaks the role."""
    return partial(_either, tools, dict(roles))


def _either(tools: Do, roles: Mapping[str, Do], call: Call) -> Result:
    if call.kind == "tool":
        return tools(call)
    if call.kind != "role" or call.name not in roles:
        known = ", ".join(roles) or "none"
        raise BadInput(f"nobody answers {call.kind} {call.name!r}: pass who speaks it to `either` (roles: {known})")
    return roles[call.name](call)


def _speak(text: Text, generate: Generate, most: int, settings: Mapping[str, Any], call: Call) -> Result:
    try:
        tokens = first_tokens(text, call.arguments["messages"])
    except BadInput as error:
        return Result(str(error), error=True)
    if len(tokens) > most:
        return Result(f"the prompt has {len(tokens)} tokens, but at most {most} can be read", error=True)
    request = Request(tokens, _key(call.seed), stop_ids=text.stop_ids, **settings)
    try:
        (completion,) = generate([request])
    except Exception as error:  # an engine that is closed, has failed, or is not made for such requests
        return _failure(call, f"{type(error).__name__}: {error}")
    if completion.finish_reason not in ("stop", "length"):
        return _failure(call, f"it ended with {completion.finish_reason!r}")
    return Result(_words(text, completion))


def _words(text: Text, completion: Completion) -> str:
    """Decode a completion, without the stop token and without ids that are no text."""
    tokens: Sequence[int] = [int(i) for i in completion.tokens]
    whole = bool(tokens) and tokens[-1] in text.stop_ids
    return text.decode(i for i in (tokens[:-1] if whole else tokens) if i < text.vocab_size)


def _speak_remotely(complete: Complete, settings: Mapping[str, Any], call: Call) -> Result:
    try:
        completion = complete(messages=call.arguments["messages"], seed=_small(call.seed), **settings)
    except Exception as error:  # whatever a client raises
        return _failure(call, f"{type(error).__name__}: {error}")
    if (why := getattr(completion, "error", None)) is not None:
        return _failure(call, str(why))
    if not isinstance(words := getattr(completion, "text", None), str):
        return _failure(call, f"it answered {completion!r:.80}, which has no text")
    return Result(words)


def _failure(call: Call, why: str) -> Result:
    return Result(
        "", failure=f"nobody speaks the {call.name}: {' '.join(why.split()) or 'no reason given'}"[:LONGEST_FAILURE]
    )


def _key(seed: tuple[int, ...]) -> jax.Array:
    """The key of a call: every integer of its seed is folded in."""
    key = jax.random.key(0)
    for i in seed:
        key = jax.random.fold_in(key, np.uint32(i & 0xFFFFFFFF))
    return key


def _small(seed: tuple[int, ...]) -> int:
    """31 bits of a seed, which every server takes."""
    return int.from_bytes(blake2b(repr(seed).encode(), digest_size=4).digest(), "little") & 0x7FFFFFFF
