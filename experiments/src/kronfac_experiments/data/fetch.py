"""Finds the files of a data set: verified by SHA-256, kept in a folder, downloaded when missing.

A file is looked for in the folder that the environment variable `KRONFAC_DATA` names, then in the
user's cache folder, and is then downloaded into the latter from the first mirror that answers.
Both folders have the same layout, `<data set>/<file>`. Nothing happens at import.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import pooch
import requests

from kronfac import KronfacError

DATA_VARIABLE = "KRONFAC_DATA"
TIMEOUT = 30.0  # seconds for a mirror to answer


class DataError(KronfacError):
    """A data file is missing and can't be downloaded, or is not what it should be."""


@dataclass(frozen=True)
class DataFile:
    """A file by its content: where it lies in a data folder, its checksum and its mirrors.

    Args:
        path: Relative to a data folder, with forward slashes: `mnist/train-images-idx3-ubyte.gz`.
        sha256: Checksum of the file as it lies there, in hexadecimal.
        urls: Mirrors, tried in order; none for a file that is nowhere to be downloaded.
    """

    path: str
    sha256: str
    urls: tuple[str, ...] = ()


def default_cache() -> Path:
    """The user's cache folder for kronfac, as the operating system has it."""
    return Path(pooch.os_cache("kronfac"))


def find(file: DataFile, cache: Path | None = None) -> Path | None:
    """The verified file on this machine, or None; no network.

    Args:
        file: What to look for.
        cache: The folder to look in after `KRONFAC_DATA`; `default_cache()` when None.
    """
    for folder in _folders(cache):
        path = folder / file.path
        if path.is_file():
            _verify(path, file.sha256)
            return path
    return None


def fetch(file: DataFile, cache: Path | None = None) -> Path:
    """The verified file on this machine, downloaded into the cache folder if it has to be.

    Args:
        file: What to look for.
        cache: The folder to look in after `KRONFAC_DATA`, and to download into;
            `default_cache()` when None.
    """
    found = find(file, cache)
    if found is not None:
        return found
    target = (cache or default_cache()) / file.path
    failures = []
    for url in file.urls:
        try:
            pooch.retrieve(
                url,
                known_hash=f"sha256:{file.sha256}",
                fname=target.name,
                path=target.parent,
                downloader=pooch.HTTPDownloader(timeout=TIMEOUT),
            )
        # The errors of requests are OSErrors; a wrong checksum is pooch's ValueError.
        except (OSError, ValueError) as error:
            failures.append(f"{url} ({_reason(error)})")
        else:
            return target
    raise DataError(_missing(file, target, failures))


def _folders(cache: Path | None) -> list[Path]:
    named = os.environ.get(DATA_VARIABLE)
    return [*([Path(named)] if named else []), cache or default_cache()]


def _verify(path: Path, sha256: str) -> None:
    with path.open("rb") as stream:
        digest = hashlib.sha256()
        while block := stream.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != sha256:
        raise DataError(
            f"{path} is damaged or another file: its SHA-256 should be {sha256} and is "
            f"{digest.hexdigest()}. Delete it or put the right one there."
        )


def _reason(error: Exception) -> str:
    """A few words: what requests and urllib3 say is a paragraph."""
    match error:
        case requests.exceptions.SSLError():
            reason = "its certificate was refused"
        case requests.exceptions.ProxyError():
            reason = "the proxy did not answer"
        case requests.Timeout():
            reason = "no answer"
        case requests.ConnectionError():
            reason = "not reached"
        case requests.HTTPError(response=requests.Response(status_code=status)):
            reason = f"status {status}"
        case ValueError():
            reason = "sent another file"
        case _:
            reason = f"{type(error).__name__}: {error}"
    return reason


def _missing(file: DataFile, target: Path, failures: list[str]) -> str:
    tried = ", ".join(failures) or "it has no public mirror"
    return (
        f"The data file {file.path} is not on this machine and could not be downloaded: {tried}. "
        f"Put it at {target}, or in the folder that the environment variable {DATA_VARIABLE} "
        f"names, as <folder>/{file.path}. Its SHA-256 is {file.sha256}."
    )
