"""Where artifacts live: local paths and fsspec URIs, and storage errors in words a user can act on."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from stages.errors import EagleError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

CONNECT_S = 10.0
"""Longest wait, in seconds, for credentials and for the first answer of an object store."""

_STALLED_S = 60.0
_LOCAL_SCHEMES = ("file://", "local://")
_GCS_SCHEMES = ("gs://", "gcs://")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_STORAGE_PACKAGES = (
    "aiohttp",
    "azure",
    "botocore",
    "fsspec",
    "gcsfs",
    "google",
    "httpx",
    "httpx2",
    "huggingface_hub",
    "requests",
    "s3fs",
)
_GCS_LOGIN = (
    "log in with `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS to a key file"
)

_reached: set[str] = set()
"""Buckets and hosts that have answered this process."""
_T = TypeVar("_T")


def local_path(uri: str) -> Path | None:
    """The path a URI without a scheme, or with `file://`, stands for; None for any other URI."""
    for scheme in _LOCAL_SCHEMES:
        if uri.startswith(scheme):
            return Path(os.path.expanduser(uri.removeprefix(scheme)))
    if "://" in uri or "::" in uri:
        return None
    return Path(os.path.expanduser(uri))  # leaves a user that does not exist as typed


def join(uri: str, *parts: str) -> str:
    """`uri` with `parts` added below it, one slash between each."""
    root = uri if uri.endswith("://") else uri.rstrip("/") + "/"
    return root + "/".join(part.strip("/") for part in parts)


def free_bytes(uri: str) -> int | None:
    """Room for an artifact at `uri` that may not exist yet; None where no one says, as in object stores."""
    path = local_path(uri)
    if path is None:
        return None
    path = path.absolute()
    with storage_errors(uri):
        while not path.exists():
            path = path.parent
        return shutil.disk_usage(path).free


def refuse_read_only(uri: str) -> None:
    """Raises EagleError: no artifact can be made at `uri`, as far as can be told without trying."""
    if (path := local_path(uri)) is None:
        return
    path = path.absolute()
    with storage_errors(uri):
        place = next(place for place in (path, *path.parents) if place.exists())
        if place.is_dir() and not os.access(place, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "cannot write to", str(place))


def filesystem(uri: str) -> tuple[AbstractFileSystem, str]:
    """The fsspec file system of a URI, and the path in it.

    A store is contacted once per process, so that a wrong bucket or missing credentials show at once.
    Listings are never cached, and uploads to Google Cloud are compared by MD5.

    Raises:
        EagleError: the scheme is unknown, its package is not installed, credentials are missing, or the
            bucket does not exist or does not answer within ten seconds.
    """
    local = local_path(uri)
    if local is not None:
        import fsspec

        return fsspec.filesystem("file"), str(local.absolute())
    if uri.startswith(_GCS_SCHEMES):
        return _gcs(uri)
    import fsspec

    try:
        with storage_errors(uri):
            fs, path = fsspec.core.url_to_fs(uri, use_listings_cache=False)
            _greet(fs, uri, path)
    except ImportError as error:
        raise EagleError(f"{uri} needs a package that is not installed: {_one_line(error)}") from None
    except ValueError as error:
        raise EagleError(
            f"{uri} is no URI eagle can open ({_one_line(error)}): use a local path, gs://, s3:// or memory://"
        ) from None
    return fs, path


def _greet(fs: AbstractFileSystem, uri: str, path: str) -> None:
    """Contacts a store once per process, so that one that does not answer is named soon."""
    scheme, _, rest = uri.partition("://")
    place = f"{scheme}://{rest.partition('/')[0]}"
    if scheme == "memory" or place in _reached:
        return
    late = EagleError(
        f"{uri} does not answer within {CONNECT_S:.0f} s: check the network and the credentials, "
        "then try again"
    )
    try:
        _within(CONNECT_S, lambda: fs.info(path), late)
    except FileNotFoundError as error:
        # Web servers that cannot be reached have no file either, as fsspec says it.
        if isinstance(cause := error.__cause__, OSError) and not isinstance(cause, FileNotFoundError):
            raise cause from None
    _reached.add(place)


def _gcs(uri: str) -> tuple[AbstractFileSystem, str]:
    try:
        import aiohttp

        # The plain class, not the one that asks the control plane for the kind of each bucket first.
        from gcsfs.core import GCSFileSystem
    except ImportError:
        raise EagleError(f"{uri} needs gcsfs: pip install gcsfs") from None
    if "GCSFS_DEBUG" not in os.environ:
        # It prints tracebacks of failures that reach the user as one line from here.
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    path = GCSFileSystem._strip_protocol(uri)
    bucket = path.split("/", 1)[0]
    if not bucket:
        raise EagleError(f"{uri} names no bucket: use gs://bucket/folder")
    options: dict[str, Any] = {
        "use_listings_cache": False,
        "consistency": "md5",
        "requests_timeout": aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=_STALLED_S),
    }
    if os.environ.get("STORAGE_EMULATOR_HOST") and "GOOGLE_APPLICATION_CREDENTIALS" not in os.environ:
        options["token"] = "anon"
    with storage_errors(uri):
        fs = _within(
            CONNECT_S,
            lambda: GCSFileSystem(**options),
            EagleError(f"no Google credentials found for {uri} within {CONNECT_S:.0f} s: {_GCS_LOGIN}"),
        )
        if bucket not in _reached:
            # One name of a listing: a missing object looks the same as a missing bucket to an object request.
            fs.call("GET", "b/{}/o", bucket, maxResults=1, json_out=True, timeout=CONNECT_S)
            _reached.add(bucket)
    return fs, path


def _within(seconds: float, make: Callable[[], _T], late: EagleError) -> _T:
    """What `make` returns or raises, or `late` raised if that takes longer than `seconds`."""
    made: list[_T] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            made.append(make())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not made:
        raise late
    return made[0]


@contextmanager
def storage_errors(uri: str) -> Iterator[None]:
    """Turns what storage can fail with, inside the block, into an `EagleError` about `uri`.

    Errors of the program itself (wrong types, missing attributes) pass through.
    """
    try:
        yield
    except EagleError:
        raise
    except Exception as error:
        friendly = _explain(uri, error)
        if friendly is None:
            raise
        raise friendly from error


def _explain(uri: str, error: Exception) -> EagleError | None:
    number = getattr(error, "errno", None)
    text = _one_line(error)
    code = str(getattr(error, "code", ""))
    if number in _FULL:
        return EagleError(
            f"no space left to write {uri} ({text}): free some and run the same command again; "
            "it continues after what is already committed"
        )
    package = type(error).__module__.split(".")[0]
    if uri.startswith(_GCS_SCHEMES):
        bucket = uri.split("://", 1)[1].split("/", 1)[0]
        # Where an object is to be made, only the bucket can be missing, also one that was there before.
        making = "/upload/storage/" in text and "upload_id" not in text
        if (isinstance(error, FileNotFoundError) or code == "404") and (making or bucket not in _reached):
            return EagleError(f"bucket {bucket} of {uri} does not exist: check its name")
        if code in ("401", "403") or text.startswith("Forbidden") or package == "google":
            return EagleError(f"no access to {uri} ({text}): {_GCS_LOGIN}")
        if isinstance(error, ValueError) and text.startswith("Bad Request"):
            return EagleError(f"Google Cloud Storage refuses {uri}: {text}")
    if isinstance(error, FileNotFoundError):
        return EagleError(f"{uri} does not exist: check the path")
    if isinstance(error, PermissionError):
        return EagleError(
            f"no permission for {uri} ({text}): choose another folder or change its permissions"
        )
    if isinstance(error, TimeoutError | ConnectionError) or (package == "aiohttp" and number is not None):
        return EagleError(
            f"{uri} does not answer ({text}): check the network and the credentials, then try again"
        )
    if isinstance(error, OSError) or package in _STORAGE_PACKAGES:
        return EagleError(f"cannot read or write {uri}: {text}")
    return None


def _one_line(error: BaseException) -> str:
    """The error's message on one line and not too long, or its type's name when it has none."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
