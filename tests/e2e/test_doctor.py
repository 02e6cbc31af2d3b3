"""`elaunch doctor` and `--health-check` on this machine, well and with real faults."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.harness import COMMAND, RUN_LIMIT_S, Job, environment, free_ports, script

TOKEN = "0123456789abcdef0123456789abcdef"
# A program that is a command: torch is not looked at, so that these take a tenth of a second.
LIGHT = ("--no-python", "true")
OWN_MOUNTS = ("unshare", "-m", "--propagation", "private", "sh", "-c")


def doctor(
    folder: Path, *words: str, env: Mapping[str, str] | None = None, prefix: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*prefix, *COMMAND, "doctor", *words],
        cwd=folder,
        env=environment({"HOME": str(folder), **(env or {})}),
        capture_output=True,
        text=True,
        timeout=180,
    )


def examined(folder: Path, *words: str, **more: Any) -> tuple[int, dict[str, Any]]:
    """The exit code, and the checks by name."""
    ended = doctor(folder, "--json", *words, **more)
    found = json.loads(ended.stdout)
    assert found["schema"] == 1
    return ended.returncode, {check["check"]: check for check in found["checks"]}


def worst(check: Mapping[str, Any]) -> str:
    return " ".join(f["found"] for f in check["findings"] if f["grade"] == check["grade"])


@pytest.fixture
def mounts() -> None:
    if subprocess.run(
        [*OWN_MOUNTS, "mount -t tmpfs none /dev/shm"], capture_output=True, timeout=RUN_LIMIT_S
    ).returncode:
        pytest.skip("needs a mount namespace of its own (root)")


def test_this_node_can_train(tmp_path: Path) -> None:
    ended = doctor(tmp_path)

    assert ended.returncode == 0, ended.stdout
    assert ended.stderr == ""
    # On a busy host the import may take so long that it is a warning.
    assert re.search(r": (ok|warn) +torch +torch \S+ \(.*\), imported in ", ended.stdout)
    assert "one node needs no store" in ended.stdout
    assert "can train" in ended.stdout.splitlines()[-1]
    hosts = {line.partition(": ")[0] for line in ended.stdout.splitlines()}
    assert hosts == {os.uname().nodename}


def test_json_has_all_checks_with_grades_and_findings(tmp_path: Path) -> None:
    ended = doctor(tmp_path, "--json", *LIGHT)

    found = json.loads(ended.stdout)
    assert len(ended.stdout.splitlines()) == 1
    assert set(found) == {"schema", "elaunch", "host", "grade", "seconds", "checks"}
    for check in found["checks"]:
        assert set(check) == {"check", "grade", "findings"}
        assert check["findings"]
        for finding in check["findings"]:
            assert set(finding) == {"grade", "found", "advice"}
            assert finding["grade"] in ("ok", "warn", "bad")


def test_a_low_limit_of_open_files_is_bad(tmp_path: Path) -> None:
    code, checks = examined(tmp_path, *LIGHT, prefix=("sh", "-c", 'ulimit -n 64; exec "$@"', "sh"))

    assert code == 1
    assert checks["limits"]["grade"] == "bad"
    assert "is 64, and 1 worker needs 70" in worst(checks["limits"])


def test_an_endpoint_without_a_store_is_told_by_who_would_serve_it(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    job = ("--nnodes", "2", "--rdzv-endpoint", f"localhost:{port}", *LIGHT)

    head, etcd = examined(tmp_path, *job), examined(tmp_path, "--rdzv-backend", "etcd", *job)
    unknown = examined(tmp_path, "--nnodes", "2", "--rdzv-endpoint", "nowhere.invalid:1", *LIGHT)

    assert head[0] == 0
    assert "this node would serve" in worst(head[1]["store"])
    assert etcd[0] == 1
    assert "nothing listens" in worst(etcd[1]["store"])
    assert unknown[0] == 1
    assert unknown[1]["address"]["grade"] == unknown[1]["store"]["grade"] == "bad"


def test_a_store_is_timed_and_refuses_a_wrong_token(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    for name, token in (("right", TOKEN), ("wrong", TOKEN[::-1])):
        (tmp_path / name).write_text(token)
        (tmp_path / name).chmod(0o600)
    job = ("--nnodes", "2", "--rdzv-endpoint", f"localhost:{port}", "--token-file")
    serve = [*COMMAND, "store", "--listen", f"localhost:{port}", "--token-file", "right"]
    with subprocess.Popen(serve, cwd=tmp_path, stderr=subprocess.PIPE, env=environment()) as store:
        try:
            assert store.stderr
            assert b"serving a store" in store.stderr.readline()

            right = examined(tmp_path, *job, "right", *LIGHT)
            wrong = examined(tmp_path, *job, "wrong", *LIGHT)
        finally:
            store.terminate()

    assert right[0] == 0
    assert "of 20 requests" in right[1]["store"]["findings"][0]["found"]
    assert wrong[0] == 1
    assert "not that of the store" in worst(wrong[1]["store"])
    assert TOKEN not in json.dumps([right, wrong])


def test_a_wrong_command_line_is_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    no_place, typo = doctor(tmp_path, "--nnodes", "2"), doctor(tmp_path, "--nnode=2", "--stor", "x")

    assert no_place.returncode == typo.returncode == 2
    assert no_place.stderr.startswith("elaunch: --nnodes 2 needs the address of a store")
    assert "doctor" not in no_place.stderr
    assert "Traceback" not in no_place.stderr + typo.stderr


# --health-check


def job(folder: Path, *words: str, prefix: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    program = str(script(folder, 'print("trained", flush=True)'))
    return subprocess.run(
        [*prefix, *COMMAND, "--no-preload", *words, program],
        cwd=folder,
        env=environment({"TMPDIR": str(folder)}),
        capture_output=True,
        text=True,
        timeout=180,
    )


SMALL_SHM = (*OWN_MOUNTS, 'mount -t tmpfs -o size=20M none /dev/shm && exec "$@"', "sh")


@pytest.mark.usefixtures("mounts")
def test_an_unhealthy_node_does_not_join_under_a_strict_check(tmp_path: Path) -> None:
    ended = job(tmp_path, "--health-check", "strict", prefix=SMALL_SHM)

    assert ended.returncode == 3
    assert "trained" not in ended.stdout
    assert "elaunch: this node does not join the job, since it is not healthy: 20 MiB of 20 MiB are" in ended.stderr
    assert "generation 0" not in ended.stderr
    assert not list(tmp_path.glob("elaunch_*"))


@pytest.mark.usefixtures("mounts")
def test_under_warn_an_unhealthy_node_joins_and_says_so(tmp_path: Path) -> None:
    program = script(
        tmp_path, "import pathlib, time\nwhile pathlib.Path('hold').exists():\n    time.sleep(0.01)\n", "x.py"
    )
    (tmp_path / "hold").touch()

    options = ("--health-check", "warn", "--no-preload")
    with Job(tmp_path, *options, str(program), prefix=SMALL_SHM, env={"TMPDIR": str(tmp_path)}) as default:
        default.wait_for_output("this node is not healthy: 20 MiB of 20 MiB are free")
        (tmp_path / "hold").unlink()
        code = default.wait()
    off = job(tmp_path, "--health-check", "off", prefix=SMALL_SHM)

    assert code == off.returncode == 0
    assert "generation 0" in default.stderr
    assert "healthy" not in off.stderr


def test_a_healthy_node_joins_under_a_strict_check_and_says_nothing(tmp_path: Path) -> None:
    ended = job(tmp_path, "--health-check", "strict")

    assert (ended.returncode, ended.stdout) == (0, "trained\n")
    assert "healthy" not in ended.stderr
