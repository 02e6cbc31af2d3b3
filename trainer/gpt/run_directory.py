"""The run directory: the run to which it belongs, and its result."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from elaunch.trainer.checkpoint.storage import Storage, storage_at
from elaunch.trainer.files import sweep, write_durably
from elaunch.trainer.gpt.config import ConfigError, Plain, TrainConfig
from elaunch.trainer.gpt.corpus import Corpus


class RunDirectory:
    """The files of one run.

    Rank 0 alone writes `config.yaml`, `metrics.jsonl`, `checkpoints/` and, once the run is complete, `result.json`. All
    ranks write `ledger/`. Checkpoints that are elsewhere have a `config.yaml` of their own beside them.
    """

    def __init__(self, path: Path, checkpoints: str | None = None) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.checkpoints: Path | str = path / "checkpoints" if checkpoints is None else checkpoints
        self.ledger = path / "ledger"
        self._config = path / "config.yaml"
        self._result = path / "result.json"

    def claim(self, config: TrainConfig, corpus: Corpus, *, again: bool = False) -> None:
        """Make the directory this run's. Raises ConfigError if it holds another run or cannot be written.

        `again`: this is a restart, which must not fail because checkpoints elsewhere cannot be reached now.
        """
        wanted: dict[str, Plain] = {**config.identity, "corpus": corpus.summary}
        record = {**wanted, "checkpoint_every": config.checkpoint_every}
        try:
            own = Path(self.checkpoints) if config.checkpoints is None else None
            (own or self.path).mkdir(parents=True, exist_ok=True)
            held = self._held(own)
            if held is not None:
                _compare(f"--out {self.path}", held, wanted)
            sweep(self.path)
            if own is not None:
                sweep(own)
            # A restart writes nothing here: it must not fail if the disk is full by then.
            if record != held:
                write_durably(self._config, yaml.safe_dump(record, sort_keys=False).encode())
        except OSError as error:
            raise ConfigError(
                f"--out {self.path} cannot be used ({error.strerror}: {error.filename}); give one that can be written"
            ) from error
        if config.checkpoints is not None and not again:
            _claim_elsewhere(storage_at(config.checkpoints), record, wanted)

    @property
    def is_complete(self) -> bool:
        """Whether the run has reached its last step and written its result."""
        return self._result.exists()

    def write_result(self, result: dict[str, Plain]) -> None:
        """Write `result.json`, whole or not at all."""
        write_durably(self._result, json.dumps(result, indent=2).encode() + b"\n")

    def _held(self, checkpoints: Path | None) -> dict[str, Plain] | None:
        """The configuration of the run in this directory, or None if the directory is new."""
        try:
            text = self._config.read_text()
        except FileNotFoundError:
            if checkpoints is not None and any(checkpoints.iterdir()):
                raise ConfigError(
                    f"--out {self.path} holds checkpoints but no config.yaml; give another --out"
                ) from None
            return None
        except ValueError as error:
            raise ConfigError(f"{self._config} cannot be read as YAML; mend it or give another --out") from error
        return _parsed(text, str(self._config), "--out")


def _claim_elsewhere(storage: Storage, record: dict[str, Plain], wanted: dict[str, Plain]) -> None:
    """Make the place of the checkpoints this run's; what is written first shows that it can be."""
    try:
        text = storage.read_note("config.yaml")
        if text is not None:
            held = _parsed(text, f"{storage}/config.yaml", "--checkpoints")
            _compare(f"--checkpoints {storage}", held, wanted)
        elif storage.found():
            raise ConfigError(
                f"--checkpoints {storage} holds checkpoints but no config.yaml; give another place for this run's"
            )
        else:
            storage.write_note("config.yaml", yaml.safe_dump(record, sort_keys=False).encode())
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"--checkpoints {storage} cannot be used ({reason}); give a place that is there and can be written"
        ) from error


def _parsed(text: str | bytes, source: str, option: str) -> dict[str, Plain]:
    try:
        held = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{source} cannot be read as YAML; mend it or give another {option}") from error
    if not isinstance(held, dict):
        raise ConfigError(f"{source} holds no configuration; give another {option}")
    return held


def _compare(place: str, held: dict[str, Plain], wanted: dict[str, Plain]) -> None:
    # The text may have another path (another mount), but it must be the same text; `corpus` is its digest.
    differing = [key for key in wanted if key != "data" and held.get(key) != wanted[key]]
    if differing:
        then = ", ".join(f"{key} {held.get(key)}" for key in differing)
        now = ", ".join(f"{key} {wanted[key]}" for key in differing)
        raise ConfigError(
            f"{place} holds a run with {then}, not {now}; give another {place.split()[0]}, or the options of that run"
        )
