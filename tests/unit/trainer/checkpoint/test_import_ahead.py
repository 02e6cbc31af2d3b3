"""What writes checkpoints is imported beside training: whoever forks or imports meanwhile is not disturbed."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from elaunch.trainer.checkpoint.import_ahead import wait_while_it_goes_on
from tests.harness import DEADLINE_S

# The import stands still until the gate is open.
BEGUN = """
import os, signal, sys, threading

gate, is_there = threading.Event(), threading.Event()

class Waiting:
    def find_spec(self, name, path=None, target=None):
        if name == "torch.distributed.checkpoint":
            is_there.set()
            gate.wait()

import torch.distributed
from elaunch.trainer.checkpoint.import_ahead import import_ahead

sys.meta_path.insert(0, Waiting())
import_ahead()
is_there.wait()
assert "torch.distributed.checkpoint" not in sys.modules
"""


def run(code: str) -> None:
    subprocess.run([sys.executable, "-c", BEGUN + code], check=True, timeout=2 * DEADLINE_S)


def test_the_caller_goes_on_and_the_first_checkpoint_waits_for_the_rest() -> None:
    run(
        """
threading.Timer(0.2, gate.set).start()
from elaunch.trainer.checkpoint import dcp, writing
assert gate.is_set() and dcp.Staging and writing.Writing
"""
    )


def test_a_child_that_is_forked_meanwhile_can_import_it_too() -> None:
    run(
        """
threading.Timer(0.2, gate.set).start()
pid = os.fork()
if pid == 0:
    # Nobody ends a child whose parent is killed.
    signal.alarm(600)
    from elaunch.trainer.checkpoint import writing
    os._exit(0 if writing.Writing else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""
    )


def test_an_import_that_fails_is_left_to_the_first_checkpoint() -> None:
    run(
        """
sys.modules["torch.distributed.checkpoint.filesystem"] = None
gate.set()
for thread in threading.enumerate():
    if thread.name == "imports":
        thread.join()
try:
    from elaunch.trainer.checkpoint import writing
except ImportError:
    sys.exit(0)
sys.exit(1)
"""
    )


class Importing(threading.Thread):
    """An import that adds a module in each of so many waits for it, and then ends or stands still."""

    def __init__(self, patch: pytest.MonkeyPatch, modules: int, *, ends: bool) -> None:
        super().__init__()
        self._patch, self._modules, self._ends = patch, modules, ends
        self.waits = 0

    def is_alive(self) -> bool:
        return not self._ends or self.waits < self._modules

    def join(self, timeout: float | None = None) -> None:
        self.waits += 1
        if self.waits <= self._modules:
            self._patch.setitem(sys.modules, f"a_module_of_the_test_{self.waits}", sys)


@pytest.mark.parametrize(("ends", "waits"), [(True, 7), (False, 8)])
def test_a_fork_waits_for_a_slow_import_to_its_end_and_not_for_one_that_stands_still(
    monkeypatch: pytest.MonkeyPatch, ends: bool, waits: int
) -> None:
    importing = Importing(monkeypatch, 7, ends=ends)

    wait_while_it_goes_on(importing)

    assert importing.waits == waits
