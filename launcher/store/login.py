"""The login for an etcd: the user's name and password, and whether the password may be sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from elaunch.launcher.errors import UsageError
from elaunch.launcher.options.endpoints import Address
from elaunch.launcher.options.rdzv_conf import Conf
from elaunch.launcher.store.rendezvous_plan import RendezvousPlan, Serving
from elaunch.rendezvous.endpoint import Login, how_to_send


def read_login(conf: Conf, environ: Mapping[str, str], read_secret: Callable[[str], str]) -> Login | None:
    """The login in the settings, files and variables; None without a user. ETCDCTL_USER may be USER:PASSWORD.

    Raises UsageError.
    """
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
        raise UsageError(f"--rdzv-conf password_file={conf.password_file} has no user; add user=NAME")
    return Login(user, password) if user else None


def check_login(made: RendezvousPlan, addresses: tuple[Address, ...], *, is_asked: bool) -> None:
    """Raises UsageError if a password would go to an etcd, and the user has typed neither https:// nor http://.

    A login from a variable may be for another store. In that case the agent asks the endpoint what listens there, and
    sends no password without TLS.
    """
    if not made.login or made.tls or made.plainly or not (is_asked or made.serving is Serving.NOTHING):
        return
    where = ",".join(str(address) for address in addresses)
    raise UsageError(
        f"the password of etcd's user {made.login.user} is sent over TLS only, and {where} does not say"
        f" whether TLS is spoken there; {how_to_send(*addresses)}"
    )


def plain_password_notes(made: RendezvousPlan, addresses: tuple[Address, ...]) -> tuple[str, ...]:
    """A note for a password that the user has chosen to send unencrypted."""
    if not (made.login and made.plainly):
        return ()
    where = ",".join(str(address) for address in addresses)
    return (
        f"the password of etcd's user {made.login.user} goes unencrypted to {where}: anybody who can read the"
        " network can use it; for an etcd with TLS type https://",
    )
