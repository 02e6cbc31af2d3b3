"""A worker's list of what its program has imported, and what of it a fork server may import."""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from types import ModuleType

import pytest

from elaunch.agent.forkserver.imported import candidates, is_installed, is_suitable, listed


class Odd(ModuleType):
    """A lazy module: it imports more for each attribute that it lacks."""

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"asked for {name}")


def test_the_list_has_modules_in_their_order_and_the_variables_that_have_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NEW", "1")
    monkeypatch.setenv("OTHER", "2")
    monkeypatch.setitem(sys.modules, "odd", Odd("odd"))
    monkeypatch.setitem(sys.modules, "forbidden", None)
    before = {**os.environ, "OTHER": "1", "GONE": "1"}
    del before["NEW"]

    lines = listed(before).decode().splitlines()

    assert {line.split("\t")[1] for line in lines if line.startswith("variable")} == {"NEW", "OTHER", "GONE"}
    names = [line.split("\t")[1] for line in lines if line.startswith("module")]
    assert names.index("os") < names.index("pytest") < names.index("elaunch.agent.forkserver.imported")
    assert not {"odd", "forbidden"} & {*names}


def test_only_modules_of_installed_packages_are_candidates() -> None:
    text = "\n".join(
        (
            "variable\tHF_HOME",
            "module\tjson\t/usr/lib/python3.11/json/__init__.py",
            "module\ttransformers\t/venv/lib/python3.11/site-packages/transformers/__init__.py",
            "module\ttransformers.trainer\t/venv/lib/python3.11/site-packages/transformers/trainer.py",
            "module\tyaml\t/usr/lib/python3/dist-packages/yaml/__init__.py",
            "module\tmine\t/home/me/project/mine.py",
            "module\tedited\t/home/me/edited/src/edited/__init__.py",
            "module\tlightning\t/venv/lib/python3.11/site-packages/lightning/__init__.py",
            "a line that is none",
        )
    )

    names, variables = candidates(text.encode(), {"lightning"})

    assert names == ("transformers", "transformers.trainer", "yaml")
    assert variables == ("HF_HOME",)


@pytest.mark.parametrize(
    ("name", "origin", "expected"),
    [
        ("json.decoder", "/usr/lib/python3.11/json/decoder.py", True),
        ("sys", "built-in", True),
        ("numpy", "/venv/lib/python3.11/site-packages/numpy/__init__.py", True),
        ("google", "/venv/lib/python3.11/site-packages/google/", True),
        ("mine", "/home/me/mine.py", False),
        ("mine", "", False),
    ],
)
def test_what_is_installed(name: str, origin: str, expected: bool) -> None:
    assert is_installed(name, origin) is expected
    assert is_suitable(name, {name: (origin,)}) is expected


@pytest.mark.parametrize(
    ("name", "origins", "expected"),
    [
        ("google", ("/home/me/google/", "/venv/lib/python3.11/site-packages/google/"), True),
        ("google", ("/home/me/google/",), False),
        ("google.mine", ("/home/me/google/mine.py",), False),
    ],
)
def test_a_package_without_a_text_is_suitable_if_a_part_of_it_is_installed(
    name: str, origins: tuple[str, ...], expected: bool
) -> None:
    google = ("/home/me/google/", "/venv/lib/python3.11/site-packages/google/")
    assert is_suitable(name, {"google": google, name: origins}) is expected


@pytest.mark.parametrize(
    ("origins", "expected"),
    [(("/venv/lib/python3.11/site-packages/six.py",), True), (("/home/me/six.py",), False), ((), False)],
)
def test_a_module_without_a_file_is_of_the_package_whose_importer_has_made_it(
    origins: tuple[str, ...], expected: bool
) -> None:
    assert is_suitable("six.moves.urllib", {"six": origins, "six.moves.urllib": ()}) is expected


def test_a_module_of_pythons_own_folder_is_suitable_whatever_its_name() -> None:
    sysconfig.get_config_vars()
    name = next(name for name in sys.modules if name.startswith("_sysconfigdata"))
    spec = importlib.util.find_spec(name)

    assert spec is not None
    assert spec.origin is not None
    assert name not in sys.stdlib_module_names
    assert is_suitable(name, {name: (spec.origin,)})
