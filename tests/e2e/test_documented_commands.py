"""Commands of README.md and docs/*.md do what the page says, and every elaunch command has options that are read."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from elaunch.launcher.options.options import parse
from tests.etcd import Etcd, binary
from tests.harness import REPOSITORY, Job, environment, script, slow
from tests.standin import WITH_TORCH

PAGES = (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md")))
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# A comment behind a command is set off by two blanks.
_COMMENT = re.compile(r"\s{2,}# .*$")


@dataclass(frozen=True)
class Block:
    """The commands of one fence, in order, without comments."""

    page: str
    commands: tuple[str, ...]


def fences(page: str) -> Iterator[tuple[str, str]]:
    """The language and the text of each fence of a page."""
    yield from ((found[1], found[2]) for found in _FENCE.finditer(page))


def blocks() -> list[Block]:
    """All fences with commands, of all pages."""
    found = []
    for path in PAGES:
        for language, text in fences(path.read_text()):
            if language in ("sh", "console"):
                found.append(Block(path.name, tuple(_commands(language, text))))
    return found


def _commands(language: str, text: str) -> Iterator[str]:
    for line in text.replace("\\\n", " ").splitlines():
        if language == "console" and not line.startswith("$ "):
            continue
        if command := _COMMENT.sub("", line.removeprefix("$ ")).strip():
            yield command


pytestmark = pytest.mark.usefixtures("without_torch")

TRAIN = """
import os, pathlib, sys, time
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
while pathlib.Path("hold").exists():
    time.sleep(0.05)
"""

# Commands that run as they stand, in a folder with train.py and script.py, with words of their output.
HERE = {
    "elaunch train.py": "rank 0 of 1",
    'elaunch train.py; echo "exit code $?"': "exit code 0",
    "elaunch --nproc-per-node 8 train.py": "rank 7 of 8",
    "elaunch --nproc-per-node 2 train.py": "rank 1 of 2",
    "elaunch --nproc-per-node 3 script.py": "rank 2 of 3",
    "elaunch --no-preload --nproc-per-node 2 train.py": "rank 1 of 2",
    "elaunch --role ps=1,trainer=3 train.py": "rank 3 of 4",
    "elaunch --max-restarts 0 --nproc-per-node 1 train.py": "rank 0 of 1",
    "OMP_NUM_THREADS=1 elaunch --nproc-per-node 1 --max-restarts 0 train.py": "rank 0 of 1",
    "elaunch --on-hang restart --log-dir logs --nproc-per-node 2 train.py": "rank 1 of 2",
    "elaunch --hang-timeout 120 --nproc-per-node 2 train.py": "rank 1 of 2",
    "elaunch --nproc-per-node 2 --log-dir logs train.py": "; output in ",
    "elaunch --log-format json --nproc-per-node 2 train.py": '"stream": "stdout", "text": "rank 1 of 2"',
    "elaunch report logs": "succeeded after",
    "elaunch report --json logs": '"outcome": "succeeded"',
    "cat logs/latest/timeline.jsonl": '"event": "sealed"',
    "elaunch --nproc-per-node 1 --no-python env": "MASTER_ADDR=127.0.0.1",
    "elaunch --nproc-per-node 2 --no-python sh -c 'CUDA_VISIBLE_DEVICES=$LOCAL_RANK exec python train.py \"$@\"' sh"
    " --lr 3": "1 of 2",
    "elaunch --help": "Exit codes:",
    "(umask 077; openssl rand -hex 16 > ~/job.token)": "",
    "_ELAUNCH_COMPLETE=bash_source elaunch > ~/.elaunch-completion.bash": "",
}
# Commands that run with --dry-run added, so that no scheduler gets a job.
DRY = {
    "elaunch --hosts node0,node1:4 train.py": "elaunch --nproc-per-node 4 --scheduler hosts train.py",
    "elaunch submit slurm --nodes 4 --gpus 8 --time 24:00:00 train.py": "#SBATCH --nodes=4",
    "elaunch submit slurm --nodes 2 --gpus 8 --time 24:00:00 train.py": "#SBATCH --nodes=2",
    "elaunch submit slurm --nodes 3:4 --gpus 8 --partition h100 --account me train.py": "#SBATCH --nodes=3-4",
    "elaunch submit slurm --nodes 4 --gpus 8 --time 24:00:00 --dry-run train.py --lr 0.1": "train.py --lr 0.1",
    "elaunch submit k8s --nodes 4 --gpus 8 --image you/train:1 train.py": "image: you/train:1",
    "elaunch submit k8s --image registry/you/train:1 --nodes 2 --gpus 8 train.py --lr 3e-4": "completions: 2",
    "elaunch submit k8s --writable-image --image registry/you/train:1 train.py": "readOnlyRootFilesystem: false",
    "elaunch submit k8s --image registry/you/train@sha256:… train.py": "image: registry/you/train@sha256:",
}
# Commands that run against an etcd of the test's own, each block in one shell.
ETCD = {
    "etcdctl endpoint status --cluster --write-out=table": "IS LEADER",
    "etcdctl alarm list": "",
    "revision=$(etcdctl endpoint status --write-out=json"
    " | grep -o '\"revision\":[0-9]*' | head -n 1 | cut -d: -f2)": "",
    "etcdctl compact $revision": "compacted revision",
    "etcdctl defrag --cluster": "Finished defragmenting",
    "etcdctl alarm disarm": "",
    "etcdctl get --prefix --keys-only /elaunch/night/": "/elaunch/night/ctl/spec",
    "etcdctl get --prefix /elaunch/night/": "/elaunch/night/ctl/spec",
    "etcdctl role add vision": "Role vision created",
    "etcdctl role grant-permission vision readwrite /teams/vision/ --prefix=true": "Role vision updated",
    "etcdctl user add vision": "User vision created",
    "etcdctl user grant-role vision vision": "Role vision is granted to user vision",
}


def _parts(table: dict[str, str]) -> list[tuple[str, ...]]:
    """The commands of each block that are in the table, for one shell. A list that begins another list is left out."""
    parts = dict.fromkeys(part for block in blocks() if (part := tuple(c for c in block.commands if c in table)))
    return [part for part in parts if not any(part == other[: len(part)] for other in parts if other != part)]


def shell(folder: Path, commands: tuple[str, ...], env: dict[str, str] | None = None, typed: str = "") -> str:
    """Run the commands by bash in `folder`, which is also the home. Returns their output."""
    script(folder, TRAIN)
    script(folder, TRAIN, "script.py")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    # Interpreters that preload nothing start sooner. Other tests cover preloading.
    settings = {"PATH": path, "HOME": str(folder), "PET_NO_PRELOAD": "1", **(env or {})}
    ended = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(commands)],
        cwd=folder,
        env=environment(settings),
        input=typed,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


# Blocks of one command that runs a job. The quick suite runs two of them, and reads the options of all.
JOBS = [part for part in _parts(HERE) if len(part) == 1 and HERE[part[0]].startswith("rank ")]
QUICK = ("elaunch train.py", "elaunch --role ps=1,trainer=3 train.py")
PLAIN = re.compile(r"(?:\w+=\S+ )*elaunch (?:--[^|;&$]*)?(?:train|script)\.py[^|;&$]*")


@pytest.mark.parametrize("command", sorted({c for block in blocks() for c in block.commands if PLAIN.fullmatch(c)}))
def test_the_options_of_a_command_are_read(command: str) -> None:
    variables, _, words = command.rpartition("elaunch ")

    options = parse(shlex.split(words), dict(word.split("=", 1) for word in variables.split()))

    assert options.target in ("train.py", "script.py")


@pytest.mark.parametrize(
    "commands",
    [slow(part) if part in JOBS and part[0] not in QUICK else part for part in _parts(HERE)],
    ids=" && ".join,
)
def test_a_command_of_a_page_has_the_documented_effect(tmp_path: Path, commands: tuple[str, ...]) -> None:
    output = shell(tmp_path, commands)

    for command in commands:
        assert HERE[command] in output


def test_what_is_submitted_is_shown_by_a_dry_run(tmp_path: Path) -> None:
    for command, words in DRY.items():
        shown = command if "--dry-run" in command else command.replace("train.py", "--dry-run train.py")
        # A digest is too long for a page.
        assert words in shell(tmp_path, (shown.replace("sha256:…", f"sha256:{'0' * 64}"),)), command


def test_the_commands_for_an_etcd_work_on_one(tmp_path: Path) -> None:
    with Etcd() as etcd:
        settings = {
            "ETCDCTL_ENDPOINTS": etcd.endpoints,
            # Of its own, it gives up after 5 s.
            "ETCDCTL_COMMAND_TIMEOUT": "120s",
            "PATH": f"{Path(binary('3.5', 'etcdctl')).parent}:/usr/bin:/bin",
        }
        job = ("--nnodes", "1:2", "--rdzv-conf", "last_call_timeout=0.1", "--run-id", "night", "--rdzv-endpoint")
        with Job(tmp_path, *job, etcd.endpoints, "--no-preload", str(script(tmp_path, TRAIN))) as night:
            assert night.wait() == 0, night.output
        for commands in _parts(ETCD):
            output = shell(tmp_path, commands, settings, typed="secret\nsecret\n")
            for command in commands:
                assert ETCD[command] in output, output


def test_a_job_file_of_the_documentation_is_read(tmp_path: Path) -> None:
    (text,) = [text for language, text in fences((REPOSITORY / "docs" / "nodes.md").read_text()) if language == "yaml"]
    (tmp_path / "job.yaml").write_text(text.replace("nnodes: 2", "nnodes: 1").replace("node0", "localhost"))

    assert "rank 0 of 1" in shell(tmp_path, ("elaunch --config job.yaml",))


@pytest.mark.slow
def test_the_first_training_of_the_documentation(tmp_path: Path) -> None:
    """This test is slow: it takes half a minute on two idle cores."""
    arguments = ("--nproc-per-node", "2", "-m", "elaunch.trainer", "--out", "runs/first")
    with Job(tmp_path, *arguments, env=WITH_TORCH) as job:
        assert job.wait(900) == 0, job.output

    assert (tmp_path / "runs" / "first" / "result.json").exists()


@pytest.mark.slow
def test_the_picture_of_the_readme_is_recorded_again(tmp_path: Path) -> None:
    """This test is slow: it runs a whole job with torch. The picture itself is made by hand now and then."""
    pytest.importorskip("pyte", reason="pyte is not installed: pip install '.[docs]'")
    picture = tmp_path / "lost-rank.svg"

    command = (sys.executable, "docs/record/record.py", str(picture))
    subprocess.run(command, cwd=REPOSITORY, env=environment(WITH_TORCH), check=True, timeout=300)

    assert "killed by SIGKILL in generation 0" in picture.read_text()
    assert "goes on after step" in picture.read_text()
