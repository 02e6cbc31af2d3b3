"""A job's keys in a real store: their size, however much the programs print, and the keys that stay after the end."""

from __future__ import annotations

import json
from base64 import b64decode
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from tests.etcd import Etcd
from tests.harness import LIGHT, Job, wait_for
from tests.standin import WITHOUT_TORCH

# Limits from docs/operations.md. First the keys of a job with one small failure, after its end.
KEYS_AFTER_END, BYTES_AFTER_END = 5, 1600
# The keys of a job of one node while its agent lives, after the first failure.
KEYS_OF_A_JOB, BYTES_OF_A_JOB = 7, 1800
# The keys of a job whose agents were killed.
KEYS_OF_THE_DEAD = 4


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
