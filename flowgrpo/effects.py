"""Effects that are recorded, and a record that stands in for the effects: how a trajectory is replayed (A2).

do, log = recorded(do);   env.step(state, tokens, do);   ...        log grows with every call
env.step(state, tokens, replayed(log));  ...                        the same results, with nothing running
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from flowgrpo.contracts import Call, Do, Result
from flowgrpo.types import BadInput


class Effect(NamedTuple):
    """A call and what came of it."""

    call: Call
    result: Result


def recorded(do: Do) -> tuple[Do, list[Effect]]:
    """`do`, and the list to which each of its calls is added once it has returned."""
    log: list[Effect] = []
    return partial(_record, do, log), log


def replayed(log: Sequence[Effect], do: Do | None = None) -> Do:
    """Build a `Do` that gives the results in `log`, call by call in its order; after its end it calls `do`, if given.

    A call that differs from the recorded one is `BadInput`: what asks is not what was recorded.
    """
    return partial(_replay, iter(list(log)), do)


def no_effects(call: Call) -> Result:
    """The `do` of environments that have none."""
    raise BadInput(f"{call.kind} {call.name!r} was called, but this environment was given no effects: pass `do`")


def _record(do: Do, log: list[Effect], call: Call) -> Result:
    result = do(call)
    log.append(Effect(call, result))
    return result


def _replay(rest: Iterator[Effect], do: Do | None, call: Call) -> Result:
    effect = next(rest, None)
    if effect is not None:
        if effect.call != call:
            raise BadInput(
                f"the record has {effect.call!r:.200} where now {call!r:.200} is called: replay it as it ran"
            )
        return effect.result
    if do is None:
        raise BadInput(f"the record ends before {call!r:.200}: it is of a shorter trajectory")
    return do(call)


# As JSON ----------------------------------------------------------------------------------------------


def to_json(effect: Effect) -> dict[str, Any]:
    """An effect as a JSON object."""
    call, result = effect
    return {
        "call": {**call._asdict(), "arguments": dict(call.arguments), "seed": list(call.seed)},
        "result": result._asdict(),
    }


def from_json(value: Mapping[str, Any]) -> Effect:
    """The effect that `to_json` wrote."""
    try:
        call = Call(**{**value["call"], "seed": tuple(value["call"]["seed"])})
        return Effect(call, Result(**value["result"]))
    except (KeyError, TypeError) as error:
        raise BadInput(f"{value!r:.120} is no recorded effect ({error}): give what to_json wrote") from error
