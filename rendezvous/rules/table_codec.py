"""A rank table as compact text. The store sends it to every node, so its size counts N times."""

from __future__ import annotations

import json
import zlib
from base64 import b64decode, b64encode
from dataclasses import asdict, replace
from itertools import accumulate
from typing import Any

from elaunch.rendezvous.codec import Name, build, shown_text
from elaunch.rendezvous.types import SLOTS_MAX, RankTable, Seat
from elaunch.strict_json import parse_json

# Above this size it takes longer to send a table to every node than to compress it once.
_LARGE = 4000
_PACKED = "zlib:"
# A thousand bytes for each of 16,000 nodes. Without a limit, a few kilobytes could decompress to gigabytes.
UNPACKED_BYTES_MAX = 16 << 20


def encode_table(table: RankTable) -> str:
    """JSON with the seats as three lists: nodes, slots and roles. First ranks follow from the slots.

    The table of a large job is compressed: `zlib:` and then base64, about 11 bytes a node.
    """
    # Most tables have no streak, no exclusion and no mismatch.
    record = {name: value for name, value in asdict(replace(table, seats=())).items() if value not in (None, (), "")}
    record["nodes"] = [seat.node_id for seat in table.seats]
    record["slots"] = [seat.slots for seat in table.seats]
    record["roles"] = [seat.role for seat in table.seats]
    text = json.dumps(record, separators=(",", ":"))
    return text if len(text) < _LARGE else _PACKED + b64encode(zlib.compress(text.encode())).decode()


def decode_table(text: str) -> RankTable:
    """The table that `encode_table` wrote. Raises ValueError if the text is no table."""
    try:
        record = parse_json(_unpacked(text) if text.startswith(_PACKED) else text)
        nodes = [*zip(*(record.pop(name) for name in ("nodes", "slots", "roles")), strict=True)]
        if not all(map(_is_seat, nodes)):
            raise TypeError("a seat is no name with a number of slots and a role")
        node_ids = [node_id for node_id, _, _ in nodes]
        if len(set(node_ids)) < len(node_ids):
            raise ValueError("a node has two seats")
        # All names in one check: every agent reads the names of all nodes.
        Name().check("".join(node_ids) or "nobody")
        table: RankTable = build(RankTable, {"master_addr": "", "reason": "", **record, "seats": []})
        return replace(table, seats=seats_of(nodes))
    except (AttributeError, KeyError, TypeError, ValueError, zlib.error) as error:
        raise ValueError(f"not a rank table: {shown_text(text)!r} ({shown_text(str(error))})") from error


def seats_of(nodes: list[tuple[str, int, str]]) -> tuple[Seat, ...]:
    """Seats for (node id, slots, role) in rank order: ranks 0 … n - 1 without holes."""
    # `first_ranks` has one item more than nodes: the sum of all slots.
    first_ranks = accumulate((slots for _, slots, _ in nodes), initial=0)
    return tuple(
        Seat(node_id, slots, first, role) for (node_id, slots, role), first in zip(nodes, first_ranks, strict=False)
    )


def _unpacked(text: str) -> bytes:
    unpacking = zlib.decompressobj()
    found = unpacking.decompress(b64decode(text.removeprefix(_PACKED)), UNPACKED_BYTES_MAX)
    if not unpacking.eof:
        raise ValueError(f"it is cut off, or has more than {UNPACKED_BYTES_MAX} bytes unpacked")
    return found


def _is_seat(seat: tuple[Any, Any, Any]) -> bool:
    node_id, slots, role = seat
    return type(node_id) is str and type(slots) is int and 1 <= slots <= SLOTS_MAX and type(role) is str
