"""A process under SIGSTOP is ended by its backend, and its calls are lost (S3). Run as a command: what Ray leaves open
in the process that started it is Ray's, and not the tests'."""

import os
import signal
import time
from pathlib import Path

from flowgrpo.distributed.ray_backend import RayBackend, WorkerLost


class Sleeper:
    """A worker with one method."""

    def describe(self) -> int:
        """Id of its process."""
        return os.getpid()


def main() -> None:
    """Stop a worker, kill and replace it; fail if anything of it is left, or answers."""
    with RayBackend() as backend:
        backend.start("rollout-0", Sleeper, threads=2)
        pid = backend.get(backend.call("rollout-0", "describe")[0])
        os.kill(pid, signal.SIGSTOP)
        (pending,) = backend.call("rollout-0", "describe")
        assert backend.wait([pending], 1.0) == []
        backend.kill("rollout-0")
        backend.start("rollout-0", Sleeper, threads=2)
        assert backend.get(backend.call("rollout-0", "describe")[0]) != pid
        assert backend.wait([pending], 60.0) == [pending]
        try:
            backend.get(pending)
        except WorkerLost:
            print("lost")
        deadline = time.monotonic() + 60
        while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not Path(f"/proc/{pid}").exists()
        print("ended")


if __name__ == "__main__":
    main()
