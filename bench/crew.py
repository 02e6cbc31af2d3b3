"""Helper processes: each reads one order per line from stdin, and answers with JSON on stdout."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import psutil

from bench.job import Trouble

_START_LIMIT_S = 60.0
Words = dict[str, Any]


class Crew:
    """One process for each list of arguments of `python -m module`; a context manager that ends them.

    Each process sends one message when it is ready: `greetings`. One answer with "trouble" is a failure of the crew.
    """

    def __init__(self, module: str, arguments: Sequence[Sequence[str]]) -> None:
        self._said: list[queue.SimpleQueue[Words]] = [queue.SimpleQueue() for _ in arguments]
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", module, *each], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for each in arguments
        ]
        self._readers = [
            threading.Thread(target=self._read, args=(process, said), daemon=True)
            for process, said in zip(self.processes, self._said, strict=True)
        ]
        self.greetings: list[Words] = []
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> Crew:
        try:
            self.greetings = self.hear(_START_LIMIT_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for reader, process in zip(self._readers, self.processes, strict=True):
            reader.join()
            assert process.stdin
            assert process.stdout
            process.stdin.close()
            process.stdout.close()

    def order(self, word: str, *, first_only: bool = False) -> float:
        """Send an order to all processes, or the first only. Returns the monotonic time just before."""
        now_s = time.monotonic()
        for process in self.processes[: 1 if first_only else None]:
            assert process.stdin
            process.stdin.write(f"{word}\n")
            process.stdin.flush()
        return now_s

    def hear(self, limit_s: float) -> list[Words]:
        """One answer of each process. Raises Trouble if one is later than `limit_s`, or answers with trouble."""
        end_s = time.monotonic() + limit_s
        answers = []
        for said in self._said:
            try:
                answer = said.get(timeout=max(0.0, end_s - time.monotonic()))
            except queue.Empty:
                raise Trouble(f"not all processes answered within {limit_s:g} s") from None
            if "trouble" in answer:
                raise Trouble(str(answer["trouble"]))
            answers.append(answer)
        return answers

    def cpu_s(self) -> float:
        """The processor time of all processes, since their start."""
        return sum(cpu_s(process.pid) for process in self.processes)

    @staticmethod
    def _read(process: subprocess.Popen[str], said: queue.SimpleQueue[Words]) -> None:
        assert process.stdout
        for line in process.stdout:
            said.put(json.loads(line))
        said.put({"trouble": "one of the processes ended"})


def cpu_s(pid: int) -> float:
    """The processor time of one process and all of its threads, since its start."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)
