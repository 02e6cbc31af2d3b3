"""Memory and step time of the trainer's plans beside estimates: `python -m bench.plans [WORKERS [STEPS [WORD …]]]`.

Each plan is one job. The table has, for the worker that needs most, the peak of its memory above that of a process
without a network, the step's time, and the bytes per parameter that it holds at the end of a backward pass. The C
library gives each freed tensor back to the kernel, so that the peak is that of tensors. With the word `fragmented` it
does as it does by default, and keeps much of what is freed. With `bf16` the network computes in bfloat16.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection
from dataclasses import asdict
from typing import Any

from bench.contenders import ELAUNCH, environment
from bench.job import SCRIPTS
from elaunch.trainer.parallel.checks import Shape, require_fitting
from elaunch.trainer.parallel.estimate import Memory, WorkerSpeed, estimate
from elaunch.trainer.parallel.plan import ParallelPlan, PlanError, fit, parse

SHAPE = Shape(layers=8, heads=8, width=384, context=128, global_batch=32, micro_batch=4)
PLANS = [
    *("ddp", "zero1", "zero2", "fsdp2", "hsdp", "tp=2", "fsdp=2,tp=2", "tp=4", "pp=2", "pp=4", "fsdp=2,pp=2"),
    *("tp=2,pp=2", "pp=4,schedule=gpipe", "pp=2,schedule=interleaved"),
]
WORKERS, STEPS = 4, 6
_LIMIT_S = 300.0
# Bytes from which on each tensor has pages of its own.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536"}


def measured(plan: str, workers: int, steps: int, words: Collection[str]) -> dict[str, Any]:
    """What the plan took."""
    options = {**asdict(SHAPE), "bf16": "bf16" in words}
    program = [str(SCRIPTS / "plan_cost.py"), plan, json.dumps(options), str(steps)]
    command = [sys.executable, "-m", "elaunch", "--max-restarts", "0", "--nproc-per-node", str(workers), *program]
    ended = subprocess.run(
        command,
        env=environment(os.environ, ELAUNCH, {} if "fragmented" in words else _MALLOC),
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    lines = [line.partition("{")[1] + line.partition("{")[2] for line in ended.stdout.splitlines() if "{" in line]
    if ended.returncode or not lines:
        raise SystemExit(f"{plan} failed: {ended.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def held(plan: ParallelPlan, memory: Memory) -> int:
    """What the formulas say of the end of a backward pass: parameters, gradients, and both moments.

    FSDP2 has whole gradients in between only; at the end they are divided as the parameters are.
    """
    return memory.parameters + memory.moments + (memory.gradients if plan.has_ddp else memory.parameters)


def row(name: str, workers: int, steps: int, words: Collection[str]) -> str:
    """A row of the table."""
    plan = parse(name)
    try:
        sizes = fit(plan, workers)
        require_fitting(plan, sizes, SHAPE)
    except PlanError as error:
        return f"| `{name}` | {error} | | | | | | | |"
    found = measured(name, workers, steps, words)
    guess = estimate(plan, sizes, SHAPE, WorkerSpeed(**found["worker"]), bf16="bf16" in words)
    memory, seconds = guess.memory.step, guess.duration.total
    of_memory, of_time = memory / found["peak"] - 1, seconds / found["step_s"] - 1
    per_parameter = [size / found["parameters"] for size in (held(plan, guess.memory), found["held"])]
    return (
        f"| `{name}` | {memory / 1e6:.0f} | {found['peak'] / 1e6:.0f} | {100 * of_memory:+.0f} % "
        f"| {seconds:.3f} | {found['step_s']:.3f} | {100 * of_time:+.0f} % "
        f"| {per_parameter[0]:.1f} | {per_parameter[1]:.1f} |"
    )


def main() -> None:
    """Print the table."""
    words = sys.argv[1:]
    workers, steps = int(words[0]) if words else WORKERS, int(words[1]) if len(words) > 1 else STEPS
    print("| plan | peak, MB: estimate | measured | error | step, s: estimate | measured | error ", end="")
    print(f"| held, bytes per parameter: formula | measured |\n{'|---' * 9}|")
    for name in PLANS:
        print(row(name, workers, steps, words[2:]), flush=True)
    print(f"\n{workers} workers, {steps} steps, load {os.getloadavg()[0]:.1f}; {SHAPE}")


if __name__ == "__main__":
    main()
