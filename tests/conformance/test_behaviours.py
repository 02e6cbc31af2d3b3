"""The list is complete, and each trial of it ends as expected: under elaunch, and under torchrun (slow)."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.behaviours import LIST
from tests.conformance.page import table
from tests.conformance.trial import ELAUNCH, TORCHRUN, Trial, check, run
from tests.harness import REPOSITORY

COUNT = 52


def trials() -> list[Any]:
    """Each trial for each launcher. The fast suite has those of elaunch that no other test proves."""
    numbers: dict[int, list[int]] = defaultdict(list)
    found: dict[int, Trial] = {}
    unproved: set[int] = set()
    for behaviour in LIST:
        for trial in behaviour.trials:
            found[id(trial)] = trial
            numbers[id(trial)].append(behaviour.number)
            unproved |= set() if behaviour.proofs else {id(trial)}
    params = []
    for launcher in (ELAUNCH, TORCHRUN):
        for key, trial in found.items():
            is_slow = launcher == TORCHRUN or key not in unproved
            marks = [pytest.mark.slow] if is_slow else []
            name = "-".join(str(number) for number in numbers[key])
            params.append(pytest.param(launcher, trial, marks=marks, id=f"{launcher}-{name}"))
    return params


@pytest.mark.parametrize(("launcher", "trial"), trials())
def test_the_launcher_behaves_as_listed(launcher: str, trial: Trial, tmp_path: Path) -> None:
    if launcher == TORCHRUN:
        pytest.importorskip("torch.distributed.run", reason="torch is not installed")

    ended = run(trial, launcher, tmp_path)

    check(ended, trial.expected(launcher), tmp_path)


def test_every_behaviour_of_the_list_is_here() -> None:
    assert [behaviour.number for behaviour in LIST] == list(range(1, COUNT + 1))
    assert [behaviour.number for behaviour in LIST if not behaviour.trials] == []


def test_where_a_trial_expects_something_else_of_elaunch_the_list_has_the_difference() -> None:
    differ = {behaviour.number for behaviour in LIST for trial in behaviour.trials if trial.elaunch}

    assert sorted(number for number in differ if not LIST[number - 1].differs) == []


def test_each_test_that_is_named_as_a_proof_is_there() -> None:
    named = {proof for behaviour in LIST for proof in behaviour.proofs}

    assert len(named) > 50
    assert sorted(proof for proof in named if not _is_there(proof)) == []


def _is_there(proof: str) -> bool:
    file, _, name = proof.partition("::")
    return bool(re.search(rf"^ *def {name}\(", (REPOSITORY / file).read_text(), re.MULTILINE))


def test_the_page_has_the_list() -> None:
    page = (REPOSITORY / "docs" / "torchrun.md").read_text()

    assert table() in page, "run: python -m tests.conformance.page, and put its table into docs/torchrun.md"
