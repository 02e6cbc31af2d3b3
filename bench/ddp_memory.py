"""The memory of a worker per parameter with DDP, measured, beside the formulas of the docs.

python -m bench.ddp_memory
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.contenders import ELAUNCH, environment
from bench.job import SCRIPTS

RANKS = 2
_LIMIT_S = 300.0


@dataclass(frozen=True)
class Case:
    """One way to use DDP, and the bytes per parameter that remain between two steps, by docs/parallelism.md."""

    name: str
    options: dict[str, Any]
    bytes_per_parameter: int


# float32 weights, gradients, and two moments of AdamW.
CASES = (
    Case("DDP", {}, 16),
    Case("--comm-hook fp16", {"hook": "fp16"}, 16),
    Case("--comm-hook quantised", {"hook": "quantised"}, 16),
    Case("--comm-hook powersgd", {"hook": "powersgd", "powersgd_start": 2}, 20),
    Case("--comm-hook batched-powersgd", {"hook": "batched-powersgd", "powersgd_start": 2}, 20),
)


def measured(case: Case) -> dict[str, float]:
    """`steady` and `highest` bytes per parameter of rank 0."""
    with tempfile.TemporaryDirectory(prefix="bench_") as folder:
        words = ["--nproc-per-node", str(RANKS), "--max-restarts", "0", str(SCRIPTS / "ddp_memory.py")]
        extra = {"BENCH_DDP": json.dumps(case.options), "BENCH_MEMORY": f"{folder}/memory", "TMPDIR": folder}
        env = environment(os.environ, ELAUNCH, extra)
        command = [str(Path(sys.executable).with_name("elaunch")), *words]
        subprocess.run(command, cwd=folder, env=env, check=True, timeout=_LIMIT_S, stderr=subprocess.DEVNULL)
        found: dict[str, float] = json.loads((Path(folder) / "memory").read_text())
        return found


def main() -> int:
    print("| | formula | between two steps | at the highest |\n|---|---|---|---|", flush=True)
    for case in CASES:
        found = measured(case)
        values = f"{found['steady']:.1f} | {found['highest']:.1f}"
        print(f"| {case.name} | {case.bytes_per_parameter} | {values} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
