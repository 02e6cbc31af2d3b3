"""deploy/k8s and what `elaunch submit k8s` makes: against the published schemas, and against each other."""

from __future__ import annotations

from collections.abc import Iterator

import kubernetes_validate
import pytest

from elaunch.launcher.schedulers.submit_kubernetes import COMMAND, job_of, objects
from tests.commands import read
from tests.manifests import Object, rendered, the

FOLDERS = ["base", "overlays/gpu", "overlays/elastic", "etcd"]
ALL = [*FOLDERS, "jobset", "kubeflow"]
# The oldest Kubernetes version that has all the fields, and the newest with published schemas.
VERSIONS = ["1.31", "1.37"]
IMAGE = ("--image", "example.com/you/train:1", "--name", "train", "--cpus", "2", "--memory", "4Gi")


def pods(objects: list[Object]) -> Iterator[tuple[Object, Object]]:
    """Every pod's specification, with the object that holds its template."""
    for each in objects:
        match each["kind"]:
            case "Job" | "StatefulSet":
                yield each["spec"], each["spec"]["template"]["spec"]
            case "JobSet":
                (only,) = each["spec"]["replicatedJobs"]
                yield only["template"]["spec"], only["template"]["spec"]["template"]["spec"]
            case "ClusterTrainingRuntime":
                (only,) = each["spec"]["template"]["spec"]["replicatedJobs"]
                yield only["template"]["spec"], only["template"]["spec"]["template"]["spec"]


def submitted(*argv: str) -> list[Object]:
    return objects(job_of(read(COMMAND, *argv, "train.py")))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("folder", FOLDERS)
def test_the_manifests_are_what_kubernetes_knows(folder: str, version: str) -> None:
    for each in rendered(folder):
        kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("folder", ALL)
def test_what_belongs_together_is_the_same(folder: str) -> None:
    objects = rendered(folder)
    labels = {tuple(each["metadata"]["labels"].items()) for each in objects if "labels" in each["metadata"]}
    known = {tuple(sorted(each)) for each in labels}
    for holder, pod in pods(objects):
        (container,) = pod["containers"]
        variables = {each["name"]: each.get("value") for each in container.get("env", [])}
        if "PET_STOP_GRACE" in variables:
            assert pod["terminationGracePeriodSeconds"] >= int(variables["PET_STOP_GRACE"]) + 10
        if "PET_NNODES" in variables:
            assert int(variables["PET_NNODES"].split(":")[-1]) == holder["completions"] == holder["parallelism"]
        if "podFailurePolicy" in holder:
            _, on_exit = holder["podFailurePolicy"]["rules"]
            assert on_exit["onExitCodes"]["containerName"] == container["name"]
        if "template" in holder and folder != "kubeflow":
            assert tuple(holder["template"]["metadata"]["labels"].items()) in labels
        mounted = {each["name"] for each in container.get("volumeMounts", [])}
        claims = {each["metadata"]["name"] for each in holder.get("volumeClaimTemplates", [])}
        assert mounted == {each["name"] for each in pod["volumes"]} | claims
    for each in objects:
        if each["kind"] in ("Service", "PodDisruptionBudget"):
            selector = each["spec"]["selector"]
            assert tuple(sorted(selector.get("matchLabels", selector).items())) in known


@pytest.mark.parametrize("folder", ALL)
def test_no_container_may_do_more_than_it_needs(folder: str) -> None:
    for _, pod in pods(rendered(folder)):
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] >= 1000
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


@pytest.mark.parametrize("folder", [each for each in ALL if each != "etcd"])
def test_what_elaunch_and_torch_write_goes_into_volumes(folder: str) -> None:
    ((_, pod),) = pods(rendered(folder))

    (container,) = pod["containers"]
    empty = {each["name"] for each in pod["volumes"] if "emptyDir" in each}
    places = {each["mountPath"] for each in container["volumeMounts"] if each["name"] in empty}
    assert places == {"/tmp", "/dev/shm"}
    assert {"name": "HOME", "value": "/tmp"} in container["env"]


def selects(selector: Object, labels: Object) -> bool:
    assert set(selector) == {"matchLabels"}
    return selector["matchLabels"].items() <= labels.items()


def labels_of_pods(objects: list[Object]) -> list[Object]:
    return [holder["template"]["metadata"]["labels"] for holder, _ in pods(objects)]


@pytest.mark.parametrize("folder", ["base", "overlays/gpu", "overlays/elastic", "jobset"])
def test_only_a_jobs_own_pods_connect_to_them_on_any_port(folder: str) -> None:
    objects = rendered(folder)
    spec = the("NetworkPolicy", objects)["spec"]
    (labels,) = labels_of_pods(objects)

    assert spec["policyTypes"] == ["Ingress"]
    assert selects(spec["podSelector"], labels)
    # The policy names no ports, so it allows all: MASTER_PORT and the ports of gloo and NCCL change in each generation.
    assert spec["ingress"] == [{"from": [{"podSelector": spec["podSelector"]}]}]
    another = {**labels, "app.kubernetes.io/instance": "another"}
    assert not selects(spec["podSelector"], another)


def test_the_etcd_is_open_to_jobs_and_its_members_alone() -> None:
    objects = rendered("etcd")
    spec = the("NetworkPolicy", objects)["spec"]
    ((_, pod),), (members,) = pods(objects), labels_of_pods(objects)
    (container,) = pod["containers"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    jobs = [labels for folder in ("base", "jobset", "kubeflow") for labels in labels_of_pods(rendered(folder))]
    clients, peers, metrics = spec["ingress"]

    assert selects(spec["podSelector"], members)
    assert [[each["port"] for each in rule["ports"]] for rule in spec["ingress"]] == [
        [ports["client"]], [ports["client"], ports["peer"]], [ports["metrics"]],
    ]  # fmt: skip
    here, elsewhere = clients["from"]
    assert set(here) == {"podSelector"}
    assert set(elsewhere) == {"podSelector", "namespaceSelector"}
    for source in (here, elsewhere):
        assert all(selects(source["podSelector"], labels) for labels in jobs)
        assert not selects(source["podSelector"], {"app.kubernetes.io/name": "another"})
    assert elsewhere["namespaceSelector"]["matchLabels"]
    assert [set(source) for source in metrics["from"]] == [{"namespaceSelector"}]
    assert peers["from"] == [{"podSelector": spec["podSelector"]}]


MEMBERS = ",".join(f"https://elaunch-etcd-{i}.elaunch-etcd:2379" for i in range(3))


@pytest.mark.parametrize(
    ("folder", "argv"),
    [
        ("base", ("--nodes", "2", "--token-secret", "elaunch-token")),
        ("overlays/elastic", ("--nodes", "2:4", "--etcd", MEMBERS, "--etcd-secret", "elaunch-etcd-client")),
    ],
)
def test_a_submission_is_the_base_and_an_elastic_one_over_etcd_the_overlay(folder: str, argv: tuple[str, ...]) -> None:
    made = submitted(*IMAGE, *argv)

    assert sorted(made, key=lambda each: each["kind"]) == sorted(rendered(folder), key=lambda each: each["kind"])


def test_a_submission_with_everything_is_valid() -> None:
    made = submitted(
        *IMAGE, "--nodes", "2:64", "--gpus", "8", "--claim", "checkpoints:/checkpoints", "--env", "NCCL_DEBUG=INFO",
        "--max-restarts", "5", "-m",
    )  # fmt: skip

    for each in made:
        kubernetes_validate.validate(each, VERSIONS[-1], strict=True)
    (container,) = the("Job", made)["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["--max-restarts", "5", "--module", "train.py"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert {"name": "claim-0", "mountPath": "/checkpoints"} in container["volumeMounts"]
    assert {"name": "NCCL_DEBUG", "value": "INFO"} in container["env"]


def final_codes(job: Object) -> list[int]:
    """The exit codes of a pod that end the Job."""
    rules = job["podFailurePolicy"]["rules"]
    (values,) = (rule["onExitCodes"]["values"] for rule in rules if rule["action"] == "FailJob")
    return [*values]


@pytest.mark.parametrize("folder", ["base", "jobset", "kubeflow"])
def test_a_job_that_failed_or_was_stopped_is_not_started_again(folder: str) -> None:
    ((job, _),) = pods(rendered(folder))

    assert final_codes(job) == [1, 2, 130]


def test_a_job_with_no_restart_codes_is_not_started_again_after_one_of_them() -> None:
    made = the("Job", submitted(*IMAGE, "--no-restart-codes", "93,2"))

    kubernetes_validate.validate(made, VERSIONS[-1], strict=True)
    assert final_codes(made["spec"]) == [1, 2, 93, 130]
