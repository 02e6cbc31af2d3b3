"""The parts of `make gpu`, in order: what is run, for how long at most, and how its figures are read."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench.gpu import figures
from bench.gpu.figures import Figures

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "bench" / "scripts"
# The windows of a forward pass and of a step.
WINDOWS, ACCUMULATED, CONTEXT = 12, 5, 1024
STEPS = 30
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
    """All parts; the ones whose figures are asked for most come first, since the time may end before the last."""
    return [
        _facts(out / "facts"),
        _trainer(out / "bf16-compile-124m", shape, "--bf16", "--compile", vocabulary=GPT2_VOCABULARY),
        _tests(out / "tests"),
        _launches(out / "launches"),
        _trainer(out / "bf16-compile", shape, "--bf16", "--compile", "--profile", PROFILED),
        _trainer(out / "bf16", shape, "--bf16"),
        _trainer(out / "float32", shape),
    ]


def _facts(folder: Path) -> Part:
    command = (*_elaunch(folder), str(SCRIPTS / "gpu_facts.py"))
    return Part("facts", 60, command, figures.facts, folder)


def _tests(folder: Path) -> Part:
    options = ("-q", "-rP", "-m", "", "-p", "no:cacheprovider")
    command = (sys.executable, "-m", "pytest", *options, str(ROOT / "tests" / "e2e" / "test_accelerator.py"))
    # Its tests find the repository's modules.
    return Part("tests", 170, command, figures.tests, folder, {"PYTHONPATH": str(ROOT)})


def _launches(folder: Path) -> Part:
    samples = folder / "samples.json"
    options = ("--only", "start,restart", "--workers", "1", "--contenders", "elaunch,torchrun", "--samples", "3")
    files = ("--out", str(samples), "--page", str(folder / "page.md"), "--limit-s", "30")
    command = (sys.executable, "-m", "bench", *options, *files)
    return Part(
        "launches", 120, command, lambda _: figures.launches(samples.read_text()), folder, {"PYTHONPATH": str(ROOT)}
    )


def _trainer(folder: Path, shape: tuple[str, ...], *options: str, vocabulary: int = BYTES) -> Part:
    program = ("-m", "elaunch.trainer") if vocabulary == BYTES else (str(SCRIPTS / "gpt_of_124m.py"),)
    command = (*_elaunch(folder), *program, *shape, *options, "--lr", "6e-4", "--out", "run")

    def read(_: str) -> Figures:
        records = [*(folder / "logs").glob("latest/attempt_*/profile/profile.json")]
        profile = json.loads(records[0].read_text()) if records else None
        return figures.trained((folder / "run" / "metrics.jsonl").read_text().splitlines(), profile)

    return Part(folder.name, 90, command, read, folder)


def _elaunch(folder: Path) -> tuple[str, ...]:
    return (sys.executable, "-m", "elaunch", "--nproc-per-node", "1", "--log-dir", str(folder / "logs"))
