"""``neuronfleet topology``: from a file it reads nothing of this host; JSON, picture, and errors."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from app.node.claim import claim_block
from app.node.topology import TOPOLOGY_PATH, commands, plan_topology, write_plan
from app.node.topology.host import host_of_output
from app.node.topology.live import replica_bindings
from tests.unit.topology_trees import emulated_output

app = typer.Typer()
commands.register(app)
app.command("other")(lambda: None)  # with two commands, the first keeps its name


def topology(*arguments: str, text: str | None = None) -> Any:
    return CliRunner().invoke(app, ["topology", *arguments], input=text)


@pytest.fixture
def inf2_48xlarge(tmp_path: Path) -> Path:
    path = tmp_path / "neuron-ls.json"
    path.write_text(emulated_output(tmp_path, "inf2.48xlarge"))
    return path


def test_json_has_the_documented_keys(inf2_48xlarge: Path) -> None:
    done = topology("--neuron-ls", str(inf2_48xlarge), "--tp-degree", "8", "--json")
    assert done.exit_code == 0
    plan = json.loads(done.stdout)
    assert [(b["cores"], b["devices"], b["numa_nodes"]) for b in plan["blocks"]] == [
        (list(range(8)), [0, 1, 2, 3], [2, 3]),
        (list(range(8, 16)), [4, 5, 6, 7], [1, 2, 3]),
        (list(range(16, 24)), [8, 9, 10, 11], [0, 1]),
    ]
    assert [(r["numa_nodes"], r["cores"], r["cpus"], r["blocks"]) for r in plan["raylets"]] == [
        ([2, 3], list(range(8)), 64, [0]),
        ([1, 2, 3], list(range(8, 16)), 64, [1]),
        ([0, 1], list(range(16, 24)), 64, [2]),
    ]
    assert plan["idle_cores"] == []


@pytest.mark.parametrize("degree", ["1", "2", "4", "8", "12", "24"])
def test_the_picture_shows_every_device_and_block(inf2_48xlarge: Path, degree: str) -> None:
    done = topology("--neuron-ls", str(inf2_48xlarge), "--tp-degree", degree)
    assert done.exit_code == 0
    for words in ("NUMA node 0", "NUMA node 3", "device 11", "CPUs 48-71,144-167", "Raylets", "crosses"):
        assert words in done.stdout
    assert ("yes, 3 nodes" in done.stdout) == (degree == "8")


def test_idle_cores_and_unknown_nodes_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "neuron-ls.json"
    path.write_text(emulated_output(tmp_path, "inf2.24xlarge"))
    done = topology("--neuron-ls", str(path), "--tp-degree", "8")
    assert "cores 8-11 belong to no block" in done.stdout
    assert "NUMA node unknown" in done.stdout and "not bound" in done.stdout
    assert "warning:" in done.stdout


def test_standard_input_is_read_and_nothing_of_this_host(tmp_path: Path) -> None:
    text = emulated_output(tmp_path, "inf2.48xlarge")
    opened: list[str] = []
    watching = True

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if watching and event in ("open", "os.listdir", "os.scandir", "subprocess.Popen"):
            opened.append(str(arguments[0]))

    sys.addaudithook(watch)
    try:
        done = topology("--neuron-ls", "-", "--tp-degree", "2", "--json", text=text)
    finally:
        watching = False
    assert len(json.loads(done.stdout)["raylets"]) == 4
    assert [path for path in opened if path.startswith(("/sys", "/proc", "/dev/", "/run", "/opt/aws"))] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tp-degree", "3"], "degree 3 does not fit"),
        (["--tp-degree", "48"], "this host has 24 NeuronCores"),
        (["--tp-degree", "0"], "not a count of cores"),
        ([], "needs --tp-degree"),
    ],
)
def test_a_degree_that_does_not_fit_ends_with_1(
    inf2_48xlarge: Path, arguments: list[str], words: str
) -> None:
    done = topology("--neuron-ls", str(inf2_48xlarge), *arguments)
    assert done.exit_code == 1 and words in done.stderr and done.stdout == ""


@pytest.mark.parametrize("content", ["", "garbage", "{}", "[]", "[1]"])
def test_a_file_that_is_no_output_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "neuron-ls.json"
    path.write_text(content)
    done = topology("--neuron-ls", str(path), "--tp-degree", "2", "--json")
    assert done.exit_code == 1 and "topology: " in done.stderr
    assert json.loads(done.stdout)["problems"]


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = topology("--neuron-ls", str(tmp_path / "nowhere"), "--tp-degree", "2")
    assert done.exit_code == 1 and "nowhere cannot be read" in done.stderr


def test_eleven_devices_are_refused_unless_degraded(tmp_path: Path) -> None:
    path = tmp_path / "neuron-ls.json"
    path.write_text(emulated_output(tmp_path, "inf2.48xlarge", missing_devices=[5]))
    done = topology("--neuron-ls", str(path), "--tp-degree", "8")
    assert done.exit_code == 1 and "device 5 is missing or dead" in done.stderr
    done = topology("--neuron-ls", str(path), "--tp-degree", "8", "--degraded", "--json")
    assert done.exit_code == 0
    plan = json.loads(done.stdout)
    assert len(plan["blocks"]) == 2 and "device 5" in plan["warnings"][0]


def test_a_last_device_that_is_missing_is_known_by_its_links(tmp_path: Path) -> None:
    path = tmp_path / "neuron-ls.json"
    path.write_text(emulated_output(tmp_path, "inf2.48xlarge", missing_devices=[11]))
    done = topology("--neuron-ls", str(path), "--tp-degree", "8")
    assert done.exit_code == 1
    assert "NeuronLink joins device 11 to others): device 11 is missing or dead" in done.stderr


@pytest.mark.parametrize("text", ["no JSON", "[null]", "[" * 200_000], ids=["text", "null", "deep"])
def test_garbage_is_named_also_where_a_degraded_plan_is_allowed(text: str) -> None:
    for more in ((), ("--degraded",)):
        done = topology("--neuron-ls", "-", "--tp-degree", "8", "--json", *more, text=text)
        assert done.exit_code == 1
        assert json.loads(done.stdout)["problems"][0]["kind"] == "neuron-ls-output"


def test_brackets_from_the_tool_are_shown_as_they_are(tmp_path: Path) -> None:
    listed = json.loads(emulated_output(tmp_path, "inf2.48xlarge"))
    listed[2]["neuron_processes"] = [{"pid": 77, "command": "[/old]"}]
    for device in listed:
        device["instance_type"] = "[/odd]"
    done = topology("--neuron-ls", "-", "--tp-degree", "2", "--degraded", text=json.dumps(listed))
    assert done.exit_code == 0
    assert "[/odd]: 24 NeuronCores" in done.stdout and "process 77 ([/old])" in " ".join(done.stdout.split())


@pytest.mark.skipif(TOPOLOGY_PATH.exists(), reason=f"this machine is a fleet's host: it has {TOPOLOGY_PATH}")
def test_elsewhere_than_on_a_host_the_way_out_is_said() -> None:
    done = topology()
    assert done.exit_code == 1 and "--neuron-ls FILE --tp-degree N" in done.stderr


def test_on_a_host_the_boots_plan_is_shown_with_who_holds_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = emulated_output(tmp_path, "inf2.24xlarge", numa_nodes=[901] * 3 + [902] * 3)
    plan = plan_topology(host_of_output(text), 2)
    write_plan(plan, tmp_path / "topology.json")
    monkeypatch.setattr(commands, "TOPOLOGY_PATH", tmp_path / "topology.json")
    monkeypatch.setattr(commands, "NEURON_LS", str(tmp_path / "nowhere"))
    assert "No block is claimed now." in topology().stdout
    with claim_block(tmp_path / "topology.json", tmp_path / "claims", 1, bind=False) as held:
        monkeypatch.setattr(
            commands, "replica_bindings", lambda plan: replica_bindings(plan, tmp_path / "claims")
        )
        shown = " ".join(topology().stdout.split())
    assert f"block {held.block.index} (raylet 1): process {os.getpid()}" in shown
    assert "which this kernel does not have" in shown
