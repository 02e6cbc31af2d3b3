"""Checks on this host before the job starts."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from elaunch.launcher.errors import UsageError
from elaunch.launcher.hosts.command import run_on_hosts
from elaunch.launcher.options.options import parse
from elaunch.launcher.preflight import check_log_dir, check_options, check_program
from tests.forked import Child


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def check(*argv: str, **environ: str) -> None:
    check_program(parse(argv, {}), environ)


def refused(*argv: str, **environ: str) -> str:
    with pytest.raises(UsageError) as caught:
        check(*argv, **environ)
    return str(caught.value)


def test_a_folder_that_was_removed_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()

    assert refused(str(tmp_path / "train.py")).startswith("the current folder was removed; go to another one (cd)")
    with pytest.raises(UsageError, match="the current folder was removed"):
        run_on_hosts(parse(["--hosts", "node1", "train.py"], {}), {}, print)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["train.py"], "train.py does not exist in {}; give the path of the script"),
        (["link.py"], "link.py does not exist in {}; give the path of the script"),
        (["jobs"], "jobs is a directory without __main__.py; name the script in it"),
        (["a.yml"], "a.yml is not a program; start a job file with --config a.yml"),
        (["--no-python", "./a.yml"], "./a.yml is not a program; start a job file with --config ./a.yml"),
        (["-m", "plain.txt"], "-m takes the name of a module, and plain.txt is a file; leave -m out"),
        ([""], "the name of the script is empty (perhaps a shell variable is not set); give its name"),
        (["--no-python", "no-such"], "the command no-such is not an executable file on PATH; give its path"),
        (
            ["--no-python", "plain.txt"],
            "the command plain.txt is not an executable file; chmod +x ./plain.txt, and write ./plain.txt",
        ),
    ],
)
def test_a_program_that_cannot_start_is_one_sentence(tmp_path: Path, argv: list[str], sentence: str) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "link.py").symlink_to("nowhere")
    (tmp_path / "plain.txt").touch()

    assert refused(*argv) == sentence.format(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "mode", "way_out"),
    [
        ("x.sh", b"set -e\necho $HOME\n", 0o755, "--no-python ./x.sh"),
        ("x.sh", b"set -e\necho $HOME\n", 0o644, "--no-python sh ./x.sh"),
        ("run", b"#!/usr/bin/env bash\nif true; then echo; fi\n", 0o755, "--no-python ./run"),
        ("a.out", b"\x7fELF\x02\x01\x01\x00", 0o644, "--no-python ./a.out, after chmod +x"),
    ],
)
def test_a_command_that_is_given_as_a_script_gets_the_line_that_starts_it(
    name: str, text: bytes, mode: int, way_out: str
) -> None:
    Path(name).write_bytes(text)
    Path(name).chmod(mode)

    assert refused(name) == f"./{name} is a command, not a Python script; start it with {way_out}"
    # Another interpreter may be the shell.
    check(name, PYTHON_EXEC="sh")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.sh", "print('Python all the same')\n"),
        ("tool", "#!/opt/ours/run-with-modules\nprint(1)\n"),
        ("tool", "#!/usr/bin/python3\nprint(\n"),
        ("t.py", "print(\n"),
    ],
)
def test_what_python_may_read_is_left_to_python(name: str, text: str) -> None:
    Path(name).write_text(text)

    check(name)


def test_a_preloaded_module_that_is_not_installed_is_a_sentence() -> None:
    Path("t.py").touch()

    assert refused("--preload", "json,nunpy.linalg", "t.py").startswith("there is no module nunpy.linalg in ")
    check("--preload", "json.tool,sys,elaunch.trainer,torch.classes", "t.py")
    # Nothing is preloaded for these.
    check("--preload", "qqqqqq", "t.py", PYTHON_EXEC=sys.executable)
    check("--preload", "qqqqqq", "--no-python", "sh")


@pytest.mark.parametrize("name", ["/nonexist", "/", "no-such-python", __file__])
def test_a_python_exec_that_cannot_run_is_a_sentence(name: str) -> None:
    Path("t.py").touch()

    for program in ("t.py",), ("-m", "no.matter"):
        assert refused(*program, PYTHON_EXEC=name).startswith(f"PYTHON_EXEC={name} is not an executable file")
    check("--no-python", "sh", PYTHON_EXEC=name)
    check("t.py", PYTHON_EXEC=sys.executable)


def test_what_may_not_be_read_is_a_sentence() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "closed").mkdir(mode=0o700)
        Path(folder).chmod(0o755)
        Path(folder, "t.py").touch(mode=0)

        message = message_as_other_user(lambda: check(f"{folder}/t.py"))
        within = message_as_other_user(lambda: check(f"{folder}/closed/t.py"))
        logs = message_as_other_user(
            lambda: check_log_dir(parse(["--log-dir", f"{folder}/closed/deep/er", "t.py"], {}))
        )

    assert "cannot be read by user" in message
    assert "Permission denied" in within
    assert "Permission denied" in logs


def message_as_other_user(check: Callable[[], None]) -> str:
    """The complaint of `check` in a process of a user other than root, since root may read everything."""
    ours, theirs = os.pipe()

    def complains() -> None:
        if os.geteuid() == 0:
            os.chdir("/")
            os.setuid(65534)
        with pytest.raises(UsageError) as raised:
            check()
        os.write(theirs, str(raised.value).encode())

    with Child(complains) as child:
        os.close(theirs)
        assert child.end() == 0
    with os.fdopen(ours) as pipe:
        return pipe.read()


def test_a_file_is_no_log_directory(tmp_path: Path) -> None:
    taken = tmp_path / "logs"
    taken.touch()

    with pytest.raises(UsageError, match=r"^--log-dir .*/logs is a file; name a directory"):
        check_log_dir(parse(["--log-dir", str(taken), "t.py"], {}))
    with pytest.raises(UsageError, match=r"lies below .*/logs, which is a file"):
        check_log_dir(parse(["--log-dir", str(taken / "deep" / "er"), "t.py"], {}))
    for fine in (str(tmp_path / "new" / "deep"), "new/deep", "/dev/null"):
        check_log_dir(parse(["--log-dir", fine, "t.py"], {}))
    with pytest.raises(UsageError, match=r"^--log-dir is empty; name a directory, or /dev/null to keep nothing$"):
        parse(["--log-dir", "", "t.py"], {})
    with pytest.raises(UsageError, match=r"^--log-max-size limits log files, and there are none; keep them with"):
        check_log_dir(parse(["--log-max-size", "9M", "-r", "0", "t.py"], {}))
    check_log_dir(parse(["--log-max-size", "9M", "-r", "0:1", "t.py"], {}))


@pytest.mark.parametrize(
    ("words", "interpreter", "sentence"),
    [
        ("--debug 0 train.py", "", f"--debug needs a recent debugpy in {sys.executable}: pip install -U debugpy"),
        (
            "--debug-on-error any train.py",
            "",
            "for pdb start --debug-on-error in a terminal's foreground, without --hosts",
        ),
        ("--debug 0 --no-python true", "", "--debug needs a Python program in elaunch's own interpreter"),
        ("--debug-on-error 0 train.py", "/bin/sh", "leave --no-python out, and unset PYTHON_EXEC"),
    ],
)
def test_a_debugger_that_cannot_start_is_refused_before_anything_starts(
    words: str, interpreter: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("train.py").touch()
    monkeypatch.setitem(sys.modules, "debugpy", None)

    with pytest.raises(UsageError, match=re.escape(sentence)):
        check_options(parse(words.split(), {}), {"PYTHON_EXEC": interpreter})
