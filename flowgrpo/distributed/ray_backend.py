"""Start, call and kill workers in processes of their own, by Ray. The only module that imports it.

    with RayBackend() as backend:                      # a new Ray on this machine; or a cluster, by its address
        backend.start("rollout-0", make, threads=4)
        summary_ref, slice_ref = backend.call("rollout-0", "roll_out", job, returns=2)
        ready = backend.wait([summary_ref], 1.0);   backend.get(summary_ref)

A value that a call returns stays on its host until `get` fetches it; references are passed on to other calls.
"""

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from flowgrpo.files import pip_install
from flowgrpo.types import BadInput


class WorkerLost(Exception):
    """The worker that was called has died, or a value that it held is gone."""


class Backend(Protocol):
    """Interface by which a master starts, calls and kills its workers."""

    def start(self, name: str, make: Callable[[], Any], *, threads: int) -> None:
        """Start a worker, which `make()` returns, in a process of its own; an earlier one of that name is forgotten."""
        ...

    def call(self, name: str, method: str, *args: Any, returns: int = 1) -> tuple[Any, ...]:
        """Start a call -> a reference for each of the values that it will return."""
        ...

    def wait(self, refs: Sequence[Any], seconds: float) -> list[Any]:
        """Wait up to `seconds` until a value is available -> the references whose values are available."""
        ...

    def get(self, ref: Any) -> Any:
        """The value behind a reference; raises `WorkerLost` if it is gone, or the exception of the call."""
        ...

    def kill(self, name: str) -> None:
        """Kill the worker's process."""
        ...


class RayBackend:
    """Workers as Ray actors."""

    def __init__(self, address: str | None = None, *, gpus: dict[str, float] | None = None):
        """Join the Ray cluster at `address`, or start one on this machine.

        `gpus` is the number of GPUs of a worker, by the prefix of its name: {"rollout": 1, "train": 8}.
        """
        self._ray, self._gpus = load_ray(), gpus or {}
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # else workers have a lower priority than other processes
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        sigterm_handler = signal.getsignal(signal.SIGTERM)
        try:
            if address is None:
                self._ray.init(logging_level="ERROR", include_dashboard=False)
            else:
                self._ray.init(address=address, logging_level="ERROR")
        except (ConnectionError, ValueError) as error:
            raise BadInput(f"--address={address}: no Ray cluster answers there ({str(error)[:200]})") from None
        finally:
            signal.signal(signal.SIGTERM, sigterm_handler)  # Ray has replaced it
        self._actor = self._ray.remote(_WorkerActor)
        self._actors: dict[str, Any] = {}

    def __enter__(self) -> "RayBackend":
        return self

    def __exit__(self, *_: object) -> None:
        self._ray.shutdown()

    def start(self, name: str, make: Callable[[], Any], *, threads: int) -> None:
        """See `Backend`."""
        gpus = next((count for prefix, count in self._gpus.items() if name.startswith(prefix)), 0)
        options = {"num_cpus": 0, "num_gpus": gpus, "max_concurrency": threads, "max_restarts": 0}
        self._actors[name] = self._actor.options(**options).remote(make)

    def call(self, name: str, method: str, *args: Any, returns: int = 1) -> tuple[Any, ...]:
        """See `Backend`."""
        refs = self._actors[name].call.options(num_returns=returns).remote(method, *args)
        return (refs,) if returns == 1 else tuple(refs)

    def wait(self, refs: Sequence[Any], seconds: float) -> list[Any]:
        """See `Backend`."""
        ready, pending = self._ray.wait(list(refs), num_returns=1, timeout=seconds, fetch_local=False)
        if not (ready and pending):
            return ready
        return ready + self._ray.wait(pending, num_returns=len(pending), timeout=0, fetch_local=False)[0]

    def get(self, ref: Any) -> Any:
        """See `Backend`."""
        try:
            return self._ray.get(ref)
        except self._ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, BadInput) else error) from None
        except self._ray.exceptions.RayError as error:
            raise WorkerLost(str(error)) from None

    def kill(self, name: str) -> None:
        """See `Backend`."""
        self._ray.kill(self._actors[name], no_restart=True)


class _WorkerActor:
    """The actor around a worker; if making the worker failed, every call raises that exception."""

    def __init__(self, make: Callable[[], Any]):
        self._failure: BaseException | None = None
        try:
            self._worker = make()
        except Exception as error:
            self._failure = error

    def call(self, method: str, *args: Any) -> Any:
        if self._failure is not None:
            raise self._failure
        return getattr(self._worker, method)(*args)


def load_ray() -> Any:
    """Import Ray; `BadInput` names the extra if it is not installed."""
    try:
        import ray
        import ray.exceptions
    except ImportError:
        raise BadInput(f"the cluster needs Ray: {pip_install('ray')}") from None
    return ray
