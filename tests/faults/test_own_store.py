"""Several nodes without an etcd: the head serves the store, and the user types lines on each node."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.faults.processes import Watched
from tests.harness import LIGHT, wait_for
from tests.nodes import Node, Nodes, needs_nodes
from tests.standin import WITHOUT_TORCH

PORT = 2379
ENDPOINT = f"node0:{PORT}"
RECIPE = ("--nnodes", "2", "--rdzv-endpoint", ENDPOINT)
WAIT_FOR_END = """
import os, socket, sys, time
from pathlib import Path

socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=20).close()
print("met", os.environ["RANK"], os.environ["MASTER_ADDR"], os.environ["WORLD_SIZE"], flush=True)
while not Path(sys.argv[1]).exists():
    time.sleep(0.02)
"""

pytestmark = needs_nodes


class Two:
    """Two nodes and the agents on them. A node resolves its own name only to 127.0.1.1, as Debian installs it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.end = folder / "end"
        (folder / "train.py").write_text(WAIT_FOR_END)
        self.nodes = Nodes(2, own_name_is_loopback=True)
        self._agents: list[Watched] = []

    def __enter__(self) -> Two:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self._agents:
            agent.__exit__()
        self.nodes.close()

    @property
    def program(self) -> tuple[str, ...]:
        return (*LIGHT, "--nproc-per-node", "1", str(self.folder / "train.py"), str(self.end))

    def type(self, index: int, *words: str, token: str = "", user: str = "") -> Watched:
        """Type a command on a node. Each node has a home of its own, unless a `user` has one on all of them."""
        node = self.nodes[index]
        folder = self.folder / f"{node.name}-{len(self._agents)}"
        home = self.folder / (user or f"home-{node.name}")
        home.mkdir(exist_ok=True)
        folder.mkdir()
        env = {**WITHOUT_TORCH, "HOME": str(home), **({"ELAUNCH_TOKEN": token} if token else {})}
        agent = Watched(folder, *words, env=env, prefix=node.prefix)
        self._agents.append(agent)
        return agent

    def type_line(self, index: int, line: str, *, user: str = "", token_file: Path | None = None) -> Watched:
        """Type a line that elaunch printed, with the token file that a node with a home of its own needs."""
        command, *words = shlex.split(line)
        assert command == "elaunch"
        return self.type(index, *(("--token-file", str(token_file)) if token_file else ()), *words, user=user)

    def join(self, head: Watched, index: int = 1) -> Watched:
        """Follow the head's instructions on another node: copy the token and type the line."""
        logged = head.wait_for_output(r"^elaunch: the store's token is in (/.*), which only you can read: ")[1]
        copied = Path(shutil.copy(logged, self.folder / "copied"))
        return self.type_line(index, line_of(head), token_file=copied)

    def files_at_home(self) -> list[Path]:
        return [path for home in self.folder.glob("home-*") for path in home.rglob("*") if path.is_file()]


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    with Two(tmp_path) as made:
        yield made


def line_of(agent: Watched) -> str:
    """The line to type on the other node."""
    return agent.wait_for_output(r"^elaunch: on the other node type: (elaunch .*)$")[1]


def servers(node: Node) -> list[psutil.Process]:
    found = []
    for process in node.processes():
        with suppress(psutil.NoSuchProcess):
            if " ".join(process.cmdline()).startswith("elaunch: job store"):
                found.append(process)
    return found


def assert_both_met(head: Watched, other: Watched, master_addr: str) -> None:
    head.wait_for_output(rf"met \d {re.escape(master_addr)} 2$")
    other.wait_for_output(rf"met \d {re.escape(master_addr)} 2$")


def assert_both_succeed(two: Two, head: Watched, other: Watched) -> None:
    two.end.touch()
    assert (head.wait(), other.wait()) == (0, 0), f"{head.output}\n{other.output}"
    wait_for(lambda: not two.nodes.processes(), "nothing is left")


@dataclass(frozen=True)
class Met:
    """A job that two lines started and that succeeded, while other users without its token had typed lines too."""

    two: Two
    head: Watched
    other: Watched
    without_token: Watched
    with_a_wrong_one: Watched


@pytest.fixture(scope="module")
def met(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Met]:
    with Two(tmp_path_factory.mktemp("met")) as two:
        head = two.type(0, *RECIPE, *two.program)
        line_of(head)
        none = two.type(1, *RECIPE, *two.program)
        wrong = two.type(1, *RECIPE, *two.program, token="a token of some other job")
        for refused in (none, wrong):
            refused.wait()

        other = two.join(head)
        assert_both_met(head, other, "10.77.0.1")
        assert_both_succeed(two, head, other)
        yield Met(two, head, other, none, wrong)


def test_two_lines_start_a_job_on_two_nodes_and_nothing_is_left_of_it(met: Met) -> None:
    assert "serves the job's store" not in met.head.stderr
    assert (met.two.folder / "copied").read_text().split()[0] not in met.head.output + met.other.output
    assert met.two.files_at_home() == []


def test_a_node_without_the_token_or_with_a_wrong_one_is_refused_with_the_reason(met: Met) -> None:
    assert met.without_token.code == 2
    assert f"the store at {ENDPOINT} is a job's own and requires its token; type the line" in met.without_token.stderr
    assert met.with_a_wrong_one.code == 2
    assert f"the token here is not that of the store at {ENDPOINT}" in met.with_a_wrong_one.stderr


def test_a_node_that_shares_the_home_needs_no_token(two: Two) -> None:
    head = two.type(0, *RECIPE, *two.program, user="home-of-both")
    other = two.type_line(1, line_of(head), user="home-of-both")

    assert_both_met(head, other, "10.77.0.1")

    assert_both_succeed(two, head, other)
    assert two.files_at_home() == []


def test_two_terminals_of_one_host_need_no_token(two: Two) -> None:
    command = ("--nnodes", "2", "--rdzv-endpoint", "localhost:2379", *two.program)
    head = two.type(0, *command)
    line_of(head)

    other = two.type(0, *command)

    head.wait_for_output(r"met \d \S+ 2$")
    other.wait_for_output(r"met \d \S+ 2$")
    assert_both_succeed(two, head, other)


def test_a_killed_heads_token_is_gone_with_it(two: Two) -> None:
    head = two.type(0, *RECIPE, *two.program, user="home-of-both")
    line_of(head)
    assert len(servers(two.nodes[0])) == 1
    assert two.files_at_home()

    head.signal(signal.SIGKILL)

    wait_for(lambda: not two.files_at_home(), "the end of the token's file")


def test_static_lines_of_torchrun_give_ranks_by_node_and_the_master_as_it_was_given(two: Two) -> None:
    static = ("--nnodes", "2", "--master-addr", "node0", "--master-port", "29555")
    token = "a token known beforehand"
    # Start the later rank first: ranks do not follow the order of arrival.
    other = two.type(1, *static, "--node-rank", "1", *two.program, token=token)
    other.wait_for_output("the store is unreachable|waiting for")
    head = two.type(0, *static, "--node-rank", "0", *two.program, token=token)

    head.wait_for_output(r"met 0 node0 2$")
    other.wait_for_output(r"met 1 node0 2$")

    assert_both_succeed(two, head, other)


@pytest.mark.slow
def test_a_store_in_the_foreground_serves_the_jobs_of_a_team(two: Two) -> None:
    token = "a token of the team's"
    store = two.type(0, "store", "--listen", f":{PORT}", token=token)
    store.wait_for_output(rf"serving a store at 10\.77\.0\.1:{PORT}; .* \(with ELAUNCH_TOKEN set to the same token\)$")
    command = ("--nnodes", "2", "--rdzv-endpoint", f"10.77.0.1:{PORT}", "--run-id", "one", *two.program)

    one, other = (two.type(index, *command, token=token) for index in (0, 1))

    wait_for(lambda: "met" in one.output and "met" in other.output, "both to meet")
    assert "this host serves" not in one.stderr + other.stderr
    two.end.touch()
    assert (one.wait(), other.wait()) == (0, 0)
    store.signal(signal.SIGINT)
    assert store.wait() == 0
    wait_for(lambda: not two.nodes.processes(), "nothing is left")


@pytest.mark.slow
def test_ipv6_alone_is_enough(two: Two) -> None:
    endpoint = ("--nnodes", "2", "--rdzv-endpoint", f"[fd77::1]:{PORT}")
    head = two.type(0, *endpoint, *two.program)
    other = two.join(head)

    head.wait_for_output(r"met \d fd77::[12] 2$")
    other.wait_for_output(r"met \d fd77::[12] 2$")

    assert_both_succeed(two, head, other)
