"""launcher.schedulers.detect: the facts that pods of each kind have about their job."""

from __future__ import annotations

import pytest

from elaunch.launcher.agent_config import agent_config
from elaunch.launcher.errors import UsageError
from elaunch.launcher.schedulers.defaults import settle
from elaunch.launcher.schedulers.detect import HOSTS_FILE, detect
from elaunch.launcher.schedulers.facts import Cluster
from elaunch.launcher.store.locate import plan
from tests.unit.launcher.schedulers.test_detect import CPU_HOST, no_file, options_of, planned

POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}


def hosts(*names: str) -> str:
    """A pod's hosts file, as a kubelet writes it."""
    own = "\t".join(("10.244.1.5", *names))
    return f"# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost\n{own}\n"


def found(hostname: str, environ: dict[str, str], domain: str = "") -> Cluster | None:
    def read(path: str) -> str:
        assert path == HOSTS_FILE
        return hosts(*([f"{hostname}.{domain}"] if domain else []), hostname)

    return detect("auto", environ, hostname, read)


def test_a_pod_of_an_indexed_job_knows_its_index_and_the_heads_full_name() -> None:
    cluster = found("train-3", POD | {"JOB_COMPLETION_INDEX": "3"}, "train.team.svc.cluster.local")

    assert cluster
    assert (cluster.nodes, cluster.node_index) == (None, 3)
    assert cluster.head == "train-0.train.team.svc.cluster.local"
    assert cluster.run_id == "team-train"
    assert cluster.sources == ("JOB_COMPLETION_INDEX",)


@pytest.mark.parametrize(("hostname", "index"), [("lws-2", 0), ("lws-2-3", 3)])
def test_a_leader_worker_set_has_all_facts(hostname: str, index: int) -> None:
    environ = POD | {"LWS_LEADER_ADDRESS": "lws-2.lws.team", "LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": str(index)}
    cluster = found(hostname, environ)

    assert cluster
    assert (cluster.nodes, cluster.node_index) == ((4, 4), index)
    assert (cluster.head, cluster.run_id) == ("lws-2.lws.team", "team-lws-2")


def test_a_pod_of_a_stateful_set_has_its_index_in_its_name() -> None:
    cluster = found("nodes-2", POD, "nodes.team.svc.cluster.local")

    assert cluster
    assert (cluster.node_index, cluster.head) == (2, "nodes-0.nodes.team.svc.cluster.local")


@pytest.mark.parametrize(
    ("hostname", "environ", "domain"),
    [
        ("node-2", {}, "nodes.team.svc.cluster.local"),
        ("train-7d9f6-x2x5z", POD, ""),
        ("train-1", POD, ""),
        ("notebook", POD, "nodes.team.svc.cluster.local"),
        ("train-worker-0", {"PET_RDZV_ENDPOINT": "train-worker-0:29400"}, "s.team.svc.cluster.local"),
        ("train-worker-0", POD | {"MASTER_ADDR": "train-master-0"}, "s.team.svc.cluster.local"),
    ],
)
def test_other_hosts_and_pods_have_no_facts(hostname: str, environ: dict[str, str], domain: str) -> None:
    assert found(hostname, environ, domain) is None


PYTORCH_JOB = POD | {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "lm-master-0",
    "MASTER_ADDR": "lm-master-0",
}
ELASTIC_PYTORCH_JOB = POD | {"PET_NNODES": "2:4", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "lm-worker-0:23456"}


@pytest.mark.parametrize("environ", [PYTORCH_JOB, ELASTIC_PYTORCH_JOB], ids=["with a master", "elastic"])
def test_what_an_operator_sets_is_logged_and_changes_nothing(environ: dict[str, str]) -> None:
    exported = {name: value for name, value in environ.items() if name.startswith("PET_")}
    secret = {"ELAUNCH_TOKEN": "a token of this test"}
    cluster = found("lm-worker-0", environ)
    assert cluster

    made = planned(cluster, **exported, **secret)

    config = agent_config(settle(options_of("--run-id", "lm", **exported), cluster), made, {}, CPU_HOST)
    assert config.details[0].startswith("Kubernetes operator: nothing that matters here (PET_")
    assert made.plan == plan(options_of(**exported), exported | secret, no_file, None).plan


LEADER_WORKER_SET = {"LWS_LEADER_ADDRESS": "lws-2.lws.team", "LWS_GROUP_SIZE": "4"}


@pytest.mark.parametrize(
    ("hostname", "environ"),
    [
        ("train-0", POD | {"JOB_COMPLETION_INDEX": "0", "PET_NNODES": "2"}),
        ("train-1", POD | {"JOB_COMPLETION_INDEX": "1", "PET_NNODES": "2", "PET_MASTER_ADDR": "train-0.train"}),
        ("lws-2-1", POD | LEADER_WORKER_SET),
        ("lm-worker-0", PYTORCH_JOB),
        ("lm-worker-0", ELASTIC_PYTORCH_JOB),
    ],
)
def test_pods_without_the_secret_get_the_command_that_makes_it(hostname: str, environ: dict[str, str]) -> None:
    """Otherwise the first pod would wait, and the others would be refused one after another."""
    cluster = found(hostname, environ, "train.team.svc.cluster.local")
    assert cluster

    with pytest.raises(UsageError, match="kubectl create secret generic elaunch-token"):
        planned(cluster, **environ)

    assert planned(cluster, ELAUNCH_TOKEN="a token of this test", **environ).plan.token
