"""The wheel has every module. Otherwise only users would notice a folder that the build leaves out."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.harness import REPOSITORY, RUN_LIMIT_S

# The repository's own editable install is a .pth file, which `-S` leaves unread.
IMPORT_ALL = """
import importlib, pkgutil, sys
sys.path[:0] = sys.argv[1:]
import elaunch
assert elaunch.__path__ == [f"{sys.argv[1]}/elaunch"], elaunch.__path__
for module in pkgutil.walk_packages(elaunch.__path__, "elaunch."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        # The library of an integration is not installed.
        if not module.name.startswith("elaunch.trainer.integrations.") or error.name.startswith("elaunch"):
            raise
    print(module.name)
"""


@pytest.mark.slow
def test_every_module_is_in_the_wheel_and_can_be_imported_from_it(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    # With the setuptools that torch has brought: an environment for the build alone costs four seconds of CPU.
    own = ("--no-deps", "--no-build-isolation")
    subprocess.run(
        [*pip, "wheel", *own, "--wheel-dir", str(tmp_path), str(REPOSITORY)], check=True, timeout=RUN_LIMIT_S
    )
    (wheel,) = tmp_path.glob("elaunch-*.whl")
    installed = tmp_path / "installed"
    # pip would take another two seconds to unpack it.
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)

    program = [sys.executable, "-S", "-c", IMPORT_ALL, str(installed), sysconfig.get_path("purelib")]
    imported = subprocess.run(
        program, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True, timeout=RUN_LIMIT_S
    ).stdout.split()

    source = REPOSITORY / "src" / "elaunch"
    files = {path.relative_to(source) for room in source.iterdir() if room.is_dir() for path in _files(room)}
    assert files == {
        path.relative_to(installed / "elaunch")
        for path in _files(installed / "elaunch")
        if len(path.relative_to(installed / "elaunch").parts) > 1
    }
    assert len(imported) > 150
    assert (installed / "elaunch" / "py.typed").exists()
    assert [path.name for path in installed.glob("elaunch-*.data/data/share/man/man1/*")] == ["elaunch.1"]


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*.py") if "__pycache__" not in path.parts]
