"""--hosts and host files, as DeepSpeed, Open MPI and MPICH write them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest

from elaunch.launcher.options.hostlist import Host, parse_hostfile, parse_hosts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node0,node1:4", [Host("node0"), Host("node1", slots=4)]),
        ("n[08-10,12]:2", [Host(f"n{number}", slots=2) for number in ("08", "09", "10", "12")]),
        ("me@gpu.example.com, 10.0.0.2:8", [Host("me@gpu.example.com"), Host("10.0.0.2", slots=8)]),
        ("[fe80::1%eth0]:2,[::1]", [Host("fe80::1%eth0", slots=2), Host("::1")]),
    ],
)
def test_the_hosts_of_a_list(text: str, hosts: list[Host]) -> None:
    assert parse_hosts(text) == tuple(hosts)


def test_the_time_for_a_list_grows_with_its_length_only() -> None:
    begun_s = time.process_time()

    assert len(parse_hosts("n[0-65535]")) == 1 << 16
    assert time.process_time() - begun_s < 10


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("# DeepSpeed's\nnode0 slots=8\n\nnode1 slots=4  # four\n", [Host("node0", slots=8), Host("node1", slots=4)]),
        ("node0 slots=2 max_slots=4\nnode1\n", [Host("node0", slots=2), Host("node1")]),
        # A line for each slot, as a scheduler writes it for Open MPI.
        ("node0\nnode0\nnode1:3 binding=core\n", [Host("node0", slots=2), Host("node1", slots=3)]),
        ("n[0-1] slots=8\n", [Host("n0", slots=8), Host("n1", slots=8)]),
    ],
)
def test_the_hosts_of_a_file(text: str, hosts: list[Host]) -> None:
    assert parse_hostfile(text) == tuple(hosts)


@pytest.mark.parametrize(
    ("parse", "text", "part"),
    [
        (parse_hosts, "node0,,node1", "has '', which is not a host; write HOST or HOST:WORKERS"),
        (parse_hosts, "node0:gpu", "has gpu as the number of workers; give 1 to "),
        (parse_hosts, "node0:", "has nothing as the number of workers"),
        (parse_hosts, "node0:0", "has 0 as the number of workers"),
        (parse_hosts, "-oProxyCommand=x", "is not a host"),
        (parse_hosts, "n[3-1]", "has 3-1, which is neither a number nor a range"),
        (parse_hosts, "n[0-1],n1", "has n1 twice"),
        (parse_hosts, "n[0-999999999]", "has 0-999999999, which is neither a number nor a range"),
        (parse_hosts, "n[0-9999][0-9999]", "has more than 65536 hosts"),
        (parse_hostfile, "node0\nnode1 slots=many\n", "line 2 (node1 slots=many) has many as the number of workers"),
        (parse_hostfile, "node0, node1\n", "line 1 (node0, node1) has 'node0, node1', which is not a host"),
        (parse_hostfile, "node0 slot=8\n", "line 1 (node0 slot=8) has 'node0 slot=8', which is not a host"),
        (parse_hostfile, "# only this\n", "names no host"),
    ],
)
def test_what_is_no_list_is_refused_with_the_wrong_part(
    parse: Callable[[str], tuple[Host, ...]], text: str, part: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(part)):
        parse(text)
