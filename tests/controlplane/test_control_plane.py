"""A StatefulSet of elaunch nodes under a real control plane: pods deleted, a machine lost. See build.sh."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.controlplane.kubelet import Kubelets
from tests.controlplane.plane import BINARIES, Plane
from tests.faults.cluster import PRELOAD, REDUCER
from tests.harness import DEADLINE_S, finished, wait_for
from tests.manifests import Object, kubectl, rendered, text, the
from tests.nodes import needs_nodes
from tests.pods import NAMESPACE, JobPod, Pods

pytestmark = [
    needs_nodes,
    pytest.mark.slow,
    pytest.mark.skipif(not (BINARIES / "kube-scheduler").exists(), reason="no control plane; `make control-plane`"),
]

TOKEN = {"elaunch-token": {"token": "the token of this test"}}


def stateful_set() -> Object:
    """The base's pods, as a set that a control plane of 1.20 knows; one fits on a node."""
    template = copy.deepcopy(the("Job", rendered("base"))["spec"]["template"])
    template["spec"]["restartPolicy"] = "Always"
    (container,) = template["spec"]["containers"]
    container["resources"] = {"requests": {"cpu": "5"}}
    # There is no Job whose uid a label could tell.
    container["env"] = [
        {"name": "PET_RUN_ID", "value": "set"} if each["name"] == "PET_RUN_ID" else each for each in container["env"]
    ]
    spec = {
        "serviceName": "train",
        "replicas": 2,
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": template["metadata"]["labels"]},
        "template": template,
    }
    return {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "train"}, "spec": spec}


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Plane]:
    with Plane(tmp_path / "plane") as plane:
        plane.kubectl("create", "namespace", NAMESPACE)
        yield plane


@pytest.mark.parametrize("folder", ["base", "overlays/gpu", "etcd"])
def test_the_server_takes_the_manifests(plane: Plane, folder: str) -> None:
    """Names, enumerations and what must be equal: no schema has these. (1.20 drops fields that are younger.)"""
    objects = [each for each in rendered(folder) if each["apiVersion"] != "policy/v1"]
    made = plane.kubectl(
        "create", "--dry-run=server", "--validate=false", "--filename=-", "--output=name",
        text="".join(json.dumps(each) + "\n" for each in objects),
    )  # fmt: skip

    assert len(made.split()) == len(objects)
    broken = text("base").replace("restartPolicy: Never", "restartPolicy: Sometimes")
    with pytest.raises(AssertionError, match="Unsupported value"):
        plane.kubectl("create", "--dry-run=server", "--validate=false", "--filename=-", text=broken)


def test_what_is_submitted_goes_with_its_job(plane: Plane, tmp_path: Path) -> None:
    """The fields that are younger than this server are not for kubectl to refuse here."""
    wrapper = tmp_path / "bin" / "kubectl"
    wrapper.parent.mkdir()
    lenient = '[ "$1" != create ] || set -- "$@" --validate=false'
    wrapper.write_text(f'#!/bin/sh\n{lenient}\nexec {kubectl()} "$@"\n')
    wrapper.chmod(0o755)
    env = {"PATH": f"{wrapper.parent}{os.pathsep}{os.environ['PATH']}", "KUBECONFIG": str(plane.kubeconfig)}

    done = finished(tmp_path, "submit", "k8s", "--image", "you/train:1", "--nodes", "2", "train.py", env=env)

    assert done.code == 0, done.output
    kinds = "job,service,secret"
    everything = ("get", kinds, "--selector=app.kubernetes.io/name=elaunch", "--output=name")
    assert len(plane.kubectl(*everything).split()) == 3
    plane.kubectl("delete", "job", "train")
    wait_for(lambda: not plane.kubectl(*everything), "the garbage collector takes the rest")


def test_a_set_of_nodes_outlives_a_deleted_pod_and_a_lost_machine(plane: Plane, tmp_path: Path) -> None:
    made = stateful_set()
    with (
        Pods(tmp_path, 3, TOKEN) as pods,
        Kubelets(plane.api, pods, made, *PRELOAD, str(REDUCER), str(tmp_path)) as kubelets,
    ):
        plane.kubectl("create", "--validate=false", "--filename=-", text=json.dumps(made))

        def pod(ordinal: int, other_than: JobPod | None = None) -> JobPod:
            def found() -> JobPod | None:
                running = kubelets.running(f"train-{ordinal}")
                return running if running is not other_than else None

            return wait_for(found, f"train-{ordinal} runs: {kubelets.troubles}")

        head, other = pod(0), pod(1)
        first = pods.meeting(head, other)

        plane.kubectl("delete", "pod", other.name, "--wait=false")
        again = pod(1, other_than=other)
        assert other.process.wait(DEADLINE_S) == 143
        second = pods.meeting(head, again, after=first)

        pods.lose(again)
        node = f"node/{again.node.name}"
        plane.kubectl("wait", "--for=condition=Ready=Unknown", node, "--timeout=40s")
        plane.kubectl("delete", "pod", again.name, "--force", "--grace-period=0")
        third = pod(1, other_than=again)

        assert third.node is not again.node
        pods.meeting(head, third, after=second)
        pods.end(head, third)
