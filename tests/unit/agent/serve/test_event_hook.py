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


class Logged(list[str]):
    def __call__(self, line: str, _level: str = "info") -> None:
        self.append(line)


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[Logged]:
    """What goes to the log. A run has the time that a busy host needs, unless a test sets another."""
    monkeypatch.setattr(event_hook, "RUN_S_MAX", DEADLINE_S)
    monkeypatch.setattr(event_hook, "FLUSH_S", DEADLINE_S)
    yield Logged()
    assert not [child for child in psutil.Process().children() if "sh" in child.name()]


def hook(logged: Logged, text: str, *args: str) -> EventHook:
    return EventHook(("sh", "-c", text, "hook", *args), {"PATH": os.environ["PATH"], "MARK": "1"}, logged)


def test_each_event_comes_on_stdin_in_order_and_the_output_goes_to_the_log(tmp_path: Path, logged: Logged) -> None:
    events = tmp_path / "events"
    runs = hook(logged, f"cat >> {events}; echo mark $MARK; echo home$HOME >&2")

    for number in range(3):
        runs.notify({"event": "failure", "number": number, "long": "x" * 200_000})
    runs.close()

    assert [json.loads(line)["number"] for line in events.read_text().splitlines()] == [0, 1, 2]
    assert logged == ["[on-event] mark 1", "[on-event] home"] * 3


@pytest.mark.parametrize(
    ("text", "how"), [("exit 7", "exited with code 7"), ("kill -9 $$", "was killed by signal 9"), ("exec 1>&-", "")]
)
def test_a_failure_of_the_command_is_one_line(logged: Logged, text: str, how: str) -> None:
    runs = hook(logged, text)

    runs.notify({"event": "restart"})
    runs.close()

    assert logged == ([f"--on-event: sh {how}; restart may not have been delivered"] if how else [])


def test_a_command_that_is_gone_is_one_line_each_time(logged: Logged) -> None:
    runs = EventHook(("/nowhere/notify",), {}, logged)

    runs.notify({"event": "end"})
    runs.close()

    assert logged == [
        "--on-event: /nowhere/notify cannot be started (No such file or directory); end may not have been delivered"
    ]


def test_a_command_that_does_not_end_is_killed_with_its_children_and_the_next_one_runs(
    tmp_path: Path, logged: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_hook, "RUN_S_MAX", 3.0)
    # A command line that no other process on this machine has.
    sleep = ["sleep", f"60.{os.getpid()}"]
    first = f"touch {tmp_path}/again; {' '.join(sleep)} & wait"
    runs = hook(logged, f"if [ -e {tmp_path}/again ]; then echo second; exit; fi; {first}")

    runs.notify({"event": "failure"})
    runs.notify({"event": "restart"})
    runs.close()

    assert logged[-1] == "[on-event] second"
    assert "did not end within 3 s and was killed; failure may not have been delivered" in logged[0]
    # The kernel ends it in its own time.
    wait_for(
        lambda: not [each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == sleep], "its end"
    )


def test_much_output_costs_no_memory() -> None:
    with os.fdopen(os.memfd_create("output"), "rb") as output:
        command = ("sh", "-c", "echo begins; head -c 50M /dev/zero; exec sleep 600")
        assert "did not end" in event_hook.run_limited(command, os.environ, 0, output.fileno(), 2)
        assert os.fstat(output.fileno()).st_blocks * 512 < 1 << 20
        assert os.pread(output.fileno(), 7, 0) == b"begins\n"


def test_much_output_is_cut(logged: Logged) -> None:
    runs = hook(logged, "head -c 50000000 /dev/zero | tr '\\0' x")

    runs.notify({"event": "failure"})
    runs.close()

    assert len(logged[0]) == event_hook.OUTPUT_BYTES_MAX + len("[on-event] ")
    assert logged[1] == f"[on-event] … {50000000 - event_hook.OUTPUT_BYTES_MAX} more bytes …"
