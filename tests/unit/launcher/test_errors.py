"""Sentences for errors that end elaunch."""

from __future__ import annotations

import click
import pytest

from elaunch.launcher.errors import UsageError
from elaunch.launcher.options.command_line import Reading
from elaunch.launcher.options.commands import ELAUNCH


def told(*words: str) -> str:
    """The sentence by which a command line is refused."""
    with (
        pytest.raises((UsageError, click.UsageError)) as refused,
        ELAUNCH.make_context("elaunch", [*words], obj=Reading()) as ctx,
    ):
        ELAUNCH.invoke(ctx)
    return str(refused.value)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("", "no program to run; "),
        ("run", "no program to run; "),
        ("rehearse", "no program to run; "),
        ("submit", "Missing command"),
        ("submit pbs", "No such command"),
        ("submit slurm", "no program to run; "),
        ("submit k8s", "--image is missing: "),
        ("submit k8s --image i", "no program to run; "),
        ("report", "report: no folder is given; "),
        ("stop", "stop needs the job's name or the pid of its elaunch"),
        ("restart", "restart needs the job's name or the pid of its elaunch"),
        ("status a b", "status takes one job, and a b are 2 words; start a script called status with elaunch ./status"),
        ("stacks x --run-id y", "stacks x contradicts --run-id y; "),
        ("status --nproc-per-node 2", "No such option"),
        ("submit slurm --nods 2", "No such option"),
    ],
)
def test_a_command_without_its_arguments_or_with_wrong_ones_is_a_usage_error(words: str, sentence: str) -> None:
    assert told(*words.split()).startswith(sentence)
