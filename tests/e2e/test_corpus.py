"""The golden corpus: scripts that fail, and what the report says about each, and what it must not say.

An entry is a script in `corpus/`, or a folder with train.py and what it needs. The comments at its top say what is
expected:

    # headline: a pattern for the report's first sentence; it begins with the rank that is to be named
    # next: a pattern for the next step; `none` if there must be none
    # not: a pattern that nothing on stderr may have (several lines are possible)
    # why: a pattern for why the job stopped
    # lines: 16           the report has no more
    # max-restarts: 3     0 without this line
    # workers: 2          workers on each node; 1 without this line
    # nodes: 2            agents, on loopback
    # options: --preload torch      instead of --no-preload
    # script: --lr 0.1    arguments of the script
    # command: sh -c      a command in place of the script (--no-python)
    # disk: 64k           the file system `disk` has no more; shm: 1m is /dev/shm
    # slow                only in the slow suite
    # xfail: why          it is known to fail

Other comments there are for people.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.harness import RUN_LIMIT_S, Job, free_ports
from tests.standin import WITH_TORCH

pytestmark = pytest.mark.usefixtures("without_torch")

CORPUS = Path(__file__).with_name("corpus")
KEYS = frozenset(
    (
        "headline",
        "next",
        "not",
        "workers",
        "nodes",
        "options",
        "script",
        "command",
        "disk",
        "shm",
        "why",
        "lines",
        "xfail",
        "max-restarts",
    )
)
# The report on a program that refuses its own arguments.
SHORT = r"^elaunch: train\.py FAILED on \S+: (rank .*)$"
# Whatever the entry: no traceback or frame of elaunch's own, and no unfilled template.
NEVER = (r'File "[^"]*/(?:elaunch|agent|launcher|rendezvous)/', r"^Next step: .*[^$]\{\w+\}", r"elaunch: .*Traceback")


@dataclass
class Expected:
    """What an entry's comments say."""

    headline: str = ""
    next: str = ""
    never: list[str] = field(default_factory=list)
    values: dict[str, str] = field(default_factory=dict)
    is_slow: bool = False


def source(entry: Path) -> Path:
    return entry / "train.py" if entry.is_dir() else entry


def expected(entry: Path) -> Expected:
    found = Expected()
    for line in source(entry).read_text().splitlines():
        if not line.startswith("#"):
            break
        key, _, value = line[1:].strip().partition(": ")
        if key == "slow":
            found.is_slow = True
        elif key == "not":
            found.never.append(value)
        elif key in KEYS:
            found.values[key] = value
    found.headline, found.next = found.values["headline"], found.values["next"]
    return found


def entries() -> list[pytest.ParameterSet]:
    found: list[pytest.ParameterSet] = []
    for entry in sorted(CORPUS.iterdir()):
        if entry.name == "__pycache__":
            continue
        says = expected(entry)
        marks = [pytest.mark.slow] if says.is_slow else []
        if reason := says.values.get("xfail"):
            marks.append(pytest.mark.xfail(reason=reason, strict=True))
        found.append(pytest.param(entry, marks=marks, id=entry.stem))
    return found


@pytest.mark.parametrize("entry", entries())
def test_the_report_names_the_cause_and_the_next_step_and_nothing_else(entry: Path, tmp_path: Path) -> None:
    says = expected(entry)

    stderrs = run(entry, says, tmp_path)

    for stderr in stderrs:
        headline, next_step = verdict(stderr)
        assert re.search(says.headline, headline), stderr
        if says.next == "none":
            assert next_step == "", stderr
        else:
            assert re.search(says.next, next_step), stderr
        if not re.search(SHORT, stderr, re.MULTILINE) or "why" in says.values:
            assert re.search(f"^Why it stopped: .*{says.values.get('why', '')}", stderr, re.MULTILINE), stderr
        assert len(stderr[stderr.rindex(" FAILED") :].splitlines()) <= int(says.values.get("lines", "1000")), stderr
        for pattern in (*says.never, *NEVER):
            assert not re.search(pattern, stderr, re.MULTILINE), f"{pattern}\n{stderr}"
    assert len({verdict(stderr) for stderr in stderrs}) == 1, "the nodes disagree"


def verdict(stderr: str) -> tuple[str, str]:
    """The report's first sentence and its next step."""
    report = re.findall(r"^={40,}\n.* FAILED\n(.*)\n(?:.*\n)*?={40,}$", stderr, re.MULTILINE)
    short = re.findall(SHORT, stderr, re.MULTILINE)
    assert len(report) + len(short) == 1, stderr
    next_step = re.findall(r"^Next step: (.*)$", stderr, re.MULTILINE)
    assert len(next_step) <= 1, stderr
    assert stderr.count("Root Cause") == len(report)
    return [*report, *short][0], "".join(next_step)


def run(entry: Path, says: Expected, folder: Path) -> list[str]:
    """Run the entry to its end. Returns each agent's stderr."""
    place = folder / "job"
    if entry.is_dir():
        shutil.copytree(entry, place, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        place.mkdir()
        shutil.copy(entry, place / "train.py")
    values = says.values
    nodes = int(values.get("nodes", "1"))
    words = [*shlex.split(values.get("options", "--no-preload")), "--nproc-per-node", values.get("workers", "1")]
    words += ["--max-restarts", values.get("max-restarts", "0"), "--stop-grace", "1"]
    if nodes > 1:
        words += ["--nnodes", str(nodes), "--rdzv-endpoint", f"localhost:{free_ports(1)[0]}"]
    program = [*("--no-python",), *shlex.split(values["command"])] if "command" in values else ["train.py"]
    with ExitStack() as stack:
        prefix = within(place, values)
        command = [*words, *program, *shlex.split(values.get("script", ""))]
        torch = WITH_TORCH if entry.stem.startswith("torch_") else {}
        env = {"TMPDIR": str(folder), **torch}
        jobs = [stack.enter_context(Job(place, *command, env=env, prefix=prefix)) for _ in range(nodes)]
        codes = [job.wait() for job in jobs]
    assert codes == [1] * nodes, "\n".join(job.output for job in jobs)
    return [job.stderr for job in jobs]


def within(place: Path, values: dict[str, str]) -> Sequence[str]:
    """The words before a command that give it a small disk or /dev/shm of its own."""
    mounts = [(str(place / "disk"), values.get("disk")), ("/dev/shm", values.get("shm"))]
    wanted = [(where, size) for where, size in mounts if size]
    if not wanted:
        return ()
    (place / "disk").mkdir()
    if subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True, timeout=RUN_LIMIT_S).returncode:
        pytest.skip("this user may make no mount namespace")
    lines = [f"mount -t tmpfs -o size={size} tmpfs {shlex.quote(where)}" for where, size in wanted]
    return ("unshare", "--mount", "sh", "-c", " && ".join([*lines, 'exec "$@"']), "sh")
