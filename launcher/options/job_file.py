"""The job file: a YAML mapping of options, with the program as `script` or `module` and `args`.

Scalars stay text: YAML 1.1 would read `1:4` as 64 and `no` as False. The option's converter checks them, as it checks a
word of the command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elaunch.launcher.errors import UsageError, nearest, tidy
from elaunch.launcher.options.command_line import TOKEN_IS_SECRET, Given, Source
from elaunch.launcher.options.small_file import read_small
from elaunch.launcher.options.table import TABLE
from elaunch.launcher.options.values import Raw

if TYPE_CHECKING:
    import yaml

_PROGRAM_KEYS = ("script", "module", "args")
_NOT_IN_A_FILE = ("config", "help", "version", "module")
_OPTIONS = {name: option for option in TABLE if option.long not in _NOT_IN_A_FILE for name in option.names}
# PyYAML reads any text of this size in well under a second. A megabyte of brackets would take minutes.
_CHARACTERS_MAX = 1 << 16
_BRACKETS_MAX = 1000
_NULLS = ("", "~", "null", "Null", "NULL")


@dataclass(frozen=True)
class FileValue:
    """One value, with its key and its place in the file (`where`, for messages)."""

    raw: Raw
    key: str
    where: str


@dataclass(frozen=True)
class JobFile:
    """The content of a job file: options by click's names, and the program if the file names one."""

    options: Mapping[str, Given]
    script: str | None = None
    module: str | None = None
    args: tuple[str, ...] = ()


def read(path: str) -> JobFile:
    """The job file at `path`. Raises UsageError if it cannot be read or understood."""
    path = tidy(path)
    try:
        text = read_small(path, may_be_pipe=True)
    except FileNotFoundError:
        raise UsageError(f"--config {path} does not exist; give the path of a YAML file of options") from None
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"--config {path} cannot be read ({why}); give a YAML file that you may read") from None
    return parse(text, path)


def parse(text: str, name: str) -> JobFile:
    """The job file in `text`. Messages call it `name`. Raises UsageError."""
    entries = _entries(text, name)
    script, module, args = (entries.pop(key, None) for key in _PROGRAM_KEYS)
    if script and module:
        raise UsageError(f"{name} names a script ({script.raw}) and a module ({module.raw}); keep one of them")
    if args and not (script or module):
        raise UsageError(f"{args.where}: args need a program; add script or module")
    if module and module.raw in ("true", "false"):
        raise UsageError(f"{module.where}: module is {module.raw}; give the name of the module to run")
    options: dict[str, FileValue] = {}
    for key, entry in entries.items():
        option = _OPTIONS.get(key)
        if key == "token":
            raise UsageError(f"{entry.where}: {TOKEN_IS_SECRET.format(entry.key)}")
        if option is None:
            near = nearest(key, (*_OPTIONS, *_PROGRAM_KEYS))
            hint = f"did you mean {near}?" if near else "elaunch --help lists the options"
            raise UsageError(f"{entry.where}: {entry.key} is no option of elaunch; {hint}")
        if option.name in options:
            before = options[option.name].where
            raise UsageError(f"{entry.where}: {entry.key} repeats the option of {before}; keep one")
        options[option.name] = entry
    given = {
        name: Given(entry.raw, Source.FILE, f"{entry.where}: {entry.key}: {_shown(entry.raw)}")
        for name, entry in options.items()
    }
    return JobFile(given, _word(script), _word(module), _words(args))


def _entries(text: str, name: str) -> dict[str, FileValue]:
    """The file's top level. Keys are spelt with dashes. Keys without a value are left out."""
    import yaml  # Only if there is a job file: the import takes as long as all other imports of the launcher.

    if len(text) > _CHARACTERS_MAX:
        raise UsageError(f"{name} has more than {_CHARACTERS_MAX} characters; a job file is a page of options")
    if text.count("[") + text.count("{") > _BRACKETS_MAX:
        raise UsageError(f"{name} has more than {_BRACKETS_MAX} brackets; a job file is a page of options")
    try:
        root = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UsageError(f"{name}{line} is not YAML: {error.problem or error.context}") from None
    except RecursionError:
        raise UsageError(f"{name} is nested too deeply; write one `name: value` per line") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # ValueError: an impossible character, as "\\UFFFFFFFF", or an impossible number, as in %YAML 1.9…9.
        raise UsageError(f"{name} is not YAML: {str(error)[:200]}") from None
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(f"{name} is not a mapping of options; write one `name: value` per line")
    entries: dict[str, FileValue] = {}
    for key_node, value_node in root.value:
        where = f"{name} line {key_node.start_mark.line + 1}"
        written = _scalar(key_node, where)
        key = written.replace("_", "-")
        if key in entries:
            raise UsageError(f"{where}: {written} repeats the key of {entries[key].where}; keep one")
        raw = _raw(value_node, f"{where}: {written}")
        if raw is not None:
            entries[key] = FileValue(raw, written, where)
    return entries


def _raw(node: yaml.Node, where: str) -> Raw | None:
    value: Any = node.value
    if isinstance(value, str):
        # A plain scalar has no style. A quoted "null" is a word and not a null.
        return None if not getattr(node, "style", None) and value in _NULLS else _plain(value, where)
    if value and isinstance(value[0], tuple):
        return {_scalar(key, where): _scalar(item, where) for key, item in value}
    return [_scalar(item, where) for item in value]


def _scalar(node: yaml.Node, where: str) -> str:
    if not isinstance(node.value, str):
        raise UsageError(f"{where} holds a list or mapping inside another; write plain words there")
    return _plain(node.value, where)


def _plain(word: str, where: str) -> str:
    """The word unchanged. Raises UsageError for a character that no command line and no file name can hold."""
    if "\0" in word or any("\ud800" <= character <= "\udfff" for character in word):
        raise UsageError(f"{where} has a character that no command line can hold: {word[:100]!r}")
    return word


def _shown(raw: Raw) -> str:
    if isinstance(raw, list):
        return f"[{', '.join(raw)}]"
    return raw if isinstance(raw, str) else "{" + ", ".join(f"{key}: {value}" for key, value in raw.items()) + "}"


def _word(entry: FileValue | None) -> str | None:
    if entry is None:
        return None
    if not isinstance(entry.raw, str):
        raise UsageError(f"{entry.where}: {entry.key} is {entry.raw}; give one name")
    return entry.raw


def _words(entry: FileValue | None) -> tuple[str, ...]:
    if entry is None:
        return ()
    if not isinstance(entry.raw, list):
        raise UsageError(f"{entry.where}: {entry.key} is {entry.raw!r}; give a list, as in [--lr, 0.1]")
    return tuple(entry.raw)
