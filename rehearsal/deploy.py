"""The real ``cdk`` command line against the rehearsal's API: synth, bootstrap, deploy."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.operate.target import Target
from rehearsal.home import REPOSITORY, Home, read_events
from rehearsal.interfaces import RehearsalError
from rehearsal.tls import ensure_tls

Say = Callable[[str], None]
# What the reconciler cannot do without, as its faults name it.
_FATAL = ("load balancer",)
_TOO_MANY_DEATHS = 3
"""The group replaces a host that dies, without end; after so many the next one will not fare better."""


class Cdk:
    """Runs the project's own CDK command line with credentials and endpoint of the rehearsal."""

    def __init__(self, home: Home, state: dict[str, Any], environment: str) -> None:
        self.home = home
        self.state = state
        self.environment = environment
        self.assembly = home.path / "cdk" / environment

    def synth(self, say: Say, context: dict[str, str]) -> None:
        """Synthesize ``environment`` with its rehearsal table into :attr:`assembly`."""
        arguments = ["synth", "--quiet", "--output", str(self.assembly), "-c", f"env={self.environment}"]
        for key, value in {"rehearsal": "true", **context}.items():
            arguments += ["-c", f"{key}={value}"]
        self._run("synth", arguments, say)

    def bootstrap(self, say: Say) -> None:
        """Make the CDK toolkit stack unless it is there."""
        target = f"aws://{self.state['account']}/{self.state['region']}"
        self._run("bootstrap", ["bootstrap", target, "--app", str(self.assembly)], say)

    def deploy(self, stack: str, say: Say, parameters: dict[str, str] | None = None) -> None:
        """``cdk deploy`` of one stack from the assembly.

        Raises:
            RehearsalError: it failed; the message has CloudFormation's reason and names the log.
        """
        arguments = ["deploy", stack, "--app", str(self.assembly), "--require-approval", "never"]
        arguments += ["--exclusively", "--progress", "events"]
        for key, value in (parameters or {}).items():
            arguments += ["--parameters", f"{stack}:{key}={value}"]
        self._run(f"deploy-{stack}", arguments, say)

    def _run(self, name: str, arguments: list[str], say: Say) -> None:
        self.home.logs.mkdir(parents=True, exist_ok=True)
        log = self.home.logs / f"cdk-{name}.log"
        offset = self.home.events.stat().st_size if self.home.events.exists() else 0
        died, rolling_back = 0, False
        with log.open("wb") as output:
            process = subprocess.Popen(
                [str(REPOSITORY / "node_modules/.bin/cdk"), "--ci", *arguments],
                cwd=REPOSITORY,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # A session of its own: Ctrl-C reaches this program, which ends it, and not its wrapper too.
                start_new_session=True,
            )
            try:
                while process.poll() is None:
                    events, offset = read_events(self.home, offset)
                    for event in events:
                        rolling_back |= "ROLLBACK" in str(event.get("status", ""))
                        died += event["kind"] == "instance.died"
                        if died >= _TOO_MANY_DEATHS and not rolling_back:
                            raise RehearsalError(
                                f"{died} hosts died while booting ({event['message']}); their consoles: "
                                f"{self.home.path / 'consoles'}"
                            )
                        if event["kind"] == "fault" and event["what"] in _FATAL and not rolling_back:
                            # No host can become healthy any more: better now than after the boot's timeout.
                            raise RehearsalError(f"{event['message']}. `make down`, mend it, `make up`")
                        # Resources pass by; what happens to hosts and signals is what a person waits for.
                        if event["kind"] != "resource.status" or str(event["status"]).endswith("_FAILED"):
                            say(str(event["message"]))
                    time.sleep(0.2)
            except BaseException:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(20)
                raise
        if process.returncode != 0:
            raise RehearsalError(f"cdk {arguments[0]} failed: {_reason(log)}. Its log: {log}")

    def _environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "CDK_"))}
        return kept | {
            "PATH": f"{REPOSITORY / '.venv/bin'}:{os.environ['PATH']}",
            "AWS_ENDPOINT_URL": self.state["api_endpoint"],
            "AWS_ACCESS_KEY_ID": "rehearsal",
            "AWS_SECRET_ACCESS_KEY": "rehearsal",
            "AWS_REGION": self.state["region"],
            "AWS_DEFAULT_REGION": self.state["region"],
            "AWS_EC2_METADATA_DISABLED": "true",
            "CDK_DISABLE_CLI_TELEMETRY": "true",
            "NO_COLOR": "1",
        }


def ensure_bundle(profile: str, say: Say) -> None:
    """Build the bundle of ``profile`` unless it is there (`make setup` builds the common ones).

    Raises:
        RehearsalError: it could not be built; the message has the reason.
    """
    say(f"bundle of engine profile {profile}")
    done = subprocess.run(
        [sys.executable, "scripts/build_bundle.py", "--profile", profile, "--out", "dist"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise RehearsalError(
            f"the host bundle of {profile} could not be built: {(lines or ['no output'])[-1]}"
        )


def import_certificate(home: Home, state: dict[str, Any]) -> str:
    """Put the load balancer's certificate (of the rehearsal's own authority) into ACM; its ARN.

    Importing it again gives the same ARN, so a second deploy changes nothing.
    """
    acm = Target(region=state["region"], endpoint_url=state["api_endpoint"]).client("acm")
    known = acm.list_certificates()["CertificateSummaryList"]
    if known:
        return str(known[0]["CertificateArn"])
    both = ensure_tls(home.path / "tls", state["region"]).server.read_text()
    blocks = [block + "\n" for block in re.findall(r"-----BEGIN .+?-----END [A-Z ]+-----", both, re.DOTALL)]
    certificate = next(block for block in blocks if "CERTIFICATE" in block)
    key = next(block for block in blocks if "KEY" in block)
    return str(acm.import_certificate(Certificate=certificate, PrivateKey=key)["CertificateArn"])


def _reason(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    failed = [line for line in lines if "_FAILED" in line]
    for line in failed:
        # The resource that failed first has the reason; the others only say that they were cancelled.
        if "cancelled" not in line.lower():
            return line.split("|")[-1].strip() if "|" in line else line
    if lines and "Subprocess exited" in lines[-1]:
        # The CDK app's own words stand above the command line's.
        said = [line for line in lines[:-1] if not line.startswith(("Traceback", "File "))]
        return "\n".join(said[-8:]) or lines[-1]
    marked = [line for line in lines if "❌" in line or "error" in line.lower()]
    return (marked or lines or ["no output"])[-1]
