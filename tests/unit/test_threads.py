"""elaunch.threads: which threads of a worker are elaunch's own, in stacks by the worker, by py-spy and of a crash."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from elaunch.agent.diagnosis import exit_status, stacks
from elaunch.agent.diagnosis.stack_groups import full_text
from elaunch.threads import OWN, is_own, only_listens
from tests.harness import DEADLINE_S, wait_for

HOME = "/venv/lib/python3.11"
BOOTSTRAP = (f"{HOME}/threading.py", f"{HOME}/threading.py")
ELAUNCH = f"{HOME}/site-packages/elaunch"
LISTENER = (f"{ELAUNCH}/trainer/link.py", f"{ELAUNCH}/trainer/link.py", *BOOTSTRAP)

# A link whose listening thread waits for the agent; a thread of the mirror's, by its file; and one of the program's.
PROGRAM = """
import os, socket, sys, threading, time
ours, theirs = socket.socketpair()
os.environ["ELAUNCH_LINK"] = str(theirs.fileno())
from elaunch.trainer import link
from elaunch.trainer.memory import mirror
listener = link.listen(on_stop=print)
code = compile("def _run():\\n    time.sleep(600)", mirror.__file__, "exec")
names = {"time": time}
exec(code, names)
threading.Thread(target=names["_run"], name="mirror", daemon=True).start()
def my_thread():
    time.sleep(600)
threading.Thread(target=my_thread, name="my thread", daemon=True).start()
ours.sendall(b'{"event": "stacks"}\\n')
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("files", "own", "listens"),
    [
        (LISTENER, True, True),
        ((f"{HOME}/selectors.py", *LISTENER), True, False),
        ((f"{ELAUNCH}/agent/forkserver/collectives.py",), True, True),
        (("/home/me/train.py", *LISTENER), True, False),
        ((f"{HOME}/socket.py", f"{ELAUNCH}/trainer/memory/mirror.py", *BOOTSTRAP), True, False),
        (
            (f"{HOME}/threading.py", f"{ELAUNCH}/trainer/keeper/keeper.py", "/home/me/train.py", *BOOTSTRAP),
            False,
            False,
        ),
        (("/home/me/elaunch/train.py", *BOOTSTRAP), False, False),
        ((f"{HOME}/concurrent/futures/thread.py", *BOOTSTRAP), False, False),
        ((), False, False),
    ],
)
def test_a_thread_is_elaunchs_own_if_it_begins_in_its_code(files: tuple[str, ...], own: bool, listens: bool) -> None:
    assert (is_own(files), only_listens(files)) == (own, listens)


def test_neither_kind_of_stacks_shows_what_only_listens_and_both_have_elaunchs_own_last(tmp_path: Path) -> None:
    errors = tmp_path / "stderr"
    with errors.open("wb") as stderr:
        worker = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stderr=stderr)
    try:
        wait_for(lambda: "elaunch's own" in errors.read_text(), "the worker shows its stacks")
        by_itself = errors.read_text()
        (taken,) = stacks.take({0: worker.pid}, within_s=DEADLINE_S)
    finally:
        worker.kill()
        worker.communicate(timeout=DEADLINE_S)

    first, *threads = [line for line in by_itself.splitlines() if not line.startswith("  ")]
    assert first == "elaunch: what this worker's threads are doing"
    assert [line.partition(",")[0] for line in threads] == [
        "thread MainThread",
        "thread my thread",
        f"thread mirror ({OWN})",
    ]
    assert "in my_thread" in by_itself
    assert "link.py" not in by_itself
    text = full_text([taken])
    heads = [line.partition(":")[0] for line in text.splitlines() if line.startswith("thread ")]
    assert heads == ["thread MainThread", "thread my thread", f"thread mirror ({OWN})"]
    assert "link.py" not in text


def test_the_stack_of_a_crash_has_no_thread_that_only_listens() -> None:
    listener = "\n".join(f'  File "{file}", line 1 in _receive' for file in LISTENER)
    other = '  File "/home/me/train.py", line 3 in work'
    text = (
        f"Fatal Python error: Segmentation fault\n\nThread 0x01 (most recent call first):\n{listener}\n\n"
        f"Thread 0x02 (most recent call first):\n{other}\n\n"
        'Current thread 0x03 (most recent call first):\n  File "/home/me/train.py", line 9 in step\n'
    )

    found = exit_status.parse_crash(text, -11)

    assert found
    assert found.frame == "/home/me/train.py:9 in step"
    assert found.traceback == text.replace(f"Thread 0x01 (most recent call first):\n{listener}\n\n", "").rstrip()
