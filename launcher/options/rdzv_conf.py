"""The keys of --rdzv-conf: those of torchrun's backends, and elaunch's own."""

# ruff: noqa: RUF009  # What seems to be a default is a field.

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from elaunch.launcher.errors import UsageError, nearest
from elaunch.launcher.options import values
from elaunch.rendezvous.endpoint import PREFIX, Transport


@dataclass(frozen=True)
class Setting:
    """One key. `aliases` are other backends' names for it. The other fields are as in an Option."""

    name: str
    help: str
    convert: values.Convert
    aliases: tuple[str, ...]
    no_effect: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


def _key(help: str, convert: values.Convert = values.text, *aliases: str, default: Any = None) -> Any:
    """A field that is the setting of its name."""
    return field(default=default, metadata={"setting": (help, convert, aliases, "")})


def _unused(why: str, convert: values.Convert) -> Any:
    return field(default=None, metadata={"setting": ("", convert, (), why)})


def _prefix(raw: values.Raw) -> str:
    """Normalises a prefix to the form `/teams/vision/`, so that all nodes of a job use the same keys."""
    word = values.text(raw)
    names = [name for name in word.split("/") if name]
    prefix = f"/{'/'.join(names)}/"
    is_long = len(prefix.encode(errors="replace")) > _PREFIX_BYTES_MAX
    if not names or {".", ".."} & set(names) or not word.isprintable() or is_long:
        raise ValueError(f"is not a key prefix; give one like /teams/vision/, of at most {_PREFIX_BYTES_MAX} bytes")
    return prefix


_PREFIX_BYTES_MAX = 255


@dataclass(frozen=True)
class Conf:
    """The settings in --rdzv-conf, times in seconds; None if not given.

    `ignored` are keys without effect, with reasons. `notes` name two keys of one setting with different values.
    """

    # fmt: off
    join_timeout: float | None = _key("seconds with too few nodes until the job ends [600]", values.duration, "timeout")
    last_call_timeout: float | None = _key("seconds to wait for more nodes of a range, first start [2]", values.seconds)
    lease_ttl: int | None = _key("whole seconds without contact until a node is lost [3]", partial(values.whole, low=2))
    keep_alive_interval: float | None = _key(
        "if given, lease_ttl is this times keep_alive_max_attempt [5]", values.duration,
    )
    keep_alive_max_attempt: int | None = _key("a number; see keep_alive_interval [3]", values.count)
    store_timeout: float | None = _key("seconds without the head's store until the job ends [60]", values.duration)
    keys_ttl: float | None = _key("seconds that the store keeps an ended job's keys [604800]", values.duration)
    is_host: bool | None = _key("1: serve the store if none listens; 0: do not [by address]", values.switch)
    transport: Transport = _key(
        "gateway (JSON over HTTP) or grpc [gateway]",
        values.OneOf(*(each.value for each in Transport), made=Transport), default=Transport.GATEWAY,
    )
    protocol: str | None = _key("http or https, if the endpoint has neither", values.OneOf("http", "https"))
    cacert: str | None = _key("file with the CA certificate for etcd [ETCDCTL_CACERT]", values.text, "ca_cert")
    cert: str | None = _key("file with this node's certificate for etcd [ETCDCTL_CERT]", values.text, "ssl_cert")
    key: str | None = _key("file with the certificate's private key [ETCDCTL_KEY]", values.text, "ssl_cert_key")
    user: str | None = _key("a user of etcd [ETCDCTL_USER]")
    password_file: str | None = _key("file with the user's password [ETCDCTL_PASSWORD]")
    etcd_prefix: str = _key(f"prefix of the job's keys, the same on all nodes [{PREFIX}]", _prefix, default=PREFIX)
    store_type: str | None = _unused("elaunch detects which store listens at the endpoint", values.OneOf("tcp", "file"))
    close_timeout: float | None = _unused("one write closes a rendezvous", values.seconds)
    heartbeat_timeout: float | None = _unused("lease_ttl decides when a node is lost", values.seconds)
    read_timeout: float | None = _unused("each request has its own deadline and is retried", values.seconds)
    # fmt: on
    ignored: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()


SETTINGS = tuple(Setting(each.name, *each.metadata["setting"]) for each in fields(Conf) if each.metadata)
_KNOWN = {name: setting for setting in SETTINGS for name in setting.names}
_SECRETS = {
    "password": "put it in a file and give password_file, or set ETCDCTL_PASSWORD",
    "token": "put it in a file and give --token-file, or set ELAUNCH_TOKEN",
}
# torchrun's c10d backend: a node is dead after 3 missed heartbeats, one every 5 s.
_INTERVAL_S, _ATTEMPTS = 5.0, 3


def parse_rdzv_conf(conf: Mapping[str, str]) -> Conf:
    """The settings in `conf`; of two spellings of one setting the later counts.

    Raises UsageError for an unknown key and for a wrong value.
    """
    found: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    ignored: list[tuple[str, str]] = []
    notes: list[str] = []
    for key, value in conf.items():
        setting = _known(key)
        try:
            made = setting.convert(value)
        except ValueError as error:
            shown = value if value.isprintable() else ascii(value)
            raise UsageError(f"--rdzv-conf {key}={shown} {error}") from None
        if setting.no_effect:
            ignored.append((f"--rdzv-conf {key}", setting.no_effect))
        else:
            if found.get(setting.name, made) != made:
                earlier = spelled[setting.name]
                notes.append(f"--rdzv-conf has {earlier} and {key}={value}, two names of one setting; the later counts")
            found[setting.name], spelled[setting.name] = made, f"{key}={value}"
    return Conf(**{**found, "lease_ttl": _lease_ttl(found)}, ignored=tuple(ignored), notes=tuple(notes))


def _known(key: str) -> Setting:
    if key in _KNOWN:
        return _KNOWN[key]
    if way_out := _SECRETS.get(key):
        raise UsageError(f"--rdzv-conf {key} would show a secret to every user of this host; {way_out}")
    near = nearest(key, _KNOWN)
    hint = f"did you mean {near}?" if near else f"known keys: {', '.join(_KNOWN)}"
    raise UsageError(f"--rdzv-conf {key} is not a setting of the rendezvous; {hint}")


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
