"""The command line as argparse would read it, in one canonical spelling: pure, and the only place that knows dashes.

click parses what comes out. It knows neither abbreviations (`--nproc 2`) nor underscores nor `-r=3`, all of which
torchrun's argparse accepts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from elaunch.launcher.errors import UsageError, nearest
from elaunch.launcher.options.table import TABLE, OptionSpec

_SHORT = {spec.short: spec for spec in TABLE if spec.short}
_LONG = {name: spec for spec in TABLE for name in spec.names}

# Command lines are everybody's to read (/proc, ps); so are job files, more often than not.
TOKEN_IS_SECRET = "{} would show the job's secret to everybody; set ELAUNCH_TOKEN, or give --token-file FILE"


@dataclass(frozen=True)
class Words:
    """A command line, taken apart: our options with their values, and the program with its arguments."""

    options: tuple[tuple[OptionSpec, str], ...]
    program: tuple[str, ...]

    @property
    def canonical(self) -> list[str]:
        """The same command line for a parser in which every option is called `--name=value`."""
        return [f"--{spec.name}={value}" for spec, value in self.options] + ["--", *self.program]

    def last(self, name: str) -> str | None:
        """The value that counts for an option, None if it is not there."""
        return next((value for spec, value in reversed(self.options) if spec.name == name), None)


def normalise(argv: Sequence[str]) -> Words:
    """Read `argv` up to the program; what follows it is the program's own, flags included."""
    options: list[tuple[OptionSpec, str]] = []
    rest = list(argv)
    while rest:
        word = rest[0]
        if word == "--":
            return Words(tuple(options), tuple(rest[1:]))
        if word == "-" or not word.startswith("-"):
            break
        del rest[0]
        options += _long(word, rest) if word.startswith("--") else _short(word, rest)
    return Words(tuple(options), tuple(rest))


def _long(word: str, rest: list[str]) -> list[tuple[OptionSpec, str]]:
    """`--name`, `--name value` and `--name=value`; takes the value off `rest`."""
    typed, equals, value = word[2:].partition("=")
    spec = find(typed)
    if spec.is_switch:
        if equals:
            raise UsageError(f"--{spec.name} is a switch and takes no value; {word} gives it {value!r}")
        return [(spec, "1")]
    return [(spec, value if equals else _take(f"--{typed}", spec, rest))]


def _short(word: str, rest: list[str]) -> list[tuple[OptionSpec, str]]:
    """`-r 3`, `-r3`, `-r=3`, and switches in front in the same word: `-mr3`."""
    found: list[tuple[OptionSpec, str]] = []
    letters = word[1:]
    while letters:
        spec = _SHORT.get(letters[0])
        letters = letters[1:]
        if spec is None or (spec.is_switch and letters and letters[0] not in _SHORT):
            raise UsageError(_no_such_option(word))
        if spec.is_switch:
            found.append((spec, "1"))
            continue
        value = letters.removeprefix("=") if letters else _take(f"-{spec.short}", spec, rest)
        return [*found, (spec, value)]
    return found


def _take(typed: str, spec: OptionSpec, rest: list[str]) -> str:
    """The next word as a value. As in argparse, a negative number is one and another option is not."""
    if not rest or _looks_like_option(rest[0]):
        raise UsageError(f"{typed} needs a value ({spec.metavar}: {spec.help})")
    return rest.pop(0)


def _looks_like_option(word: str) -> bool:
    return len(word) > 1 and word[0] == "-" and " " not in word and not re.fullmatch(r"-\d*\.?\d+", word)


def find(typed: str) -> OptionSpec:
    """The option that `typed` names, in full or by an abbreviation that fits one option only.

    torchrun's names come first: a name that only we have makes none of its abbreviations ambiguous.
    """
    name = typed.replace("_", "-")
    if name == "token":
        raise UsageError(TOKEN_IS_SECRET.format("--token"))
    if name in _LONG:
        return _LONG[name]
    of_peer = [spec for spec in TABLE if spec.peer and spec.peer.startswith(name)]
    found = of_peer or [spec for spec in TABLE if any(known.startswith(name) for known in spec.names)]
    if len(found) == 1:
        return found[0]
    if found:
        candidates = ", ".join(f"--{known}" for spec in found for known in spec.names if known.startswith(name))
        raise UsageError(f"--{typed} could be {candidates}; write it out")
    raise UsageError(_no_such_option(f"--{typed}"))


def _no_such_option(word: str) -> str:
    near = nearest(word.lstrip("-").replace("_", "-"), _LONG)
    hint = f"did you mean --{near}?" if near else "elaunch --help lists the options"
    return f"{word} is no option of elaunch; {hint}"
