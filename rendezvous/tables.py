"""A rank table as compact text: it goes to every node, so its size counts N times."""

from __future__ import annotations

import json
from itertools import accumulate, groupby

from elaunch.rendezvous.types import RankTable, Seat


def encode_table(table: RankTable) -> str:
    """About 20 bytes a node: its id, and runs of equal slots and roles. First ranks follow from the slots."""
    record = {
        "generation": table.generation,
        "nodes": " ".join(seat.node_id for seat in table.seats),
        "slots": _runs([str(seat.slots) for seat in table.seats]),
        "roles": _runs([seat.role for seat in table.seats]),
        "master_addr": table.master_addr,
        "master_port": table.master_port,
        "reason": table.reason,
        "restarts": table.restarts,
        "restart_ages_s": [round(age_s, 3) for age_s in table.restart_ages_s],
        "barren": table.barren,
        "progressed": table.progressed,
    }
    return json.dumps(record, separators=(",", ":"))


def decode_table(text: str) -> RankTable:
    """What `encode_table` wrote. Raises ValueError where the text is no table."""
    try:
        record = json.loads(text)
        nodes, slots, roles = record["nodes"].split(), _unrun(record["slots"]), _unrun(record["roles"])
        return RankTable(
            generation=int(record["generation"]),
            seats=seats_of(list(zip(nodes, map(int, slots), roles, strict=True))),
            master_addr=str(record["master_addr"]),
            master_port=int(record["master_port"]),
            reason=str(record["reason"]),
            restarts=int(record["restarts"]),
            restart_ages_s=tuple(float(age_s) for age_s in record["restart_ages_s"]),
            barren=int(record["barren"]),
            progressed=bool(record["progressed"]),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a rank table: {text[:200]!r} ({error})") from error


def seats_of(nodes: list[tuple[str, int, str]]) -> tuple[Seat, ...]:
    """Seats for (node id, slots, role) in rank order: ranks 0 … n - 1 without holes."""
    first_ranks = accumulate((slots for _, slots, _ in nodes), initial=0)
    # One more of these than nodes: the sum of all.
    seats = zip(nodes, first_ranks, strict=False)
    return tuple(Seat(node_id, slots, first, role) for (node_id, slots, role), first in seats)


def _runs(words: list[str]) -> list[list[str | int]]:
    return [[word, len(list(run))] for word, run in groupby(words)]


def _unrun(runs: list[tuple[str, int]]) -> list[str]:
    return [word for word, times in runs for _ in range(times)]
