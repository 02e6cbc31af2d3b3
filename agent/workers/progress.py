"""Stamps the steps of a generation's workers on the timeline: when they begin, now and then, and how far they came."""

from __future__ import annotations

from elaunch.agent.output.timeline import Timeline
from elaunch.agent.workers.group import WorkerGroup

# A week of training is a few megabytes then.
EVERY_S = 10.0


class ProgressLog:
    """Stamps `progress` when a look at the links finds news, at most every EVERY_S. `steps_per_s` is of the last time.

    It has no timer: the agent looks at the links once a second in any case.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self.steps_per_s = 0.0
        self._steps: list[int] = []
        self._at_s: float | None = None

    def begin(self) -> None:
        """A generation begins."""
        self._steps, self._at_s, self.steps_per_s = [], None, 0.0

    def look(self, group: WorkerGroup, now_s: float) -> None:
        """Stamp the first step at once, later ones when it is time."""
        if self._at_s is None or now_s - self._at_s >= EVERY_S:
            self.note(group, now_s)

    def note(self, group: WorkerGroup, now_s: float) -> None:
        """Stamp the newest steps, if there are any that the timeline has not."""
        links = [group.links[local_rank] for local_rank in sorted(group.links)]
        steps = [link.step for link in links]
        if steps == self._steps or max(steps, default=-1) < 0:
            self.steps_per_s = 0.0
            return
        fields: dict[str, object] = {"first_rank": group.rank(0), "steps": steps}
        if self._at_s is None:
            # What was restored, or lost, shows only in the first step of each rank, not in its newest.
            fields["first_steps"] = [link.first_step for link in links]
        elif (gained := max(steps) - max(self._steps)) > 0:
            self.steps_per_s = gained / (now_s - self._at_s)
            fields["steps_per_s"] = round(self.steps_per_s, 4)
        self._steps, self._at_s = steps, now_s
        self._timeline.stamp(group.generation, "progress", **fields)
