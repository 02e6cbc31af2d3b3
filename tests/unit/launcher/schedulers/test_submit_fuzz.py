"""Texts that go into a batch script, a manifest or an invitation arrive as typed, or are refused."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from elaunch.launcher.errors import UsageError
from elaunch.launcher.schedulers import submit_kubernetes as kubernetes
from tests.commands import read
from tests.fuzzing import WORDS
from tests.harness import RUN_LIMIT_S
from tests.unit.launcher.schedulers.test_submit_slurm import written

NASTY = st.sampled_from(
    [
        "\n", "\r\n", "a\n#SBATCH --uid=0\nrm -rf ~", "'", '"', "\\", "$(touch pwned)", "`touch pwned`", "$HOME",
        "${IFS}", "-", "--", "-x", " ", "", "\t", "#", ";", "&", "|", "*", "~", "!", "a'b\"c", "\udcff", "\x1b[2J",
        "\x7f", "日本", "\u2028", "\x85", "\\n", "$'\\n'", "$(PET_NNODES)", "$$(PET_NNODES)", "$(ELAUNCH_TOKEN)",
        "{a: b}", "- a", "yes", "null",
    ]
)  # fmt: skip
ARGUMENTS = st.lists(NASTY | WORDS | st.builds(lambda a, b: a + b, NASTY, WORDS), max_size=6)
PROGRAMS = st.builds(
    lambda word, name: f"./{word.replace('/', '_')}{name}", NASTY | WORDS, st.sampled_from([".py", ""])
)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with commands that show their arguments: srun its last ones, elaunch all of them."""
    folder = tmp_path_factory.mktemp("shelf")
    for name, text in {
        "srun": 'while [ "$1" != elaunch ]; do shift; done; exec "$@"',
        "elaunch": 'printf \'%s\\0\' "$@" > "$SHOWN"',
    }.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return folder


def called_with(script: str, shelf: Path) -> list[str]:
    """The arguments with which a real bash calls the script's elaunch."""
    shown = shelf / "shown"
    env = {"PATH": f"{shelf}:/usr/bin:/bin", "SHOWN": str(shown), "SLURM_JOB_ID": "7", "HOME": str(shelf)}
    file = shelf / "batch.sh"
    file.write_bytes(os.fsencode(script))
    subprocess.run(["bash", str(file)], env=env, check=True, cwd=shelf, capture_output=True, timeout=RUN_LIMIT_S)
    assert not (shelf / "pwned").exists()
    return [os.fsdecode(word) for word in shown.read_bytes().split(b"\0")[:-1]]


@given(program=PROGRAMS, arguments=ARGUMENTS)
@example(program="./a\nrm -rf ~.py", arguments=["a\nb"])
def test_a_batch_script_calls_elaunch_with_the_very_arguments(shelf: Path, program: str, arguments: list[str]) -> None:
    command = (program, *arguments)
    try:
        text = written(*command)
    except UsageError:
        return

    assert called_with(text, shelf) == list(command)
    # sbatch reads its options up to the first line that is no comment.
    head = text[: text.index("\nsrun ")]
    assert head.count("#SBATCH ") == written("t.py").count("#SBATCH ")
    assert all(line.isprintable() for line in head.split("\n"))


def expanded(text: str, variables: dict[str, str]) -> str:
    """As Kubernetes does it (third_party/forked/golang/expansion/expand.go)."""
    found, at = "", 0
    while at < len(text):
        if text[at] != "$" or at + 1 == len(text):
            found, at = found + text[at], at + 1
        elif text[at + 1] == "$":
            found, at = found + "$", at + 2
        elif text[at + 1] == "(" and (end := text.find(")", at)) > 0:
            name = text[at + 2 : end]
            found, at = found + variables.get(name, f"$({name})"), end + 1
        else:
            found, at = found + text[at : at + 2], at + 2
    return found


@given(arguments=ARGUMENTS, variable=NASTY | WORDS)
@example(arguments=["$(ELAUNCH_TOKEN)", "$$(PET_NNODES)", "a\nb: c"], variable="$(ELAUNCH_TOKEN)")
def test_a_pod_calls_elaunch_with_the_very_arguments(arguments: list[str], variable: str) -> None:
    argv = ("--image", "i", f"--env=A={variable}", "--nodes=2", "t.py", *arguments)
    try:
        job = kubernetes.job_of(read(kubernetes.COMMAND, *argv), "123456")
    except UsageError as error:
        assert "UTF-8" in str(error)  # noqa: PT017
        return

    made: Any = yaml.safe_load(kubernetes.as_yaml(kubernetes.objects(job)[-1:]))

    container = made["spec"]["template"]["spec"]["containers"][0]
    secrets = {"PET_NNODES": "2", "ELAUNCH_TOKEN": "secret"}
    assert [expanded(word, secrets) for word in container["args"]] == ["t.py", *arguments]
    assert expanded(container["env"][-1]["value"], secrets) == variable
