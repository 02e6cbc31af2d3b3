"""rendezvous.texts: pieces of sentences."""

from __future__ import annotations

import pytest

from elaunch.rendezvous.texts import listed, plain


@pytest.mark.parametrize(("count", "words"), [(0, ""), (1, "a"), (2, "a and b"), (3, "a, b and c")])
def test_items_are_joined_as_in_a_sentence(count: int, words: str) -> None:
    assert listed(list("abc"[:count])) == words


def test_what_a_terminal_obeys_is_spelled_out() -> None:
    assert plain("é – ok") == "é – ok"
    assert plain("a\x1b[2J\n\u202e\U000e0001") == "a\\x1b[2J\\x0a\\u202e\\U000e0001"
    assert plain("a\n\tb\r", keep="\n\t") == "a\n\tb\\x0d"
