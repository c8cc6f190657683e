"""Start and end of every command: common flags, parsing, JAX settings, exit status.

    _SEED = flags.DEFINE_integer("seed", 0, "Seed of all random numbers.")

    app.read_flags(__name__)

    import jax  # and everything else that takes seconds

    if __name__ == "__main__":
        app.run(main)

`read_flags` reports a typo, or prints --help, before anything slow is imported. `run` configures JAX before its backend
starts, and calls `main()`. Exit status of every command:

    0      success, or --help; or the time budget of --stop_after is over (one line): the run is saved, and the same
           command resumes it
    1      bad input (one sentence on stderr), or a bug (a traceback)
    2      flags that cannot be parsed (one sentence on stderr); nothing has run
    130    Ctrl-C (one line); a run is saved if possible, and the same command resumes it
    143    SIGTERM, likewise

Results go to stdout, whose last line is JSON; progress and messages go to stderr.
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
from flowgrpo.training.signals import BY_SIGNAL, signal_of, stop_on_signals
from flowgrpo.training.time_budget import OutOfTime

from .flags import check_settings, report_renamed
from .help import HELP, USAGE, flag_heading, format_flag_error, help_of_command, is_missing

flag_heading("Every command")
_CACHE = flags.DEFINE_string(
    "compilation_cache",
    launch.USER,
    "Folder of compiled programs that later runs reuse: user (a folder of yours below ~/.cache), none, or a path.",
)
_PROFILE = flags.DEFINE_string(
    "profile_dir", None, "Folder for a profiler trace of the run (XProf, Perfetto); none by default."
)
_DEVICES = flags.DEFINE_integer(
    "cpu_devices", None, "Number of CPU devices; the default depends on the command.", lower_bound=1
)
_DETERMINISTIC = flags.DEFINE_bool("deterministic", False, "Restrict XLA to deterministic operations.")
_EXACT = flags.DEFINE_bool(
    "exact",
    None,
    "Round each row of a matrix product independently of the other rows, so that no result depends on slots or batch "
    "sizes; on by default for commands that run an engine.",
)
flags.disclaim_key_flags()  # `read_flags` adopts them for the command that runs

STOPPED = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}


def read_flags(module: str) -> None:
    """Parse the command line, if `module` is the command that runs and not imported by another."""
    if module != "__main__":
        return
    flags.adopt_module_key_flags(sys.modules[__name__])  # so that --help lists them
    app.define_help_flags()
    _parse(sys.argv)


def run(main: Callable[[], None], *, cpu_devices: int = 1, exact: bool = False) -> None:
    """Run `main` as a command; does not return. `cpu_devices` and `exact` are defaults that flags override."""

    def guarded(_argv: Sequence[str]) -> None:
        with stop_on_signals(signal.SIGTERM):  # to the end: a second signal must not suppress the message
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
            except OutOfTime:  # the run has printed why
                _leave(0)
            except KeyboardInterrupt as stop:
                number = signal_of(stop)
                print(f"\n{command_name()}: {STOPPED[number]}", file=sys.stderr)
                _leave(BY_SIGNAL + number)

    if not flags.FLAGS.is_parsed():
        read_flags("__main__")
    # transformers is only used for tokenizers and configurations, which need no PyTorch.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    app.run(guarded, flags_parser=lambda argv: argv[:1])  # the flags have been read


def compilation_cache() -> str | None:
    """The folder of compiled programs, as `launch.configure` takes it."""
    return None if _CACHE.value == "none" else _CACHE.value


def _leave(status: int) -> Never:
    """Exit immediately: during an orderly exit XLA's threads may crash over an interrupted computation."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _parse(argv: Sequence[str]) -> None:
    """Parse flags with absl: our --help, one sentence for a bad flag, and warnings only from libraries' loggers."""
    if "--version" in argv:
        print(f"flowgrpo {__version__}")
        sys.exit(0)
    if "--helpfull" in argv:
        app.usage(writeto_stdout=True)
        sys.exit(0)
    words, asks_help = [word for word in argv if word not in HELP], bool(HELP & {*argv})
    if not any(word.lstrip("-").startswith("flagfile") for word in words):  # the command line overrides a flagfile
        for name in flags.FLAGS:
            flags.FLAGS[name].allow_overwrite = False
    try:
        others = flags.FLAGS(words)[1:]
    except flags.Error as error:
        if not (asks_help and is_missing(error)):
            exit_with_usage_error(format_flag_error(error))
        others = []
    if others:
        exit_with_usage_error(f"{others[0]!r} is not a flag: settings are given as --name=value (--help lists them)")
    if asks_help:
        try:
            print(help_of_command())
        except BadInput as error:  # no preset fits the given flags
            exit_with_usage_error(str(error))
        sys.exit(0)
    for name in flags.FLAGS:
        value = flags.FLAGS[name].value
        if isinstance(value, float) and not math.isfinite(value):
            exit_with_usage_error(f"--{name}={value} must be a finite number")
    report_renamed()
    try:
        check_settings()
    except BadInput as error:
        exit_with_usage_error(str(error))
    if not flags.FLAGS["verbosity"].present:
        flags.FLAGS.verbosity = logging.WARNING


def exit_with_usage_error(sentence: str) -> Never:
    """Exit with status 2 after one sentence on stderr."""
    print(f"{command_name()}: {sentence}", file=sys.stderr)
    sys.exit(USAGE)


def command_name() -> str:
    """Name of the command that runs: `experiments.family`, or `flowgrpo family` if the package is installed."""
    module = sys.modules["__main__"]
    spec = getattr(module, "__spec__", None)
    name = spec.name if spec else Path(str(getattr(module, "__file__", "experiments"))).stem
    return name.replace("flowgrpo.experiments.", "flowgrpo ")
