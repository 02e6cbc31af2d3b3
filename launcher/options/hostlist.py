"""Lists of hosts: those of --hosts, of Slurm, and of the host files of DeepSpeed, Open MPI and MPICH. Pure."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import dataclass

from elaunch.rendezvous.types import SLOTS_MAX

# A comma that is not in brackets.
_COMMA = re.compile(r",(?![^][]*\])")
# After the host on a line of a host file, perhaps with max_slots=N beside it.
_SLOTS = re.compile(r"\s(?:.*\s)?slots=(\S*).*")
# After :N there, as in MPICH's files: binding=core.
_BESIDE = re.compile(r"(?<=:)([0-9]+)\s.*")
_HOSTS_MAX = 1 << 16
_HOW = "write HOST or HOST:WORKERS, as in node[0-3]:8"
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
    found = [host for word in _COMMA.split(text) for host in _hosts(word.strip())]
    [(double, times)] = Counter(host.name for host in found).most_common(1)
    if times > 1:
        raise ValueError(f"has {double} twice; name each host once, with its number of workers as {double}:N")
    return tuple(found)


def parse_hostfile(text: str) -> tuple[Host, ...]:
    """The hosts of a host file: a host on each line, `slots=N` or `:N` for its workers, `#` before comments.

    Several lines of one host add up, as in Open MPI: each is one slot if it has no number. Raises ValueError with the
    second half of a message.
    """
    totals: dict[str, int | None] = {}
    for number, line in enumerate(text.splitlines(), 1):
        word = _BESIDE.sub(r"\1", _SLOTS.sub(r":\1", line.partition("#")[0].strip()))
        try:
            hosts = _hosts(word) if word else []
        except ValueError as error:
            raise ValueError(f"line {number} ({line.strip()[:80]}) {error}") from None
        for host in hosts:
            name, known = host.name, host.name in totals
            totals[name] = (totals[name] or 1) + (host.slots or 1) if known else host.slots
    if not totals:
        raise ValueError("names no host; write one on each line, as in: node0 slots=8")
    return tuple(itertools.starmap(Host, totals.items()))


def _hosts(word: str) -> list[Host]:
    """The hosts of one word, which may have ranges in brackets."""
    match = _HOST.fullmatch(word)
    if not match:
        raise ValueError(f"has {word!r}, which is not a host; {_HOW}")
    user, name, slots = match["user"] or "", match["host"], match["slots"]
    if slots is not None and not (re.fullmatch("[0-9]{1,6}", slots) and 1 <= int(slots) <= SLOTS_MAX):
        raise ValueError(f"has {slots or 'nothing'} as the number of workers; give 1 to {SLOTS_MAX}")
    try:
        names = [name[1:-1]] if name.startswith("[") and ":" in name else expand(name)
    except ValueError as error:
        raise ValueError(f"has {word!r}, which {error}; {_HOW}") from None
    return [Host(user + each, int(slots) if slots else None) for each in names]


def expand(text: str) -> list[str]:
    """The names in a list in Slurm's form, in its order: `n[001-003,7],m2-[1-2]`. A name may have several brackets.

    Raises ValueError for a text that is not such a list.
    """
    hosts: list[str] = []
    for name in _COMMA.split(text):
        if not re.fullmatch(r"([^][,]|\[[^][]+\])+", name):
            raise ValueError("is not a list of hosts")
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
