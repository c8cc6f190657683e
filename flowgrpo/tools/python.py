"""Python in the sandbox as a tool: `python` gives what a program prints, or the value of its last expression.

    python(sandbox).call({"code": "x = 6 * 7\nx"})        # "42"

Each call is a process of its own that remembers nothing of others. A program that raises, hangs or takes too much is
an error observation, with what it had printed; only the sandbox's own failure is a failure.
"""

import secrets
import sysconfig
from functools import cache, partial
from pathlib import Path

from flowgrpo.contracts import Tool
from flowgrpo.sandbox import Limits, Ran, Sandbox
from flowgrpo.tools import notebook_cell
from flowgrpo.tools.schema import tool
from flowgrpo.tools.toolset import ToolError, ToolFailure
from flowgrpo.types import BadInput

LONGEST = 100_000  # characters of a program
FENCE = "```"
LAST_LINES = 12  # of a traceback
QUEUE = 600.0  # seconds that a call may wait for a worker of the sandbox, which has deadlines of its own


def python(sandbox: Sandbox, *, limits: Limits = Limits(seconds=5), pure: bool = False) -> Tool:  # noqa: B008
    """Make the tool "python", each of whose runs has `limits`; `pure` promises that equal programs print the same.

    The sandbox runs as many programs at once as it has workers, and further calls wait: for a rollout, give it one for
    each core.
    """
    run = partial(run_code, sandbox=sandbox, limits=limits)
    return tool(run, name="python", pure=pure, seconds=limits.seconds + QUEUE)


def run_code(code: str, *, sandbox: Sandbox, limits: Limits) -> str:
    """Runs a Python program and gives what it prints, or else the value of its last expression.

    Only the standard library is there; there is no network and no input, and nothing is kept between calls.

    code: the program; print() what you want to see
    """
    source = take_off_fences(code)
    if not source.strip():
        raise ToolError("There is no code.")
    if len(source) > LONGEST:
        raise ToolError(f"The code has {len(source)} characters, but may have {LONGEST}.")
    mark = f"\0{secrets.token_hex(8)}\0"  # what a program can't know, so that it can't forge a value by accident
    program = f"{_shown_text()}\n\ncarry_out({mark!r})\n"
    try:
        ran = sandbox.run(program, files={notebook_cell.FILE: source}, limits=limits)
    except BadInput as error:  # the sandbox can't be used at all
        raise ToolFailure(str(error)) from error
    printed, _, value = ran.stdout.partition(mark)
    printed = printed.rstrip()
    if (ran.ended, ran.code) != ("exited", 0):
        raise ToolError("\n".join(filter(None, (printed, _fault(ran, limits)))))
    return printed or value.rstrip() or "(nothing was printed; use print() to see a result)"


def take_off_fences(code: str) -> str:
    """Get the code between ``` and ```, where the whole is fenced; the last fence may be missing."""
    opening, newline, rest = code.lstrip().partition("\n")
    if not newline or not opening.startswith(FENCE) or "`" in opening.removeprefix(FENCE):
        return code
    return rest.rstrip().removesuffix(FENCE).rstrip()


@cache
def _shown_text() -> str:
    return Path(notebook_cell.__file__).read_text(encoding="utf-8")


def _fault(ran: Ran, limits: Limits) -> str:
    """Say why a program did not end well."""
    words = {
        "timeout": f"The code ran for more than {limits.seconds:g} s and was stopped.",
        "memory": f"The code used more than {limits.memory >> 20} MB of memory and was stopped.",
        "output": f"The code wrote more than {limits.output_bytes} bytes and was stopped.",
        "signal": "The code's process was killed by a signal.",
    }
    if ran.ended in words:
        return words[ran.ended]
    library = sysconfig.get_path("stdlib")  # where it lies on this machine is nothing to learn from
    lines = ran.stderr.replace(library, "lib").rstrip().splitlines()
    return "\n".join(lines[-LAST_LINES:]) or f"The code ended with exit code {ran.code}."
