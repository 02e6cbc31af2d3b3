"""The run directory: the run to which it belongs, and its result."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from elaunch.trainer.files import sweep, write_durably
from elaunch.trainer.gpt.config import Plain, TrainConfig, UsageError
from elaunch.trainer.gpt.corpus import Corpus


class RunDirectory:
    """The files of one run.

    Rank 0 alone writes `config.yaml`, `metrics.jsonl`, `checkpoints/` and, once the run is complete, `result.json`. All
    ranks write `ledger/`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.ledger = path / "ledger"
        self._config = path / "config.yaml"
        self._result = path / "result.json"

    def claim(self, config: TrainConfig, corpus: Corpus) -> None:
        """Make the directory this run's. Raises UsageError if it holds another run or cannot be written."""
        wanted: dict[str, Plain] = {**config.identity, "corpus": corpus.summary}
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            held = self._held()
            if held is not None:
                self._compare(held, wanted)
            sweep(self.path)
            sweep(self.checkpoints)
            record = {**wanted, "checkpoint_every": config.checkpoint_every}
            # A restart writes nothing here: it must not fail if the disk is full by then.
            if record != held:
                write_durably(self._config, yaml.safe_dump(record, sort_keys=False).encode())
        except OSError as error:
            raise UsageError(
                f"--out {self.path} cannot be used ({error.strerror}: {error.filename}); give one that can be written"
            ) from error

    @property
    def is_complete(self) -> bool:
        """Whether the run has reached its last step and written its result."""
        return self._result.exists()

    def write_result(self, result: dict[str, Plain]) -> None:
        """Write `result.json`, whole or not at all."""
        write_durably(self._result, json.dumps(result, indent=2).encode() + b"\n")

    def _held(self) -> dict[str, Plain] | None:
        """The configuration of the run in this directory, or None if the directory is new."""
        try:
            held = yaml.safe_load(self._config.read_text())
        except FileNotFoundError:
            if any(self.checkpoints.iterdir()):
                raise UsageError(
                    f"--out {self.path} holds checkpoints but no config.yaml; give another --out"
                ) from None
            return None
        except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
            raise UsageError(f"{self._config} cannot be read as YAML; mend it or give another --out") from error
        if not isinstance(held, dict):
            raise UsageError(f"{self._config} holds no configuration; give another --out")
        return held

    def _compare(self, held: dict[str, Plain], wanted: dict[str, Plain]) -> None:
        # The text may have another path (another mount), but it must be the same text; `corpus` is its digest.
        differing = [key for key in wanted if key != "data" and held.get(key) != wanted[key]]
        if differing:
            then = ", ".join(f"{key} {held.get(key)}" for key in differing)
            now = ", ".join(f"{key} {wanted[key]}" for key in differing)
            raise UsageError(
                f"--out {self.path} holds a run with {then}, not {now}; give another --out, or the options of that run"
            )
