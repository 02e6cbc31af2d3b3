"""The host names of an allocation, as the schedulers write them."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping

# A few characters can stand for very many names.
HOSTS_MAX = 100_000
_NAME_MAX = 255
_LIST = re.compile(r"([^][,]|\[[^][]+\])+(,([^][,]|\[[^][]+\])+)*")


def expand(text: str) -> list[str]:
    """The names in a list in Slurm's form, in its order: `n[001-003,7],m2-[1-2]`. A name may have several brackets.

    Raises ValueError for a text that is not such a list, or that names more than `HOSTS_MAX` hosts.
    """
    if not _LIST.fullmatch(text):
        raise ValueError("is no list of hosts")
    hosts: list[str] = []
    for name in re.findall(r"(?:[^][,]|\[[^][]+\])+", text):
        pieces = re.findall(r"\[([^]]*)\]|([^][]+)", name)
        if sum(len(plain) for _, plain in pieces) > _NAME_MAX:
            raise ValueError(f"names a host with more than {_NAME_MAX} characters: {name[:40]}…")
        choices: list[list[str]] = []
        for written, plain in pieces:
            choices.append([plain] if plain else _numbers(written))
            # Count before making the names: they may be more than memory holds.
            if len(hosts) + math.prod(map(len, choices)) > HOSTS_MAX:
                raise ValueError(f"names more than {HOSTS_MAX} hosts")
        hosts += ["".join(parts) for parts in itertools.product(*choices)]
    return hosts


def _numbers(text: str) -> list[str]:
    """`001-003,7` as 001 to 003, and 7. Leading zeros stay."""
    found: list[str] = []
    for each in text.split(","):
        match = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", each)
        if not match:
            raise ValueError(f"has {each[:40]}, which is neither a number nor a range")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < first + HOSTS_MAX - len(found):
            raise ValueError(f"has the range {each}, which is empty or too long")
        found += [str(number).zfill(len(match[1])) for number in range(first, last + 1)]
    return found


def of_slurm(environ: Mapping[str, str], *variables: str) -> list[str]:
    """The hosts in the first of the variables that is set."""
    for variable in variables:
        if text := environ.get(variable):
            try:
                return expand(text)
            except ValueError as error:
                raise ValueError(f"{variable}={text[:200]} {error}") from None
    return []


def of_lsf(environ: Mapping[str, str]) -> list[str]:
    """LSF's hosts, each once: `LSB_MCPU_HOSTS` is "host slots host slots …"; `LSB_HOSTS` has a word for each slot.

    Under jsrun, a first host with one slot runs only the job's script, so it is left out.
    """
    words = environ.get("LSB_MCPU_HOSTS", "").split()
    slots = dict(zip(words[::2], words[1::2], strict=False))
    hosts = list(slots) or list(dict.fromkeys(environ.get("LSB_HOSTS", "").split()))
    is_script_host = "JSM_NAMESPACE_RANK" in environ and len(hosts) > 1 and slots.get(hosts[0]) == "1"
    return hosts[1:] if is_script_host else hosts


def of_lines(text: str) -> list[str]:
    """The hosts, each once, in a file with a line for each slot, like the file that PBS_NODEFILE names."""
    return list(dict.fromkeys(line.split()[0] for line in text.splitlines() if line.strip()))


def place_of(hostname: str, hosts: list[str]) -> int | None:
    """The index of `hostname` in `hosts`, compared without domains if need be. None if it is missing or not unique."""
    if hostname in hosts:
        return hosts.index(hostname)
    short, mine = [host.partition(".")[0] for host in hosts], hostname.partition(".")[0]
    return short.index(mine) if short.count(mine) == 1 else None
