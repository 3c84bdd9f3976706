"""The image's cache: named by content, built once, nothing left of a build that failed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rehearsal import image, mirror
from rehearsal.image import ensure_image, find_image, image_key
from rehearsal.interfaces import RehearsalError

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="build steps run in namespaces, which needs root")
REPOSITORY = Path(image.__file__).resolve().parent.parent


def copy_inputs(to: Path) -> Path:
    for name in ("ami", "requirements", "rehearsal/neuron"):
        shutil.copytree(REPOSITORY / name, to / name)
    return to


def test_the_key_follows_every_input(tmp_path: Path) -> None:
    repository = copy_inputs(tmp_path / "repository")
    before = {variant: image_key(variant, repository) for variant in ("stock", "baked")}  # type: ignore[arg-type]
    assert before["stock"] != before["baked"]
    assert before["stock"] == image_key("stock", repository) == image_key("stock")
    for name in (
        "ami/stock-dlami-emulated.yml",
        "requirements/engine-cpu.lock",
        "rehearsal/neuron/neuron-ls",
    ):
        path = repository / name
        kept = path.read_text()
        path.write_text(kept + "\n")
        assert image_key("stock", repository) != before["stock"], name
        path.write_text(kept)
    (repository / "ami/neuronfleet-host.yml").write_text("changed")
    assert image_key("stock", repository) == before["stock"]
    assert image_key("baked", repository) != before["baked"]


def test_two_callers_build_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builds = []

    def build(building: Path, variant: str, steps: object) -> None:
        builds.append(variant)
        time.sleep(0.3)
        (building / "image.json").write_text(json.dumps({"mirror_uri": "http://mirror.test/debian"}))

    monkeypatch.setattr(image, "_build", build)
    found: list[image.RootImage] = []
    callers = [threading.Thread(target=lambda: found.append(ensure_image(tmp_path))) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(10)
    assert builds == ["stock"] and len(found) == 2 and found[0] == found[1] == find_image(tmp_path)
    assert found[0].trusted_apt_source == "deb [trusted=yes] http://mirror.test/debian bookworm main"


@pytest.mark.parametrize("error", [RehearsalError("a step failed"), KeyboardInterrupt()])
def test_a_build_that_ends_early_leaves_no_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def build(building: Path, variant: str, steps: object) -> None:
        (building / "root/half").write_text("half")
        raise error

    monkeypatch.setattr(image, "_build", build)
    with pytest.raises(type(error)):
        ensure_image(tmp_path)
    assert find_image(tmp_path) is None
    assert {path.name for path in (tmp_path / "image").iterdir()} == {".lock", "build-stock.log"}


def test_a_new_image_replaces_older_ones_that_no_machine_lies_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(building: Path, variant: str, steps: object) -> None:
        (building / "image.json").write_text("{}")

    monkeypatch.setattr(image, "_build", build)
    for name in ("stock-old", "stock-used", "baked-old", ".building-left"):
        (tmp_path / "image" / name / "root").mkdir(parents=True)
    (tmp_path / "machines/i-1").mkdir(parents=True)
    (tmp_path / "machines/i-1/image").write_text("stock-used\n")
    made = ensure_image(tmp_path)
    left = {path.name for path in (tmp_path / "image").iterdir() if path.is_dir()}
    assert left == {"stock-used", "baked-old", made.folder.name}


@needs_root
def test_a_failed_step_names_itself_its_reason_and_its_log(tmp_path: Path) -> None:
    log_path = tmp_path / "build.log"
    said: list[str] = []
    with log_path.open("w") as log:
        steps = image._Steps(log, log_path, said.append)
        steps.run("a good step", ["true"], timeout_s=5)
        with pytest.raises(RehearsalError) as caught:
            steps.run("EngineVenv", ["sh", "-c", "echo no space left; exit 3"], timeout_s=5, attempts=2)
        with pytest.raises(RehearsalError, match="took longer than 0 s"):
            steps.run("slow", ["sleep", "30"], timeout_s=0.2)
        with pytest.raises(RehearsalError, match="not installed"):
            steps.run("absent", ["no-such-program-here"], timeout_s=5)
    for part in ("'EngineVenv'", "exit code 3", "no space left", str(log_path)):
        assert part in str(caught.value)
    assert log_path.read_text().count("=== EngineVenv") == 2 and said[0] == "a good step"


@needs_root
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_step_ends_with_the_process_that_builds(tmp_path: Path, number: int) -> None:
    """As Ctrl-C or kill in ``make up``: a step has a session of its own, so the terminal does not end it."""
    program = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[1]); from rehearsal import image\n"
        "log = pathlib.Path(sys.argv[2]); steps = image._Steps(log.open('w'), log, print)\n"
        "steps.run('slow', ['sh', '-c', 'echo started; sleep 60; true', sys.argv[2]], timeout_s=60)\n"
    )
    log = tmp_path / "log"
    argv = [sys.executable, "-c", program, str(REPOSITORY), str(log)]
    child = subprocess.Popen(argv, stderr=subprocess.DEVNULL)

    def running() -> list[str]:
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if str(log).encode() in path.read_bytes():
                    found.append(path.parent.name)
        return found

    wait_for(lambda: log.exists() and "started\n" in log.read_text())
    assert len(running()) > 1
    child.send_signal(number)
    child.wait(20)
    wait_for(lambda: not running())


def wait_for(what: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.05)


def test_the_mirror_is_what_the_images_apt_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, debs = tmp_path / "root", tmp_path / "debs"
    (root / "etc/apt").mkdir(parents=True)
    (root / "etc/apt/sources.list").write_text(
        "deb http://mirror.test/debian-security bookworm-security main\n"
        "deb [arch=amd64] https://mirror.test/debian/ bookworm main\n"
    )
    debs.mkdir()
    (debs / "numactl_2.0.16-1_amd64.deb").write_bytes(b"numactl")
    index = "".join(f"Package: {name}\n\n" for name in mirror.PACKAGES)
    monkeypatch.setattr(mirror, "run", lambda argv, what: "amd64\n" if "dpkg" in argv[0] else index)
    uri = mirror.make(debs, tmp_path / "mirror", root, "bookworm")
    assert uri == "http://mirror.test/debian"
    suite = tmp_path / "mirror/debian/dists/bookworm"
    packages = (suite / "main/binary-amd64/Packages").read_bytes()
    assert hashlib.sha256(packages).hexdigest() in (suite / "Release").read_text()
    assert (tmp_path / "mirror/debian/pool/main/numactl_2.0.16-1_amd64.deb").exists()
    monkeypatch.setattr(mirror, "run", lambda argv, what: "")
    with pytest.raises(RehearsalError, match="misses some of numactl"):
        mirror.make(debs, tmp_path / "again", root, "bookworm")


def test_sources_of_another_release_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (
        "http://m.test/debian/ {0} oldstable {0} main\nhttp://m.test/debian/ {0}-updates x {0}-updates main\n"
    )

    def shown(release: str) -> None:
        done = subprocess.CompletedProcess([], 0, stdout=lines.format(release), stderr="")
        monkeypatch.setattr(mirror.subprocess, "run", lambda *_, **__: done)

    shown("bookworm")
    assert mirror.host_sources("bookworm") == [
        "deb http://m.test/debian/ bookworm main",
        "deb http://m.test/debian/ bookworm-updates main",
    ]
    shown("noble")
    assert mirror.host_sources("bookworm") == []


def test_wheels_folder_is_the_first_that_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", f"https://wheels.test/ {tmp_path}")
    assert image._wheels() == tmp_path
    monkeypatch.delenv("PIP_FIND_LINKS")
    assert image._wheels() is None
