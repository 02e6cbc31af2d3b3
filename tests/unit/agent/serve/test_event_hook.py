"""agent.serve.event_hook: the user's command is run for each event, bounded in time, and never waited for."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from elaunch.agent.serve import event_hook
from elaunch.agent.serve.event_hook import EventHook
from tests.harness import DEADLINE_S, wait_for


class Said(list[str]):
    def __call__(self, line: str, _level: str = "info") -> None:
        self.append(line)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[Said]:
    """What goes to the log. A run has the time that a busy host needs, if a test does not say otherwise."""
    monkeypatch.setattr(event_hook, "RUN_S_MAX", DEADLINE_S)
    yield Said()
    assert not [child for child in psutil.Process().children() if "sh" in child.name()]


def hook(said: Said, text: str, *args: str) -> EventHook:
    return EventHook(("sh", "-c", text, "hook", *args), {"PATH": os.environ["PATH"], "MARK": "1"}, said)


def test_each_event_comes_on_stdin_in_order_and_the_output_goes_to_the_log(tmp_path: Path, said: Said) -> None:
    told = tmp_path / "told"
    runs = hook(said, f"cat >> {told}; echo mark $MARK; echo home$HOME >&2")

    for number in range(3):
        runs.notify({"event": "failure", "number": number, "long": "x" * 200_000})
    runs.close(DEADLINE_S)

    assert [json.loads(line)["number"] for line in told.read_text().splitlines()] == [0, 1, 2]
    assert said == ["[on-event] mark 1", "[on-event] home"] * 3


@pytest.mark.parametrize(
    ("text", "how"), [("exit 7", "exited with code 7"), ("kill -9 $$", "was killed by signal 9"), ("exec 1>&-", "")]
)
def test_a_failure_of_the_command_is_one_line(said: Said, text: str, how: str) -> None:
    runs = hook(said, text)

    runs.notify({"event": "restart"})
    runs.close(DEADLINE_S)

    assert said == ([f"--on-event: sh {how}; restart may not have been delivered"] if how else [])


def test_a_command_that_is_gone_is_one_line_each_time(said: Said) -> None:
    runs = EventHook(("/nowhere/notify",), {}, said)

    runs.notify({"event": "end"})
    runs.close(DEADLINE_S)

    assert said == [
        "--on-event: /nowhere/notify cannot be started (No such file or directory); end may not have been delivered"
    ]


def test_a_command_that_does_not_end_is_killed_with_its_children_and_the_next_one_runs(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_hook, "RUN_S_MAX", 3.0)
    # A command line that no other process on this machine has.
    sleep = ["sleep", f"60.{os.getpid()}"]
    first = f"touch {tmp_path}/again; {' '.join(sleep)} & wait"
    runs = hook(said, f"if [ -e {tmp_path}/again ]; then echo second; exit; fi; {first}")

    runs.notify({"event": "failure"})
    runs.notify({"event": "restart"})
    runs.close(DEADLINE_S)

    assert said[-1] == "[on-event] second"
    assert "did not end within 3 s and was killed; failure may not have been delivered" in said[0]
    # The kernel ends it in its own time.
    wait_for(
        lambda: not [each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == sleep], "its end"
    )


def test_much_output_is_cut_and_costs_no_memory(said: Said) -> None:
    runs = hook(said, "head -c 50000000 /dev/zero | tr '\\0' x")

    runs.notify({"event": "failure"})
    runs.close(DEADLINE_S)

    assert len(said[0]) == event_hook.OUTPUT_BYTES_MAX + len("[on-event] ")
    assert said[1] == f"[on-event] … {50000000 - event_hook.OUTPUT_BYTES_MAX} bytes more …"
