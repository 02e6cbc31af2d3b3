"""Learns from workers what their program imports, and prepares a fork server that has imported it.

Once the workers have run for some seconds, one of them lists its modules. A process of the lowest priority tries which
of these can be preloaded, and what that saves. If it is worth it, it is kept for the next start, and a second fork
server imports them beside the job, and takes the place of the first one before the next generation. All of it happens
once. If it fails, all is as before. What of the default preload no worker has used is noted at their end.
"""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from elaunch.agent.config import ProgramText
from elaunch.agent.core.entries import NO_GENERATION
from elaunch.agent.default_preload import DEFAULT_PRELOAD
from elaunch.agent.forkserver.client import ForkServer
from elaunch.agent.forkserver.imported import candidates
from elaunch.agent.forkserver.learned import Learned, Named
from elaunch.agent.forkserver.learned_file import write, write_unused
from elaunch.agent.forkserver.selection import ProbeAnswer, Selection, Wanted, together
from elaunch.agent.linux import memory_file
from elaunch.agent.workers.group import CurrentGroup, WorkerGroup
from elaunch.agent.workers.reporter import Reporter
from elaunch.records import replace
from elaunch.rendezvous.codec import decode, encode

# A program imports more in its first steps, which come after its process group.
_SETTLED_S = 5.0
# What saves less is not worth a second fork server, and its memory.
_WORTH_S = 0.05
_REASONS_MAX = 20
_COSTS_SHOWN = 4
_COST_SHOWN_S = 0.05
_READ_BYTES = 1 << 16


class PreloadLearner:
    """`text` is what the program's text shows. `file` keeps what is learned for the next start; without it nothing is
    learned. `later` calls a function in another thread, and waits a moment for it.

    The agent's loop calls all methods.
    """

    def __init__(
        self,
        server: ForkServer,
        text: ProgramText,
        current: CurrentGroup,
        reporter: Reporter,
        selector: selectors.BaseSelector,
        file: Path | None,
        later: Callable[[Callable[[], object]], None],
    ) -> None:
        self._server = server
        self._text = text
        self._current = current
        self._reporter = reporter
        self._selector = selector
        self._file = file
        self._later = later
        # What is remembered. The fork server of this job keeps what it has begun with.
        self._learned = server.learned
        self._is_done = file is None
        if self._learned.program.entries and not self._learned.is_tried:
            # An import that ends the fork server, or that never ends, is not to meet the start after this one too.
            self._remember(replace(self._learned, program=Selection(), variables=()))
        # The newest generation that has ended.
        self._ended = NO_GENERATION
        self._since_s: float | None = None
        self._probe: _Probe | None = None
        self._successor: ForkServer | None = None
        self._is_successor_ready = False

    @property
    def has_successor(self) -> bool:
        """Whether a fork server is ready that has imported more."""
        return self._is_successor_ready

    def take_successor(self) -> None:
        """Put it in the place of the first one, none of whose workers lives."""
        assert self._successor is not None
        self._selector.unregister(self._successor)
        self._successor, self._is_successor_ready = None, False
        self._server.succeed()

    def ready(self, news: dict[str, Any]) -> None:
        """Hear what the fork server has imported: what was remembered, and what was tried for names of --preload."""
        if "tried" not in news:
            return
        named = decode(Learned, news["tried"]).named
        if news["has_programs"]:
            listed = _in_words(self._server.learned.program)
            self._reporter.detail(f"imported before the workers start, as this program imported it last time: {listed}")
            self._remember_program_of_server(named)
        elif self._server.learned.program.entries:
            # It does not suit any more, and the log says why. The next start learns it anew.
            self._is_done = True
            self._remember(Learned(named, packages=self._learned.packages))
        else:
            self._remember(replace(self._learned, named=named))

    def tick(self, now_s: float) -> None:
        """Ask a worker what it has imported, once it has run for some seconds. Call it about once a second."""
        group = self._current.latest
        if self._is_done or self._probe or group is None or self._server.preload is None:
            return
        # A rank may have no process group, such as a parameter server beside trainers in DDP.
        recorder = next((link.recorder for link in group.links.values() if link.recorder), None)
        if recorder is None:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s
        elif now_s - self._since_s >= _SETTLED_S and (text := recorder.imports()) is not None:
            self._begin_probe(group, text)

    def end(self, group: WorkerGroup) -> None:
        """At a generation's end: note what of the default preload no worker has used, if all have returned."""
        self._since_s, self._ended = None, group.generation
        links, text = group.links.values(), self._text
        said = [link.unused for link in links if link.has_returned and link.unused is not None]
        if not (self._file and text.state and said and len(said) == len(links)):
            return
        known, unused = self._learned, tuple(n for n in DEFAULT_PRELOAD if all(n in each for each in said))
        # Most runs show what the text has shown.
        if (known.unused if known.unused_in == text.state else text.unused) != unused:
            self._learned = replace(known, unused=unused, unused_in=text.state)
            self._later(partial(write_unused, self._file, unused, text.state))

    def _begin_probe(self, group: WorkerGroup, text: bytes) -> None:
        known = self._learned
        refused = {*known.program.left_out, *(name for each in known.named for name in each.selection.left_out)}
        names, variables = candidates(text, refused)
        wanted = Wanted(names, tuple(sorted(refused)), variables)
        self._is_done = True
        with suppress(OSError):
            self._probe = _Probe(self._server, group.generation, wanted)
            self._selector.register(self._probe, selectors.EVENT_READ, self._read_probe)

    def _read_probe(self) -> None:
        probe = self._probe
        if probe is None or not probe.read():
            return
        self._selector.unregister(probe)
        self._probe = None
        probe.close()
        try:
            answer = decode(ProbeAnswer, probe.said.decode())
        except ValueError:
            # With its generation the process ends too, and the workers of the next one can be asked again. If it ended
            # before, an import has ended it, and would end the next one too.
            self._is_done = self._ended < probe.generation
            if self._is_done:
                why = "an import ended the process that tried it"
                self._stamp(probe, ProbeAnswer(failed=why), is_worth=False)
                self._refuse(why)
            return
        selection = answer.selection
        is_worth = selection.saved_s >= _WORTH_S
        self._stamp(probe, answer, is_worth=is_worth)
        if is_worth:
            variables = tuple(sorted({*self._learned.variables, *probe.wanted.variables}))
            program = together(self._learned.program, selection)
            learned = replace(self._learned, program=program, variables=variables, is_tried=False)
            # The job may end before a second fork server has imported it: that takes four times as long as the imports.
            self._remember(learned)
            self._prepare(learned)

    def _stamp(self, probe: _Probe, answer: ProbeAnswer, *, is_worth: bool) -> None:
        selection = answer.selection
        self._reporter.timeline.stamp(
            probe.generation,
            "imports_tried",
            modules=len(probe.wanted.names),
            saved_s=round(selection.saved_s, 3),
            is_worth=is_worth,
            left_out=len(selection.left_out),
            left_out_s=round(selection.left_out_s, 3),
            reasons=selection.reasons[:_REASONS_MAX],
            failed=answer.failed,
        )

    def _prepare(self, learned: Learned) -> None:
        with suppress(OSError):
            self._successor = self._server.prepare_successor(learned)
            self._selector.register(self._successor, selectors.EVENT_READ, self._read_successor)

    def _read_successor(self) -> None:
        successor = self._successor
        if successor is None:
            return
        try:
            news = successor.receive()
        except BlockingIOError:
            return
        if news and news["event"] not in ("ready", "refused"):
            # It has forked the next workers ahead.
            return
        if news and news.get("has_programs"):
            self._is_successor_ready = True
            self._remember(replace(self._learned, is_tried=True))
            program = successor.learned.program
            self._reporter.detail(
                f"the program spent {program.saved_s:.1f} s on imports that can be made ahead ({_in_words(program)});"
                " workers have them from the beginning after a restart, and at the next start"
            )
        else:
            # The first one stays.
            self._selector.unregister(successor)
            self._successor, self._is_successor_ready = None, False
            why = news["why"] if news and "why" in news else f"the process that imported it ahead {successor.lost()}"
            self._server.drop_successor()
            self._remember_program_of_server()
            self._refuse(why)

    def _refuse(self, why: str) -> None:
        self._reporter.detail(
            f"workers import what the program needs again at each restart, since it is not preloaded: {why}"
        )

    def _remember_program_of_server(self, named: tuple[Named, ...] | None = None) -> None:
        """Remember the imports that the fork server of this job has made ahead, and no others."""
        known = self._server.learned
        named = self._learned.named if named is None else named
        program, variables = known.program, known.variables
        self._remember(replace(self._learned, named=named, program=program, variables=variables, is_tried=True))

    def _remember(self, learned: Learned) -> None:
        if self._file and learned != self._learned:
            self._learned = learned
            # A home may be on a disk that hangs.
            self._later(partial(write, self._file, learned))


class _Probe:
    """A process that tries what is `wanted`, and the pipe on which it answers. Raises OSError."""

    def __init__(self, server: ForkServer, generation: int, wanted: Wanted) -> None:
        self.generation = generation
        self.wanted = wanted
        self.said = b""
        text_fd = memory_file("elaunch-wanted", encode(wanted))
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        self._fd, answer_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            os.set_blocking(answer_fd, True)
            server.probe(generation, (null, null, null, text_fd, answer_fd))
        except OSError:
            os.close(self._fd)
            raise
        finally:
            for fd in (text_fd, null, answer_fd):
                os.close(fd)

    def fileno(self) -> int:
        return self._fd

    def read(self) -> bool:
        """Read what has come. Returns whether that was all."""
        with suppress(BlockingIOError):
            while data := os.read(self._fd, _READ_BYTES):
                self.said += data
            return True
        return False

    def close(self) -> None:
        os.close(self._fd)


def _in_words(program: Selection) -> str:
    """The slowest packages, as "transformers 1.2 s, accelerate 0.3 s"."""
    shown = [each for each in program.costs if each.seconds >= _COST_SHOWN_S][:_COSTS_SHOWN]
    words = [f"{each.package} {each.seconds:.1f} s" for each in shown]
    return ", ".join([*words, *(["others"] if len(shown) < len(program.costs) else [])])
