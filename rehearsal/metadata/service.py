"""The metadata service's HTTP: tokens, who is asking, and the two doors."""

from __future__ import annotations

import logging
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from rehearsal.interfaces import RehearsalError
from rehearsal.metadata.tree import InstanceMetadata, listing, tree

log = logging.getLogger("rehearsal.metadata")
Directory = Callable[[str], InstanceMetadata | None]
"""Source address -> the instance that has it."""

_TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"
_TOKEN_HEADER = "X-aws-ec2-metadata-token"
_LONGEST_TTL_S = 21_600
_VERSION = re.compile(r"^(latest|\d{4}-\d\d-\d\d|1\.0)$")
_DEFAULT_IP_TTL = 64
_IDLE_S = 30


class _Tokens:
    """Session tokens: each belongs to one instance and ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokens: dict[str, tuple[str, float]] = {}

    def issue(self, instance_id: str, ttl_s: int) -> str:
        token = secrets.token_urlsafe(40) + "=="
        now = time.monotonic()
        with self._lock:
            self._tokens = {t: v for t, v in self._tokens.items() if v[1] > now}
            self._tokens[token] = (instance_id, now + ttl_s)
        return token

    def valid(self, token: str, instance_id: str) -> bool:
        with self._lock:
            owner, expires = self._tokens.get(token, ("", 0.0))
        return owner == instance_id and expires > time.monotonic()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(
        self, address: tuple[str, int], directory: Directory, tokens: _Tokens, needs_token: bool
    ) -> None:
        super().__init__(address, _Handler)
        self.directory = directory
        self.tokens = tokens
        self.needs_token = needs_token


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "EC2ws"
    sys_version = ""
    timeout = _IDLE_S
    server: _Server

    def do_PUT(self) -> None:
        instance = self._caller()
        if instance is None:
            return
        if self.headers.get("X-Forwarded-For") is not None:
            self._answer(HTTPStatus.FORBIDDEN)
            return
        if not re.fullmatch(r"/latest/api/token/?", self.path):
            self._answer(HTTPStatus.NOT_FOUND)
            return
        ttl = self.headers.get(_TTL_HEADER, "")
        if not ttl.isdigit() or not 1 <= int(ttl) <= _LONGEST_TTL_S:
            self._answer(HTTPStatus.BAD_REQUEST)
            return
        # A token that has to cross more hops than allowed dies on the way, as from the real service.
        self.connection.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, max(1, instance.hop_limit))
        token = self.server.tokens.issue(instance.instance_id, int(ttl))
        self._answer(HTTPStatus.OK, token.encode(), {_TTL_HEADER: ttl})

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        instance = self._caller()
        if instance is None:
            return
        self.connection.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, _DEFAULT_IP_TTL)
        token = self.headers.get(_TOKEN_HEADER)
        if token is None and self.server.needs_token:
            self._answer(HTTPStatus.UNAUTHORIZED)
            return
        if token is not None and not self.server.tokens.valid(token, instance.instance_id):
            self._answer(HTTPStatus.UNAUTHORIZED)
            return
        body = _find(instance, self.path)
        if body is None:
            self._answer(HTTPStatus.NOT_FOUND)
        else:
            self._answer(HTTPStatus.OK, body)

    def _caller(self) -> InstanceMetadata | None:
        """Who asks, by source address; answers by itself when nobody may."""
        length = self.headers.get("Content-Length", "0")
        if length.isdigit() and int(length):
            self.rfile.read(min(int(length), 65_536))
        instance = self.server.directory(self.client_address[0])
        if instance is None:
            log.warning("no instance has the address %s", self.client_address[0])
            self._answer(HTTPStatus.NOT_FOUND)
            return None
        if not instance.enabled:
            self._answer(HTTPStatus.FORBIDDEN)
            return None
        return instance

    def _answer(
        self, status: HTTPStatus, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> None:
        if body is None:
            body = f"{status.value} - {status.phrase}\n".encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        log.debug("%s %s", self.client_address[0], format % args)


def _find(instance: InstanceMetadata, path: str) -> bytes | None:
    parts = [part for part in path.split("?")[0].split("/") if part]
    if not parts:
        return b"1.0\n2021-03-23\nlatest"
    if not _VERSION.match(parts[0]):
        return None
    rest = "/".join(parts[1:])
    if rest == "user-data":
        return instance.user_data
    leaves = tree(instance)
    if rest == "":
        return b"dynamic\nmeta-data\nuser-data" if instance.user_data else b"dynamic\nmeta-data"
    if rest in leaves:
        value = leaves[rest]
        return (value() if callable(value) else value).encode()
    names = listing(leaves, rest)
    return names.encode() if names is not None else None


class MetadataService:
    """Both doors, each in a thread. Port 0 takes a free one (``port`` and ``v1_port`` then say which)."""

    def __init__(self, directory: Directory, address: str, port: int = 80, v1_port: int = 8775) -> None:
        tokens = _Tokens()
        self._servers: list[_Server] = []
        try:
            self._servers.append(_Server((address, port), directory, tokens, needs_token=True))
            self._servers.append(_Server((address, v1_port), directory, tokens, needs_token=False))
        except OSError as error:
            for server in self._servers:
                server.server_close()
            raise RehearsalError(
                f"the metadata service cannot listen on {address}:{port} and :{v1_port} ({error}): the "
                "bridge must hold that address, and nothing else may listen there"
            ) from error
        self.port: int = self._servers[0].server_address[1]
        self.v1_port: int = self._servers[1].server_address[1]
        self._threads = [
            threading.Thread(
                target=server.serve_forever, kwargs={"poll_interval": 0.25}, name="metadata", daemon=True
            )
            for server in self._servers
        ]

    def start(self) -> None:
        """Serve."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Close both doors."""
        for server in self._servers:
            server.shutdown()
            server.server_close()
