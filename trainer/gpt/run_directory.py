"""The run directory: the run to which it belongs, and its result."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import yaml

from elaunch.trainer.checkpoint.storage import NOTE_BYTES_MAX, storage_at
from elaunch.trainer.files import read_regular, sweep, write_durably
from elaunch.trainer.gpt.config import ConfigError, Plain, TrainConfig
from elaunch.trainer.gpt.corpus import Corpus

# Another number where weights of before would mean something else (2: the rows of attention are ordered by head).
_LAYOUT = 2


class RunDirectory:
    """The files of one run.

    Rank 0 alone writes `config.yaml`, `metrics.jsonl`, with `--parallel auto` `plan.json`, and `result.json` once the
    run is complete. All ranks write `ledger/` and `profile/`, and all that have a part of the state `checkpoints/`.
    Checkpoints that are elsewhere have a `config.yaml` of their own beside them.
    """

    def __init__(self, path: Path, checkpoints: str | None = None) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.checkpoints: Path | str = path / "checkpoints" if checkpoints is None else checkpoints
        self.ledger = path / "ledger"
        self.profile = path / "profile"
        self.plan = path / "plan.json"
        self._result = path / "result.json"

    def claim(self, config: TrainConfig, corpus: Corpus, *, again: bool = False) -> None:
        """Make the directory this run's. Raises ConfigError if it holds another run or cannot be written.

        `again`: this is a restart, which must not fail because checkpoints elsewhere cannot be reached now.
        """
        wanted: dict[str, Plain] = {**config.identity, "corpus": corpus.summary, "layout": _LAYOUT}
        holder = "--out" if config.checkpoints is None else "--checkpoints"
        content = yaml.safe_dump(wanted, sort_keys=False).encode()
        for option, place in (("--out", self.path), ("--checkpoints", config.checkpoints)):
            if place is None or (again and option == "--checkpoints"):
                continue
            storage = storage_at(place)
            try:
                if option == "--out":
                    self.path.mkdir(parents=True, exist_ok=True)
                    for folder in (self.path, self.path / "checkpoints"):
                        sweep(folder)
                noted = storage.read_note("config.yaml")
                is_theirs = noted is None and option == holder and self.has_checkpoints()
                require_ours(option, str(storage), noted, wanted, has_checkpoints=is_theirs)
                # A restart writes nothing here: it must not fail if the disk is full by then. What is written first
                # shows that the place can be written.
                if noted is None:
                    storage.files.write("config.yaml", content)
            except OSError as error:
                raise ConfigError(
                    f"{option} {storage} cannot be used ({error.strerror or error}); give a place that is there and "
                    "can be written"
                ) from error

    @property
    def is_complete(self) -> bool:
        """Whether the run has reached its last step and written its result."""
        return self._result.exists()

    def has_checkpoints(self) -> bool:
        """Whether there is a checkpoint from which the run goes on. Raises OSError."""
        return bool(storage_at(self.checkpoints).found())

    def kept_plan(self) -> bytes | None:
        """What `keep_plan` has kept, in the directory or beside the checkpoints; None if nothing. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            return read_regular(self.plan, NOTE_BYTES_MAX)
        return storage_at(self.checkpoints).read_note(self.plan.name)

    def keep_plan(self, content: bytes) -> None:
        """Keep the plan that the run has chosen, also beside checkpoints that are elsewhere. Raises OSError."""
        write_durably(self.plan, content)
        if self.checkpoints != self.path / "checkpoints":
            storage_at(self.checkpoints).files.write(self.plan.name, content)

    def write_result(self, result: dict[str, Plain]) -> None:
        """Write `result.json`, whole or not at all."""
        write_durably(self._result, json.dumps(result, indent=2).encode() + b"\n")


def require_ours(
    option: str, place: str, text: bytes | None, wanted: dict[str, Plain], *, has_checkpoints: bool
) -> None:
    """Raise ConfigError if that place, with this config.yaml, holds another run. A new place has no config.yaml."""
    if text is None:
        if has_checkpoints:
            raise ConfigError(f"{option} {place} holds checkpoints but no config.yaml; give another {option}")
        return
    try:
        held = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{place}/config.yaml cannot be read as YAML; mend it or give another {option}") from error
    if not isinstance(held, dict):
        raise ConfigError(f"{place}/config.yaml holds no configuration; give another {option}")
    # The text may have another path (another mount), but it must be the same text; `corpus` is its digest.
    differing = [key for key in wanted if key != "data" and held.get(key) != wanted[key]]
    if differing:
        then = ", ".join(f"{key} {held.get(key)}" for key in differing)
        now = ", ".join(f"{key} {wanted[key]}" for key in differing)
        raise ConfigError(
            f"{option} {place} holds a run with {then}, not {now}; give another {option}, or the options of that run"
        )
