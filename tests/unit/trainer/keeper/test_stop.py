"""Signals that ask for a stop: who notes them, and who gets them afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from elaunch.trainer.keeper.boundary import StopRequest
from tests.harness import RUN_LIMIT_S


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_is_noted_its_echo_too_and_a_later_one_ends_the_process(signum: signal.Signals) -> None:
    ended: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    now_s = 100.0
    try:
        with contextlib.suppress(SystemExit), StopRequest(clock_s=lambda: now_s, end=ended.append) as request:
            os.kill(os.getpid(), signum)
            noted = request.signum
            now_s += 0.9
            os.kill(os.getpid(), signal.SIGTERM)
            echoed = list(ended)
            now_s += 0.2
            os.kill(os.getpid(), signum)
            raise SystemExit
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

    assert noted == signum
    assert request.signum == signum
    assert echoed == []
    assert ended == [signum]


RAISES = """
import signal
from elaunch.trainer.keeper.boundary import StopRequest
with StopRequest():
    signal.raise_signal(signal.SIGTERM)
    raise ValueError("asked for by the test")
"""


def test_a_signal_that_nobody_handles_does_not_hide_an_exception() -> None:
    ended = subprocess.run([sys.executable, "-c", RAISES], capture_output=True, text=True, timeout=RUN_LIMIT_S)

    assert ended.returncode == 1
    assert "ValueError: asked for by the test" in ended.stderr


@pytest.mark.parametrize("error", [None, ValueError])
def test_a_signal_that_was_noted_and_not_obeyed_is_the_programs_afterwards(error: type[Exception] | None) -> None:
    handled: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda signum, _: handled.append(signum))
    try:
        with contextlib.suppress(ValueError), StopRequest():
            signal.raise_signal(signal.SIGTERM)
            assert handled == []
            if error:
                raise error
    finally:
        signal.signal(signal.SIGTERM, before)

    assert handled == [signal.SIGTERM]


def test_a_request_that_is_left_before_a_later_one_does_not_take_its_signals_away() -> None:
    handled: list[int] = []

    def handle(signum: int, _: object) -> None:
        handled.append(signum)

    before = signal.signal(signal.SIGTERM, handle)
    try:
        first, second = StopRequest(), StopRequest()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        signal.raise_signal(signal.SIGTERM)
        noted = second.signum
        second.__exit__(SystemExit, SystemExit(), None)
        after = signal.getsignal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)

    assert (noted, handled) == (signal.SIGTERM, [])
    assert after is handle
