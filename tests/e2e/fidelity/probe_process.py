"""The kernel's facts about the process that imports this, and its standard streams. A part of probe.py."""

from __future__ import annotations

import os
import sys

FACTS = {}


def fact(look):
    FACTS[look.__name__] = look
    return look


@fact
def command_line():
    return open("/proc/self/cmdline", "rb").read().decode()


@fact
def process_name():
    return open("/proc/self/comm").read()


@fact
def signal_handlers():
    import signal

    def described(handler):
        return handler.name if isinstance(handler, signal.Handlers) else getattr(handler, "__qualname__", repr(handler))

    return {str(int(s)): described(signal.getsignal(s)) for s in sorted(signal.valid_signals())}


@fact
def signal_sets():
    status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
    return {name: status[name].strip() for name in ("SigBlk", "SigIgn", "SigCgt", "SigPnd", "ShdPnd")}


@fact
def signal_extras():
    import signal

    timers = [signal.getitimer(timer) for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)]
    return [signal.set_wakeup_fd(-1), timers, signal.alarm(0)]


@fact
def limits():
    return open("/proc/self/limits").read().splitlines()


@fact
def kernel_settings():
    status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
    names = ("Umask", "Uid", "Gid", "Groups", "NoNewPrivs", "Seccomp", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
    files = ("oom_score_adj", "coredump_filter", "personality", "timerslack_ns")
    return {
        **{name: status[name].strip() for name in names},
        **{
            name: open(f"/proc/self/{name}").read().strip()
            for name in files
            if os.access(f"/proc/self/{name}", os.R_OK)
        },
        "scheduling": [os.nice(0), os.sched_getscheduler(0), os.sched_getparam(0).sched_priority],
        "dumpable": _prctl(3),
        "subreaper": _subreaper(),
    }


def _prctl(option):
    import ctypes

    return ctypes.CDLL(None).prctl(option)


def _subreaper():
    import ctypes

    found = ctypes.c_int(-1)
    ctypes.CDLL(None).prctl(37, ctypes.byref(found))
    return found.value


@fact
def affinity():
    return sorted(os.sched_getaffinity(0))


@fact
def leads_its_own_session():
    stat = open("/proc/self/stat").read().rpartition(")")[2].split()
    return [os.getpgrp() == os.getpid(), os.getsid(0) == os.getpid(), f"terminal {stat[4]}"]


@fact
def descriptors():
    import fcntl
    import stat

    return [
        [fcntl.fcntl(fd, fcntl.F_GETFL), os.get_inheritable(fd), stat.S_IFMT(os.fstat(fd).st_mode), os.get_blocking(fd)]
        for fd in range(3)
    ]


@fact
def standard_streams():
    def shown(stream):
        if stream is None:
            return None
        raw = getattr(stream.buffer, "raw", stream.buffer)
        return {
            **{name: getattr(stream, name) for name in ("name", "mode", "encoding", "errors", "newlines", "closed")},
            "buffering": [stream.line_buffering, stream.write_through],
            "file": [stream.fileno(), stream.isatty(), stream.readable(), stream.writable(), stream.seekable()],
            "layers": [type(layer).__qualname__ for layer in (stream, stream.buffer, raw)],
            "raw": [raw.name, raw.mode, raw.closefd],
            "text": repr(stream),
        }

    return {name: shown(getattr(sys, name)) for name in ("stdin", "stdout", "stderr", "__stdin__", "__stdout__")}


@fact
def streams_are_the_originals():
    return [getattr(sys, name) is getattr(sys, f"__{name}__") for name in ("stdin", "stdout", "stderr")]
