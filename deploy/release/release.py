"""Builds a release in dist/ and checks it: `make release`. It uploads nothing.

The wheel is made from the sdist, so both have all files. It is installed into an empty environment of each Python that
is here and that it is for; torch is left out there, since its packages have gigabytes. Beside the torch of this
environment, its installation must bring no second one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from email.message import Message
from email.parser import Parser
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
DIST = REPOSITORY / "dist"
MINORS = range(10, 15)
# What a user's environment has chosen. A release that changes it breaks other people's programs.
OTHERS_CHOICE = re.compile(r"torch|numpy|protobuf|triton|nvidia-(?!ml-py)|cuda")
SCRIPT = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n"


class Unfit(Exception):
    """The release must not go out; the text says why."""


def main() -> int:
    try:
        version = built()
        (wheel,) = DIST.glob("*.whl")
        run([sys.executable, "-m", "twine", "check", "--strict", *map(str, sorted(DIST.iterdir()))])
        if missing := without_address(metadata_of(wheel)):
            print(f"release: {missing}", file=sys.stderr)
        leaves_torch_alone(wheel)
        checked = [name for name, python in interpreters() if installs(wheel, name, python)]
        if not checked:
            raise Unfit(f"there is no Python 3.{MINORS.start} to 3.{MINORS.stop - 1} here to install it into")
        notes = write_notes(version)
    except Unfit as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    print(f"{version} is in {DIST.relative_to(REPOSITORY)}/, installed and run with Python {', '.join(checked)}")
    print(f"notes: {notes.relative_to(REPOSITORY)}\nto upload it: twine upload dist/*.whl dist/*.tar.gz")
    return 0


def built() -> str:
    """Build the sdist, and the wheel from it. Returns the version."""
    shutil.rmtree(DIST, ignore_errors=True)
    run([sys.executable, "-m", "build", "--outdir", str(DIST), str(REPOSITORY)])
    (wheel,) = DIST.glob("*.whl")
    return wheel.name.split("-")[1]


def write_notes(version: str) -> Path:
    """Copy the section of this version in CHANGELOG.md."""
    sections = re.split(r"^## ", (REPOSITORY / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    section = next((each for each in sections if each.split()[:1] == [version]), None)
    if section is None:
        raise Unfit(f"CHANGELOG.md has no section of {version}; add `## {version}` with what users will notice")
    if "unreleased" in section.splitlines()[0]:
        print(
            f"release: CHANGELOG.md calls {version} unreleased; put the date there before the upload", file=sys.stderr
        )
    notes = DIST / f"notes-{version}.md"
    notes.write_text(f"# elaunch {section}")
    return notes


def leaves_torch_alone(wheel: Path) -> None:
    """Ask pip what it would install beside the torch of this environment."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-", str(wheel)]
    report = json.loads(run(command))
    names = [each["metadata"]["name"].lower() for each in report["install"]]
    if taken := [name for name in names if OTHERS_CHOICE.match(name)]:
        others = ", ".join(taken)
        raise Unfit(f"beside what is installed here pip would install {others}: pyproject.toml asks for too much")


def interpreters() -> Iterator[tuple[str, str]]:
    """Each Python release that is here, with its interpreter: from PATH, else from pyenv."""
    versions = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv", "versions")
    for minor in MINORS:
        found = [shutil.which(f"python3.{minor}"), *map(str, versions.glob(f"3.{minor}.*/bin/python3"))]
        python = next((each for each in found if each and is_release(each, minor)), None)
        if python:
            yield f"3.{minor}", python
        else:
            print(f"release: Python 3.{minor} is not here, so nothing is known of it", file=sys.stderr)


def is_release(python: str, minor: int) -> bool:
    """Whether this starts: pyenv's shims are there for releases that are not switched on."""
    asked = subprocess.run([python, "-c", "import sys; print(sys.version_info[1])"], capture_output=True, text=True)
    return asked.stdout.strip() == str(minor)


def installs(wheel: Path, name: str, python: str) -> bool:
    """Install the wheel and all that it needs but torch, and run a job of two workers."""
    print(f"Python {name}: {python}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        run([python, "-m", "venv", folder])
        bin_folder = Path(folder, "bin")
        pip = [str(bin_folder / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
        run([*pip, *needed(wheel)])
        run([*pip, "--no-deps", str(wheel)])
        script = Path(folder, "train.py")
        script.write_text(SCRIPT)
        elaunch = str(bin_folder / "elaunch")
        run([elaunch, "--version"])
        run([elaunch, "--help"])
        said = run([elaunch, "--nproc-per-node", "2", str(script)])
        if said.count(" of 2") != 2:
            raise Unfit(f"a job of two workers with Python {name} printed {said!r}")
    return True


def metadata_of(wheel: Path) -> Message:
    """What the wheel says of itself."""
    with zipfile.ZipFile(wheel) as files:
        (name,) = [each for each in files.namelist() if each.endswith(".dist-info/METADATA")]
        return Parser().parsestr(files.read(name).decode())


def without_address(metadata: Message) -> str:
    """A sentence if the index could lead nobody to the project. Only its owners know its address."""
    if metadata.get_all("Project-URL"):
        return ""
    return (
        "pyproject.toml has no [project.urls], so the page of the index leads nobody to the project; before the upload"
        " put its addresses there (Repository, Documentation, Issues)"
    )


def needed(wheel: Path) -> list[str]:
    """What the wheel depends on without an extra, except torch."""
    wanted = metadata_of(wheel).get_all("Requires-Dist") or []
    return [each for each in wanted if "extra ==" not in each and not re.match(r"torch\b", each)]


def run(command: Sequence[str]) -> str:
    """Its standard output. Raises Unfit with all that it printed, if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=tempfile.gettempdir())
    if done.returncode:
        raise Unfit(f"{' '.join(command)} ended with code {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
