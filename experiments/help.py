"""Page that --help prints: what a command does, as its docstring has it, and its flags under headings.

    --queries=N      Queries of an update. (a positive integer; default 32)
    --env=lookup|maze
                     Environment. (default lookup)

absl's own flags, and those of libraries, are in --helpfull. Help that was asked for ends with status 0.
"""

import difflib
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence

from absl import app, flags

from experiments.headings import under_headings

USAGE = 2  # the status of a command line that can't be read
REFUSED = re.compile(r"flag --(\w+)=(.*?): (.*)", re.DOTALL)  # as absl says it
NUMBERS = (flags.IntegerParser, flags.FloatParser)
LEFT, NARROW, WIDE = 24, 80, 100  # columns: where a flag's sentence begins; a page
ENDING = "Where no default is named, the preset or the sentence says what holds. --helpfull lists absl's own flags too."


class _Asked(flags.BooleanFlag):
    """A flag that prints something, and ends the command well."""

    def __init__(self, name: str, sentence: str, show, short_name: str | None = None):
        super().__init__(name, False, sentence, short_name=short_name)
        self.allow_override, self._show = True, show

    def parse(self, argument) -> None:
        if self._parse(argument):
            self._show()
            sys.exit(0)


def define_help() -> None:
    """Put our help in the place of absl's, which are defined already."""
    for name, short in (("help", "?"), ("helpshort", None)):
        flags.DEFINE_flag(_Asked(name, "Show this help.", _show, short_name=short))
    flags.DEFINE_flag(_Asked("helpfull", "Show every flag there is.", _show_all))


def _show() -> None:
    doc = sys.modules["__main__"].__doc__ or ""
    print(page(doc, _own(), width=columns()))


def _show_all() -> None:
    app.usage(writeto_stdout=True)


def columns() -> int:
    """The width of a page: the terminal's, from 80 to 100, which is that of a file or a pipe, too."""
    return min(max(shutil.get_terminal_size((WIDE, 0)).columns, NARROW), WIDE)


def page(doc: str, chosen: Sequence[flags.Flag], *, width: int) -> str:
    """A docstring, and the flags under their headings."""
    parts = [flowing(doc, width)]
    for words, group in under_headings(chosen).items():
        parts.append("\n".join([f"{words}:", *(described(flag, width) for flag in group)]))
    return "\n\n".join([*parts, textwrap.fill(ENDING, width)])


def flowing(doc: str, width: int) -> str:
    """The paragraphs of a docstring in this width; what is indented stays as it is."""
    paragraphs = doc.strip().split("\n\n")
    return "\n\n".join(
        paragraph if any(line.startswith(" ") for line in paragraph.splitlines()) else textwrap.fill(paragraph, width)
        for paragraph in paragraphs
    )


def described(flag: flags.Flag, width: int) -> str:
    """A flag with its kind of value, its sentence, its choices, bounds and default."""
    left = f"  {written(flag)}"
    notes = "; ".join(_notes(flag, left))
    sentence = plain(flag) + (f" ({notes})" if notes else "")
    indent = " " * LEFT
    lines = textwrap.wrap(sentence, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    if len(left) >= LEFT - 1 or not lines:
        return "\n".join([left, *lines])
    return "\n".join([left.ljust(LEFT) + lines[0].lstrip(), *lines[1:]])


def plain(flag: flags.Flag) -> str:
    """The sentence of a flag, without what absl adds to it."""
    sentence = re.sub(r"^<[^>]*>: ", "", " ".join((flag.help or "").split()))
    return sentence.removesuffix("; repeat this option to specify a list of values")


def written(flag: flags.Flag) -> str:
    """How a flag is given: `--queries=N`, `--[no]resume`, `--env=lookup|maze`."""
    if isinstance(flag.parser, flags.EnumParser):
        choices = "|".join(flag.parser.enum_values)
        value = choices if len(choices) <= 2 * LEFT else "NAME"
        return f"--{flag.name}[={value}]" if flag.boolean else f"--{flag.name}={value}"
    if flag.boolean:
        return f"--[no]{flag.name}"
    kinds = ((flags.IntegerParser, "N"), (flags.FloatParser, "X"), (flags.ListParser, "A,B"))
    return f"--{flag.name}={next((value for kind, value in kinds if isinstance(flag.parser, kind)), 'TEXT')}"


def is_required(flag: flags.Flag) -> bool:
    """Whether a command can't run without it."""
    return flag.default is None and any(not one.checker(None) for one in flag.validators)


def _notes(flag: flags.Flag, left: str) -> list[str]:
    """List the notes in brackets behind a flag's sentence: choices, bounds, repetition, requirement, default."""
    notes, switch = [], left.startswith("  --[no]")
    if isinstance(flag.parser, flags.EnumParser) and left.endswith("=NAME"):
        notes.append(f"one of {', '.join(flag.parser.enum_values)}")
    if isinstance(flag.parser, NUMBERS):
        bounds = flag.parser.syntactic_help.partition(" ")[2]  # behind "a", or before ">= 2" "integer"
        notes += [bounds] if bounds not in ("integer", "number") else []
    if isinstance(flag, flags.MultiFlag):
        notes.append("may be given again")
    if is_required(flag):
        notes.append("required")
    if switch and flag.default is not None:
        notes.append(f"default {'on' if flag.default else 'off'}")
    elif not switch and flag.default not in (None, "", []):
        notes.append(f"default {_default(flag)}")
    return notes


def _default(flag: flags.Flag) -> str:
    return ",".join(map(str, flag.default)) if isinstance(flag.default, list) else str(flag.default)


# What is wrong with a command line -------------------------------------------------------------------


def complaint(error: flags.Error) -> str:
    """One sentence about flags that can't be read."""
    if isinstance(error, flags.UnrecognizedFlagError):
        name = error.flagname
        negated = [f"no{flag}" for flag in flags.FLAGS if flags.FLAGS[flag].boolean]
        near = difflib.get_close_matches(name, [*flags.FLAGS, *negated], n=1)
        return f"--{name} is no flag{f'; did you mean --{near[0]}?' if near else ''} (--help lists them)"
    if str(error).endswith("must have a value other than None."):
        missing = [flag for flag in _own() if is_required(flag) and flag.value is None]
        return "; ".join(f"--{flag.name} must be given ({plain(flag).rstrip('.')})" for flag in missing)
    bad = REFUSED.fullmatch(str(error))
    if bad is None:
        return str(error)
    name, value, why = bad.groups()
    if why.startswith(f"--{name}"):  # a sentence of the command's own
        return why
    return f"--{name}={value} must be {_wanted(flags.FLAGS[name], value) or why}"


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
