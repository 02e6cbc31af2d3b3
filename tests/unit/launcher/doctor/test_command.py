"""launcher.doctor.command: which words are the command's own."""

from __future__ import annotations

import pytest

from elaunch.launcher.doctor.command import COMMAND
from elaunch.launcher.errors import UsageError
from tests.commands import read


@pytest.mark.parametrize(
    ("argv", "program", "is_json"),
    [
        ("--json", "", True),
        ("--nproc-per-node 2 --json t.py", "t.py", True),
        ("t.py --json", "t.py --json", False),
        ("--json t.py --json", "t.py --json", True),
        ("-m pkg --json", "pkg --json", False),
        ("-- t.py --json", "t.py --json", False),
    ],
)
def test_json_after_the_script_is_the_scripts(argv: str, program: str, *, is_json: bool) -> None:
    params = read(COMMAND, *argv.split()).params

    assert (" ".join(params["program"]), params["json"]) == (program, is_json)


def test_an_option_does_not_take_json_as_its_value() -> None:
    with pytest.raises(UsageError, match="--log-dir needs a value"):
        read(COMMAND, "--log-dir", "--json")
