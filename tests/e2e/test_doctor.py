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

from tests.harness import COMMAND, RUN_LIMIT_S, environment, free_ports, script

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


@pytest.mark.slow
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
