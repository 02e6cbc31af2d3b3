"""Causes: nodes that are not alike."""

from __future__ import annotations

from elaunch.agent.core.causes.cause import CauseRule, Evidence, Values, regex

# What ranks say that do not understand each other.
_BETWEEN_RANKS = regex(r"nccl|gloo|pickle|processgroup|process group|collective")


def _differ(evidence: Evidence, _values: Values) -> Values | None:
    is_between_ranks = "Unpickling" in evidence.exception or _BETWEEN_RANKS.search(evidence.words)
    mismatch = evidence.facts.mismatch
    return {"mismatch": mismatch} if mismatch and is_between_ranks else None


RULES = (
    CauseRule(
        "the nodes have different versions of torch or Python",
        "{mismatch}: install the same on every node",
        more=_differ,
        shown="install the same versions on every node; the log names the versions and the nodes as a warning when the"
        " ranks start",
    ),
)
