"""elaunch submit k8s: what is typed, what is handed to kubectl, and what is said where that cannot be."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml

from elaunch.launcher.errors import SiteError, UsageError
from elaunch.launcher.submit.kubernetes import FLAGS, main, understand
from elaunch.launcher.submit.words import take
from tests.manifests import the

IMAGE = ("--image", "you/train:1")
# Stands for a cluster: it writes down what it is asked for, and gives the Job an id.
KUBECTL = """#!/bin/sh
printf '%s\\n' "$*" >>"$CALLS/calls"
cat >"$CALLS/$1"
[ "$1" != "$FAILS" ] || exit 1
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


def test_the_job_is_made_first_and_owns_what_goes_with_it(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main([*IMAGE, "--namespace", "team", "--nodes", "2:4", "train.py", "--lr", "1"], {})

    assert code == 0
    assert (cluster / "calls").read_text().splitlines() == [
        "create --namespace team --output=jsonpath={.metadata.uid} --filename=-",
        "apply --namespace team --filename=-",
    ]
    (job,) = yaml.safe_load_all((cluster / "create").read_text())
    others = list(yaml.safe_load_all((cluster / "apply").read_text()))
    assert {each["kind"] for each in others} == {"Secret", "Service", "PodDisruptionBudget"}
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "train", "uid": "0d0d-uid"}
    assert all(each["metadata"]["ownerReferences"] == [owner] for each in others)
    token = the("Secret", others)["stringData"]["token"]
    assert len(token) >= 16
    said = capsys.readouterr()
    assert token not in said.out + said.err
    assert token not in json.dumps(job)
    assert "kubectl delete job train" in said.err


def test_a_job_whose_companions_are_refused_does_not_stay(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAILS", "apply")

    with pytest.raises(SiteError, match="kubectl apply failed with exit code 1"):
        main([*IMAGE, "--nodes", "2", "train.py"], {})

    assert [line.split()[0] for line in (cluster / "calls").read_text().splitlines()] == ["create", "apply", "delete"]


def test_nothing_is_touched_where_the_job_is_there_already(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAILS", "create")

    with pytest.raises(SiteError, match="kubectl create failed"):
        main([*IMAGE, "train.py"], {})

    assert not (cluster / "apply").exists()


def test_a_dry_run_prints_all_of_it_and_asks_nobody(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([*IMAGE, "--dry-run", "--nodes", "2", "--namespace", "team", "train.py"], {"ELAUNCH_TOKEN": "my own token 0"})

    objects = list(yaml.safe_load_all(capsys.readouterr().out))
    assert {each["kind"] for each in objects} == {"Secret", "Service", "Job"}
    assert {each["metadata"]["namespace"] for each in objects} == {"team"}
    assert the("Secret", objects)["stringData"]["token"] == "my own token 0"
    assert not (cluster / "calls").exists()


def test_without_kubectl_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(UsageError, match=r"no kubectl on the PATH; .* --dry-run .* kubectl create -f"):
        main([*IMAGE, "train.py"], {})


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["train.py"], "--image is missing"),
        ([*IMAGE], "no program to run; add train.py"),
        ([*IMAGE, "--nodes", "many", "train.py"], "--nodes many "),
        ([*IMAGE, "--nnodes", "2", "train.py"], "use --nodes instead"),
        ([*IMAGE, "--nods", "2", "train.py"], "did you mean --nodes"),
        ([*IMAGE, "--gpus", "-1", "train.py"], "--gpus -1 is out of range"),
        ([*IMAGE, "--memory", "lots", "train.py"], "--memory lots is no quantity"),
        ([*IMAGE, "--name", "My_Job", "train.py"], "--name My_Job is no name of a host"),
        ([*IMAGE, "--claim", "data", "train.py"], "--claim data is not NAME:/PATH"),
        ([*IMAGE, "--env", "A", "train.py"], "--env A is not NAME=VALUE"),
        ([*IMAGE, "--name", "a", "--name", "b", "train.py"], "--name is given twice"),
        ([*IMAGE, "--token", "x", "train.py"], "ELAUNCH_TOKEN"),
        ([*IMAGE, "--nodes"], "--nodes needs a value"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(words: list[str], sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        understand(take(words, FLAGS))

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
    assert understand(take([*IMAGE, *words], FLAGS)).name == name


def test_one_pod_needs_no_token(capsys: pytest.CaptureFixture[str]) -> None:
    main([*IMAGE, "--dry-run", "train.py"], {})

    assert {each["kind"] for each in yaml.safe_load_all(capsys.readouterr().out)} == {"Service", "Job"}


def test_the_programs_own_words_stay_its_own() -> None:
    submission = take([*IMAGE, "--max-restarts=5", "-r", "3", "-m", "train", "--name", "x", "--image", "y"], FLAGS)

    assert submission.command == ("--max-restarts=5", "-r", "3", "-m", "train", "--name", "x", "--image", "y")
    assert understand(submission).image == "you/train:1"
