"""Lists of hosts: those of --hosts, of Slurm, and of the host files of DeepSpeed, Open MPI and MPICH. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from elaunch.rendezvous.types import SLOTS_MAX

_LIST = re.compile(r"([^][,]|\[[^][]+\])+(,([^][,]|\[[^][]+\])+)*")
_HOSTS_MAX = 1 << 16
_HOW = "use HOST,HOST or HOST:WORKERS, as in node[0-3]:8"
# A user's name before @, then a name, an address, or an IPv6 address in brackets; then the number of workers.
_HOST = re.compile(
    r"(?P<user>[^][@:,\s-][^][@:,\s]*@)?"
    r"(?P<host>\[[\w.%:]*:[\w.%:]*\]|(?!-)(?:[^][@:,\s]|\[[^][\s]+\])+)"
    r"(?::(?P<slots>[^:]*))?"
)


@dataclass(frozen=True)
class Host:
    """One host: its name for ssh, as USER@NAME if it has a user, and an address without brackets; workers, if given."""

    name: str
    slots: int | None = None


def parse_hosts(text: str) -> tuple[Host, ...]:
    """The hosts of --hosts, in its order. Raises ValueError with the second half of a message."""
    found = [host for word in re.split(r",(?![^][]*\])", text) for host in _hosts(word.strip())]
    names = [host.name for host in found]
    if double := next((name for name in names if names.count(name) > 1), ""):
        raise ValueError(f"has {double} twice; name each host once, with its number of workers as {double}:N")
    return tuple(found)


def parse_hostfile(text: str) -> tuple[Host, ...]:
    """The hosts of a host file: a host on each line, `slots=N` or `:N` for its workers, `#` before comments.

    Several lines of one host add up, as in Open MPI: each is one slot if it has no number. Raises ValueError with the
    second half of a message.
    """
    by_name: dict[str, Host] = {}
    for number, line in enumerate(text.splitlines(), 1):
        word, *rest = line.partition("#")[0].split() or [""]
        named = dict(each.partition("=")[::2] for each in rest)
        try:
            hosts = list(_hosts(word, named.get("slots"))) if word else []
            if rest and any(host.slots is None for host in hosts):
                raise ValueError("has no slots=N after the host; add it, or write only the host")
            for host in hosts:
                known = by_name.get(host.name)
                total = (known.slots or 1) + (host.slots or 1) if known else host.slots
                by_name[host.name] = replace(host, slots=total)
        except ValueError as error:
            raise ValueError(f"line {number} ({line.strip()[:80]}) {error}") from None
    if not by_name:
        raise ValueError("names no host; write one on each line, as in: node0 slots=8")
    return tuple(by_name.values())


def _hosts(word: str, slots: str | None = None) -> Iterable[Host]:
    """The hosts of one word, which may have a range in brackets, and `slots` if the word has none."""
    match = _HOST.fullmatch(word)
    if not match:
        raise ValueError(f"has {word!r}, which is not a host; {_HOW}")
    slots = slots if match["slots"] is None else match["slots"]
    if slots is not None and not (re.fullmatch("[0-9]{1,6}", slots) and 1 <= int(slots) <= SLOTS_MAX):
        raise ValueError(f"has {slots or 'nothing'} as the number of workers; give 1 to {SLOTS_MAX}")
    name = match["host"]
    try:
        names = [name[1:-1]] if name.startswith("[") and ":" in name else expand(name)
    except ValueError as error:
        raise ValueError(f"has {word!r}, which {error}; {_HOW}") from None
    return [Host((match["user"] or "") + each, int(slots) if slots else None) for each in names]


def expand(text: str) -> list[str]:
    """The names in a list in Slurm's form, in its order: `n[001-003,7],m2-[1-2]`. A name may have several brackets.

    Raises ValueError for a text that is not such a list.
    """
    if not _LIST.fullmatch(text):
        raise ValueError("is not a list of hosts")
    hosts: list[str] = []
    for name in re.findall(r"(?:[^][,]|\[[^][]+\])+", text):
        parts = re.findall(r"\[([^]]*)\]|([^][]+)", name)
        choices = [[plain] if plain else _numbers(written) for written, plain in parts]
        hosts += map("".join, itertools.islice(itertools.product(*choices), _HOSTS_MAX + 1))
        if len(hosts) > _HOSTS_MAX:
            raise ValueError(f"has more than {_HOSTS_MAX} hosts")
    return hosts


def _numbers(text: str) -> list[str]:
    """`001-003,7` as 001 to 003, and 7. Leading zeros stay."""
    found: list[str] = []
    for each in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", each)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not match or first > last or last - first >= _HOSTS_MAX:
            raise ValueError(f"has {each}, which is neither a number nor a range")
        found += [str(number).zfill(len(match[1])) for number in range(first, last + 1)]
    return found
