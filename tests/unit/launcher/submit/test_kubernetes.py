"""elaunch submit k8s: the command line, the calls of kubectl, and the messages if a call is not possible."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml

from elaunch.launcher.errors import SiteError, UsageError
from elaunch.launcher.submit.kubernetes import COMMAND, understand
from elaunch.launcher.submit.manifests import companions, job
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
    said = capsys.readouterr()
    assert token not in said.out + said.err
    assert token not in json.dumps(job)
    assert "kubectl --namespace team delete job train" in said.err


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


def test_nothing_is_touched_where_the_job_is_there_already(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAILS", "1")

    with pytest.raises(SiteError, match="kubectl create failed"):
        call(COMMAND, *IMAGE, "train.py")

    assert len((cluster / "calls").read_text().splitlines()) == 1


def test_a_dry_run_prints_all_of_it_and_asks_nobody(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call(
        COMMAND,
        *IMAGE,
        *["--dry-run", "--nodes", "2", "--namespace", "team", "train.py"],
        ELAUNCH_TOKEN="my own token 0",
    )

    objects = list(yaml.safe_load_all(capsys.readouterr().out))
    assert {each["kind"] for each in objects} == {"Secret", "Service", "NetworkPolicy", "Job"}
    assert {each["metadata"]["namespace"] for each in objects} == {"team"}
    assert the("Secret", objects)["stringData"]["token"] == "my own token 0"
    assert not (cluster / "calls").exists()


def test_without_kubectl_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(UsageError, match=r"no kubectl on the PATH; .* --dry-run .* kubectl create -f"):
        call(COMMAND, *IMAGE, "train.py")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["train.py"], "--image is missing"),
        ([*IMAGE], "no program to run; add train.py"),
        ([*IMAGE, "--nodes", "many", "train.py"], "--nodes many "),
        ([*IMAGE, "--nnodes", "2", "train.py"], "use --nodes instead"),
        ([*IMAGE, "--nods", "2", "train.py"], "--nods is no option of elaunch k8s; did you mean --nodes?"),
        ([*IMAGE, "--memory", "8Gi", "--shm", "8193Mi", "train.py"], "--shm 8193Mi is more than --memory 8Gi"),
        ([*IMAGE, "--gpus", "-1", "train.py"], "--gpus -1 is out of range"),
        ([*IMAGE, "--memory", "lots", "train.py"], "--memory lots is not a quantity"),
        ([*IMAGE, "--name", "My_Job", "train.py"], "--name My_Job is not a host name"),
        ([*IMAGE, "--claim", "data", "train.py"], "--claim data is not NAME:/PATH"),
        ([*IMAGE, "--env", "A", "train.py"], "--env A is not NAME=VALUE"),
        ([*IMAGE, "--token", "x", "train.py"], "ELAUNCH_TOKEN"),
        ([*IMAGE, "--nodes"], "--nodes needs a value"),
        ([*IMAGE, "--standalone", "train.py"], "--standalone is for a job on one node"),
        ([*IMAGE, "--node-rank", "1", "train.py"], "--node-rank is the pod's index"),
        ([*IMAGE, "--env", "PET_NODE_RANK=1", "train.py"], "PET_NODE_RANK=1: it is the pod's index"),
        ([*IMAGE, "--env", "PET_NNODES=3", "train.py"], "use --nodes instead"),
        ([*IMAGE, "--stop-grace", "300", "train.py"], "use --grace instead"),
        ([*IMAGE, "--max-restarts", "often", "train.py"], "--max-restarts often "),
        ([*IMAGE, "--env", "PET_MAX_RESTARTS=often", "train.py"], "PET_MAX_RESTARTS=often "),
        ([*IMAGE, "-m", "--no-python", "train"], "--module contradicts --no-python"),
        ([*IMAGE, "-"], "pods have no stdin"),
        ([*IMAGE, "--rdzv-conf", "etcd_prefx=/a", "train.py"], "did you mean etcd_prefix?"),
        ([*IMAGE, "--env", "PET_RDZV_CONF=etcd_prefix=/", "train.py"], "etcd_prefix=/ names no prefix"),
        ([*IMAGE, "--etcd-secret", "tls", "train.py"], "--etcd HOST:PORT"),
        ([*IMAGE, "--etcd", "http://a:2379", "--etcd-secret", "tls", "train.py"], "use https://"),
        ([*IMAGE, "--etcd", "ftp://a:2379", "train.py"], "--etcd ftp://a:2379 has the scheme ftp"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(words: list[str], sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        understand(read(COMMAND, *words))

    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["train.py"], "train"),
        (["src/My_Trainer.py"], "my-trainer"),
        (["-m", "team.lm.train"], "train"),
        (["3d.py"], "job-3d"),
        (["--name", "lm-7", "train.py"], "lm-7"),
    ],
)
def test_a_job_is_called_by_its_program(words: list[str], name: str) -> None:
    assert understand(read(COMMAND, *IMAGE, *words)).name == name


def test_one_pod_needs_no_token(capsys: pytest.CaptureFixture[str]) -> None:
    call(COMMAND, *IMAGE, "--dry-run", "train.py")

    made = {each["kind"] for each in yaml.safe_load_all(capsys.readouterr().out)}
    assert made == {"Service", "NetworkPolicy", "Job"}


def test_the_prefix_of_the_keys_reaches_the_pods() -> None:
    asked = understand(read(COMMAND, *IMAGE, "--rdzv-conf", "etcd_prefix=/teams/vision", "train.py"))

    (container,) = job(asked)["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["--rdzv-conf", "etcd_prefix=/teams/vision", "train.py"]


def test_who_asks_for_it_has_an_open_network_and_a_writable_image() -> None:
    asked = understand(read(COMMAND, *IMAGE, "--no-network-policy", "--writable-image", "train.py"))

    assert {each["kind"] for each in companions(asked)} == {"Service"}
    (container,) = job(asked)["spec"]["template"]["spec"]["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is False
    assert "HOME" not in {each["name"] for each in container["env"]}


def test_a_home_and_a_folder_for_temporary_files_may_be_the_users_own() -> None:
    words = ["--env", "HOME=/data", "--claim", "scratch:/tmp/", "--claim", "shm:/data", "train.py"]

    pod = job(understand(read(COMMAND, *IMAGE, *words)))["spec"]["template"]["spec"]

    (container,) = pod["containers"]
    assert [each["value"] for each in container["env"] if each["name"] == "HOME"] == ["/data"]
    assert [each["mountPath"] for each in container["volumeMounts"]] == ["/dev/shm", "/tmp/", "/data"]
    names = [each["name"] for each in pod["volumes"]]
    assert len(set(names)) == len(names) == 3


@pytest.mark.parametrize("typed", ["a:2379,b:2379", "https://a:2379,https://b:2379", "https://a:2379,b:2379"])
def test_an_etcd_with_certificates_is_spoken_to_over_tls(typed: str) -> None:
    asked = understand(read(COMMAND, *IMAGE, "--etcd", typed, "--etcd-secret", "tls", "train.py"))

    assert asked.etcd == "https://a:2379,https://b:2379"


def test_a_job_file_is_the_images_as_the_program_is() -> None:
    assert understand(read(COMMAND, *IMAGE, "--config", "job.yaml", "train.py")).command[0] == "--config"


def test_the_programs_own_words_stay_its_own() -> None:
    asked = understand(read(COMMAND, *IMAGE, "--max-restarts=5", "-r", "3", "-m", "train", "--name", "x", "--image"))

    assert asked.command == ("--max-restarts", "5", "--redirects", "3", "--module", "train", "--name", "x", "--image")
    assert asked.image == "you/train:1"
