"""profiling.activity: what is computation and what is communication in a trace."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaunch.trainer.profiling.activity import read_activity
from elaunch.trainer.profiling.intervals import length
from tests.fuzzing import bounded
from tests.unit.trainer.profiling.traces import BASE_NS, activity, gloo, kernel, ns, op, slice_of, step, trace


def test_the_profilers_steps_are_the_trainings_steps_on_the_wall_clock() -> None:
    found = activity(step(2, 12, 20), step(1, 0, 12), op("aten::mm", 1, 2), first_step=10)

    assert [(each.number, each.begin_ns - BASE_NS, each.end_ns - BASE_NS) for each in found.steps] == [
        (10, 0, ns(12)),
        (11, ns(12), ns(20)),
    ]


def test_a_trace_without_a_step_is_none() -> None:
    with pytest.raises(ValueError, match="no whole step"):
        activity(op("aten::mm", 1, 2))
    with pytest.raises(ValueError, match="no whole step"):
        read_activity({}, 0, first_step=1)


def test_on_a_cpu_operators_compute_and_the_backends_events_communicate() -> None:
    found = activity(
        step(1, 0, 20),
        op("aten::linear", 1, 5),
        op("aten::mm", 2, 4),
        gloo(4, 9, 500),
        slice_of("DistributedDataParallel.forward", 0, 10, "user_annotation"),
    )

    assert not found.on_gpu
    assert found.computes == ((BASE_NS + ns(1), BASE_NS + ns(5)),)
    (reduce,) = found.collectives
    assert (reduce.kind, reduce.bytes, reduce.end_ns - reduce.begin_ns) == ("all_reduce", 2000, ns(5))


def test_an_operator_around_one_that_waits_for_others_is_no_computation_but_what_is_within_it_is() -> None:
    found = activity(
        step(1, 0, 20),
        op("autograd::engine::evaluate_function: Gathered", 1, 9),
        op("aten::mul", 2, 3),
        op("_c10d_functional::wait_tensor", 4, 8),
        # The wrapper has ended: this one computes, and so does the one around it.
        op("autograd::engine::evaluate_function: Mm", 10, 14),
        op("aten::mm", 11, 13),
    )

    assert length(found.computes) == ns(1) + ns(4)


def test_compiled_code_on_a_cpu_computes() -> None:
    found = activity(step(1, 0, 20), slice_of("## Call CompiledFxGraph abc ##", 2, 8, "user_annotation"))

    assert length(found.computes) == ns(6)


def test_on_a_gpu_kernels_compute_those_of_nccl_communicate_and_operators_do_not_count() -> None:
    nccl = {"Collective name": "allreduce", "In msg nelems": 100, "Out msg nelems": 100, "dtype": "BFloat16"}
    found = activity(
        step(1, 0, 20),
        op("aten::mm", 0, 20),
        kernel("sm90_gemm", 2, 6),
        {**kernel("Memcpy HtoD", 6, 7), "cat": "gpu_memcpy"},
        kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 5, 9, **nccl, **{"Process Group Ranks": "[0, 1]"}),
        kernel("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", 10, 11),
        {**slice_of("ProfilerStep#1", 3, 18, "gpu_user_annotation"), "pid": 0},
    )

    assert found.on_gpu
    assert length(found.computes) == ns(5)
    assert [(c.kind, c.bytes, c.group) for c in found.collectives] == [
        ("all_reduce", 200, "[0, 1]"),
        ("reduce_scatter", 0, ""),
    ]


def test_what_lies_outside_of_the_steps_does_not_count() -> None:
    found = activity(step(1, 10, 20), op("aten::mm", 1, 5), gloo(2, 6), op("aten::mm", 18, 22))

    assert found.collectives == ()
    assert found.computes == ((BASE_NS + ns(18), BASE_NS + ns(22)),)


def test_the_groups_of_more_than_one_rank_are_counted() -> None:
    config = [{"pg_name": "0", "pg_size": 4}, {"pg_name": "1", "pg_size": 2}, {"pg_name": "2", "pg_size": 1}]

    assert activity(step(1, 0, 9), distributedInfo={"pg_config": config}).groups == 2
    assert activity(step(1, 0, 9)).groups == 0


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=8), each, max_size=3),
    max_leaves=8,
)
_FIELDS = st.sampled_from(["ph", "ts", "dur", "name", "cat", "args", "tid", "pid"])


@given(_FIELDS, _JSON, st.integers(0, 4), _JSON)
def test_a_field_of_another_kind_costs_its_event_alone(field: str, value: Any, place: int, args: Any) -> None:
    events = [
        step(1, 0, 20),
        op("aten::mm", 1, 2),
        gloo(2, 3),
        kernel("ncclDevKernel_AllReduce", 3, 4, dtype="Float"),
        step(2, 20, 30),
    ]
    events[place][field] = value
    events[2]["args"] = args

    with bounded():
        found = activity(*events, distributedInfo=value)

    assert found.steps
    assert trace(*events)["traceEvents"] == events
