"""Page that --help prints: what a command does, as its docstring has it, and its flags under headings.

    flag_heading("Sizes")
    _QUERIES = flags.DEFINE_integer("queries", 32, "Queries of an update.", lower_bound=1)

Each flag that is defined after `flag_heading(words)` stands under these words, up to the next of them. absl's own
flags, and those of libraries, are in --helpfull. Help that was asked for ends with status 0.

Defaults are those of the run that the command line describes: `--env=maze --help` shows those that fit maze.
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
    "What is run",
    "The agents",
    "The cluster",
    "Sizes",
    "Learning",
    "Sampling",
    "Costs",
    "Devices and memory",
    "Files and resuming",
    "Every command",
)
_begun: list[tuple[str, int]] = []  # the words, and how many flags there were
_presets: list[Callable[[], Mapping[str, Any]]] = []


def flag_heading(words: str) -> None:
    """Let the flags that are defined from here on stand under these words, which are one of `HEADINGS`."""
    if words not in HEADINGS:
        raise ValueError(f"{words!r} is none of the headings: {', '.join(HEADINGS)}")
    _begun.append((words, len(flags.FLAGS)))


def show_defaults(preset: Callable[[], Mapping[str, Any]]) -> None:
    """Let help show these defaults, by the names of flags, which `preset` finds when all flags have been read."""
    _presets.append(preset)


def under_headings(chosen: Sequence[flags.Flag]) -> dict[str, list[flags.Flag]]:
    """These flags by their heading, both in the order of --help; a flag without a heading is an error."""
    place = {name: number for number, name in enumerate(flags.FLAGS)}
    found: dict[str, list[flags.Flag]] = {words: [] for words in HEADINGS}
    for flag in sorted(chosen, key=lambda flag: place[flag.name]):
        found[next(words for words, first in reversed(_begun) if first <= place[flag.name])].append(flag)
    return {words: group for words, group in found.items() if group}


USAGE = 2  # the status of a command line that can't be read
REFUSED = re.compile(r"flag --(\w+)=(.*?): (.*)", re.DOTALL)  # as absl says it
NUMBERS = (flags.IntegerParser, flags.FloatParser)
LEFT, NARROW, WIDE = 24, 80, 100  # columns: where a flag's sentence begins; a page
ENDING = "--helpfull lists absl's own flags, too."
PRESETS = (
    "A default is that of the run which this command line describes, and may follow from its other flags, such as an "
    "environment, an algorithm or a model: give them beside --help to see what would run. "
)
HELP = {"--help", "-help", "-h", "-?", "--helpshort"}
PACKAGE = __name__.partition(".cli.")[0]  # `experiments` in a checkout, `flowgrpo.experiments` where it was installed


def shown_command(words: str) -> str:
    """Words with their commands as they are called here: `python -m flowgrpo view` where there is no checkout."""
    if PACKAGE == "experiments":
        return words
    names = re.compile(rf"python -m (?:experiments|{PACKAGE})\.(\w+(?:\.\w+)*)")
    return names.sub(lambda found: f"python -m flowgrpo {found[1].replace('.', ' ')}", words)


def help_of_command() -> str:
    """The page of the command that runs; `BadInput` where no preset fits the flags that were given."""
    defaults = {name: value for preset in _presets for name, value in preset().items()}
    doc = shown_command(sys.modules["__main__"].__doc__ or "")
    return help_page(doc, _own(), width=page_width(), defaults=defaults)


def page_width() -> int:
    """The width of a page: the terminal's, from 80 to 100, which is that of a file or a pipe, too."""
    return min(max(shutil.get_terminal_size((WIDE, 0)).columns, NARROW), WIDE)


def help_page(doc: str, chosen: Sequence[flags.Flag], *, width: int, defaults: Mapping[str, Any] = {}) -> str:
    """A docstring, and the flags under their headings; `defaults` are those that a preset has."""
    parts = [flowing(doc, width)]
    for words, group in under_headings(chosen).items():
        parts.append("\n".join([f"{words}:", *(describe_flag(flag, width, defaults) for flag in group)]))
    return "\n\n".join([*parts, textwrap.fill((PRESETS if defaults else "") + ENDING, width)])


def flowing(doc: str, width: int) -> str:
    """The paragraphs of a docstring in this width; what is indented stays as it is."""
    paragraphs = doc.strip().split("\n\n")
    return "\n\n".join(
        paragraph if any(line.startswith(" ") for line in paragraph.splitlines()) else textwrap.fill(paragraph, width)
        for paragraph in paragraphs
    )


def describe_flag(flag: flags.Flag, width: int, defaults: Mapping[str, Any] = {}) -> str:
    """A flag with its kind of value, its sentence, its choices, bounds and default."""
    left = f"  {written(flag)}"
    notes = "; ".join(_notes(flag, left, defaults.get(flag.name, flag.default)))
    sentence = _plain(flag) + (f" ({notes})" if notes else "")
    indent, fits = " " * LEFT, len(left) < LEFT - 1
    begun = left.ljust(LEFT) if fits else indent
    text = textwrap.fill(sentence, width, initial_indent=begun, subsequent_indent=indent, break_on_hyphens=False)
    return text if fits else f"{left}\n{text}"


def _plain(flag: flags.Flag) -> str:
    """The sentence of a flag, without what absl adds to it."""
    sentence = re.sub(r"^<[^>]*>: ", "", " ".join((flag.help or "").split()))
    return sentence.removesuffix("; repeat this option to specify a list of values")


def written(flag: flags.Flag) -> str:
    """Say how a flag is given: `--queries=N`, `--[no]resume`, `--env=lookup|maze`."""
    if isinstance(flag.parser, flags.EnumParser):
        choices = "|".join(flag.parser.enum_values)
        value = choices if len(choices) <= 2 * LEFT else "NAME"
        return f"--{flag.name}[={value}]" if flag.boolean else f"--{flag.name}={value}"
    if flag.boolean:
        return f"--[no]{flag.name}"
    kinds = ((flags.IntegerParser, "N"), (flags.FloatParser, "X"), (flags.ListParser, "A,B"))
    return f"--{flag.name}={next((value for kind, value in kinds if isinstance(flag.parser, kind)), 'TEXT')}"


def is_required(flag: flags.Flag) -> bool:
    """Say whether a command can't run without it."""
    return flag.default is None and any(not one.checker(None) for one in flag.validators)


def _notes(flag: flags.Flag, left: str, default: Any) -> list[str]:
    """List the notes in brackets behind a flag's sentence: choices, bounds, repetition, requirement, default."""
    notes, switch = [], left.startswith("  --[no]")
    if isinstance(flag.parser, flags.EnumParser) and left.endswith("=NAME"):
        notes.append(f"one of {', '.join(flag.parser.enum_values)}")
    if isinstance(flag.parser, NUMBERS):
        bounds = flag.parser.syntactic_help.partition(" ")[2]  # behind "a", or before ">= 2" "integer"
        notes += [bounds] if bounds not in ("integer", "number") else []
    notes += ["may be given again"] if isinstance(flag, flags.MultiFlag) else []
    notes += ["required"] if is_required(flag) else []
    if switch and default is not None:
        notes.append(f"default {'on' if default else 'off'}")
    elif not switch and default not in (None, "", [], ()):
        notes.append(f"default {_text(default)}")
    return notes


def is_missing(error: flags.Error) -> bool:
    """Whether the command line lacks a flag that must be given."""
    return str(error).endswith("must have a value other than None.")


def complaint(error: flags.Error) -> str:
    """One sentence about flags that can't be read."""
    if isinstance(error, flags.UnrecognizedFlagError):
        name = error.flagname
        negated = [f"no{flag}" for flag in flags.FLAGS if flags.FLAGS[flag].boolean]
        near = [flag for flag in flags.FLAGS if name == "".join(part[:1] for part in flag.split("_"))]  # --lr
        near = near or difflib.get_close_matches(name, [*flags.FLAGS, *negated], n=1)
        hint = f"; did you mean {' or '.join(f'--{flag}' for flag in near)}?" if near else ""
        return f"--{name} is no flag{hint} (--help lists them)"
    if is_missing(error):
        missing = [flag for flag in _own() if is_required(flag) and flag.value is None]
        return "; ".join(f"--{flag.name} must be given ({_plain(flag).rstrip('.')})" for flag in missing)
    bad = REFUSED.fullmatch(str(error))
    if bad is None:
        return str(error)
    name, value, why = bad.groups()
    if why.startswith(f"--{name}"):  # a sentence of the command's own
        return why
    if why.startswith("already defined as"):
        return f"--{name} is given twice, with {_text(flags.FLAGS[name].value)} and with {value}: give it once"
    return f"--{name}={value} must be {_wanted(flags.FLAGS[name], value) or why}"


def _text(value: Any) -> str:
    """A flag's value as it is written on a command line."""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _wanted(flag: flags.Flag, value: str) -> str:
    """Say what a flag may be, where its kind says it."""
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


def _own() -> list[flags.Flag]:
    """The flags that are the command's, and not a library's."""
    return flags.FLAGS.get_key_flags_for_module(sys.argv[0])
