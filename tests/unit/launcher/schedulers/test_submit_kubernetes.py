"""elaunch submit k8s: the command line, the calls of kubectl, and the messages if a call is not possible."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml

from elaunch.launcher.errors import SiteError, UsageError
from elaunch.launcher.schedulers.submit_kubernetes import COMMAND, job_of
from tests.commands import call, read
from tests.manifests import Object, the

IMAGE = ("--image", "you/train:1")
# A kubectl in place of a cluster: it writes down its calls, and gives the Job an id.
KUBECTL = """#!/bin/sh
printf '%s\\n' "$*" >>"$CALLS/calls"
call=$(wc -l <"$CALLS/calls")
cat >"$CALLS/$call"
[ "$call" != "$FAILS" ] || exit 1
[ "$1" != create ] || printf 0d0d-uid
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the calls; kubectl is on the PATH."""
    kubectl = tmp_path / "bin" / "kubectl"
    kubectl.parent.mkdir()
    kubectl.write_text(KUBECTL)
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{kubectl.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path))
    monkeypatch.setenv("FAILS", "")
    return tmp_path


def handed_in(cluster: Path, call: int) -> list[Object]:
    return list(yaml.safe_load_all((cluster / str(call)).read_text()))


def test_the_job_owns_what_goes_with_it_and_has_pods_when_all_is_there(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = call(COMMAND, *IMAGE, "--namespace", "team", "--nodes", "2:4", "train.py", "--lr", "1")

    assert code == 0
    assert (cluster / "calls").read_text().splitlines() == [
        "create --namespace team --output=jsonpath={.metadata.uid} --filename=-",
        "create --namespace team --filename=-",
        'patch --namespace team --type=merge --patch={"spec":{"suspend":false}} --filename=-',
    ]
    (job,), others, (patched,) = (handed_in(cluster, call) for call in (1, 2, 3))
    assert job["spec"]["suspend"] is True
    assert patched["metadata"]["name"] == job["metadata"]["name"] == "train"
    assert {each["kind"] for each in others} == {"Secret", "Service", "NetworkPolicy", "PodDisruptionBudget"}
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "train", "uid": "0d0d-uid"}
    assert all(each["metadata"]["ownerReferences"] == [owner] for each in others)
    token = the("Secret", others)["stringData"]["token"]
    assert len(token) >= 16
    printed = capsys.readouterr()
    assert token not in printed.out + printed.err
    assert token not in json.dumps(job)
    assert "kubectl --namespace team delete job train" in printed.err


def test_a_second_submission_of_a_name_has_nothing_in_common_with_the_first(cluster: Path) -> None:
    """The first submission's pods, Secret and Service may still exist for half a minute."""
    for _ in range(2):
        call(COMMAND, *IMAGE, "--nodes", "2:4", "train.py")

    first, second = ([*handed_in(cluster, call), *handed_in(cluster, call + 1)] for call in (1, 4))
    names = [{(each["kind"], each["metadata"]["name"]) for each in made} for made in (first, second)]
    assert names[0] & names[1] == {("Job", "train")}
    assert the("Service", first)["spec"]["selector"] != the("Service", second)["spec"]["selector"]
    for made in (first, second):
        template = the("Job", made)["spec"]["template"]
        service = the("Service", made)
        assert template["spec"]["subdomain"] == service["metadata"]["name"]
        assert template["metadata"]["labels"] == service["spec"]["selector"]
        (container,) = template["spec"]["containers"]
        (secret,) = [each["valueFrom"] for each in container["env"] if each["name"] == "ELAUNCH_TOKEN"]
        assert secret["secretKeyRef"]["name"] == the("Secret", made)["metadata"]["name"]


@pytest.mark.parametrize("calls", [["create", "create"], ["create", "create", "patch"]])
def test_a_job_whose_companions_are_refused_does_not_stay(
    cluster: Path, monkeypatch: pytest.MonkeyPatch, calls: list[str]
) -> None:
    monkeypatch.setenv("FAILS", str(len(calls)))

    with pytest.raises(SiteError, match=f"kubectl {calls[-1]} failed with exit code 1"):
        call(COMMAND, *IMAGE, "--nodes", "2", "train.py")

    assert [line.split()[0] for line in (cluster / "calls").read_text().splitlines()] == [*calls, "delete"]


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ([*IMAGE, "--nnodes", "2", "train.py"], "use --nodes instead"),
        ([*IMAGE, "--claim", "data", "train.py"], "--claim data is not NAME:/PATH"),
        ([*IMAGE, "--token", "x", "train.py"], "ELAUNCH_TOKEN"),
        ([*IMAGE, "--standalone", "train.py"], "--standalone is for a job on one node"),
        ([*IMAGE, "--env", "PET_NODE_RANK=1", "train.py"], "PET_NODE_RANK=1: it is the pod's index"),
        ([*IMAGE, "--stop-grace", "300", "train.py"], "use --grace instead"),
        ([*IMAGE, "--env", "PET_MAX_RESTARTS=often", "train.py"], "PET_MAX_RESTARTS=often "),
        ([*IMAGE, "-"], "has no stdin"),
        ([*IMAGE, "--rdzv-conf", "etcd_prefx=/a", "train.py"], "did you mean etcd_prefix?"),
        ([*IMAGE, "--etcd-secret", "tls", "train.py"], "--etcd https://HOST:PORT"),
        ([*IMAGE, "--etcd", "http://a:2379", "--etcd-secret", "tls", "train.py"], "--etcd https://HOST:PORT"),
    ],
)
def test_what_cannot_be_is_one_sentence(argv: list[str], sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        job_of(read(COMMAND, *argv))

    assert sentence in str(refused.value)
