"""A rank table as compact text: it goes to every node, so its size counts N times."""

from __future__ import annotations

import json
import zlib
from base64 import b64decode, b64encode
from functools import partial
from itertools import accumulate, chain, groupby, repeat, starmap
from typing import TypeVar

from elaunch.rendezvous.types import RankTable, Seat

# The store writes it out for every node: from here on it takes longer to send than to pack.
_LARGE = 4000
_PACKED = "zlib:"
Word = TypeVar("Word")


def encode_table(table: RankTable) -> str:
    """About 20 bytes a node: its id, and runs of equal slots and roles. First ranks follow from the slots.

    JSON, and of a large job `zlib:` and that in base64, about 11 bytes a node.
    """
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
    text = json.dumps(record, separators=(",", ":"))
    return text if len(text) < _LARGE else _PACKED + b64encode(zlib.compress(text.encode())).decode()


def decode_table(text: str) -> RankTable:
    """What `encode_table` wrote. Raises ValueError where the text is no table."""
    try:
        is_packed = text.startswith(_PACKED)
        record = json.loads(zlib.decompress(b64decode(text.removeprefix(_PACKED))) if is_packed else text)
        nodes, slots, roles = record["nodes"].split(), record["slots"], _unrun(record["roles"])
        return RankTable(
            generation=int(record["generation"]),
            seats=_seats(nodes, _unrun([(int(each), times) for each, times in slots]), roles),
            master_addr=str(record["master_addr"]),
            master_port=int(record["master_port"]),
            reason=str(record["reason"]),
            restarts=int(record["restarts"]),
            restart_ages_s=tuple(float(age_s) for age_s in record["restart_ages_s"]),
            barren=int(record["barren"]),
            progressed=bool(record["progressed"]),
        )
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError, zlib.error) as error:
        raise ValueError(f"not a rank table: {text[:200]!r} ({error})") from error


def seats_of(nodes: list[tuple[str, int, str]]) -> tuple[Seat, ...]:
    """Seats for (node id, slots, role) in rank order: ranks 0 … n - 1 without holes."""
    return _seats([name for name, _, _ in nodes], [slots for _, slots, _ in nodes], [role for _, _, role in nodes])


def _seats(nodes: list[str], slots: list[int], roles: list[str]) -> tuple[Seat, ...]:
    if not len(nodes) == len(slots) == len(roles):
        raise ValueError(f"{len(nodes)} nodes, {len(slots)} with slots and {len(roles)} with a role")
    # One more of these than nodes: the sum of all.
    first_ranks = accumulate(slots, initial=0)
    # Every agent makes one for each node; Seat's own constructor, which is Python, would take five times as long.
    make = partial(tuple.__new__, Seat)
    return tuple(map(make, zip(nodes, slots, first_ranks, roles, strict=False)))


def _runs(words: list[str]) -> list[list[str | int]]:
    return [[word, len(list(run))] for word, run in groupby(words)]


def _unrun(runs: list[tuple[Word, int]]) -> list[Word]:
    return list(chain.from_iterable(starmap(repeat, runs)))
