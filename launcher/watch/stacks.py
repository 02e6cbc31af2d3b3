"""`elaunch stacks`: where every rank is, equal stacks together; pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from elaunch.agent.diagnosis.stack_groups import full_text, group_words, grouped, place_words
from elaunch.launcher.watch.record import VERSION
from elaunch.launcher.watch.source import NodeStacks
from elaunch.launcher.watch.words import plural
from elaunch.rendezvous.job_spec import job_name
from elaunch.rendezvous.texts import plain


def stacks_text(taken: NodeStacks) -> str:
    """What `elaunch stacks` prints: a line for each group, then the groups' stacks in full."""
    remarks = [*taken.silent, *taken.notes]
    if not taken.stacks:
        lines = [f"{job_name(taken.run_id)}: no worker runs now", *remarks]
        return "".join(f"{plain(line)}\n" for line in lines)
    groups = grouped(taken.stacks)
    same = "at the same place" if len(groups) == 1 else f"at {len(groups)} places"
    lines = [f"{job_name(taken.run_id)}: {plural(len(taken.stacks), 'rank')} {same}"]
    lines += [f"  {group_words(group)}" for group in groups]
    lines += remarks
    return "".join(f"{plain(line)}\n" for line in (*lines, "", *full_text(taken.stacks).splitlines()))


def stacks_record(taken: NodeStacks) -> dict[str, Any]:
    """The object of `--json`; docs/observe.md has its schema."""
    return {
        "version": VERSION,
        "run_id": taken.run_id,
        "groups": [
            {"ranks": list(group.ranks), "where": place_words(group.stack), "stack": _fields(asdict(group.stack))}
            for group in grouped(taken.stacks)
        ],
        "silent": list(taken.silent),
        "notes": list(taken.notes),
    }


def _fields(stack: dict[str, Any]) -> dict[str, Any]:
    """The stack without its rank, which stands beside it."""
    return {name: value for name, value in stack.items() if name != "rank"}
