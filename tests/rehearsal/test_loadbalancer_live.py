"""The load balancer with a real HAProxy and two HTTP servers on loopback."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import itertools
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rehearsal.interfaces import (
    FixedResponseAction,
    ForwardAction,
    ListenerSpec,
    LoadBalancerSpec,
    RedirectAction,
    RehearsalError,
    TargetGroupSpec,
    TargetSpec,
    TargetState,
)
from rehearsal.loadbalancer import HaProxyLoadBalancer
from rehearsal.tls import ensure_tls

pytestmark = pytest.mark.skipif(
    shutil.which("haproxy") is None, reason="haproxy is not installed (scripts/debian_packages.sh)"
)
GROUP_ARN = "arn:aws:elasticloadbalancing:us-east-1:1:targetgroup/hosts/abcd"
CHUNKS = 5
GAP_S = 0.2


class Target:
    """A host's HTTP server: ``/readyz`` as told, ``/stream`` paced chunks, anything else says who it is."""

    def __init__(self, name: str) -> None:
        self.name, self.ready, self.seen = name, True, [dict[str, str]()]
        target = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if self.path == "/readyz":
                    self.answer(200 if target.ready else 503, b"")
                elif self.path == "/stream":
                    self.stream()
                else:
                    target.seen.append(dict(self.headers.items()))
                    self.answer(200, target.name.encode())

            def answer(self, code: int, body: bytes) -> None:
                self.send_response(code)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def stream(self) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for number in range(CHUNKS):
                    piece = f"data: {number}\n\n".encode()
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                    time.sleep(GAP_S)
                self.wfile.write(b"0\r\n\r\n")

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, request: object, client_address: object) -> None:
                """HAProxy ends a health check's connection with a reset: no fault."""

        self.server = Server(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def spec(self) -> TargetSpec:
        return TargetSpec(self.name, "127.0.0.1", int(self.server.server_address[1]))


@pytest.fixture
def targets() -> Iterator[tuple[Target, Target]]:
    pair = Target("i-one"), Target("i-two")
    yield pair
    for target in pair:
        target.server.shutdown()
        target.server.server_close()


@pytest.fixture
def balancer(tmp_path: Path) -> Iterator[HaProxyLoadBalancer]:
    tls = ensure_tls(tmp_path / "tls", "us-east-1", ("localhost",))
    found = HaProxyLoadBalancer(tmp_path, lambda: tls.server, {80: free_port(), 443: free_port()})
    yield found
    found.remove_all()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def picture(*targets: TargetSpec, **changes: object) -> LoadBalancerSpec:
    group = TargetGroupSpec(
        arn=GROUP_ARN,
        name="hosts",
        protocol="HTTP",
        port=8000,
        health_check_path="/readyz",
        health_check_port=None,
        health_check_interval_s=1,
        health_check_timeout_s=1,
        healthy_threshold=2,
        unhealthy_threshold=2,
        matcher="200-299",
        deregistration_delay_s=5,
        algorithm="round_robin",
        targets=targets,
    )
    spec = LoadBalancerSpec(
        arn="arn:lb",
        name="dev",
        dns_name="dev.elb.amazonaws.com",
        scheme="internal",
        idle_timeout_s=60,
        client_keep_alive_s=3600,
        vpc_id="vpc-1",
        listeners=(ListenerSpec("arn:l", 80, "HTTP", None, ForwardAction(((GROUP_ARN, 1),))),),
        target_groups=(group,),
    )
    return dataclasses.replace(spec, **changes)  # type: ignore[arg-type]


def wait(what: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.05)


def state(balancer: HaProxyLoadBalancer, target: TargetSpec) -> TargetState:
    return balancer.health()[GROUP_ARN, target.instance_id, target.port].state


def connect(balancer: HaProxyLoadBalancer) -> http.client.HTTPConnection:
    url = balancer.url("arn:lb")
    assert url is not None and url.startswith("http://127.0.0.1:")
    return http.client.HTTPConnection("127.0.0.1", int(url.rsplit(":", 1)[1]), timeout=10)


def get(balancer: HaProxyLoadBalancer, path: str = "/") -> tuple[int, str]:
    with contextlib.closing(connect(balancer)) as connection:
        connection.request("GET", path, headers={"Host": "example.test"})
        response = connection.getresponse()
        return response.status, response.read().decode()


def test_a_target_is_initial_then_healthy_then_unhealthy(
    balancer: HaProxyLoadBalancer, targets: tuple[Target, Target]
) -> None:
    one, two = targets
    two.ready = False
    balancer.apply([picture(one.spec, two.spec)])
    assert state(balancer, one.spec) is TargetState.INITIAL
    assert get(balancer)[0] == 503, "a target that no check has passed gets no request"
    wait(lambda: state(balancer, one.spec) is TargetState.HEALTHY)
    assert {get(balancer)[1] for _ in range(6)} == {"i-one"}
    wait(lambda: state(balancer, two.spec) is TargetState.UNHEALTHY)
    found = balancer.health()[GROUP_ARN, "i-two", two.spec.port]
    assert found.reason == "Target.ResponseCodeMismatch" and "[503]" in found.description
    two.ready = True
    wait(lambda: state(balancer, two.spec) is TargetState.HEALTHY)
    assert {get(balancer)[1] for _ in range(6)} == {"i-one", "i-two"}
    one.ready = False
    wait(lambda: state(balancer, one.spec) is TargetState.UNHEALTHY)
    assert {get(balancer)[1] for _ in range(6)} == {"i-two"}


def test_headers_that_a_load_balancer_adds(
    balancer: HaProxyLoadBalancer, targets: tuple[Target, Target]
) -> None:
    one = targets[0]
    balancer.apply([picture(one.spec)])
    wait(lambda: state(balancer, one.spec) is TargetState.HEALTHY)
    get(balancer)
    seen = {key.lower(): value for key, value in one.seen[-1].items()}
    assert seen["host"] == "example.test"
    assert seen["x-forwarded-for"] == "127.0.0.1"
    assert seen["x-forwarded-proto"] == "http" and seen["x-forwarded-port"] == "80"
    assert len(seen["x-amzn-trace-id"]) == len("Root=1-12345678-123456789012345678901234")


def test_a_stream_arrives_piece_by_piece_and_outlives_deregistration_and_reload(
    balancer: HaProxyLoadBalancer, targets: tuple[Target, Target]
) -> None:
    one, two = targets
    balancer.apply([picture(one.spec)])
    wait(lambda: state(balancer, one.spec) is TargetState.HEALTHY)
    arrived: list[tuple[float, bytes]] = []

    def read() -> None:
        with contextlib.closing(connect(balancer)) as connection:
            connection.request("GET", "/stream")
            response = connection.getresponse()
            while piece := response.read1(65536):
                arrived.append((time.monotonic(), piece))

    reader = threading.Thread(target=read)
    reader.start()
    wait(lambda: len(arrived) >= 1)
    draining = dataclasses.replace(one.spec, draining=True)
    balancer.apply([picture(draining, two.spec)])
    assert state(balancer, draining) is TargetState.DRAINING
    # Another idle timeout is another configuration: a reload, while the stream is open.
    balancer.apply([picture(draining, two.spec, idle_timeout_s=61)])
    assert state(balancer, draining) is TargetState.DRAINING, "the old worker's stream counts"
    reader.join(10)
    assert b"".join(piece for _, piece in arrived) == b"".join(b"data: %d\n\n" % n for n in range(CHUNKS))
    gaps = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(arrived)]
    assert len(arrived) == CHUNKS and min(gaps) > GAP_S / 2, f"pieces were held back: {gaps}"
    wait(lambda: state(balancer, draining) is TargetState.UNUSED)
    wait(lambda: state(balancer, two.spec) is TargetState.HEALTHY)
    assert {get(balancer)[1] for _ in range(4)} == {"i-two"}


def test_the_end_of_the_deregistration_delay_cuts_what_is_left(
    balancer: HaProxyLoadBalancer, targets: tuple[Target, Target]
) -> None:
    one = targets[0]
    balancer.apply([picture(one.spec)])
    wait(lambda: state(balancer, one.spec) is TargetState.HEALTHY)
    with contextlib.closing(connect(balancer)) as connection:
        connection.request("GET", "/stream")
        response = connection.getresponse()
        response.read1(65536)
        balancer.apply([picture()])
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            while response.read():
                pass
    assert balancer.health() == {}
    assert get(balancer)[0] == 503


def test_healthy_targets_stay_healthy_through_a_reload_and_a_new_daemon(
    balancer: HaProxyLoadBalancer, targets: tuple[Target, Target], tmp_path: Path
) -> None:
    one, two = targets
    balancer.apply([picture(one.spec, two.spec)])
    wait(lambda: all(state(balancer, t.spec) is TargetState.HEALTHY for t in targets))
    balancer.apply([picture(one.spec, two.spec, idle_timeout_s=90)])
    assert all(state(balancer, t.spec) is TargetState.HEALTHY for t in targets)
    assert get(balancer)[0] == 200
    url = balancer.url("arn:lb")
    later = HaProxyLoadBalancer(tmp_path, lambda: tmp_path / "tls/server.pem", {80: 1})
    later.apply([picture(one.spec, two.spec, idle_timeout_s=90)])
    assert later.url("arn:lb") == url and get(later)[0] == 200
    # A target that left while a reload had put it into the configuration goes as any other.
    later.apply([picture(two.spec, idle_timeout_s=90)])
    wait(lambda: set(later.health()) == {(GROUP_ARN, "i-two", two.spec.port)})
    assert {get(later)[1] for _ in range(4)} == {"i-two"}


def test_a_port_in_use_is_named(balancer: HaProxyLoadBalancer, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = int(taken.getsockname()[1])
        other = HaProxyLoadBalancer(tmp_path / "other", lambda: tmp_path / "tls/server.pem", {80: port})
        with pytest.raises(RehearsalError, match=rf"port {port} .*in use.*NEURONFLEET_HTTP_PORT"):
            other.apply([picture()])
        assert other.url("arn:lb") is None


def test_redirect_and_fixed_response_are_answered_here(
    balancer: HaProxyLoadBalancer, targets: tuple[Target, Target]
) -> None:
    redirect = RedirectAction("HTTPS", "443", "#{host}", "/#{path}", "#{query}", 301)
    fixed = FixedResponseAction(418, "text/plain", 'no "tea"\nhere')
    listeners = (
        ListenerSpec("arn:1", 80, "HTTP", None, redirect),
        ListenerSpec("arn:2", 443, "HTTPS", "arn:cert", fixed),
    )
    spec = picture(listeners=listeners)
    balancer.apply([spec])
    url = balancer.url("arn:lb")
    assert url is not None and url.startswith("https://127.0.0.1:")
    secure_port = url.rsplit(":", 1)[1]
    plain_port = next(port for (_, listener), port in balancer._ports().items() if listener == 80)
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", plain_port, timeout=5)) as connection:
        connection.request("GET", "/a/b?c=d", headers={"Host": f"example.test:{plain_port}"})
        response = connection.getresponse()
        assert response.status == 301
        assert response.headers["Location"] == f"https://example.test:{secure_port}/a/b?c=d"


def test_remove_all_leaves_no_process_and_no_socket(
    balancer: HaProxyLoadBalancer, targets: tuple[Target, Target], tmp_path: Path
) -> None:
    balancer.apply([picture(targets[0].spec)])
    url = balancer.url("arn:lb")
    assert url is not None
    HaProxyLoadBalancer(tmp_path, lambda: tmp_path / "none").remove_all()
    with (
        pytest.raises(ConnectionRefusedError),
        socket.create_connection(("127.0.0.1", int(url[-5:].strip(":")))),
    ):
        pass
    assert list((tmp_path / "run").iterdir()) == []
