"""`elaunch doctor` on this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.harness import COMMAND, environment, free_ports

TOKEN = "0123456789abcdef0123456789abcdef"
# A program that is a command: torch is not checked, so that these take a tenth of a second.
LIGHT = ("--no-python", "true")


def doctor(folder: Path, *words: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "doctor", *words],
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
