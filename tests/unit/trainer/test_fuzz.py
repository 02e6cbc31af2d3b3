"""Files that the trainer reads back (ledgers, metrics, manifests, layouts, skeletons): foreign ones are refused."""

from __future__ import annotations

import dataclasses
import io
import json
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elaunch.trainer.checkpoint.storage import MANIFEST, Corrupt, read_manifest, storage_at, verify
from elaunch.trainer.data.order import Order
from elaunch.trainer.gpt.config import ConfigError, require_ours
from elaunch.trainer.gpt.recorder import Metrics
from elaunch.trainer.ledger.audit import Verdict, verdict
from elaunch.trainer.ledger.ledger import FORMAT
from elaunch.trainer.memory.pieces import contents
from elaunch.trainer.memory.slots import Slot, Torn
from elaunch.trainer.state.packing import describe, unpack
from elaunch.trainer.state.region import PAGE, Header, Piece, Version, header_of, is_intact, skeleton_of
from tests.fuzzing import NESTED, bounded, json_texts
from tests.unit.trainer.state.test_packing import region_with

ORDER = Order(8, global_batch=4, micro_batch=2)
HEADER = json.dumps(
    {"ledger": FORMAT, "generation": 0, "rank": 0, "world_size": 1, "after": 0, "order": dataclasses.asdict(ORDER)}
)
ROWS = (json.dumps({"step": 1, "micro": 0, "samples": [0, 1]}), json.dumps({"done": 1}))


@given(json_texts(HEADER), st.lists(json_texts(ROWS[0]) | json_texts(ROWS[1]), max_size=4))
def test_a_ledger_has_a_verdict_whatever_its_lines_are(header: str, rows: list[str]) -> None:
    with bounded():
        found = verdict([[f"{line}\n" for line in (header, *rows)]])

    assert isinstance(found, Verdict)
    assert len(found.text) < 2000


LINE = json.dumps(
    {"step": 3, "loss": 1.0, "tokens": 8, "seconds": 0.1, "world_size": 1, "generation": 0, "steps_lost": 2}
)


@given(rows=st.lists(json_texts(LINE), max_size=3))
def test_metrics_go_on_behind_the_last_line_that_is_one(
    tmp_path_factory: pytest.TempPathFactory, rows: list[str]
) -> None:
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    path.write_bytes("\n".join([LINE, *rows, ""]).encode(errors="surrogatepass"))
    with bounded():
        Metrics(path, 3).close()


STATE = {"w": torch.arange(6.0).view(2, 3), "step": 3, "more": [1, ("a", None), {"b": 2.5}]}


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4), st.booleans())
def test_a_scribbled_skeleton_is_a_state_or_none_of_ours(changes: list[tuple[int, int]], in_header: bool) -> None:
    region = region_with(STATE)
    whole = header_of(region)
    assert whole
    for at, byte in changes:
        region[(0 if in_header else PAGE) + at] = byte
    with bounded():
        header = header_of(region) or whole
        is_intact(region, header)
        try:
            unpack(region, header)
        except (pickle.UnpicklingError, ValueError):
            return
        describe(skeleton_of(region, header), header.data_length)


def unpacked(skeleton: bytes) -> Any:
    """The state of a region that holds this skeleton and no data."""
    region = torch.zeros(3 * PAGE, dtype=torch.uint8)
    region[PAGE : PAGE + len(skeleton)] = torch.frombuffer(bytearray(skeleton), dtype=torch.uint8)
    return unpack(region, Header(b"l" * 16, Piece(Version(1, 2), 1, 0), len(skeleton), PAGE, PAGE, 0, 0))


@given(st.binary(max_size=120), st.binary(max_size=120))
def test_any_bytes_as_a_skeleton_are_a_state_or_none_of_ours(first: bytes, second: bytes) -> None:
    with bounded(), suppress(pickle.UnpicklingError, ValueError):
        unpacked(b"\x80\x04" + first + b"." + second)


MANIFEST_TEXT = json.dumps(
    {"format": 1, "generation": 1, "step": 2, "world_size": 1, "files": {"plain.pickle": [3, 7], "a": [0, 0]}}
)


@given(text=json_texts(MANIFEST_TEXT))
def test_a_manifest_is_one_or_corrupt(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.mktemp("manifest") / "generation-0001-step-00000002"
    folder.mkdir()
    (folder / MANIFEST).write_bytes(text.encode(errors="surrogatepass"))
    with bounded():
        try:
            held = storage_at(folder.parent).folder(folder.name)
            found = read_manifest(held)
            verify(held, found, found.files)
        except ValueError as error:
            assert isinstance(error, Corrupt) or "its format is" in str(error)  # noqa: PT017


# What fuzzing and reading found, by name.


def test_a_ledger_of_60_kb_of_brackets_cannot_be_read() -> None:
    assert "is invalid" in verdict([[f"{HEADER}\n", f"{NESTED}\n"]]).text


@pytest.mark.parametrize(
    "reference",
    [
        ("nn", (1,), (((0,), (1,), 0),)), ("float32", (1,), (((0,), (2**62,), 0),)), ("float32", (1,)),
        ("float32", (-1,), (((0,), (-1,), 0),)), ("float32", (True,), (((0,), (1,), 0),)), "w", (["float32"] * 3),
        ("float32", (1, 1), (((0,), (1, 1), 0),)), ("float32", (4,), (((2,), (3,), 0),)),
        ("float32", (4,), (((0,), (4,), 4096 - 12),)), ("float32", (4,), (((0,), (4,), 1),)),
        ("float32", (4,), (((0,), (4,), "0"),)),
    ],
    ids=lambda row: str(row)[:40],
)  # fmt: skip
def test_a_box_that_is_no_part_of_its_tensor_or_of_the_data_is_torn(reference: Any) -> None:
    class Pickler(pickle.Pickler):
        def persistent_id(self, value: object) -> Any:
            return reference if value is STATE else None

    content = io.BytesIO()
    Pickler(content, protocol=5).dump({"parts": [], "whole": [], "state": {"w": STATE}})

    with pytest.raises(Torn, match="its skeleton"):
        contents(content.getvalue(), PAGE)


def test_a_skeleton_that_nests_for_ever_is_none_of_ours() -> None:
    assert unpacked(b"\x80\x04" + b"]" * 2000 + b"a" * 1999 + b".")


@pytest.mark.parametrize("content", ["[" * 2000, "a: 2024-99-99\n", "a: " + "9" * 5000, "\x00", "7", "just text"])
def test_a_run_directory_with_a_broken_configuration_is_a_sentence(content: str) -> None:
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        require_ours("--out", "out", content.encode(), {}, has_checkpoints=False)


@pytest.mark.parametrize(
    "changed",
    [{"generation": None}, {"step": "2"}, {"world_size": True}, {"files": {"../a": [0, 0]}}, {"files": {"a": [0]}}],
    ids=str,
)
def test_a_manifest_of_another_shape_is_corrupt(tmp_path: Path, changed: dict[str, object]) -> None:
    folder = tmp_path / "generation-0001-step-00000002"
    folder.mkdir()
    (folder / MANIFEST).write_text(json.dumps({**json.loads(MANIFEST_TEXT), **changed}))

    with pytest.raises(Corrupt, match="missing or torn"):
        read_manifest(storage_at(tmp_path).folder(folder.name))


def test_a_file_of_any_bytes_is_torn(tmp_path: Path) -> None:
    for content in (b"", b"elaunch3", b"elaunch3" + b"\xff" * 5000, b"\0" * 5000):
        (tmp_path / "piece").write_bytes(content)
        assert Slot(tmp_path / "piece", bytes(16)).header() is None
