"""The host names of an allocation, as the schedulers write them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping

# A list of ranges is written in a few characters and read as many names.
HOSTS_MAX = 100_000


def expand(text: str) -> list[str]:
    """The names in one of Slurm's lists, in its order: `n[001-003,7],m2-[1-2]`, several brackets in a name too.

    Raises ValueError for what is no such list.
    """
    hosts: list[str] = []
    for name in _split(text):
        pieces = re.findall(r"\[([^]]*)\]|([^][]+)", name)
        choices = [list(_numbers(ranges)) if ranges or not plain else [plain] for ranges, plain in pieces]
        for parts in itertools.product(*choices):
            hosts.append("".join(parts))
            if len(hosts) > HOSTS_MAX:
                raise ValueError(f"names more than {HOSTS_MAX} hosts")
    return hosts


def _split(text: str) -> list[str]:
    """The names, at the commas outside of brackets."""
    if not re.fullmatch(r"([^][,]|\[[^][]+\])+(,([^][,]|\[[^][]+\])+)*", text):
        raise ValueError("is no list of hosts")
    return re.findall(r"(?:[^][,]|\[[^][]+\])+", text)


def _numbers(ranges: str) -> Iterator[str]:
    """`001-003,7` as 001, 002, 003, 7: zeros in front are kept."""
    for each in ranges.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", each)
        if not found:
            raise ValueError(f"has {each}, which is neither a number nor a range")
        first, last = found[1], found[2] or found[1]
        if not int(first) <= int(last) < int(first) + HOSTS_MAX:
            raise ValueError(f"has the range {each}, which is empty or too long")
        yield from (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))


def of_lsf(environ: Mapping[str, str]) -> list[str]:
    """LSF's hosts, each once: `LSB_MCPU_HOSTS` is "host slots host slots …"; `LSB_HOSTS` has a word for each slot.

    Under jsrun the first host, of one slot, is the one that the job's script runs on, and runs nothing else.
    """
    words = environ.get("LSB_MCPU_HOSTS", "").split()
    slots = dict(zip(words[::2], words[1::2], strict=False))
    hosts = list(slots) or list(dict.fromkeys(environ.get("LSB_HOSTS", "").split()))
    is_script_host = "JSM_NAMESPACE_RANK" in environ and len(hosts) > 1 and slots.get(hosts[0]) == "1"
    return hosts[1:] if is_script_host else hosts


def of_lines(text: str) -> list[str]:
    """The hosts of a file that has a line for each slot, as PBS_NODEFILE names one."""
    return list(dict.fromkeys(line.split()[0] for line in text.splitlines() if line.strip()))


def place_of(hostname: str, hosts: list[str]) -> int | None:
    """Where `hostname` stands among `hosts`; one of them may have its domain behind it. None where it does not."""
    short = [host.partition(".")[0] for host in hosts]
    if hostname in hosts:
        return hosts.index(hostname)
    mine = hostname.partition(".")[0]
    return short.index(mine) if short.count(mine) == 1 else None
