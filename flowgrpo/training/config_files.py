"""Settings in files and on command lines: YAML or JSON by section, as `run.json` has them, and SECTION.NAME=VALUE.

    values = read_settings(Config, "run.yaml").values     {"learning_rate": 1e-5, ...}, checked one by one
    values |= dict([parse_setting(Config, "learner.learning_rate=1e-5")])
    text = format_config(config, "pure")                  YAML that `read_settings` reads

A file may leave out settings: `make_config` adds the defaults that fit the others.
"""

import difflib
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from flowgrpo.errors import BadInput
from flowgrpo.renamed import REMOVED
from flowgrpo.training.config import (
    RunConfig,
    Setting,
    check_setting,
    declared_settings,
    section_types,
    settings_of_section,
)

BOOLEANS = {"true": True, "false": False}


class SettingsFile(NamedTuple):
    """The settings of a file by name, and the recipe that it names."""

    values: dict[str, Any]
    recipe: str | None


def read_file(path: str | Path) -> SettingsFile:
    """The settings of a file by name, not checked: of a whole `run.json`, or the settings of one."""
    path = Path(path)
    try:
        content = yaml.safe_load(path.read_text("utf-8"))  # JSON is YAML, too
    except OSError as error:
        raise BadInput(f"--config={path} can't be read ({error.strerror}): give a YAML or JSON file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        place = f" in line {mark.line + 1}" if (mark := getattr(error, "problem_mark", None)) else ""
        raise BadInput(f"--config={path} is neither YAML nor JSON{place}: correct it") from None
    recipe = None
    if isinstance(content, dict) and isinstance(content.get("settings"), dict):
        recipe, content = content.get("recipe"), content["settings"]
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise BadInput(f"--config={path} has no settings: give sections with settings, as run.json has them")
    values: dict[str, Any] = {}
    for name, value in content.items():
        if isinstance(value, dict):
            values |= {f"{name}.{key}": item for key, item in value.items()}
        elif value is not None:  # a section without a setting
            values[name] = value
    return SettingsFile(values, recipe if isinstance(recipe, str) else None)


def read_settings(config: type[RunConfig], path: str | Path) -> SettingsFile:
    """The settings of a file by name; raises `BadInput`, with file and key, for one that the Config doesn't have."""
    content, values = read_file(path), {}
    removed = REMOVED.get(content.recipe or "", ())
    for key, value in content.values.items():
        if key.rpartition(".")[2] in removed:
            continue
        name = find_setting(config, key, f"{path}: {key}")
        declared = declared_settings(config)[name]
        values[name] = _from_file(value, declared)
        check_setting(f"{path}: {key}", values[name], declared)
    return SettingsFile(values, content.recipe)


def find_setting(config: type[RunConfig], key: str, label: str) -> str:
    """The name of the setting that `section.name`, or the name alone, names; an earlier name is one, too."""
    declared = declared_settings(config)
    keys = {
        f"{section}.{name}": name for section, of in section_types(config).items() for name in settings_of_section(of)
    }
    keys |= {name: name for name in declared}
    for full, name in list(keys.items()):
        if (was := declared[name].info.was) is not None:
            keys.setdefault(full.removesuffix(name) + was, name)
    if key in keys:
        return keys[key]
    name = key.rpartition(".")[2]
    close = difflib.get_close_matches(name, declared, n=1)  # perhaps in another section
    full = [full for full, own in keys.items() if close and own == close[0] and "." in full]
    raise BadInput(f"{label} is no setting{f'; did you mean {full[0]}?' if full else ''}")


def _from_file(value: Any, declared: Setting) -> Any:
    """A value of YAML or JSON as its setting has it: YAML reads 1e-5, which has no point, as a text, and 1 as whole."""
    if declared.kind is tuple and isinstance(value, list):
        return tuple(value)
    if declared.kind is float and isinstance(value, str | int) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def parse_setting(config: type[RunConfig], assignment: str) -> tuple[str, Any]:
    """The name and the value of `section.name=value` or `name=value`, by the type of the setting."""
    key, equals, text = assignment.partition("=")
    label = f"--set {key}"
    if not equals:
        raise BadInput(f"--set {assignment} has no value: give SECTION.NAME=VALUE, such as learner.learning_rate=1e-5")
    name = find_setting(config, key, label)
    declared = declared_settings(config)[name]
    value = _parse(text, declared)
    check_setting(label, value, declared)
    return name, value


def _parse(text: str, declared: Setting) -> Any:
    """A text as a value of the setting's type; what can't be one stays a text, which the check refuses."""
    if text == "null" and declared.is_optional:
        return None
    if declared.kind is bool:
        return BOOLEANS.get(text.lower(), text)
    if declared.kind is tuple:
        return (text,) if declared.info.repeated else tuple(part for part in text.split(",") if part)
    try:
        return declared.kind(text)
    except ValueError:
        return text


def format_config(config: RunConfig, recipe: str) -> str:
    """A Config as YAML, with what each section is about as a comment."""
    types, parts = section_types(type(config)), [yaml.safe_dump({"recipe": recipe}).rstrip(), "settings:"]
    for section, values in config.to_json().items():
        comment = (types[section].__doc__ or "").partition("\n")[0]
        text = yaml.safe_dump(values, sort_keys=False, width=100, allow_unicode=True)
        parts += [f"  {section}:  # {comment}", *(f"    {line}" for line in text.splitlines())]
    return "\n".join(parts) + "\n"
