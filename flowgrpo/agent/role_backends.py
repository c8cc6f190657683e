"""Answer for the roles that are not trained: `speaker`, `remote_speaker` and `either` map a `Call` to a `Result`.

    do = either(tools_do, {"verifier": speaker(text, engine.generate), "generator": remote_speaker(complete)})

A role is a `Call("role", name, {"messages": [...]}, seed)`. What a model writes, however odd, is its `Result`, and the
role's own `parse` says whether it can be read. A model that is down, too slow, or gives no text at all is a failure of
the infrastructure. A prompt that is too long is not: it grew from what the policy wrote, which must not escape so.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from flowgrpo.agent.rendering import first_tokens
from flowgrpo.agent.state import small_digest
from flowgrpo.contracts import Call, Do, Generate, Request, Result
from flowgrpo.data.tokenizer import Text, guard
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
    guarded = guard(text)

    def speak(call: Call) -> Result:
        try:
            tokens = first_tokens(guarded, call.arguments["messages"])
        except BadInput as error:
            return Result(str(error), error=True)
        if len(tokens) > prompt_tokens:
            words = f"the prompt has {len(tokens)} tokens, but at most {prompt_tokens} can be read"
            return Result(words, error=True)
        request = Request(tokens, _key(call.seed), stop_ids=guarded.stop_ids, **settings)
        try:
            (completion,) = generate([request])
        except Exception as error:  # an engine that is closed, has failed, or is not made for such requests
            return _failure(call, f"{type(error).__name__}: {error}")
        if completion.finish_reason not in ("stop", "length"):
            return _failure(call, f"it ended with {completion.finish_reason!r}")
        return Result(guarded.spoken(completion.tokens)[0])

    return speak


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

    def speak(call: Call) -> Result:
        try:
            completion = complete(messages=call.arguments["messages"], seed=small_digest(repr(call.seed)), **settings)
        except Exception as error:  # whatever a client raises
            return _failure(call, f"{type(error).__name__}: {error}")
        if (why := getattr(completion, "error", None)) is not None:
            return _failure(call, str(why))
        if not isinstance(words := getattr(completion, "text", None), str):
            return _failure(call, f"it answered {completion!r:.80}, which has no text")
        return Result(words)

    return speak


def either(tools: Do, roles: Mapping[str, Do]) -> Do:
    """Calls of tools go to `tools`, those of roles to the one who speaks the role."""
    known = dict(roles)

    def do(call: Call) -> Result:
        if call.kind == "tool":
            return tools(call)
        if call.kind != "role" or call.name not in known:
            named = ", ".join(known) or "none"
            raise BadInput(f"nobody answers {call.kind} {call.name!r}: pass who speaks it to `either` (roles: {named})")
        return known[call.name](call)

    return do


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
