"""A job's keys in a real store: their size, however much the programs print, and the keys that stay after the end."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from elaunch.rendezvous.codec import decode
from elaunch.rendezvous.types import Failure, Outcome, OutcomeKind
from tests.etcd import VERSIONS, Etcd
from tests.faults.processes import LIGHT
from tests.harness import DEADLINE_S, Job, slow, wait_for
from tests.served import ServerProcess
from tests.standin import WITHOUT_TORCH

# The program makes the text, which is too long for an argument. With `lines` it is the text of a load_state_dict error.
LOUD = """
import os, sys
size, what, generations = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
if os.environ["RANK"] == "1" and int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < generations:
    if what == "line":
        raise RuntimeError("x" * size)
    keys = [f'"module.layers.{n}.weight", ' for n in range(size // 30)]
    raise RuntimeError("Error(s) in loading state_dict for Net: missing key(s)\\n" + "\\n".join(keys))
"""
MB = 1_000_000
# Limits from docs/operations.md. First the keys of a job with one small failure, after its end.
KEYS_AFTER_END, BYTES_AFTER_END = 5, 1600
# The keys of a job of one node while its agent lives, after the first failure.
KEYS_OF_A_JOB, BYTES_OF_A_JOB = 7, 1700
# The keys of a job whose agents were killed.
KEYS_OF_THE_DEAD = 4


@contextmanager
def stores(which: str, tmp_path: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """An endpoint, and the options that its user types."""
    if which == "served":
        with ServerProcess("one-word-for-tests-only") as server:
            token = tmp_path / "token"
            token.write_text(server.token)
            yield f"127.0.0.1:{server.port}", ("--token-file", str(token))
    else:
        with Etcd(which) as etcd:
            yield etcd.endpoints, ()


@pytest.mark.parametrize(
    ("store", "size", "what"),
    [
        ("3.5", 8 * MB, "line"),
        *(slow(store, size, "line") for store in (*VERSIONS, "served") for size in (1_600_000, 3 * MB)),
        *(slow(store, 8 * MB, "line") for store in ("3.4", "served")),
        *(slow(store, 1_600_000, "lines") for store in (*VERSIONS, "served")),
    ],
)
def test_an_error_of_megabytes_costs_one_restart_and_is_told_in_a_report_that_can_be_read(
    store: str, size: int, what: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(LOUD)
    with stores(store, tmp_path) as (endpoint, options), ExitStack() as stack:
        words = ("--nnodes", "2", "--rdzv-endpoint", endpoint, *options, "--nproc-per-node", "1", "--max-restarts", "1")
        words += ("--log-dir", str(tmp_path / "logs"), "--preload", "json", "train.py", str(size), what, "2")
        # To files: the console would have all of it.
        jobs = [stack.enter_context(Job(tmp_path, "--redirects", "3", *words, env=WITHOUT_TORCH)) for _ in range(2)]

        assert [job.wait(DEADLINE_S) for job in jobs] == [1, 1]

    for job in jobs:
        assert "generation 1: 2 workers on 2 nodes (restart 1 of 1, the last one)" in job.output
        report = job.output[job.output.index("train.py FAILED") :]
        assert "raised RuntimeError: " in report
        assert "Why it stopped: it failed the same way twice in a row" in report
        assert "left out here" in report
        assert len(job.output) < 32 << 10
        assert max(map(len, job.output.splitlines())) < 4 << 10
        found = re.search(r"in full   : (\S+/error\.json) on ", report)
        assert found
        # Both nodes of this test share a disk, where the whole text is.
        assert len(json.loads(Path(found[1]).read_text())["message"]["message"]) > size * 0.9


def test_an_etcd_that_takes_small_requests_only_gets_shorter_texts_and_the_job_goes_on(tmp_path: Path) -> None:
    """A site may set its own limit. A text that is too large for it is cut, and nothing waits for the store."""
    (tmp_path / "train.py").write_text(LOUD)
    with Etcd("3.5", options=("--max-request-bytes=4000",)) as etcd, ExitStack() as stack:
        words = ("--nnodes", "2", "--rdzv-endpoint", etcd.endpoints, "--nproc-per-node", "1", "--max-restarts", "1")
        words += (*LIGHT, "train.py", "60000", "lines", "1")
        jobs = [stack.enter_context(Job(tmp_path, *words, env=WITHOUT_TORCH)) for _ in range(2)]

        assert [job.wait(DEADLINE_S) for job in jobs] == [0, 0], "\n".join(job.output for job in jobs)

        assert all("generation 1: 2 workers on 2 nodes (restart 1 of 1" in job.output for job in jobs)
        assert "refuses" not in jobs[0].output + jobs[1].output
        records = json.loads(etcd.ctl("get", "--prefix", "/elaunch/none/failures/", "-w", "json"))["kvs"]
        sizes = [len(b64decode(kv["value"])) for kv in records]
        assert max(sizes) < 4000
        assert any(decode(Failure, b64decode(kv["value"]).decode()).is_cut for kv in records)


FAILS_ONCE = 'test "$TORCHELASTIC_RESTART_COUNT" = 1 || { echo some words >&2; exit 7; }'


def job_words(etcd: Etcd, name: str, *conf: str) -> tuple[str, ...]:
    """One node of a job that might have two, so that it needs the store."""
    settings = ",".join(("last_call_timeout=0", *conf))
    words = ("--nnodes", "1:2", "--rdzv-endpoint", etcd.endpoints, "--rdzv-id", name, "--rdzv-conf", settings)
    return (*words, *LIGHT, "--nproc-per-node", "1", "--no-python", "sh", "-c")


def left(etcd: Etcd, name: str) -> dict[str, int]:
    """The job's keys, and how many bytes each has with its value."""
    found = json.loads(etcd.ctl("get", "--prefix", f"/elaunch/{name}/", "-w", "json")).get("kvs", [])
    assert all(kv.get("lease") for kv in found), "a key without a lease stays for ever"
    return {b64decode(kv["key"]).decode(): len(b64decode(kv["key"]) + b64decode(kv["value"])) for kv in found}


def test_a_job_that_has_ended_leaves_its_outcome_and_few_bytes_under_a_lease_of_days(tmp_path: Path) -> None:
    with Etcd("3.4") as etcd, ExitStack() as stack:
        names = [f"small-{number}" for number in range(2)]
        # A longer lease allows each request more time. An agent's lease stays where etcd is too slow to revoke it.
        jobs = [
            stack.enter_context(Job(tmp_path, *job_words(etcd, name, "lease_ttl=60"), FAILS_ONCE, env=WITHOUT_TORCH))
            for name in names
        ]
        assert [job.wait() for job in jobs] == [0, 0], "\n".join(job.output for job in jobs)

        for name in names:
            keys = left(etcd, name)
            kinds = {key.removeprefix(f"/elaunch/{name}/").split("/0")[0] for key in keys}
            assert kinds == {"ctl/spec", "ctl/generation", "ctl/table", "ctl/ended", "failures"}
            assert (len(keys), sum(keys.values()) < BYTES_AFTER_END) == (KEYS_AFTER_END, True), keys
            ended = etcd.ctl("get", "--print-value-only", f"/elaunch/{name}/ctl/ended")
            assert decode(Outcome, ended).kind is OutcomeKind.SUCCEEDED
        leases = etcd.ctl("lease", "list").split()[3:]
        assert len(leases) == 2, "one for each job, and none of an agent"
        week_s = 7 * 24 * 3600
        for lease in leases:
            told = json.loads(etcd.ctl("lease", "timetolive", lease, "-w", "json"))
            assert (told["granted-ttl"], week_s - 60 < told["ttl"] <= week_s) == (week_s, True)


@pytest.mark.slow
def test_of_jobs_whose_agents_were_all_killed_nothing_stays(tmp_path: Path) -> None:
    with Etcd("3.5") as etcd, ExitStack() as stack:
        names = [f"killed-{number}" for number in range(2)]
        program = f"{FAILS_ONCE}; echo runs; exec sleep 600"
        jobs = []
        for name in names:
            words = job_words(etcd, name, "lease_ttl=2", "keys_ttl=8")
            jobs.append(stack.enter_context(Job(tmp_path, *words, program, env=WITHOUT_TORCH)))
        for job in jobs:
            job.wait_for_output("^runs")
        for name in names:
            keys = left(etcd, name)
            assert (len(keys), sum(keys.values()) < BYTES_OF_A_JOB) == (KEYS_OF_A_JOB, True), keys

        for job in jobs:
            job.process.kill()

        for name in names:
            held = partial(left, etcd, name)
            wait_for(lambda held=held: len(held()) == KEYS_OF_THE_DEAD, "the leases have ended", every_s=0.1)
        for name in names:
            wait_for(lambda name=name: not left(etcd, name), f"the keys of {name} are gone", every_s=0.2)
        assert etcd.ctl("lease", "list").split() == ["found", "0", "leases"]


@pytest.mark.slow
def test_a_job_that_was_killed_goes_on_by_its_old_name_before_and_after_its_keys_are_gone(tmp_path: Path) -> None:
    with Etcd("3.4") as etcd, ExitStack() as stack:
        words = job_words(etcd, "again", "lease_ttl=2", "keys_ttl=8")
        first = stack.enter_context(Job(tmp_path, *words, "echo runs; exec sleep 600"))
        first.wait_for_output("^runs")
        first.process.kill()

        second = stack.enter_context(Job(tmp_path, *words, "true"))

        assert second.wait() == 0, second.output
        assert "generation 1: 1 worker" in second.output, "numbers go on while the old run's keys are there"
        wait_for(lambda: not left(etcd, "again"), "the keys are gone")
        third = stack.enter_context(Job(tmp_path, *words, "true"))
        assert third.wait() == 0, third.output
        assert "generation 0: 1 worker" in third.output
