"""The lock of a checkpoint directory: it belongs to one training, of which one job at a time writes.

The lock is a file beside the checkpoints that the running job renews. A job that finds another one's publishes nothing
more. A job that exits marks the file as ended. After a kill it is stale: on the same host if the process is gone,
elsewhere once it is not renewed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from elaunch.process_identity import is_dead_here, is_here, this_process
from elaunch.strict_json import parse_json
from elaunch.trainer.checkpoint.storage import Storage

NOTE = "elaunch-training.json"
# A Keeper's, if the program gives it none.
UNNAMED = "training"
_FORMAT = 1
_RENEW_S = 10.0
# A lock that is not renewed for so long is stale. On the job's own host its process is looked at instead.
_SILENT_S = 3 * _RENEW_S
# How long a killed job's processes may take to exit.
_ENDING_S = 10.0
_LOOK_S = 0.5
_LENGTH = re.compile(r"(steps?|epochs?|iters?|iterations?)$", re.IGNORECASE)
# `--resume`, with or without a value, does not change the training.
_RESUME = re.compile(r"resum|restore|continue|ckpt|checkpoint", re.IGNORECASE)
_RESUME_FROM = re.compile(r".*[/.].*|true|yes|1|on|auto|last|latest", re.IGNORECASE)
_TYPES: dict[str, type] = {
    **dict.fromkeys(("name", "run", "host", "process", "token", "since"), str),
    **dict.fromkeys(("generation", "renewals"), int),
    "ended": bool,
}


class NotOurs(ValueError):
    """The checkpoints belong to another training, or another job is writing them."""


class Claim:
    """This job's claim on `storage`, for the training `name` in `generation`. Only rank 0 has one."""

    def __init__(self, storage: Storage, name: str, generation: int, say: Callable[[str], None]) -> None:
        self._storage, self._say = storage, say
        self._note: dict[str, Any] = {
            "format": _FORMAT,
            "name": name,
            "command": command(sys.argv, os.environ, str(storage)),
            "run": os.environ.get("TORCHELASTIC_RUN_ID", ""),
            "generation": generation,
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
        # Which job has taken it over.
        self.lost = ""

    def take(self, waiting: Callable[[], object]) -> None:
        """Take the lock. Raises NotOurs; `waiting` is called while it waits for another job to end."""
        # The first checkpoint reports an I/O error; the thread retries.
        with contextlib.suppress(OSError):
            held = self._held()
            if held is not None and not self._is_mine(held):
                if there := self._storage.found():
                    self._require_same(held, there[-1][0].step)
                self._require_over(held, waiting)
                if self._storage.found():
                    self._say(f"resuming from the checkpoints of {_job(held)} in {self._storage}")
            self._old = self._note["token"] if held is None else held["token"]
            self._write()
        threading.Thread(target=self._renew, name="checkpoints' claim", daemon=True).start()

    def require(self) -> None:
        """Raise OSError if another job has taken the lock, or it cannot be read. For each checkpoint."""
        held = self._held() or self._note
        self._old = self._old or held["token"]
        if held["token"] not in (self._note["token"], self._old):
            self.lost = f"{_job(held)} has taken over {self._storage}, so this job writes no more checkpoints there"
            raise OSError(self.lost)

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
            # The thread may be late.
            if self._left.is_set() and not ended:
                return
            self._note |= {"renewals": self._note["renewals"] + 1, "ended": ended}
            self._storage.write_note(NOTE, json.dumps(self._note, indent=1).encode() + b"\n")
            self._old = self._note["token"]

    def _held(self) -> dict[str, Any] | None:
        """The note that is there; None without one that this release can read. Raises OSError."""
        content = self._storage.read_note(NOTE)
        try:
            note = {} if content is None else parse_json(content)
            types = {name: type(note[name]) for name in _TYPES}
            is_whole = types == _TYPES and all(type(word) is str for word in note["command"])
            return note if is_whole and note["format"] == _FORMAT and note["process"].count(":") > 1 else None
        except (KeyError, TypeError, ValueError):
            return None

    def _is_mine(self, held: dict[str, Any]) -> bool:
        """Whether it is this process's, or that of an earlier generation of this job, which the agent has ended."""
        is_later = "ELAUNCH_GENERATION" in os.environ and held["generation"] < self._note["generation"]
        return held["process"] == self._note["process"] or (is_later and held["run"] == self._note["run"])

    def _require_same(self, held: dict[str, Any], step: int) -> None:
        mine = self._note
        if UNNAMED in (held["name"], mine["name"]):
            its, ours = held["command"], mine["command"]
        else:
            its, ours = [f"name={held['name']}"], [f"name={mine['name']}"]
        if its != ours:
            # What differs; of the same words in another order, all.
            lacks, adds = ([word for word in one if word not in other] for one, other in ((its, ours), (ours, its)))
            shown = {"that one": lacks, "this one": adds} if lacks or adds else {"that one": its, "this one": ours}
            differs = ", ".join(f"{which} has `{' '.join(words)}`" for which, words in shown.items() if words)
            raise NotOurs(
                f"{self._storage} has the checkpoints of another training, by {_job(held)}: {differs}. Give each "
                f"training its own checkpoints=; to resume from step {step} of that one anyway, remove "
                f"{self._storage}/{NOTE}"
            )

    def _require_over(self, held: dict[str, Any], waiting: Callable[[], object]) -> None:
        here = is_here(held["process"])
        until_s = time.monotonic() + (_ENDING_S if here else _SILENT_S)
        first = held
        while not held["ended"] and not is_dead_here(held["process"]):
            is_late = time.monotonic() > until_s
            if is_late and not here:
                return
            if is_late or (held["renewals"] != first["renewals"] and not here):
                raise NotOurs(
                    f"{self._storage} is being written by {_job(held)}; two jobs would overwrite each other's "
                    "checkpoints: give each its own checkpoints=, or end that job first"
                )
            if held is first:
                what = "exit" if here else "renew its lock"
                wait_s = until_s - time.monotonic()
                self._say(f"{_job(held)} may still write to {self._storage}: waiting {wait_s:.0f} s for it to {what}")
            waiting()
            time.sleep(_LOOK_S)
            held = self._held() or {**held, "ended": True}


def command(argv: Sequence[str], environ: Mapping[str, str], place: str) -> list[str]:
    """The command without what differs between two jobs of one training.

    That is: where script, data and checkpoints lie, the scheduler's number of the job, how long to train, `--resume`.
    """
    names = [name for name in environ if name == "TORCHELASTIC_RUN_ID" or name.endswith(("JOB_ID", "JOBID"))]
    jobs = "|".join(re.escape(environ[name]) for name in names if len(environ[name]) > 3)
    script = PurePath(argv[0])
    words = ["/".join(script.parts[-2:]) if script.name == "__main__.py" else script.name]
    option = ""
    for word in argv[1:]:
        if jobs:
            word = re.sub(rf"(?<![0-9a-zA-Z])({jobs})(?![0-9a-zA-Z])", "JOB", word)
        name, equals, value = word.rpartition("=")
        before = name if equals else option
        if _RESUME.search(name or (word if word.startswith("-") else "")):
            option = "" if equals else word
            continue
        if _RESUME.search(option) and _RESUME_FROM.fullmatch(word) and not word.startswith("-"):
            option = ""
            continue
        if _is_around(value, place):
            value = "CHECKPOINTS"
        elif "/" in value and not set(value) & set(" {[\"'"):
            value = PurePath(value).name
        elif value.isdecimal() and (not before or _LENGTH.search(before)):
            value = "N"
        words.append(name + equals + value)
        option = word if word.startswith("-") and not equals else ""
    return words


def _is_around(value: str, place: str) -> bool:
    """Whether a path is that of the checkpoints, above it, or in it."""
    if value == place or not value or "://" in value + place:
        return value == place
    one, other = os.path.abspath(value), os.path.abspath(place)  # noqa: PTH100
    return f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/")


def _job(note: dict[str, Any]) -> str:
    name = f"job {note['run']}" if note["run"] else "a job"
    return f"{name} (on {note['host']}, pid {note['process'].split(':')[-2]}, since {note['since']})"
