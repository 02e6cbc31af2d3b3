"""Where a profile goes, and what one generation leaves for the next: files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from elaunch.trainer.files import read_own_record
from elaunch.trainer.profiling.steps import Before

RECORD, MERGED = "profile.json", "trace.json.gz"
# In the folder that outlives workers (ELAUNCH_MEMORY): how far the profile of this job is.
_MARK = "profiled.json"
_MARK_BYTES_MAX = 1 << 20
# A folder of --log-dir has this file; the private folder of a job without --log-dir is removed with the job.
_TIMELINE = "timeline.jsonl"


def rank_file(rank: int) -> str:
    return f"rank_{rank}.json.gz"


def profile_folder(environ: Mapping[str, str], generation: int, otherwise: Path) -> Path:
    """The folder for this rank's files: in the generation's log folder, or with no --log-dir below `otherwise`.

    elaunch tells workers where their exception goes: <run>/attempt_<generation>/<rank>/error.json.
    """
    error_file = environ.get("TORCHELASTIC_ERROR_FILE", "")
    attempt = Path(error_file).parent.parent
    if error_file and attempt.name.startswith("attempt_") and (attempt.parent / _TIMELINE).is_file():
        return attempt / "profile"
    return otherwise / f"generation_{generation}"


def read_mark(environ: Mapping[str, str]) -> tuple[Before, list[str]]:
    """What an earlier generation of this job did, and the sentences that it found."""
    memory = environ.get("ELAUNCH_MEMORY")
    if not memory:
        return Before.NOTHING, []
    try:
        content = read_own_record(Path(memory) / _MARK, _MARK_BYTES_MAX)
        return Before(content["state"]), [str(each) for each in content["sentences"]]
    except (OSError, ValueError, TypeError, KeyError):
        return Before.NOTHING, []


def write_mark(environ: Mapping[str, str], state: Before, sentences: list[str]) -> None:
    """Leave it for the next generation. Without it that one profiles again."""
    memory = environ.get("ELAUNCH_MEMORY")
    if not memory:
        return
    partial = Path(memory) / f".{_MARK}.{os.getpid()}"
    try:
        partial.write_text(json.dumps({"state": state.value, "sentences": sentences}))
        partial.replace(Path(memory) / _MARK)
    except OSError:
        partial.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that appears when it is whole. Raises OSError."""
    partial = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content)
        partial.replace(path)
    except OSError:
        try:
            partial.unlink(missing_ok=True)
        finally:
            raise
