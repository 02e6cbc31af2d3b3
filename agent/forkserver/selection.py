"""What of a package, or of a program's imports, a fork server imports, and what is left out (see loads.py)."""

from __future__ import annotations

from collections.abc import Iterable

from elaunch.records import dataclass


@dataclass(frozen=True)
class Cost:
    """How long the modules of a package took to import."""

    package: str
    seconds: float


@dataclass(frozen=True)
class Selection:
    """The imports that bring all suitable modules, in order, and those that are left out.

    `reasons` has a sentence for each module that is unsuitable itself. The others that are left out need one of these.
    `left_out_s` is how long all that are left out took. `costs` are the packages of the others, the slowest first.
    """

    entries: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    left_out_s: float = 0.0
    costs: tuple[Cost, ...] = ()

    @property
    def saved_s(self) -> float:
        """How long the modules that are not left out took."""
        return sum(each.seconds for each in self.costs)


@dataclass(frozen=True)
class Wanted:
    """The modules that a program has imported, in that order, and what must not be preloaded of them.

    `refused` are modules that are left out already. `variables` are set by the program: a module that keeps the value
    of one is unsuitable.
    """

    names: tuple[str, ...]
    refused: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProbeAnswer:
    """What a probe has found: `failed` says why nothing can be preloaded."""

    selection: Selection = Selection()
    failed: str = ""


def together(first: Selection, second: Selection) -> Selection:
    """The selection of the imports of both, one after the other."""
    return Selection(
        tuple(dict.fromkeys((*first.entries, *second.entries))),
        tuple(sorted({*first.left_out, *second.left_out})),
        (*first.reasons, *second.reasons),
        first.left_out_s + second.left_out_s,
        added((*first.costs, *second.costs)),
    )


def added(costs: Iterable[Cost]) -> tuple[Cost, ...]:
    """One for each package, the slowest first."""
    seconds: dict[str, float] = {}
    for each in costs:
        seconds[each.package] = seconds.get(each.package, 0.0) + each.seconds
    return tuple(Cost(*item) for item in sorted(seconds.items(), key=lambda item: -item[1]))
