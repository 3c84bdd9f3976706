"""`make up` says that its port is in use before it makes anything."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from rehearsal.home import Home, require_free_port
from rehearsal.interfaces import RehearsalError


def test_a_port_in_use_names_the_port_and_what_moves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("NEURONFLEET_HTTP_PORT", str(port))
        with pytest.raises(RehearsalError, match=rf"port {port} .*NEURONFLEET_HTTP_PORT"):
            require_free_port(Home(tmp_path), 80)
    require_free_port(Home(tmp_path), 80)


@pytest.mark.parametrize("value", ["x", "0", "70000"])
def test_a_port_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("NEURONFLEET_HTTPS_PORT", value)
    with pytest.raises(RehearsalError, match="NEURONFLEET_HTTPS_PORT"):
        require_free_port(Home(tmp_path), 443)
