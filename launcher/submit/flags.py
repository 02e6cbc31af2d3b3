"""Reads the command line of `elaunch submit …`: the submission's options, elaunch's options, and the program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elaunch.launcher.errors import NoSuchOption, UsageError
from elaunch.launcher.options import argv as command_line
from elaunch.records import dataclass

_COMMAND = "submit"


@dataclass(frozen=True)
class Flag:
    """One option of a submission. `metavar` is empty for a switch. With `many` the option may be repeated."""

    name: str
    metavar: str
    help: str
    many: bool = False


@dataclass(frozen=True)
class Submission:
    """`given` holds the values of the submission's options by name. `command` is the rest: elaunch's command line."""

    given: Mapping[str, tuple[str, ...]]
    command: tuple[str, ...]

    def last(self, name: str, default: str = "") -> str:
        return self.given.get(name, (default,))[-1]


def take(argv: Sequence[str], flags: Sequence[Flag]) -> Submission:
    """Take the submission's options out of `argv`. Raises UsageError, also if elaunch could not read the rest."""
    known = {flag.name: flag for flag in flags}
    given: dict[str, list[str]] = {}
    kept: list[str] = []
    rest = list(argv)
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        name, equals, value = rest[0][2:].partition("=")
        flag = known.get(name.replace("_", "-")) if rest[0].startswith("--") else None
        if flag is None:
            words = _of_elaunch(rest, known)
            kept += words
            del rest[: len(words)]
            continue
        del rest[0]
        if flag.metavar and not equals:
            if not rest:
                raise UsageError(f"--{flag.name} needs a value ({flag.metavar}: {flag.help})")
            value = rest.pop(0)
        if flag.name in given and not flag.many:
            raise UsageError(f"--{flag.name} is given twice ({given[flag.name][0]}, {value}); drop one of them")
        given.setdefault(flag.name, []).append(value)
    command = (*kept, *rest)
    if not command_line.normalise(command).program and "help" not in given:
        raise UsageError("no program to run; add train.py and its arguments at the end")
    return Submission({name: tuple(values) for name, values in given.items()}, command)


def _of_elaunch(rest: Sequence[str], known: Mapping[str, Flag]) -> Sequence[str]:
    """The words at the front of `rest` that are one of elaunch's options with its value. Raises UsageError."""
    name = rest[0].lstrip("-").partition("=")[0].replace("_", "-")
    words = rest[:1]
    try:
        read = command_line.normalise(words)
    except NoSuchOption as error:
        raise NoSuchOption(error.word, (*known, *command_line.LONG), _COMMAND) from None
    except UsageError as error:
        if " needs a value " not in str(error):
            raise
        words = rest[:2]
    else:
        assert read.options
    if meant := [flag for flag in known if rest[0].startswith("--") and flag.startswith(name)]:
        # elaunch would take it as short for its own option, which is not meant: --node for --node-rank.
        raise NoSuchOption(rest[0].partition("=")[0], meant, _COMMAND)
    return words


def help_text(usage: str, flags: Sequence[Flag], end: str) -> str:
    """The text of `--help`."""
    names = {flag.name: f"--{flag.name} {flag.metavar}".rstrip() for flag in flags}
    width = max(map(len, names.values()))
    lines = (f"  {names[flag.name]:{width}}  {flag.help}" for flag in flags)
    return f"{usage}\n" + "".join(f"{line}\n" for line in lines) + f"\n{end}"
