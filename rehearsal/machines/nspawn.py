"""One systemd-nspawn machine per EC2 instance, over an overlay of the image's root.

A machine is a folder of the home (``machines/<instance id>``: its writable layer, its process record, its
spec), a control group, and a process tree that holds its mounts in a mount namespace of its own: when the
process is gone, so are overlay, veth and namespaces. Nothing of it is in the memory of the daemon alone, so a
later daemon finds, adopts and removes what an earlier one left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rehearsal import processes
from rehearsal.image import RootImage
from rehearsal.interfaces import MachineSpec, MachineState, RehearsalError
from rehearsal.machines import cgroups
from rehearsal.machines.files import lay_down, machine_files

STOP_GRACE_S = 120.0
"""How long a terminated instance may take to shut down, in seconds, before it is powered off."""
REMOVE_GRACE_S = 8.0
"""The same for ``remove_all``, where nothing is left to be told."""
_RUN = Path("/run/systemd/nspawn")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# Enters the machine's control groups, mounts the overlay in a mount namespace of its own, becomes nspawn.
# The overlay is volatile: a machine's disk need not survive this machine's power failure, so no sync is paid.
_LAUNCH = """\
set -e
overlay=$1 root=$2
shift 2
while [ "$1" != -- ]; do
  echo $$ >"$1"
  shift
done
shift
mount -t overlay neuronfleet -o "$overlay" "$root"
exec "$@"
"""


class NspawnMachines:
    """Implements :class:`rehearsal.interfaces.Machines`.

    Args:
        home: the rehearsal's home.
        bridge: the bridge that machines are attached to.
        image: gives the image root for an AMI id; called at each start (it is cached).
        authority: the rehearsal's CA certificate, which machines trust.
    """

    def __init__(
        self, home: Path, bridge: str, image: Callable[[str], RootImage], authority: Callable[[], Path]
    ) -> None:
        self._folder = home / "machines"
        self._consoles = home / "consoles"
        self._bridge = bridge
        self._image = image
        self._authority = authority
        self._lock = threading.Lock()
        self._stopping: dict[str, threading.Thread] = {}

    def start(self, spec: MachineSpec) -> None:
        """See the interface.

        Raises:
            RehearsalError: no image, a program is missing, or a file cannot be written.
        """
        if (self._folder / spec.instance_id / "process").exists():
            return
        self._clear(spec.instance_id)
        try:
            self._launch(spec)
        except OSError as error:
            raise RehearsalError(f"cannot start the machine of {spec.instance_id}: {error}") from error

    def _launch(self, spec: MachineSpec) -> None:
        home = self._folder / spec.instance_id
        image = self._image(spec.image_id)
        upper, root = home / "upper", home / "root"
        for path in (upper, home / "work", root):
            path.mkdir(parents=True)
        home.chmod(0o700)
        for path in (upper, root):
            path.chmod(0o755)
        (home / "image").write_text(image.folder.name + "\n")
        (home / "spec.json").write_text(json.dumps(dataclasses.asdict(spec), indent=1))
        lay_down(
            machine_files(spec, self._authority().read_bytes(), image.ca_store, image.trusted_apt_source),
            upper,
        )
        overlay = f"lowerdir={image.root},upperdir={upper},workdir={home / 'work'},volatile"
        entries = [str(entry) for entry in cgroups.create(self._bridge, spec.instance_id)]
        launch = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _LAUNCH, "machine"]
        argv = [*launch, overlay, str(root), *entries, "--", *self._nspawn(spec, root)]
        console = self.console(spec.instance_id)
        console.unlink(missing_ok=True)
        # A console of plain lines: no colour, nothing of the environment of whoever ran `make up`.
        environment = {"TERM": "dumb", "PATH": _PATH, "LANG": "C.UTF-8"}
        processes.spawn(argv, home / "process", console, environment=environment)

    def _nspawn(self, spec: MachineSpec, root: Path) -> list[str]:
        return [
            "systemd-nspawn",
            "--quiet",
            "--boot",
            "--settings=no",
            "--register=no",
            "--keep-unit",
            f"--machine={spec.instance_id}",
            f"--hostname={spec.hostname.split('.')[0]}",
            f"--directory={root}",
            f"--network-bridge={self._bridge}",
            "--resolv-conf=off",
            "--timezone=off",
            "--link-journal=no",
            "--console=read-only",
            # Half of the memory, as on a host that is no container: Ray's object store lives here.
            "--tmpfs=/dev/shm:mode=1777,size=50%",
        ]

    def stop(self, instance_id: str) -> None:
        """See the interface."""
        self._begin_stop(instance_id, STOP_GRACE_S)

    def states(self) -> dict[str, MachineState]:
        """See the interface."""
        found: dict[str, MachineState] = {}
        with self._lock:
            stopping = {name for name, thread in self._stopping.items() if thread.is_alive()}
        if not self._folder.is_dir():
            return found
        for home in self._folder.iterdir():
            if home.name in stopping:
                found[home.name] = MachineState.STOPPING
                continue
            process = processes.recorded(home / "process")
            if process is None:
                if home.is_dir():
                    found[home.name] = MachineState.DEAD
            elif self.leader(home.name) is None:
                found[home.name] = MachineState.STARTING
            else:
                found[home.name] = MachineState.RUNNING
        return found

    def console(self, instance_id: str) -> Path:
        """See the interface."""
        return self._consoles / f"{instance_id}.log"

    def leader(self, instance_id: str) -> int | None:
        """Process id, on this machine, of the machine's own process 1; None while there is none."""
        process = processes.recorded(self._folder / instance_id / "process")
        if process is None:
            return None
        try:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            for child in children:
                if Path(f"/proc/{child}/comm").read_text().strip() == "systemd":
                    return int(child)
        except (FileNotFoundError, ProcessLookupError):
            pass
        return None

    def run(
        self, instance_id: str, argv: Sequence[str], *, timeout_s: float = 60.0, input_text: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a machine as root, as Systems Manager's Run Command would; output as text.

        Raises:
            RehearsalError: no such machine runs.
            subprocess.TimeoutExpired: the command took longer.
        """
        leader = self.leader(instance_id)
        if leader is None:
            raise RehearsalError(f"{instance_id} is not running; its console: {self.console(instance_id)}")
        groups = [str(entry) for entry in cgroups.create(self._bridge, instance_id)]
        enter = ["sh", "-c", 'while [ "$1" != -- ]; do echo $$ >"$1" || true; shift; done; shift; exec "$@"']
        clean = ["env", "-i", "HOME=/root", "LANG=C.UTF-8", "TERM=dumb", f"PATH={_PATH}"]
        # The machine's own `timeout` ends the command there: ending nsenter here would leave it running.
        limit = ["timeout", "--kill-after=2", f"{timeout_s:.3f}"]
        started = time.monotonic()
        done = subprocess.run(
            [
                *enter,
                "run",
                *groups,
                "--",
                "nsenter",
                "--target",
                str(leader),
                "--all",
                *clean,
                *limit,
                *argv,
            ],
            capture_output=True,
            text=True,
            timeout=timeout_s + 10,
            input=input_text if input_text is not None else "",
            check=False,
        )
        if done.returncode in (124, 137) and time.monotonic() - started >= timeout_s:
            raise subprocess.TimeoutExpired(list(argv), timeout_s, done.stdout, done.stderr)
        return done

    def remove_all(self) -> None:
        """See the interface.

        Raises:
            RehearsalError: a process of a machine could not be killed.
        """
        names = [home.name for home in self._folder.iterdir()] if self._folder.is_dir() else []
        threads = [self._begin_stop(name, REMOVE_GRACE_S) for name in names]
        for thread in threads:
            thread.join()
        left = [name for name in names if (self._folder / name).exists()]
        if left:
            raise RehearsalError(
                f"could not remove {', '.join(left)}: its processes do not end; see {self._folder} and "
                "`neuronfleet logs`, then run `make down` again"
            )
        cgroups.remove(self._bridge)
        with contextlib.suppress(OSError):
            self._folder.rmdir()

    def _begin_stop(self, instance_id: str, grace_s: float) -> threading.Thread:
        with self._lock:
            thread = self._stopping.get(instance_id)
            if thread is None or not thread.is_alive():
                thread = threading.Thread(
                    target=self._stop, args=(instance_id, grace_s), name=f"stop-{instance_id}", daemon=True
                )
                self._stopping[instance_id] = thread
                thread.start()
            elif grace_s < STOP_GRACE_S and (process := self._process(instance_id)):
                # A slow graceful stop is under way and everything is to go now.
                waiter = threading.Timer(grace_s, process.signal, (signal.SIGKILL,))
                waiter.daemon = True
                waiter.start()
        return thread

    def _process(self, instance_id: str) -> processes.ProcessId | None:
        return processes.recorded(self._folder / instance_id / "process")

    def _stop(self, instance_id: str, grace_s: float) -> None:
        process = self._process(instance_id)
        if process is not None:
            # nspawn passes it on to the machine's systemd as "power off".
            process.signal(signal.SIGTERM)
            processes.wait_gone(process, grace_s)
        self._clear(instance_id)

    def _clear(self, instance_id: str) -> None:
        """Remove what is left of a machine: processes, control groups, its layer, nspawn's marks."""
        if not cgroups.kill(self._bridge, instance_id):
            return
        cgroups.remove(self._bridge, instance_id)
        # A socket that still waits for a vanished peer keeps the machine's network namespace, and with it its
        # link, for minutes. The link's full name is an alternative one: it is longer than a link's may be.
        subprocess.run(
            ["ip", "link", "delete", f"vb-{instance_id}"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
        with contextlib.suppress(OSError):
            (_RUN / "propagate" / instance_id).rmdir()
        home = self._folder / instance_id
        if home.exists():
            # The record goes first: without it a half-removed folder is no running machine.
            (home / "process").unlink(missing_ok=True)
            shutil.rmtree(home, ignore_errors=True)
