"""profiling.summary and .words: exposed communication, overlap and stragglers, by arithmetic."""

from __future__ import annotations

import json

import pytest

from elaunch.trainer.profiling.activity import RankActivity
from elaunch.trainer.profiling.clocks import ClockOffset
from elaunch.trainer.profiling.summary import Straggler, summarize
from elaunch.trainer.profiling.words import SCHEMA, record, sentences
from tests.unit.trainer.profiling.traces import Event, activity, gloo, kernel, ns, op, slice_of, step

SAME = [ClockOffset(), ClockOffset(), ClockOffset(), ClockOffset()]


def two_ranks() -> list[RankActivity]:
    """Two steps of 20 ms. Rank 1 is 3 ms late to the first bucket and 1 ms to the second, in each step."""

    def rank(number: int, first: float, second: float) -> RankActivity:
        events: list[Event] = []
        for n, at in ((1, 0.0), (2, 20.0)):
            events += [
                step(n, at, at + 20),
                op("aten::mm", at, at + 10),
                gloo(at + first, at + 12, 5000),
                gloo(at + second, at + 15, 1000),
            ]
        return activity(*events, rank=number)

    # The last 2 ms of the first bucket, and all that follows it, nothing covers.
    return [rank(0, 5, 11), rank(1, 8, 12)]


def test_communication_is_exposed_where_the_rank_computes_nothing() -> None:
    found = summarize(two_ranks(), SAME)

    first = next(share for share in found.shares if (share.rank, share.step) == (0, 10))
    assert (first.length_ns, first.computation_ns) == (ns(20), ns(10))
    assert first.communication_ns == ns(10)
    # From 10 ms, where computation ends, to 15 ms, where the second bucket ends.
    assert first.exposed_ns == first.exposed_all_reduce_ns == ns(5)
    assert first.overlap == pytest.approx(0.5)
    # Rank 1 communicates from 8 to 15 ms.
    other = next(share for share in found.shares if (share.rank, share.step) == (1, 11))
    assert (other.communication_ns, other.exposed_ns) == (ns(7), ns(5))
    assert found.overlap == pytest.approx(1 - 10 / 17)


def test_a_collective_over_the_end_of_a_step_counts_in_both() -> None:
    found = summarize([activity(step(1, 0, 10), step(2, 10, 20), gloo(8, 13))], SAME)

    assert [share.communication_ns for share in found.shares] == [ns(2), ns(3)]
    assert [bucket.step for bucket in found.buckets] == [10]


def test_only_all_reduce_is_counted_as_all_reduce() -> None:
    found = summarize([activity(step(1, 0, 20), gloo(1, 3), gloo(3, 8, name="allgather"))], SAME)

    (share,) = found.shares
    assert (share.exposed_ns, share.exposed_all_reduce_ns) == (ns(7), ns(2))
    assert "communication was under way for 7.0 ms" in sentences(found)[0]


def test_a_bucket_has_its_size_its_begin_and_its_length_on_each_rank() -> None:
    found = summarize(two_ranks(), SAME)

    assert [(b.step, b.bytes) for b in found.buckets] == [(10, 20000), (10, 4000), (11, 20000), (11, 4000)]
    assert found.buckets[2].begins_ns == {0: ns(5), 1: ns(8)}
    assert found.buckets[2].lengths_ns == {0: ns(7), 1: ns(4)}


def test_the_rank_that_begins_a_collective_last_is_late_by_what_the_others_wait() -> None:
    found = summarize(two_ranks(), SAME)

    assert [(bucket.last, bucket.late_ns) for bucket in found.buckets] == [(1, ns(3)), (1, ns(1))] * 2
    assert found.stragglers == (Straggler(1, 4, ns(8)),)
    assert (
        "rank 1 came 3.0 ms late to all-reduce 1 of step 10; the others waited. "
        "It was the last in 4 of 4 collectives, by 2.0 ms on average"
    ) in sentences(found)


def test_lateness_is_that_against_the_median_of_the_others() -> None:
    ranks = [activity(step(1, 0, 20), gloo(at, 15), rank=rank) for rank, at in enumerate((1.0, 2.0, 9.0, 10.0))]

    (bucket,) = summarize(ranks, SAME).buckets

    # The others begin at 1, 2 and 9 ms.
    assert (bucket.last, bucket.late_ns) == (3, ns(8))


def test_a_rank_that_is_last_by_less_than_a_thread_takes_to_wake_is_not_late() -> None:
    ranks = [activity(step(1, 0, 20), gloo(at, 15), rank=rank) for rank, at in enumerate((1.0, 1.05))]

    found = summarize(ranks, SAME)

    assert found.stragglers == ()
    assert "no rank kept the others waiting: 1 collective compared" in sentences(found)


def test_a_rank_that_is_late_once_is_said_without_a_mean_and_other_collectives_by_their_number() -> None:
    ranks = [
        activity(step(1, 0, 20), gloo(1, 3, name="allgather"), gloo(at, 15, name="allgather"), rank=rank)
        for rank, at in enumerate((4.0, 9.0))
    ]

    assert (
        sentences(summarize(ranks, SAME))[1] == "rank 1 came 5.0 ms late to all-gather 2 of step 10; the others waited"
    )


def test_ranks_that_are_late_in_turns_are_named_with_what_each_cost() -> None:
    late = {0: (1, 4, 9), 1: (3, 4, 9), 2: (1, 6.2, 9), 3: (1, 4, 10.9)}
    ranks = [
        activity(step(1, 0, 20), *(gloo(at, 15, size) for size, at in enumerate(begins, 100)), rank=rank)
        for rank, begins in late.items()
    ]

    assert sentences(summarize(ranks, SAME))[1] == (
        "several ranks kept the others waiting in turns: rank 2 2.2 ms, rank 1 2.0 ms, rank 3 1.9 ms in 3 collectives"
    )


def test_a_rank_that_is_late_to_a_broadcast_keeps_nobody_waiting() -> None:
    ranks = [
        activity(step(1, 0, 20), gloo(at, 15, name="broadcast"), gloo(16, 17), rank=rank)
        for rank, at in enumerate((1.0, 9.0))
    ]

    found = summarize(ranks, SAME)

    assert (found.stragglers, found.matched, len(found.buckets)) == ((), 1, 2)


def test_clocks_of_other_hosts_are_put_right_before_ranks_are_compared() -> None:
    # Rank 1's host is 100 ms ahead: what it calls 104 ms is 4 ms.
    ranks = [activity(step(1, 0, 20), gloo(5, 15)), activity(step(1, 100, 120), gloo(104, 115), rank=1)]

    found = summarize(ranks, [ClockOffset(), ClockOffset(ns(100), 20_000)])

    (bucket,) = found.buckets
    assert (bucket.begins_ns, bucket.last, bucket.late_ns) == ({0: ns(5), 1: ns(4)}, 0, ns(1))
    assert found.remarks == ()
    rough = summarize(ranks, [ClockOffset(), ClockOffset(ns(100), 2_000_000)])
    assert rough.remarks == ("the clocks of the hosts are known to 2.0 ms only",)


def test_on_gloo_with_several_groups_nobody_is_called_late() -> None:
    config = {"pg_config": [{"pg_size": 4}, {"pg_size": 2}]}
    ranks = [
        activity(step(1, 0, 20), gloo(at, 15), rank=rank, distributedInfo=config) for rank, at in enumerate((1.0, 9.0))
    ]

    found = summarize(ranks, SAME)

    assert found.stragglers == ()
    assert any("several process groups" in each for each in found.remarks)


def test_collectives_of_groups_that_are_named_are_matched_within_their_groups() -> None:
    def rank(number: int, group: str, at: float) -> RankActivity:
        args = {"Collective name": "allreduce", "In msg nelems": 10, "dtype": "Float", "Process Group Ranks": group}
        return activity(step(1, 0, 20), kernel("ncclDevKernel_AllReduce", at, 15, **args), rank=number)

    ranks = [rank(0, "[0, 1]", 1), rank(1, "[0, 1]", 4), rank(2, "[2, 3]", 9), rank(3, "[2, 3]", 9)]

    assert summarize(ranks, SAME).stragglers == (Straggler(1, 1, ns(3)),)


def test_a_rank_without_a_trace_is_said_and_the_others_count() -> None:
    found = summarize([*two_ranks()[:1], RankActivity(1, trouble="the disk is full")], SAME)

    assert {share.rank for share in found.shares} == {0}
    assert "rank 1 has no trace: the disk is full" in sentences(found)
    nothing = summarize([RankActivity(0, trouble="torch.profiler failed")], SAME)
    assert sentences(nothing)[0] == "nothing is known of the profiled steps"


def test_the_summary_is_said_in_one_to_three_sentences() -> None:
    first, second = sentences(summarize(two_ranks(), SAME))

    assert first == (
        "steps 10 to 11 took 20.0 ms each: all-reduce was under way for 8.5 ms, of which 5.0 ms were exposed "
        "(25% of the step); computation covered 41%"
    )
    assert second.startswith("rank 1 came 3.0 ms late")
    alone = sentences(summarize([activity(step(1, 0, 20), op("aten::mm", 0, 9))], SAME))
    assert alone == ["step 10 took 20.0 ms"]
    apart = [activity(step(1, 0, 20), op("aten::mm", 0, 9), rank=rank) for rank in range(2)]
    assert sentences(summarize(apart, SAME)) == ["step 10 took 20.0 ms, and the ranks exchanged nothing"]


def test_gpus_have_a_share_of_time_and_an_mfu_if_the_peak_is_known() -> None:
    ranks = [activity(step(1, 0, 20), kernel("gemm", 0, 15), rank=rank) for rank in range(2)]

    found = summarize(ranks, SAME, flops_per_step=4e9, peak_flops=1e12)

    # 4 GFLOP in 20 ms are 0.2 TFLOPS.
    assert found.mfu == pytest.approx(0.2)
    assert "GPUs computed for 75% of the time; MFU 20.0%" in sentences(found)[1]
    assert summarize(ranks, SAME, flops_per_step=4e9).mfu is None


def test_an_idle_gpu_is_said_with_what_its_host_was_in_meanwhile() -> None:
    def annotation(name: str, begin_ms: float, end_ms: float) -> Event:
        return slice_of(name, begin_ms, end_ms, "user_annotation")

    found = summarize(
        [
            activity(
                *(step(1, 0, 20), step(2, 20, 40)),
                *(kernel("gemm", 5, 10), kernel("ncclDevKernel_AllReduce", 12, 14), kernel("gemm", 24, 29)),
                # Idle: 0 to 5, 10 to 12, 14 to 24 and 29 to 40 ms.
                *(annotation("DDP.forward", 1, 6), op("aten::linear", 2, 4)),
                op("autograd::engine::evaluate_function: MmBackward0", 10, 11.5, tid=101),
                op("autograd::engine::evaluate_function: AddBackward0", 11.5, 12.5, tid=101),
                *(annotation("Optimizer.step#AdamW.step", 14, 22), op("aten::copy_", 30, 31)),
            )
        ],
        SAME,
    )

    # 8, 4, 2 and 1 ms, and the rest of 28 ms is in no range; a step has half of it.
    assert dict(found.host_ns) == {
        "Python outside of operators": ns(6.5),
        "Optimizer.step#AdamW.step": ns(4),
        "DDP.forward": ns(2),
        "backward pass": ns(1),
        "aten::copy_": ns(0.5),
    }
    assert sentences(found)[-1] == (
        "the GPU waited for its host 70% of the time; in each step the host was meanwhile in "
        "Python outside of operators 6.5 ms, Optimizer.step#AdamW.step 4.0 ms, DDP.forward 2.0 ms"
    )
    made = record(found, generation=0, ranks=[], trace="")
    assert (made["gpu_idle"], made["host_s"]["backward pass"]) == (0.7, 0.001)


def test_a_gpu_that_is_busy_has_no_word_about_its_host() -> None:
    found = summarize([activity(step(1, 0, 20), kernel("gemm", 0, 19), op("aten::mm", 0, 2))], SAME)

    assert sentences(found) == ["step 10 took 20.0 ms", "GPUs computed for 95% of the time"]


def test_the_record_is_json_with_a_schema_and_seconds() -> None:
    made = record(summarize(two_ranks(), SAME), generation=2, ranks=[], trace="trace.json.gz")

    assert json.loads(json.dumps(made, allow_nan=False)) == made
    assert (made["schema"], made["generation"], made["first_step"], made["last_step"]) == (SCHEMA, 2, 10, 11)
    assert (made["exposed_all_reduce_s"], made["overlap"]) == (0.005, pytest.approx(7 / 17, abs=1e-6))
    assert made["buckets"][0] == {
        "step": 10,
        "kind": "all_reduce",
        "bytes": 20000,
        "begins_s": {"0": 0.005, "1": 0.008},
        "lengths_s": {"0": 0.007, "1": 0.004},
        "last": 1,
        "late_s": 0.003,
    }
    assert made["stragglers"] == [{"rank": 1, "times": 4, "late_s": 0.008}]
    assert (made["mfu"], made["gpu_busy"]) == (None, None)
