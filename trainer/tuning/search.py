"""How DDP sends gradients: which settings are measured next, when the search ends, and what it chooses. Pure.

A *pass* is a forward and backward pass whose gradients are summed over the ranks. All ranks run this same search on the
same times, which are those of the slowest rank, so they all come to the same choice.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace

# DDP's hooks that round gradients, in the order in which they are tried.
LOSSY_HOOKS = ("bf16", "fp16", "powersgd")
# A choice other than the program's own settings must save this share of a pass, and a lossy hook this share of what the
# best loss-neutral settings take.
GAIN_MIN = 0.03
LOSSY_GAIN_MIN = 0.10
# DDP sums all gradients in one bucket in a first pass, and allocates the real buckets in a second. PowerSGD allocates
# its matrices in a third.
_SETTLING = 2
_SETTLING_STATIC = 1
_SETTLING_POWERSGD = 1
_MEASURED = 3
# Settings whose first two measured passes take so many times as long as the best are measured no further.
_HOPELESS = 1.5
# In the final, the contenders take turns.
_TURNS, _MEASURED_IN_TURN = 3, 2
_SIZES_MB = (1.0, 5.0, 25.0, 100.0)
# The standard deviation of a normal distribution, in median absolute deviations.
_DEVIATION = 1.4826


@dataclass(frozen=True)
class CommSettings:
    """DDP's buckets and its communication hook.

    `bucket_mb` is in MiB, as DDP's `bucket_cap_mb`; None is DDP's default: 25 MiB, and 1 MiB for the first bucket.
    `hook` is "none" or one of LOSSY_HOOKS.
    """

    bucket_mb: float | None = None
    bucket_view: bool = False
    hook: str = "none"

    @property
    def is_lossy(self) -> bool:
        """Whether the hook rounds gradients."""
        return self.hook != "none"

    def __str__(self) -> str:
        parts = ["DDP's default buckets" if self.bucket_mb is None else f"buckets of {self.bucket_mb:g} MiB"]
        parts += ["gradients as views of them"] * self.bucket_view
        parts += [f"hook {self.hook}"] * self.is_lossy
        return ", ".join(parts)


@dataclass(frozen=True)
class SearchSpace:
    """What may be tried for a model that sends `gradient_mb` MiB.

    `start` are the program's own settings; those of its fields that are in `fixed` stay. `hooks` are the lossy hooks
    that may be tried. `is_static`: DDP's `static_graph`.
    """

    start: CommSettings
    gradient_mb: float
    fixed: frozenset[str] = frozenset()
    hooks: tuple[str, ...] = ()
    is_static: bool = False


@dataclass(frozen=True)
class TimedPass:
    """The next pass to be timed: with these settings, and if it `is_alone` without communication."""

    settings: CommSettings
    is_alone: bool = False


@dataclass(frozen=True)
class SearchResult:
    """What was chosen, and why.

    `start_s` and `chosen_s` are medians of a pass, `spent_s` is the time of all `passes`.
    """

    settings: CommSettings
    start: CommSettings
    start_s: float
    chosen_s: float
    passes: int
    spent_s: float
    reason: str

    @property
    def gain(self) -> float:
        """How many times as fast a pass is as with the program's own settings."""
        return self.start_s / self.chosen_s if self.settings != self.start else 1.0


def search(space: SearchSpace) -> Generator[TimedPass, float, SearchResult]:
    """Yields the pass to run next, is sent the seconds that the slowest rank took for it, and returns the result."""
    log = _Log(space)
    start = space.start
    yield from log.visit(start)
    share = yield from log.share_of_communication(start)
    if share is not None and share < GAIN_MIN:
        return log.result(start, f"the communication adds {share:.0%} to a pass, so there is nothing to gain")

    best = start
    for settings in sizes(space):
        yield from log.visit(settings)
        best = log.faster(best, settings)
    if not start.bucket_view and "bucket_view" not in space.fixed:
        views = replace(best, bucket_view=True)
        yield from log.visit(views)
        # A program can see them, so they need a reason.
        best = views if log.saves(views, best, GAIN_MIN) else best
    lossy = best
    for hook in space.hooks if "hook" not in space.fixed else ():
        settings = replace(best, hook=hook)
        yield from log.visit(settings)
        lossy = log.faster(lossy, settings)

    finalists = [best] if log.saves(best, start, GAIN_MIN) else []
    finalists += [lossy] if lossy.is_lossy and log.saves(lossy, log.faster(start, best), LOSSY_GAIN_MIN) else []
    if not finalists:
        return log.result(start, f"nothing else was faster by {GAIN_MIN:.0%}")
    turns: list[_Log] = []
    for number in range(_TURNS):
        contenders = [start, *finalists]
        turns.append((yield from log.turn(contenders if number % 2 == 0 else contenders[::-1])))
    return _decided(log, turns, start, finalists)


def sizes(space: SearchSpace) -> list[CommSettings]:
    """The bucket sizes to try besides the program's own, as settings."""
    if "bucket_mb" in space.fixed:
        return []
    found = [size for size in _SIZES_MB if size < space.gradient_mb and size != space.start.bucket_mb]
    if space.gradient_mb > _SIZES_MB[0]:
        # One bucket: nothing overlaps with the backward pass, but it is one message.
        found.append(float(math.ceil(space.gradient_mb) + 1))
    return [replace(space.start, bucket_mb=size) for size in found]


def _decided(log: _Log, turns: Sequence[_Log], start: CommSettings, finalists: Sequence[CommSettings]) -> SearchResult:
    """The final's winner. Only passes of the final count: the contenders took turns in it, whatever else changed."""
    pooled = _Log(log.space, {each: [s for turn in turns for s in turn.samples[each]] for each in (start, *finalists)})
    log.final = pooled
    chosen = start
    for finalist in finalists:
        # The least of a turn: something else on the machine makes single passes longer, and none shorter.
        wins_each = all(min(turn.samples[finalist]) < min(turn.samples[start]) for turn in turns)
        noise_s = pooled.noise_s(start) + pooled.noise_s(finalist)
        is_clear = pooled.median(start) - pooled.median(finalist) > noise_s
        least = LOSSY_GAIN_MIN if finalist.is_lossy else GAIN_MIN
        if wins_each and is_clear and pooled.saves(finalist, chosen, least):
            chosen = finalist
    reason = "it won each turn" if chosen != start else "what looked faster did not stay so in turns"
    return log.result(chosen, reason)


@dataclass
class _Log:
    """The times so far, by settings."""

    space: SearchSpace
    samples: dict[CommSettings, list[float]] = field(default_factory=dict)
    passes: int = 0
    spent_s: float = 0.0
    final: _Log | None = None
    _newest: CommSettings | None = None

    def visit(
        self, settings: CommSettings, measured: int = _MEASURED, *, gives_up: bool = True
    ) -> Generator[TimedPass, float, list[float]]:
        """Measure passes with these settings, after those in which DDP settles. Returns their times.

        With `gives_up` no further pass is measured after two that are much slower than the best so far.
        """
        for _ in range(self._settling(settings) if settings != self._newest else 0):
            yield from self._timed(TimedPass(settings))
        self._newest = settings
        best_s = min(map(statistics.median, self.samples.values()), default=math.inf)
        held = self.samples.setdefault(settings, [])
        found: list[float] = []
        for _ in range(measured):
            found.append((yield from self._timed(TimedPass(settings))))
            held.append(found[-1])
            if gives_up and len(found) > 1 and min(found) > _HOPELESS * best_s:
                break
        return found

    def share_of_communication(self, settings: CommSettings) -> Generator[TimedPass, float, float | None]:
        """How much of a pass it adds to one without it, None if the passes differ too much to tell."""
        alone: list[float] = []
        for _ in range(_MEASURED):
            alone.append((yield from self._timed(TimedPass(settings, is_alone=True))))
        whole = self.samples[settings]
        if any(max(each) - min(each) > GAIN_MIN * min(whole) for each in (alone, whole)):
            return None
        return max(0.0, 1 - statistics.median(alone) / statistics.median(whole))

    def turn(self, contenders: Sequence[CommSettings]) -> Generator[TimedPass, float, _Log]:
        """Measure each once more. Returns the times of this turn."""
        turn = _Log(self.space)
        for settings in contenders:
            turn.samples[settings] = yield from self.visit(settings, _MEASURED_IN_TURN, gives_up=False)
        return turn

    def _timed(self, one: TimedPass) -> Generator[TimedPass, float, float]:
        took_s = yield one
        self.passes += 1
        self.spent_s += took_s
        return took_s

    def _settling(self, settings: CommSettings) -> int:
        more = _SETTLING_STATIC * self.space.is_static + _SETTLING_POWERSGD * (settings.hook == "powersgd")
        return _SETTLING + more

    def median(self, settings: CommSettings) -> float:
        return statistics.median(self.samples[settings])

    def faster(self, one: CommSettings, other: CommSettings) -> CommSettings:
        """The faster of two; the first if they are equal."""
        return other if self.median(other) < self.median(one) else one

    def saves(self, settings: CommSettings, beside: CommSettings, share: float) -> bool:
        """Whether it saves at least this share of the other's pass."""
        return settings != beside and self.median(settings) <= (1 - share) * self.median(beside)

    def noise_s(self, settings: CommSettings) -> float:
        """A standard error of the median, by the samples' median distance from it."""
        middle = self.median(settings)
        samples = self.samples[settings]
        distance_s = statistics.median(abs(each - middle) for each in samples)
        return _DEVIATION * distance_s / math.sqrt(len(samples))

    def result(self, chosen: CommSettings, reason: str) -> SearchResult:
        times, start = self.final or self, self.space.start
        return SearchResult(chosen, start, times.median(start), times.median(chosen), self.passes, self.spent_s, reason)
