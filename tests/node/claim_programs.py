"""Programs that the claim tests run as processes of their own: ``python -m tests.node.claim_programs``."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from app.node.claim import CLAIM_VARIABLE, ClaimError, claim_block
from app.node.topology import load_plan


def say(line: str) -> None:
    """One write, so that lines of several processes never mix."""
    os.write(1, f"{line}\n".encode())


def sleep_forever() -> None:
    say("ready")
    time.sleep(600)


def spawn_then_sleep(depth: int) -> None:
    """A spawned process that spawns again, ``depth`` times."""
    if depth:
        process = multiprocessing.get_context("spawn").Process(target=spawn_then_sleep, args=(depth - 1,))
        process.start()
        say(f"child {process.pid}")
    sleep_forever()


def hold(folder: str, how: str) -> None:
    """Claim a block, start a child in the given way, print both pids, and wait to be killed."""
    claim = claim_block(Path(folder) / "topology.json", Path(folder) / "claims", raylet=0, timeout_s=5)
    say(f"claimed {json.dumps(claim.cores)} {os.getpid()}")
    if how.endswith("-unmarked"):
        del os.environ[CLAIM_VARIABLE]
    kind = how.removesuffix("-unmarked")
    if kind == "fork":
        pid = os.fork()
        if not pid:
            sleep_forever()
        say(f"child {pid}")
    elif kind == "spawn":
        process = multiprocessing.get_context("spawn").Process(target=sleep_forever)
        process.start()
        say(f"child {process.pid}")
    elif kind == "spawn-twice":
        process = multiprocessing.get_context("spawn").Process(target=spawn_then_sleep, args=(1,))
        process.start()
        say(f"child {process.pid}")
    elif kind == "subprocess":
        child = subprocess.Popen(
            [sys.executable, "-c", "import os; os.write(1, b'ready\\n'); import time; time.sleep(600)"]
        )
        say(f"child {child.pid}")
    else:
        say("ready")
    time.sleep(600)


def churn(folder: str, claims: str, seed: str) -> None:
    """Claim blocks from many processes that end, are killed, or leave an engine behind; log who held what.

    Each line of the log is JSON: ``[pid, cores, claimed, released]``, times of the machine's one monotonic
    clock. ``claimed`` is read after the lock was taken and ``released`` before it was given up (or before the
    killing signal was sent), so the intervals never overlap unless a core had two owners.
    """
    chance = random.Random(int(seed))
    wanted, plan = int(claims), load_plan(Path(folder) / "topology.json")
    log = os.open(Path(folder) / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    started = refused = 0
    running: dict[int, float] = {}  # pid to the time of its end, 0 if it ends by itself
    failed: dict[int, int] = {}
    while started < wanted or running:
        while started < wanted and len(running) < len(plan.blocks) + 2:
            raylet = chance.randrange(len(plan.raylets))
            fate = chance.choice(["end", "end", "killed", "orphan"])
            seconds = chance.uniform(0, 0.01)
            pid = os.fork()
            if not pid:
                os._exit(_one_claim(folder, raylet, fate, seconds, log))
            started += 1
            running[pid] = time.monotonic() + seconds + 0.02 if fate == "killed" else 0.0
        for pid, kill_at in list(running.items()):
            if kill_at and time.monotonic() > kill_at:
                os.write(log, f"{json.dumps(['killed', pid, time.monotonic()])}\n".encode())
                os.kill(pid, signal.SIGKILL)
                running[pid] = 0.0
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if pid:
            del running[pid]
            code = os.waitstatus_to_exitcode(status)
            if code == 3:
                refused += 1
            elif code not in (0, -signal.SIGKILL):
                failed[pid] = code
        else:
            time.sleep(0.0005)
    print(json.dumps({"started": started, "refused": refused, "failed": failed}), flush=True)


def _one_claim(folder: str, raylet: int, fate: str, seconds: float, log: int) -> int:
    try:
        claim = claim_block(
            Path(folder) / "topology.json", Path(folder) / "claims", raylet=raylet, timeout_s=0.5
        )
    except ClaimError:
        return 3
    claimed = time.monotonic()
    pid = os.getpid()
    right = os.environ["NEURON_RT_VISIBLE_CORES"] == ",".join(str(core) for core in claim.cores)
    os.write(log, f"{json.dumps(['claimed', pid, raylet, claim.cores, claimed, right])}\n".encode())
    if fate == "orphan" and os.fork() == 0:  # an engine that outlives its replica
        time.sleep(seconds)
        os.write(log, f"{json.dumps(['released', pid, time.monotonic()])}\n".encode())
        os._exit(0)
    if fate == "orphan":
        os.kill(pid, signal.SIGKILL)
    if fate == "killed":
        time.sleep(60)
    time.sleep(seconds)
    os.write(log, f"{json.dumps(['released', pid, time.monotonic()])}\n".encode())
    claim.release()
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "hold":
        hold(*sys.argv[2:])
    else:
        churn(*sys.argv[2:])
