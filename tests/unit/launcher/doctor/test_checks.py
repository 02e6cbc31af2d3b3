"""launcher.doctor: a row for each rule, on both sides of its limit; and checks that hang, crash or fail."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from elaunch.agent.workers.gpus import Gpu, Vendor
from elaunch.launcher.doctor import devices, findings, health, host, network
from elaunch.launcher.doctor.command import examine
from elaunch.launcher.doctor.findings import Finding, Grade, Needs, Probe, ProbeFailed, ok, worst
from elaunch.launcher.store.locate import RendezvousPlan
from tests.harness import DEADLINE_S, environment, wait_for

MIB = 1 << 20
ONE, EIGHT = Needs(), Needs(workers=8, nodes_max=4)
NO_LIMIT = sys.maxsize
TORCH = {"version": "2.13", "cuda": "12.8", "nccl": "2.27.5", "seconds": 2.0}
# As `nvidia-smi --query-gpu=… --format=csv,noheader,nounits` writes it.
H100 = ["0", "GPU-aa", "NVIDIA H100 80GB HBM3", "570.86.15", "1024", "81559", "0", "No", "No"]
V100 = ["1", "GPU-bb", "Tesla V100-SXM2-32GB", "570.86.15", "0", "32768", "2", "", ""]
FREE_SHM = os.statvfs("/dev/shm").f_bavail * os.statvfs("/dev/shm").f_frsize


def torch(gpus: int, **changes: object) -> tuple[Finding, ...]:
    return devices.judge_torch(f"a line of a plug-in\n{json.dumps({**TORCH, **changes})}\n", gpus)


@pytest.mark.parametrize(
    ("found", "grade", "words"),
    [
        (host.judge_files(111, EIGHT), "bad", "8 workers need 112"),
        (host.judge_files(112, EIGHT), "warn", "raise it to 1536"),
        (host.judge_files(NO_LIMIT, EIGHT), "ok", "none"),
        (host.judge_threads(319, EIGHT), "bad", "raise it to 2112"),
        (host.judge_threads(2112, EIGHT), "ok", "2112"),
        (host.check_shm(Needs(workers=FREE_SHM // MIB)), "bad", "a bus error (SIGBUS) ends the job"),
        (host.check_shm(ONE, "/nowhere"), "bad", "cannot be used"),
        (devices.judge_gpus([H100], [], 1), "ok", "1 × NVIDIA H100 80GB HBM3, driver 570.86.15"),
        (devices.judge_gpus([H100], [], 2), "bad", "Xid 79"),
        (devices.judge_gpus([H100, V100], [], 2), "bad", "GPU 1 had 2 uncorrectable memory errors"),
        (devices.judge_gpus([H100, V100], [], 2), "bad", "nvidia-smi --gpu-reset -i 1"),
        (devices.judge_gpus([[*H100[:-1], "Yes"]], [], 1), "bad", "RMA"),
        (
            devices.judge_gpus([H100], [["GPU-aa", "7", "/bin/python", "1"]], 1),
            "warn",
            "python (pid 7), with 1 GiB",
        ),
        (torch(8), "ok", "torch 2.13 (CUDA 12.8, NCCL 2.27.5), imported in 2 s"),
        (torch(0, cuda="", nccl=""), "ok", "CPU build"),
        (torch(8, cuda=""), "bad", "pytorch.org"),
        (torch(8, seconds=16.0), "warn", "local disk"),
        (torch(8, cuda_error="driver too old"), "bad", "driver too old"),
        (network.judge_ports("10.0.0.1", (500, 501), (500, 501)), "bad", "500 to 501"),
        (network.judge_ports("10.0.0.1", (500, 501), (500,)), "ok", "1 of 2 free"),
        (network.judge_latencies("etcd:2379 answers", (0.001,) * 20), "ok", "median 1 ms"),
        (network.judge_latencies("etcd:2379 answers", (0.2,) * 20), "warn", "200 ms"),
        (network.judge_latencies("etcd:2379 answers", (0.6,) * 20), "bad", "600 ms"),
    ],
)
def test_a_finding_has_a_grade_and_a_way_out(found: Finding | tuple[Finding, ...], grade: str, words: str) -> None:
    all_found = found if isinstance(found, tuple) else (found,)

    worst_of = worst(each.grade for each in all_found)
    assert worst_of.value == grade, all_found
    assert words in " ".join(f"{each.found} {each.advice}" for each in all_found if each.grade is worst_of)
    assert all(bool(each.advice) == (each.grade is not Grade.OK) for each in all_found)


# An nvidia-smi that does not know the newer fields, or whose driver does not answer.
SMI = """#!/bin/sh
case "$1" in
*remapped_rows*) echo "Field is not a valid field to query."; exit 2;;
*query-gpu*) echo "0, GPU-aa, H100, 570.86, 10, 81559, 3";;
esac
"""


@pytest.mark.parametrize(
    ("tool", "words"),
    [(SMI, "had 3 uncorrectable memory errors"), ("#!/bin/sh\necho Failed to start\nexit 9\n", "Failed to start")],
)
def test_gpus_are_read_by_any_version_of_nvidia_smi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str, words: str
) -> None:
    (tmp_path / "nvidia-smi").write_text(tool)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(devices, "read_gpus", lambda: (Gpu(Vendor.NVIDIA),))

    found = devices.check_gpus({}, ONE)

    assert words in " ".join(each.found for each in found if each.grade is Grade.BAD)


@pytest.mark.parametrize(
    ("state", "grade", "words"), [("4: ACTIVE", Grade.OK, "1 of 1"), ("1: DOWN", Grade.WARN, "so NCCL uses TCP")]
)
def test_an_rdma_port_has_the_state_that_the_kernel_reports(
    tmp_path: Path, state: str, grade: Grade, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "memlock_finding", lambda: None)
    place = tmp_path / "mlx5_0" / "ports" / "1" / "state"
    place.parent.mkdir(parents=True)
    place.write_text(f"{state}\n")

    (found,) = devices.check_rdma(tmp_path)

    assert found.grade is grade
    assert words in found.found


def test_a_port_that_is_in_use_is_told_from_a_free_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        needs = Needs(ports=(listener.getsockname()[1],))

        (taken,) = network.check_ports(RendezvousPlan(), needs)

    assert taken.grade is Grade.BAD
    assert "in use" not in network.check_ports(RendezvousPlan(), needs)[0].found


def test_an_interpreter_without_torch_is_a_finding_with_the_reason() -> None:
    probe = Probe((sys.executable, "-S", "-I", "-c", devices.LOOK, "0"), DEADLINE_S, os.environ)

    with pytest.raises(ProbeFailed, match=r"^ModuleNotFoundError: No module named 'torch'$"):
        probe.answer()
    with pytest.raises(ValueError, match=r"."):
        devices.judge_torch("[1, 2", 0)


def fails() -> tuple[Finding, ...]:
    raise KeyError("x")


def hangs() -> tuple[Finding, ...]:
    time.sleep(DEADLINE_S)
    return ()


def test_a_check_that_hangs_or_fails_is_a_line_and_hides_no_other() -> None:
    checks = {"late": lambda: hangs, "faulty": lambda: fails, "well": lambda: lambda: (ok("fine"),)}

    checked = examine(checks, 1.0)

    assert [worst(each.grade for each in found) for found in checked.values()] == [Grade.BAD, Grade.BAD, Grade.OK]
    assert checked["late"][0].found == "no answer within 1 s"
    assert "KeyError" in checked["faulty"][0].found


def sleepers(seconds: str) -> list[psutil.Process]:
    return [each for each in psutil.process_iter(["cmdline"]) if seconds in (each.info["cmdline"] or ())]


def test_a_probe_that_hangs_ends_with_all_that_it_has_started() -> None:
    probe = Probe(("sh", "-c", "sleep 1000.25 & wait"), 0.5, os.environ)

    with pytest.raises(ProbeFailed, match=r"no answer within 0\.5 s"):
        probe.answer()

    wait_for(lambda: not sleepers("1000.25"), "what the probe has started ends, too")


def test_a_killed_doctor_leaves_no_process() -> None:
    code = (
        "import os\nfrom elaunch.launcher.doctor.findings import Probe\n"
        "Probe(('sleep', '1000.5'), 100, os.environ).answer()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], env=environment()) as doctor:
        wait_for(lambda: sleepers("1000.5"), "the probe begins")
        doctor.kill()

    wait_for(lambda: not sleepers("1000.5"), "nothing is left")


@pytest.mark.parametrize("is_strict", [False, True])
def test_a_job_that_is_over_takes_its_health_check_with_it(monkeypatch: pytest.MonkeyPatch, is_strict: bool) -> None:
    monkeypatch.setattr(devices, "python", lambda *_: ("sleep", "1000.75"))
    # On a busy machine a killed process needs its time to end.
    monkeypatch.setattr(health, "_CLOSE_S", DEADLINE_S)
    monkeypatch.setattr(findings, "_REAP_S", DEADLINE_S)
    said: list[str] = []
    check = health.HealthCheck(1, os.environ, is_strict=is_strict)
    if not is_strict:
        check.done(said.append)

    check.close()

    assert not sleepers("1000.75")
    assert not said
