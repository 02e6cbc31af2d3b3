"""Compares what several runs of a rehearsal have recorded. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

Record = Mapping[str, Any]
# By the Keeper's name and the rank: the records of the steps' beginnings, in the order in which they were written.
Records = Mapping[tuple[str, int], Sequence[Record]]
_SHOWN = 4
EVALUATIONS = ("the evaluation", "the evaluation after it")
_COMPUTED = ("the samples", "the loss", *EVALUATIONS)


def steps_done(records: Records, name: str) -> int:
    """The last step after which all ranks have a record."""
    return min((max(r["step"] for r in its) - 1 for (of, _), its in records.items() if of == name), default=0)


def repeated(records: Records) -> int:
    """How many steps a rank has done more than once."""
    lost = [sum(max(0, before["step"] - start["step"]) for before, start in _restarts(its)) for its in records.values()]
    return max(lost, default=0)


def difference(alone: Records, again: Records, killed: Records) -> str:
    """Where `killed` leaves `alone`, in what, and the likely reason; "" if it never does.

    What differs between `alone` and `again`, which had no failure, does not count.
    """
    found: dict[int, dict[str, set[int]]] = {}
    starts, others = set(), []
    for key in alone:
        right, same, wrong = (_by_step(of.get(key, ()), "facts") for of in (alone, again, killed))
        for step in right.keys() & wrong.keys():
            for what in _values(right[step], same.get(step, right[step]), wrong[step]):
                found.setdefault(step, {}).setdefault(what, set()).add(key[1])
        steps = [steps_done(of, key[0]) for of in (alone, killed)]
        if steps[0] != steps[1]:
            found.setdefault(min(steps) + 2, {})[f"{steps[1]} steps were done, not {steps[0]}"] = {key[1]}
        right, same = (_by_step(of.get(key, ()), "others") for of in (alone, again))
        for _, start in _restarts(killed.get(key, ())):
            if start["step"] in right.keys() & same.keys():
                starts.add(start["step"])
                values = [right[start["step"]], same[start["step"]], start["others"]]
                known = values[0].keys() & values[2].keys()
                others += _values(*({name: of.get(name, "") for name in sorted(known)} for of in values))
    if not found:
        return ""
    step, whats = min(found.items())
    ranks = ", ".join(map(str, sorted(set().union(*whats.values()))))
    reason = _reason([*whats], [*dict.fromkeys(others)], is_restored=step in starts)
    return f"first after step {step - 1} (rank {ranks}): {some([*whats])}\n  likely reason: {reason}"


def _restarts(records: Sequence[Record]) -> list[tuple[Record, Record]]:
    """The last record of each process but the last one, and the first of the next process."""
    return [(before, start) for before, start in pairwise(records) if before["pid"] != start["pid"]]


def _by_step(records: Sequence[Record], which: str) -> dict[int, dict[str, str]]:
    """What was done before a failure, as an evaluation, need not be done again: later records add to earlier ones."""
    found: dict[int, dict[str, str]] = {}
    for record in records:
        found[record["step"]] = {**found.get(record["step"], {}), **record[which]}
    return found


def _values(right: Mapping[str, str], same: Mapping[str, str], wrong: Mapping[str, str]) -> list[str]:
    """The names with other values. A state that varies without a failure, as what has no seed, does not count."""
    # A step that a dead rank has computed and others have completed is not computed again.
    needed = [name for name in right if (name in wrong and name in _COMPUTED) or name == EVALUATIONS[1]]
    state = [name for name in sorted({**right, **wrong}) if name not in _COMPUTED and right.get(name) == same.get(name)]
    differing = [name for name in [*needed, *state] if right.get(name) != wrong.get(name)]
    # Without the digests, which are not readable.
    shown = [[(its := of.get(name, "absent")).rpartition(" ")[0] or its for of in (right, wrong)] for name in differing]
    pairs = [f" ({one} alone, {other} after)" if one != other else "" for one, other in shown]
    return list(map(str.__add__, differing, pairs))


def _reason(whats: Sequence[str], others: Sequence[str], *, is_restored: bool) -> str:
    """What was not restored comes first, since all else follows from it."""
    if whats[0].startswith(EVALUATIONS[1]):
        return "the failure cut the evaluation off, and the restart did not make it as it was"
    if is_restored:
        return "the restored values differ: they change outside keeper.commit(), or this is a bug of the Keeper"
    if generators := [each for each in others if each.startswith("generator")]:
        return f"the Keeper does not keep {some(generators)}: give it as per_rank=[…]"
    if others:
        return f"{some(others)} differs after the restart: pass it to the Keeper (extra=, scheduler=, …)"
    if "the samples" in whats:
        return "the data order differs after the restart: pass per_rank=Batches(loader)"
    return "unknown: the program depends on state that is neither kept nor recorded here"


def some(names: Sequence[str]) -> str:
    """The first few of them, and how many more there are."""
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def unprinted(alone: Sequence[str], again: Sequence[str], killed: Sequence[str]) -> list[str]:
    """The lines that a run has not printed, but for words that differ between two quiet runs, such as times."""
    printed = "\n".join(" ".join(line.split()) for line in killed)
    found = []
    for one, other in zip(alone, again, strict=False):
        words = [word if word == same else "…" for word, same in zip(one.split(), other.split(), strict=False)]
        line = " ".join(words)
        if not re.search(f"^{re.escape(line).replace('…', '[^ ]+')}", printed, re.MULTILINE):
            found.append(line)
    return found
