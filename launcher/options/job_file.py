"""The job file: a YAML mapping of options, with the program as `script` or `module` and `args`.

Scalars stay text: YAML 1.1 would read `1:4` as 64 and `no` as False. The option's converter checks them, as it checks a
word of the command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elaunch.launcher.errors import UsageError, nearest
from elaunch.launcher.options.command_line import Given, Source
from elaunch.launcher.options.table import TABLE
from elaunch.launcher.options.values import Raw

_PROGRAM_KEYS = ("script", "module", "args")
_NOT_IN_A_FILE = ("config", "help", "version", "module")
_OPTIONS = {name: option for option in TABLE if option.long not in _NOT_IN_A_FILE for name in option.names}
# A key with one of these has no value.
_NULLS = ("", "~", "null", "Null", "NULL")


@dataclass(frozen=True)
class JobFile:
    """The content of a job file: options by click's names, and the program if the file names one."""

    options: Mapping[str, Given]
    script: str | None = None
    module: str | None = None
    args: tuple[str, ...] = ()


def read(path: str) -> JobFile:
    """The job file at `path`. Raises UsageError if it cannot be read or understood."""
    try:
        # It may be a pipe, as in `--config <(make-it)`.
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"--config {path} cannot be read ({why}); give a YAML file of options") from None
    return parse(text, path)


def parse(text: str, name: str) -> JobFile:
    """The job file in `text`. Messages call it `name`. Raises UsageError."""
    entries = _entries(text, name)
    script, module, args = (entries.pop(key, None) for key in _PROGRAM_KEYS)
    if script and module:
        raise UsageError(f"{name} names a script ({script}) and a module ({module}); keep one of them")
    for key, value in (("script", script), ("module", module)):
        if not isinstance(value, str | None) or value in ("true", "false"):
            raise UsageError(f"{name}: {key} is {value}; give one name")
    if args is not None and not isinstance(args, list):
        raise UsageError(f"{name}: args is {args!r}; give a list, as in [--lr, 0.1]")
    given: dict[str, Given] = {}
    for key, raw in entries.items():
        option = _OPTIONS.get(key)
        if option is None:
            near = nearest(key, (*_OPTIONS, *_PROGRAM_KEYS))
            hint = f"did you mean {near}?" if near else "elaunch --help lists the options"
            raise UsageError(f"{name}: {key} is no option of elaunch; {hint}")
        if option.name in given:
            raise UsageError(f"{name}: {key} is given twice; keep one")
        given[option.name] = Given(raw, Source.FILE, f"{name}: {key}: {raw}")
    return JobFile(given, script, module, tuple(args or ()))


def _entries(text: str, name: str) -> dict[str, Any]:
    """The file's top level. Keys are spelt with dashes. Keys without a value are left out."""
    import yaml  # Only if there is a job file: the import takes as long as all other imports of the launcher.

    try:
        root = yaml.load(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise UsageError(f"{name} is not YAML: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(root, dict | None) and root != "":
        raise UsageError(f"{name} is not a mapping of options; write one `name: value` per line")
    entries: dict[str, Any] = {}
    for key, value in (root or {}).items():
        _check_words(value, f"{name}: {key}")
        if key.replace("_", "-") in entries:
            raise UsageError(f"{name}: {key} is given twice; keep one")
        if value not in _NULLS:
            entries[key.replace("_", "-")] = value
    return entries


def _check_words(value: Raw, where: str) -> None:
    """Raises UsageError for what is nested."""
    words = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else [value]
    if not all(isinstance(word, str) for word in words):
        raise UsageError(f"{where} holds a list or mapping inside another; write plain words there")
