"""Decides whether a ledger proves that every sample was trained on exactly once. A pure function of its lines.

A file of the ledger records one rank in one generation: a header with the step after which it began, a line for each
micro-batch before the optimizer's step, and a line when that step is done. A step of a generation counts only if all
later generations continued from it or from a later step. A step of the last generation counts if it is done.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import reprlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from elaunch.strict_json import parse_json
from elaunch.trainer.data.order import Order

FORMAT = 1


@dataclass(frozen=True)
class Verdict:
    """The result; `text` is one sentence. `steps` and `samples` are those that count, up to the first violation.

    `lost_steps` steps were done and then lost by a restart; `repeated_steps` of them were computed again.
    """

    ok: bool
    text: str
    steps: int = 0
    samples: int = 0
    lost_steps: int = 0
    repeated_steps: int = 0


def verdict(files: Iterable[Iterable[str]], *, steps: int | None = None) -> Verdict:
    """The verdict on a ledger, from the lines of its files in any order. `steps` is the required number, if known.

    Each file is read once, from beginning to end, so a file object is enough. It needs memory for one byte per sample
    of an epoch, and for one step of every rank.
    """
    tally = _Tally()
    try:
        sessions = [session for lines in files if (session := _open(lines)) is not None]
        if not sessions:
            return Verdict(False, "the ledger holds no steps")
        _judge(sessions, _one("had different orders", (session.order for session in sessions)), tally)
        if steps is not None and tally.last != steps:
            raise _Violation(f"the last step that counts is {tally.last}, not {steps}")
    except _Violation as violation:
        return tally.verdict(False, f"not exactly once: {violation}")
    return tally.verdict(True, tally.sentence())


class _Violation(Exception):
    """The ledger does not prove exactly-once training."""


class _Row(NamedTuple):
    """One micro-batch of one step; `micro` is -1 if the line is that of a completed step."""

    step: int
    micro: int
    samples: list[int]
    rank: int


@dataclass(frozen=True)
class _Session:
    """The record of one rank in one generation, which began after step `after`."""

    generation: int
    rank: int
    after: int
    order: Order
    rows: Iterator[_Row]


@dataclass
class _Tally:
    """What counts so far; `last` is the newest step that counts."""

    last: int = 0
    first: int = 0
    samples: int = 0
    generations: int = 0
    lost: list[int] = field(default_factory=list)
    repeated: int = 0
    # Which samples of `epoch` were counted.
    epoch: int = -1
    seen: bytearray = field(default_factory=bytearray)

    def count(self, step: int, micros: dict[int, _Row], order: Order) -> None:
        samples = [sample for micro in sorted(micros) for sample in micros[micro].samples]
        for position, sample in zip(order.span(step), samples, strict=True):
            epoch = position // order.size
            if epoch != self.epoch:
                self.epoch, self.seen = epoch, bytearray(order.size)
            if self.seen[sample]:
                raise _Violation(f"sample {sample} occurs twice in epoch {epoch}, the second time in step {step}")
            self.seen[sample] = True
        self.samples += len(samples)
        self.repeated += self.lost.count(step)
        self.last = step

    def verdict(self, ok: bool, text: str) -> Verdict:
        return Verdict(ok, text, self.last - self.first, self.samples, len(self.lost), self.repeated)

    def sentence(self) -> str:
        steps = f"steps {self.first + 1} to {self.last}" if self.last > self.first else "no steps"
        again = f"; {self.repeated} steps that were done were lost and computed again" if self.repeated else ""
        return (
            f"exactly once: {steps} in {self.generations} generation{'s' * (self.generations != 1)}, {self.samples} "
            f"samples, none missing and none twice within an epoch{again}"
        )


def _judge(sessions: list[_Session], order: Order, tally: _Tally) -> None:
    """Check all generations from the oldest to the newest, step by step."""
    ordered = sorted(sessions, key=lambda session: session.generation)
    generations = [(number, list(group)) for number, group in itertools.groupby(ordered, key=lambda s: s.generation)]
    afters = [
        _one(f"of generation {number} began after different steps", (session.after for session in group))
        for number, group in generations
    ]
    tally.first = tally.last = afters[0]
    tally.generations = len(generations)
    for place, (number, group) in enumerate(generations):
        kept_until = min(afters[place + 1 :], default=None)
        # If a later generation went back to before this one's beginning, nothing of this one counts.
        if (kept_until is None or afters[place] <= kept_until) and afters[place] > tally.last:
            raise _Violation(
                f"generation {number} began after step {afters[place]}, but steps from {tally.last + 1} on are missing"
            )
        _judge_generation(number, group, order, tally, afters[place], kept_until)


def _judge_generation(
    number: int, group: list[_Session], order: Order, tally: _Tally, after: int, kept_until: int | None
) -> None:
    undone: int | None = None
    merged = heapq.merge(*(session.rows for session in group), key=lambda row: row.step)
    for step, rows in itertools.groupby(merged, key=lambda row: row.step):
        micros, done = _step(number, step, rows, order)
        if step <= after:
            raise _Violation(f"generation {number} began after step {after} and computed step {step} again")
        if kept_until is not None and step > kept_until:
            if done:
                tally.lost.append(step)
            continue
        if undone is not None:
            raise _Violation(f"step {step} was computed in generation {number}, but step {undone} was never done")
        if kept_until is None and not done:
            undone = step
            continue
        if step != tally.last + 1:
            raise _Violation(f"step {tally.last + 1} is missing; generation {number} continued with step {step}")
        missing = [micro for micro in range(order.micro_batches) if micro not in micros]
        if missing:
            raise _Violation(f"micro-batch {missing[0]} of step {step} was computed by no rank")
        tally.count(step, micros, order)


def _step(number: int, step: int, rows: Iterable[_Row], order: Order) -> tuple[dict[int, _Row], bool]:
    """The rows of one step by micro-batch, and whether any rank has completed the step."""
    micros: dict[int, _Row] = {}
    done = False
    for row in rows:
        if row.micro < 0:
            done = True
            continue
        if row.micro >= order.micro_batches:
            raise _Violation(f"step {step} has a micro-batch {row.micro}; there are {order.micro_batches}")
        if row.micro in micros:
            raise _Violation(
                f"micro-batch {row.micro} of step {step} was computed twice in generation {number}, by ranks "
                f"{micros[row.micro].rank} and {row.rank}"
            )
        due = list(order.samples(step, row.micro))
        if row.samples != due:
            raise _Violation(
                f"micro-batch {row.micro} of step {step} had samples {reprlib.repr(row.samples)} in generation "
                f"{number}, not {reprlib.repr(due)}"
            )
        micros[row.micro] = row
    return micros, done


def _one(what: str, values: Iterable[Any]) -> Any:
    """The value that all ranks have."""
    different = [*dict.fromkeys(values)]
    if len(different) > 1:
        raise _Violation(f"the ranks {what}, {different[0]} and {different[1]}")
    return different[0]


def _open(lines: Iterable[str]) -> _Session | None:
    """A file's header, with its rows still unread; None if its rank was killed before it could write the header."""
    reading = iter(lines)
    first = next(reading, "")
    if not first.endswith("\n"):
        return None
    with _reading("the first line of a file", first):
        header = parse_json(first)
        if header["ledger"] != FORMAT:
            raise _Violation(f"it has format {header['ledger']!s:.80}, and only format {FORMAT} is known here")
        order = Order(**header["order"])
        generation, rank, after = int(header["generation"]), int(header["rank"]), int(header["after"])
    return _Session(generation, rank, after, order, _rows(reading, generation, rank))


def _rows(lines: Iterator[str], generation: int, rank: int) -> Iterator[_Row]:
    newest = 0
    for line in lines:
        # A killed rank may leave half a line at the end.
        if not line.endswith("\n"):
            return
        with _reading(f"a line of rank {rank} in generation {generation}", line):
            record = parse_json(line)
            row = (
                _Row(int(record["done"]), -1, [], rank)
                if "done" in record
                else _Row(int(record["step"]), int(record["micro"]), list(record["samples"]), rank)
            )
            if row.step < 1:
                raise ValueError("steps count from 1")
        if row.step < newest:
            raise _Violation(f"rank {rank} went back from step {newest} to step {row.step} in generation {generation}")
        newest = row.step
        yield row


@contextlib.contextmanager
def _reading(what: str, line: str) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise _Violation(f"{what} is invalid: {line.strip()[:80]!r}") from error
