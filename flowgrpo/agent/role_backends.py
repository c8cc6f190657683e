"""Answer the calls of untrained roles: `frozen_role` by an engine, `endpoint_role` by a server.

    call_tool = route_calls(
        tools.call_tool,
        {"verifier": frozen_role(tokenizer, engine.generate), "generator": endpoint_role(complete)},
    )

A role is called by `Call("role", name, {"messages": [...]}, seed)`. Any text of a model is a `Result`, and the role's
own `parse` decides whether it can be read. A model that is down, too slow, or returns no text is a failure of the
infrastructure. A prompt that is too long is not: it grew from what the policy wrote, which must not escape so.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from flowgrpo.agent.rendering import encode_prompt
from flowgrpo.agent.state import digest31
from flowgrpo.contracts import Call, Generate, Request, Result, ToolRunner
from flowgrpo.data.tokenizer import ChatTokenizer, guard
from flowgrpo.types import BadInput, check_range

MAX_FAILURE_CHARS = 300  # of a failure's sentence
Complete = Callable[..., Any]  # (messages=, max_tokens=, temperature=, seed=, deadline=) -> with text and error


def frozen_role(
    tokenizer: ChatTokenizer,
    generate: Generate,
    *,
    max_tokens: int = 512,
    prompt_tokens: int = 8192,
    temperature: float = 1.0,
    top_k: int = 64,
    deadline: float | None = 60.0,
) -> ToolRunner:
    """A frozen model on an engine, whose random key depends on the seed of the call alone.

    A prompt of more than `prompt_tokens`, or one that the template refuses, is an error of the caller.

    Args:
        tokenizer: that of the model.
        generate: the engine's, from requests to completions.
        max_tokens: of an answer.
        prompt_tokens: maximal number of tokens of a prompt; an engine's slot must hold both.
        temperature: of sampling.
        top_k: number of tokens to sample from; 1 is greedy, and needs an engine with recorded sets.
        deadline: seconds for an answer. None: no deadline.
    """
    for name, value in (("max_tokens", max_tokens), ("prompt_tokens", prompt_tokens), ("top_k", top_k)):
        check_range("frozen_role", name, value, 1, whole=True)
    check_range("frozen_role", "temperature", temperature, 0.0, exclusive=True)
    check_range("frozen_role", "deadline", deadline, 0.0, exclusive=True, optional=True)
    guarded = guard(tokenizer)

    def answer(call: Call) -> Result:
        try:
            tokens = encode_prompt(guarded, call.arguments["messages"])
        except BadInput as error:
            return Result(str(error), error=True)
        if len(tokens) > prompt_tokens:
            message = f"the prompt has {len(tokens)} tokens, but at most {prompt_tokens} can be read"
            return Result(message, error=True)
        key = jax.random.key(0)
        for i in call.seed:
            key = jax.random.fold_in(key, np.uint32(i & 0xFFFFFFFF))
        request = Request(
            tokens,
            key,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            stop_ids=guarded.stop_ids,
            deadline=deadline,
        )
        try:
            (completion,) = generate([request])
        except Exception as error:  # an engine that is closed, has failed, or can't serve such requests
            return _failure(call, f"{type(error).__name__}: {error}")
        if completion.finish_reason not in ("stop", "length"):
            return _failure(call, f"it ended with {completion.finish_reason!r}")
        return Result(guarded.decode_action(completion.tokens)[0])

    return answer


def endpoint_role(
    complete: Complete, *, max_tokens: int = 512, temperature: float = 1.0, deadline: float = 60.0
) -> ToolRunner:
    """A model behind an endpoint: `complete=lambda **request: remote.generate([TextRequest(**request)])[0]`.

    Args:
        complete: returns an object with a `text`, or with an `error` of one sentence.
        max_tokens: of an answer.
        temperature: of sampling.
        deadline: seconds for an answer.
    """
    check_range("endpoint_role", "max_tokens", max_tokens, 1, whole=True)
    check_range("endpoint_role", "temperature", temperature, 0.0)
    check_range("endpoint_role", "deadline", deadline, 0.0, exclusive=True)

    def answer(call: Call) -> Result:
        try:
            completion = complete(
                messages=call.arguments["messages"],
                seed=digest31(repr(call.seed)),
                max_tokens=max_tokens,
                temperature=temperature,
                deadline=deadline,
            )
        except Exception as error:  # whatever a client raises
            return _failure(call, f"{type(error).__name__}: {error}")
        if (reason := getattr(completion, "error", None)) is not None:
            return _failure(call, str(reason))
        if not isinstance(text := getattr(completion, "text", None), str):
            return _failure(call, f"it returned {completion!r:.80}, which has no text")
        return Result(text)

    return answer


def route_calls(tools: ToolRunner, roles: Mapping[str, ToolRunner]) -> ToolRunner:
    """Route calls of tools to `tools`, and those of roles to the backend of the role."""
    backends = dict(roles)

    def call_tool(call: Call) -> Result:
        if call.kind == "tool":
            return tools(call)
        if call.kind != "role" or call.name not in backends:
            names = ", ".join(backends) or "none"
            raise BadInput(
                f"no backend answers {call.kind} {call.name!r}: give one for it to route_calls (roles: {names})"
            )
        return backends[call.name](call)

    return call_tool


def _failure(call: Call, reason: str) -> Result:
    message = f"no answer of the {call.name}: {' '.join(reason.split()) or 'no reason given'}"
    return Result("", failure=message[:MAX_FAILURE_CHARS])
