"""agent.output.streams: whole lines out of a byte stream, and prefixes before them."""

from __future__ import annotations

import random
import re

import pytest

from elaunch.agent.output.streams import LINE_BYTES_MAX, LineSplitter, prefixed

PREFIX = b"[7] "
LINE_END = re.compile(rb"\r\n|\n|\r")


def random_bytes(rng: random.Random) -> bytes:
    return b"".join(
        rng.choice([b"a", b"bc", b"\n", b"\r", b"\r\n", b"", "é".encode()]) for _ in range(rng.randrange(40))
    )


def random_pieces(rng: random.Random, data: bytes) -> list[bytes]:
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(8)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def test_what_comes_out_is_joined_what_went_in() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        data = random_bytes(rng)
        splitter = LineSplitter()

        out = [splitter.whole(piece) for piece in random_pieces(rng, data)]
        rest = splitter.rest()

        assert b"".join(out) + rest == data, f"seed {seed}"
        assert all(not run or run.endswith((b"\n", b"\r")) for run in out), f"seed {seed}: {out}"
        assert not LINE_END.search(rest[:-1]), f"seed {seed}: a whole line was left waiting: {rest!r}"
        assert not splitter.pending


def test_a_carriage_return_and_newline_are_never_torn_apart() -> None:
    splitter = LineSplitter()

    assert splitter.whole(b"one\r") == b""
    assert splitter.pending
    assert splitter.whole(b"\ntwo") == b"one\r\n"


def test_a_line_that_never_ends_is_passed_on_in_pieces() -> None:
    splitter = LineSplitter()

    out = splitter.whole(b"x" * LINE_BYTES_MAX) + splitter.whole(b"y")

    assert out == b"x" * LINE_BYTES_MAX + b"y"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (b"one\n", b"[7] one\n"),
        (b"one\ntwo\n", b"[7] one\n[7] two\n"),
        (b"one\ntw", b"[7] one\n[7] tw"),
        (b"\n\n", b"[7] \n[7] \n"),
        (b"10%\r20%\r", b"[7] 10%\r[7] 20%\r"),
        (b"one\r\ntwo\r\n", b"[7] one\r\n[7] two\r\n"),
        (b"10%\rdone\r\n", b"[7] 10%\r[7] done\r\n"),
        (b"a\rb", b"[7] a\r[7] b"),
    ],
)
def test_each_line_gets_its_prefix(lines: bytes, expected: bytes) -> None:
    assert prefixed(lines, PREFIX, continued=False) == expected


def test_there_is_one_prefix_at_each_lines_start_and_nowhere_else() -> None:
    for seed in range(300):
        data = random_bytes(random.Random(seed)) or b"\n"

        out = prefixed(data, PREFIX, continued=False)

        assert out.replace(PREFIX, b"") == data, f"seed {seed}"
        lines = [line for line in re.split(rb"(?<=\n)|(?<=\r)(?!\n)", out) if line]
        assert all(line.startswith(PREFIX) and line.count(PREFIX) == 1 for line in lines), f"seed {seed}: {out!r}"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (b"\r\x1b[2K10%", b"[7] \r\x1b[2K[7] 10%"),
        (b"a\n\x1b[1A\x1b[2Kb\n", b"[7] a\n\x1b[1A\x1b[2K[7] b\n"),
        (b"\x1b[?25l", b"\x1b[?25l"),
        (b"\x1b[?25l10%", b"\x1b[?25l[7] 10%"),
        (b"end\n\x1b[?25h", b"[7] end\n\x1b[?25h"),
        (b"\x1b[31mred\x1b[0m\n", b"[7] \x1b[31mred\x1b[0m\n"),
    ],
)
def test_the_prefix_comes_after_what_erases_the_bars_last_state(lines: bytes, expected: bytes) -> None:
    assert prefixed(lines, PREFIX, continued=False) == expected
