"""The rendered user data, run: real bash, real curl with its real signatures, against a stand-in for AWS.

Only addresses are bent: a ``curl`` on PATH sends every request to a proxy on loopback, and the script's
absolute paths lie under a folder of the test.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from app.node.config import load_node_config
from infra.userdata import render
from tests.synth.conftest import tiny_bundle

REGION, INSTANCE = "us-west-2", "i-0123456789abcdef0"
KEYS = {"AccessKeyId": "ASIAEXAMPLE", "SecretAccessKey": "se/cr+et=", "Token": "to/ken+=="}
CURL = "/usr/bin/curl"
NODE = {
    "version": 1,
    "environment": "dev",
    "region": REGION,
    "role": "cell",
    "signal": {"stack": "neuronfleet-dev", "logical_id": "FleetGroup"},
    "artifact": {"bucket": "artifacts", "digest": "a" * 64},
    "engine": {"profile": "cpu", "model": "m", "tp_degree": 2, "batch_size": 4, "max_model_len": 64},
    "serve": {"keep_alive_s": 310},
    "numactl_from": "image",
}


@dataclass
class Aws:
    """What the stand-in serves, and what it was asked. ``broken`` hosts answer 503 that many times."""

    bundle: bytes
    broken: dict[str, int] = field(default_factory=dict)
    calls: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    unsigned: list[str] = field(default_factory=list)
    metadata_without_token: int = 0

    def answer(self, method: str, url: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        parts = urlsplit(url)
        host = parts.netloc
        if self.broken.get(host, 0) > 0:
            self.broken[host] -= 1
            return 503, b"later"
        if host == "169.254.169.254":
            return self._metadata(method, parts.path, headers)
        if not signature_is_right(method, url, headers, body):
            self.unsigned.append(url)
            return 403, b"SignatureDoesNotMatch"
        if ".s3." in host:
            return (200, self.bundle) if parts.path == "/key.zip" else (404, b"NoSuchKey")
        query = {key: values[0] for key, values in parse_qs(body.decode()).items()}
        self.calls.append((host, query))
        return 200, b"<ok/>"

    def _metadata(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
        if path == "/latest/api/token":
            return (200, b"tok") if method == "PUT" else (405, b"")
        if headers.get("x-aws-ec2-metadata-token") != "tok":
            self.metadata_without_token += 1
            return 401, b""
        values = {
            "/latest/meta-data/instance-id": INSTANCE,
            "/latest/meta-data/iam/security-credentials/": "role",
            "/latest/meta-data/iam/security-credentials/role": json.dumps(KEYS, indent=2),
        }
        return (200, values[path].encode()) if path in values else (404, b"")


def signature_is_right(method: str, url: str, headers: dict[str, str], body: bytes) -> bool:
    """AWS Signature Version 4 as the receiving side computes it; an unsigned token does not count."""
    words = headers.get("authorization", "").replace(",", " ").split()
    fields = dict(word.split("=", 1) for word in words if "=" in word)
    if "SignedHeaders" not in fields:
        return False
    names = fields["SignedHeaders"].split(";")
    _, day, region, service, _ = fields["Credential"].split("/")
    if headers.get("x-amz-security-token") != KEYS["Token"] or "x-amz-security-token" not in names:
        return False
    payload = headers.get("x-amz-content-sha256", hashlib.sha256(body).hexdigest())
    canonical = "\n".join(
        [
            method,
            urlsplit(url).path or "/",
            urlsplit(url).query,
            *(f"{name}:{headers[name].strip()}" for name in names),
            "",
            fields["SignedHeaders"],
            payload,
        ]
    )
    scope = f"{day}/{region}/{service}/aws4_request"
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    text = f"AWS4-HMAC-SHA256\n{headers['x-amz-date']}\n{scope}\n{digest}"
    key = f"AWS4{KEYS['SecretAccessKey']}".encode()
    for part in (day, region, service, "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    return region == REGION and hmac.digest(key, text.encode(), "sha256").hex() == fields["Signature"]


@dataclass
class Host:
    """A folder that stands for the host's root, and the stand-in for AWS that it talks to."""

    root: Path
    aws: Aws
    port: int
    sha256: str

    def boot(self) -> subprocess.CompletedProcess[str]:
        values = {
            "REGION": REGION,
            "URL_SUFFIX": "amazonaws.com",
            "STACK_NAME": "neuronfleet-dev",
            "LOGICAL_ID": "FleetGroup",
            "NODE_CONFIG": json.dumps(NODE),
            "BUNDLE_BUCKET": "assets",
            "BUNDLE_KEY": "key.zip",
            "BUNDLE_SHA256": self.sha256,
            "VENV": "/venv",
        }
        text = render(values)
        for path in ("/etc/neuronfleet", "/opt/neuronfleet", "/run/neuronfleet", "/venv/", "/dev/console"):
            text = text.replace(path, f"{self.root}{path}")
        # Waiting is the same with shorter pauses.
        text = text.replace("--retry-delay 3", "--retry-delay 1").replace("--retry 40", "--retry 2")
        script = self.root / "user-data"
        script.write_text(text)
        path = f"{self.root / 'bin'}:/usr/bin:/bin"
        return subprocess.run(
            ["/bin/bash", str(script)],
            env={"PATH": path},
            capture_output=True,
            text=True,
            timeout=120,
        )

    @property
    def console(self) -> str:
        return (self.root / "dev/console").read_text()


SHIM = """#!/bin/bash
args=()
for arg in "$@"; do args+=("${{arg/#https:/http:}}"); done
for arg in "$@"; do
  case $arg in *ASIAEXAMPLE*|*se/cr*|*to/ken*) echo "secret on the command line" >&2; exit 99;; esac
done
exec {curl} --proxy http://127.0.0.1:{port} "${{args[@]}}"
"""


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    bundle = tiny_bundle(tmp_path / "made", 'echo "installed from $0"\n').read_bytes()
    aws = Aws(bundle)

    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {key.lower(): value for key, value in self.headers.items()}
            status, content = aws.answer(self.command, self.path, headers, body)
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = _serve

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    root = tmp_path / "root"
    for folder in ("bin", "dev", "run", "venv/bin"):
        (root / folder).mkdir(parents=True)
    (root / "dev/console").touch()
    shim = root / "bin/curl"
    shim.write_text(SHIM.format(curl=CURL, port=server.server_port))
    shim.chmod(0o755)
    # tee would truncate a file where it writes on to a console.
    tee = root / "bin/tee"
    tee.write_text('#!/bin/bash\nexec /usr/bin/tee -a "$@"\n')
    tee.chmod(0o755)
    (root / "venv/bin/python").symlink_to(sys.executable)
    yield Host(root, aws, server.server_port, hashlib.sha256(bundle).hexdigest())
    server.shutdown()
    server.server_close()


pytestmark = pytest.mark.skipif(not Path(CURL).exists(), reason=f"no curl at {CURL}")


def reported(host: Host) -> list[tuple[str, dict[str, str]]]:
    """The two reports of a failure; nothing else may be called."""
    signal = {
        "Action": "SignalResource",
        "Version": "2010-05-15",
        "Status": "FAILURE",
        "LogicalResourceId": "FleetGroup",
        "StackName": "neuronfleet-dev",
        "UniqueId": INSTANCE,
    }
    health = {
        "Action": "SetInstanceHealth",
        "Version": "2011-01-01",
        "HealthStatus": "Unhealthy",
        "ShouldRespectGracePeriod": "false",
        "InstanceId": INSTANCE,
    }
    return [
        (f"cloudformation.{REGION}.amazonaws.com", signal),
        (f"autoscaling.{REGION}.amazonaws.com", health),
    ]


def test_a_good_boot_installs_and_reports_nothing(host: Host) -> None:
    done = host.boot()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "installed from bundle/install.sh" in done.stdout
    assert load_node_config(host.root / "etc/neuronfleet/node.json").role == "cell"
    assert host.aws.calls == [] and host.aws.unsigned == [] and host.aws.metadata_without_token == 0
    assert host.console == ""
    assert not list(host.root.rglob("*.part"))


def test_late_services_are_waited_for(host: Host) -> None:
    host.aws.broken = {"169.254.169.254": 1, f"assets.s3.{REGION}.amazonaws.com": 1}
    done = host.boot()
    assert done.returncode == 0, done.stderr
    assert host.aws.calls == []


def test_a_bundle_with_other_bytes_is_refused_and_reported(host: Host) -> None:
    host.sha256 = "0" * 64
    done = host.boot()
    assert done.returncode != 0
    assert host.aws.calls == reported(host)
    assert f"neuronfleet-failed: {INSTANCE} user-data: exit 1: line" in host.console
    assert "sha256sum" in host.console
    assert not (host.root / "opt/neuronfleet/bundle").exists()


def test_a_missing_bundle_is_reported(host: Host) -> None:
    host.aws.broken = {f"assets.s3.{REGION}.amazonaws.com": 1000}
    done = host.boot()
    assert done.returncode == 22
    assert host.aws.calls == reported(host)


def test_the_installers_last_words_are_the_reason(host: Host, tmp_path: Path) -> None:
    content = "echo 'install: first' >&2\necho 'install: numactl is not on this image' >&2\nexit 7\n"
    host.aws.bundle = tiny_bundle(tmp_path / "bad", content).read_bytes()
    host.sha256 = hashlib.sha256(host.aws.bundle).hexdigest()
    done = host.boot()
    assert done.returncode == 7
    assert host.aws.calls == reported(host)
    assert "user-data: exit 7: install: numactl is not on this image" in host.console
    assert "install: first" in done.stderr


def test_a_venv_that_is_not_there_is_reported(host: Host) -> None:
    (host.root / "venv/bin/python").unlink()
    done = host.boot()
    assert done.returncode == 127
    assert host.aws.calls == reported(host)
    assert "venv/bin/python" in host.console


def test_a_disk_that_cannot_be_written_is_reported(host: Host) -> None:
    (host.root / "etc").mkdir()
    (host.root / "etc/neuronfleet").write_text("a file where the folder should be")
    done = host.boot()
    assert done.returncode != 0
    assert host.aws.calls == reported(host)


def test_one_report_that_cannot_be_delivered_keeps_the_other(host: Host) -> None:
    host.sha256 = "0" * 64
    host.aws.broken = {f"cloudformation.{REGION}.amazonaws.com": 1000}
    host.boot()
    assert host.aws.calls == reported(host)[1:]
    assert "no signal sent" in host.console


def test_no_secret_is_printed(host: Host) -> None:
    host.sha256 = "0" * 64
    done = host.boot()
    for secret in KEYS.values():
        assert secret not in done.stdout + done.stderr + host.console
