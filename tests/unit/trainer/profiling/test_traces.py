"""profiling.traces: computation and communication in a trace, and the joined file, by arithmetic."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from elaunch.trainer.profiling.__main__ import main
from elaunch.trainer.profiling.traces import (
    StepTimes,
    StepWindow,
    clip,
    last_step_needed,
    length,
    minus,
    parse_steps,
    record,
    step_times,
    table,
    union,
    window_of,
)

BASE_NS = 1_700_000_000_000_000_000
MAIN, GLOO = 100, 200
Event = dict[str, Any]


def slice_of(name: str, begin_ms: float, end_ms: float, category: str, tid: int = MAIN) -> Event:
    at = {"ts": begin_ms * 1000, "dur": (end_ms - begin_ms) * 1000}
    return {"ph": "X", "name": name, "cat": category, "pid": 4711, "tid": tid, **at}


def step(number: int, begin_ms: float, end_ms: float) -> Event:
    return slice_of(f"ProfilerStep#{number}", begin_ms, end_ms, "user_annotation")


def op(name: str, begin_ms: float, end_ms: float, tid: int = MAIN) -> Event:
    return slice_of(name, begin_ms, end_ms, "cpu_op", tid)


def gloo(begin_ms: float, end_ms: float) -> Event:
    return slice_of("gloo:all_reduce", begin_ms, end_ms, "user_annotation", GLOO)


def kernel(name: str, begin_ms: float, end_ms: float) -> Event:
    return {**slice_of(name, begin_ms, end_ms, "kernel", 7), "pid": 0}


def trace(*events: Event) -> dict[str, Any]:
    return {"baseTimeNanoseconds": BASE_NS, "traceEvents": list(events)}


def times_ms(*events: Event) -> tuple[float, float, float]:
    """Computation, communication and what is exposed of it, in the one step of these events."""
    (found,), _ = step_times(trace(*events), 0, 10)
    return tuple(round(1000 * each, 6) for each in (found.computation_s, found.communication_s, found.exposed_s))  # type: ignore[return-value]


def test_the_profilers_steps_are_the_trainings() -> None:
    found, on_gpu = step_times(trace(step(2, 12, 20), step(1, 0, 12), op("aten::mm", 10, 14), gloo(13, 16)), 3, 10)

    assert found == [StepTimes(3, 10, 0.012, 0.002, 0.0, 0.0), StepTimes(3, 11, 0.008, 0.002, 0.003, 0.002)]
    assert not on_gpu
    with pytest.raises(ValueError, match="no whole step"):
        step_times({}, 0, 1)


def test_on_a_cpu_operators_compute_and_the_backends_events_communicate() -> None:
    forward = slice_of("DistributedDataParallel.forward", 0, 10, "user_annotation")
    compiled = slice_of("## Call CompiledFxGraph abc ##", 12, 18, "user_annotation")

    assert times_ms(step(1, 0, 20), op("aten::linear", 1, 5), op("aten::mm", 2, 4), gloo(4, 9), forward) == (4, 5, 4)
    assert times_ms(step(1, 0, 20), compiled) == (6, 0, 0)


def test_an_operator_computes_only_while_none_within_it_waits_for_other_ranks() -> None:
    around, wait = op("autograd::engine::evaluate_function: Gathered", 1, 9), op("_c10d_functional::wait_tensor", 4, 8)

    # Another thread computes meanwhile.
    assert times_ms(step(1, 0, 20), around, wait, op("aten::mm", 7, 10, tid=101)) == (3 + 1 + 1 + 1, 0, 0)


def test_on_a_gpu_kernels_compute_those_of_nccl_communicate_and_operators_do_not_count() -> None:
    copy = {**kernel("Memcpy HtoD", 6, 7), "cat": "gpu_memcpy"}
    mirrored = {**slice_of("ProfilerStep#1", 3, 18, "gpu_user_annotation"), "pid": 0}
    nccl = kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 5, 9)
    events = (step(1, 0, 20), op("aten::mm", 0, 20), kernel("sm90_gemm", 2, 6), copy, nccl, mirrored)

    assert times_ms(*events) == (5, 4, 2)
    assert step_times(trace(*events), 0, 10)[1]


@given(st.integers(0, 1 << 30))
def test_spans_cover_what_counting_says(seed: int) -> None:
    dice = random.Random(seed)
    one, other = ([(a, a + dice.randint(0, 9)) for a in dice.choices(range(40), k=6)] for _ in range(2))

    def points(spans: Any) -> set[int]:
        return {point for begin, end in spans for point in range(begin, end)}

    left = minus(union(one), union(other))
    assert points(left) == points(one) - points(other)
    assert length(union(one)) == len(points(one))
    assert points(clip(union(one), 10, 20)) == points(one) & set(range(10, 20))


META: Event = {"ph": "M", "name": "process_name", "pid": 4711, "tid": 0, "ts": 0, "args": {"name": "python"}}
THREAD: Event = {"ph": "M", "name": "thread_name", "pid": 4711, "tid": 100, "ts": 9.0, "args": {"name": "pt_main"}}
SPAN: Event = {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "x", "ts": 5, "dur": 1}
ARROW: Event = {"ph": "s", "id": 5, "pid": 4711, "tid": 100, "ts": 1000.0, "cat": "ac2g", "name": "ac2g"}


def test_each_rank_is_a_process_of_the_joined_file_and_so_is_each_of_its_gpus(tmp_path: Path) -> None:
    first = trace(META, THREAD, {**SPAN, "ts": 6000}, ARROW, step(1, 5, 9), op("aten::mm", 6, 7), kernel("gemm", 6, 8))
    # The second file has another base, and the same times.
    second = {**trace(step(1, 105, 109), gloo(106, 108), ARROW), "baseTimeNanoseconds": BASE_NS - 100_000_000}
    for rank, content in enumerate((first, second)):
        (tmp_path / f"node-{rank}").mkdir()
        (tmp_path / f"node-{rank}" / f"rank_{rank}.json.gz").write_bytes(gzip.compress(json.dumps(content).encode()))
    arguments = [str(tmp_path / "node-0"), str(tmp_path / "node-1"), "-o", str(tmp_path / "t.gz")]

    done = CliRunner().invoke(main, arguments)

    assert done.exit_code == 0, done.output
    found = json.loads(gzip.decompress((tmp_path / "t.gz").read_bytes()))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 0, GPU 0", 1000: "rank 1"}
    assert {e["pid"] for e in found if e["name"] == "gemm"} == {1}
    assert {e["pid"]: e["ts"] for e in found if e["name"] == "ProfilerStep#1"} == {0: 0.0, 1000: 0.0}
    assert [e["args"]["name"] for e in found if e["name"] == "thread_name"] == ["pt_main"]
    # What is no process is left out, and arrows of two ranks are not joined.
    assert all(isinstance(e["pid"], int) for e in found)
    assert len({e["id"] for e in found if e["ph"] == "s"}) == 2
    (tmp_path / "empty").mkdir()
    assert "there is no rank_N.json.gz" in CliRunner().invoke(main, [str(tmp_path / "empty")]).output


def test_a_number_is_a_count_and_two_are_a_range() -> None:
    assert parse_steps("3") == 3
    assert parse_steps(" 10-12 ") == StepWindow(10, 12)
    assert last_step_needed(parse_steps("3")) == 5
    assert last_step_needed(parse_steps("10-12")) == 12


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("x", "neither a number of steps nor a range"),
        ("1-3", "begin with 2"),
        ("0", "is 0 steps"),
        ("5-4", "is 0 steps"),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse_steps(text)


def test_a_start_profiles_what_is_left_of_a_range_after_a_step_of_warm_up_and_a_count_when_it_is_warm() -> None:
    assert window_of(StepWindow(10, 12), 1) == window_of(StepWindow(10, 12), 9) == StepWindow(10, 12)
    assert window_of(StepWindow(10, 12), 11) == StepWindow(12, 12)
    assert window_of(StepWindow(10, 12), 12) is None
    assert window_of(3, 8) == StepWindow(10, 12)


def test_the_table_has_a_steps_mean_on_each_rank_and_names_the_one_that_the_others_waited_for() -> None:
    # Rank 1 computes longer, and so waits for no rank.
    times = [StepTimes(rank, step, 0.1, *own) for step in (10, 11) for rank, own in enumerate(
        [(0.04, 0.05, 0.04), (0.08, 0.012, 0.01), (0.04, 0.05, 0.04)]
    )]  # fmt: skip

    lines = table(times)

    assert lines[0] == "steps 10 to 11 took 100.00 ms each; computation covered 20% of the communication"
    assert lines[1:5] == [
        "rank       step  computes  communicates   exposed",
        "   0  100.00 ms  40.00 ms      50.00 ms  40.00 ms",
        "   1  100.00 ms  80.00 ms      12.00 ms  10.00 ms",
        "   2  100.00 ms  40.00 ms      50.00 ms  40.00 ms",
    ]
    assert lines[5:] == ["rank 1 kept the others waiting, for 30.00 ms of each step"]
    assert len(table(times[:1])) == 3
    made = record(times, lines, generation=2, on_gpu=True)
    assert (made["first_step"], made["last_step"], made["step_s"]) == (10, 11, pytest.approx(0.1))
    assert made["gpu_busy"] == pytest.approx(1.6 / 3)
    assert record([], [], generation=0, on_gpu=False)["step_s"] is None
