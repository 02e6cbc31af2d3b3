"""profiling.merging: one file of all ranks' traces."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from elaunch.trainer.profiling.__main__ import main
from elaunch.trainer.profiling.merging import RankTrace, write_merged
from elaunch.trainer.profiling.traces import packed, parsed, unpacked
from tests.unit.trainer.profiling.traces import BASE_NS, Event, gloo, kernel, ns, op, step, trace

META: Event = {"ph": "M", "name": "process_name", "pid": 4711, "tid": 0, "ts": 0, "args": {"name": "python"}}
THREAD: Event = {"ph": "M", "name": "thread_name", "pid": 4711, "tid": 100, "ts": 9.0, "args": {"name": "pt_main"}}
SPAN: Event = {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "x", "ts": 0, "dur": 1}
ARROW: Event = {"ph": "s", "id": 5, "pid": 4711, "tid": 100, "ts": 1000.0, "cat": "ac2g", "name": "ac2g"}


def events(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return found


def test_each_rank_is_a_process_and_so_is_each_of_its_gpus(tmp_path: Path) -> None:
    first = trace(META, THREAD, SPAN, ARROW, step(1, 5, 9), op("aten::mm", 6, 7), kernel("gemm", 6, 8))
    second = trace(step(1, 5, 9), gloo(6, 8), ARROW)

    write_merged(tmp_path / "t.gz", [RankTrace(0, "node-a", first), RankTrace(1, "node-b", second)])

    found = events(tmp_path / "t.gz")
    names = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}
    assert names == {0: "rank 0 on node-a", 1: "rank 0 on node-a, GPU 0", 1000: "rank 1 on node-b"}
    assert {e["pid"] for e in found if e["name"] == "gemm"} == {1}
    assert {e["pid"] for e in found if e["name"] == "gloo:all_reduce"} == {1000}
    assert [e["args"]["name"] for e in found if e["name"] == "thread_name"] == ["pt_main"]
    # What is no process is left out, and arrows of two ranks are not joined.
    assert all(isinstance(e["pid"], int) for e in found)
    assert len({e["id"] for e in found if e["ph"] == "s"}) == 2


def test_clocks_are_put_right_and_time_0_is_the_begin_of_the_first_trace(tmp_path: Path) -> None:
    # The second file has another base, and its host is 3 ms ahead.
    other = {**trace(op("aten::mm", 5, 6)), "baseTimeNanoseconds": BASE_NS - ns(100)}
    other["traceEvents"][0]["ts"] += 103_000

    write_merged(tmp_path / "t.gz", [RankTrace(0, "", trace(op("aten::mm", 5, 6))), RankTrace(1, "", other, ns(3))])

    assert [e["ts"] for e in events(tmp_path / "t.gz") if e["ph"] == "X"] == [0.0, 0.0]


def test_half_a_file_never_has_the_name(tmp_path: Path) -> None:
    class Torn(Exception):
        pass

    def traces() -> Any:
        yield RankTrace(0, "", trace(op("aten::mm", 5, 6)))
        raise Torn

    with pytest.raises(Torn):
        write_merged(tmp_path / "t.gz", traces())

    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("content", [b"", b"[]", b'{"traceEvents": [', b"[" * 100_000])
def test_a_part_of_a_trace_is_refused_with_a_sentence(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"the profiler left no|nested too deeply"):
        parsed(content)


def test_a_name_that_is_no_utf_8_is_no_reason_to_refuse() -> None:
    assert parsed(unpacked(packed(b'{"name": "\xff\n"}')))


def test_the_command_joins_the_folders_of_several_nodes_with_the_records_clocks(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"node-{rank}").mkdir()
        content = json.dumps(trace(op("aten::mm", 5 + 3 * rank, 6 + 3 * rank))).encode()
        (tmp_path / f"node-{rank}" / f"rank_{rank}.json.gz").write_bytes(packed(content))
    record = {"ranks": [{"rank": 1, "host": "node-b", "clock_ahead_s": 0.003}]}
    (tmp_path / "node-0" / "profile.json").write_text(json.dumps(record))
    words = [str(tmp_path / "node-0"), str(tmp_path / "node-1"), "-o", str(tmp_path / "t.gz")]

    done = CliRunner().invoke(main, words)

    assert done.exit_code == 0, done.output
    assert "2 ranks" in done.output
    assert [e["ts"] for e in events(tmp_path / "t.gz") if e["ph"] == "X"] == [0.0, 0.0]
    (tmp_path / "empty").mkdir()
    refused = CliRunner().invoke(main, [str(tmp_path / "empty")])
    assert refused.exit_code == 1
    assert "there is no rank_N.json.gz" in refused.output
