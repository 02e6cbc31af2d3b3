"""Keeps the choice between jobs: one small file for each model, number of workers and link, in folders of the user's.

A file that is damaged, or that cannot be written, is no error: the choice is then measured again, and a sentence says
why.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from elaunch import user_cache
from elaunch.trainer.files import read_own_record, reason, write_durably
from elaunch.trainer.tuning.settings import FIELDS, HOOKS, CommSettings

_FORMAT = 1
_BYTES_MAX = 1 << 16
_FILES_MAX = 200
_SIZE_MB_MAX = 1 << 20
_SECONDS_MAX = 86400.0


@dataclass(frozen=True)
class TuningKey:
    """What a choice depends on. Two trainings with equal keys share it.

    `model` is a digest of the parameters' shapes, `link` the backend and the network interfaces that its environment
    names, `hooks` the lossy ones that could be tried, `about` what the program says of itself (as its batch size).
    """

    model: str
    world_size: int
    nodes: int
    link: str
    torch: str
    hooks: str
    start: str
    about: str

    @property
    def file_name(self) -> str:
        """The name of its file, made from all of it."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class TunedChoice:
    """What was chosen for a key, and what a pass took in seconds when it was."""

    settings: CommSettings
    start_s: float
    chosen_s: float
    passes: int
    # Seconds since 1970, for people.
    at: float
    key: TuningKey


class ChoiceFiles:
    """The folders in which choices are kept, the first one first. The last may be the user's cache folder."""

    def __init__(self, folders: Sequence[Path], cache: Path | None) -> None:
        self._folders, self._cache = list(folders), cache

    @classmethod
    def of(cls, environ: Mapping[str, str], folder: Path | None) -> ChoiceFiles:
        """The run's own `folder`, the job's memory on this node, and the user's cache folder: those that there are."""
        memory = environ.get("ELAUNCH_MEMORY")
        job = [Path(memory, "tuning")] if memory else []
        return cls([*([folder] if folder else []), *job], user_cache.cache_folder(environ, "tuning"))

    def find(self, key: TuningKey) -> tuple[TunedChoice | None, Path | None, list[str]]:
        """The choice for this key, its file, and a sentence about each file that could not be used."""
        troubles: list[str] = []
        for folder in self._all():
            file = folder / key.file_name
            try:
                choice = _read(file)
                if choice.key != key:
                    raise ValueError("it is of another training")
                return choice, file, troubles
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                troubles.append(f"{file} cannot be used ({reason(error).lower()}), and is written anew")
        return None, None, troubles

    def find_of_run(self, key: TuningKey) -> TunedChoice | None:
        """The newest choice of this run that differs from this key in the number of workers and nodes alone."""
        found: list[TunedChoice] = []
        for folder in self._folders:
            with contextlib.suppress(OSError):
                for file in sorted(folder.iterdir())[:_FILES_MAX]:
                    with contextlib.suppress(OSError, ValueError):
                        found.append(_read(file))
        alike = [one for one in found if replace(one.key, world_size=key.world_size, nodes=key.nodes) == key]
        return max(alike, key=lambda one: one.at, default=None)

    def keep(self, choice: TunedChoice) -> tuple[Path | None, str]:
        """Write it to each folder. Returns the last file that was written, and why not where none was."""
        content = json.dumps({"format": _FORMAT, **asdict(choice)}, indent=1).encode() + b"\n"
        kept, why = None, "there is no folder: neither HOME nor XDG_CACHE_HOME is a path"
        for folder in self._all():
            try:
                if folder == self._cache and not user_cache.make(folder):
                    why = f"{folder} is not this user's own"
                    continue
                folder.mkdir(parents=True, exist_ok=True)
                write_durably(folder / choice.key.file_name, content)
                kept = folder / choice.key.file_name
                user_cache.remove_oldest(folder, _FILES_MAX)
            except OSError as error:
                why = f"{folder}: {reason(error).lower()}"
        return kept, why

    def _all(self) -> list[Path]:
        return [*self._folders, *([self._cache] if self._cache else [])]


def _read(file: Path) -> TunedChoice:
    """Raises OSError or ValueError, with a reason, for a file that is not whole and sound."""
    found = read_own_record(file, _BYTES_MAX)
    if found.get("format") != _FORMAT:
        raise ValueError(f"it is not of format {_FORMAT}")
    key = _key(found.get("key"))
    settings = found.get("settings")
    if not isinstance(settings, dict) or sorted(settings) != sorted(FIELDS):
        raise ValueError(f"its settings are not {', '.join(FIELDS)}")
    hook = settings["hook"]
    if hook not in HOOKS or not isinstance(settings["bucket_view"], bool):
        raise ValueError("its hook or its bucket_view is unknown")
    if hook not in ("none", *key.hooks.split()):
        raise ValueError(f"its hook {hook} rounds gradients, which was not allowed")
    return TunedChoice(
        CommSettings(
            bucket_mb=_number(settings, "bucket_mb", _SIZE_MB_MAX),
            first_bucket_mb=_number(settings, "first_bucket_mb", _SIZE_MB_MAX),
            bucket_view=settings["bucket_view"],
            hook=hook,
        ),
        start_s=_number(found, "start_s", _SECONDS_MAX),
        chosen_s=_number(found, "chosen_s", _SECONDS_MAX),
        passes=int(_number(found, "passes", 1 << 30)),
        at=_number(found, "at", float(1 << 40)),
        key=key,
    )


def _key(found: object) -> TuningKey:
    kinds = {"world_size": int, "nodes": int}
    names = [field.name for field in fields(TuningKey)]
    if not isinstance(found, dict) or sorted(found) != sorted(names):
        raise ValueError("it does not say what it is of")
    if any(type(found[name]) is not kinds.get(name, str) for name in names):
        raise ValueError("what it says that it is of is damaged")
    return TuningKey(**found)


def _number(values: Mapping[str, Any], name: str, most: float) -> float:
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
        raise ValueError(f"its {name} is {value!r}")
    return float(value)
