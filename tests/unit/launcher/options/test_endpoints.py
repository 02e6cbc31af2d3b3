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
