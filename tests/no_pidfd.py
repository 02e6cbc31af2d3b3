"""Executes a command whose kernel refuses pidfds with an error number, as a container's seccomp profile does.

python no_pidfd.py ERRNO COMMAND…
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

_PIDFD_OPEN, _PIDFD_SEND_SIGNAL = 434, 424
_PR_SET_SECCOMP, _FILTER, _PR_SET_NO_NEW_PRIVS = 22, 2, 38
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


if __name__ == "__main__":
    text = b"".join(
        (
            # The number of the system call.
            _instruction(0x20, 0),
            _instruction(0x15, _PIDFD_OPEN, 2),
            _instruction(0x15, _PIDFD_SEND_SIGNAL, 1),
            _instruction(0x06, _ALLOW),
            _instruction(0x06, _ERROR | int(sys.argv[1])),
        )
    )
    program, libc = _Program(len(text) // 8, text), ctypes.CDLL(None)
    assert libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(_PR_SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0) == 0
    os.execv(sys.argv[2], sys.argv[2:])
