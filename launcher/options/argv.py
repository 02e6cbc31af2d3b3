"""Reads the command line as argparse would. Pure.

Not click, which accepts neither abbreviations (`--nproc 2`) nor underscores nor `-r=3`; torchrun's argparse accepts
them all. To import click would take a fifth of the time until the first worker.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from elaunch.launcher.errors import NoSuchOption, UsageError
from elaunch.launcher.options.table import TABLE, OptionSpec
from elaunch.records import dataclass

_SHORT = {spec.short: spec for spec in TABLE if spec.short}
# By name, without dashes; abbreviations are not among them.
LONG = {name: spec for spec in TABLE for name in spec.names}

# Every user of the host can read a command line (/proc, ps), and often also a job file.
TOKEN_IS_SECRET = "{} would show the job's token to everybody; set ELAUNCH_TOKEN, or give --token-file FILE"


@dataclass(frozen=True)
class CommandLine:
    """A command line in its parts: elaunch's options with their values, and the program with its arguments."""

    options: tuple[tuple[OptionSpec, str], ...]
    program: tuple[str, ...]

    def last(self, name: str) -> str | None:
        """The last value of an option, which is the one that counts; None if the option is not given."""
        return next((value for spec, value in reversed(self.options) if spec.name == name), None)


def normalise(argv: Sequence[str]) -> CommandLine:
    """Read `argv` up to the program. All words after the program are its arguments. Raises UsageError."""
    options: list[tuple[OptionSpec, str]] = []
    rest = list(argv)
    while rest:
        word = rest[0]
        if word == "--":
            return CommandLine(tuple(options), tuple(rest[1:]))
        if word == "-" or not word.startswith("-"):
            break
        del rest[0]
        options += _long(word, rest) if word.startswith("--") else _short(word, rest)
    return CommandLine(tuple(options), tuple(rest))


def _long(word: str, rest: list[str]) -> list[tuple[OptionSpec, str]]:
    """Read `--name`, `--name value` or `--name=value`. A value in the next word is taken off `rest`."""
    typed, equals, value = word[2:].partition("=")
    spec = find(typed)
    if spec.is_switch:
        if equals:
            raise UsageError(f"--{spec.name} is a switch and takes no value; {word} gives it {value!r}")
        return [(spec, "1")]
    if spec.bare and not equals:
        return [(spec, spec.bare)]
    return [(spec, value if equals else _take(f"--{typed}", spec, rest))]


def _short(word: str, rest: list[str]) -> list[tuple[OptionSpec, str]]:
    """Read `-r 3`, `-r3` or `-r=3`. Switches may come before it in the same word: `-mr3`."""
    found: list[tuple[OptionSpec, str]] = []
    letters = word[1:]
    while letters:
        spec = _SHORT.get(letters[0])
        letters = letters[1:]
        if spec is None or (spec.is_switch and letters and letters[0] not in _SHORT):
            raise NoSuchOption(word, LONG)
        if spec.is_switch:
            found.append((spec, "1"))
            continue
        value = letters.removeprefix("=") if letters else _take(f"-{spec.short}", spec, rest)
        return [*found, (spec, value)]
    return found


def _take(typed: str, spec: OptionSpec, rest: list[str]) -> str:
    """Take the next word as a value. As in argparse, a negative number is a value, and another option is not."""
    if not rest or _looks_like_option(rest[0]):
        raise UsageError(f"{typed} needs a value ({spec.metavar}: {spec.help})")
    return rest.pop(0)


def _looks_like_option(word: str) -> bool:
    return len(word) > 1 and word[0] == "-" and " " not in word and not re.fullmatch(r"-\d*\.?\d+", word)


def find(typed: str) -> OptionSpec:
    """The option that `typed` names, in full or by an unambiguous abbreviation. Raises UsageError.

    torchrun's names come first, so that its abbreviations stay unambiguous beside elaunch's own names.
    """
    name = typed.replace("_", "-")
    if name == "token":
        raise UsageError(TOKEN_IS_SECRET.format("--token"))
    if name in LONG:
        return LONG[name]
    of_peer = [spec for spec in TABLE if spec.peer and spec.peer.startswith(name)]
    found = of_peer or [spec for spec in TABLE if any(known.startswith(name) for known in spec.names)]
    if len(found) == 1:
        return found[0]
    if found:
        candidates = ", ".join(f"--{known}" for spec in found for known in spec.names if known.startswith(name))
        raise UsageError(f"--{typed} could be {candidates}; write it out")
    if name == "use-env":
        raise UsageError(
            f"--{typed} is no option of elaunch, which always does that: leave it out. A script reads LOCAL_RANK from"
            " its environment; one that parses --local-rank gets '--local-rank=${local_rank}' behind its name"
        )
    raise NoSuchOption(f"--{typed}", LONG)
