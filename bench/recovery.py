"""What a new group of thousands of ranks decides before it goes on, without the ranks: python -m bench.recovery.

Each node has 8 ranks, and one node in 64 is new. The table has the time and the peak of memory of one rank's decision,
and the bytes of what all ranks tell each other for it.
"""

from __future__ import annotations

import pickle
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

from elaunch.trainer.memory.mirror import mirrors
from elaunch.trainer.memory.recovery_plan import (
    Held,
    Holding,
    Inventory,
    Record,
    choose,
    decide,
    digest_of,
    pieces_on_nodes,
)
from elaunch.trainer.state.version import Piece, Version

SIZES = (1024, 4096, 16_384)
PER_NODE = 8
NEW = 64
STEPS = (41, 42)


def inventories(ranks: int, *, sharded: bool) -> list[Inventory]:
    """What each rank tells: its node has the state or its pieces, and those that it mirrors, of two steps."""
    found = []
    whole = digest_of(f"own-{rank:016x}" for rank in range(ranks))
    for first in range(0, ranks, PER_NODE):
        is_new = first % (NEW * PER_NODE) == PER_NODE
        there = [] if is_new else [rank % ranks for rank in range(first - PER_NODE, first + PER_NODE)]
        records = tuple(Record(rank, Version(3, step), sharded) for rank in there for step in STEPS)
        holdings = () if is_new or sharded else tuple(Holding(Version(3, step), 1, 10**9) for step in STEPS)
        for rank in range(first, first + PER_NODE):
            # The ranks of a node share the work of reading its pieces.
            mine = there[rank - first :: PER_NODE] if sharded else []
            pieces = {
                f"piece-{of}-{step % 2}": Held(Piece(Version(3, step), ranks, of), frozenset([f"own-{of:016x}"]), whole)
                for of in mine
                for step in STEPS
            }
            node = f"{first // PER_NODE:016x}"
            if rank == first:
                found.append(Inventory(rank, node, True, holdings, records, Version(3, 42), 10**11, pieces))
            else:
                found.append(Inventory(rank, node, speaks=False, pieces=pieces))
    return found


def cost(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of CPU time, the best of three, and MB at the peak."""
    took_s = []
    for _ in range(3):
        begun_s = time.process_time()
        work()
        took_s.append(time.process_time() - begun_s)
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return min(took_s), peak / 1e6


def main() -> None:
    print("| ranks | | CPU, s | peak, MB | bytes of all inventories | per rank |")
    print("| ---: | --- | ---: | ---: | ---: | ---: |")
    for ranks in SIZES:
        for sharded in (False, True):
            told = inventories(ranks, sharded=sharded)
            sent = sum(len(pickle.dumps(each)) for each in told)
            took_s, peak = cost(partial(decide, told, sharded=sharded))
            what = "`decide`, state in parts" if sharded else "`decide`, replicated state"
            print(f"| {ranks} | {what} | {took_s:.3f} | {peak:.1f} | {sent:,} | {sent // ranks} |", flush=True)
        on_node = {node: pieces.values() for node, pieces in pieces_on_nodes(told).items()}
        nodes = [each.node for each in told]
        works: dict[str, Callable[[], object]] = {
            "`choose`": partial(choose, on_node, nodes),
            "`mirrors`": partial(mirrors, nodes),
        }
        for name, work in works.items():
            took_s, peak = cost(work)
            print(f"| {ranks} | {name} | {took_s:.3f} | {peak:.1f} | – | – |", flush=True)


if __name__ == "__main__":
    main()
