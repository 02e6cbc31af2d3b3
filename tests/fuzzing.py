"""Shared by the fuzz tests: the number of examples, bounds on time and memory, and strategies for input from others.

By default the tests take seconds, and use the same examples each time. `ELAUNCH_FUZZ_EXAMPLES=5000` draws new examples,
and says at the end which one failed (`tests/unit/test_fuzz_long.py` runs all files so).
"""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("ELAUNCH_FUZZ_EXAMPLES", "0"))
_CPU_S, _MEMORY_BYTES = 2.0, 512 << 20

settings.register_profile(
    "elaunch",
    max_examples=EXAMPLES or 10,
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("elaunch")


@contextmanager
def bounded(cpu_s: float = _CPU_S, memory_bytes: int = _MEMORY_BYTES) -> Iterator[None]:
    """Fails if the body takes more processor time than that, or more memory beyond what is in use."""
    own = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)

    def out_of_time(*_: object) -> None:
        raise AssertionError(f"it took more than {cpu_s} s of the processor")

    before = signal.signal(signal.SIGVTALRM, out_of_time)
    resource.setrlimit(resource.RLIMIT_AS, (own + memory_bytes, hard))
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu_s)
    try:
        yield
    except MemoryError:
        raise AssertionError(f"it took more than {memory_bytes} bytes of memory") from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGVTALRM, before)


NESTED = "[" * 60_000
# Any character, lone surrogates too.
TEXTS = st.text(st.characters(), max_size=40)
# Any text that argv and the environment can hold: no NUL, and bytes that are not UTF-8 as Python's surrogates.
WORDS = st.binary(max_size=30).map(lambda raw: os.fsdecode(raw.replace(b"\0", b"")))
NUMBERS = st.sampled_from(
    ["-1", "0", "1", "007", "2.5", "1e5", "-0", "9" * 12, "9" * 30, "9" * 5000, "٣", "²", " 4 ", "0x10", "1_000", "nan"]
)
PLAIN: st.SearchStrategy[Any] = (
    st.none()
    | st.booleans()
    | st.integers(-3, 70_000)
    | st.sampled_from([2**31, 2**63, -(2**63), 2**64, 10**400, 1e308, -0.5, float("nan"), float("inf"), "x" * 100_000])
    | st.floats()
    | TEXTS
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4), max_leaves=8
)


@st.composite
def json_texts(draw: st.DrawFn, valid: str) -> str:
    """A JSON text with one thing wrong, or none: another value somewhere, a name twice, a torn or scribbled text."""
    record = json.loads(valid)
    match draw(st.integers(0, 6)):
        case 0:
            return valid
        case 1:
            return draw(TEXTS)
        case 2:
            at = draw(st.integers(0, len(valid)))
            return valid[:at] + draw(st.sampled_from(["", '"', "{", "}", "[", ",", "1e999", "NaN", NESTED]))
        case 3:
            name = draw(st.sampled_from(sorted(record)))
            return valid[:-1] + f",{json.dumps(name)}:{json.dumps(draw(PLAIN))}}}"
        case 4:
            name = draw(st.sampled_from(sorted(record)))
            return valid[:-1] + f',"more":{NESTED}{"]" * 60_000}}}'
        case _:
            changed = draw(st.dictionaries(st.sampled_from(sorted(record)), VALUES, min_size=1, max_size=3))
            return json.dumps({**record, **changed})
