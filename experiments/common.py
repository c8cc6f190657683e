"""What every experiment does alike: the flags that all have, and how a run begins and ends.

    if __name__ == "__main__":
        common.run(main)

`run` parses the flags, sets up JAX before its backend starts, and calls `main()`. Bad input becomes one sentence on
stderr and status 1, Ctrl-C one line and status 130, SIGTERM one line and status 143. Only what is a bug shows its
traceback.
"""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Never

from absl import app, flags, logging

from experiments.stopping import listening, number_of
from flowgrpo import launch
from flowgrpo.types import BadInput

_CACHE = flags.DEFINE_string("compilation_cache", None, "Folder that keeps compiled programs from run to run.")
_PROFILE = flags.DEFINE_string("profile_dir", None, "Folder for a trace of the run, for XProf or Perfetto.")
_DEVICES = flags.DEFINE_integer(
    "cpu_devices", None, "CPU devices that work side by side; by default what suits the experiment.", lower_bound=1
)
_DETERMINISTIC = flags.DEFINE_bool("deterministic", False, "Let XLA use deterministic operations only.")

STOPPED = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
BY_SIGNAL = 128  # and its number: the status of what a signal ended, as shells have it


def run(main: Callable[[], None], *, cpu_devices: int = 1) -> None:
    """Run an experiment as a command; doesn't return. It suits it to have so many CPU devices."""

    def guarded(argv: Sequence[str]) -> None:
        try:
            with listening(signal.SIGTERM):
                _check_rest(argv)
                launch.configure(
                    compilation_cache=_CACHE.value,
                    deterministic=_DETERMINISTIC.value,
                    cpu_devices=_DEVICES.value or cpu_devices,
                )
                with launch.profile(_PROFILE.value):
                    main()
        except BadInput as error:
            sys.exit(f"{_name()}: {error}")
        except KeyboardInterrupt as stop:
            number = number_of(stop)
            print(f"\n{_name()}: {STOPPED[number]}", file=sys.stderr)
            _leave(BY_SIGNAL + number)

    for flag in flags.FLAGS.get_key_flags_for_module(sys.modules[__name__]):
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)  # so that --help lists them
    # Of transformers only tokenizers and configurations are used, which need no PyTorch.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    app.run(guarded, flags_parser=_parse)


def _leave(status: int) -> Never:
    """End at once: while an interpreter ends in order, XLA's threads may crash over what was interrupted."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _parse(argv: Sequence[str]) -> list[str]:
    """absl's parsing, with one sentence for a bad flag; libraries log warnings only, unless `--verbosity` says more."""
    try:
        rest = flags.FLAGS(argv)
    except flags.Error as error:
        sys.exit(f"{_name()}: {error}")
    if not flags.FLAGS["verbosity"].present:
        flags.FLAGS.verbosity = logging.WARNING
    return rest


def _check_rest(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise BadInput(f"{argv[1]!r} is not a flag: settings are given as --name=value (--help lists them)")


def _name() -> str:
    """The module that runs, as it was called: `experiments.family`."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    return spec.name if spec else Path(str(getattr(main, "__file__", "experiments"))).stem
