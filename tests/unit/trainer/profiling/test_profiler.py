"""profiling.profiler: a loop of one process with the real torch.profiler; the report of two ranks on two hosts."""

from __future__ import annotations

import gzip
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elaunch.trainer import Profiler, profiled
from elaunch.trainer.profiling import report as reports
from elaunch.trainer.profiling.activity import read_activity
from elaunch.trainer.profiling.report import Collected, collect, report
from elaunch.trainer.profiling.traces import packed, parsed, unpacked
from elaunch.trainer.ranks.peers import Peers
from tests.unit.trainer.profiling.traces import gloo, kernel, ns, op, step, trace
from tests.unit.trainer.ranks.test_agreement import forked


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ELAUNCH_MEMORY", "ELAUNCH_GENERATION", "TORCHELASTIC_ERROR_FILE", "RANK"):
        monkeypatch.delenv(name, raising=False)


def work() -> None:
    torch.ones(64, 64) @ torch.ones(64, 64)


def run(steps: range, which: str, folder: Path, **more: Any) -> tuple[list[int], list[str]]:
    """The steps that a loop makes, and what it is told."""
    said: list[str] = []
    made = []
    for number in profiled(steps, which, folder=folder, say=said.append, **more):
        made.append(number)
        work()
    return made, said


def record(folder: Path, generation: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"generation_{generation}" / "profile.json").read_text())
    return found


def test_a_loop_makes_its_steps_and_the_ones_that_were_asked_for_are_profiled(tmp_path: Path) -> None:
    made, said = run(range(1, 8), "3-4", tmp_path, flops_per_step=1e6, peak_flops=1e12)

    assert made == [*range(1, 8)]
    found = record(tmp_path)
    assert [each["step"] for each in found["steps"]] == [3, 4]
    assert all(0 < each["computation_s"] <= each["seconds"] for each in found["steps"])
    assert found["mfu"] > 0
    content = parsed(unpacked((tmp_path / "generation_0" / "rank_0.json.gz").read_bytes()))
    began_ns = content["baseTimeNanoseconds"] + 1000 * min(e["ts"] for e in content["traceEvents"] if e["ph"] == "X")
    # The clock of the trace is the wall clock.
    assert abs(began_ns - time.time_ns()) < 600e9
    assert (tmp_path / "generation_0" / "trace.json.gz").stat().st_size > 500
    # Once when it is made, and once at the end of the run.
    assert said[: len(said) // 2] == said[len(said) // 2 :]
    assert said[0].startswith("profile: steps 3 to 4 took ")
    assert said[-1].endswith("trace.json.gz at https://ui.perfetto.dev")


def test_steps_are_counted_for_a_loop_that_is_no_iteration(tmp_path: Path) -> None:
    with Profiler("4-4", folder=tmp_path, say=lambda _: None) as profiler:
        for _ in range(4):
            work()
            profiler.step()

    assert [each["step"] for each in record(tmp_path)["steps"]] == [4]


def test_items_that_are_no_numbers_are_counted_from_1_and_a_count_begins_with_the_third(tmp_path: Path) -> None:
    assert [*profiled(iter("abcdef"), "2", folder=tmp_path, say=lambda _: None)] == [*"abcdef"]

    assert (record(tmp_path)["first_step"], record(tmp_path)["last_step"]) == (3, 4)


def test_a_loop_that_ends_within_the_steps_gives_those_that_it_made(tmp_path: Path) -> None:
    _, said = run(range(1, 4), "2-9", tmp_path)

    assert [each["step"] for each in record(tmp_path)["steps"]] == [2, 3]
    assert said[0].startswith("profile: steps 2 to 3 took")
    for last in (2, 6):
        _, said = run(range(1, last), "6-9", tmp_path / "none")
        assert said == ["profile: the training ended before steps 6 to 9 were profiled"]
    assert not (tmp_path / "none").exists()
    # The profiler is off again.
    assert run(range(1, 5), "3-3", tmp_path / "again")[1]


def test_without_steps_it_is_the_loop_itself_and_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("recording", "report"):
        monkeypatch.delitem(sys.modules, f"elaunch.trainer.profiling.{name}", raising=False)
    steps: Iterator[int] = iter(range(3))

    assert profiled(steps, None) is steps
    assert "elaunch.trainer.profiling.recording" not in sys.modules


def test_a_generation_that_died_in_a_profiled_step_is_told_of_and_its_steps_are_profiled_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory").mkdir()
    monkeypatch.setenv("ELAUNCH_MEMORY", str(tmp_path / "memory"))
    dying = Profiler("3-4", folder=tmp_path, say=lambda _: None)
    for number in (1, 2, 3):
        dying.begin_step(number)
    # As after SIGKILL: nothing is told any more.
    dying._recording.abandon()  # type: ignore[union-attr]
    monkeypatch.setenv("ELAUNCH_GENERATION", "1")

    _, said = run(range(3, 9), "3-4", tmp_path)

    assert "an earlier generation ended while steps were profiled, and left no trace" in said[0]
    assert "steps 4 to 5 are profiled instead of steps 3 to 4" in said[0]
    assert [each["step"] for each in record(tmp_path, 1)["steps"]] == [4, 5]
    assert not (tmp_path / "generation_0").exists()
    monkeypatch.setenv("ELAUNCH_GENERATION", "2")
    # What is there is not made again, but said at the end of the run.
    _, later = run(range(6, 12), "3-4", tmp_path)
    assert not (tmp_path / "generation_2").exists()
    assert later[0].startswith("profile: steps 4 to 5 took")
    assert later == said[1 : 1 + len(later)]


def test_a_training_that_stops_in_a_profiled_step_has_no_trace_and_says_so(tmp_path: Path) -> None:
    said: list[str] = []

    def train() -> None:
        with Profiler("3-4", folder=tmp_path, say=said.append) as profiler:
            for number in (1, 2, 3):
                profiler.begin_step(number)
            raise SystemExit(143)

    with pytest.raises(SystemExit):
        train()

    assert said == ["profile: no trace, since the training stopped while steps 3 to 4 were profiled"]
    assert [*tmp_path.iterdir()] == []
    # The profiler is off: the next one works.
    assert run(range(1, 6), "3-4", tmp_path)[1][0].startswith("profile: steps 3 to 4 took")


def test_what_cannot_be_written_is_said_and_costs_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    made, said = run(range(1, 6), "3-4", tmp_path / "file" / "below")

    assert made == [*range(1, 6)]
    assert said[0].startswith("profile: steps 3 to 4 took")
    written = [each for each in said if "cannot be written (Not a directory)" in each]
    assert len({*written}) == len(written) == 3
    assert "rank_0.json.gz" in written[0]


def test_a_program_that_profiles_itself_goes_on_without_our_trace(tmp_path: Path) -> None:
    with torch.profiler.profile() as theirs:
        made, said = run(range(1, 6), "3-4", tmp_path)

    assert made == [*range(1, 6)]
    assert any(event.name == "aten::matmul" for event in theirs.events())
    assert "profile: nothing is known of the profiled steps" in said
    assert any("rank 0 has no trace: the program uses torch.profiler itself" in each for each in said)


class Finished:
    """A recording whose trace is there."""

    def __init__(self, *events: dict[str, Any]) -> None:
        self._content = json.dumps(trace(*events)).encode()

    def end(self) -> bytes:
        return self._content


def test_a_trace_of_a_gpu_without_a_kernel_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    blind = collect(Finished(step(1, 0, 20), op("aten::mm", 0, 9)), tmp_path, 3, 7)  # type: ignore[arg-type]
    sees = collect(Finished(step(1, 0, 20), kernel("gemm", 0, 9)), tmp_path, 3, 7)  # type: ignore[arg-type]

    assert "rank 3's trace has no kernel of its GPU" in blind.trouble
    assert sees.trouble == ""
    assert blind.path == sees.path == str(tmp_path / "rank_3.json.gz")


AHEAD_NS = 500_000_000


def test_ranks_of_two_hosts_are_joined_by_rank_0_with_their_clocks_put_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.time_ns

    def reports_as(rank: int) -> bool:
        # Each rank has a clock of its own; rank 1's is half a second ahead, and rank 0 does not see its file.
        reports._clock = lambda: f"host {rank}"  # type: ignore[assignment]
        reports.time.time_ns = lambda: real() + rank * AHEAD_NS  # type: ignore[attr-defined]
        made = trace(step(1, 0, 20), op("aten::mm", 0, 9), gloo(5 + 4 * rank, 15))
        made["baseTimeNanoseconds"] += rank * AHEAD_NS
        content = packed(json.dumps(made).encode())
        mine = Collected(
            read_activity(made, rank, first_step=7, host=f"node-{rank}"), f"host {rank}", "", len(content), "", content
        )
        folder = tmp_path / str(rank)
        folder.mkdir()
        said, troubles = report(Peers(), mine, folder, 0, flops_per_step=0, peak_flops=0)
        if rank:
            return said == troubles == [] and not [*folder.iterdir()]
        made_of = json.loads((folder / "profile.json").read_text())
        _, other = made_of["ranks"]
        error_s = other["clock_error_s"]
        assert abs(other["clock_ahead_s"] - AHEAD_NS / 1e9) <= error_s + 1e-6, made_of["ranks"]
        joined = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))["traceEvents"]
        begins = {each["pid"]: each["ts"] for each in joined if each["name"] == "ProfilerStep#1"}
        assert abs(begins[1000] - begins[0]) / 1e6 <= error_s + 1e-6
        (bucket,) = made_of["buckets"]
        assert abs(bucket["begins_s"]["1"] - bucket["begins_s"]["0"] - 0.004) <= error_s + 1e-6
        return troubles == [] and any("open " in sentence for sentence in said)

    assert forked(tmp_path, reports_as) == [0, 0]
    assert ns(1) == 1_000_000


def test_traces_that_are_too_large_stay_where_they_are_and_the_command_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "MERGED_BYTES_MAX", 10)

    _, said = run(range(1, 6), "3-4", tmp_path)

    assert any("join them with python -m elaunch.trainer.profiling" in each for each in said)
    assert record(tmp_path)["trace"] == ""
    assert (tmp_path / "generation_0" / "rank_0.json.gz").exists()
