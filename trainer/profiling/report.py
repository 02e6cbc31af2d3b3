"""Brings what all ranks have recorded to rank 0, which writes the record and the joined trace. All ranks call it.

Values go over the ranks' own connections. A trace goes to rank 0 only if rank 0 does not see its file: on one host, and
on a shared disk, nothing is sent.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from elaunch.trainer import link
from elaunch.trainer.files import reason
from elaunch.trainer.profiling.activity import RankActivity, read_activity
from elaunch.trainer.profiling.clocks import ClockOffset, ClockReading, clock_offsets
from elaunch.trainer.profiling.merging import RankTrace, write_merged
from elaunch.trainer.profiling.places import MERGED, RECORD, rank_file, write_whole
from elaunch.trainer.profiling.recording import Recording
from elaunch.trainer.profiling.summary import summarize
from elaunch.trainer.profiling.traces import packed, parsed, unpacked
from elaunch.trainer.profiling.words import rank_record, record, sentences
from elaunch.trainer.ranks.peers import Peers

# Rank 0 reads one trace after the other while all wait, a second for each MB: more is joined by the user, later.
MERGED_BYTES_MAX = 32 << 20
_CLOCK_ROUNDS = 8
_TROUBLES_MAX = 8


@dataclass(frozen=True)
class Collected:
    """What one rank has recorded. `content` is its packed trace, which does not leave the rank unless it is asked for.

    `clock` names the clock that its times are from. `trouble` says what is wrong with its file.
    """

    activity: RankActivity
    clock: str
    path: str
    packed_bytes: int = 0
    trouble: str = ""
    content: bytes = field(default=b"", repr=False)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "content": b""}


def collect(recording: Recording, folder: Path, rank: int, first_step: int) -> Collected:
    """End a recording and write this rank's file. What goes wrong is told in the result."""
    host, clock, path = socket.gethostname(), _clock(), (folder / rank_file(rank)).absolute()
    link.phase("profiling")
    try:
        content = recording.end()
        activity = read_activity(parsed(content), rank, first_step=first_step, host=host)
    except (OSError, RuntimeError, ValueError) as error:
        return Collected(RankActivity(rank, host, trouble=_why(error)), clock, "")
    content = packed(content)
    trouble, written = "", str(path)
    if torch.cuda.is_available() and not activity.on_gpu:
        trouble = f"rank {rank}'s trace has no kernel of its GPU, only what its CPU did: CUPTI may need more rights"
    try:
        write_whole(path, content)
    except OSError as error:
        trouble, written = f"{path} cannot be written ({_why(error)})", ""
    return Collected(activity, clock, written, len(content), trouble, content)


def report(
    ranks: Peers, mine: Collected, folder: Path, generation: int, *, flops_per_step: float, peak_flops: float
) -> tuple[list[str], list[str]]:
    """Write the record and the joined trace on rank 0. Collective.

    Returns there what the profile says, and what could not be written.
    """
    found = ranks.to_rank_0(mine)
    rounds, senders = ranks.from_rank_0(None if found is None else _asked(found))
    readings = _exchange_clocks(ranks, rounds)
    contents = ranks.to_rank_0(mine.content if ranks.leads or ranks.rank in senders else b"")
    if found is None or contents is None:
        return [], []
    offsets = clock_offsets([each.clock for each in found], readings)
    summary = summarize(
        [each.activity for each in found], offsets, flops_per_step=flops_per_step, peak_flops=peak_flops
    )
    troubles = [each.trouble for each in found if each.trouble]
    merged, why_not = _merge(folder / MERGED, found, contents, offsets)
    troubles += [why_not] if why_not else []
    made = record(
        summary,
        generation=generation,
        ranks=[
            rank_record(rank, host=each.activity.host, file=each.path, offset=offset, trouble=each.activity.trouble)
            for rank, (each, offset) in enumerate(zip(found, offsets, strict=True))
        ],
        trace=MERGED if merged else "",
    )
    try:
        write_whole(folder / RECORD, json.dumps(made, indent=1).encode() + b"\n")
    except OSError as error:
        troubles.append(f"{folder / RECORD} cannot be written ({_why(error)})")
    said = sentences(summary)
    if merged:
        said.append(f"open {(folder / MERGED).absolute()} at https://ui.perfetto.dev")
    return said, [*troubles[:_TROUBLES_MAX], *_more(len(troubles) - _TROUBLES_MAX)]


def _asked(found: Sequence[Collected]) -> tuple[int, frozenset[int]]:
    """How often clocks are compared, and the ranks that send their traces since rank 0 does not see their files."""
    rounds = _CLOCK_ROUNDS if len({each.clock for each in found}) > 1 else 0
    if sum(each.packed_bytes for each in found) > MERGED_BYTES_MAX:
        return rounds, frozenset()
    away = (rank for rank, each in enumerate(found) if rank and each.packed_bytes and not _is_seen(each))
    return rounds, frozenset(away)


def _is_seen(each: Collected) -> bool:
    try:
        return bool(each.path) and Path(each.path).stat().st_size == each.packed_bytes
    except OSError:
        return False


def _exchange_clocks(ranks: Peers, rounds: int) -> list[list[ClockReading]]:
    """The clocks of all ranks, by round and rank, on rank 0. Collective."""
    readings = []
    for _ in range(rounds):
        before_ns = time.time_ns()
        ranks.from_rank_0(0)
        got_ns = time.time_ns()
        answers = ranks.to_rank_0(ClockReading(got_ns, time.time_ns()))
        if answers is not None:
            readings.append([ClockReading(before_ns, time.time_ns()), *answers[1:]])
    return readings


def _merge(
    path: Path, found: Sequence[Collected], contents: Sequence[bytes], offsets: Sequence[ClockOffset]
) -> tuple[bool, str]:
    """Join the traces into one file. Returns whether it is there, and why it is not."""
    total = sum(each.packed_bytes for each in found)
    if total > MERGED_BYTES_MAX:
        return False, (
            f"the traces have {total / 1e6:,.0f} MB, too many to be joined while the ranks wait; "
            "join them with python -m elaunch.trainer.profiling"
        )
    if not any(each.packed_bytes for each in found):
        return False, ""
    link.phase("joining traces")
    try:
        write_merged(path, _traces(found, contents, offsets))
    except (OSError, EOFError, ValueError) as error:
        return False, f"{path} cannot be written ({_why(error)})"
    return True, ""


def _traces(
    found: Sequence[Collected], contents: Sequence[bytes], offsets: Sequence[ClockOffset]
) -> Iterator[RankTrace]:
    for rank, each in enumerate(found):
        if not each.packed_bytes:
            continue
        content = contents[rank] or Path(each.path).read_bytes()
        yield RankTrace(rank, each.activity.host, parsed(unpacked(content)), offsets[rank].ahead_ns)


def _clock() -> str:
    """The name of this host's clock: containers of one kernel read the same one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _why(error: BaseException) -> str:
    return "the file ends too early" if isinstance(error, EOFError) else reason(error)


def _more(count: int) -> list[str]:
    return [f"and {count} more files cannot be written"] if count > 0 else []
