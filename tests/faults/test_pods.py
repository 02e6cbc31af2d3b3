"""The manifests of deploy/k8s, run in namespaces in place of pods: Kubernetes' variables, names, ends and restarts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.faults.cluster import REDUCER
from tests.faults.processes import described
from tests.faults.test_signals import STUBBORN
from tests.harness import DEADLINE_S, LIGHT, RUN_LIMIT_S, script, wait_for
from tests.manifests import K8S, rendered, the
from tests.nodes import Node, needs_nodes
from tests.pods import NAMESPACE, Pods
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


def test_under_the_network_policies_a_job_meets_over_the_etcd_and_another_pod_reaches_none(tmp_path: Path) -> None:
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
