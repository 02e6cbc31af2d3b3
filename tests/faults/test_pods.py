"""The manifests of deploy/k8s, run in namespaces in place of pods: Kubernetes' variables, names, ends and restarts."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.faults.cluster import PRELOAD, REDUCER
from tests.faults.processes import LIGHT, described
from tests.faults.test_signals import STUBBORN
from tests.harness import DEADLINE_S, RUN_LIMIT_S, script, wait_for
from tests.manifests import K8S, Object, rendered, the
from tests.nodes import Node, needs_nodes
from tests.pods import NAMESPACE, JobPod, Pods
from tests.standin import WITHOUT_TORCH

pytestmark = needs_nodes

MEET = """
import os, pathlib, socket, sys, time
address, port, size = (os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"))
socket.create_connection((address, int(port)), timeout=20).close()
print("met at", address, port, "of", size, flush=True)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.02)
"""
TOKEN = {"elaunch-token": {"token": "the token of this test"}}


def etcd_secrets(folder: Path) -> Mapping[str, Mapping[str, str]]:
    """The Secrets that the documented command puts into the namespace."""
    command = [str(K8S / "etcd" / "certificates.sh"), NAMESPACE, str(folder)]
    subprocess.run(command, check=True, env={**os.environ, "KUBECTL": ""}, capture_output=True, timeout=RUN_LIMIT_S)

    def secret(who: str) -> dict[str, str]:
        files = {"ca.crt": "ca.crt", "tls.crt": f"{who}.crt", "tls.key": f"{who}.key"}
        return {key: (folder / file).read_text() for key, file in files.items()}

    return {f"elaunch-etcd-{who}": secret(who) for who in ("server", "client")}


def connects(node: Node, address: str, port: int, within_s: float = 60.0) -> bool:
    """Whether a connection from that node succeeds. The deadline is long: success is expected."""
    code = f"import socket; socket.create_connection(({address!r}, {port}), timeout={within_s})"
    return (
        subprocess.run(
            [*node.prefix, sys.executable, "-S", "-c", code], capture_output=True, timeout=RUN_LIMIT_S
        ).returncode
        == 0
    )


def test_a_jobs_pods_meet_without_a_flag_and_a_deleted_one_comes_back_with_another_address(tmp_path: Path) -> None:
    job = the("Job", rendered("base"))
    program = (*LIGHT, str(REDUCER), str(tmp_path))
    with Pods(tmp_path, 3, TOKEN) as pods:
        head, other = (pods.run(job, ordinal, *program, env=WITHOUT_TORCH) for ordinal in (0, 1))
        first = pods.meeting(head, other)

        assert pods.delete(other) == 143
        again = pods.run(job, 1, *program, env=WITHOUT_TORCH)

        assert again.node.ipv4 != other.node.ipv4
        second = pods.meeting(head, again, after=first)
        assert second.restarts == 0
        pods.end(head, again)


@pytest.mark.slow
def test_a_job_whose_first_pod_is_deleted_begins_anew_in_new_pods(tmp_path: Path) -> None:
    """Exit code 3 does not end the Job (podFailurePolicy), so both pods are replaced."""
    job = the("Job", rendered("base"))
    program = (*PRELOAD, str(REDUCER), str(tmp_path))
    with Pods(tmp_path, 4, TOKEN) as pods:
        head, other = (pods.run(job, ordinal, *program) for ordinal in (0, 1))
        pods.meeting(head, other)

        assert pods.delete(head) == 143
        assert other.process.wait(DEADLINE_S) == 3
        # Start the pod that waits for the head first: the head's name cannot be resolved until the head is back.
        again = pods.run(job, 1, *program)
        again.process.wait_for_output("elaunch:")
        first = pods.run(job, 0, *program)

        since = len(pods.records.all())
        wait_for(lambda: len({r["host"] for r in pods.records.of("step", since=since)}) == 2, "both train again")
        pods.end(first, again)


def jobs_of_a_jobset(jobset: Object) -> Object:
    """The one Job that the JobSet controller makes of it."""
    (only,) = jobset["spec"]["replicatedJobs"]
    job = copy.deepcopy(only["template"])
    name = jobset["metadata"]["name"]
    job["metadata"] = {"name": f"{name}-{only['name']}-0"}
    job["spec"]["template"]["spec"]["subdomain"] = name
    return job


def kubeflows(rank: int) -> dict[str, str]:
    """Variables that Trainer v2 sets in the pods of a TrainJob called train (pkg/runtime/framework/plugins/torch)."""
    numbers = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(rank)}
    return {**numbers, "PET_MASTER_ADDR": "train-node-0-0.train", "PET_MASTER_PORT": "29400"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kubeflow", "jobset"])
def test_the_pods_of_a_jobset_and_of_kubeflow_meet_and_come_back(tmp_path: Path, kind: str) -> None:
    if kind == "kubeflow":
        jobset = the("ClusterTrainingRuntime", rendered(kind))["spec"]["template"] | {"metadata": {"name": "train"}}
    else:
        jobset = the("JobSet", rendered(kind))
    job = jobs_of_a_jobset(jobset)
    program = (*LIGHT, str(REDUCER), str(tmp_path))
    with Pods(tmp_path, 3, TOKEN) as pods:

        def run(rank: int) -> JobPod:
            more = kubeflows(rank) if kind == "kubeflow" else {}
            return pods.run(job, rank, *program, env={**WITHOUT_TORCH, **more})

        head, other = run(0), run(1)
        first = pods.meeting(head, other)
        assert first.hosts == ["train-node-0-0", "train-node-0-1"]

        assert pods.delete(other) == 143
        again = run(1)

        second = pods.meeting(head, again, after=first)
        assert second.hosts == first.hosts
        pods.end(head, again)


@pytest.mark.slow
def test_an_elastic_job_over_the_etcd_outlives_its_first_pod_and_a_member(tmp_path: Path) -> None:
    job = the("Job", rendered("overlays/elastic"))
    members = the("StatefulSet", rendered("etcd"))
    program = (*LIGHT, str(REDUCER), str(tmp_path))
    with Pods(tmp_path, 8, etcd_secrets(tmp_path / "tls")) as pods:
        etcds = [pods.run_etcd(members, ordinal) for ordinal in range(3)]
        for each in etcds:
            pods.etcd_is_ready(each)
        first_pod, *others = (pods.run(job, ordinal, *program, env=WITHOUT_TORCH) for ordinal in range(3))
        first = pods.meeting(first_pod, *others)

        pods.lose(etcds[0])
        member = pods.run_etcd(members, 0)
        pods.etcd_is_ready(member, times=2)
        pods.goes_on(first)
        pods.lose(first_pod)

        second = pods.meeting(*others, after=first)
        again = pods.run(job, 0, *program, env=WITHOUT_TORCH)
        third = pods.meeting(*others, again, after=second)
        assert third.restarts == 0
        pods.ask("kill", generation=third.generation, rank=1)
        assert pods.meeting(*others, again, after=third).restarts == 1
        pods.end(*others, again)


def test_under_the_network_policies_a_job_meets_over_the_etcd_and_a_stranger_reaches_nobody(tmp_path: Path) -> None:
    members, job = the("StatefulSet", rendered("etcd")), the("Job", rendered("overlays/elastic"))
    policies = [the("NetworkPolicy", rendered(folder)) for folder in ("etcd", "overlays/elastic")]
    program = (*LIGHT, "--nproc-per-node", "1", str(script(tmp_path, MEET)), str(tmp_path / "end"))
    with Pods(tmp_path, 6, etcd_secrets(tmp_path / "tls")) as pods:
        etcds = [pods.run_etcd(members, ordinal) for ordinal in range(3)]
        both = [pods.run(job, ordinal, *program, env=WITHOUT_TORCH) for ordinal in (0, 1)]
        stranger = pods.enforce(*policies)
        port, _ = (int(pod.process.wait_for_output(r"met at \S+ (\d+) of 2$")[1]) for pod in both)

        places = [(both[0].address, port), *((etcds[0].address, port) for port in (2379, 2380, 2381))]
        for place in places:
            assert not connects(stranger, *place, within_s=0.5)
        assert connects(both[1].node, *places[1])
        assert not connects(both[1].node, *places[2], within_s=0.5)

        pods.nodes.heal()
        assert all(connects(stranger, *place) for place in places)
        (tmp_path / "end").touch()
        assert [pod.process.wait(DEADLINE_S) for pod in both] == [0, 0], pods.story()


def test_a_pod_whose_workers_do_not_end_is_gone_within_its_grace(tmp_path: Path) -> None:
    job = the("Job", rendered("base"))
    with Pods(tmp_path, 1, TOKEN) as pods:
        program = ("--preload", "json", str(script(tmp_path, STUBBORN)))
        pod = pods.run(job, 0, *program, env={**WITHOUT_TORCH, "PET_NNODES": "1", "PET_STOP_GRACE": "1"})
        wait_for(lambda: pod.process.pids("worker"), "a worker")

        assert pods.delete(pod) == 143

        assert pod.process.pids("asked")
        # The node's own process is a cat.
        wait_for(lambda: not [p for p in pod.node.processes() if described(p) != "cat"], "nothing is left")
