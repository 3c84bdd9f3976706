"""EC2 Image Builder component documents: read, checked against their schema, parameters filled in.

Schema 1.0 of the AWSTOE document, as far as ``ami/`` uses it: phases of ``ExecuteBash`` steps, and string
parameters that commands name as ``{{ Name }}``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from rehearsal.interfaces import RehearsalError

_REFERENCE = re.compile(r"\{\{\s*([^{}]*?)\s*\}\}")
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_-]{1,127}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ParameterDetail(_Strict):
    """A parameter's type, default and what it means."""

    type: Literal["string"]
    default: str | None = None
    description: str


class Inputs(_Strict):
    """The commands of an ``ExecuteBash`` step."""

    commands: list[str] = Field(min_length=1)


class Step(_Strict):
    """One step; ``timeoutSeconds`` 7200 and one attempt are Image Builder's defaults."""

    name: Name
    action: Literal["ExecuteBash"]
    timeoutSeconds: int = Field(default=7200, ge=1)
    onFailure: Literal["Abort", "Continue", "Ignore"] = "Abort"
    maxAttempts: int = Field(default=1, ge=1, le=10)
    inputs: Inputs


class Phase(_Strict):
    """``build`` and ``validate`` run on the build instance, ``test`` on an instance of the new image."""

    name: Literal["build", "validate", "test"]
    steps: list[Step] = Field(min_length=1)


class Component(_Strict):
    """A whole document."""

    name: Name
    description: str
    schemaVersion: float = Field(ge=1.0, le=1.0)
    parameters: list[dict[Name, ParameterDetail]] = []
    phases: list[Phase] = Field(min_length=1)

    def phase(self, name: str) -> list[Step]:
        """The steps of a phase, none when the document does not have it."""
        return [step for phase in self.phases if phase.name == name for step in phase.steps]

    def defaults(self) -> dict[str, str]:
        """Parameter -> default, of those that have one."""
        return {
            name: detail.default
            for parameter in self.parameters
            for name, detail in parameter.items()
            if detail.default is not None
        }


def load_component(path: Path) -> Component:
    """Read and check a document.

    Raises:
        RehearsalError: every fault of the document, with its place.
    """
    try:
        component = Component.model_validate(yaml.safe_load(path.read_text()))
    except yaml.YAMLError as error:
        raise RehearsalError(f"{path}: not YAML: {error}") from error
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise RehearsalError(f"{path}: not an Image Builder component: {faults}") from error
    declared = {name for parameter in component.parameters for name in parameter}
    unknown = {
        f"{phase.name}.{step.name}: {{{{ {name} }}}}"
        for phase in component.phases
        for step in phase.steps
        for command in step.inputs.commands
        for name in _REFERENCE.findall(command)
        if name not in declared
    }
    if unknown:
        raise RehearsalError(
            f"{path}: names parameters that it does not declare: {', '.join(sorted(unknown))}"
        )
    names = [phase.name for phase in component.phases]
    if len(set(names)) != len(names):
        raise RehearsalError(f"{path}: a phase is there twice: {', '.join(names)}")
    return component


def fill(command: str, values: dict[str, str]) -> str:
    """``command`` with each ``{{ Name }}`` replaced by its value.

    Raises:
        RehearsalError: a parameter has neither a value nor a default.
    """

    def value(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in values:
            raise RehearsalError(f"component parameter {name!r} has no value and no default")
        return values[name]

    return _REFERENCE.sub(value, command)
