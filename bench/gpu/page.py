"""The part of bench/results/gpu.md between its markers, from the figures of a run (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.page import replaced
from bench.tables import NOTHING, seconds, table

BEGIN, END = "<!-- gpu:begin -->", "<!-- gpu:end -->"
NOT_RUN = "Not run yet: no machine with a GPU has made this part of the page."
_TRAININGS = (
    ("the bundled trainer, 124 M, bf16, compiled", "bf16-compile-124m"),
    ("the bundled trainer, bytes, bf16, compiled", "bf16-compile"),
    ("the bundled trainer, bytes, bf16", "bf16"),
    ("the bundled trainer, bytes, float32", "float32"),
)
_FACTS = ("gpu", "gpus", "memory_gb", "driver", "torch", "cuda", "nccl")


def update(page: str, results: Mapping[str, Any]) -> str:
    """`page` with the part between the markers made anew. Raises ValueError if the markers are missing."""
    return replaced(page, BEGIN, END, render(results))


def render(results: Mapping[str, Any]) -> str:
    """The tables. `results` has `machine`, and `parts`: by name `figures`, or `why` there are none."""
    parts = results["parts"]
    found = {name: part["figures"] for name, part in parts.items() if part.get("figures")}
    facts = found.get("facts", {})
    machine = {**{name: facts[name] for name in _FACTS if name in facts}, **results["machine"]}
    sections = [
        "\n".join(f"- {name.replace('_', ' ')}: {value}" for name, value in machine.items()),
        *_first(facts),
        *_trainings(found),
        *found.get("launches", {}).get("tables", ()),
        *_tests(found.get("tests", {})),
        *_missing(parts),
    ]
    return "\n\n".join(sections) + "\n"


def _first(facts: Mapping[str, Any]) -> list[str]:
    if not facts:
        return []
    return [
        "### NCCL with one rank\n\n"
        f"CUDA's context takes {facts['context_s']:.2f} s, the group with its first all-reduce "
        f"{facts['first_all_reduce_s']:.2f} s, a small model's first compiled pass {facts['compile_s']:.1f} s. "
        f"The flight recorder has all {facts['flight_recorder']} all-reduces."
    ]


def _trainings(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    rows = []
    for words, name in _TRAININGS:
        if name not in found:
            continue
        figures = found[name]
        busy = figures.get("gpu_busy")
        rows.append(
            (
                words,
                str(figures["steps"]),
                f"{figures['tokens_per_s']:,.0f}",
                seconds(figures["step_s"]),
                NOTHING if busy is None else f"{100 * busy:.0f} %",
            )
        )
    if not rows:
        return []
    heads = ("", "n", "tokens/s", "step s", "GPU computes")
    return [f"### A GPT of 12 layers, width 768, context 1024\n\nMedians of the settled steps.\n\n{table(heads, rows)}"]


def _tests(figures: Mapping[str, Any]) -> list[str]:
    if not figures:
        return []
    counts = ", ".join(f"{figures[w]} {w}" for w in ("passed", "failed", "error", "errors", "skipped") if w in figures)
    speed = figures.get("copy_gb_per_s")
    copied = f" The Keeper copies the state beside a stuck stream with {speed:.1f} GB/s." if speed else ""
    return [f"### Tests\n\ntests/e2e/test_accelerator.py: {counts}.{copied}"]


def _missing(parts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = [f"- {name}: {part['why']}" for name, part in parts.items() if part.get("why")]
    return ["### Not measured\n\n" + "\n".join(lines)] if lines else []


def failed(parts: Mapping[str, Mapping[str, Any]]) -> Sequence[str]:
    """The parts that went wrong; one that was left out did not."""
    return [
        name
        for name, part in parts.items()
        if part.get("went_wrong")
        or any((part.get("figures") or {}).get(word) for word in ("failed", "error", "errors"))
    ]
