"""`make gpu`: what it does without a GPU, how it reads figures, runs parts and writes its page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import parts as gpu_parts
from bench.gpu import prepare
from bench.gpu.__main__ import last_error, run, run_all
from bench.gpu.parts import BEGIN, END, NOT_RUN, Part, failed, parts, update
from bench.samples import Run, Sample, encode
from tests.harness import REPOSITORY, RUN_LIMIT_S, wait_for

HAS_DEVICE = any(True for pattern in prepare.DEVICES for _ in Path("/").glob(pattern))


@pytest.mark.skipif(HAS_DEVICE, reason="this machine has a GPU")
def test_make_gpu_without_a_gpu_is_one_sentence_and_runs_nothing() -> None:
    there = {path.name for path in REPOSITORY.iterdir()}

    # `make test` gives its jobs to a make below it.
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    done = subprocess.run(["make", "gpu"], cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=RUN_LIMIT_S)

    assert done.returncode == 2
    sentence, *rest = done.stderr.splitlines()
    assert sentence == ("make gpu needs a GPU, and this machine shows none (there is no /dev/nvidia0); nothing was run")
    assert all(line.startswith("make") for line in rest)
    assert done.stdout == ""
    assert {path.name for path in REPOSITORY.iterdir()} == there


def test_the_tables_of_launches_are_the_benchs() -> None:
    sample = Sample("restart", "elaunch", 1, {"first all-reduce": 2.0}, {"CUDA context": 1.0})

    text = "\n".join(gpu_parts.launches(encode(Run({}, {}, (sample,))), "here")["tables"])

    assert re.search(r"first all-reduce +\| +1 \| +elaunch \| +1 \| +2.00", text)
    assert re.search(r"CUDA context +\| +1.00", text)


def part(folder: Path, program: str, name: str = "one", limit_s: float = 60) -> Part:
    return Part(name, limit_s, (sys.executable, "-c", program), gpu_parts.facts, folder / name)


def test_a_part_that_fails_is_reported_with_its_last_lines_and_the_others_run(tmp_path: Path) -> None:
    logged: list[str] = []
    broken = part(tmp_path, "raise SystemExit('CUDA error: out of memory')", "broken")
    whole = part(tmp_path, "print('facts {\"gpu\": 1}')", "whole")

    found = run_all([broken, whole], time.monotonic() + 300, logged.append)

    assert "exit code 1, no figures (it printed no facts): CUDA error: out of memory" in found["broken"]["why"]
    assert found["whole"]["figures"] == {"gpu": 1}
    assert failed(found) == ["broken"]
    report = "Traceback\n  torch.AcceleratorError: CUDA error: no kernel image\n====\nelaunch: the run as a page: x\n"
    assert last_error(report) == "torch.AcceleratorError: CUDA error: no kernel image"
    # Figures of a part that then failed are shown, and it counts as failed.
    both = run(part(tmp_path, "print('facts {}'); raise SystemExit(3)", "both"), 60)
    assert (both["why"], both["went_wrong"]) == ("exit code 3", True)
    late = run(part(tmp_path, "import time; print('facts {\"n\": 5}', flush=True); time.sleep(600)", "late"), 3)
    assert (late["why"], late["figures"]) == ("it did not end within 3 s", {"n": 5})


@pytest.mark.parametrize(("limit_s", "wrong"), [(3, ["one"]), (60, [])], ids=["its limit", "the nine minutes"])
def test_a_part_that_does_not_end_is_ended_with_all_that_it_started(
    tmp_path: Path, limit_s: float, wrong: list[str]
) -> None:
    child = "import subprocess, time; p = subprocess.Popen(['sleep', '600']);"

    found = run(part(tmp_path, f"{child} print(p.pid, flush=True); time.sleep(600)", limit_s=limit_s), 3)

    assert found["why"] == "it did not end within 3 s"
    assert failed({"one": found}) == wrong
    pid = int((tmp_path / "one" / "output.txt").read_text())
    # It may not be reaped here.
    line = Path(f"/proc/{pid}/cmdline")
    wait_for(lambda: not line.exists() or not line.read_bytes(), "its end")


def results() -> dict[str, Any]:
    facts = {"gpu": "H200", "nccl": "2.29", "context_s": 0.3, "first_all_reduce_s": 0.8, "compile_s": 9.0}
    ours = {"tokens_per_s": 400_000.0, "step_s": 0.15, "steps": 21, "gpu_busy": 0.95}
    return {
        "machine": {"CPUs": "16 × something"},
        "parts": {
            "facts": {"figures": {**facts, "flight_recorder": 5}},
            "bf16-compile-124m": {"figures": ours},
            "launches": {"figures": {"tables": ["CUDA context"]}},
            "ranks-facts": {"figures": {"backend": "nccl", "killed_2_status": "COMM_ERROR", "memory_free_s": 0.2}},
            "tests": {"figures": {"passed": 6, "failed": 1, "wrong": ["test_a[b]"]}},
            "float32": {"why": "the nine minutes were over"},
        },
    }


def test_the_page_has_the_figures_between_its_markers() -> None:
    page = f"above\n{BEGIN}\n{NOT_RUN}\n{END}\nbelow\n"

    fresh = update(page, results())

    assert fresh.startswith(f"above\n{BEGIN}\n")
    assert fresh.endswith(f"{END}\nbelow\n")
    assert NOT_RUN not in fresh
    assert update(fresh, results()) == fresh
    for text in ("gpu: H200", "16 × something", "400,000", "95 %", "6 passed, 1 failed", "CUDA context", "COMM_ERROR"):
        assert text in fresh
    assert "- float32: the nine minutes were over" in fresh
    assert "- failed: test_a[b]" in fresh
    assert failed(results()["parts"]) == ["tests"]
    with pytest.raises(ValueError, match="the page has no"):
        update("", results())


def test_tests_that_failed_are_named_and_those_that_ended_count_also_if_pytest_was_stopped(tmp_path: Path) -> None:
    file = tmp_path / "test_three.py"
    file.write_text("import pytest\ndef test_a(): pass\ndef test_b(): assert 0\ndef test_c(): pytest.skip('c')")
    (wanted,) = (each for each in parts(tmp_path) if each.name == "tests")
    options = [word for word in wanted.command if "test_" not in word]

    found = run(replace(wanted, command=(*options, str(file))), RUN_LIMIT_S)

    counted = {"passed": 1, "failed": 1, "skipped": 1, "wrong": ["test_b"]}
    assert (found["figures"], "why" in found, failed({"tests": found})) == (counted, False, ["tests"])
    output = (tmp_path / "tests" / "output.txt").read_text()
    assert gpu_parts.tests(output.partition("= FAILURES =")[0]) == counted


@pytest.mark.slow
def test_the_trainers_parts_run_on_this_machine_with_a_small_shape(tmp_path: Path) -> None:
    small = ("--layers", "1", "--heads", "2", "--width", "16", "--context", "8", "--steps", "30")
    wanted = {each.name: each for each in parts(tmp_path, shape=small)}

    # The one with another vocabulary, and the one whose steps are profiled.
    # A compiler takes minutes here, and is another test's. Two threads on busy cores wait for each other.
    env = {"OMP_NUM_THREADS": "1"}
    large, profiled = (
        run(replace(each, command=tuple(word for word in each.command if word != "--compile"), env=env), 120)
        for each in (wanted["bf16-compile-124m"], wanted["bf16-compile"])
    )

    for found in (large, profiled):
        assert "why" not in found, found
    # Those from step 10 on, and not the profiled ones.
    assert (large["figures"]["steps"], profiled["figures"]["steps"]) == (21, 16)
    assert profiled["figures"]["profiled_step_s"] > 0
    assert profiled["figures"]["gpu_busy"] is None
    # 50,304 rows of 16, and not 256.
    more = parameters(tmp_path / "bf16-compile-124m") - parameters(tmp_path / "bf16-compile")
    assert more == 16 * (50304 - 256)


@pytest.mark.slow
@pytest.mark.skipif(HAS_DEVICE, reason="this machine has a GPU")
def test_without_a_gpu_the_facts_about_two_ranks_are_gloos(tmp_path: Path) -> None:
    (wanted,) = (each for each in parts(tmp_path) if each.name == "ranks-facts")

    found = run(wanted, 120)

    assert "why" not in found, found
    figures = found["figures"]
    assert (figures["backend"], figures["beside_still_waits"]) == ("gloo", True)
    # The survivor of an all-reduce that was cut has a part of the sum.
    assert figures["killed_3_raised"] == "RuntimeError"
    assert figures["killed_3_summed"] + figures["killed_3_own"] == pytest.approx(1, abs=0.01)
    assert figures["ahead_to_all_reduce_s"] > 0


def parameters(folder: Path) -> int:
    fields = (folder / "output.txt").read_text().split()
    return int(fields[fields.index("parameters,") - 1].replace(",", ""))
