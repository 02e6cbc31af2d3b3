"""The list: each of torchrun's behaviours with its trials, what elaunch does otherwise, and the tests that prove it."""

from __future__ import annotations

from tests.conformance.behaviours import programs, rendezvous, reports, restarts, sizes, workers
from tests.conformance.behaviours.behaviour import Behaviour

LIST: tuple[Behaviour, ...] = tuple(
    sorted(
        (
            *workers.BEHAVIOURS,
            *programs.BEHAVIOURS,
            *sizes.BEHAVIOURS,
            *restarts.BEHAVIOURS,
            *reports.BEHAVIOURS,
            *rendezvous.BEHAVIOURS,
        ),
        key=lambda behaviour: behaviour.number,
    )
)
