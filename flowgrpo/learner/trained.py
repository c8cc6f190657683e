"""Which part of the parameters an update changes: all of them, an adapter, the actor and its critic.

    part = trained.take(params);   params = trained.put(params, part)

The gradient, the optimizer's memory and the reference are of the part alone: what is frozen is stored once, and
`put(params, reference)` is the whole reference. A part may be any pytree.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from flowgrpo.models.lora import Adapted


class Trained(NamedTuple):
    """A part of the parameters, and how it goes back; pure."""

    take: Callable[[Any], Any]  # params -> part
    put: Callable[[Any, Any], Any]  # (params, part) -> params


def _all(params: Any) -> Any:
    return params


def _instead(_params: Any, part: Any) -> Any:
    return part


def _adapter(params: Adapted) -> Any:
    return params.adapter


def _with_adapter(params: Adapted, part: Any) -> Adapted:
    return params._replace(adapter=part)


WHOLE = Trained(_all, _instead)
ADAPTER = Trained(_adapter, _with_adapter)
