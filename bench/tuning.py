"""What tuning the communication gains over slow links: python -m bench.tuning, as root. It takes about 8 minutes.

Two workers on two network namespaces, whose interfaces `tc tbf` holds to a rate. They have 38 MB of gradients, 8 MB at
100 Mbit/s, of the bundled GPT on CPUs or of a chain of layers that an accelerator would compute; scripts/tuned.py tunes
and lets DDP's defaults, the tuned settings and the tuned settings with lossy hooks take turns. The table is printed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.stats import percentile
from tests.harness import environment
from tests.nodes import Node, Nodes, missing

RATES_MBIT = (100, 1000, 10000)
COMPUTE = ("cpu", "accelerator")
DEFAULTS, TUNED, LOSSY = "DDP's defaults", "tuned", "tuned, lossy"
_SCRIPT = Path(__file__).parent / "scripts" / "tuned.py"
_LIMIT_S = 3600
# Below this rate a step of the whole model takes seconds, and a search several minutes.
_WHOLE_FROM_MBIT = 300
_COLUMNS = (
    *(
        "computed by",
        "link, Mbit/s",
        "measured",
        "gradients, MB",
        "contender",
        "settings",
        "step, ms: median",
        "p95",
        "times as fast",
    ),
    *("passes of tuning", "their time, s"),
)


def hold_to(node: Node, mbit: int) -> None:
    """Let the node's interface send this much at most."""
    # A bucket of 2 ms: the kernel's timers fill a smaller one too late at high rates.
    burst = max(128_000, mbit * 1_000_000 // 8 // 500)
    queue = burst + mbit * 1_000_000 // 8 // 20
    words = f"qdisc replace dev eth0 root tbf rate {mbit}mbit burst {burst} limit {queue}"
    node.run("tc", *words.split())


def measured(compute: str, mbit: int, count: int) -> dict[str, Any]:
    """What rank 0 of scripts/tuned.py says, on nodes with such a link."""
    with Nodes(2) as nodes, tempfile.TemporaryDirectory(prefix="bench_") as folder:
        for node in nodes:
            hold_to(node, mbit)
        ranks = []
        for rank, node in enumerate(nodes):
            variables = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": nodes[0].ipv4}
            variables |= {"MASTER_PORT": 29500, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": 1}
            env = environment({**{k: str(v) for k, v in variables.items()}, "XDG_CACHE_HOME": folder})
            parts = "4" if mbit >= _WHOLE_FROM_MBIT else "1"
            command = (sys.executable, str(_SCRIPT), str(count), compute, parts)
            ranks.append(node.popen(*command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        ends = [process.communicate(timeout=_LIMIT_S) for process in ranks]
    for process, (_, err) in zip(ranks, ends, strict=True):
        if process.returncode:
            raise SystemExit(f"a worker ended with exit code {process.returncode}:\n{err}")
    found: dict[str, Any] = json.loads(ends[0][0].splitlines()[-1])
    return found


def rows(compute: str, mbit: int, found: Mapping[str, Any]) -> list[list[str]]:
    """The table's rows of one link."""
    steps: Mapping[str, Sequence[float]] = found["steps"]
    lines = []
    for name in (DEFAULTS, TUNED, LOSSY):
        is_first = name == DEFAULTS
        median_s = statistics.median(steps[name])
        lines.append(
            [
                compute if is_first else "",
                f"{mbit:,}" if is_first else "",
                f"{found['mbit']:,.0f}" if is_first else "",
                f"{found['megabytes']:.0f}" if is_first else "",
                name,
                "buckets of 25 MiB" if is_first else found[name]["words"],
                f"{1000 * median_s:.0f}",
                f"{1000 * percentile(steps[name], 0.95):.0f}",
                f"{statistics.median(steps[DEFAULTS]) / median_s:.2f}",
                "" if is_first else str(found[name]["passes"]),
                "" if is_first else f"{found[name]['spent_s']:.1f}",
            ]
        )
    return lines


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.tuning")
    parser.add_argument("--n", type=int, default=20, help="steps of each contender")
    parser.add_argument("--rates", default=",".join(map(str, RATES_MBIT)), help="Mbit/s, with commas")
    parser.add_argument("--compute", default=",".join(COMPUTE), help="cpu, accelerator, or both with a comma")
    options = parser.parse_args(argv)
    if why := missing():
        print(why, file=sys.stderr)
        return 2
    print("| " + " | ".join(_COLUMNS) + " |\n| --- |" + " ---: | ---: | ---: | --- | --- |" + " ---: |" * 5, flush=True)
    for compute, mbit in itertools.product(options.compute.split(","), map(int, options.rates.split(","))):
        found = measured(compute, mbit, options.n)
        for row in rows(compute, mbit, found):
            print("| " + " | ".join(row) + " |", flush=True)
        for sentence in found["said"]:
            print(f"{compute}, {mbit} Mbit/s: {sentence}", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
