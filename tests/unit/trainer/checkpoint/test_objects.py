"""Checkpoints behind a URL: whole or not loaded, without any rename; on fsspec's file systems and a real S3 server."""

from __future__ import annotations

import json
import random
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from fsspec.implementations.memory import MemoryFileSystem
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

from elaunch.trainer.checkpoint.checkpoints import Checkpoints
from elaunch.trainer.checkpoint.filesystem import ObjectFiles, StorageError, Url, connect, parse, plain_errors
from elaunch.trainer.checkpoint.loading import Unreadable
from elaunch.trainer.checkpoint.storage import MANIFEST, Mark, Storage, marks, sums
from tests.s3 import S3, s3_server


@pytest.fixture(scope="module", name="s3")
def _s3() -> Iterator[S3]:
    with s3_server() as server:
        yield server


@pytest.fixture(params=["memory", "file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Url:
    """A folder of its own in each kind of store. `file` goes through fsspec, not through a plain path."""
    name = secrets.token_hex(4)
    if request.param == "s3":
        for variable, value in request.getfixturevalue("s3").env.items():
            monkeypatch.setenv(variable, value)
    places = {"memory": f"memory://bucket/{name}", "file": f"file://{tmp_path}/run", "s3": f"s3://bucket/{name}"}
    return Url(request.param, places[request.param])


def state_of(step: int) -> dict[str, Any]:
    return {"step": step, "model": {"w": torch.full((50, 40), float(step)), "b": torch.arange(7.0)}}


def opened(url: Url, generation: int = 0, log: Callable[[str], None] = pytest.fail, **options: Any) -> Checkpoints:
    """Open the checkpoints as the job's next start does, without earlier listings of this process."""
    return Checkpoints(Storage(ObjectFiles(url)), generation=generation, log=log, **options)


def saved(url: Url, generation: int, step: int) -> str:
    """The path of the checkpoint in its file system."""
    checkpoints = opened(url, generation)
    checkpoints.save(step, state_of(step))
    folder = checkpoints.storage.found()[-1][1]
    return f"{fsspec.core.url_to_fs(url.text)[1]}/{folder.name}"


def loaded(url: Url, log: Callable[[str], None] = pytest.fail) -> int:
    state: dict[str, Any] = {"model": {"w": torch.zeros(50, 40)}}
    if opened(url, log=log).load_newest(state) is None:
        return 0
    assert torch.equal(state["model"]["w"], torch.full((50, 40), float(state["step"])))
    return int(state["step"])


def system(url: Url) -> Any:
    return fsspec.core.url_to_fs(url.text)[0]


def marks_at(url: Url) -> list[Mark]:
    return marks(Storage(ObjectFiles(url)))


def folders(url: Url) -> list[str]:
    """The folders of all checkpoints that were begun, whole or not."""
    return sorted(name for name in ObjectFiles(url).names() if name.startswith("generation-"))


def test_what_was_saved_comes_back_and_torch_reads_it_too(url: Url) -> None:
    path = saved(url, 0, 7)

    assert loaded(url) == 7
    state = {"model": {"w": torch.zeros(50, 40), "b": torch.zeros(7)}}
    with pytest.warns(UserWarning, match="assuming the intent is to load in a single process"):
        torch_dcp.load(state, storage_reader=FsspecReader(system(url).unstrip_protocol(path)))
    assert torch.equal(state["model"]["w"], torch.full((50, 40), 7.0))
    assert torch.equal(state["model"]["b"], torch.arange(7.0))


def test_one_without_its_manifest_is_never_loaded_and_is_swept_by_the_next_start(url: Url) -> None:
    saved(url, 1, 1)
    torn = saved(url, 1, 2)
    system(url).rm_file(f"{torn}/{MANIFEST}")
    storage = Storage(ObjectFiles(url))
    begun_by_a_newer_group = storage.begin(Mark(2, 3))
    begun_by_a_newer_group.write("__0_0.distcp", b"half")

    logged: list[str] = []
    assert marks_at(url) == [Mark(1, 1)]
    assert loaded(url, logged.append) == 1
    name = PurePath(torn).name
    assert logged == [f"{storage}: removed {name}, without {MANIFEST}: its writer was killed, or that file was deleted"]
    assert name not in folders(url)
    assert begun_by_a_newer_group.name in folders(url)


def test_two_writers_of_one_mark_do_not_touch_each_others_objects(url: Url) -> None:
    one, other = opened(url, 1), opened(url, 1)

    one.save(5, state_of(5))
    other.save(5, {**state_of(5), "whose": "other"})

    assert len(folders(url)) == 2
    for folder in (Storage(ObjectFiles(url)).folder(name) for name in folders(url)):
        held = json.loads(folder.read(MANIFEST, 1 << 20))["files"]
        assert {name: list(sums(folder, name)) for name in held} == held
    assert loaded(url) == 5


def test_an_outage_at_the_start_begins_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    url = Url("memory", f"memory://bucket/{secrets.token_hex(4)}")
    saved(url, 5, 1)

    def away(*_: object, **__: object) -> None:
        raise ConnectionError("connection refused")

    with monkeypatch.context() as patched:
        patched.setattr(MemoryFileSystem, "ls", away)
        logged: list[str] = []
        checkpoints = opened(url, log=logged.append)
        with pytest.raises(Unreadable, match=r"connection refused.*training does not start over"):
            checkpoints.load_newest({})
        checkpoints.save(2, state_of(2))
    assert logged[-1].endswith(f"; {url} has not responded yet")
    # The present generations are listed again.
    checkpoints.save(2, state_of(2))
    assert marks_at(url) == [Mark(5, 1), Mark(5, 2)]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("s33://bucket/run", "s33://bucket/run cannot be used: Protocol not known: s33"),
        ("s3://", "names no bucket; write s3://bucket/folder"),
        ("s3:/bucket/run", "has one slash .*; give the text s3://bucket/run"),
        ("file://run", "not an absolute path; write file:///folder"),
        ("gs://bucket/run", "gs://bucket/run cannot be used: .*install gcsfs"),
    ],
)
def test_a_url_that_cannot_be_meant_is_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as refused:
        Checkpoints(text, generation=0)

    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (PermissionError("The key is wrong."), "The key is wrong"),
        (NotImplementedError(), "NotImplementedError"),
        (ConnectionResetError(104, "Connection reset by peer"), "Connection reset by peer"),
        (RuntimeError("no\nlonger"), "no"),
    ],
)
def test_what_a_file_system_raises_is_one_sentence(error: Exception, sentence: str) -> None:
    with pytest.raises(StorageError) as raised, plain_errors(Url("memory", "memory://bucket/run")):
        raise error

    assert sentence in (raised.value.strerror or "")
    assert str(raised.value).startswith("memory://bucket/run: ")
    assert "\n" not in str(raised.value)


def test_secrets_in_a_url_are_printed_nowhere() -> None:
    text = "memory://me:hunter2@bucket/run?token=hunter3"
    url = Url("memory", text)
    logged: list[str] = []

    assert str(url) == "memory://***@bucket/run?***"
    assert "hunter" not in repr(url)
    with pytest.raises(StorageError) as raised, plain_errors(url):
        raise ValueError(f"me:hunter2 at {text} with token=hunter3 and hunter2")
    logged.append(str(raised.value))
    checkpoints = opened(url, log=logged.append)
    checkpoints.save(1, state_of(1))
    folder = checkpoints.storage.found()[0][1]
    logged += [str(folder), str(checkpoints.storage)]
    logged += [folder.read(name, 1 << 20).decode("latin-1") for name in ("manifest.json", ".metadata", "tensors.json")]
    assert not [each for each in logged if "hunter" in each]


def test_a_retry_of_s3s_client_draws_no_number_of_the_program() -> None:
    pytest.importorskip("s3fs")
    connect(parse("s3://bucket/run"))
    botocore = pytest.importorskip("botocore.retryhandler")
    before = random.getstate()

    botocore.delay_exponential("rand", 2, 1)

    assert random.getstate() == before
