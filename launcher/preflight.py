"""Checks on this host, before the job starts: the program can start, and there is a place for its output."""

from __future__ import annotations

import ast
import os
import pkgutil
import resource
import shutil
import sys
import warnings
from collections.abc import Mapping
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from elaunch.launcher.errors import UsageError, nearest, tidy
from elaunch.launcher.options.commands import COMMANDS
from elaunch.launcher.options.options import Options
from elaunch.launcher.options.shell_words import quoted
from elaunch.rendezvous.job_spec import ProgramKind

_SHELL_SUFFIXES = {".sh", ".bash", ".zsh"}
_JOB_FILE_SUFFIXES = {".yaml", ".yml"}
_ELF = b"\x7fELF"


# The path of a Unix socket has at most 107 bytes. multiprocessing appends /pymp-xxxxxxxx/listener-xxxxxxxx to TMPDIR.
_TEMPORARY_MAX = 107 - 32


def check_program(options: Options, environ: Mapping[str, str]) -> None:
    """Raises UsageError if the program cannot start on this host."""
    check_folder()
    try:
        _check_program(options)
        if options.kind is not ProgramKind.COMMAND:
            _check_interpreter(environ.get("PYTHON_EXEC"))
        if options.kind is ProgramKind.SCRIPT and not environ.get("PYTHON_EXEC"):
            _check_is_python(Path(options.target))
        option = "--preload" if options.preload else "--preload-only"
        named = options.preload or options.preload_only or ()
        flags = sys.flags
        has_shorter_path = flags.isolated or flags.no_site or flags.no_user_site or flags.ignore_environment
        # Nothing is preloaded for a command or for another interpreter.
        if options.kind is ProgramKind.COMMAND or environ.get("PYTHON_EXEC") or has_shorter_path:
            return
        _check_preload(option, named)
        if options.kind is ProgramKind.MODULE and not named:
            _check_module(options.target)
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}; change its permissions, or give another path") from error


def check_folder() -> None:
    """Raises UsageError if the current folder is gone: torch cannot be imported there."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UsageError("the current folder was removed; go to another one (cd) and start again") from None


def temporary_folder_warning(environ: Mapping[str, str]) -> str:
    """About a TMPDIR whose path is too long for the sockets that multiprocessing makes there; "" for another one."""
    folder = environ.get("TMPDIR", "")
    if (length := len(os.fsencode(folder))) <= _TEMPORARY_MAX:
        return ""
    return (
        f"TMPDIR has {length} characters, and a DataLoader with worker processes fails or hangs with more than "
        f"{_TEMPORARY_MAX} (AF_UNIX path too long); set it to a shorter folder, as TMPDIR=/tmp"
    )


def check_metrics(options: Options) -> None:
    """Raises UsageError if metrics are asked for, and the library for them is not installed."""
    if options.metrics_port is None:
        return
    if find_spec("prometheus_client") is None:
        raise UsageError(
            "--metrics-port needs the package prometheus-client; install it with pip install 'elaunch[metrics]', or"
            " leave the option out"
        )


def check_hook(options: Options) -> None:
    """Raises UsageError if the command of --on-event cannot be run: a failure at night is too late to learn it."""
    if options.on_event and not _is_command(options.on_event[0]):
        raise UsageError(f"--on-event {_no_command(options.on_event[0])}")


def _no_command(name: str) -> str:
    """Why `name` cannot be run as a command, and the way out."""
    path, is_path = tidy(name), os.sep in name
    if not Path(name).is_file():
        near = _nearest_file(Path(name), Path(name).suffix, ".sh")
        place = "" if Path(name).is_absolute() else f" in {Path.cwd()}" if is_path else " on PATH"
        way_out = f"did you mean {near if os.sep in near else f'./{near}'}?" if near else "give its path"
        return f"{path} is not an executable file{place}; {way_out}"
    if Path(name).stat().st_mode & 0o111 == 0:
        return f"{path} is not an executable file; chmod +x {quoted(path)}{'' if is_path else f', and write ./{path}'}"
    if os.access(name, os.X_OK):
        return f"{path} is not an executable file on PATH; write ./{path}"
    return f"{path} cannot be executed by user {os.geteuid()}; change its permissions, or those of its disk (noexec)"


def _check_program(options: Options) -> None:
    if not options.target:
        raise UsageError(
            f"the name of the {options.kind.value} is empty (perhaps a shell variable is not set); give its name"
        )
    match options.kind:
        case ProgramKind.SCRIPT:
            check_script(options.target)
        case ProgramKind.MODULE:
            if Path(options.target).is_file():
                raise UsageError(f"-m takes the name of a module, and {options.target} is a file; leave -m out")
        case ProgramKind.COMMAND:
            _check_no_job_file(tidy(options.target))
            if not _is_command(options.target):
                is_python = ", or leave --no-python out for a Python script" if options.target.endswith(".py") else ""
                raise UsageError(f"the command {_no_command(options.target)}{is_python}")


def _check_module(name: str) -> None:
    """Raises UsageError if this interpreter finds no module with the first part of the name. Nothing is imported.

    The further parts are not checked: only the package itself knows its modules.
    """
    first = name.partition(".")[0]
    here = [] if os.environ.get("PYTHONSAFEPATH") else [str(Path.cwd())]
    if not first or _is_found(first, [*here, *sys.path]):
        return
    near = nearest(first, (entry.stem for entry in Path.cwd().iterdir() if entry.suffix == ".py" or entry.is_dir()))
    hint = f"did you mean -m {near}{name[len(first) :]}?" if near else "start elaunch in its folder, or set PYTHONPATH"
    raise UsageError(f"-m {name}: there is no module {first} in {Path.cwd()} nor in {sys.executable}'s path; {hint}")


def _check_preload(option: str, names: tuple[str, ...]) -> None:
    """Raises UsageError if the fork server would not find the top package of one of `names`. Nothing is imported.

    The fork server has this process's path: elaunch's `__main__` takes the current folder from it.
    """
    for name in names:
        first, dot, rest = name.partition(".")
        if _is_found(first, sys.path):
            continue
        installed = (module.name for module in pkgutil.iter_modules() if module.name not in sys.stdlib_module_names)
        near = nearest(first, installed) or nearest(first, sys.stdlib_module_names)
        hint = f"did you mean {near}{dot}{rest}?" if near else "install it, or set PYTHONPATH"
        raise UsageError(f"{option} {name}: there is no module {first} in {sys.executable}'s path; {hint}")


def _is_found(first: str, path: list[str]) -> bool:
    """Whether this interpreter finds a module of that name without a dot on `path`, or among the built-in ones."""
    # The finders beside the path's know built-in modules, and packages that are installed in editable form.
    others = (each for each in sys.meta_path if each is not PathFinder and hasattr(each, "find_spec"))
    return bool(PathFinder.find_spec(first, path)) or any(each.find_spec(first, None) for each in others)


def _check_interpreter(interpreter: str | None) -> None:
    if interpreter and not _is_command(interpreter):
        raise UsageError(f"PYTHON_EXEC={_no_command(interpreter)}, or unset the variable")


def _is_command(name: str) -> bool:
    return shutil.which(name) is not None


def take_program_from_stdin() -> None:
    """Read all of stdin, and replace it by a file with the same text, which every worker can read."""
    fd = os.memfd_create("stdin")
    with open(fd, "wb", closefd=False) as text, open(0, "rb", closefd=False) as stdin:
        shutil.copyfileobj(stdin, text)
    os.dup2(fd, 0)
    os.close(fd)


def check_log_dir(options: Options) -> None:
    """Raises UsageError if --log-dir cannot hold files."""
    if options.log_dir is None:
        return
    try:
        _check_log_dir(Path(tidy(str(options.log_dir))))
    except OSError as error:
        raise UsageError(f"--log-dir {options.log_dir}: {error.strerror}; choose another") from error


def _check_log_dir(log_dir: Path) -> None:
    for place in (log_dir, *log_dir.parents):
        if place.is_dir():
            return
        # Another node may have made it since. Then it is a directory now.
        if place.exists() and not place.is_dir():
            is_itself = place == log_dir
            raise UsageError(
                f"--log-dir {log_dir} "
                + ("is a file" if is_itself else f"lies below {place}, which is a file")
                + "; name a directory (a missing one is made)"
            )


def check_open_files(workers: int) -> None:
    """Raises UsageError if the limit of open files is too low for that many workers: pipes, a link, log files each."""
    needed = 6 * workers + 64
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        count = "1 worker needs" if workers == 1 else f"{workers} workers need"
        raise UsageError(
            f"{count} {needed} open files, and the limit (ulimit -n) is {allowed}; raise it: ulimit -n {needed}"
        )


def _check_no_job_file(target: str) -> None:
    if Path(target).suffix.lower() in _JOB_FILE_SUFFIXES:
        raise UsageError(f"{target} is no program; start a job file with --config {quoted(target)}")


def check_script(target: str) -> None:
    """Raises UsageError if `target` is no script that every worker can read; OSError if its folder cannot be read."""
    if target == "-":
        if os.isatty(0):
            raise UsageError("- reads the script from stdin, which is the terminal; give its path, or pipe it in")
        return
    script, typed, target = Path(target), target, tidy(target)
    _check_no_job_file(target)
    if script.is_dir():
        if not (script / "__main__.py").is_file():
            raise UsageError(f"{target} is a directory without __main__.py; name the script in it")
        return
    if script.is_symlink() and not script.exists():
        raise UsageError(f"{target} is a link to {script.readlink()}, which does not exist; correct the link")
    if not script.exists():
        place = "" if script.is_absolute() else f" in {Path.cwd()}"
        raise UsageError(f"{target} does not exist{place}{_hint(typed)}")
    if not script.is_file():
        raise UsageError(
            f"{target} is not a regular file, so a restart could not read it again; save the script, or use - for stdin"
        )
    if not os.access(script, os.R_OK):
        raise UsageError(f"{target} cannot be read by user {os.geteuid()}; change its permissions")


def _check_is_python(script: Path) -> None:
    """Raises UsageError for a shell script or a compiled program. What Python can read is never refused.

    Only files that look like a command are read: a script with a syntax error fails with Python's own words.
    """
    if not script.is_file():
        return
    with script.open("rb") as file:
        first = file.readline(256)
        is_shell = script.suffix in _SHELL_SUFFIXES or (first.startswith(b"#!") and b"python" not in first)
        text = first + file.read() if is_shell else first
    if not first.startswith(_ELF) and not (is_shell and not is_python(text)):
        return
    path = tidy(str(script))
    start = path if os.sep in path else f"./{path}"
    command = start if os.access(script, os.X_OK) else f"sh {path}" if is_shell else f"{start}, after chmod +x"
    raise UsageError(f"{path} is a command and no Python script; start it with --no-python {command}")


def is_python(text: bytes) -> bool:
    """Whether Python reads that text, or it is an application of `zipapp`."""
    with warnings.catch_warnings():
        # Python says these when it runs the program.
        warnings.simplefilter("ignore")
        try:
            ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            # An application of `zipapp` begins with any interpreter's name.
            return b"PK\x03\x04" in text
    return True


def _nearest_file(wanted: Path, *suffixes: str) -> str:
    """The path of the file beside `wanted` with the most similar name and one of these suffixes; else empty.

    A common suffix is no likeness: only what is before it is compared.
    """
    if not wanted.parent.is_dir():
        return ""
    by_stem = {each.stem: each for each in wanted.parent.iterdir() if each.suffix in suffixes and each.is_file()}
    near = nearest(wanted.stem, by_stem)
    return tidy(str(by_stem[near])) if near else ""


def _hint(typed: str) -> str:
    script = Path(typed)
    if not script.parent.is_dir():
        return f" (there is no directory {tidy(str(script.parent))})"
    near = _nearest_file(script, script.suffix, ".py")
    command = nearest(typed, COMMANDS) if os.sep not in typed and not script.suffix else ""
    meant = " or ".join(each for each in (f"elaunch {command}" if command else "", near) if each)
    return f"; did you mean {meant}?" if meant else "; give the path of the script"
