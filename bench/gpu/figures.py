"""Reads the figures out of what the parts of `make gpu` print and write (pure)."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

Figures = dict[str, Any]

# The first steps compile, allocate and find out which kernel is fast.
SETTLED_STEP = 10
_PYTEST = re.compile(r"(\d+) (passed|failed|skipped|errors?)\b")


def facts(output: str) -> Figures:
    """The object behind the word `facts`, as scripts/gpu_facts.py prints it. Raises ValueError without it."""
    found = re.search(r"facts (\{.*\})", output)
    if not found:
        raise ValueError("it printed no facts")
    record: Figures = json.loads(found[1])
    return record


def tests(output: str) -> Figures:
    """What pytest's last line counts. Raises ValueError if there is none."""
    counts = {word: int(number) for number, word in _PYTEST.findall(output.strip().splitlines()[-1] if output else "")}
    if not counts:
        raise ValueError("pytest printed no result")
    speed = re.search(r"copied beside a stuck stream: ([0-9.]+) GB/s", output)
    return {**counts, **({"copy_gb_per_s": float(speed[1])} if speed else {})}


def trained(lines: Iterable[str], profile: Mapping[str, Any] | None) -> Figures:
    """Tokens per second, the median of the settled steps; of the profile what the GPU did.

    `lines` are those of metrics.jsonl. Raises ValueError with too few of them.
    """
    records = [json.loads(line) for line in lines]
    # The profiler slows steps down from the one before on, and those after it.
    end = profile["first_step"] - 2 if profile else math.inf
    settled = [each for each in records if SETTLED_STEP <= each["step"] <= end]
    if len(settled) < 3:
        raise ValueError(f"it made {len(records)} steps, too few to measure")
    found: Figures = {
        "tokens_per_s": statistics.median(each["tokens_per_s"] for each in settled),
        "step_s": statistics.median(each["seconds"] for each in settled),
        "steps": len(settled),
    }
    if profile:
        found |= {"gpu_busy": profile.get("gpu_busy"), "profiled_step_s": profile.get("step_s")}
    return found


def launches(text: str) -> Figures:
    """Medians of what `python -m bench --out FILE` wrote, by section and contender; of elaunch its stages too."""
    samples = json.loads(text)["samples"]
    found: Figures = {}
    for section in ("start", "restart"):
        for contender in dict.fromkeys(each["contender"] for each in samples if each["section"] == section):
            taken = [s for s in samples if (s["section"], s["contender"]) == (section, contender) and not s["why"]]
            if taken:
                found[f"{section}: {contender}"] = {"n": len(taken), **_medians(each["values"] for each in taken)}
                stages = _medians(each["stages"] for each in taken)
                found |= {f"{section}: stages": stages} if stages else {}
    if not found:
        raise ValueError("no sample has a time")
    return found


def _medians(each: Iterable[Mapping[str, float]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for one in each:
        for name, value in one.items():
            values.setdefault(name, []).append(value)
    return {name: statistics.median(many) for name, many in values.items()}
