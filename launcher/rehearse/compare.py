"""Compares what several runs of a rehearsal have recorded and printed. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

Record = Mapping[str, Any]
# By the Keeper's name and the rank: the records in the order in which they were written.
Records = Mapping[tuple[str, int], Sequence[Record]]
_SHOWN = 4


def steps_done(records: Records, name: str) -> int:
    """The last step that all ranks have begun the next one of, or the end."""
    ends = [(max(r["step"] for r in its), its[-1]["kind"]) for (of, _), its in records.items() if of == name]
    done: list[int] = [int(step) - (kind == "begin") for step, kind in ends]
    return min(done)


def repeated(records: Records) -> int:
    """How many steps a rank has done more than once."""
    done = [[r["step"] for r in its if r["kind"] == "done"] for its in records.values()]
    return max((len(its) - len(set(its)) for its in done), default=0)


def difference(alone: Records, again: Records, killed: Records) -> str:
    """Where `killed` leaves `alone`, in what, and the likely reason; "" if it never does.

    What differs between `alone` and `again`, which had no failure, does not count.
    """
    found: dict[tuple[int, str], dict[str, set[int]]] = {}
    for (name, rank), its in alone.items():
        same, wrong = (_by_place(of.get((name, rank), ())) for of in (again, killed))
        for place, rights in _by_place(its).items():
            for what in _differing(rights[-1], same.get(place, rights)[-1], wrong.get(place, ())):
                found.setdefault(place, {}).setdefault(what, set()).add(rank)
        steps = [steps_done(of, name) if (name, rank) in of else 0 for of in (alone, killed)]
        if steps[0] != steps[1]:
            found.setdefault((min(steps) + 1, "begin"), {})[f"{steps[1]} steps were done, not {steps[0]}"] = {rank}
    if not found:
        return ""
    place, whats = min(found.items())
    starts, others = _at_restart(alone, again, killed)
    ranks = ", ".join(map(str, sorted(set().union(*whats.values()))))
    reason = _reason([*whats], others, is_restored=place[1] == "begin" and place[0] in starts)
    return f"first at step {place[0]} (rank {ranks}): {some([*whats])}\n  likely reason: {reason}"


def _by_place(records: Sequence[Record]) -> dict[tuple[int, str], list[Record]]:
    found: dict[tuple[int, str], list[Record]] = {}
    for record in records:
        found.setdefault((record["step"], record["kind"]), []).append(record)
    return found


def _differing(right: Record, same: Record, wrongs: Sequence[Record]) -> list[str]:
    """What differs between the records of the same step and rank; the killed run may have several."""
    if not wrongs:
        return []
    wrong = wrongs[-1]
    if right["kind"] == "done":
        found = ["the samples"] if right["samples"] != wrong["samples"] else []
        losses = [" + ".join(record["losses"]) for record in (right, wrong)]
        return found + ([f"the loss ({losses[0]} alone, {losses[1]} after)"] if losses[0] != losses[1] else [])
    # An evaluation that was done before the failure need not be done again.
    is_evaluated = right["evaluation"] in [each["evaluation"] for each in wrongs]
    found = (
        [] if is_evaluated else [f"the evaluation before it ({right['passes']} passes alone, {wrong['passes']} after)"]
    )
    return found + _values(right["state"], same["state"], wrong["state"], {**right["state"], **wrong["state"]})


def _at_restart(alone: Records, again: Records, killed: Records) -> tuple[set[int], list[str]]:
    """The steps with which restarts began, and what the program had there beside the state that was another value."""
    starts, found = set(), []
    for key, its in killed.items():
        for before, start in pairwise(its):
            place = (start["step"], "begin")
            right, same = (
                _by_place(of.get(key, ())).get(place, [{"others": {}}])[-1]["others"] for of in (alone, again)
            )
            if start["pid"] != before["pid"]:
                starts.add(start["step"])
                found += _values(right, same, start["others"], right.keys() & start["others"].keys())
    return starts, list(dict.fromkeys(found))


def _values(right: Record, same: Record, wrong: Record, names: Any) -> list[str]:
    """The names with other values, less those that vary without a failure, as what has no seed."""
    differing = [n for n in names if right.get(n) != wrong.get(n) and right.get(n) == same.get(n)]
    shown = [[_without_digest(of.get(name, "absent")) for of in (right, wrong)] for name in differing]
    pairs = [f" ({one} alone, {other} after)" if one != other else "" for one, other in shown]
    return sorted(map(str.__add__, differing, pairs))


def _without_digest(value: str) -> str:
    return value.rpartition(" ")[0] or value


def _reason(whats: Sequence[str], others: Sequence[str], *, is_restored: bool) -> str:
    """What was not restored comes first, since all else follows from it."""
    if whats[0].startswith("the evaluation"):
        return "the failure cut the evaluation off, and the restart did not make it as it was"
    if is_restored and all(what.startswith("random.") for what in whats):
        return "random numbers were drawn after the forward pass or in an evaluation, and are not kept with the step"
    if is_restored:
        return "the restart itself brings other values: they change outside of keeper.commit(), or the Keeper is wrong"
    for begin, reason in (
        ("generator", "the Keeper does not keep {}: give it as per_rank=[…]"),
        ("gradient", "{}: a gradient lives across a commit, and is not kept"),
        ("requires_grad", "{}: it changes in mid-run, and a restart begins with the first value"),
        ("", "a restart begins with another value of {}: give it to the Keeper (extra=, scheduler=, per_rank=)"),
    ):
        if matching := [each for each in others if each.startswith(begin)]:
            return reason.format(some(matching))
    if "the samples" in whats:
        return "the data comes in another order after the restart: per_rank=Batches(loader)"
    return "not known: the program computes from something that is neither kept nor seen here"


def some(names: Sequence[str]) -> str:
    """The first few of them, and how many more there are."""
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def steady(alone: Sequence[str], again: Sequence[str]) -> list[list[str]]:
    """The words of lines that two runs without a failure print; "" for a word that differs, such as a time."""
    pairs = [(one.split(), other.split()) for one, other in zip(alone, again, strict=False)]
    found = [
        [word if word == same else "" for word, same in zip(*pair, strict=True)]
        for pair in pairs
        if len(pair[0]) == len(pair[1])
    ]
    return [words for words in found if any(words)]


def unprinted(lines: Sequence[list[str]], killed: Sequence[str]) -> list[str]:
    """Which of the `steady` lines a run has not printed."""
    printed = {tuple(line.split()) for line in killed}
    masks = {tuple(map(bool, words)) for words in lines}
    there = {
        tuple(word if is_steady else "" for word, is_steady in zip(line, mask, strict=True))
        for line in printed
        for mask in masks
        if len(mask) == len(line)
    }
    return [" ".join(word or "…" for word in words) for words in lines if tuple(words) not in there]
