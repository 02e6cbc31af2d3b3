"""Whatever is typed, exported, written in a job file or set by a scheduler gives a plan, or one sentence."""

from __future__ import annotations

import re
from dataclasses import replace

import click
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elaunch.launcher.agent_config import agent_config
from elaunch.launcher.errors import SiteError, UsageError
from elaunch.launcher.host import HostResources
from elaunch.launcher.options.job_file import JobFile
from elaunch.launcher.options.job_file import parse as parse_file
from elaunch.launcher.options.job_file import read as read_file
from elaunch.launcher.options.options import Options, parse
from elaunch.launcher.options.table import TABLE
from elaunch.launcher.schedulers.defaults import concerning, settle
from elaunch.launcher.schedulers.detect import SCHEDULERS, detect
from elaunch.launcher.schedulers.facts import HOSTS_MAX, Cluster, expand, line
from elaunch.launcher.store.connect import how_to_join, words_for_others
from elaunch.launcher.store.locate import plan
from elaunch.rendezvous.rules.snapshot import Keys
from tests.fuzzing import NESTED, NUMBERS, TEXTS, WORDS, bounded
from tests.harness import REPOSITORY

HOST = HostResources(cpus=8, cores=4, gpus=0, python="/usr/bin/python3")
ODD = st.sampled_from(
    [
        "", " ", ":", ",", "=", "-", "--", "\n", "a\nb", "a=1,b=2", "1:2", "2:1", "1:" + "9" * 30, "9" * 5000,
        "[::1]:5", "[", "a:99999", "http://", "https://a:1,http://b:2", "0:3,1:1", "SIGTERM", "auto", "gpu", "1e308",
        "1e400", "-1", "inf", "\udcff", "join_timeout=1", "keep_alive_interval=1e308",
        "lease_ttl=" + "9" * 400, "a" * 9000,
    ]
)  # fmt: skip
VALUE = ODD | WORDS | NUMBERS


@st.composite
def options(draw: st.DrawFn) -> list[str]:
    """An option as people type it, whole or cut, with a value or none."""
    spec = draw(st.sampled_from(TABLE))
    name = draw(st.sampled_from(spec.names))
    name = name[: draw(st.integers(1, len(name)))] if draw(st.integers(0, 4)) == 0 else name
    if spec.short and draw(st.integers(0, 3)) == 0:
        return [f"-{spec.short}{draw(VALUE)}"]
    match 0 if spec.is_flag else draw(st.integers(0, 2)):
        case 0:
            return [f"--{name}"]
        case 1:
            return [f"--{name}={draw(VALUE)}"]
        case _:
            return [f"--{name}", draw(VALUE)]


VARIABLES = sorted({name for spec in TABLE for name in spec.variables} | {
    "ELAUNCH_TOKEN", "ELAUNCH_ENDPOINT", "ETCDCTL_ENDPOINTS", "ETCDCTL_USER", "ETCDCTL_PASSWORD", "ETCDCTL_CACERT",
    "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTHON_EXEC",
})  # fmt: skip
ARGV = st.builds(
    lambda several, rest: [word for each in several for word in each] + rest,
    st.lists(options(), max_size=5),
    st.sampled_from([["train.py"], ["-m", "pkg"], ["--", "-x"], [], ["--", "-x", "y"]]) | st.lists(WORDS, max_size=3),
)
ENVIRON = st.dictionaries(st.sampled_from(VARIABLES), VALUE, max_size=3)


def no_file(path: str) -> JobFile:
    raise UsageError(f"--config {path} does not exist")


def planned(options: Options, environ: dict[str, str], cluster: Cluster | None = None) -> None:
    """Everything that is decided from a command line before anything is started."""
    if cluster:
        cluster = concerning(options, cluster, environ)
        options = settle(options, cluster)
    found = plan(options, environ, lambda path: "0123456789abcdef", cluster)
    if options.run_id is None:
        options = replace(options, run_id="none")
    config = agent_config(options, found, environ, HOST)
    assert Keys(config.spec.run_id).root.isascii()
    if not found.plan.is_alone and found.plan.endpoints:
        assert how_to_join(words_for_others(options, found.plan), found.plan.endpoints[0], None, is_terminal=True)


@given(ARGV, ENVIRON)
def test_a_command_line_is_a_plan_or_a_sentence(argv: list[str], environ: dict[str, str]) -> None:
    with bounded():
        try:
            planned(parse(argv, environ, no_file), environ)
        except click.exceptions.Exit:
            pass
        except (UsageError, SiteError) as error:
            assert str(error)  # noqa: PT017


YAML = st.lists(
    st.sampled_from(
        [
            "nnodes: 2\n", "script: t.py\n", "args: [--lr, 0.1]\n", "module: true\n", "- ", "? ", ": ", "{",
            "}", "[", "]", "\n",
            "&a ", "*a", "!!int ", "!!python/object:os.system ", "%YAML 1." + "9" * 5000 + "\n---\n", '"\\UFFFFFFFF"',
            '"\\0"', '"\\ud800"', "'", '"', "|\n", ">\n", "\t", "  ", "#", "a", "rdzv-conf: ", "<<: *a\n",
            "---\n", "...\n", "\ufeff",
            "\x85", "\0", "run-id: ", "null", "~", "env: ", "token: x\n",
        ]
    )
    | TEXTS,
    max_size=10,
).map("".join)  # fmt: skip


@given(YAML)
@example(NESTED[:5000])
@example("&a [*a]")
@example("&a {*a : 1}")
def test_a_job_file_is_options_or_a_sentence(text: str) -> None:
    with bounded(cpu_s=5.0):
        try:
            found = parse_file(text, "job.yaml")
            planned(parse(["--config", "job.yaml", "t.py"], {}, lambda _: found), {})
        except (UsageError, SiteError) as error:
            assert str(error)  # noqa: PT017


SCHEDULER_VARIABLES = sorted(
    {
        *("CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "PET_NNODES", "PET_NODE_RANK", "PET_RDZV_ENDPOINT", "PMIX_RANK"),
        *(
            name
            for file in REPOSITORY.joinpath("launcher/schedulers").glob("*.py")
            for name in re.findall(r'"([A-Z]{2,}_\w+)"', file.read_text())
        ),
    }
)
LISTS = st.lists(
    st.sampled_from(
        [
            "n", "node", "[0-3]", "[", "]", "[0-99999999999]", "[0-99999]", "[000-099,5]", "[5-1]", "[1-]", ",", "-",
            "x" * 200, "[" + "0" * 5000 + "1-2]", "[" + "0-99999," * 50 + "1]", "\u0663",
        ]
    ),
    max_size=8,
).map("".join)  # fmt: skip
COUNTS = st.sampled_from(
    ["1", "2", "2(x3),1", "2(x999999999)", "999999999(x999999999)", "0", "1(x0)", "gpu:a100:2", "a100:2"]
)
SAID = (
    VALUE | LISTS | COUNTS | st.sampled_from(["host0 2 host1 2", "host0 host0 host1", "x-0.x.team.svc", "12[3].server"])
)


@st.composite
def environments(draw: st.DrawFn) -> tuple[str, dict[str, str]]:
    """A scheduler, and all its variables that are drawn, most with a small number."""
    name = draw(st.sampled_from(sorted(SCHEDULERS)))
    wanted = draw(st.sets(st.sampled_from(SCHEDULER_VARIABLES)))
    return name, {
        variable: draw(SAID) if draw(st.integers(0, 3)) == 0 else draw(st.sampled_from(["0", "1", "2", "4"]))
        for variable in sorted(wanted)
    }


@given(environments(), WORDS | st.sampled_from(["host1", "x-1", "lws-0-1"]), TEXTS | st.just("host0\nhost1\n"))
def test_what_a_scheduler_says_is_a_cluster_or_a_sentence(
    said: tuple[str, dict[str, str]], hostname: str, file: str
) -> None:
    name, environ = said
    with bounded():
        try:
            found = detect(name, environ, hostname, lambda _: file)
            assert found
            assert "\n" not in (found.run_id or "")
            assert line(found)
            options = parse(["t.py"], environ, no_file)
            planned(options, environ, found)
        except (UsageError, SiteError) as error:
            assert str(error)  # noqa: PT017


@given(LISTS)
@example("n" + "[0-99999]" * 20_000)
@example("n[" + "0-99999," * 10_000 + "1]")
@example("n[0-99999999999]")
@example("n[" + "0" * 100_000 + "1-99999]")
@example("x" * 100_000 + "[0-99999]")
def test_a_list_of_hosts_is_no_longer_than_an_allocation(text: str) -> None:
    with bounded(memory_bytes=128 << 20):
        try:
            found = expand(text)
        except ValueError:
            return
        assert 0 < len(found) <= HOSTS_MAX


# What fuzzing and reading found, by name.


@pytest.mark.parametrize("path", ["/dev/zero", "/dev", "/nowhere", "a\0b"])
def test_a_job_file_that_is_no_file_is_a_sentence(path: str) -> None:
    with bounded(), pytest.raises(UsageError, match="--config"):
        read_file(path)
