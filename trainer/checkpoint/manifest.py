"""What names a checkpoint and what it says of itself: its mark, and the manifest that is written last.

The order, generation before step, fences: what a group that should be gone still writes is older than anything of the
group that replaced it, however far it got.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from elaunch.strict_json import parse_json
from elaunch.trainer.state.version import Version

MANIFEST = "manifest.json"
# The file that holds all of a state that is no tensor.
PLAIN = "plain.pt"
# DCP's account of where each tensor lies.
METADATA = ".metadata"
_FORMAT = 1
_NAME = re.compile(r"generation-(\d+)-step-(\d+)(\.pt)?")


class Corrupt(ValueError):
    """The bytes of a checkpoint are not those that were written; nothing else proves that."""


class Mark(Version):
    """What names a checkpoint, and orders them."""

    @property
    def folder_name(self) -> str:
        return f"generation-{self.generation:04d}-step-{self.step:08d}"

    @property
    def file_name(self) -> str:
        """The name of a single-file checkpoint."""
        return self.folder_name + ".pt"

    @classmethod
    def of(cls, path: PurePath) -> Mark | None:
        """The mark in a file's or folder's name; None where it is no checkpoint."""
        match = _NAME.fullmatch(path.name)
        return cls(int(match[1]), int(match[2])) if match else None


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself. `files`: length in bytes and CRC-32 of each by its name."""

    mark: Mark
    world_size: int
    files: dict[str, tuple[int, int]]

    def to_bytes(self) -> bytes:
        record = {
            "format": _FORMAT,
            "generation": self.mark.generation,
            "step": self.mark.step,
            "world_size": self.world_size,
            "files": self.files,
        }
        return json.dumps(record, indent=1).encode() + b"\n"

    @classmethod
    def from_bytes(cls, content: bytes) -> Manifest:
        """Raises Corrupt where it is torn, ValueError where it is a newer release's."""
        try:
            record = parse_json(content)
            form = record["format"]
            manifest = _manifest_of(record) if form == _FORMAT else None
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise Corrupt(f"its {MANIFEST} is missing or torn") from error
        if manifest is None:
            raise ValueError(f"its format is {form}, this release reads {_FORMAT}")
        return manifest


def is_file_name(name: str) -> bool:
    """Whether it names a file in a folder, and nothing above or below it."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


def _manifest_of(record: dict[str, Any]) -> Manifest:
    """Raises KeyError, TypeError, AttributeError and ValueError."""
    mark = Mark(record["generation"], record["step"])
    files = {}
    for name, (length, crc) in record["files"].items():
        if type(length) is not int or type(crc) is not int or not is_file_name(name):
            raise ValueError(f"{name!r} is no file with its length and CRC")
        files[name] = (length, crc)
    if any(type(number) is not int for number in (mark.generation, mark.step, record["world_size"])):
        raise TypeError("the generation, the step or the world size is no number")
    return Manifest(mark, record["world_size"], files)
