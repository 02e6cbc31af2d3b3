"""Causes: nodes that are not alike."""

from __future__ import annotations

from elaunch.agent.core.causes.cause import CauseRule, Evidence, Values, regex

_ADVICE = "{mismatch}: install the same on every node"
_SHOWN = "install the same versions on every node; a warning names the versions and the nodes when the ranks start"


def _differ(evidence: Evidence, _values: Values) -> Values | None:
    return {"mismatch": evidence.facts.mismatch} if evidence.facts.mismatch else None


RULES = (
    CauseRule(
        "a failure between ranks, where the nodes have different versions of torch or Python",
        _ADVICE,
        pattern=regex(r"nccl|gloo|pickle|processgroup|process group|collective"),
        more=_differ,
        shown=_SHOWN,
    ),
    CauseRule(
        "a failure to unpickle, where the nodes have different versions of torch or Python",
        _ADVICE,
        exceptions=frozenset({"UnpicklingError"}),
        more=_differ,
        shown=_SHOWN,
    ),
)
