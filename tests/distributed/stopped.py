"""A process under SIGSTOP is ended by its crew, and its calls are lost (S3). Run as a command: what Ray leaves open
in the process that began it is Ray's, and not the tests'."""

import os
import signal
import time
from pathlib import Path

from flowgrpo.distributed.ray_backend import Lost, RayCrew


class Sleeper:
    """A worker that says where it is."""

    def about(self) -> int:
        """The process it is in."""
        return os.getpid()


def main() -> None:
    """Stop a worker, kill and replace it; fail where anything of it is left, or answers."""
    with RayCrew() as crew:
        crew.start("rollout-0", Sleeper, threads=2)
        pid = crew.get(crew.call("rollout-0", "about")[0])
        os.kill(pid, signal.SIGSTOP)
        (asked,) = crew.call("rollout-0", "about")
        assert crew.wait([asked], 1.0) == []
        crew.kill("rollout-0")
        crew.start("rollout-0", Sleeper, threads=2)
        assert crew.get(crew.call("rollout-0", "about")[0]) != pid
        assert crew.wait([asked], 60.0) == [asked]
        try:
            crew.get(asked)
        except Lost:
            print("lost")
        until = time.monotonic() + 60
        while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
            time.sleep(0.2)
        assert not Path(f"/proc/{pid}").exists()
        print("ended")


if __name__ == "__main__":
    main()
