"""A replica's claim on a core block: one owner, freed by the kernel when the last possible holder is gone.

The claim is an open-file-description lock on the bytes of one file that stand for the block's core ids, so
blocks that overlap can never be owned twice, whatever plan they come from. Such a lock lives until every
descriptor of that open file is closed. The descriptor is passed on to every process that the replica makes by
fork or through multiprocessing (vLLM's engine core outlives a killed parent: vllm issue 55510), so cores are
not offered while a process may still hold them. A descendant that was started otherwise is known by a mark in
its environment.

Claiming also sets NEURON_RT_VISIBLE_CORES and the CPU affinity of the whole process, so it comes before the
Neuron runtime is loaded. The memory policy cannot be set from here: it is the raylet's, set by numactl at
exec.
"""

from __future__ import annotations

import errno
import fcntl
import multiprocessing.util
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.node.topology.blocks import contiguous
from app.node.topology.idlist import format_idlist, parse_idlist
from app.node.topology.model import TOPOLOGY_PATH, Block, TopologyPlan, load_plan

LOCK_DIR = Path("/run/neuronfleet/claims")
LOCK_FILE = "cores.lock"
RAYLET_VARIABLE = "NEURONFLEET_RAYLET"
CLAIM_VARIABLE = "NEURONFLEET_CLAIM"
VISIBLE_CORES = "NEURON_RT_VISIBLE_CORES"

_RECORD = 32
"""Bytes of a core's record behind the lock range: the owner's pid, to name it; never trusted as a lock."""
_RECORDS_AT = 4096
_POLL_S = 0.1


class ClaimError(RuntimeError):
    """No block could be claimed, or the block cannot be used; the message says what holds it or is wrong."""


@dataclass
class Claim:
    """A block that this process owns until ``release``, or until it and its children are gone."""

    block: Block
    raylet: int
    fd: int
    lock_path: Path

    @property
    def cores(self) -> tuple[int, ...]:
        return self.block.cores

    def release(self) -> None:
        """Close this process's descriptor. Children that have it keep the block until they end."""
        if self.fd >= 0:
            _inherited.discard(self.fd)
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def claim_block(
    plan_path: Path = TOPOLOGY_PATH,
    lock_dir: Path = LOCK_DIR,
    raylet: int | None = None,
    *,
    timeout_s: float = 60.0,
    bind: bool = True,
    root: Path = Path("/"),
) -> Claim:
    """Claim one free block of this process's raylet, and bind this process to it.

    Args:
        plan_path: the plan that boot wrote.
        lock_dir: folder of the lock file; it must be the same for all replicas of the host.
        raylet: index of the raylet; None: what the raylet's unit says (``NEURONFLEET_RAYLET``), or the plan's
            only raylet.
        timeout_s: seconds to wait for a block to become free, such as for an engine that is still ending.
        bind: set NEURON_RT_VISIBLE_CORES and the CPU affinity of this process.
        root: folder in place of ``/`` for /sys and /dev.

    Raises:
        ClaimError: no block came free in time (it names who holds each), the block is not whole, the raylet
        is
            not in the plan, or the Neuron runtime is loaded already.
        TopologyError: there is no readable plan.
    """
    plan = load_plan(plan_path)
    index = _raylet_index(plan, raylet)
    blocks = [plan.blocks[number] for number in plan.raylets[index].blocks]
    if not blocks:
        raise ClaimError(f"raylet {index} of the plan has no block: nothing that needs cores can run here")
    if bind:
        _refuse_loaded_runtime()
    for block in blocks:
        _refuse_broken(block, plan, root)
    lock_path = lock_dir / LOCK_FILE
    deadline = time.monotonic() + timeout_s
    while True:
        for block in blocks:
            fd = _try_lock(lock_path, block)
            if fd is None:
                continue
            claim = Claim(block=block, raylet=index, fd=fd, lock_path=lock_path)
            try:
                _pass_on(fd)
                if bind:
                    _bind(block, lock_path, root)
            except BaseException:
                claim.release()
                raise
            return claim
        if time.monotonic() >= deadline:
            held = "; ".join(_held_by(lock_path, block) for block in blocks)
            raise ClaimError(
                f"no block of raylet {index} came free within {timeout_s:g} s: {held}. "
                "End the processes that are stale, or restart this raylet's unit, which ends all of them."
            )
        time.sleep(_POLL_S)


def _raylet_index(plan: TopologyPlan, hint: int | None) -> int:
    text = os.environ.get(RAYLET_VARIABLE, "")
    if hint is None and text:
        if not text.isdigit():
            raise ClaimError(f"{RAYLET_VARIABLE} is {text!r}, not the index of a raylet")
        hint = int(text)
    if hint is None:
        if len(plan.raylets) != 1:
            raise ClaimError(
                f"the plan has {len(plan.raylets)} raylets and {RAYLET_VARIABLE} is not set: "
                "this process does not run under a raylet's unit, so its blocks are unknown"
            )
        hint = 0
    if not 0 <= hint < len(plan.raylets):
        raise ClaimError(f"raylet {hint} is not in the plan, which has raylets 0-{len(plan.raylets) - 1}")
    return hint


def _refuse_broken(block: Block, plan: TopologyPlan, root: Path) -> None:
    cores = format_idlist(block.cores)
    if len(block.cores) != plan.tp_degree or not contiguous(block.cores):
        raise ClaimError(
            f"block {block.index} is not whole: cores {list(block.cores)} are not {plan.tp_degree} "
            "contiguous, ascending ids, which the Neuron runtime needs"
        )
    others = {core for other in plan.blocks if other.index != block.index for core in other.cores}
    if others & set(block.cores):
        raise ClaimError(
            f"block {block.index} is not whole: cores {cores} are in another block of the plan too"
        )
    nodes = {path.name for path in (root / "dev").glob("neuron[0-9]*")}
    missing = [device for device in block.devices if nodes and f"neuron{device}" not in nodes]
    if missing:
        raise ClaimError(
            f"block {block.index} is not whole: /dev/neuron{format_idlist(missing)} is gone since boot. "
            "Look at dmesg, then replace the instance."
        )


def _refuse_loaded_runtime() -> None:
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return
    if "libnrt.so" in maps:
        raise ClaimError(
            "the Neuron runtime (libnrt.so) is loaded already: cores must be claimed before the engine is "
            "imported"
        )


def _flock_struct(kind: int, block: Block) -> bytes:
    # struct flock: type, whence, start, length, pid (0 for open-file-description locks)
    return struct.pack("@hhqqi4x", kind, os.SEEK_SET, block.cores[0], len(block.cores), 0)


def _try_lock(lock_path: Path, block: Block) -> int | None:
    """A descriptor that holds the block's lock, or None if somebody else has it."""
    try:
        lock_path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o660)
    except OSError as error:
        raise ClaimError(
            f"the lock file {lock_path} cannot be opened ({error.strerror}): the folder must be writable for "
            "this user (install.sh makes it)"
        ) from error
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock_struct(fcntl.F_WRLCK, block))
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return None
        raise ClaimError(f"the lock file {lock_path} cannot be locked: {error.strerror}") from error
    if marked_processes(lock_path, block.cores):
        os.close(fd)
        return None
    os.pwrite(fd, str(os.getpid()).encode().ljust(_RECORD), _RECORDS_AT + block.cores[0] * _RECORD)
    return fd


def claim_owner(lock_path: Path, block: Block) -> int | None:
    """The pid that last claimed the block, if the block is held now; for status, not for locking."""
    try:
        fd = os.open(lock_path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _flock_struct(fcntl.F_WRLCK, block))
        if struct.unpack("@hhqqi4x", answer)[0] == fcntl.F_UNLCK:
            return None
        text = os.pread(fd, _RECORD, _RECORDS_AT + block.cores[0] * _RECORD).strip(b"\0 ")
        return int(text) if text.isdigit() else None
    finally:
        os.close(fd)


def _held_by(lock_path: Path, block: Block) -> str:
    cores = format_idlist(block.cores)
    pids = marked_processes(lock_path, block.cores)
    owner = claim_owner(lock_path, block)
    if owner is not None:
        if Path(f"/proc/{owner}").exists():
            pids = sorted({owner, *pids})
        elif not pids:
            return f"cores {cores} are held by a child of process {owner}, which is gone"
    if not pids:
        return f"cores {cores} were held a moment ago"
    named = ", ".join(f"{pid} ({_command(pid)})" for pid in pids)
    return f"cores {cores} are held by process {named}"


def _command(pid: int) -> str:
    try:
        return (
            Path(f"/proc/{pid}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode(errors="replace")[:60]
            .strip()
        )
    except OSError:
        return "ended"


def marked_processes(lock_path: Path, cores: Iterable[int]) -> list[int]:
    """Other processes that were started with the mark of a claim on one of these cores."""
    wanted = set(cores)
    mark = f"{CLAIM_VARIABLE}={lock_path}#".encode()
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry.name}/environ", "rb", buffering=0) as file:  # noqa: PTH123 - hot path
                environ = file.readall()
        except OSError:  # ended, or another user's
            continue
        at = environ.find(mark)
        if at < 0 or (at and environ[at - 1] != 0):
            continue
        text = environ[at + len(mark) :].split(b"\0", 1)[0].decode(errors="replace")
        try:
            if wanted & set(parse_idlist(text)):
                found.append(int(entry.name))
        except ValueError:
            continue
    return sorted(found)


def _bind(block: Block, lock_path: Path, root: Path) -> None:
    cpus: set[int] = set()
    for node in block.numa_nodes:
        try:
            cpus |= set(parse_idlist((root / f"sys/devices/system/node/node{node}/cpulist").read_text()))
        except OSError as error:
            raise ClaimError(
                f"block {block.index} is on NUMA node {node}, which this kernel does not have: the plan is "
                "of another host or boot. Restart neuronfleet-configure."
            ) from error
    allowed = os.sched_getaffinity(0)
    if cpus:
        if not cpus & allowed:
            raise ClaimError(
                f"block {block.index} is on CPUs {format_idlist(cpus)}, and this process may use "
                f"{format_idlist(allowed)} only: its raylet is bound to other nodes than the plan says"
            )
        for thread in Path("/proc/self/task").iterdir():
            try:
                os.sched_setaffinity(int(thread.name), cpus & allowed)
            except ProcessLookupError:  # a thread that has just ended
                continue
    os.environ[VISIBLE_CORES] = ",".join(str(core) for core in block.cores)
    os.environ[CLAIM_VARIABLE] = f"{lock_path}#{format_idlist(block.cores)}"


_inherited: set[int] = set()
_hook_lock = threading.Lock()
_spawn_hooked = False


def _pass_on(fd: int) -> None:
    """Let children have the descriptor: by exec, by fork, and through multiprocessing's spawn.

    Spawn closes every descriptor that it is not told of, so the function it starts processes with is wrapped.
    """
    global _spawn_hooked
    os.set_inheritable(fd, True)
    _inherited.add(fd)
    with _hook_lock:
        if not _spawn_hooked:
            multiprocessing.util.spawnv_passfds = _with_inherited(multiprocessing.util.spawnv_passfds)
            _spawn_hooked = True


def _with_inherited(spawn: Callable[..., int]) -> Callable[..., int]:
    def spawnv_passfds(path: Any, args: Any, passfds: Iterable[int]) -> int:
        return spawn(path, args, sorted({*passfds, *_inherited}))

    return spawnv_passfds
