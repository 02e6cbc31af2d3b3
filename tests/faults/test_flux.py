"""Under a real Flux: jobs without a rendezvous flag, its notice, and its way to end a job."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator

import pytest

from tests.faults.processes import described
from tests.faults.test_slurm import NOTICED, PLACE, PLAIN, SECRET, places
from tests.flux import Flux, needs_flux
from tests.harness import COMMAND, wait_for

# Flux is no package of Debian: who has it runs these.
pytestmark = [needs_flux, pytest.mark.slow]


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flux]:
    with Flux(tmp_path_factory.mktemp("flux"), 4) as started:
        (started.home / "place.sh").write_text(PLACE)
        (started.home / "noticed.py").write_text(NOTICED)
        yield started


@pytest.fixture(autouse=True)
def nothing_is_left(flux: Flux) -> Iterator[None]:
    """After each test no job runs, and no process of one."""
    yield
    flux.call("flux", "cancel", "--all", code=None)
    flux.wait_idle()
    wait_for(lambda: not leftovers(flux), "no process of a job")


def leftovers(flux: Flux) -> list[str]:
    lines = [described(process) for process in flux.nodes.processes()]
    return [line for line in lines if "elaunch" in line or "place.sh" in line or "noticed.py" in line]


def test_flux_run_elaunch_needs_no_flag_and_ranks_follow_the_nodes(flux: Flux) -> None:
    output = flux.call("flux", "run", "-N4", *COMMAND, *PLAIN)

    assert places(output) == [(i, 4, 0, f"node{i}") for i in range(4)]
    assert len(re.findall(r"Flux says: job flux-\w+, 4 nodes, this is node \d, the head is node0 ", output)) == 4
    assert not SECRET.search(output)


def test_of_several_tasks_on_a_node_one_is_the_agent_and_the_others_wait(flux: Flux) -> None:
    output = flux.call("flux", "run", "-N2", "--tasks-per-node=2", *COMMAND, *PLAIN)

    assert places(output) == [(0, 4, 0, "node0"), (1, 4, 1, "node0"), (2, 4, 0, "node1"), (3, 4, 1, "node1")]
    assert len(re.findall("Flux says: job", output)) == 2


def test_its_notice_reaches_workers_that_have_a_handler(flux: Flux) -> None:
    submitted = ("flux", "submit", "-N2", "--output=noticed.out", *COMMAND, "noticed.py", "SIGUSR1")
    job = flux.call(*submitted).strip()
    wait_for(lambda: all((flux.home / f"here.{rank}").exists() for rank in range(2)), "both workers")

    flux.call("flux", "job", "kill", "--signal=USR1", job)

    flux.wait(job, 128 + signal.SIGUSR1)
    assert (flux.home / "noticed.out").read_text().count("noticed by SIGUSR1") == 2
