"""Common frame of every experiment: the flags that all have, and how a run begins and ends.

    _SEED = flags.DEFINE_integer("seed", 0, "Seed of everything.")

    app.read_flags(__name__)

    import jax  # and all else that takes seconds

    if __name__ == "__main__":
        app.run(main)

`read_flags` answers a typo or --help before anything slow is imported. `run` sets up JAX before its backend starts, and
calls `main()`. How a command ends, everywhere:

    0      it did what was asked, or printed the help that was asked for; or the time of --stop_after is over, one line:
           what was trained is saved, and the same command goes on
    1      bad input, which is one sentence on stderr, or a bug, which alone shows its traceback
    2      flags that can't be read, which is one sentence on stderr; nothing has run
    130    Ctrl-C, one line; a run was saved where that is possible, and the same command goes on
    143    SIGTERM, likewise

Results are on stdout, the last line of it one of JSON; how far it is, and what was said, are on stderr.
"""

import math
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Never

from absl import app, flags, logging

from flowgrpo import __version__, launch
from flowgrpo.errors import BadInput
from flowgrpo.run.signals import BY_SIGNAL, listening, number_of
from flowgrpo.run.time_budget import OutOfTime

from .help import HELP, USAGE, complaint, flag_heading, help_of_command, is_missing

flag_heading("Every command")
_CACHE = flags.DEFINE_string(
    "compilation_cache",
    launch.USER,
    "Folder that keeps compiled programs from run to run: one of your own below ~/.cache (user), none, or a path.",
)
_PROFILE = flags.DEFINE_string("profile_dir", None, "Folder for a trace of the run, for XProf or Perfetto.")
_DEVICES = flags.DEFINE_integer(
    "cpu_devices", None, "CPU devices that work side by side; by default what suits the experiment.", lower_bound=1
)
_DETERMINISTIC = flags.DEFINE_bool("deterministic", False, "Let XLA use deterministic operations only.")
_EXACT = flags.DEFINE_bool(
    "exact",
    None,
    "Round every row of a product alike, in any company, so that no result depends on slots or widths; by default "
    "where an engine answers requests.",
)
flags.disclaim_key_flags()  # `read_flags` adopts them for the command

STOPPED = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}


def read_flags(module: str) -> None:
    """Read the command line, where this module is the command that runs and not imported by another."""
    if module != "__main__":
        return
    flags.adopt_module_key_flags(sys.modules[__name__])  # so that --help lists them
    app.define_help_flags()
    _parse(sys.argv)


def run(main: Callable[[], None], *, cpu_devices: int = 1, exact: bool = False) -> None:
    """Run an experiment as a command; doesn't return. It has so many CPU devices, and is exact, unless flags differ."""

    def guarded(_argv: Sequence[str]) -> None:
        with listening(signal.SIGTERM):  # to the end: the signal may come twice, and the sentence is still to be said
            try:
                launch.configure(
                    compilation_cache=compilation_cache(),
                    deterministic=_DETERMINISTIC.value,
                    cpu_devices=_DEVICES.value or cpu_devices,
                    exact=exact if _EXACT.value is None else _EXACT.value,
                )
                with launch.profile(_PROFILE.value):
                    main()
            except BadInput as error:
                sys.exit(f"{command_name()}: {error}")
            except OutOfTime:  # what ran has said so
                _leave(0)
            except KeyboardInterrupt as stop:
                number = number_of(stop)
                print(f"\n{command_name()}: {STOPPED[number]}", file=sys.stderr)
                _leave(BY_SIGNAL + number)

    if not flags.FLAGS.is_parsed():
        read_flags("__main__")
    # Of transformers only tokenizers and configurations are used, which need no PyTorch.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    app.run(guarded, flags_parser=lambda argv: argv[:1])  # the flags have been read


def compilation_cache() -> str | None:
    """Read where compiled programs are to be kept, as `launch.configure` takes it."""
    return None if _CACHE.value == "none" else _CACHE.value


def _leave(status: int) -> Never:
    """End at once: while an interpreter ends in order, XLA's threads may crash over what was interrupted."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _parse(argv: Sequence[str]) -> None:
    """absl's parsing, with our help, and one sentence for bad flags; libraries log warnings only, or --verbosity's."""
    if "--version" in argv:
        print(f"flowgrpo {__version__}")
        sys.exit(0)
    if "--helpfull" in argv:
        app.usage(writeto_stdout=True)
        sys.exit(0)
    words, asks_help = [word for word in argv if word not in HELP], bool(HELP & {*argv})
    if not any(word.lstrip("-").startswith("flagfile") for word in words):  # whose flags the command line may replace
        for name in flags.FLAGS:
            flags.FLAGS[name].allow_overwrite = False
    try:
        others = flags.FLAGS(words)[1:]
    except flags.Error as error:
        if not (asks_help and is_missing(error)):
            unreadable(complaint(error))
        others = []
    if others:
        unreadable(f"{others[0]!r} is not a flag: settings are given as --name=value (--help lists them)")
    if asks_help:
        try:
            print(help_of_command())
        except BadInput as error:  # no preset fits these flags
            unreadable(str(error))
        sys.exit(0)
    for name in flags.FLAGS:
        value = flags.FLAGS[name].value
        if isinstance(value, float) and not math.isfinite(value):
            unreadable(f"--{name}={value} must be a finite number")
    if not flags.FLAGS["verbosity"].present:
        flags.FLAGS.verbosity = logging.WARNING


def unreadable(sentence: str) -> Never:
    """End a command whose words can't be read."""
    print(f"{command_name()}: {sentence}", file=sys.stderr)
    sys.exit(USAGE)


def command_name() -> str:
    """The command that runs: `experiments.family`, or `flowgrpo family` where there is no checkout."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    name = spec.name if spec else Path(str(getattr(main, "__file__", "experiments"))).stem
    return name.replace("flowgrpo.experiments.", "flowgrpo ")
