# headline: was killed by SIGSEGV \(crashed in .*/train\.py:\d+ in forward\)
# next: native code that is called there crashed
# not: Traceback

import ctypes


def forward():
    ctypes.string_at(0)


def main():
    forward()


main()
