"""The API's HTTP server: moto's WSGI application on loopback, one request at a time for each but S3."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.types import StartResponse

from rehearsal.api.world import World
from rehearsal.interfaces import RehearsalError

log = logging.getLogger("rehearsal.api.http")
Application = Callable[[dict[str, Any], StartResponse], Iterable[bytes]]


def locked(application: Any, world: World) -> Application:
    """Run each request under the world's lock, S3's excepted: it shares no state with the others, and its
    bodies are large."""

    def call(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        if _is_s3(environ):
            return application(environ, start_response)  # type: ignore[no-any-return]
        # Read the body before the lock: a slow client must not hold up everyone.
        _buffer_body(environ)
        with world.lock:
            return application(environ, start_response)  # type: ignore[no-any-return]

    return call


def _is_s3(environ: dict[str, Any]) -> bool:
    authorization = environ.get("HTTP_AUTHORIZATION", "")
    return "/s3/aws4_request" in authorization or "X-Amz-Signature" in environ.get("QUERY_STRING", "")


def _buffer_body(environ: dict[str, Any]) -> None:
    import io

    try:
        length = int(environ.get("CONTENT_LENGTH") or 0)
    except ValueError:
        length = 0
    if length:
        environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(length))


class ApiServer:
    """moto behind werkzeug, in threads of this process.

    Only ``http://localhost:PORT`` works as the CDK CLI's endpoint: moto takes ``localhost`` in a template URL
    for path-style S3.
    """

    def __init__(self, world: World, host: str = "127.0.0.1", port: int = 0) -> None:
        from moto.moto_server.werkzeug_app import (
            DomainDispatcherApplication,
            MotoRequestHandler,
            create_backend_app,
        )
        from werkzeug.serving import make_server

        class QuietHandler(MotoRequestHandler):  # type: ignore[misc]
            """HTTP/1.1 with keep-alive; one debug line a request, in the daemon's log."""

            protocol_version = "HTTP/1.1"

            def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
                log.debug("%s %s", self.requestline, code, extra={"status": code})

            def log_error(self, format: str, *args: Any) -> None:
                log.warning(format, *args)

        application = locked(DomainDispatcherApplication(create_backend_app), world)
        try:
            self._server = make_server(host, port, application, threaded=True, request_handler=QuietHandler)
        except (OSError, SystemExit) as error:
            raise RehearsalError(
                f"the API cannot listen on {host}:{port} ({error}): is another daemon running? "
                "`neuronfleet down` stops it; or give another --port"
            ) from error
        self.port: int = self._server.port
        self._thread = threading.Thread(target=self._server.serve_forever, name="api", daemon=True)

    @property
    def endpoint(self) -> str:
        """What AWS_ENDPOINT_URL is set to."""
        return f"http://localhost:{self.port}"

    def start(self) -> None:
        """Serve in a thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop serving and close the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)
