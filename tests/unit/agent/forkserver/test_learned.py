"""What a job's first fork server imports."""

from __future__ import annotations

import pytest

from elaunch.agent.config import ProgramText
from elaunch.agent.default_preload import DEFAULT_PRELOAD
from elaunch.agent.forkserver.learned import FirstImports, Learned, first_imports
from elaunch.agent.forkserver.selection import Selection

DYNAMO, TORCH = ("torch._dynamo",), ("torch", "torch.distributed")
LEARNED = Learned(program=Selection(("heavy",)), packages="of today")
UNCLEAR = ProgramText(state="now", is_clear=False)


def last_run(*unused: str, state: str = "now") -> Learned:
    return Learned(program=LEARNED.program, packages="of today", unused=unused, unused_in=state)


@pytest.mark.parametrize(
    ("text", "learned", "imported"),
    [
        (ProgramText(), last_run(*DEFAULT_PRELOAD), DEFAULT_PRELOAD),
        (ProgramText(DYNAMO, "now"), LEARNED, TORCH),
        (ProgramText(DYNAMO, "now"), last_run(*DYNAMO), TORCH),
        (ProgramText(DYNAMO, "now"), last_run(), DEFAULT_PRELOAD),
        (ProgramText(DYNAMO, "now"), last_run(state="then"), TORCH),
        (ProgramText(DYNAMO, "now"), last_run(*DEFAULT_PRELOAD), TORCH),
        (UNCLEAR, LEARNED, DEFAULT_PRELOAD),
        (UNCLEAR, last_run(*DYNAMO), TORCH),
        (UNCLEAR, last_run(*DYNAMO, state="then"), DEFAULT_PRELOAD),
        (UNCLEAR, last_run(*DYNAMO, "heavy"), TORCH),
    ],
)
def test_what_the_program_does_not_use_is_left_out(
    text: ProgramText, learned: Learned, imported: tuple[str, ...]
) -> None:
    assert first_imports(DEFAULT_PRELOAD, text, learned) == FirstImports(imported, DEFAULT_PRELOAD, learned)


def test_a_program_that_uses_nothing_needs_no_warm_fork_server() -> None:
    for text, learned in ((ProgramText(DEFAULT_PRELOAD), LEARNED), (UNCLEAR, last_run(*DEFAULT_PRELOAD))):
        assert first_imports(DEFAULT_PRELOAD, text, learned) == FirstImports((), (), learned)


def test_a_text_that_python_refuses_imports_nothing_and_its_mended_one_may_start_warm() -> None:
    expected = FirstImports((), DEFAULT_PRELOAD, Learned(packages="of today"))

    assert first_imports(DEFAULT_PRELOAD, ProgramText(is_refused=True), LEARNED) == expected


def test_fresh_interpreters_import_nothing_ahead() -> None:
    assert first_imports(None, ProgramText(DYNAMO), LEARNED) == FirstImports(None, (), LEARNED)
