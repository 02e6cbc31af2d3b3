"""The bytes that a rank sends in a step of DDP with each communication hook, counted, beside the formulas of the docs.

    python -m bench.ddp_bytes --ranks 2,3,4

Each number of ranks runs in a network namespace of its own (`unshare --net`, which needs root or user namespaces), so
that the kernel's counter of its loopback has these bytes only. Headers of TCP and acknowledgements are in it too.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.contenders import ELAUNCH, environment
from bench.job import SCRIPTS
from elaunch.trainer.ddp.powersgd import SAVES_MIN
from elaunch.trainer.ddp.quantised import HEADER_BYTES

POWERSGD_RANK = 2
_LIMIT_S = 300.0


def formula(hook: str, ranks: int, shapes: Sequence[Sequence[int]], buckets: Sequence[int]) -> float:
    """Bytes that a rank sends in a step, by docs/parallelism.md."""
    elements = sum(map(math.prod, shapes))
    ring = 2 * (ranks - 1) / ranks
    match hook:
        case "none":
            return ring * 4 * elements
        case "fp16" | "bf16":
            return ring * 2 * elements
        case "quantised":
            # A bucket's shares cut one of its tensors at each border.
            return ring * (elements + HEADER_BYTES * (len(shapes) + (ranks - 1) * len(buckets)))
        case "powersgd":
            return ring * 4 * sum(map(_powersgd_elements, shapes))
        case "batched-powersgd":
            return ring * 8 * POWERSGD_RANK * sum(math.ceil(math.sqrt(size / 4)) for size in buckets)
    raise ValueError(f"no formula for {hook}")


def _powersgd_elements(shape: Sequence[int]) -> int:
    if len(shape) < 2:
        return math.prod(shape)
    rows, columns = shape[0], math.prod(shape[1:])
    factors = POWERSGD_RANK * (rows + columns)
    return factors if factors * SAVES_MIN < rows * columns else rows * columns


def counted(ranks: int) -> list[dict[str, object]]:
    """What the script counts with so many ranks."""
    with tempfile.TemporaryDirectory(prefix="bench_") as folder:
        elaunch = str(Path(sys.executable).with_name("elaunch"))
        words = [elaunch, "--nproc-per-node", str(ranks), "--max-restarts", "0", str(SCRIPTS / "ddp_bytes.py")]
        unshared = ["unshare", "--net", *(() if os.geteuid() == 0 else ("--map-root-user",))]
        env = environment(os.environ, ELAUNCH, {"BENCH_BYTES": f"{folder}/bytes", "TMPDIR": folder})
        command = [*unshared, "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *words]
        subprocess.run(command, cwd=folder, env=env, check=True, timeout=_LIMIT_S, stdout=subprocess.DEVNULL)
        return [json.loads(line) for line in (Path(folder) / "bytes").read_text().splitlines()]


def rows(found: Sequence[dict[str, object]]) -> list[str]:
    """The lines of the table: hook, ranks, counted, by the formula, ratio."""
    lines = []
    for one in found:
        hook, ranks, sent = str(one["hook"]), int(str(one["ranks"])), float(str(one["sent"]))
        expected = formula(hook, ranks, one["shapes"], one["buckets"])  # type: ignore[arg-type]
        lines.append(f"| `{hook}` | {ranks} | {sent:,.0f} | {expected:,.0f} | {sent / expected:.3f} |")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.ddp_bytes", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="2,3,4", help="numbers of ranks (2,3,4)")
    options = parser.parse_args(argv)
    print("| hook | ranks | counted | formula | ratio |\n|---|---|---|---|---|", flush=True)
    for ranks in options.ranks.split(","):
        print("\n".join(rows(counted(int(ranks)))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
