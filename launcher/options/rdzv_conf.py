"""The keys of --rdzv-conf: those of torchrun's backends, and elaunch's own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elaunch.launcher.errors import UsageError, nearest
from elaunch.launcher.options import values
from elaunch.rendezvous.endpoint import PREFIX, Transport


@dataclass(frozen=True)
class Setting:
    """One key. `aliases` are other backends' names for it. The other fields are as in an Option."""

    name: str
    help: str
    convert: values.Convert = values.text
    aliases: tuple[str, ...] = ()
    differs: str = ""
    no_effect: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


def _lease(raw: values.Raw) -> int:
    values.seconds(raw)
    return values.whole(raw, low=2)


def _attempts(raw: values.Raw) -> int:
    return values.whole(raw, low=1)


def _switch(raw: values.Raw) -> bool:
    """As torch reads it: also t, y, f and n."""
    word = values.text(raw).lower()
    return values.switch({"t": "1", "y": "1", "f": "0", "n": "0"}.get(word, word))


def _prefix(raw: values.Raw) -> str:
    """Normalises a prefix to the form `/teams/vision/`, so that all nodes of a job use the same keys."""
    word = values.text(raw)
    names = [name for name in word.split("/") if name]
    prefix = f"/{'/'.join(names)}/"
    is_long = len(prefix.encode(errors="replace")) > _PREFIX_BYTES_MAX
    if not names or {".", ".."} & set(names) or not word.isprintable() or is_long:
        raise ValueError(f"is no prefix of keys; give one like /teams/vision/, of at most {_PREFIX_BYTES_MAX} bytes")
    return prefix


_PREFIX_BYTES_MAX = 255

_OURS = "not in torchrun"

SETTINGS: tuple[Setting, ...] = (
    Setting(
        "join_timeout", "seconds with too few nodes until the job ends [600]", values.positive_seconds,
        ("timeout",), differs="timeout: c10d ignores it",
    ),
    Setting(
        "last_call_timeout", "seconds to wait for more nodes of a range, first start [2]",
        values.seconds, differs="default 30, at every start",
    ),
    Setting("lease_ttl", "whole seconds without contact until a node is lost [3]", _lease, differs=_OURS),
    Setting(
        "keep_alive_interval", "seconds; lease_ttl is this times keep_alive_max_attempt [5]", values.positive_seconds,
        differs="a silent node is dropped without a message",
    ),
    Setting("keep_alive_max_attempt", "a number; see keep_alive_interval [3]", _attempts),
    Setting(
        "store_timeout", "seconds without the head's store until the job ends [60]", values.positive_seconds,
        differs=_OURS,
    ),
    Setting(
        "keys_ttl", "seconds that the store keeps an ended job's keys [604800]",
        values.positive_seconds, differs=_OURS,
    ),
    Setting(
        "is_host", "1: serve the store if none listens; 0: do not [by address]",
        _switch, differs="c10d only",
    ),
    Setting(
        "transport", "gateway (JSON over HTTP) or grpc [gateway]",
        values.OneOf(*(each.value for each in Transport), made=Transport), differs=_OURS,
    ),
    Setting("protocol", "http or https, if the endpoint has neither", values.OneOf("http", "https")),
    Setting("cacert", "file with the CA certificate for etcd [ETCDCTL_CACERT]", aliases=("ca_cert",)),
    Setting("cert", "file with this node's certificate for etcd [ETCDCTL_CERT]", aliases=("ssl_cert",)),
    Setting("key", "file with the certificate's private key [ETCDCTL_KEY]", aliases=("ssl_cert_key",)),
    Setting("user", "a user of etcd [ETCDCTL_USER]", differs=_OURS),
    Setting("password_file", "file with the user's password [ETCDCTL_PASSWORD]", differs=_OURS),
    Setting(
        "etcd_prefix", f"prefix of the job's keys, the same on all nodes [{PREFIX}]", _prefix,
        differs="default /torchelastic/p2p",
    ),
    Setting(
        "store_type", "", values.OneOf("tcp", "file"), differs="has an effect",
        no_effect="elaunch finds out which store listens at the endpoint",
    ),
    Setting(
        "close_timeout", "", values.seconds, differs="has an effect", no_effect="one write closes a rendezvous",
    ),
    Setting(
        "heartbeat_timeout", "", values.seconds, differs="has an effect",
        no_effect="lease_ttl decides when a node is lost",
    ),
    Setting(
        "read_timeout", "", values.seconds, differs="a single read of the store",
        no_effect="each request has its own deadline and is repeated",
    ),
)  # fmt: skip

_KNOWN = {name: setting for setting in SETTINGS for name in setting.names}
_SECRETS = {
    "password": "put it in a file and give password_file, or set ETCDCTL_PASSWORD",
    "token": "put it in a file and give --token-file, or set ELAUNCH_TOKEN",
}
# torchrun's c10d backend: a node is dead after 3 missed heartbeats, one every 5 s.
_INTERVAL_S, _ATTEMPTS = 5.0, 3


@dataclass(frozen=True)
class Conf:
    """The settings in --rdzv-conf by their names, times in seconds; None if not given.

    `ignored` are keys without effect, with reasons.
    """

    join_timeout: float | None = None
    last_call_timeout: float | None = None
    lease_ttl: int | None = None
    keep_alive_interval: float | None = None
    keep_alive_max_attempt: int | None = None
    store_timeout: float | None = None
    keys_ttl: float | None = None
    is_host: bool | None = None
    transport: Transport = Transport.GATEWAY
    protocol: str | None = None
    cacert: str | None = None
    cert: str | None = None
    key: str | None = None
    user: str | None = None
    password_file: str | None = None
    etcd_prefix: str = PREFIX
    ignored: tuple[tuple[str, str], ...] = ()


def understand(conf: Mapping[str, str]) -> Conf:
    """The settings in `conf`; of two spellings of one setting the later counts.

    Raises UsageError for an unknown key and for a wrong value.
    """
    found: dict[str, Any] = {}
    ignored: list[tuple[str, str]] = []
    for key, value in conf.items():
        setting = _setting(key)
        try:
            made = setting.convert(value)
        except ValueError as error:
            shown = value if value.isprintable() else ascii(value)
            raise UsageError(f"--rdzv-conf {key}={shown} {error}") from None
        if setting.no_effect:
            ignored.append((f"--rdzv-conf {key}", setting.no_effect))
        else:
            found[setting.name] = made
    return Conf(**{**found, "lease_ttl": _lease_ttl(found)}, ignored=tuple(ignored))


def _setting(key: str) -> Setting:
    if key in _KNOWN:
        return _KNOWN[key]
    if way_out := _SECRETS.get(key):
        raise UsageError(f"--rdzv-conf {key} would show a secret to every user of this host; {way_out}")
    near = nearest(key, _KNOWN)
    hint = f"did you mean {near}?" if near else f"known are {', '.join(_KNOWN)}"
    raise UsageError(f"--rdzv-conf {key} is no setting of the rendezvous; {hint}")


def _lease_ttl(found: Mapping[str, Any]) -> int | None:
    """The seconds until a node is lost: as given, else those of torchrun's two settings."""
    if "lease_ttl" in found:
        return int(found["lease_ttl"])
    if not {"keep_alive_interval", "keep_alive_max_attempt"} & found.keys():
        return None
    ttl_s: float = found.get("keep_alive_interval", _INTERVAL_S) * found.get("keep_alive_max_attempt", _ATTEMPTS)
    if ttl_s > values.SECONDS_MAX:
        raise UsageError(f"--rdzv-conf keep_alive_interval means a node is lost after {ttl_s:.0f} seconds; give less")
    # Rounded up: a node must not be lost earlier than the user asked for.
    return math.ceil(ttl_s)
