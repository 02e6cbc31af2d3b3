"""The keys of --rdzv-conf: those of torchrun's backends, and elaunch's own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

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


def _prefix(raw: values.Raw) -> str:
    """Normalises a prefix to the form `/teams/vision/`, so that all nodes of a job use the same keys."""
    word = values.text(raw)
    if not word.isprintable():
        raise ValueError(f"holds a character that cannot be printed; {_PREFIX_HOW}")
    names = [name for name in word.split("/") if name]
    if not names:
        raise ValueError(f"names no prefix; {_PREFIX_HOW}")
    if {".", ".."} & set(names):
        raise ValueError(f"has . or .. between its slashes, and etcd has no folders; {_PREFIX_HOW}")
    prefix = f"/{'/'.join(names)}/"
    if len(prefix.encode()) > _PREFIX_BYTES_MAX:
        raise ValueError(f"is longer than {_PREFIX_BYTES_MAX} bytes, and is part of each key of the job; shorten it")
    return prefix


_PREFIX_HOW = "give one like /teams/vision/"
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
        values.switch, differs="c10d only",
    ),
    Setting("transport", "gateway (JSON over HTTP) or grpc [gateway]", values.one_of("gateway", "grpc"), differs=_OURS),
    Setting("protocol", "http or https, if the endpoint has neither", values.one_of("http", "https")),
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
        "store_type", "", values.one_of("tcp", "file"), differs="has an effect",
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
_SWITCHES = {"t": "1", "y": "1", "f": "0", "n": "0"}

# torchrun's c10d backend: a node is dead after 3 missed heartbeats, one every 5 s.
_INTERVAL_S, _ATTEMPTS = 5.0, 3


@dataclass(frozen=True)
class Conf:
    """The settings in --rdzv-conf; None if not given. `ignored` are keys without effect, with reasons.

    `notes` say which of two different values of one setting counts.
    """

    join_timeout_s: float | None = None
    last_call_s: float | None = None
    lease_ttl_s: int | None = None
    keepalive_s: float | None = None
    store_timeout_s: float | None = None
    keys_ttl_s: float | None = None
    is_host: bool | None = None
    transport: Transport = Transport.GATEWAY
    protocol: str | None = None
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    user: str | None = None
    password_file: str | None = None
    prefix: str = PREFIX
    ignored: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()


def understand(conf: Mapping[str, str]) -> Conf:
    """The settings in `conf`; of two spellings of one setting the later counts.

    Raises UsageError for an unknown key and for a wrong value.
    """
    found: dict[str, str] = {}
    ignored: list[tuple[str, str]] = []
    notes: list[str] = []
    checked: dict[str, object] = {}
    for key, value in conf.items():
        setting = _setting(key)
        if setting.no_effect:
            ignored.append((f"--rdzv-conf {key}", setting.no_effect))
        raw = _SWITCHES.get(value.lower(), value) if setting.convert is values.switch else value
        try:
            converted = setting.convert(raw)
        except ValueError as error:
            shown = value if value.isprintable() else ascii(value)
            raise UsageError(f"--rdzv-conf {key}={shown} {error}") from None
        before = found.get(setting.name)
        if before and checked[setting.name] != converted:
            notes.append(f"--rdzv-conf has {before} and {key}={value}, two names of one setting; the later counts")
        found[setting.name] = f"{key}={value}"
        checked[setting.name] = converted
    return replace(_conf(checked, found, tuple(ignored)), notes=tuple(notes))


def _setting(key: str) -> Setting:
    if key in _KNOWN:
        return _KNOWN[key]
    if way_out := _SECRETS.get(key):
        raise UsageError(f"--rdzv-conf {key} would show a secret to every user of this host; {way_out}")
    near = nearest(key, _KNOWN)
    hint = f"did you mean {near}?" if near else f"known are {', '.join(_KNOWN)}"
    raise UsageError(f"--rdzv-conf {key} is no setting of the rendezvous; {hint}")


def _conf(checked: Mapping[str, object], words: Mapping[str, str], ignored: tuple[tuple[str, str], ...]) -> Conf:
    def number(name: str) -> float | None:
        value = checked.get(name)
        return float(value) if isinstance(value, int | float) else None

    def word(name: str) -> str | None:
        value = checked.get(name)
        return value if isinstance(value, str) else None

    beats = [name for name in ("keep_alive_interval", "keep_alive_max_attempt") if name in checked]
    interval_s, attempts = number("keep_alive_interval"), number("keep_alive_max_attempt")
    ttl_s = number("lease_ttl")
    if beats:
        beats_s = (_INTERVAL_S if interval_s is None else interval_s) * (attempts or _ATTEMPTS)
        if ttl_s not in (None, beats_s):
            raise UsageError(
                f"--rdzv-conf {words[beats[0]]} contradicts {words['lease_ttl']}: both say when a node is lost;"
                " drop one of them"
            )
        ttl_s = beats_s
        if ttl_s > values.SECONDS_MAX:
            raise UsageError(
                f"--rdzv-conf {words[beats[0]]} means that a node is lost only after {ttl_s:.0f} seconds; give less"
            )
    is_host = checked.get("is_host")
    return Conf(
        join_timeout_s=number("join_timeout"),
        last_call_s=number("last_call_timeout"),
        # Rounded up: a node must not be lost earlier than the user asked for.
        lease_ttl_s=None if ttl_s is None else math.ceil(ttl_s),
        keepalive_s=interval_s,
        store_timeout_s=number("store_timeout"),
        keys_ttl_s=number("keys_ttl"),
        is_host=is_host if isinstance(is_host, bool) else None,
        transport=Transport(word("transport") or "gateway"),
        protocol=word("protocol"),
        ca=word("cacert"),
        certificate=word("cert"),
        key=word("key"),
        user=word("user"),
        password_file=word("password_file"),
        prefix=word("etcd_prefix") or PREFIX,
        ignored=ignored,
    )
