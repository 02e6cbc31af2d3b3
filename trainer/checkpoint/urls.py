"""The place of checkpoints as people write it, a path or a URL; what goes wrong there, in a sentence without secrets.

fsspec, whose file systems the URLs name, is imported for a URL alone, and a file system's own package when it is used.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib.util
import os
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
# What `pathlib.Path` makes of a URL.
_ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/([^/].*)", re.DOTALL)
_FILES = ("file", "local")
_UNREACHED = re.compile(r"Connect|Endpoint|Timeout|Timed|gaierror|DNS|SSL|HTTPClient")


class StorageError(OSError):
    """The storage does not do what was asked for; `strerror` is the reason alone, `str()` names the URL too."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


@dataclass(frozen=True)
class Url:
    """`text` is what fsspec gets, with the secrets that may be in it; `str()` is for people."""

    scheme: str
    text: str = field(repr=False)

    def __str__(self) -> str:
        head, _, rest = self.text.partition("://")
        host, slash, path = rest.partition("/")
        if "@" in host:
            host = "***@" + host.rpartition("@")[2]
        shown, mark, _ = f"{head}://{host}{slash}{path}".partition("?")
        return shown.rstrip("/") + ("?***" if mark else "")

    def scrubbed(self, text: str) -> str:
        """Another's message, without this URL's secrets."""
        text = text.replace(self.text, str(self))
        rest = self.text.partition("://")[2]
        user, _, _ = rest.partition("/")[0].rpartition("@")
        # A user without a password is often a token. A library may name a secret as it is written or as it is meant.
        for secret in filter(None, (user, user.partition(":")[2], rest.partition("?")[2])):
            text = text.replace(secret, "***").replace(unquote(secret), "***")
        return text


def parse(text: str) -> Path | Url:
    """A path of this machine (`file:///…` too), or a URL that fsspec knows and whose package is there.

    Raises ValueError with one sentence for one that cannot be meant.
    """
    if "::" in text and "://" in text:
        raise ValueError("checkpoints cannot go to a chained URL (…::…); give the last one of the chain")
    match = _URL.fullmatch(text)
    if match is None:
        _refuse_one_slash(text)
        return Path(text)
    scheme, rest = match[1].lower(), match[2]
    if scheme in _FILES:
        if not rest.startswith("/"):
            raise ValueError(f"{text} is no absolute path; write {scheme}:///folder, or the path alone")
        return Path(rest)
    url = Url(scheme, text)
    known = _known()
    if scheme not in known:
        close = difflib.get_close_matches(scheme, known, n=1)
        hint = f"did you mean {close[0]}://?" if close else "s3://bucket/folder is one that is known"
        raise ValueError(f"{url} begins with {scheme}://, which fsspec does not know; {hint}")
    if found := re.search(r"[*\[\]]", rest):
        raise ValueError(f"{url} has a {found[0]}, which fsspec reads as a pattern; take a name without * [ ]")
    if not rest.strip("/"):
        raise ValueError(f"{text} names no bucket; write {scheme}://bucket/folder")
    if package := _missing_package(scheme):
        raise ValueError(f"{scheme}:// needs the package {package}: pip install {package}")
    return url


def connect(url: Url) -> tuple[Any, str]:
    """fsspec's file system, and the path in it. Raises StorageError."""
    import fsspec

    with plain_errors(url):
        system, root = fsspec.core.url_to_fs(url.text)
    if retries := sys.modules.get("botocore.retryhandler"):
        # A retry of S3's client in its thread would draw from the generator of the program.
        vars(retries)["random"] = random.Random()
    return system, root.rstrip("/")


@contextlib.contextmanager
def plain_errors(url: Url) -> Iterator[None]:
    """Whatever a file system raises becomes StorageError, or FileNotFoundError where it is that."""
    try:
        yield
    except (StorageError, MemoryError):
        raise
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, _words(error, url), str(url)) from None
    except Exception as error:
        number = getattr(error, "errno", None) or errno.EIO
        raise StorageError(number, _reason(error, url), str(url)) from None


def _reason(error: Exception, url: Url) -> str:
    words, kind = _words(error, url), type(error).__name__
    if "Credentials" in kind:
        return f"{words}; give the credentials in the store's usual variables or files (S3: AWS_ACCESS_KEY_ID, …)"
    if isinstance(error, PermissionError):
        return f"access is denied ({words}); check the credentials, and what they may do"
    if isinstance(error, ConnectionError | TimeoutError) or _UNREACHED.search(kind):
        return f"it does not answer ({words}); check the network and the endpoint"
    if isinstance(error, NotImplementedError):
        return f"{url.scheme}:// cannot be written to"
    return words


def _words(error: Exception, url: Url) -> str:
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    first = next(iter(said.strip().splitlines()), "")
    return url.scrubbed(first).rstrip(".") or type(error).__name__


def _refuse_one_slash(text: str) -> None:
    match = _ONE_SLASH.fullmatch(text)
    if match and not os.path.lexists(f"{match[1]}:") and match[1].lower() in (*_FILES, *_known()):
        meant = Url(match[1], f"{match[1]}://{match[2]}")
        raise ValueError(f"{match[1]}:/ has one slash (pathlib.Path makes one of two); give the text {meant}")


def _known() -> list[str]:
    try:
        import fsspec
    except ImportError:
        raise ValueError("a URL needs the package fsspec: pip install fsspec") from None
    return list(fsspec.available_protocols())


def _missing_package(scheme: str) -> str:
    """The package that has this scheme's file system, where it is not installed."""
    from fsspec.registry import known_implementations, registry

    if scheme in registry or scheme not in known_implementations:
        return ""
    package = str(known_implementations[scheme]["class"]).partition(".")[0]
    return "" if importlib.util.find_spec(package) else package
