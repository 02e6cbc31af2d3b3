"""What a healthy start does not need: rules about hangs and failures, and answers to questions.

Each such module is imported where it is first needed, inside of the function. A short job ends before. A long one
imports all of them once its workers run: it may run for weeks, and meanwhile its package may be upgraded or its disk
may go. What it needs in its last hour must be of the same release, and must be there.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module

MODULES = (
    "elaunch.agent.answers.answers",
    "elaunch.agent.answers.usage",
    "elaunch.agent.core.absent",
    "elaunch.agent.core.collectives",
    "elaunch.agent.core.first_cause",
    "elaunch.agent.core.hang_watch",
    "elaunch.agent.core.late_ranks",
    "elaunch.agent.core.node_report",
    "elaunch.agent.core.stack_answer",
    "elaunch.agent.core.wait_shares",
    "elaunch.agent.workers.flight_recorder",
    "elaunch.agent.workers.hang_monitor",
    "elaunch.agent.workers.investigator",
    "elaunch.agent.workers.leftovers",
    "elaunch.agent.workers.nvml",
    "elaunch.agent.workers.slow_monitor",
    "elaunch.agent.workers.software",
    "elaunch.agent.workers.stacks",
    "elaunch.agent.workers.unanswered",
    "elaunch.rendezvous.http.errors",
    "elaunch.rendezvous.rules.reports",
    "elaunch.rendezvous.rules.software",
)


def import_all() -> None:
    """Import them now, where that can be done. Any thread may call it."""
    for name in MODULES:
        # Who needs it tries again, and says what is missing.
        with suppress(ImportError, OSError):
            import_module(name)
