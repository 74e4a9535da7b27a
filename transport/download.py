"""Fetch a published state into a file.

Decides what is asked for when only addresses are given: the version that the first source to answer serves.
"""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from transport import wire
from transport.api import Progress
from transport.ask import SMALL_BODY
from transport.crew import Crew
from transport.errors import SourceError, TokenRefused, TransportTimeout
from transport.fetch import Fetch
from transport.files import FileSink
from transport.link import Garbled, Link, Lost
from transport.session import Over, Settings

ASK_AGAIN_S: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    """What was fetched, and from whom."""

    path: Path
    version: str
    size: int
    """Bytes in the file."""
    seconds: float
    sources: dict[str, int]
    """Bytes received of each source."""


def split_url(url: str) -> tuple[str, str | None]:
    """Return the address of a source and the version, if the URL names one.

    `host:port`, `http://host:port`, and the URL of anything under `/v1/<version>/` are understood.
    """
    parts = urlsplit(url if "://" in url else f"http://{url}")
    path = parts.path.split("/")
    try:
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 0) >= 0
    except ValueError:
        known = False
    if not known or parts.query or parts.username is not None:
        raise ValueError(f"the address of a source must look like http://host:port, not {url!r}")
    address = f"{parts.scheme}://{parts.netloc}"
    if parts.path in ("", "/"):
        return address, None
    if len(path) in (3, 4) and path[:2] == ["", "v1"] and path[2]:
        return address, unquote(path[2])
    raise ValueError(f"{url!r}: a source has nothing at {parts.path!r}; try {address}")


class Downloader:
    """How sources are talked to."""

    def __init__(
        self,
        *,
        token: str,
        deadline_s: float,
        streams: int = 4,
        stall_s: float = 3.0,
        client_ssl: ssl.SSLContext | None = None,
    ) -> None:
        self._token, self._tls = token, client_ssl
        self._streams, self._stall_s = streams, stall_s
        self._deadline_s, self._deadline = deadline_s, time.monotonic() + deadline_s

    def find_version(self, sources: Sequence[str]) -> str:
        """Return the version that the first source to answer serves; wait for one that serves nothing yet."""
        said: dict[str, str] = {}
        while True:
            for address in sources:
                try:
                    version = self._ask_version(address)
                except Over:  # the deadline is over in the middle of an answer
                    said.setdefault(address, "it did not answer in time")
                except (Lost, Garbled, wire.Stalled, SourceError) as error:
                    refused = isinstance(error, TokenRefused) or (isinstance(error, Lost) and error.refused)
                    said[address] = str(error) or f"it was silent for {self._stall_s:g} s"
                    if refused and len(sources) == 1:
                        kind = TokenRefused if isinstance(error, TokenRefused) else SourceError
                        raise kind(f"{address}: {error}", said) from None
                else:
                    if version is not None:
                        return version
                    said[address] = "it has published nothing yet"
            details = "; ".join(f"{address}: {what}" for address, what in said.items())
            if time.monotonic() >= self._deadline:
                raise TransportTimeout(f"nothing to fetch after {self._deadline_s:g} s: {details}")
            if not any("nothing yet" in what for what in said.values()):
                raise SourceError(f"no source answers: {details}", said)
            time.sleep(ASK_AGAIN_S)

    def _ask_version(self, address: str) -> str | None:
        link = self._link(address, self._check)
        try:
            # There is no version "": the refusal names the one that there is.
            reply = link.request("GET", "/v1//manifest?hashes=0", {})
            if reply.status in (401, 403):
                raise TokenRefused("it refused the token")
            if reply.status == 200:
                return ""
            if reply.status not in (404, 412):
                raise Garbled(f"it answered with status {reply.status}")
            latest = json.loads(link.read_body(reply, SMALL_BODY))["latest"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise Garbled("it does not say what it serves: is it a source?") from None
        finally:
            link.close()
        if latest is not None and not isinstance(latest, str):
            raise Garbled("it does not say what it serves: is it a source?")
        return latest

    def fetch(
        self,
        sources: Sequence[str],
        version: str,
        path: str | Path,
        *,
        progress: Callable[[Progress], None] | None = None,
    ) -> Download:
        """Fetch a version from all sources together into a safetensors file.

        The file appears when it is complete and verified; a file that was there before stays until then.
        """
        begun = time.monotonic()
        left = max(0.0, self._deadline - begun)
        with Crew() as crew, FileSink(path) as sink:
            settings = Settings(
                make_link=self._link,
                crew=crew,
                streams=self._streams,
                stall_s=self._stall_s,
                report_chunks=progress is not None,
            )
            fetch = Fetch(
                sources,
                version,
                None,
                settings,
                deadline_s=left,
                progress=progress,
                make_plan=sink.plan,
            )
            fetch.run()
            sink.commit()
        return Download(
            path=Path(path),
            version=version,
            size=Path(path).stat().st_size,
            seconds=time.monotonic() - begun,
            sources={source.address: source.bytes_received for source in fetch.sources},
        )

    def _link(self, address: str, check: Callable[[], None]) -> Link:
        return Link(address, self._token, tls=self._tls, stall_s=self._stall_s, check=check)

    def _check(self) -> None:
        if time.monotonic() >= self._deadline:
            raise Over
