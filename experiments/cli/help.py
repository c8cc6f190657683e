"""The page of --help: the docstring of a command, and its flags under headings.

    flag_heading("Sizes")
    _QUERIES = flags.DEFINE_integer("queries", 32, "Queries of an update.", lower_bound=1)

`flag_heading(title)` is the heading of all flags defined after it, up to the next heading. absl's own flags, and those
of libraries, are in --helpfull. --help exits with status 0.

Defaults are those of the run that the command line describes: `--env=maze --help` shows those of maze.
"""

import difflib
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags

HEADINGS = (  # in the order of --help
    "Run",
    "Agents",
    "Cluster",
    "Sizes",
    "Learning",
    "Sampling",
    "Costs",
    "Devices and memory",
    "Files and resuming",
    "Every command",
)
_headings: list[tuple[str, int]] = []  # (title, number of flags defined before it)
_presets: list[Callable[[], Mapping[str, Any]]] = []


def flag_heading(title: str) -> None:
    """Put the flags that are defined after this call under a heading, one of `HEADINGS`."""
    if title not in HEADINGS:
        raise ValueError(f"{title!r} is none of the headings: {', '.join(HEADINGS)}")
    _headings.append((title, len(flags.FLAGS)))


def show_defaults(preset: Callable[[], Mapping[str, Any]]) -> None:
    """Show the defaults that `preset()` returns by flag name, once all flags have been parsed."""
    _presets.append(preset)


def group_by_heading(chosen: Sequence[flags.Flag]) -> dict[str, list[flags.Flag]]:
    """Flags by heading, both in the order of --help; a flag without a heading is an error."""
    position = {name: index for index, name in enumerate(flags.FLAGS)}
    groups: dict[str, list[flags.Flag]] = {title: [] for title in HEADINGS}
    for flag in sorted(chosen, key=lambda flag: position[flag.name]):
        groups[next(title for title, first in reversed(_headings) if first <= position[flag.name])].append(flag)
    return {title: group for title, group in groups.items() if group}


USAGE = 2  # exit status of a command line that can't be parsed
REFUSED = re.compile(r"flag --(\w+)=(.*?): (.*)", re.DOTALL)  # a message of absl
NUMBERS = (flags.IntegerParser, flags.FloatParser)
LEFT, NARROW, WIDE = 24, 80, 100  # columns: start of a flag's sentence; minimum and maximum page width
ENDING = "--helpfull lists absl's own flags, too."
PRESETS = (
    "A default is that of the run which this command line describes, and may depend on its other flags, such as an "
    "environment, an algorithm or a model: give them with --help to see what would run. "
)
HELP = {"--help", "-help", "-h", "-?", "--helpshort"}
PACKAGE = __name__.partition(".cli.")[0]  # `experiments` in a checkout, `flowgrpo.experiments` if installed


def shown_command(text: str) -> str:
    """A text with its commands as they are called here: `python -m flowgrpo view` without a checkout."""
    if PACKAGE == "experiments":
        return text
    names = re.compile(rf"python -m (?:experiments|{PACKAGE})\.(\w+(?:\.\w+)*)")
    return names.sub(lambda match: f"python -m flowgrpo {match[1].replace('.', ' ')}", text)


def help_of_command() -> str:
    """The help page of the running command; `BadInput` if no preset fits the flags."""
    defaults = {name: value for preset in _presets for name, value in preset().items()}
    doc = shown_command(sys.modules["__main__"].__doc__ or "")
    return help_page(doc, _command_flags(), width=page_width(), defaults=defaults)


def page_width() -> int:
    """Width of a page: that of the terminal, clipped to 80 to 100; 100 for a file or a pipe."""
    return min(max(shutil.get_terminal_size((WIDE, 0)).columns, NARROW), WIDE)


def help_page(doc: str, chosen: Sequence[flags.Flag], *, width: int, defaults: Mapping[str, Any] = {}) -> str:
    """A docstring, and the flags under their headings; `defaults` are those of a preset."""
    parts = [reflow(doc, width)]
    for title, group in group_by_heading(chosen).items():
        parts.append("\n".join([f"{title}:", *(describe_flag(flag, width, defaults) for flag in group)]))
    return "\n\n".join([*parts, textwrap.fill((PRESETS if defaults else "") + ENDING, width)])


def reflow(doc: str, width: int) -> str:
    """The paragraphs of a docstring, wrapped at this width; indented ones are kept."""
    paragraphs = doc.strip().split("\n\n")
    return "\n\n".join(
        paragraph if any(line.startswith(" ") for line in paragraph.splitlines()) else textwrap.fill(paragraph, width)
        for paragraph in paragraphs
    )


def describe_flag(flag: flags.Flag, width: int, defaults: Mapping[str, Any] = {}) -> str:
    """A flag with its type, its sentence, its choices, bounds and default."""
    left = f"  {flag_syntax(flag)}"
    notes = "; ".join(_notes(flag, left, defaults.get(flag.name, flag.default)))
    sentence = _plain(flag) + (f" ({notes})" if notes else "")
    indent, fits = " " * LEFT, len(left) < LEFT - 1
    first_indent = left.ljust(LEFT) if fits else indent
    text = textwrap.fill(sentence, width, initial_indent=first_indent, subsequent_indent=indent, break_on_hyphens=False)
    return text if fits else f"{left}\n{text}"


def _plain(flag: flags.Flag) -> str:
    """The sentence of a flag, without absl's additions."""
    sentence = re.sub(r"^<[^>]*>: ", "", " ".join((flag.help or "").split()))
    return sentence.removesuffix("; repeat this option to specify a list of values")


def flag_syntax(flag: flags.Flag) -> str:
    """The syntax of a flag: `--queries=N`, `--[no]resume`, `--env=lookup|maze`."""
    if isinstance(flag.parser, flags.EnumParser):
        choices = "|".join(flag.parser.enum_values)
        value = choices if len(choices) <= 2 * LEFT else "NAME"
        return f"--{flag.name}[={value}]" if flag.boolean else f"--{flag.name}={value}"
    if flag.boolean:
        return f"--[no]{flag.name}"
    kinds = ((flags.IntegerParser, "N"), (flags.FloatParser, "X"), (flags.ListParser, "A,B"))
    return f"--{flag.name}={next((value for kind, value in kinds if isinstance(flag.parser, kind)), 'TEXT')}"


def is_required(flag: flags.Flag) -> bool:
    """Whether a flag must be given."""
    return flag.default is None and any(not validator.checker(None) for validator in flag.validators)


def _notes(flag: flags.Flag, left: str, default: Any) -> list[str]:
    """The notes in brackets after a flag's sentence: choices, bounds, repetition, requirement, default."""
    notes, is_switch = [], left.startswith("  --[no]")
    if isinstance(flag.parser, flags.EnumParser) and left.endswith("=NAME"):
        notes.append(f"one of {', '.join(flag.parser.enum_values)}")
    if isinstance(flag.parser, NUMBERS):
        bounds = flag.parser.syntactic_help.partition(" ")[2]  # after "a" or "integer"
        notes += [bounds] if bounds not in ("integer", "number") else []
    notes += ["may be given again"] if isinstance(flag, flags.MultiFlag) else []
    notes += ["required"] if is_required(flag) else []
    if is_switch and default is not None:
        notes.append(f"default {'on' if default else 'off'}")
    elif not is_switch and default not in (None, "", [], ()):
        notes.append(f"default {_text(default)}")
    return notes


def is_missing(error: flags.Error) -> bool:
    """Whether the error is about a missing flag that must be given."""
    return str(error).endswith("must have a value other than None.")


def format_flag_error(error: flags.Error) -> str:
    """One sentence about flags that can't be parsed."""
    if isinstance(error, flags.UnrecognizedFlagError):
        name = error.flagname
        negated = [f"no{flag}" for flag in flags.FLAGS if flags.FLAGS[flag].boolean]
        near = [flag for flag in flags.FLAGS if name == "".join(part[:1] for part in flag.split("_"))]  # --lr
        near = near or difflib.get_close_matches(name, [*flags.FLAGS, *negated], n=1)
        hint = f"; did you mean {' or '.join(f'--{flag}' for flag in near)}?" if near else ""
        return f"--{name} is no flag{hint} (--help lists them)"
    if is_missing(error):
        missing = [flag for flag in _command_flags() if is_required(flag) and flag.value is None]
        return "; ".join(f"--{flag.name} must be given ({_plain(flag).rstrip('.')})" for flag in missing)
    match = REFUSED.fullmatch(str(error))
    if match is None:
        return str(error)
    name, value, reason = match.groups()
    if reason.startswith(f"--{name}"):  # a sentence of a validator of the command
        return reason
    if reason.startswith("already defined as"):
        return f"--{name} is given twice, with {_text(flags.FLAGS[name].value)} and with {value}: give it once"
    return f"--{name}={value} must be {_wanted(flags.FLAGS[name], value) or reason}"


def _text(value: Any) -> str:
    """A flag's value in the syntax of a command line."""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _wanted(flag: flags.Flag, value: str) -> str:
    """What a flag's value must be, if its type determines it."""
    parser = flag.parser
    if isinstance(parser, flags.EnumParser):
        near = difflib.get_close_matches(value, parser.enum_values, n=1)
        return f"one of {', '.join(parser.enum_values)}{f'; did you mean {near[0]}?' if near else ''}"
    if isinstance(parser, flags.BooleanParser):
        return f"true or false: --{flag.name}, or --no{flag.name}"
    if not isinstance(parser, NUMBERS):
        return ""
    kind = "a whole number" if isinstance(parser, flags.IntegerParser) else "a number"
    bounds = (("of at least", parser.lower_bound), ("of at most", parser.upper_bound))
    return " ".join([kind, *(f"{words} {bound:g}" for words, bound in bounds if bound is not None)])


def _command_flags() -> list[flags.Flag]:
    """The flags of the running command, without those of libraries."""
    return flags.FLAGS.get_key_flags_for_module(sys.argv[0])
