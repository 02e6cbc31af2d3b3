"""The lock of a checkpoint directory, which belongs to one training and is written by one job at a time.

The lock is a file beside the checkpoints, which the running job renews. A job that finds another job's lock publishes
nothing more. A job that exits marks the file as ended. After a kill it is stale: on the same host if the process is
gone, elsewhere once it is not renewed.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

from elaunch.process_identity import is_dead_here, is_here, this_process
from elaunch.strict_json import parse_json
from elaunch.trainer.checkpoint.storage import Storage

NOTE = "elaunch-training.json"
# The name of a Keeper that was given none.
UNNAMED = "training"
_CLAIM_FORMAT = 1
_RENEW_S = 10.0
# A lock that was not renewed for this long is stale. On its job's host the process is checked instead.
_SILENT_S = 3 * _RENEW_S
# A stopped job saves first, and its successor may have started already.
_PATIENCE_S = 60.0
_POLL_S = 0.5
_TEXT_MAX, _SHOWN_MAX = 4096, 300
_TYPES: dict[str, type] = {
    **dict.fromkeys(("name", "script", "arguments", "run", "job", "host", "process", "token", "since"), str),
    **dict.fromkeys(("generation", "renewals"), int),
    "ended": bool,
}


class NotOurs(ValueError):
    """The checkpoints belong to another training, or another job is writing them."""


class Claim:
    """This job's claim on `storage`, for the training `name` in `generation`. Only rank 0 has one.

    `job` is the same in all generations of a job, and in no other job.
    """

    def __init__(self, storage: Storage, name: str, generation: int, log: Callable[[str], None], job: str = "") -> None:
        self._storage, self._log = storage, log
        self._note: dict[str, Any] = {
            "format": _CLAIM_FORMAT,
            "name": name,
            "script": script_name(sys.argv[0]),
            "arguments": shlex.join(sys.argv[1:])[:_TEXT_MAX],
            "run": os.environ.get("TORCHELASTIC_RUN_ID", ""),
            "generation": generation,
            "job": job,
            "host": socket.gethostname(),
            "process": this_process(),
            "token": secrets.token_hex(8),
            "since": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            "renewals": 0,
            "ended": False,
        }
        self._left, self._writing = threading.Event(), threading.Lock()
        # The token of the lock that this job may replace, once it has read one.
        self._old: str | None = None
        # Which job has taken over the lock.
        self.lost = ""

    def take(self, waiting: Callable[[], object]) -> None:
        """Take the lock. Raises NotOurs; `waiting` is called while it waits for another job to end."""
        # The first checkpoint reports what cannot be read or written; the thread retries.
        with contextlib.suppress(OSError):
            held = self._held()
            if held is not None and not self._is_mine(held):
                if there := self._storage.found():
                    self._require_same(held, there[-1][0].step)
                self._require_over(held, waiting)
                if self._storage.found():
                    self._log(f"resuming from the checkpoints of {_job(held)} in {self._storage}{self._others(held)}")
            self._old = self._note["token"] if held is None else held["token"]
            self._write()
        threading.Thread(target=self._renew, name="checkpoints' claim", daemon=True).start()

    def require(self) -> None:
        """Raise OSError if another job has taken the lock, or it cannot be read. Called for each checkpoint."""
        held = self._held() or self._note
        if self._old is None and (held["ended"] or is_dead_here(held["process"]) or self._is_mine(held)):
            # It could not be read when the job began.
            self._old = held["token"]
        if held["token"] not in (self._note["token"], self._old):
            self.lost = f"{_job(held)} has taken over {self._storage}, so this job writes no more checkpoints there"
            raise OSError(self.lost)

    def leave(self) -> None:
        """Stop renewing the lock, also after an error that the program catches."""
        self._left.set()

    def release(self) -> None:
        """Mark the lock as ended: the job writes nothing more."""
        self._left.set()
        with contextlib.suppress(OSError):
            self.require()
            self._write(ended=True)

    def _renew(self) -> None:
        while not self.lost and not self._left.wait(_RENEW_S):
            with contextlib.suppress(OSError):
                self.require()
                self._write()

    def _write(self, *, ended: bool = False) -> None:
        with self._writing:
            # The renewing thread may be late.
            if self._left.is_set() and not ended:
                return
            self._note |= {"renewals": self._note["renewals"] + 1, "ended": ended}
            self._storage.files.write(NOTE, json.dumps(self._note, indent=1).encode() + b"\n")
            self._old = self._note["token"]

    def _held(self) -> dict[str, Any] | None:
        """The content of the lock; None if there is none that this release can read. Raises OSError."""
        content = self._storage.read_note(NOTE)
        try:
            note = {} if content is None else parse_json(content)
            types = {name: type(note[name]) for name in _TYPES}
            is_whole = types == _TYPES and all(
                len(note[name]) <= _TEXT_MAX for name, kind in _TYPES.items() if kind is str
            )
            return note if is_whole and note["format"] == _CLAIM_FORMAT and note["process"].count(":") > 1 else None
        except (KeyError, TypeError, ValueError):
            return None

    def _is_mine(self, held: dict[str, Any]) -> bool:
        """Whether it is this process's, or that of an earlier generation of this job, which the agent has ended."""
        is_later = "ELAUNCH_GENERATION" in os.environ and held["generation"] < self._note["generation"]
        # Two jobs may have been given one --run-id.
        is_ours = (held["run"], held["job"]) == (self._note["run"], self._note["job"])
        is_gone = not is_here(held["process"]) or is_dead_here(held["process"])
        return held["process"] == self._note["process"] or (is_later and is_ours and is_gone)

    def _is_by_script(self, held: dict[str, Any]) -> bool:
        """Whether the two trainings are compared by their scripts, since not both have names."""
        return UNNAMED in (held["name"], self._note["name"])

    def _require_same(self, held: dict[str, Any], step: int) -> None:
        what = "script" if self._is_by_script(held) else "name"
        if held[what] != self._note[what]:
            raise NotOurs(
                f"{self._storage} has the checkpoints of another training, by {_job(held)}: that one has the {what} "
                f"`{held[what]}`, this one `{self._note[what]}`. Give each training its own checkpoints=, or, if both "
                f"are one training, the same name=; remove {self._storage}/{NOTE} to resume from step {step} of that "
                "one"
            )

    def _others(self, held: dict[str, Any]) -> str:
        """The arguments of that job, if they differ: it may have been another training of the same script."""
        its = held["arguments"]
        if its == self._note["arguments"] or not self._is_by_script(held):
            return ""
        return (
            f", which had other arguments (`{its[:_SHOWN_MAX]}`): another training needs its own checkpoints= or name="
        )

    def _require_over(self, held: dict[str, Any], waiting: Callable[[], object]) -> None:
        here, began_s = is_here(held["process"]), time.monotonic()
        renewed_s, first = began_s, held
        while not held["ended"] and not is_dead_here(held["process"]):
            now_s = time.monotonic()
            if not here and now_s > renewed_s + _SILENT_S:
                return
            if now_s > began_s + _PATIENCE_S:
                raise NotOurs(
                    f"{self._storage} is being written by {_job(held)}; two jobs would overwrite each other's "
                    "checkpoints: give each its own checkpoints=, or end that job first"
                )
            if held is first:
                rule = "" if here else f", or not to renew its lock for {_SILENT_S:.0f} s"
                self._log(
                    f"{_job(held)} may still write to {self._storage}: waiting up to {_PATIENCE_S:.0f} s for it to "
                    f"exit{rule}"
                )
            waiting()
            time.sleep(_POLL_S)
            now = self._held() or {**held, "ended": True}
            if now["renewals"] != held["renewals"]:
                renewed_s = time.monotonic()
            held = now


def script_name(path: str) -> str:
    """The name of a script, whatever its directory, to compare trainings; of `python -m package` also the package."""
    script = PurePath(path)
    return "/".join(script.parts[-2:]) if script.name == "__main__.py" else script.name


def _job(note: dict[str, Any]) -> str:
    name = f"job {note['run']}" if note["run"] else "a job"
    return f"{name} (on {note['host']}, pid {note['process'].split(':')[-2]}, since {note['since']})"
