"""Shell completion: click's protocol and scripts for bash, zsh and fish, with words from the table of options.

A shell calls `elaunch` with `_ELAUNCH_COMPLETE` set: to `bash_source` once, for a script, and to `bash_complete` at
each Tab.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
from click.shell_completion import BashComplete, CompletionItem, FishComplete, ShellComplete, ZshComplete

from elaunch.launcher.options.commands import COMMANDS, REHEARSE_FLAGS, WARM_FLAGS
from elaunch.launcher.options.table import TABLE, OptionSpec
from elaunch.launcher.options.values import NUMA_MODES, OneOf
from elaunch.launcher.submit import kubernetes, slurm
from elaunch.launcher.watch.flags import STORE_OPTIONS, WATCHES
from elaunch.records import dataclass

_SCHEDULERS = {"slurm": slurm.FLAGS, "k8s": kubernetes.FLAGS}
# Options whose values are more than a few words: the words among them.
_WORDS = {
    "nproc-per-node": ("gpu", "cpu", "auto"),
    "redirects": ("0", "1", "2", "3"),
    "tee": ("0", "1", "2", "3"),
    "numa-binding": NUMA_MODES.words,
}
_PLACES = {"FILE": "file", "PATH": "file", "DIR": "dir"}


@dataclass(frozen=True)
class _Known:
    """What completion knows of one option. `metavar` is empty for a switch; `names` have their dashes."""

    names: tuple[str, ...]
    metavar: str
    help: str
    words: tuple[str, ...] = ()


def answer(instruction: str) -> int:
    """Print what click's shell script asks for; the exit code."""
    shell, _, verb = instruction.partition("_")
    kind = _SHELLS.get(shell)
    if kind is None or verb not in ("source", "complete"):
        print(f"elaunch: _ELAUNCH_COMPLETE={instruction} is not known; use bash_source, zsh_source", file=sys.stderr)
        return 2
    complete = kind(click.Command("elaunch"), {}, "elaunch", "_ELAUNCH_COMPLETE")
    print(complete.source() if verb == "source" else complete.complete())
    return 0


def completions(before: Sequence[str], incomplete: str) -> list[CompletionItem]:
    """What can stand where `incomplete` begins; `before` are the words between `elaunch` and it.

    bash hands `--name=value` over as three words.
    """
    incomplete = "" if incomplete == "=" else incomplete
    words = list(before)
    if words[:1] == ["submit"] and len(words) == 1:
        return _plain(_SCHEDULERS, incomplete)
    known = _options(words)
    if words and words[0] in ("run", "store", "doctor", "rehearse", "report", "warm", *WATCHES):
        words = words[1:]
    elif words[:1] == ["submit"]:
        words = words[2:]
    waiting, is_program = _read(words, known)
    if is_program:
        return [CompletionItem(incomplete, type="file")]
    if waiting:
        return _values(waiting, incomplete)
    if incomplete.startswith("-"):
        return [
            CompletionItem(name, help=option.help)
            for option in known
            for name in option.names
            if name.startswith(incomplete)
        ]
    return _program(incomplete, is_first=not before)


def _options(words: Sequence[str]) -> list[_Known]:
    if words[:1] == ["store"]:
        return [
            _Known(("--listen",), "HOST:PORT", "where; without a host on all addresses"),
            _Known(("--token-file",), "FILE", "holds the secret that every job must know"),
        ]
    if words[:1] == ["report"]:
        return [
            _Known(("-o", "--output"), "FILE", "where the page goes"),
            _Known(("--perfetto",), "FILE", "write a trace for ui.perfetto.dev"),
            _Known(("--json",), "", "print the numbers as JSON"),
            _Known(("--metrics",), "FILE", "lines of JSON with step, loss and seconds"),
        ]
    if words[:1] == ["warm"]:
        return [_Known((name,), "", text) for name, text in WARM_FLAGS]
    if words and words[0] in WATCHES:
        flags = [_Known((name,), "", text) for name, text in WATCHES[words[0]]]
        return [*flags, *(_known(spec) for spec in TABLE if spec.name in STORE_OPTIONS)]
    known = [_known(spec) for spec in TABLE]
    if words[:1] == ["doctor"]:
        return [_Known(("--json",), "", "one JSON object, for machines"), *known]
    if words[:1] == ["rehearse"]:
        return [*(_Known((name,), value, text) for name, value, text in REHEARSE_FLAGS), *known]
    if words[:1] == ["submit"]:
        return [_Known((f"--{flag.name}",), flag.metavar, flag.help) for flag in _SCHEDULERS.get(words[1], ())] + known
    return known


def _known(spec: OptionSpec) -> _Known:
    return _Known(
        (*(f"--{name}" for name in spec.names), *([f"-{spec.short}"] if spec.short else [])),
        # A value after `=` needs no next word.
        "" if spec.bare else spec.metavar,
        spec.help,
        spec.convert.words if isinstance(spec.convert, OneOf) else _WORDS.get(spec.name, ()),
    )


def _read(words: Sequence[str], known: Sequence[_Known]) -> tuple[_Known | None, bool]:
    """The option whose value comes next, and whether the program has been named already."""
    names = {name: option for option in known for name in option.names}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word in ("-", "--") or not word.startswith("-"):
            return None, True
        option = names.get(word.replace("_", "-"))
        if option is None or not option.metavar:
            continue
        if rest[:1] == ["="]:
            del rest[0]
        if not rest:
            return option, False
        del rest[0]
    return None, False


def _values(option: _Known, incomplete: str) -> list[CompletionItem]:
    if option.metavar in _PLACES:
        return [CompletionItem(incomplete, type=_PLACES[option.metavar])]
    return [CompletionItem(word) for word in option.words if word.startswith(incomplete)]


def _program(incomplete: str, *, is_first: bool) -> list[CompletionItem]:
    """A script; or one of the commands, where no file begins so."""
    found = [CompletionItem(incomplete, type="file")]
    folder, _, name = incomplete.rpartition("/")
    is_file = bool(incomplete) and any(path.name.startswith(name) for path in _inside(Path(folder or ".")))
    return found if is_file or not is_first else [*found, *_plain(COMMANDS, incomplete)]


def _inside(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _plain(words: Mapping[str, object], incomplete: str) -> list[CompletionItem]:
    return [
        CompletionItem(word, help=text if isinstance(text, str) else None)
        for word, text in words.items()
        if word.startswith(incomplete)
    ]


class _FromTable(ShellComplete):
    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
        return completions(args, incomplete)


class _Bash(_FromTable, BashComplete):
    pass


class _Zsh(_FromTable, ZshComplete):
    pass


class _Fish(_FromTable, FishComplete):
    pass


_SHELLS: dict[str, type[ShellComplete]] = {"bash": _Bash, "zsh": _Zsh, "fish": _Fish}
