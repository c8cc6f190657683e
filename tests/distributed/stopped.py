"""A process under SIGSTOP is ended by its backend, and its calls are lost (S3). Run as a command: what Ray leaves open
in the process that began it is Ray's, and not the tests'."""

import os
import signal
import time
from pathlib import Path

from flowgrpo.distributed.ray_backend import Lost, RayBackend


class Sleeper:
    """A worker that says where it is."""

    def about(self) -> int:
        """The process it is in."""
        return os.getpid()


def main() -> None:
    """Stop a worker, kill and replace it; fail where anything of it is left, or answers."""
    with RayBackend() as backend:
        backend.start("rollout-0", Sleeper, threads=2)
        pid = backend.get(backend.call("rollout-0", "about")[0])
        os.kill(pid, signal.SIGSTOP)
        (asked,) = backend.call("rollout-0", "about")
        assert backend.wait([asked], 1.0) == []
        backend.kill("rollout-0")
        backend.start("rollout-0", Sleeper, threads=2)
        assert backend.get(backend.call("rollout-0", "about")[0]) != pid
        assert backend.wait([asked], 60.0) == [asked]
        try:
            backend.get(asked)
        except Lost:
            print("lost")
        until = time.monotonic() + 60
        while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
            time.sleep(0.2)
        assert not Path(f"/proc/{pid}").exists()
        print("ended")


if __name__ == "__main__":
    main()
