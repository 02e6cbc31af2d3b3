"""A rank table as compact text. The store sends it to every node, so its size counts N times."""

from __future__ import annotations

import json
import zlib
from base64 import b64decode, b64encode
from dataclasses import asdict
from functools import partial
from itertools import accumulate, chain, groupby, repeat, starmap
from typing import Any

from elaunch.rendezvous.codec import decode_fields, shown_text
from elaunch.rendezvous.rules.credible import check_seats, check_table
from elaunch.rendezvous.types import Exclusion, RankTable, Seat, Streak
from elaunch.strict_json import parse_json

# Above this size it takes longer to send a table to every node than to compress it once.
_LARGE = 4000
_PACKED = "zlib:"
# A thousand bytes for each of 16,000 nodes. Without a limit, a few kilobytes could decompress to gigabytes.
UNPACKED_BYTES_MAX = 16 << 20


def encode_table(table: RankTable) -> str:
    """JSON with about 20 bytes a node: its id, and runs of equal slots and roles. First ranks follow from the slots.

    The table of a large job is compressed: `zlib:` and then base64, about 11 bytes a node.
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
    # Most tables have none.
    if table.streak:
        record["streak"] = asdict(table.streak)
    if table.excluded:
        record["excluded"] = [asdict(each) for each in table.excluded]
    if table.mismatch:
        record["mismatch"] = table.mismatch
    if table.vacant:
        record["vacant"] = table.vacant
    if table.secret:
        record["secret"] = table.secret
    text = json.dumps(record, separators=(",", ":"))
    return text if len(text) < _LARGE else _PACKED + b64encode(zlib.compress(text.encode())).decode()


def decode_table(text: str) -> RankTable:
    """The table that `encode_table` wrote. Raises ValueError if the text is no table."""
    try:
        table = _table(parse_json(_unpacked(text) if text.startswith(_PACKED) else text))
        check_table(table)
        return table
    except (AttributeError, KeyError, TypeError, ValueError, zlib.error) as error:
        raise ValueError(f"not a rank table: {shown_text(text)!r} ({shown_text(str(error))})") from error


def _unpacked(text: str) -> bytes:
    unpacking = zlib.decompressobj()
    found = unpacking.decompress(b64decode(text.removeprefix(_PACKED)), UNPACKED_BYTES_MAX)
    if not unpacking.eof:
        raise ValueError(f"it is cut off, or has more than {UNPACKED_BYTES_MAX} bytes unpacked")
    return found


def _table(record: Any) -> RankTable:
    nodes = record["nodes"].split()
    plain = decode_fields(
        {
            "generation": int, "master_addr": str, "master_port": int, "reason": str, "restarts": int,
            "restart_ages_s": tuple[float, ...], "barren": int, "progressed": bool,
        },
        record,
    )  # fmt: skip
    numbers = {word: int(word) for word, _ in record["slots"]}
    check_seats(nodes, numbers.values())
    slots = [numbers[word] for word in _unrun(record["slots"], len(nodes))]
    rare: dict[str, Any] = {"streak": None, "excluded": [], "mismatch": "", "vacant": [], "secret": ""}
    plain |= decode_fields(
        {
            "streak": Streak | None, "excluded": tuple[Exclusion, ...], "mismatch": str, "vacant": tuple[str, ...],
            "secret": str,
        },
        {name: record.get(name, default) for name, default in rare.items()},
    )  # fmt: skip
    return RankTable(seats=_seats(nodes, slots, _unrun(record["roles"], len(nodes))), **plain)


def seats_of(nodes: list[tuple[str, int, str]]) -> tuple[Seat, ...]:
    """Seats for (node id, slots, role) in rank order: ranks 0 … n - 1 without holes."""
    return _seats([name for name, _, _ in nodes], [slots for _, slots, _ in nodes], [role for _, _, role in nodes])


def _seats(nodes: list[str], slots: list[int], roles: list[str]) -> tuple[Seat, ...]:
    if not len(nodes) == len(slots) == len(roles):
        raise ValueError(f"{len(nodes)} nodes, {len(slots)} with slots and {len(roles)} with a role")
    # `first_ranks` has one item more than nodes: the sum of all slots.
    first_ranks = accumulate(slots, initial=0)
    # Every agent makes a Seat for each node. Seat's own constructor is Python code and takes five times as long.
    make = partial(tuple.__new__, Seat)
    return tuple(map(make, zip(nodes, slots, first_ranks, roles, strict=False)))


def _runs(words: list[str]) -> list[list[str | int]]:
    return [[word, len(list(run))] for word, run in groupby(words)]


def _unrun(runs: list[tuple[str, int]], nodes: int) -> list[str]:
    """One word for each node. The sum is checked first: a run of a few bytes could expand to more than memory holds."""
    if any(type(word) is not str or type(times) is not int or times < 0 for word, times in runs):
        raise TypeError("a run is no word with a number")
    if sum(times for _, times in runs) != nodes:
        raise ValueError(f"{nodes} nodes have another number of slots or roles")
    return list(chain.from_iterable(starmap(repeat, runs)))
