"""One name, one meaning: no two classes of the package share a name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import elaunch


def test_no_class_name_stands_twice_in_the_package() -> None:
    places = classes(Path(elaunch.__file__).parent)

    twice = {name: files for name, files in places.items() if len(files) > 1}

    assert not twice


def classes(package: Path) -> dict[str, list[str]]:
    """Every class of the package, with the files that define it."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    # The rooms are symbolic links, which rglob("*") does not follow.
    paths = sorted(path for room in package.iterdir() if room.is_dir() for path in room.resolve().rglob("*.py"))
    assert len(paths) > 200
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path))
    return found
