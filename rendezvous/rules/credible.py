"""Checks that a record in the store is credible: its numbers are in range and its names are possible. Pure.

Anybody with access to the store may have written the record. Ranks, ports, exit codes and keys are derived from it, so
it is checked here once, and no reader has to. Every function raises ValueError with the end of a sentence.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from elaunch.rendezvous.job_spec import SLOTS_MAX
from elaunch.rendezvous.types import Failure, Generation, Joined, Node, Outcome, RankTable, Terms

GENERATION_DIGITS = 10
# Far below the largest number that fits into a key, so the next number always fits too.
_GENERATION_END = 10 ** (GENERATION_DIGITS - 1)
_PORT_MAX = 65535
_SIGNAL_MAX = 64
# The end of the year 9999, the last year of Python's datetime.
_TIME_END_S = 253_402_300_800.0


def is_generation_of_key(digits: str) -> bool:
    """Whether `digits` is a generation as `Keys` writes it into a key."""
    return re.fullmatch(rf"[0-9]{{{GENERATION_DIGITS}}}", digits) is not None


def check_generation_of_key(digits: str) -> None:
    """Raises ValueError unless `digits` is a generation as `Keys` writes it into a key."""
    if not is_generation_of_key(digits):
        raise ValueError(f"not a generation's: {digits[:40]!r} is no number of {GENERATION_DIGITS} digits")


def check(record: Node | Joined | Failure | Terms | Generation | Outcome) -> None:
    """Raises ValueError for a record that is not credible."""
    match record:
        case Node():
            check_node_id(record.node_id)
            # A table has these of all its nodes: one that cannot be read would end the job.
            check_node_id(record.host)
            for text in (record.address, record.role, record.topology):
                _check_text(text)
            _in_range("slots", record.slots, 1, SLOTS_MAX)
            _in_range("node_rank", record.node_rank, -1, _GENERATION_END)
        case Joined():
            check_node_id(record.node_id)
            _in_range("port", record.port, 0, _PORT_MAX)
            _check_text(record.software)
            _check_secret(record.secret)
        case Failure():
            _in_range("generation", record.generation, -1, _GENERATION_END)
            _check_time("failed_at", record.failed_at)
            _check_time("lived_s", record.lived_s)
        case Terms():
            _in_range("nodes_min", record.nodes_min, 1, _GENERATION_END)
            _in_range("nodes_max", record.nodes_max, record.nodes_min, _GENERATION_END)
            _in_range("max_restarts", record.max_restarts, 0, None)
            _in_range("exclude_after", record.exclude_after, 0, None)
            if record.restart_window_s is not None:
                _check_time("restart_window_s", record.restart_window_s)
        case Generation():
            _in_range("number", record.number, 0, _GENERATION_END - 1)
            _in_range("signum", record.signum, 0, _SIGNAL_MAX)
        case Outcome():
            _in_range("generation", record.generation, -1, _GENERATION_END)
            _in_range("restarts", record.restarts, 0, None)
            _in_range("signum", record.signum, 0, _SIGNAL_MAX)
            for failure in filter(None, (record.failure, record.first)):
                check(failure)


def check_table(table: RankTable) -> None:
    """Raises ValueError for a table that no leader would seal; `check_seats` checks its seats."""
    _in_range("generation", table.generation, 0, _GENERATION_END - 1)
    _in_range("master_port", table.master_port, 0, _PORT_MAX)
    _in_range("restarts", table.restarts, 0, None)
    _in_range("barren", table.barren, 0, None)
    if table.streak:
        _in_range("streak", table.streak.times, 0, None)
        check_node_id(table.streak.who)
    _check_text(table.mismatch)
    _check_secret(table.secret)
    for role in table.vacant:
        _check_text(role)
    for each in table.excluded:
        check_node_id(each.who)
    for age_s in table.restart_ages_s:
        _check_time("restart_ages_s", age_s)


def check_seats(node_ids: Sequence[str], slots: Iterable[int]) -> None:
    """Raises ValueError for seats that no leader would give; `slots` holds each number of slots once."""
    for number in slots:
        _in_range("slots", number, 1, SLOTS_MAX)
    if len(set(node_ids)) < len(node_ids):
        raise ValueError("a node has two seats")
    # All names in one check: every agent reads the names of all nodes, so this must be fast.
    check_node_id("".join(node_ids) or "nobody")


def check_node_id(node_id: str) -> None:
    """Raises ValueError for what cannot be the id of a node, nor a host's name in it."""
    # A slash would name another key, and a blank separates names in a rank table. UTF-8 has no lone surrogates.
    if not node_id or not node_id.isprintable() or "/" in node_id or " " in node_id:
        raise ValueError(f"{node_id[:40]!r} is no name of a node")


def _check_text(text: str) -> None:
    """It goes to every node's terminal."""
    if not text.isprintable():
        raise ValueError(f"{text[:40]!r} is no text for people")


def _check_secret(text: str) -> None:
    if not text.isprintable():
        raise ValueError("its secret has control characters")


def _check_time(name: str, seconds: float) -> None:
    if not (math.isfinite(seconds) and 0 <= seconds < _TIME_END_S):
        raise ValueError(f"{name} {seconds} is out of range")


def _in_range(name: str, number: int, low: int, high: int | None) -> None:
    if number < low or (high is not None and number > high):
        raise ValueError(f"{name} {number} is out of range")
