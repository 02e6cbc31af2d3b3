"""Endpoints as they are typed."""

from __future__ import annotations

import pytest

from elaunch.launcher.options.values import Address, endpoints


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("host0", Address("", "host0", None)),
        ("host0:2379", Address("", "host0", 2379)),
        ("[::1]:2379", Address("", "::1", 2379)),
        ("[fe80::1%eth0]", Address("", "fe80::1%eth0", None)),
        ("fd91::1:80", Address("", "fd91::1:80", None)),
        ("fd91:0:0:0:0:0:1:2379", Address("", "fd91:0:0:0:0:0:1:2379", None)),
        ("::ffff:10.0.0.7", Address("", "::ffff:10.0.0.7", None)),
        ("https://etcd.example:2379", Address("https", "etcd.example", 2379)),
        ("http://[::1]:2379/", Address("http", "::1", 2379)),
    ],
)
def test_an_endpoint_is_a_host_with_an_optional_scheme_and_port(text: str, address: Address) -> None:
    assert endpoints(text) == (address,)
    assert endpoints(str(address)) == (address,)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a:70000", "has the port 70000, and the last port is 65535"),
        ("a:b", "is no endpoint; use HOST:PORT"),
        ("https://a/v2/keys", "is no endpoint"),
        ("unix:///tmp/s", "has the scheme unix, and elaunch knows only http and https"),
    ],
)
def test_what_is_no_endpoint_is_said_with_the_form_of_one(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=r"^(is|has)") as raised:
        endpoints(text)

    assert words in str(raised.value)
