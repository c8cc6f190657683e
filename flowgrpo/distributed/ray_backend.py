"""Workers in processes of their own, by Ray: started, called, killed. The only module that imports it.

    with RayBackend() as backend:                      # a Ray of this machine; or that of a cluster, by its address
        backend.start("rollout-0", make, threads=4)
        calls = backend.call("rollout-0", "play", order, returns=2)
        done = backend.wait([calls[0]], 1.0);   backend.get(calls[0])

The value that a call returns stays where it was made until somebody asks for it: it is passed on to other calls by
reference.
"""

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from flowgrpo.files import pip_install
from flowgrpo.types import BadInput


class Lost(Exception):
    """The worker that was called is gone, or what it had made is."""


class Backend(Protocol):
    """Interface through which a master starts, calls and ends its workers, whatever runs them."""

    def start(self, name: str, make: Callable[[], Any], *, threads: int) -> None:
        """A worker in a process of its own: what `make()` gives there. One of that name is forgotten."""
        ...

    def call(self, name: str, method: str, *given: Any, returns: int = 1) -> tuple[Any, ...]:
        """Begin a call; a reference for each of the things that it will return."""
        ...

    def wait(self, refs: Sequence[Any], seconds: float) -> list[Any]:
        """Those of the references that are there, after so many seconds at most, or as soon as one is."""
        ...

    def get(self, ref: Any) -> Any:
        """Fetch the value behind a reference; raise `Lost` where it is gone, or the error that the call raised."""
        ...

    def kill(self, name: str) -> None:
        """End the worker's process at once."""
        ...


class RayBackend:
    """A backend of Ray's actors."""

    def __init__(self, address: str | None = None, *, gpus: dict[str, float] | None = None):
        """`gpus` has how many a worker takes, by the beginning of its name: {"rollout": 1, "train": 8}."""
        self._ray, self._gpus = load_ray(), gpus or {}
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # or else what is alone on a machine is slow for nothing
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        terminates = signal.getsignal(signal.SIGTERM)
        try:
            if address is None:
                self._ray.init(logging_level="ERROR", include_dashboard=False)
            else:
                self._ray.init(address=address, logging_level="ERROR")
        except (ConnectionError, ValueError) as error:
            raise BadInput(f"--address={address}: no Ray cluster answers there ({str(error)[:200]})") from None
        finally:
            signal.signal(signal.SIGTERM, terminates)  # which Ray takes for itself
        self._actor = self._ray.remote(_Host)
        self._actors: dict[str, Any] = {}

    def __enter__(self) -> "RayBackend":
        return self

    def __exit__(self, *_: object) -> None:
        self._ray.shutdown()

    def start(self, name: str, make: Callable[[], Any], *, threads: int) -> None:
        """See `Backend`."""
        gpus = next((count for start, count in self._gpus.items() if name.startswith(start)), 0)
        options = {"num_cpus": 0, "num_gpus": gpus, "max_concurrency": threads, "max_restarts": 0}
        self._actors[name] = self._actor.options(**options).remote(make)

    def call(self, name: str, method: str, *given: Any, returns: int = 1) -> tuple[Any, ...]:
        """See `Backend`."""
        found = self._actors[name].call.options(num_returns=returns).remote(method, *given)
        return (found,) if returns == 1 else tuple(found)

    def wait(self, refs: Sequence[Any], seconds: float) -> list[Any]:
        """See `Backend`."""
        first, rest = self._ray.wait(list(refs), num_returns=1, timeout=seconds, fetch_local=False)
        if not (first and rest):
            return first
        return first + self._ray.wait(rest, num_returns=len(rest), timeout=0, fetch_local=False)[0]

    def get(self, ref: Any) -> Any:
        """See `Backend`."""
        try:
            return self._ray.get(ref)
        except self._ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, BadInput) else error) from None
        except self._ray.exceptions.RayError as error:
            raise Lost(str(error)) from None

    def kill(self, name: str) -> None:
        """See `Backend`."""
        self._ray.kill(self._actors[name], no_restart=True)


class _Host:
    """The actor: whatever worker was made in it, or why none could be, which the first call says."""

    def __init__(self, make: Callable[[], Any]):
        self._failure: BaseException | None = None
        try:
            self._worker = make()
        except Exception as error:
            self._failure = error

    def call(self, method: str, *given: Any) -> Any:
        if self._failure is not None:
            raise self._failure
        return getattr(self._worker, method)(*given)


def load_ray() -> Any:
    """Ray, or the sentence that names the extra."""
    try:
        import ray
        import ray.exceptions
    except ImportError:
        raise BadInput(f"the cluster needs Ray: {pip_install('ray')}") from None
    return ray
