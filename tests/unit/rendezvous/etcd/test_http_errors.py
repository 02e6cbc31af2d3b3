"""Errors of a connection: which are the other host's silence, and which this host's own."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from elaunch.rendezvous.dial import Deadline
from elaunch.rendezvous.endpoint import Endpoint
from elaunch.rendezvous.etcd.http_client import ClientConnection, connection_error
from elaunch.rendezvous.store import OwnLimit, Unavailable
from tests.harness import DEADLINE_S

HEAD = Endpoint("127.0.0.1", 2379)
SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EACCES)
OWN = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL, errno.EPERM)


@contextmanager
def no_more_files() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def connected() -> ClientConnection:
    return ClientConnection(HEAD, Deadline(DEADLINE_S))


@pytest.mark.parametrize("number", [*SILENT, *OWN, errno.ECONNREFUSED, errno.ECONNRESET])
def test_only_silence_is_silence(number: int) -> None:
    error = connection_error(OSError(number, os.strerror(number)), HEAD, "1 s", "")

    assert isinstance(error, Unavailable)
    assert error.is_silent == (number in SILENT)
    assert isinstance(error, OwnLimit) == (number in OWN)


def test_a_process_that_may_open_no_more_files_has_a_sentence_of_its_own() -> None:
    with no_more_files(), pytest.raises(OwnLimit, match=r"^elaunch may open no more files \(ulimit -n is 3\)"):
        connected()
