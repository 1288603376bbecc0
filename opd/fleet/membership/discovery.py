"""Where the servers are: a fixed list, a file that is read again, or a DNS name. They may come and go during a run.

"10.0.0.1:7070"            one server
"file:/etc/opd/teachers"   one "host:port" per line, optionally followed by the names of the teachers to use there
"dns:teachers.ns.svc:7070" every address of the name, for example of a headless Kubernetes service
"""

import asyncio
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from opd.errors import ConfigError

ANY: frozenset[str] | None = None
"""Stands for all teachers of a server."""

Places = dict[str, frozenset[str] | None]
"""For each address, the teachers that may be used there; None for all."""


@dataclass(frozen=True, slots=True)
class Source:
    """One endpoint expression.

    Attributes:
        text: as written: "host:port", "unix:path", "file:path" or "dns:name:port".
        teachers: teachers that may be used at the servers that it names; None for all.
    """

    text: str
    teachers: frozenset[str] | None = ANY

    async def resolve(self) -> Places:
        """The servers that it names at present.

        Raises:
            OSError: if the file cannot be read or the name cannot be resolved.
            ConfigError: if the file contains anything other than addresses.
        """
        kind, _, rest = self.text.partition(":")
        if kind == "file":
            return self._read(Path(rest))
        if kind == "dns":
            host, port = split_address(rest)
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return {_join(str(address[0]), port): self.teachers for *_, address in found}
        return {self.text: self.teachers}

    def _read(self, path: Path) -> Places:
        places: Places = {}
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise ConfigError(f"endpoint file {path} is not UTF-8 text; write one 'host:port' per line.") from error
        for number, line in enumerate(lines, 1):
            address, *names = line.partition("#")[0].split() or [""]
            if not address:
                continue
            try:
                split_address(address)
            except ConfigError as error:
                raise ConfigError(f"line {number} of {path}: {error}") from error
            _allow(places, address, _both(self.teachers, frozenset(names) if names else ANY))
        return places


def parse_endpoints(endpoints: str | Sequence[str] | Mapping[str, Sequence[str]]) -> list[Source]:
    """The sources in the endpoints that `TeacherFleet.connect` takes; see there.

    Raises:
        ConfigError: for an empty list or a malformed expression.
    """
    if isinstance(endpoints, str):
        endpoints = [part.strip() for part in endpoints.split(",") if part.strip()]
    if isinstance(endpoints, Mapping):
        names: dict[str, set[str]] = {}
        for teacher, texts in endpoints.items():
            for text in [texts] if isinstance(texts, str) else texts:
                names.setdefault(text, set()).add(teacher)
        sources = [Source(text, frozenset(wanted)) for text, wanted in names.items()]
    else:
        sources = [Source(text) for text in dict.fromkeys(endpoints)]
    if not sources:
        raise ConfigError("the fleet has no endpoints; give at least one 'host:port', 'file:PATH' or 'dns:NAME:PORT'.")
    for source in sources:
        kind, _, rest = source.text.partition(":")
        if kind == "file" and not rest:
            raise ConfigError(f"endpoint {source.text!r} does not name a file; write 'file:PATH'.")
        if kind not in ("file", "unix"):
            try:
                split_address(rest if kind == "dns" else source.text)
            except ConfigError as error:
                if source.teachers is None:
                    raise
                named = ", ".join(sorted(source.teachers))
                raise ConfigError(
                    f"endpoint {source.text!r} of teacher {named!r} is not of the form 'host:port'; write the mapping "
                    "from each teacher's name to its addresses."
                ) from error
    return sources


def recorded_folder(endpoints: str | Sequence[str] | Mapping[str, Sequence[str]]) -> str | None:
    """The folder of "store:FOLDER"; None for live endpoints.

    Raises:
        ConfigError: for a store beside live endpoints.
    """
    texts = [endpoints] if isinstance(endpoints, str) else list(endpoints)
    stores = [text for text in texts if text.startswith("store:")]
    if not stores or isinstance(endpoints, Mapping):
        return None
    if len(texts) > 1 or not stores[0].removeprefix("store:"):
        raise ConfigError(f"endpoint {stores[0]!r} must stand alone and name a folder: 'store:FOLDER'.")
    return stores[0].removeprefix("store:")


async def resolve_all(sources: Sequence[Source], known: Mapping[Source, Places]) -> dict[Source, Places]:
    """The servers of every source; a source that cannot be read at present keeps those it had.

    Args:
        sources: the sources to read.
        known: the previous result.
    """
    found: dict[Source, Places] = {}
    for source in sources:
        try:
            found[source] = await source.resolve()
        except OSError:  # the DNS server is down or the file is being replaced: no sign that servers have left
            found[source] = dict(known.get(source, {}))
        except ConfigError:
            # A wrong file prevents the start, but a run in progress must survive a half-written edit.
            if source not in known:
                raise
            found[source] = dict(known[source])
    return found


def merge(found: Mapping[Source, Places]) -> Places:
    """All sources as one; an address that is named twice may serve what either allows."""
    merged: Places = {}
    for places in found.values():
        for address, teachers in places.items():
            _allow(merged, address, teachers)
    return merged


def _allow(places: Places, address: str, teachers: frozenset[str] | None) -> None:
    """Allow an address to be used for these teachers too, in addition to those allowed already."""
    before = places.get(address, frozenset())
    places[address] = ANY if before is None or teachers is None else before | teachers


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[v6]:port".

    Raises:
        ConfigError: for any other spelling.
    """
    host, separator, port = address.rpartition(":")
    if not separator or not host or "/" in host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"endpoint {address!r} is not of the form 'host:port'; give a host and a port from 1 to 65535."
        )
    return host.strip("[]"), int(port)


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _both(one: frozenset[str] | None, other: frozenset[str] | None) -> frozenset[str] | None:
    if one is None or other is None:
        return other if one is None else one
    return one & other
