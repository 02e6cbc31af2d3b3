"""docs/architecture.md's three walks: each file and function is there, and no walk is longer than its budget."""

from __future__ import annotations

import ast

import pytest

from tests.harness import REPOSITORY
from tests.size import WALKS_MAX, walks

WALKS = walks()


def _names(file: str) -> set[str]:
    """The functions and classes of a module, methods behind their class."""
    tree = ast.parse((REPOSITORY / file).read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    top = [node for node in tree.body if isinstance(node, kinds)]
    methods = {f"{node.name}.{each.name}" for node in top for each in node.body if isinstance(each, kinds)}
    return {node.name for node in top} | methods


def test_there_are_three_walks_within_their_budgets() -> None:
    assert [len(files) <= most for files, most in zip(WALKS.values(), WALKS_MAX, strict=True)] == [True] * 3
    assert all(len(files) > 15 for files in WALKS.values())


@pytest.mark.parametrize("file", sorted({file for files in WALKS.values() for file in files}))
def test_each_name_of_a_walk_is_in_its_file(file: str) -> None:
    named = set().union(*(files.get(file, set()) for files in WALKS.values()))

    assert sorted(named - _names(file)) == []
