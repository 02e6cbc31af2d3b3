"""The command `elaunch`: parse, start the fork server, run the agent, report, exit.

The order is for speed: the fork server's import of torch is what the user waits for, so it starts as soon as the
options are known, and the agent's own modules are imported beside it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from elaunch.launcher.options import Options

_LAST_WORDS_S = 2.0


def main() -> NoReturn:
    """The entry point. Exit codes: 0, 1 the job failed, 2 usage, 128 + n ended by signal n."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            # Started with a closed standard stream: a pipe of ours must not get its number.
            os.open(os.devnull, os.O_RDWR)
    try:
        code = _main()
    except KeyboardInterrupt:
        # Before the agent takes signals over there is nothing to stop but this process and what dies with it.
        code = 130
    # BrokenPipeError at exit is the reader's business (`elaunch --help | head`).
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(code)


def _main() -> int:
    # Imported here, so that a Ctrl-C meanwhile is none that Python shows with a traceback.
    from elaunch.launcher.errors import UsageError
    from elaunch.launcher.options import HelpRequested, parse
    from elaunch.launcher.resources import as_started

    try:
        asked = parse(sys.argv[1:], os.environ)
        if isinstance(asked, HelpRequested):
            print(asked.text)
            return 0
        return run(asked, as_started(os.environ))
    except UsageError as error:
        print(f"elaunch: {error}", file=sys.stderr)
        return 2


def run(options: Options, environ: Mapping[str, str]) -> int:
    """Run the job that `options` ask for; its exit code. Raises UsageError where it cannot start as asked."""
    from dataclasses import replace

    from elaunch.launcher.errors import UsageError
    from elaunch.launcher.jobspec import agent_config
    from elaunch.launcher.program import check_log_dir, check_open_files, check_program, take_program_from_stdin
    from elaunch.launcher.resources import detect

    check_program(options, environ)
    check_log_dir(options)
    if options.run_id is None:
        options = replace(options, run_id=os.urandom(4).hex())
    config = agent_config(options, environ, detect(environ))
    check_open_files(config.slots)
    if config.spec.program.is_on_stdin:
        take_program_from_stdin()

    from elaunch.agent.forkserver import ForkServer
    from elaunch.agent.guard import Guard
    from elaunch.agent.rundir import RunDir, private_places

    # Before anything is made that somebody would have to remove.
    places = private_places()
    guard = Guard(places)
    troubles: list[str] = []
    say = troubles.append
    # Folders are made until the end; from the pump's start on its console has the word.
    try:
        run_dir = RunDir(config.output.log_dir, config.spec.run_id, lambda trouble: say(trouble), places)
    except OSError as error:
        guard.finish()
        raise UsageError(
            f"--log-dir {config.output.log_dir}: no folder can be made in it ({error.strerror}); choose another"
        ) from error
    server = ForkServer(config.spec.program, config.preload, guard.environment(config.environment))

    # From here on the fork server imports torch on another core.
    from elaunch.agent.loop import Loop
    from elaunch.agent.port import NoPort
    from elaunch.agent.pump import Pump
    from elaunch.launcher.report import report, write_error_file
    from elaunch.rendezvous.memory import MemoryStore
    from elaunch.rendezvous.types import OutcomeKind

    pump = Pump()
    pump.start()
    say = pump.say
    for line in (*config.notes, *troubles):
        say(line)
    try:
        outcome = Loop(config, MemoryStore(), server, guard, pump, run_dir).run()
    except NoPort as error:
        server.stop()
        pump.close()
        guard.finish()
        raise UsageError(str(error)) from error
    pump.write_report(report(outcome, config.spec, run_dir.logs, run_dir.is_incomplete))
    write_error_file(outcome, environ.get("TORCHELASTIC_ERROR_FILE"))
    # No word of the workers is lost to a slow reader; but whoever stops a job wants it to end.
    if not pump.close(timeout_s=_LAST_WORDS_S if outcome.kind is OutcomeKind.INTERRUPTED else None):
        os.set_blocking(2, False)
        with suppress(OSError):
            os.write(2, b"elaunch: stopped; not all output was taken by the console or its reader\n")
    guard.finish()
    return outcome.exit_code
