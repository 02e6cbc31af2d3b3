"""launcher.store.open_files: a host whose limit of open files is too low says so before anything runs."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from elaunch.launcher.errors import UsageError
from elaunch.launcher.store.open_files import agents_served, check_descriptors
from tests.harness import Job, free_ports


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    """This host's hard limit."""
    hard: int = request.param
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, hard))
    return hard


@pytest.mark.parametrize("limit", [4096], indirect=True)
def test_a_job_of_more_nodes_than_can_be_served_is_refused_with_both_numbers_and_the_way_out(limit: int) -> None:
    with pytest.raises(UsageError) as raised:
        check_descriptors((1024, 2048), print)

    assert str(raised.value) == (
        "the limit of open files on this host is 4096, which is enough for a store of 1020 nodes, but --nnodes asks for"
        " 1024; raise the hard limit to 8208 (ulimit -Hn, LimitNOFILE= of systemd), or use an etcd: --rdzv-endpoint"
        " etcd-host:2379"
    )


@pytest.mark.parametrize("limit", [4096], indirect=True)
def test_a_job_that_may_grow_beyond_what_can_be_served_is_told_so(limit: int) -> None:
    said: list[str] = []

    check_descriptors((2, 1020), said.append)
    check_descriptors((2, 1021), said.append)

    assert len(said) == 1
    assert "enough for a store of 1020 nodes, but --nnodes allows 1021: connections of further nodes may be" in said[0]


@pytest.mark.parametrize("limit", [resource.RLIM_INFINITY, 1 << 30], indirect=True)
def test_where_there_is_no_limit_any_job_is_served(limit: int) -> None:
    check_descriptors((100_000, 100_000), pytest.fail)

    assert agents_served() == 4096


def test_the_command_is_refused_before_anything_runs(tmp_path: Path) -> None:
    job = under(
        70, tmp_path, "--nnodes", "16", "--rdzv-endpoint", f"localhost:{free_ports(1)[0]}", "--no-python", "true"
    )

    with job:
        assert job.wait() == 2
    assert "the limit of open files on this host is 70, which is enough for a store of 13 nodes" in job.stderr
    assert "ELAUNCH_TOKEN" not in job.stderr


def test_a_store_for_a_team_says_how_many_nodes_it_can_serve(tmp_path: Path) -> None:
    with under(70, tmp_path, "store", "--listen", "127.0.0.1:0") as job:
        job.wait_for_output("this host's limit of open files allows 13 nodes at a time")


def under(open_files: int, folder: Path, *args: str) -> Job:
    return Job(folder, *args, prefix=("prlimit", f"--nofile={open_files}"))
