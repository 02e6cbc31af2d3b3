"""Checks this host before the job starts: program, hook, output folder. Also reads the user's secret."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from elaunch.agent.linux import is_in_foreground
from elaunch.agent.program_imports import is_python
from elaunch.launcher.errors import UsageError
from elaunch.launcher.options.options import Options
from elaunch.rendezvous.types import ProgramKind

_SHELL_SUFFIXES = {".sh", ".bash", ".zsh"}
_JOB_FILE_SUFFIXES = {".yaml", ".yml"}
_ELF = b"\x7fELF"


def check_options(options: Options, environ: Mapping[str, str]) -> None:
    """Raises UsageError if this host lacks the program, an option's command, a library or a folder."""
    check_program(options, environ)
    for name, command in (("--on-event", options.on_event), ("--health-command", options.health_command)):
        if command:
            # The first event, or a started agent, would be too late to notice.
            check_command(command[0], f"{name} ")
    if options.metrics_port and find_spec("prometheus_client") is None:
        raise UsageError(
            "--metrics-port needs the package prometheus-client; install it with pip install 'elaunch[metrics]', or"
            " leave the option out"
        )
    check_log_dir(options)
    if options.debug is not None or options.debug_on_error is not None:
        _check_debugger(options, environ)


def check_program(options: Options, environ: Mapping[str, str]) -> None:
    """Raises UsageError if the program cannot start on this host."""
    check_folder()
    kind, interpreter = options.kind, environ.get("PYTHON_EXEC")
    if not options.target:
        raise UsageError(f"the name of the {kind.value} is empty (perhaps a shell variable is not set); give its name")
    try:
        # Nothing is preloaded for a command or for another interpreter.
        if kind is ProgramKind.COMMAND:
            _check_no_job_file(options.target)
            check_command(options.target, "the command ")
            return
        if kind is ProgramKind.SCRIPT:
            check_script(options.target)
        elif Path(options.target).is_file():
            raise UsageError(f"-m takes the name of a module, and {options.target} is a file; leave -m out")
        if interpreter:
            check_command(interpreter, "PYTHON_EXEC=")
            return
        if kind is ProgramKind.SCRIPT:
            _check_is_python(Path(options.target))
        for name in options.preload or ():
            # The fork server has this process's `sys.path`, from which elaunch's `__main__` removes the current folder.
            if find_spec(name.partition(".")[0]) is None:
                raise UsageError(f"there is no module {name} in {sys.executable}'s path; install it, or set PYTHONPATH")
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}; change its permissions, or give another path") from error


def check_folder() -> None:
    """Raises UsageError if the current folder was removed: torch cannot be imported there."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UsageError("the current folder was removed; go to another one (cd) and start again") from None


def _check_debugger(options: Options, environ: Mapping[str, str]) -> None:
    """Raises UsageError if a worker of this node could not start the requested debugger."""
    option = "--debug" if options.debug_on_error is None else "--debug-on-error"
    if options.kind is ProgramKind.COMMAND or (environ.get("PYTHON_EXEC") or sys.executable) != sys.executable:
        own = f"a Python program in elaunch's own interpreter ({sys.executable})"
        raise UsageError(f"{option} needs {own}; leave --no-python out, and unset PYTHON_EXEC")
    has_pdb, newest = options.debug is None and is_in_foreground(0), "trigger_exception_handler"
    if not has_pdb and (find_spec("debugpy") is None or not hasattr(import_module("debugpy"), newest)):
        pdb = "for pdb start --debug-on-error in a terminal's foreground, without --hosts"
        raise UsageError(f"{option} needs a recent debugpy in {sys.executable}: pip install -U debugpy; {pdb}")


def check_command(name: str, what: str) -> None:
    """Raises UsageError if `name` cannot be run as a command."""
    if shutil.which(name):
        return
    if not Path(name).is_file():
        where = f"in {Path.cwd()}" if os.sep in name else "on PATH"
        raise UsageError(f"{what}{name} is not an executable file {where}; give its path")
    # A name without a slash is not searched for in the current folder.
    path = shlex.quote(name if os.sep in name else f"./{name}")
    raise UsageError(f"{what}{name} is not an executable file; chmod +x {path}, and write {path}")


def take_program_from_stdin() -> None:
    """Read all of stdin, and replace it with a memory file with the same text, which every worker can read."""
    fd = os.memfd_create("stdin")
    with open(fd, "wb", closefd=False) as text, open(0, "rb", closefd=False) as stdin:
        shutil.copyfileobj(stdin, text)
    os.dup2(fd, 0)
    os.close(fd)


def check_log_dir(options: Options) -> None:
    """Raises UsageError if --log-dir cannot hold files."""
    if options.log_dir is None:
        has_files = "log_dir" not in options.given and (options.redirects or options.tee)
        if "log_max_size" in options.typed and not has_files:
            raise UsageError("--log-max-size limits log files, and there are none; keep them with --log-dir DIR")
        return
    try:
        found = next(each for each in (options.log_dir, *options.log_dir.parents) if _exists(each))
        is_folder = found.is_dir()
    except OSError as error:
        raise UsageError(f"--log-dir {options.log_dir}: {error.strerror}; choose another") from error
    if not is_folder:
        where = "is a file" if found == options.log_dir else f"lies below {found}, which is a file"
        raise UsageError(f"--log-dir {options.log_dir} {where}; name a directory (a missing one is made)")


def _check_no_job_file(target: str) -> None:
    if Path(target).suffix.lower() in _JOB_FILE_SUFFIXES:
        raise UsageError(f"{target} is not a program; start a job file with --config {shlex.quote(target)}")


def check_script(target: str) -> None:
    """Raises UsageError unless `target` is a script that every worker can read; OSError if its folder is unreadable."""
    if target == "-":
        if os.isatty(0):
            raise UsageError("- reads the script from stdin, which is the terminal; give its path, or pipe it in")
        return
    script = Path(target)
    _check_no_job_file(target)
    if script.is_dir():
        if not (script / "__main__.py").is_file():
            raise UsageError(f"{target} is a directory without __main__.py; name the script in it")
        return
    if not _exists(script):
        folder = "" if script.is_absolute() else f" in {Path.cwd()}"
        raise UsageError(f"{target} does not exist{folder}; give the path of the script")
    if not script.is_file():
        raise UsageError(
            f"{target} is not a regular file, so a restart could not read it again; save the script, or use - for stdin"
        )
    if not os.access(script, os.R_OK):
        raise UsageError(f"{target} cannot be read by user {os.geteuid()}; change its permissions")


def _exists(path: Path) -> bool:
    """Whether there is a file or folder. Raises OSError if that cannot be read; Path.exists is False (Python 3.14)."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return bool(path.stat())
    return False


def _check_is_python(script: Path) -> None:
    """Raises UsageError for a shell script or a compiled program. What Python can parse is never refused.

    Only what seems to be a shell script is parsed: a Python script with a syntax error fails with Python's own message.
    """
    if not script.is_file():
        return
    with script.open("rb") as file:
        first = file.readline(256)
        is_shell = script.suffix in _SHELL_SUFFIXES or (first.startswith(b"#!") and b"python" not in first)
        text = first + file.read() if is_shell else first
    if first.startswith(_ELF) or (is_shell and not is_python(text)):
        path = str(script) if os.sep in str(script) else f"./{script}"
        command = path if os.access(script, os.X_OK) else f"sh {path}" if is_shell else f"{path}, after chmod +x"
        raise UsageError(f"{path} is a command, not a Python script; start it with --no-python {command}")


def read_secret(path: str) -> str:
    """The first line of `path`, without spaces around it. `~` means the user's home. Raises UsageError.

    All further lines must be comments, which begin with `#`.
    """
    try:
        secret, _, rest = Path(path).expanduser().read_text("utf-8").strip().partition("\n")
    except (OSError, UnicodeDecodeError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"the secret in {path} cannot be read ({why}); give a file that you may read") from None
    if not secret:
        raise UsageError(f"{path} is empty and should hold a secret; write one into it, and let only yourself read it")
    others = [line for line in rest.splitlines() if line.strip() and not line.startswith("#")]
    if len(secret.split()) > 1 or others:
        raise UsageError(f"{path} should hold one secret and holds several; name another file")
    return secret.strip()
