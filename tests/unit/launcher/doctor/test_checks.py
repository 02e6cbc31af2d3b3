"""launcher.doctor: a row for each rule, on both sides of its limit; and checks that hang, crash or fail."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elaunch.agent.workers.topology import Gpu
from elaunch.launcher.doctor import host
from elaunch.launcher.doctor.command import examine, judge_latencies
from elaunch.launcher.doctor.host import Finding, Grade, Needs, bad, health_check, ok, worst
from elaunch.launcher.errors import UsageError
from tests.harness import DEADLINE_S, wait_for

MIB = 1 << 20
ONE, EIGHT = Needs(), Needs(workers=8, nodes_max=4)
NO_LIMIT = sys.maxsize
TORCH = {"version": "2.13", "cuda": "12.8", "nccl": "2.27.5", "seconds": 2.0}
# As `nvidia-smi --query-gpu=… --format=csv,noheader,nounits` writes it.
H100 = ["0", "GPU-aa", "NVIDIA H100 80GB HBM3", "570.86.15", "0", "No", "No"]
V100 = ["1", "GPU-bb", "Tesla V100-SXM2-32GB", "570.86.15", "2", "", ""]
FREE_SHM = os.statvfs("/dev/shm").f_bavail * os.statvfs("/dev/shm").f_frsize


def torch(gpus: int, **changes: object) -> Iterator[Finding]:
    return host.judge_torch(f"a line of a plug-in\n{json.dumps({**TORCH, **changes})}\n", gpus)


@pytest.mark.parametrize(
    ("found", "grade", "message"),
    [
        (host.judge_limit(host.FILES, 111, EIGHT), "bad", "8 workers need 112"),
        (host.judge_limit(host.FILES, 112, EIGHT), "warn", "raise it to 1536"),
        (host.judge_limit(host.FILES, NO_LIMIT, EIGHT), "ok", "none"),
        (host.judge_limit(host.THREADS, 319, EIGHT), "bad", "raise it to 2112"),
        (host.judge_limit(host.THREADS, 2112, EIGHT), "ok", "2112"),
        (host.check_shm(Needs(workers=FREE_SHM // MIB)), "bad", "a bus error (SIGBUS) ends the job"),
        (host.check_shm(ONE, "/nowhere"), "bad", "cannot be used"),
        (host.judge_gpus([H100], [], 1), "ok", "1 × NVIDIA H100 80GB HBM3, driver 570.86.15"),
        (host.judge_gpus([H100], [], 2), "bad", "Xid 79"),
        (host.judge_gpus([H100, V100], [], 2), "bad", "GPU 1 had 2 uncorrectable memory errors"),
        (host.judge_gpus([H100, V100], [], 2), "bad", "nvidia-smi --gpu-reset -i 1"),
        (host.judge_gpus([[*H100[:-1], "Yes"]], [], 1), "bad", "RMA"),
        (
            host.judge_gpus([H100], [["GPU-aa", "7", "/bin/python", "1"]], 1),
            "warn",
            "in use by python (pid 7)",
        ),
        (torch(8), "ok", "torch 2.13 (CUDA 12.8, NCCL 2.27.5), imported in 2 s"),
        (torch(0, cuda="", nccl=""), "ok", "CPU build"),
        (torch(8, cuda=""), "bad", "pytorch.org"),
        (torch(8, seconds=16.0), "warn", "local disk"),
        (torch(8, cuda_error="driver too old"), "bad", "driver too old"),
        (judge_latencies("etcd:2379 answers", (0.001,) * 20), "ok", "median 1 ms"),
        (judge_latencies("etcd:2379 answers", (0.2,) * 20), "warn", "200 ms"),
        (judge_latencies("etcd:2379 answers", (0.6,) * 20), "bad", "600 ms"),
    ],
)
def test_a_finding_has_a_grade_and_a_way_out(found: Finding | Iterator[Finding], grade: str, message: str) -> None:
    all_found = (found,) if isinstance(found, Finding) else tuple(found)

    worst_of = worst(all_found)
    assert worst_of.value == grade, all_found
    assert message in " ".join(f"{each.found} {each.advice}" for each in all_found if each.grade is worst_of)
    assert all(bool(each.advice) == (each.grade is not Grade.OK) for each in all_found)


def test_more_workers_than_the_limit_of_open_files_allows_are_refused() -> None:
    host.check_open_files(1)

    with pytest.raises(UsageError, match=r"open files .* is \d+, and 1000000000 workers need 6000000064; raise it to"):
        host.check_open_files(10**9)


SMI = """#!/bin/sh
case "$1" in
*query-gpu*) echo "0, GPU-aa, H100, 570.86, 3, No, No";;
esac
"""


@pytest.mark.parametrize(
    ("tool", "message"),
    [(SMI, "had 3 uncorrectable memory errors"), ("#!/bin/sh\necho Failed to start\nexit 9\n", "Failed to start")],
)
def test_gpus_are_read_by_nvidia_smi_and_a_driver_that_does_not_answer_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str, message: str
) -> None:
    (tmp_path / "nvidia-smi").write_text(tool)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(host, "read_gpus", lambda: (Gpu(),))

    found = host.check_gpus({}, ONE)

    assert message in " ".join(each.found for each in found if each.grade is Grade.BAD)


def fails() -> tuple[Finding, ...]:
    raise KeyError("x")


def hangs() -> tuple[Finding, ...]:
    time.sleep(DEADLINE_S)
    return ()


def test_a_check_that_hangs_or_fails_is_a_line_and_hides_no_other() -> None:
    checks = {"late": hangs, "faulty": fails, "well": lambda: (ok("fine"),)}

    checked = examine(checks, 1.0)

    assert [worst(found) for found in checked.values()] == [Grade.BAD, Grade.BAD, Grade.OK]
    assert checked["late"][0].found == "no answer within 1 s"
    assert "KeyError" in checked["faulty"][0].found


def test_an_interpreter_without_torch_is_a_finding_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    (tmp_path / "python").chmod(0o755)

    (found,) = host.check_torch(os.environ, Needs(interpreter=str(tmp_path / "python")))

    assert found.grade is Grade.BAD
    assert found.found.endswith("cannot import torch: ModuleNotFoundError: No module named 'torch'")


@pytest.mark.parametrize("is_over", [False, True])
def test_a_health_check_logs_what_is_bad_while_the_job_runs(monkeypatch: pytest.MonkeyPatch, is_over: bool) -> None:
    has_checked, logged = threading.Event(), list[str]()
    monkeypatch.setattr(host, "check_gpus", lambda *_, **__: has_checked.wait(DEADLINE_S) and (bad("broken", "fix"),))
    with health_check(1, os.environ, logged.append, is_strict=False):
        if not is_over:
            has_checked.set()
            wait_for(lambda: "elaunch-health" not in {each.name for each in threading.enumerate()}, "the check ends")
    has_checked.set()
    wait_for(lambda: "elaunch-health" not in {each.name for each in threading.enumerate()}, "the check ends")

    assert any("broken (fix)" in each for each in logged) is not is_over
