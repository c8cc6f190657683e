"""Python in the sandbox as a tool: `python` returns what a program prints, or the value of its last expression.

    python(sandbox).call({"code": "x = 6 * 7\nx"})        # "42"

Each call is a process of its own and shares no state with others. A program that raises, hangs or exceeds a limit is
an error observation, with what it had printed; only the sandbox's own failure is a failure.
"""

import secrets
import sysconfig
from functools import cache, partial
from pathlib import Path

from flowgrpo.contracts import Tool
from flowgrpo.sandbox import Limits, RunResult, Sandbox
from flowgrpo.tools import notebook_cell
from flowgrpo.tools.schema import tool
from flowgrpo.tools.toolset import ToolError, ToolFailure
from flowgrpo.types import BadInput

MAX_CHARS = 100_000  # characters of a program
FENCE = "```"
TRACEBACK_LINES = 12  # of a traceback
QUEUE_SECONDS = 600.0  # for a worker of the sandbox, which has deadlines of its own


def python(sandbox: Sandbox, *, limits: Limits = Limits(seconds=5), pure: bool = False) -> Tool:  # noqa: B008
    """The tool "python".

    Args:
        sandbox: runs as many programs at once as it has workers, and further calls wait: for a rollout, one a core.
        limits: of each run.
        pure: whether equal programs print the same.
    """
    run = partial(run_code, sandbox=sandbox, limits=limits)
    return tool(run, name="python", pure=pure, timeout=limits.seconds + QUEUE_SECONDS)


def run_code(code: str, *, sandbox: Sandbox, limits: Limits) -> str:
    """Runs a Python program and gives what it prints, or else the value of its last expression.

    Only the standard library is there; there is no network and no input, and nothing is kept between calls.

    code: the program; print() what you want to see
    """
    source = strip_fences(code)
    if not source.strip():
        raise ToolError("There is no code.")
    if len(source) > MAX_CHARS:
        raise ToolError(f"The code has {len(source)} characters, but may have {MAX_CHARS}.")
    mark = f"\0{secrets.token_hex(8)}\0"  # what a program can't know, so that it can't forge a value by accident
    program = f"{_cell_source()}\n\nrun_cell({mark!r})\n"
    try:
        result = sandbox.run(program, files={notebook_cell.FILE: source}, limits=limits)
    except BadInput as error:  # the sandbox can't be used at all
        raise ToolFailure(str(error)) from error
    printed, _, value = result.stdout.partition(mark)
    printed = printed.rstrip()
    if (result.ending, result.code) != ("exited", 0):
        raise ToolError("\n".join(filter(None, (printed, _failure_message(result, limits)))))
    return printed or value.rstrip() or "(nothing was printed; use print() to see a result)"


def strip_fences(code: str) -> str:
    """The code between ``` and ```, if all of it is fenced; the last fence may be missing."""
    opening, newline, body = code.lstrip().partition("\n")
    if not newline or not opening.startswith(FENCE) or "`" in opening.removeprefix(FENCE):
        return code
    return body.rstrip().removesuffix(FENCE).rstrip()


@cache
def _cell_source() -> str:
    return Path(notebook_cell.__file__).read_text(encoding="utf-8")


def _failure_message(result: RunResult, limits: Limits) -> str:
    """Why a program did not exit with status 0."""
    messages = {
        "timeout": f"The code ran for more than {limits.seconds:g} s and was stopped.",
        "memory": f"The code used more than {limits.memory >> 20} MB of memory and was stopped.",
        "output": f"The code wrote more than {limits.output_bytes} bytes and was stopped.",
        "signal": "The code's process was killed by a signal.",
    }
    if result.ending in messages:
        return messages[result.ending]
    library = sysconfig.get_path("stdlib")  # its path on this machine is nothing to learn from
    lines = result.stderr.replace(library, "lib").rstrip().splitlines()
    return "\n".join(lines[-TRACEBACK_LINES:]) or f"The code ended with exit code {result.code}."
