"""A host's fetch against ``aws s3 sync`` and plain parallel curl, over one fast local store, in one run.

    python -m bench.fetch [--json] [--runs 5] [--megabytes 2048] [--files 200] [--out FILE]

The store is nginx on loopback: objects are files that it sends by ranges, the listing that ``aws s3 sync``
asks for is a document. Contestants take turns, so that a machine whose load changes treats all alike, each in
a process of its own; the first turn of each is not counted.

- ``fetch``: what ``neuronfleet-node fetch`` does, each byte hashed and written to disk.
- ``aws s3 sync``: what a person would do; it writes to disk and hashes nothing.
- ``curl``: the same ranges by as many parallel curls, each piped to sha256sum and then dropped: the rate that
  the store, the network and sha256 allow.

Wall-clock time on a machine that others use tells little by itself: the processor time of each contestant
(without nginx) stands beside it. Needs nginx, curl and the AWS command line; as root or not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from app.compile.manifest import ArtifactFile, Manifest, blob_key, manifest_key

PART_BYTES = 16 << 20
WORKERS = 16
_BUCKET = "artifacts"
_NGINX = """\
worker_processes 1;
pid {home}/nginx.pid;
error_log {home}/nginx.log;
events {{ worker_connections 512; }}
http {{
    access_log off; sendfile on; tcp_nopush on; keepalive_requests 1000000;
    client_body_temp_path {home}/t; proxy_temp_path {home}/t; fastcgi_temp_path {home}/t;
    uwsgi_temp_path {home}/t; scgi_temp_path {home}/t;
    server {{
        listen 127.0.0.1:{port};
        root {home}/www;
        location = /{bucket} {{ default_type application/xml; try_files /list.xml =404; }}
        location = /{bucket}/ {{ default_type application/xml; try_files /list.xml =404; }}
    }}
}}
"""


@dataclass(frozen=True)
class Measured:
    """One turn: seconds on the clock, seconds of processor time (user and system), peak resident MiB of the
    largest process; ``transfer_s`` is without the start of Python, where the contestant tells it."""

    seconds: float
    cpu_s: float
    peak_mib: float
    transfer_s: float | None = None


def make_store(home: Path, files: int, size: int) -> Manifest:
    """Write the objects, the manifest and the listing; the content is random, with a fixed seed."""
    generator = random.Random(1)
    blobs = home / "www" / _BUCKET / blob_key("")
    blobs.mkdir(parents=True)
    entries = []
    for number in range(files):
        data = generator.randbytes(size)
        sha256 = hashlib.sha256(data).hexdigest()
        (blobs / sha256).write_bytes(data)
        entries.append(ArtifactFile(path=f"part-{number:04}.safetensors", size=size, sha256=sha256))
    manifest = Manifest(
        model="bench",
        model_digest="0" * 64,
        profile="cpu",
        versions={},
        tp_degree=1,
        batch_size=1,
        max_model_len=1,
        files=tuple(entries),
    )
    path = home / "www" / _BUCKET / manifest_key(manifest.digest())
    path.parent.mkdir()
    path.write_bytes(manifest.canonical_bytes())
    contents = "".join(_listed(blobs / entry.sha256, blob_key(entry.sha256)) for entry in entries)
    listing = (
        '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult>'
        f"<Name>{_BUCKET}</Name><KeyCount>{files}</KeyCount><MaxKeys>1000</MaxKeys>"
        f"<IsTruncated>false</IsTruncated>{contents}</ListBucketResult>"
    )
    (home / "www/list.xml").write_text(listing)
    return manifest


def _listed(path: Path, key: str) -> str:
    status = path.stat()
    # nginx's own entity tag, so that a client which asks for this very one is answered.
    tag = escape(f'"{int(status.st_mtime):x}-{status.st_size:x}"')
    when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(status.st_mtime))
    return (
        f"<Contents><Key>{key}</Key><LastModified>{when}</LastModified><ETag>{tag}</ETag>"
        f"<Size>{status.st_size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
    )


@contextmanager
def nginx(home: Path, port: int) -> Iterator[str]:
    """nginx over ``home``/www on loopback; gives its URL."""
    config = home / "nginx.conf"
    config.write_text(_NGINX.format(home=home, port=port, bucket=_BUCKET))
    # Its worker may run as another user, who must be able to read.
    home.chmod(0o755)
    process = subprocess.Popen(["nginx", "-c", str(config), "-p", str(home), "-g", "daemon off;"])
    try:
        url = f"http://127.0.0.1:{port}"
        check = [
            "curl",
            "-sf",
            "--retry",
            "20",
            "--retry-connrefused",
            "--retry-delay",
            "1",
            "-o",
            "/dev/null",
        ]
        subprocess.run([*check, f"{url}/list.xml"], check=True, timeout=60)
        yield url
    finally:
        process.terminate()
        process.wait()


def take_turn(command: list[str]) -> Measured:
    """Run a command in this turn; processor time is of it and of all that it waited for."""
    os.sync()  # what an earlier turn wrote is not written during this one
    environment = os.environ | {
        "AWS_ACCESS_KEY_ID": "bench",
        "AWS_SECRET_ACCESS_KEY": "bench",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
    }
    started = time.monotonic()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.monotonic() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"bench: {' '.join(command)} ended with {process.returncode}")
    own = json.loads(output)["transfer_s"] if output.startswith('{"transfer_s"') else None
    return Measured(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, own)


def fetch_once(url: str, bucket: str, digest: str, folder: str) -> None:
    """What ``neuronfleet-node fetch`` does, in a process of its own."""
    from app.node.fetch import FetchSettings, fetch
    from app.node.store import S3Reader, s3_client

    settings = FetchSettings(workers=WORKERS, part_bytes=PART_BYTES, reserve_bytes=0)
    reader = S3Reader(s3_client("us-east-1", settings.workers, endpoint_url=url), bucket)
    started = time.monotonic()
    fetch(reader, digest, Path(folder), settings=settings)
    print(json.dumps({"transfer_s": round(time.monotonic() - started, 3)}))


def contestants(url: str, manifest: Manifest, home: Path, aws: str) -> dict[str, Callable[[], list[str]]]:
    """Name -> the command of a turn; each begins with an empty folder."""

    def empty(name: str) -> Path:
        folder = home / f"out-{name}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    ranges = home / "ranges"
    lines = []
    for file in manifest.files:
        for start in range(0, file.size, PART_BYTES):
            end = min(start + PART_BYTES, file.size) - 1
            lines.append(f"{start}-{end} {url}/{_BUCKET}/{blob_key(file.sha256)}\n")
    ranges.write_text("".join(lines))
    curl = f"xargs -a {ranges} -P {WORKERS} -L 1 sh -c 'curl -sf -r $0 $1 | sha256sum >/dev/null'"
    return {
        "fetch": lambda: [
            *(sys.executable, "-m", "bench.fetch", "--once", url, _BUCKET),
            *(manifest.digest(), str(empty("fetch"))),
        ],
        "aws_s3_sync": lambda: [
            *(aws, "s3", "sync", "--only-show-errors", "--endpoint-url", url),
            *(f"s3://{_BUCKET}", str(empty("sync"))),
        ],
        "curl_sha256sum": lambda: ["sh", "-c", curl],
    }


def versions(aws: str) -> dict[str, str]:
    """Of the peers and of what the fetch is made of."""
    import boto3

    def first_line(*command: str) -> str:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return (done.stdout or done.stderr).splitlines()[0]

    return {
        "aws": first_line(aws, "--version"),
        "curl": first_line("curl", "--version"),
        "nginx": first_line("nginx", "-v"),
        "sha256sum": first_line("sha256sum", "--version"),
        "boto3": boto3.__version__,
        "python": platform.python_version(),
    }


def machine() -> dict[str, Any]:
    """What it ran on, and how busy that was before it began."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": models[0] if models else platform.machine(),
        "cpus": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "kernel": platform.release(),
        "load_1_min_before": round(os.getloadavg()[0], 2),
    }


def summarize(turns: dict[str, list[Measured]], size: int) -> dict[str, Any]:
    """Medians of each contestant, and the ratios that were asked for."""
    found: dict[str, Any] = {}
    for name, measured in turns.items():
        seconds = [item.seconds for item in measured]
        transfer = [item.transfer_s for item in measured if item.transfer_s is not None]
        found[name] = {
            "seconds": [round(item, 2) for item in seconds],
            "mb_per_s": round(size / 1e6 / statistics.median(seconds)),
            "cpu_s": round(statistics.median(item.cpu_s for item in measured), 2),
            "peak_mib": round(max(item.peak_mib for item in measured)),
        }
        if transfer:
            found[name]["transfer_mb_per_s"] = round(size / 1e6 / statistics.median(transfer))
    rate = {name: item["mb_per_s"] for name, item in found.items()}
    return {
        "contestants": found,
        "fetch_over_aws_s3_sync": round(rate["fetch"] / rate["aws_s3_sync"], 2),
        "fetch_over_curl_sha256sum": round(rate["fetch"] / rate["curl_sha256sum"], 2),
    }


def show(result: dict[str, Any]) -> None:
    """The result as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table("", "MB/s", "processor s", "peak MiB", "seconds of each turn")
    for name, item in result["contestants"].items():
        turns = ", ".join(map(str, item["seconds"]))
        table.add_row(name, str(item["mb_per_s"]), str(item["cpu_s"]), str(item["peak_mib"]), turns)
    console = Console()
    console.print(table)
    console.print(
        f"{result['bytes'] / 2**30:.2f} GiB in {result['files']} files; fetch is "
        f"{result['fetch_over_aws_s3_sync']} times aws s3 sync ({result['versions']['aws']}) and "
        f"{result['fetch_over_curl_sha256sum']} of curl | sha256sum; load before: "
        f"{result['machine']['load_1_min_before']}",
        highlight=False,
    )


def main(arguments: list[str] | None = None) -> int:
    """Entry point of ``python -m bench.fetch``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--runs", type=int, default=5, help="turns of each that count")
    parser.add_argument("--megabytes", type=int, default=2048, help="MiB in all")
    parser.add_argument("--files", type=int, default=200)
    parser.add_argument("--port", type=int, default=18182)
    parser.add_argument("--out", type=Path, help="write the JSON document there too")
    parser.add_argument("--once", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.once:
        fetch_once(*options.once)
        return 0
    # Whoever ends it early gets nginx and the files removed too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    aws = shutil.which("aws")
    missing = [name for name in ("nginx", "curl", "xargs", "sha256sum") if not shutil.which(name)]
    if aws is None or missing:
        lacks = ", ".join([*missing, *([] if aws else ["aws"])])
        print(f"bench: {lacks} not found: install nginx-light and curl, and awscli", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="neuronfleet-bench-") as folder:
        home = Path(folder)
        busy = machine()
        size = (options.megabytes << 20) // options.files
        manifest = make_store(home, options.files, size)
        with nginx(home, options.port) as url:
            runs = contestants(url, manifest, home, aws)
            turns: dict[str, list[Measured]] = {name: [] for name in runs}
            for turn in range(options.runs + 1):
                for name, command in runs.items():
                    measured = take_turn(command())
                    if turn:
                        turns[name].append(measured)
    total = size * options.files
    result = {
        "bytes": total,
        "files": options.files,
        "part_bytes": PART_BYTES,
        "workers": WORKERS,
        **summarize(turns, total),
        "versions": versions(aws),
        "machine": busy,
    }
    document = json.dumps(result, indent=2) + "\n"
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(document)
    if options.json:
        print(document, end="")
    else:
        show(result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
