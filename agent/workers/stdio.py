"""Makes a worker's standard streams, and routes its output to console and files."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from functools import partial
from string import Template

from elaunch.agent.config import AgentConfig, Streams
from elaunch.agent.diagnosis.exit_status import tells_of_lost_peer
from elaunch.agent.output.folding import ShownTracebacks, TracebackFold
from elaunch.agent.output.pump import Pump
from elaunch.agent.output.run_dir import RunDir
from elaunch.agent.output.streams import LogFile, WorkerStream, is_pipe
from elaunch.agent.workers.group import Worker, WorkerGroup
from elaunch.rendezvous.rules.assign_ranks import role_of

# torch.distributed puts the rank before each line.
_INTERRUPTED = re.compile(r"^(?:\[rank\d+\]: )?KeyboardInterrupt\s*\Z", re.MULTILINE)


class Stdio:
    """Makes the pipes from workers to the pump."""

    def __init__(self, config: AgentConfig, pump: Pump, run_dir: RunDir) -> None:
        self._plan = config.output
        self._role = config.role
        self._program_on_stdin = config.spec.program.is_on_stdin
        self._pump = pump
        self._run_dir = run_dir
        self._tracebacks = ShownTracebacks()

    def standard_fds(self, group: WorkerGroup, worker: Worker) -> tuple[int, int, int]:
        """The worker's fds 0, 1 and 2; the caller closes them once the worker has them."""
        return self._stdin(worker.local_rank), *self._out_and_err(group, worker)

    def terminal_size(self, group: WorkerGroup, worker: Worker) -> tuple[int, int] | None:
        """The columns and rows of the terminal that shows all output of a worker, less its prefix.

        None if some of it goes elsewhere, or if the worker has the terminal itself.
        """
        is_shown = self._on_console(worker) and self._pump.stdout is self._pump.stderr
        in_files_only = self._plan.redirects.of(worker.local_rank) & ~self._plan.tee.of(worker.local_rank)
        if not is_shown or not self._pump.stdout.is_terminal or self._pump.lines.is_json or in_files_only:
            return None
        if self._may_share_console(group, worker):
            return None
        columns, rows = shutil.get_terminal_size()
        prefix = len(self._prefix(group, worker).decode())
        return (columns - prefix, rows) if columns > prefix else None

    def _stdin(self, local_rank: int) -> int:
        """The worker's stdin. Every worker gets a terminal, so that a debugger works in any.

        Data goes only to local rank 0. If the program itself is on stdin, every worker reads it from its beginning.
        """
        if self._program_on_stdin:
            return os.open("/proc/self/fd/0", os.O_RDONLY | os.O_CLOEXEC)
        if local_rank == 0 or os.isatty(0):
            with suppress(OSError):
                return os.dup(0)
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _out_and_err(self, group: WorkerGroup, worker: Worker) -> tuple[int, int]:
        if self._may_share_console(group, worker):
            is_one = os.path.samestat(os.fstat(1), os.fstat(2))
            if os.isatty(2) or not is_one:
                # A pipe goes through the pump: if its reader goes (`| head`), the worker must not see an error.
                out = self._pipe(group, worker, Streams.OUT) if is_pipe(1) else os.dup(1)
                # The only worker of a job keeps its terminal: progress bars and debuggers work as without elaunch.
                return out, os.dup(2) if os.isatty(2) else self._pipe(group, worker, Streams.ERR)
            # One pipe for both streams keeps their order, as without elaunch.
            worker.is_mixed = True
            both = self._pipe(group, worker, Streams.ERR)
            return both, os.dup(both)
        return self._pipe(group, worker, Streams.OUT), self._pipe(group, worker, Streams.ERR)

    def _may_share_console(self, group: WorkerGroup, worker: Worker) -> bool:
        """Whether the worker is the only one of its job, and all that it writes goes to the console as it is."""
        planned = self._plan.redirects.of(worker.local_rank) | self._plan.tee.of(worker.local_rank)
        is_alone = group.table.world_size == 1 and not self._pump.lines.is_json
        return is_alone and not planned and self._on_console(worker)

    def _pipe(self, group: WorkerGroup, worker: Worker, which: Streams) -> int:
        """The writing end of a new pipe, whose reading end the pump has."""
        plan, out, local_rank = self._plan, which is Streams.OUT, worker.local_rank
        redirected, teed = bool(plan.redirects.of(local_rank) & which), bool(plan.tee.of(local_rank) & which)
        console = (self._pump.stdout if out else self._pump.stderr) if self._on_console(worker) else None
        file, needle_file = self._files(group, worker, which) if redirected or teed else (None, None)
        in_file_only = redirected and not teed
        if in_file_only and self._run_dir.logs is None:
            console = None
        frame = self._pump.lines.frame(group.generation, worker.rank, "stdout" if out else "stderr")
        needles = plan.duplicate_stdout_filters if out else plan.duplicate_stderr_filters
        # Of a worker that is alone, no peer tells the same.
        folds = not out and console and not plan.show_all_tracebacks and group.table.world_size > 1
        once = partial(self._tracebacks.once, generation=group.generation, rank=worker.rank)
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(ours, False)
        stream = WorkerStream(
            ours,
            group.generation,
            local_rank,
            console,
            b"" if frame else self._prefix(group, worker),
            keep_tail=not out,
            whole_lines=group.slots > 1,
            file=file,
            file_first=in_file_only,
            needles=tuple(needle.encode() for needle in needles) if needle_file and teed else (),
            needle_file=needle_file if teed else None,
            frame=frame,
            fold=TracebackFold(partial(_is_no_news, group), once) if folds else None,
        )
        self._pump.add(stream)
        return theirs

    def _files(self, group: WorkerGroup, worker: Worker, which: Streams) -> tuple[LogFile | None, LogFile | None]:
        """The stream's own file, and the generation's file for lines that match a filter."""
        folder = self._run_dir.rank(group.generation, worker.rank) if self._run_dir.logs else None
        if folder is None:
            return None, None
        out = which is Streams.OUT
        name = "stdout" if out else "stderr"
        path = str(folder / f"{name}.log")
        if not out:
            worker.log_path = path
        wanted = self._plan.duplicate_stdout_filters if out else self._plan.duplicate_stderr_filters
        needle_file = LogFile(str(folder.parent / f"filtered_{name}.log"), self._run_dir.warn) if wanted else None
        return LogFile(path, self._run_dir.warn), needle_file

    def _prefix(self, group: WorkerGroup, worker: Worker) -> bytes:
        if self._plan.prefix_template is None:
            return b"" if group.table.world_size == 1 else f"[{worker.rank}] ".encode()
        role = role_of(self._role, group.slots, worker.local_rank)
        names = {"role_name": role, "rank": str(worker.rank), "local_rank": str(worker.local_rank)}
        return Template(self._plan.prefix_template).safe_substitute(names).encode()

    def _on_console(self, worker: Worker) -> bool:
        local, ranks = self._plan.console_local_ranks, self._plan.console_ranks
        return (local is None or worker.local_rank in local) and (ranks is None or worker.rank in ranks)


def _is_no_news(group: WorkerGroup, text: str) -> bool | None:
    """Whether the tracebacks in `text` come of the end of others; None while the last is not complete."""
    return (group.is_interrupted and bool(_INTERRUPTED.search(text))) or tells_of_lost_peer(text)
