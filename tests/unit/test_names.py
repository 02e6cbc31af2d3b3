"""One name, one meaning: no two classes of the package share a name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import elaunch


def test_no_class_name_stands_twice_in_a_room() -> None:
    places = classes(Path(elaunch.__file__).parent)

    twice = {name: files for name, files in places.items() if len(files) > 1}

    assert not twice


def classes(package: Path) -> dict[tuple[str, str], list[str]]:
    """Every class by its room and name, with the files that define it."""
    found: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    # The rooms are symbolic links, which rglob("*") does not follow.
    rooms = [room.resolve() for room in package.iterdir() if room.is_dir()]
    paths = sorted((room.name, path) for room in rooms for path in room.rglob("*.py"))
    assert len(paths) > 200
    for room, path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[room, node.name].append(str(path))
    return found
