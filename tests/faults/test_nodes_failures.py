"""Workers and agents that fail on one of several nodes, each with an agent on one real etcd."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.cluster import PATIENT, REDUCER, Cluster, LightCluster, Shared
from tests.faults.processes import is_alive
from tests.faults.test_signals import stop_all
from tests.harness import slow, wait_for
from tests.nodes import needs_nodes

pytestmark = needs_nodes


# With torch itself test_keeper_nodes.py kills a worker on one node, on such hosts too.
@pytest.mark.parametrize("kind", [LightCluster, slow(Cluster)])
def test_a_worker_killed_on_one_node_restarts_the_workers_of_all(tmp_path: Path, kind: type[Cluster]) -> None:
    """On hosts whose own names mean loopback to themselves, as Debian installs them."""
    with kind(tmp_path, 2, own_name_is_loopback=True) as cluster:
        cluster.start(0, 1, nnodes="2", options=("--nproc-per-node", "2", *PATIENT))
        first = cluster.meeting(4)
        assert first.master_addr == cluster.node(first.hosts[0]).ipv4
        victim = first.ranks_on(cluster.nodes[0])[1]

        os.kill(first.pid(victim), signal.SIGKILL)

        second = cluster.meeting(4, after=first)
        assert second.generation == first.generation + 1
        assert second.restarts == 1
        assert second.hosts == first.hosts
        assert not any(is_alive(first.pid(rank)) for rank in range(4))
        said = (
            rf"rank {victim} \(local rank 1 on node0, pid {first.pid(victim)}\) was killed by SIGKILL in generation 0"
        )
        # The other node says the cause, too.
        for agent in cluster.agents.values():
            agent.wait_for_output(said)
        cluster.end()


# A lost node is waited for in one test alone. In the others no node is to be lost on a busy machine.
PAIR = ("--max-restarts", "100", "--master-port", "29511", "--rdzv-conf", "lease_ttl=10")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    """A job of two nodes, beside a third one."""
    with Shared(tmp_path_factory, 2, nodes=3, nnodes="2", options=PAIR) as shared:
        yield shared


def test_nodes_that_were_all_given_one_master_port_come_back_after_a_failure(pair: Shared) -> None:
    cluster, first = pair.job()

    os.kill(first.pid(0), signal.SIGKILL)

    second = cluster.meeting(2, after=first)
    assert second.generation == first.generation + 1
    assert second.hosts == first.hosts
    assert {r["master_port"] for r in cluster.records.of("started")} == {29511}
    cluster.goes_on(second)


def test_two_workers_that_fail_at_once_are_one_restart(pair: Shared) -> None:
    cluster, first = pair.job()

    # The first one's end would stop the second one within milliseconds, by itself or by its agent. All are held.
    stop_all([agent.process.pid for agent in cluster.agents.values()])
    for signum in (signal.SIGSTOP, signal.SIGKILL):
        for rank in (0, 1):
            os.kill(first.pid(rank), signum)
    for agent in cluster.agents.values():
        agent.signal(signal.SIGCONT)

    second = cluster.meeting(2, after=first)
    assert second.generation == first.generation + 1
    assert second.restarts == first.restarts + 1
    cluster.goes_on(second)


def test_a_fork_server_killed_on_one_node_restarts_the_workers_of_all(pair: Shared) -> None:
    cluster, first = pair.job()
    other = len(cluster.agents[0].stderr)

    cluster.agents[1].fork_server().kill()

    second = cluster.meeting(2, after=first)
    assert second.generation == first.generation + 1
    said = "fork server was killed by SIGKILL"
    wait_for(lambda: said in cluster.agents[0].stderr[other:], "the other node says the cause, too")
    cluster.goes_on(second)


def test_a_failure_on_one_node_runs_the_nodes_again_that_were_done(pair: Shared) -> None:
    cluster, first = pair.job()
    generation = first.generation
    cluster.ask("hang", moment="last", generation=generation, rank=1)
    (cluster.folder / "end").touch()
    wait_for(lambda: cluster.records.of("hang", generation), "rank 1 hangs at its end")
    done = ("get", "--prefix", "--keys-only", f"/elaunch/job/done/{generation:010d}/")
    wait_for(lambda: cluster.etcd.ctl(*done).strip(), "node 0 is done", every_s=0.1)
    (cluster.folder / "end").unlink()

    os.kill(first.pid(1), signal.SIGKILL)

    second = cluster.meeting(2, after=first)
    assert [r["rank"] for r in cluster.records.of("ended", generation)] == [0]
    why = rf"running again: rank 1 .* was killed by SIGKILL in generation {generation}"
    cluster.agents[cluster.node(first.hosts[0]).index].wait_for_output(why)
    assert second.restarts == first.restarts + 1
    cluster.goes_on(second)


def test_a_killed_agent_takes_its_workers_along_and_its_successor_takes_its_place(pair: Shared) -> None:
    cluster, first = pair.job()
    (rank,) = first.ranks_on(cluster.nodes[1])

    cluster.agents[1].kill_agent()

    cluster.agents[1].assert_nothing_is_left([first.pid(rank)])
    pair.start(1)
    second = cluster.meeting(2, after=first)
    assert second.restarts == first.restarts, "a lost node is nobody's failure"
    assert second.hosts[0] == "node0", "the survivor has rank 0"
    cluster.goes_on(second)


def test_a_node_with_another_command_is_refused_and_the_job_is_untouched(pair: Shared) -> None:
    cluster, meeting = pair.job()
    other = cluster.folder / "other.py"
    other.write_text("print('hello')")

    cluster.start(2, nnodes="2", options=PAIR, program=other)

    assert cluster.agents[2].wait() == 2
    cluster.assert_nothing_is_left(cluster.nodes[2])
    said = cluster.agents.pop(2).stderr
    assert "reducer.py" in said
    assert "other.py" in said
    cluster.goes_on(meeting)


def test_a_job_that_has_recovered_ends_well_on_all_nodes_and_leaves_nothing(pair: Shared) -> None:
    cluster, _ = pair.job()

    cluster.end()


@pytest.mark.slow
def test_a_worker_and_another_node_that_fail_at_once_are_one_new_generation(tmp_path: Path) -> None:
    with LightCluster(tmp_path, 3) as cluster:
        cluster.start(0, 1, 2, nnodes="2:3")
        first = cluster.meeting(3)
        lost = cluster.node(first.hosts[2])

        lost.power_off()
        os.kill(first.pid(0), signal.SIGKILL)

        second = cluster.meeting(2, after=first)
        assert second.generation == first.generation + 1
        assert second.hosts == first.hosts[:2]
        cluster.end(*({0, 1, 2} - {lost.index}))


@pytest.mark.slow
def test_two_nodes_lost_at_once_are_one_new_generation_of_the_others(tmp_path: Path) -> None:
    with LightCluster(tmp_path, 4) as cluster:
        cluster.start(0, 1, 2, 3, nnodes="2:4")
        first = cluster.meeting(4)
        lost = [cluster.node(first.hosts[rank]) for rank in (0, 2)]

        for node in lost:
            node.power_off()

        second = cluster.meeting(2, after=first)
        assert second.hosts == [first.hosts[1], first.hosts[3]]
        assert second.restarts == 0
        cluster.end(*(i for i in range(4) if cluster.nodes[i] not in lost))


def test_a_failure_with_no_restart_left_ends_all_agents_with_the_same_first_failure(tmp_path: Path) -> None:
    with LightCluster(tmp_path, 2) as cluster:
        cluster.start(0, 1, nnodes="2", options=("--max-restarts", "1", *PATIENT))
        first = cluster.meeting(2)
        os.kill(first.pid(0), signal.SIGKILL)
        second = cluster.meeting(2, after=first)

        # Rank 1 raises an exception. An exit code alone may also follow from a peer's end, if that is seen first.
        cluster.ask("raise", generation=second.generation, rank=1)

        cluster.ended({0: 1, 1: 1})
        words = rf"rank 1 \(local rank 0 on {second.hosts[1]}, pid {second.pid(1)}\) raised RuntimeError: asked for by"
        for agent in cluster.agents.values():
            assert re.search(rf"^{words}.* in generation 1\.$", agent.stderr, re.MULTILINE), agent.stderr
            assert "1 of 1 restarts used" in agent.stderr


@pytest.mark.slow
@pytest.mark.parametrize("how", ["exit 7", "kill"])
def test_with_max_restarts_0_any_failure_ends_the_job_on_all_nodes(tmp_path: Path, how: str) -> None:
    with LightCluster(tmp_path, 2) as cluster:
        cluster.start(0, 1, nnodes="2", options=("--max-restarts", "0"))
        meeting = cluster.meeting(2)

        cluster.ask(how, generation=0, rank=1)

        cluster.ended({0: 1, 1: 1})
        assert {r["generation"] for r in cluster.records.of("started")} == {0}
        for agent in cluster.agents.values():
            assert f"(local rank 0 on {meeting.hosts[1]}, pid {meeting.pid(1)})" in agent.stderr


def test_with_max_restarts_0_a_lost_node_ends_the_job(tmp_path: Path) -> None:
    with LightCluster(tmp_path, 2) as cluster:
        cluster.start(0, 1, nnodes="2", options=("--max-restarts", "0"))
        cluster.meeting(2)

        cluster.nodes[1].power_off()

        cluster.ended({0: 1})
        assert "node1" in cluster.agents[0].stderr


@pytest.mark.slow
def test_a_library_that_one_node_lacks_ends_the_job_without_another_try(tmp_path: Path) -> None:
    with LightCluster(tmp_path, 2) as cluster:
        program = tmp_path / "train.py"
        program.write_text("import time, of_node0\ntime.sleep(600)\n")
        (tmp_path / "node0").mkdir()
        (tmp_path / "node0" / "of_node0.py").touch()

        cluster.start(0, 1, nnodes="2", program=program, env={"PYTHONPATH": "."})

        cluster.ended({0: 1, 1: 1})
        for agent in cluster.agents.values():
            assert "ModuleNotFoundError: No module named 'of_node0'" in agent.stderr
            assert "host      : node1" in agent.stderr
            assert "generation 1" not in agent.stderr


@pytest.mark.slow
@pytest.mark.parametrize("leads", [True, False])
def test_a_killed_agents_node_is_given_up_and_the_others_go_on(tmp_path: Path, leads: bool) -> None:
    with LightCluster(tmp_path, 3) as cluster:
        cluster.start(0, 1, 2, nnodes="2:3")
        first = cluster.meeting(3)
        index = cluster.leader() if leads else (cluster.leader() + 1) % 3

        cluster.agents[index].kill_agent()

        second = cluster.meeting(2, after=first)
        assert second.hosts == [host for host in first.hosts if host != f"node{index}"]
        assert second.restarts == 0
        assert cluster.leader() != index
        cluster.end(*({0, 1, 2} - {index}))


@pytest.mark.slow
@pytest.mark.parametrize("leads", [True, False])
def test_an_agent_that_stops_for_longer_than_its_lease_comes_back_as_a_new_node(tmp_path: Path, leads: bool) -> None:
    with LightCluster(tmp_path, 2) as cluster:
        cluster.start(0, 1, nnodes="1:2")
        first = cluster.meeting(2)
        index = cluster.leader() if leads else 1 - cluster.leader()
        (rank,) = first.ranks_on(cluster.nodes[index])
        old_worker = first.pid(rank)
        # Without the hang the worker would end with its peer.
        cluster.ask("hang", generation=0, rank=rank)
        wait_for(lambda: cluster.records.of("hang"), "it hears nobody")
        cluster.agents[index].signal(signal.SIGSTOP)

        alone = cluster.meeting(1, after=first)

        assert alone.hosts == [f"node{1 - index}"]
        assert is_alive(old_worker)
        cluster.agents[index].signal(signal.SIGCONT)
        both = cluster.meeting(2, after=alone)
        assert both.hosts == [f"node{1 - index}", f"node{index}"]
        assert both.restarts == 0
        assert not is_alive(old_worker)
        cluster.records.assert_ended_before(both, rank=1, generation=first.generation)
        cluster.end()


@pytest.mark.slow
def test_an_agent_that_stops_for_less_than_its_lease_costs_nothing(tmp_path: Path) -> None:
    with LightCluster(tmp_path, 2) as cluster:
        cluster.start(0, 1, nnodes="2", options=("--rdzv-conf", "lease_ttl=12"))
        meeting = cluster.meeting(2)

        cluster.agents[1].signal(signal.SIGSTOP)
        # The stopped agent misses one renewal of its lease.
        cluster.trains_for(meeting, 4)
        cluster.agents[1].signal(signal.SIGCONT)

        cluster.goes_on(meeting)
        cluster.end()


@pytest.mark.slow
def test_a_node_that_is_killed_while_a_generation_forms_is_left_out(tmp_path: Path) -> None:
    with LightCluster(tmp_path, 3) as cluster:
        cluster.start(0, 1, 2, nnodes="2:3", options=("--failure-grace", "8"))
        first = cluster.meeting(3)
        # Rank 1 ignores SIGTERM, and its agent waits for it. Until then the next generation cannot be sealed.
        cluster.ask("deaf", generation=0, rank=1)
        wait_for(lambda: cluster.records.of("deaf"), "rank 1 is deaf")
        os.kill(first.pid(0), signal.SIGKILL)
        slow, lost = (cluster.node(first.hosts[rank]).index for rank in (1, 2))
        cluster.agents[slow].wait_for_output("was killed by SIGKILL in generation 0")

        cluster.nodes[lost].power_off()

        assert not cluster.records.of("started", 1), "the generation was sealed before the fault"
        second = cluster.meeting(2, after=first)
        assert second.hosts == first.hosts[:2]
        cluster.end(*({0, 1, 2} - {lost}))


@pytest.mark.slow
def test_a_worker_that_fails_before_the_others_have_met_it_is_a_restart(tmp_path: Path) -> None:
    with LightCluster(tmp_path, 2) as cluster:
        cluster.ask("kill", moment="start", generation=0, rank=1)
        cluster.ask("kill", moment="start", generation=1, rank=0)

        cluster.start(0, 1, nnodes="2")

        meeting = cluster.meeting(2)
        assert len(cluster.records.of("kill")) == 2
        assert meeting.generation == 2
        assert meeting.restarts == 2
        cluster.end()


def test_sigterm_to_one_agent_is_said_and_the_others_go_on_at_once(tmp_path: Path) -> None:
    with LightCluster(tmp_path, 3) as cluster:
        # No lease ends in this test, so the other nodes learn of an end only if the agent says it.
        cluster.start(0, 1, 2, nnodes="2:3", options=("--rdzv-conf", "lease_ttl=600"))
        first = cluster.meeting(3)

        cluster.agents[0].signal(signal.SIGTERM)

        second = cluster.meeting(2, after=first)
        assert second.hosts == [host for host in first.hosts if host != "node0"]
        assert second.restarts == 0
        assert cluster.agents[0].wait() == 128 + signal.SIGTERM
        cluster.assert_nothing_is_left(cluster.nodes[0])
        cluster.end(1, 2)


def test_sigterm_to_all_agents_ends_the_job(tmp_path: Path) -> None:
    with LightCluster(tmp_path, 2) as cluster:
        cluster.start(0, 1, nnodes="2", options=PATIENT)
        cluster.meeting(2)

        for agent in cluster.agents.values():
            agent.signal(signal.SIGTERM)

        cluster.ended(dict.fromkeys((0, 1), 128 + signal.SIGTERM))


@pytest.mark.slow
def test_sigint_to_one_agent_ends_the_job_on_all_nodes(tmp_path: Path) -> None:
    with LightCluster(tmp_path, 2) as cluster:
        cluster.start(0, 1, nnodes="2")
        cluster.meeting(2)

        cluster.agents[1].signal(signal.SIGINT)

        cluster.ended({0: 130, 1: 130})


SAVER = """
import os, pathlib, signal, sys, time

def save(*_):
    # Until every agent has its Ctrl-C.
    while not pathlib.Path(sys.argv[1], "go").exists():
        time.sleep(0.01)
    pathlib.Path(sys.argv[1], "saved-" + os.environ["RANK"]).touch()
    sys.exit()

signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGINT, save)
pathlib.Path(sys.argv[1], "ready-" + os.environ["RANK"]).touch()
while True:
    time.sleep(0.1)
"""


def test_a_ctrl_c_that_every_agent_gets_lets_all_workers_save(tmp_path: Path) -> None:
    """srun sends Ctrl-C to every node. The first one may have ended the job before it arrives on another node."""
    program = tmp_path / "saver.py"
    program.write_text(SAVER)
    with LightCluster(tmp_path, 2) as cluster:
        # All that the test waits for has to come within the grace.
        cluster.start(0, 1, nnodes="2", program=program, options=("--stop-grace", "600", *PATIENT))
        wait_for(lambda: len([*cluster.folder.glob("ready-*")]) == 2, "both workers")

        cluster.agents[1].signal(signal.SIGINT)
        wait_for(lambda: "the job has ended" in cluster.agents[0].stderr, "word of it on the other node")
        cluster.agents[0].signal(signal.SIGINT)
        cluster.agents[0].wait_for_output("SIGINT: stopping already, SIGKILL in")
        (cluster.folder / "go").touch()

        cluster.ended({0: 130, 1: 130})
        assert {path.name for path in cluster.folder.glob("saved-*")} == {"saved-0", "saved-1"}


@pytest.mark.slow
def test_a_job_whose_agents_were_killed_begins_anew_when_they_are_started_otherwise_at_once(tmp_path: Path) -> None:
    mended = tmp_path / "mended.py"
    mended.symlink_to(REDUCER)
    with LightCluster(tmp_path, 2) as cluster:
        cluster.start(0, 1, nnodes="2")
        first = cluster.meeting(2)
        for agent in cluster.agents.values():
            agent.signal(signal.SIGKILL)
            agent.wait()

        cluster.start(0, 1, nnodes="2", program=mended)

        second = cluster.meeting(2, after=first)
        assert (second.generation, second.restarts) == (first.generation + 1, 0)
        assert "(the job starts" in cluster.agents[0].stderr
        cluster.end(0, 1)


@pytest.mark.slow
def test_two_jobs_on_one_etcd_do_not_notice_each_other(tmp_path: Path) -> None:
    # Each job has one node and may have two, so each needs the etcd.
    options = ("--nproc-per-node", "2", "--rdzv-conf", "last_call_timeout=0")
    with LightCluster(tmp_path, 2) as one:
        other = one.sharing(tmp_path / "other")
        one.start(0, nnodes="1:2", job="one", options=options)
        other.start(1, nnodes="1:2", job="other", options=options)
        first, theirs = one.meeting(2), other.meeting(2)

        os.kill(first.pid(0), signal.SIGKILL)

        second = one.meeting(2, after=first)
        assert second.restarts == 1
        other.goes_on(theirs)
        one.end()
        other.goes_on(theirs)
        other.end()
