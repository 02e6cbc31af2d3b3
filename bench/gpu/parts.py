"""The parts of `make gpu`: their commands and limits, their figures, and the tables of the page. Text in, text out."""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.launches import RESTART, START
from bench.page import NOTHING, measured, replaced, seconds, stages, table
from bench.samples import decode
from bench.state import COST_SECTION

Figures = dict[str, Any]

# The first steps compile, allocate and find out which kernel is fast.
SETTLED_STEP = 10
# A line of pytest-xdist about a test that has ended.
_ENDED = re.compile(r"^\[gw\d+\] \[ *\d+%\] (PASSED|FAILED|SKIPPED|ERROR) \S+::(\S+)", re.MULTILINE)
ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "bench" / "scripts"
# The windows of a forward pass and of a step.
WINDOWS, ACCUMULATED, CONTEXT = 12, 5, 1024
STEPS = 30
RANKS_SAMPLES = 10
# The last ones: after a profile, steps stay slower than before it.
PROFILED = "27-29"
# GPT-2's 124 million parameters but for the vocabulary; see scripts/gpt_of_124m.py.
SHAPE = ("--layers", "12", "--heads", "12", "--width", "768", "--context", str(CONTEXT))
BATCH = ("--global-batch", str(WINDOWS * ACCUMULATED), "--micro-batch", str(WINDOWS), "--steps", str(STEPS))
GPT2_VOCABULARY, BYTES = 50304, 256


@dataclass(frozen=True)
class Part:
    """`command` runs in `folder`, which is there and empty, for at most `limit_s`. `read` gets its output."""

    name: str
    limit_s: float
    command: tuple[str, ...]
    read: Callable[[str], Figures]
    folder: Path
    env: Mapping[str, str] = field(default_factory=dict)


def parts(out: Path, *, shape: tuple[str, ...] = (*SHAPE, *BATCH)) -> list[Part]:
    """All parts; the ones whose figures are used most come first, since the time may end before the last."""
    one_rank, ranks = ("test_accelerator.py", "test_doctor.py::test_this_node_can_train"), ("test_nccl.py",)
    return [
        _facts(out / "facts"),
        _ranks_facts(out / "ranks-facts"),
        _tests(out / "ranks-tests", 240, ranks),
        _launches(out / "ranks-restarts", 220, "restart", "2,4", RANKS_SAMPLES, {"BENCH_DEVICE": "shared"}),
        _tests(out / "tests", 120, one_rank),
        _launches(out / "launches", 90, "start,restart", "1", 3, {}),
        _trainer(out / "bf16-compile-124m", shape, "--bf16", "--compile", vocabulary=GPT2_VOCABULARY),
        _commits(out / "commits"),
        _trainer(out / "bf16-compile", shape, "--bf16", "--compile", "--profile", PROFILED),
        _trainer(out / "bf16", shape, "--bf16"),
        _trainer(out / "float32", shape),
    ]


def _facts(folder: Path) -> Part:
    command = (*_elaunch(folder), str(SCRIPTS / "gpu_facts.py"))
    return Part("facts", 60, command, facts, folder)


def _ranks_facts(folder: Path) -> Part:
    return Part("ranks-facts", 150, (sys.executable, str(SCRIPTS / "nccl_facts.py")), facts, folder)


def _tests(folder: Path, limit_s: float, which: tuple[str, ...]) -> Part:
    options = ("-v", "-rP", "-m", "", "-p", "no:cacheprovider", "-n", "4")
    command = (sys.executable, "-m", "pytest", *options, *(str(ROOT / "tests" / "e2e" / each) for each in which))
    # Its tests find the repository's modules.
    return Part(folder.name, limit_s, command, tests, folder, {"PYTHONPATH": str(ROOT)})


def _launches(folder: Path, limit_s: float, only: str, workers: str, samples: int, env: Mapping[str, str]) -> Part:
    options = ("--only", only, "--workers", workers, "--contenders", "elaunch,torchrun", "--samples", str(samples))
    return _bench(folder, limit_s, options, env)


def _commits(folder: Path) -> Part:
    return _bench(folder, 90, ("--only", "state-cost", "--workers", "1", "--samples", "4"), {})


def _bench(folder: Path, limit_s: float, options: tuple[str, ...], env: Mapping[str, str]) -> Part:
    samples = folder / "samples.json"
    files = ("--out", str(samples), "--page", str(folder / "page.md"), "--limit-s", "30")
    command = (sys.executable, "-m", "bench", *options, *files)
    where = "with several ranks, which may share one GPU" if "BENCH_DEVICE" in env else "with one rank on the GPU"
    env = {"PYTHONPATH": str(ROOT), **env}
    return Part(folder.name, limit_s, command, lambda _: launches(samples.read_text(), where), folder, env)


def _trainer(folder: Path, shape: tuple[str, ...], *options: str, vocabulary: int = BYTES) -> Part:
    program = ("-m", "elaunch.trainer") if vocabulary == BYTES else (str(SCRIPTS / "gpt_of_124m.py"),)
    command = (*_elaunch(folder), *program, *shape, *options, "--lr", "6e-4", "--out", "run")

    def read(_: str) -> Figures:
        records = [*(folder / "logs").glob("latest/attempt_*/profile/profile.json")]
        profile = json.loads(records[0].read_text()) if records else None
        return trained((folder / "run" / "metrics.jsonl").read_text().splitlines(), profile)

    return Part(folder.name, 90, command, read, folder)


def _elaunch(folder: Path) -> tuple[str, ...]:
    return (sys.executable, "-m", "elaunch", "--nproc-per-node", "1", "--log-dir", str(folder / "logs"))


def facts(output: str) -> Figures:
    """The object behind the word `facts`, as gpu_facts.py and nccl_facts.py print it. Raises ValueError without it."""
    found = re.search(r"facts (\{.*\})", output)
    if not found:
        raise ValueError("it printed no facts")
    record: Figures = json.loads(found[1])
    return record


def tests(output: str) -> Figures:
    """The numbers of tests that have ended, also if pytest was stopped, and `wrong`, those that failed.

    Raises ValueError if none has ended.
    """
    ended = _ENDED.findall(output)
    if not ended:
        raise ValueError("no test has ended")
    counts = Counter(outcome.lower() for outcome, _ in ended)
    wrong = sorted({name for outcome, name in ended if outcome in ("FAILED", "ERROR")})
    speed = re.search(r"copied beside a stuck stream: ([0-9.]+) GB/s", output)
    return {**counts, **({"wrong": wrong} if wrong else {}), **({"copy_gb_per_s": float(speed[1])} if speed else {})}


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


def launches(text: str, where: str) -> Figures:
    """The tables of what `python -m bench --out FILE` wrote. Raises ValueError if no sample has a time."""
    results = decode(text)
    tables = [
        *measured(results, START, f"Start {where}", "s from the command"),
        *stages(results, START, "the command"),
        *measured(results, RESTART, f"Restart {where}", "s from SIGKILL of a worker"),
        *stages(results, RESTART, "the kill"),
        *measured(results, COST_SECTION, f"The Keeper while nothing fails, {where}", "Pairs of turns.", count="MB"),
    ]
    if not any(sample.values for sample in results.samples):
        raise ValueError("no sample has a time")
    return {"tables": tables}


BEGIN, END = "<!-- gpu:begin -->", "<!-- gpu:end -->"
NOT_RUN = "Not run yet: no machine with a GPU has made this part of the page."
_TRAININGS = (
    ("the bundled trainer, 124 M, bf16, compiled", "bf16-compile-124m"),
    ("the bundled trainer, bytes, bf16, compiled", "bf16-compile"),
    ("the bundled trainer, bytes, bf16", "bf16"),
    ("the bundled trainer, bytes, float32", "float32"),
)
# The facts of scripts/nccl_facts.py: those of each way to handle errors, and the others.
_AFTER_A_KILL = {
    "stream_continued_s": "stream continued after s",
    "status": "status of the group",
    "raised": "wait() raised",
    "summed": "share summed",
    "own": "share of its own",
}
_OF_RANKS = {
    "beside_gb_per_s": "GB/s of a copy of the state while NCCL's kernel waits",
    "beside_still_waits": "the kernel still waits after that copy",
    "context_to_all_reduce_s": "s of a forked worker for context, group and first all-reduce",
    "ahead_to_all_reduce_s": "the same if its context was made before",
    "memory_reaped_s": "s from SIGKILL until a process with 8 GiB of GPU memory is reaped",
    "memory_free_s": "s from that SIGKILL until the memory is free",
}
_FACTS = ("gpu", "gpus", "memory_gb", "driver", "torch", "cuda", "nccl")


def update(page: str, results: Mapping[str, Any]) -> str:
    """`page` with the part between the markers replaced. Raises ValueError if the markers are missing."""
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
        *_ranks(found.get("ranks-facts", {})),
        *(each for name in ("ranks-restarts", "launches", "commits") for each in found.get(name, {}).get("tables", ())),
        *_trainings(found),
        *_test_counts(found),
        *_incomplete(parts),
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


def _ranks(facts: Mapping[str, Any]) -> list[str]:
    if not facts:
        return []
    heads = ("ASYNC_ERROR_HANDLING", *_AFTER_A_KILL.values())
    rows = [
        (handling, *(str(facts.get(f"killed_{handling}_{name}", NOTHING)) for name in _AFTER_A_KILL))
        for handling in "0123"
    ]
    others = "\n".join(f"- {text}: {facts[name]}" for name, text in _OF_RANKS.items() if name in facts)
    return [
        "### Two ranks, one of which is killed during an all-reduce\n\n"
        f"What the survivor holds. Backend: {facts['backend']}.\n\n{table(heads, rows)}\n\n{others}"
    ]


def _trainings(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    rows = []
    for title, name in _TRAININGS:
        if name not in found:
            continue
        figures = found[name]
        busy = figures.get("gpu_busy")
        rows.append(
            (
                title,
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


def _test_counts(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = []
    for name, whose in (("ranks-tests", "several ranks"), ("tests", "one rank")):
        figures = found.get(name, {})
        words = ("passed", "failed", "error", "skipped")
        if counts := ", ".join(f"{figures[word]} {word}" for word in words if word in figures):
            speed = figures.get("copy_gb_per_s")
            copied = f". The Keeper copies the state beside a stuck stream with {speed:.1f} GB/s" if speed else ""
            lines += [f"- {whose}: {counts}{copied}", *(f"    - failed: {each}" for each in figures.get("wrong", ()))]
    return ["### Tests\n\n" + "\n".join(lines)] if lines else []


def _incomplete(parts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = [f"- {name}: {part['why']}" for name, part in parts.items() if part.get("why")]
    return ["### Incomplete parts\n\n" + "\n".join(lines)] if lines else []


def failed(parts: Mapping[str, Mapping[str, Any]]) -> Sequence[str]:
    """The parts that went wrong; one that was left out did not."""
    return [name for name, part in parts.items() if part.get("went_wrong") or (part.get("figures") or {}).get("wrong")]
