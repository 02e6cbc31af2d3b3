"""A user of a real etcd: who it is, and whether the password may be sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from elaunch.launcher.conf import Conf
from elaunch.launcher.endpoints import Address
from elaunch.launcher.errors import UsageError
from elaunch.rendezvous.access import how_to_send
from elaunch.rendezvous.plan import Login, RendezvousPlan, Serving


def login(conf: Conf, environ: Mapping[str, str], read_secret: Callable[[str], str]) -> Login | None:
    """A user needs a password. As for etcdctl, ETCDCTL_USER may be USER:PASSWORD."""
    user, _, password = environ.get("ETCDCTL_USER", "").partition(":")
    password = environ.get("ETCDCTL_PASSWORD") or password
    if conf.user:
        user, _, typed = conf.user.partition(":")
        if typed:
            raise UsageError(
                "--rdzv-conf user shows a password to everybody on this host; put it in a file and give"
                " password_file, or set ETCDCTL_PASSWORD"
            )
    if conf.password_file:
        password = read_secret(conf.password_file)
    if user and not password:
        raise UsageError(f"etcd's user {user} has no password; add --rdzv-conf password_file=FILE or ETCDCTL_PASSWORD")
    if conf.password_file and not user:
        raise UsageError(f"--rdzv-conf password_file={conf.password_file} is nobody's; add user=NAME")
    return Login(user, password) if user else None


def check_login(made: RendezvousPlan, addresses: tuple[Address, ...], *, is_asked: bool) -> None:
    """Raises UsageError where a password would go to an etcd, and nobody has typed how.

    Who has a user in a variable may mean another store: what listens at one endpoint is found out there, and is sent
    no password without TLS.
    """
    if not made.login or made.tls or made.plainly or not (is_asked or made.serving is Serving.NOTHING):
        return
    where = ",".join(str(address) for address in addresses)
    raise UsageError(
        f"the password of etcd's user {made.login.user} is sent over TLS only, and {where} does not say"
        f" what is spoken there; {how_to_send(*addresses)}"
    )


def sent_plainly(made: RendezvousPlan, addresses: tuple[Address, ...]) -> tuple[str, ...]:
    """A knowing choice is not refused, and not kept quiet either."""
    if not (made.login and made.plainly):
        return ()
    where = ",".join(str(address) for address in addresses)
    return (
        f"the password of etcd's user {made.login.user} goes unencrypted to {where}: whoever can read the"
        " network may use it; an etcd with TLS has https://",
    )
