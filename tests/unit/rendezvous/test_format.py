"""rendezvous.format: pieces of sentences, and sentences about what the host does not give."""

from __future__ import annotations

import errno
import resource

import pytest

from elaunch.rendezvous.format import listed, plain, shortage


@pytest.mark.parametrize(("count", "text"), [(0, ""), (1, "a"), (2, "a and b"), (3, "a, b and c")])
def test_items_are_joined_as_in_a_sentence(count: int, text: str) -> None:
    assert listed(list("abc"[:count])) == text


def test_what_a_terminal_obeys_is_spelled_out() -> None:
    assert plain("é – ok") == "é – ok"
    assert plain("a\x1b[2J\n\u202e\U000e0001") == "a\\x1b[2J\\x0a\\u202e\\U000e0001"
    assert plain("a\n\tb\r", keep="\n\t") == "a\n\tb\\x0d"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (BlockingIOError(errno.EAGAIN, "unavailable"), "may start no more processes or threads here"),
        (RuntimeError("can't start new thread"), "may start no more processes or threads here"),
        (OSError(errno.EMFILE, "many"), f"ulimit -n is {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}"),
        (OSError(errno.ENFILE, "many"), "this host may open no more files"),
        (MemoryError(), "no more memory for elaunch itself"),
        (OSError(errno.ENOMEM, "no"), "no more memory for elaunch itself"),
    ],
)
def test_what_the_host_does_not_give_is_a_sentence_with_the_limit(error: BaseException, text: str) -> None:
    assert text in (shortage(error) or "")


def test_other_errors_are_not_taken_for_a_shortage() -> None:
    # A full pipe, as Python reports it: the third argument is how much was written.
    assert shortage(BlockingIOError(errno.EAGAIN, "write could not complete without blocking", 3)) is None
    assert shortage(FileNotFoundError(errno.ENOENT, "no", "file")) is None
    assert shortage(RuntimeError("a bug")) is None
