"""How many questions an agent answers, and when; pure.

Whoever asks pays for the answers: a healthy job that nobody asks does nothing here, and a burst of questions, by
mistake or on purpose, loads neither the agent nor the store.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from elaunch.rendezvous.rules.questions import ANSWERS_PER_S, Question

# To this host's processes: in a burst, and per second.
LOCAL_BURST = 20
LOCAL_PER_S = 10.0
# One node answers the store's questions no more often than this, however small the job is.
STORE_PAUSE_S = 0.5


@dataclass(frozen=True)
class Allowance:
    """A token bucket: `left` answers may be given now, as it was at `at_s`."""

    left: float = LOCAL_BURST
    at_s: float = 0.0

    def take(self, now_s: float) -> tuple[Allowance, bool]:
        """The allowance after one more question, and whether that is answered."""
        left = min(LOCAL_BURST, self.left + max(0.0, now_s - self.at_s) * LOCAL_PER_S)
        return Allowance(max(0.0, left - 1), now_s) if left >= 1 else Allowance(left, now_s), left >= 1


@dataclass(frozen=True)
class Docket:
    """The question in the store that waits for this node's answer, until `due_s`; only the newest one waits.

    `heard` identifies the last question, `answered_s` is when one was last answered.
    """

    waiting: Question | None = None
    due_s: float | None = None
    heard: str = ""
    answered_s: float = float("-inf")

    def after(self, question: Question | None, now_s: float, seats: int, share: float) -> Docket:
        """What the store's key says now. `share`, between 0 and 1, is this node's place among the job's `seats`."""
        if question is None:
            return self if self.waiting is None else replace(self, waiting=None, due_s=None)
        if question.identity == self.heard:
            return self
        # All nodes hear of it at once. They answer one after the other, and none of them too often.
        round_s = max(seats, 1) / ANSWERS_PER_S
        due_s = max(now_s + share * round_s, self.answered_s + max(STORE_PAUSE_S, round_s))
        return replace(self, waiting=question, due_s=due_s, heard=question.identity)

    def postponed(self, question: Question, now_s: float) -> Docket:
        """The same question a little later, unless a newer one waits: this node is about to answer another."""
        return self if self.waiting else replace(self, waiting=question, due_s=now_s + STORE_PAUSE_S)

    def take_due(self, now_s: float) -> tuple[Docket, Question | None]:
        """The question to answer now, if its time has come."""
        if self.waiting is None or self.due_s is None or now_s < self.due_s:
            return self, None
        return replace(self, waiting=None, due_s=None, answered_s=now_s), self.waiting
