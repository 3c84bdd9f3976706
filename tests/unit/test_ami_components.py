"""The Image Builder component documents of ``ami/``, and what reads them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rehearsal.component import Component, fill, load_component
from rehearsal.interfaces import RehearsalError

AMI = Path(__file__).resolve().parents[2] / "ami"
DOCUMENTS = sorted(AMI.glob("*.yml"))
# EC2 Image Builder: a component's inline data is at most 16,000 characters.
INLINE_LIMIT = 16_000

WHOLE = """\
name: example
description: An example
schemaVersion: 1.0
parameters:
  - Where: {type: string, default: /opt, description: A folder}
  - Who: {type: string, description: No default}
phases:
  - name: build
    steps:
      - name: Step
        action: ExecuteBash
        inputs: {commands: ['echo {{ Where }} {{Who}} ${HOME}']}
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "example.yml"
    path.write_text(text)
    return path


def commands(component: Component) -> list[str]:
    return [c for phase in component.phases for step in phase.steps for c in step.inputs.commands]


def test_there_are_documents() -> None:
    assert {path.name for path in DOCUMENTS} >= {"stock-dlami-emulated.yml", "neuronfleet-host.yml"}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_documents_are_whole(path: Path) -> None:
    component = load_component(path)
    assert len(path.read_text()) < INLINE_LIMIT
    assert component.phase("build") and component.phase("validate"), "built and then checked"
    values = {**component.defaults()}
    for command in commands(component):
        script = fill(command, values)
        # A step that goes on after a failed line would make a half-built image.
        assert script.startswith("set -euo pipefail"), script
        checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
        assert checked.returncode == 0, checked.stderr


def test_the_stock_document_says_that_it_is_emulated() -> None:
    text = (AMI / "stock-dlami-emulated.yml").read_text()
    assert "EMULATED" in text and "emulated" in load_component(AMI / "stock-dlami-emulated.yml").name


def test_fill_takes_values_then_defaults(tmp_path: Path) -> None:
    component = load_component(write(tmp_path, WHOLE))
    (command,) = commands(component)
    assert fill(command, component.defaults() | {"Who": "me"}) == "echo /opt me ${HOME}"
    with pytest.raises(RehearsalError, match="'Who' has no value"):
        fill(command, component.defaults())


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("schemaVersion: 1.0", "schemaVersion: 2.0", "schemaVersion"),
        ("action: ExecuteBash", "action: Reboot", "action"),
        ("commands: [", "command: [", "commands"),
        ("name: build", "name: prepare", "name"),
        ("{{Who}}", "{{ Whom }}", "build.Step: {{ Whom }}"),
        ("description: An example", "description: [", "not YAML"),
    ],
)
def test_a_wrong_document_is_refused_with_its_place(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in WHOLE
    with pytest.raises(RehearsalError) as caught:
        load_component(write(tmp_path, WHOLE.replace(old, new)))
    assert "example.yml" in str(caught.value) and says in str(caught.value)


def test_every_fault_is_named_at_once(tmp_path: Path) -> None:
    text = WHOLE.replace("schemaVersion: 1.0", "schemaVersion: 3.0").replace("ExecuteBash", "Reboot")
    with pytest.raises(RehearsalError, match=r"schemaVersion.*action"):
        load_component(write(tmp_path, text))
