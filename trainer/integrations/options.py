"""The Keeper's options that an integration takes beside what it gives the Keeper itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elaunch.trainer.state.tree import several


def require_free(owner: str, options: Mapping[str, Any], way_out: str, *more: str) -> None:
    """Raise ValueError if `options` has what the integration `owner` takes from its library, or one of `more`."""
    taken = [name for name in ("model", "optimizer", "scheduler", "scaler", *more) if name in options]
    if taken:
        raise ValueError(f"{owner} has no option {' or '.join(taken)}: {way_out}")


def with_own(options: Mapping[str, Any], *, per_rank: Any, extra: Any = None) -> dict[str, Any]:
    """`options`, with the integration's objects before those of the program."""
    given = options.get("extra")
    # As for the Keeper, a list of anything else is one part.
    is_one = type(given) is list and not (given and all(isinstance(one, dict) or _is_object(one) for one in given))
    parts = (given,) if is_one else tuple(several(given))
    own = {"per_rank": (per_rank, *several(options.get("per_rank")))}
    return {**options, **own} if extra is None else {**options, **own, "extra": (extra, *parts)}


def _is_object(one: Any) -> bool:
    return hasattr(one, "state_dict") and hasattr(one, "load_state_dict")
