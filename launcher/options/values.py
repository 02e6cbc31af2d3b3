"""Converts an option's value from the command line, a variable or a file, and checks it.

Every function takes a `Raw`. It raises ValueError with the second half of a message. The first half is the option and
its value: `--max-restarts many` … `is not a whole number; give 0 or more`.
"""

from __future__ import annotations

import math
import re
import shlex
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from elaunch.agent.config import LogFormat, NumaBinding, OnHang, StreamChoice, Streams
from elaunch.agent.workers.topology import KINDS
from elaunch.launcher.options.hostlist import Host, parse_hosts
from elaunch.rendezvous.codec import HOST_BYTES_MAX, ROLE_BYTES_MAX, RUN_ID_BYTES_MAX
from elaunch.rendezvous.rules.assign_ranks import counts_in
from elaunch.rendezvous.types import SLOTS_MAX

Raw = str | list[str] | dict[str, str]
Convert = Callable[[Raw], object]

PORT_MAX = 65535
# More nodes than any job has. A larger number is a typing error.
NODES_MAX = 1_000_000
# Thirty years. All clocks and timers can count this far.
SECONDS_MAX = 1e9
# The words of YAML 1.1, and of torchrun in its --rdzv-conf.
_ON, _OFF = ("1", "true", "t", "yes", "y", "on"), ("0", "false", "f", "no", "n", "off", "")
_NOT_HANDLED = ("SIGKILL", "SIGSTOP")
_USUAL = "the usual ones are SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2"
# Variables with the store's address. The first one that is set wins.
ENDPOINT_VARIABLES = ("ELAUNCH_ENDPOINT", "ETCDCTL_ENDPOINTS")
_ENDPOINT_HOW = "use HOST:PORT, [IPV6]:PORT or https://HOST:PORT, several separated by commas"
# How long --warm keeps a fork server that no job uses, in minutes.
WARM_MIN = 15.0


def text(raw: Raw) -> str:
    if not isinstance(raw, str):
        raise ValueError("is not a single value; give one word")
    return raw.strip()


def spaced_text(raw: Raw) -> str:
    """A text whose spaces at the ends count."""
    text(raw)
    return str(raw)


def hosts(raw: Raw) -> tuple[Host, ...]:
    return parse_hosts(",".join(raw) if isinstance(raw, list) else text(raw))


def name(raw: Raw, *, bytes_max: int) -> str:
    """A name that is part of messages, keys, paths and the workers' environment."""
    word = text(raw)
    if not word.isprintable():
        raise ValueError("has characters that cannot be shown; use letters, digits and punctuation")
    length = len(word.encode())
    if length > bytes_max:
        raise ValueError(f"is too long ({length:,} bytes); give at most {bytes_max}")
    return word


run_id = partial(name, bytes_max=RUN_ID_BYTES_MAX)
host = partial(name, bytes_max=HOST_BYTES_MAX)


def role(raw: Raw) -> str:
    """`NAME`, the role of all workers of a node, or `NAME=N,NAME=N` for several, as text."""
    joined = ",".join(f"{key}={number}" for key, number in raw.items()) if isinstance(raw, dict) else raw
    word = ",".join(names(name(joined, bytes_max=ROLE_BYTES_MAX)))
    if sum(counts_in(word).values()) > SLOTS_MAX:
        raise ValueError(f"is more workers than {SLOTS_MAX}; give fewer")
    return word


def switch(raw: Raw) -> bool:
    word = text(raw).lower()
    if word not in (*_ON, *_OFF):
        raise ValueError("is neither on nor off; give 1 or 0")
    return word in _ON


def whole(raw: Raw, *, low: int = 0, high: int | None = None) -> int:
    allowed = f"{low} or more" if high is None else f"a number from {low} to {high}"
    word = text(raw)
    if not re.fullmatch(r"[+-]?[0-9]+", word):
        raise ValueError(f"is not a whole number; give {allowed}")
    if (number := int(word)) < low or (high is not None and number > high):
        raise ValueError(f"is out of range; give {allowed}")
    return number


count = partial(whole, low=1)
node_rank = partial(whole, high=NODES_MAX)


def ports(raw: Raw) -> tuple[int, int]:
    """The first and the last of a range of ports, which are the same for one port; 0 means any free port."""
    found = re.fullmatch(r"([0-9]{1,18})[:-]([0-9]{1,18})", text(raw))
    if not found:
        return (port := whole(raw, high=PORT_MAX)), port
    first, last = int(found[1]), int(found[2])
    if not 1 <= first <= last <= PORT_MAX:
        raise ValueError(f"is not a range of ports; use FIRST:LAST with 1 <= FIRST <= LAST <= {PORT_MAX}")
    return first, last


def listen_address(raw: Raw, *, default: str = "127.0.0.1") -> tuple[str, int]:
    """`[HOST:]PORT`, an address to listen on: HOST is `default` if left out, port 0 any free one."""
    host, _, port = text(raw).rpartition(":")
    return host.strip("[]") or default, whole(port, high=PORT_MAX)


def seconds(raw: Raw) -> float:
    return _number(text(raw), SECONDS_MAX, "is not a number of seconds; give 0 or more")


def _number(word: str, high: float, wrong: str) -> float:
    """A number from 0 to `high`. Raises ValueError with `wrong`, also for nan."""
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    if not 0 <= number <= high:
        raise ValueError(wrong)
    return number


def duration(raw: Raw) -> float:
    if (number := seconds(raw)) == 0:
        raise ValueError("is not a length of time; give more than 0 seconds")
    return number


def size(raw: Raw) -> int:
    """A size in bytes, from a number with a unit. Smaller log files would be rotated all the time."""
    found = re.fullmatch("([1-9][0-9]{0,8})([MG])", text(raw).upper())
    if not found:
        raise ValueError("is not a size of 1M or more; give a number with M or G, as in 100M")
    return int(found[1]) << {"M": 20, "G": 30}[found[2]]


def minutes(raw: Raw) -> float:
    """Minutes, or a word for on (`WARM_MIN`) or off."""
    word = text(raw).lower()
    if word in ("true", "yes", "on"):
        return WARM_MIN
    if word in ("", "false", "no", "off"):
        return 0.0
    return _number(word, SECONDS_MAX / 60, "is not a number of minutes; give 0 or more, as in ELAUNCH_WARM=15")


def nodes(raw: Raw) -> tuple[int, int]:
    """`N` or `MIN:MAX` as (min, max)."""
    found = re.fullmatch(r"([0-9]{1,18})(?::([0-9]{1,18}))?", text(raw))
    nodes_min, nodes_max = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= nodes_min <= nodes_max <= NODES_MAX:
        raise ValueError(
            f"is neither a number of nodes nor a range; use N or MIN:MAX with 1 <= MIN <= MAX <= {NODES_MAX}"
        )
    return nodes_min, nodes_max


def workers(raw: Raw) -> int | str:
    """A number of workers, or the name of the resource that is counted on the host."""
    word = text(raw)
    if word in ("gpu", "cpu", "auto", *KINDS):
        return word
    if not re.fullmatch(r"[+-]?[0-9]+", word):
        known = ", ".join(("gpu", "cpu", *KINDS))
        raise ValueError(f"is neither a number nor a known resource; use {known} or auto, or give a number")
    return whole(word, low=1, high=SLOTS_MAX)


class OneOf:
    """Converts one of a few choices by `made`; a shell may complete them."""

    def __init__(self, *choices: str, made: Callable[[str], object] = str) -> None:
        self.choices, self._made = choices, made

    def __call__(self, raw: Raw) -> object:
        word = text(raw)
        if word not in self.choices:
            raise ValueError(f"is not one of {', '.join(self.choices)}")
        return self._made(word)


on_hang = OneOf(*(each.value for each in OnHang), made=OnHang)
numa_binding = OneOf(*(each.value for each in NumaBinding), made=NumaBinding)
log_format = OneOf(*(each.value for each in LogFormat), made=LogFormat)


def command(raw: Raw) -> tuple[str, ...]:
    """A command with its arguments, split as a shell does; no shell runs it."""
    try:
        argv = raw if isinstance(raw, list) else shlex.split(text(raw))
    except ValueError as error:
        raise ValueError(f"is not a command ({str(error).lower()}); close the quotes") from None
    if not argv or not argv[0]:
        raise ValueError("is empty; name a command")
    return tuple(argv)


def directory(raw: Raw) -> Path | None:
    """A directory; None for `/dev/null`. An empty string is an error, since it is likely a mistake."""
    word = text(raw)
    if not word:
        raise ValueError("is empty; name a directory, or /dev/null to keep nothing")
    return None if word == "/dev/null" else Path(word)


def streams(raw: Raw) -> StreamChoice:
    """`V`, or `RANK:V,RANK:V` for some local ranks only. V is 0 for none, 1 stdout, 2 stderr, 3 both."""
    word = ",".join(f"{rank}:{value}" for rank, value in raw.items()) if isinstance(raw, dict) else text(raw)
    if re.fullmatch(r"[0-3]", word):
        return StreamChoice(Streams(int(word)))
    if not re.fullmatch(r"[0-9]{1,9}:[0-3](,[0-9]{1,9}:[0-3])*", word):
        raise ValueError("does not choose streams; use 0, 1, 2 or 3, or LOCAL_RANK:VALUE,… as in 0:3,12:1")
    pairs = [pair.split(":") for pair in word.split(",")]
    return StreamChoice(Streams.NONE, {int(rank): Streams(int(value)) for rank, value in pairs})


def names(raw: Raw) -> tuple[str, ...]:
    """A comma-separated list without empty items."""
    items = raw if isinstance(raw, list) else text(raw).split(",")
    return tuple(item.strip() for item in items if item.strip())


def phrases(raw: Raw) -> tuple[str, ...]:
    """A comma-separated list whose items may hold spaces, and commas written `,,`."""
    if isinstance(raw, list):
        return tuple(item for item in raw if item)
    if not isinstance(raw, str):
        raise ValueError("is not a list; separate the texts by commas")
    items = raw.replace(",,", "\0").split(",")
    return tuple(item.replace("\0", ",") for item in items if item)


def ranks(raw: Raw) -> frozenset[int] | None:
    """Comma-separated ranks. None, from an empty list, means all ranks."""
    items = names(raw)
    if not all(re.fullmatch("[0-9]{1,9}", item) for item in items):
        raise ValueError("is not a list of ranks; use 0,1,2")
    return frozenset(int(item) for item in items) or None


def exit_codes(raw: Raw) -> tuple[int, ...]:
    """Comma-separated exit codes, sorted, since nodes compare them."""
    items = names(raw)
    if not all(re.fullmatch("[0-9]{1,3}", item) and 1 <= int(item) <= 255 for item in items):
        raise ValueError("is not a list of exit codes; use numbers from 1 to 255, as in 93,94")
    return tuple(sorted({int(item) for item in items}))


def key_values(raw: Raw) -> Mapping[str, str]:
    """`k=v,k=v`, split at the first `=`.

    Quotes around the whole text are removed. They were meant for a shell, but no shell reads arguments in YAML.
    """
    if isinstance(raw, dict):
        return dict(raw)
    word = re.sub(r"""^(["'])(.*)\1$""", r"\2", raw.strip()) if isinstance(raw, str) else raw
    pairs = [item.partition("=") for item in names(word)]
    if not all(key.strip() and value.strip() for key, _, value in pairs):
        raise ValueError("is not a list of settings; use KEY=VALUE,KEY=VALUE")
    return {key.strip(): value.strip() for key, _, value in pairs}


def signal_names(raw: Raw) -> tuple[str, ...]:
    """Comma-separated names of signals that a process can handle."""
    listed = names(raw)
    # `__members__` also has the aliases of signals, for example SIGCLD.
    if unknown := [each for each in listed if each not in signal.Signals.__members__ or each in _NOT_HANDLED]:
        raise ValueError(f"names {unknown[0]}, not a signal that a process can handle; {_USUAL}")
    return listed


@dataclass(frozen=True)
class Address:
    """An endpoint as it is typed: `host0`, `[::1]:2379`, `https://a:2379`.

    `scheme` is http, https or empty, `port` None if it was left out. `host` has no brackets.
    """

    scheme: str
    host: str
    port: int | None

    def __str__(self) -> str:
        scheme = f"{self.scheme}://" if self.scheme else ""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}{host}" if self.port is None else f"{scheme}{host}:{self.port}"


def endpoints(raw: Raw) -> tuple[Address, ...]:
    """Comma-separated endpoints, possibly none."""
    return tuple(map(_address, names(raw)))


def _address(word: str) -> Address:
    scheme, _, rest = word.rpartition("://")
    if scheme not in ("", "http", "https"):
        raise ValueError(f"has the scheme {scheme}, and elaunch supports only http and https; {_ENDPOINT_HOW}")
    rest = rest.removesuffix("/")
    # An IPv6 address without brackets has no port. It has "::" in it, or seven colons.
    if re.fullmatch(r"(?=.*::|(?:[^:]*:){7})[0-9A-Fa-f:.]+(%[\w.-]+)?", rest):
        return Address(scheme, rest, None)
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+(?:%[\w.-]+)?)\]|([\w.-]+))(?::([0-9]{1,5}))?", rest)
    if not found:
        raise ValueError(f"is not an endpoint; {_ENDPOINT_HOW}")
    port = int(found[3]) if found[3] else None
    if port is not None and port > PORT_MAX:
        raise ValueError(f"has the port {port}, and the last port is {PORT_MAX}")
    return Address(scheme, found[1] or found[2], port)
