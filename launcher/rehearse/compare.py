"""Compares what the runs of a rehearsal have recorded. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

Record = Mapping[str, Any]
# The records of the starts of steps, in the order in which they were written, by the Keeper's name and the rank.
Records = Mapping[tuple[str, int], Sequence[Record]]
# The same as values, by step and name.
Values = Mapping[tuple[str, int], Mapping[tuple[int, str], str]]
EVALUATIONS = {"the evaluation", "the evaluation after it"}
_COMPUTED = {"the loss", "the samples", *EVALUATIONS}
# The prefix of the names of the script's own variables.
_OWN = "~"
# The digest of a tensor begins with its type and shape.
_TENSOR = re.compile(r"[a-z]\w*\[")
_SHOWN = 4


def alike(alone: Records, again: Records) -> Values:
    """The values that are equal in two runs without a failure. The rest varies, for example for lack of a seed."""
    others = {key: _values(again.get(key, ())) for key in alone}
    return {key: {at: it for at, it in _values(its).items() if others[key].get(at) == it} for key, its in alone.items()}


def computed(alone: Records) -> Values:
    """The losses, samples and evaluations of a run."""
    return {key: {at: it for at, it in _values(its).items() if at[1] in _COMPUTED} for key, its in alone.items()}


def steps_done(records: Records) -> int:
    """The last step that any Keeper has completed."""
    return max((its[-1]["step"] - 1 for its in records.values()), default=0)


def repeated(records: Records) -> int:
    """The largest number of steps that a rank has repeated."""
    lost = [sum(max(0, int(end["step"] - now["step"])) for end, now in _restarts(its)) for its in records.values()]
    return max(lost, default=0)


def difference(right: Values, killed: Records) -> tuple[str, str]:
    """Where and how the run `killed` diverges from `right`, and the likely reason; empty if it does not."""
    found: list[tuple[int, int, str, str]] = []
    lost: dict[str, None] = {}
    for (keeper, rank), values in right.items():
        its = killed.get((keeper, rank), ())
        others, reached = _values(its), {each["step"] for each in its}
        last, end = max(step for step, _ in values), max(reached, default=1)
        if end != last:
            found.append((min(end, last) + 1, rank, "", f"{end - 1} steps were done, not {last - 1}"))
        for (step, name), value in values.items():
            other = others.get((step, name), "absent")
            if step in reached and other != value and _decides(name, value, other, is_last=step == last):
                found.append((step, rank, name, f"{name.lstrip(_OWN)} ({other}, not {value})"))
        for _, start in _restarts(its):
            own = ((name, value) for name, value in start["facts"].items() if name[0] == _OWN)
            lost |= dict.fromkeys(name[1:] for name, value in own if values.get((start["step"], name), value) != value)
    if not found:
        return "", ""
    step = min(found)[0]
    texts = {name: text for at, _, name, text in found if at == step}
    where = f"first after step {step - 1}"
    if all(name.startswith(_OWN) for name in texts):
        where, lost = "at the end", dict.fromkeys(name[1:] for name in texts)
    # All else follows from what was computed.
    shown = [text for name, text in texts.items() if name in _COMPUTED] or [*texts.values()]
    ranks = ", ".join(map(str, sorted({rank for at, rank, _, _ in found if at == step})))
    return f"{where} (rank {ranks}): {_some(shown)}", _reason([*lost], are_samples="the samples" in texts)


def _values(records: Sequence[Record]) -> dict[tuple[int, str], str]:
    """By step and name. Later records add to earlier ones: an evaluation, for example, need not be repeated."""
    return {(each["step"], name): value for each in records for name, value in each["facts"].items()}


def _restarts(records: Sequence[Record]) -> list[tuple[Record, Record]]:
    """The last record of each process but the last one, and the first of the next process."""
    return [(before, start) for before, start in pairwise(records) if before["pid"] != start["pid"]]


def _decides(name: str, value: str, other: str, *, is_last: bool) -> bool:
    """Whether the difference is one of the results."""
    if name[0] == _OWN:
        # Many variables start over without effect, but a tensor that differs at the end, like an average, is a result.
        return is_last and bool(_TENSOR.match(value) and _TENSOR.match(other))
    # What a dead rank has computed for a step that others have completed is not computed again.
    return other != "absent" or name not in _COMPUTED - {"the evaluation after it"}


def _reason(lost: Sequence[str], *, are_samples: bool) -> str:
    """The likely reason: what was not restored, since all else follows from it."""
    # A generator within an object, such as a sampler, is restored with that object.
    if generators := [each for each in lost if each.startswith("generator") and "." not in each]:
        return f"the Keeper does not keep {_some(generators)}: pass it as per_rank=[…]"
    reasons = ["the data begin again: pass per_rank=Batches(loader)"] if are_samples else []
    if objects := dict.fromkeys(each if "`" in each else f"`{each.partition('.')[0]}`" for each in lost):
        reasons.append(f"the Keeper does not keep {_some([*objects])}: pass it (extra=, scheduler=, …)")
    return ". Or ".join(reasons) or "state that is neither kept nor recorded here, or a change outside keeper.commit()"


def _some(names: Sequence[str]) -> str:
    """The first few of them, and how many more there are."""
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
