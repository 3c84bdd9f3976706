"""An environment's settings: ``infra/environments/<name>.toml`` -> frozen, checked values.

Every mistake of a file and of the command line is reported at once, each with where it was written, its key,
its value and what is allowed. Names of settings are unique across tables, so the command line needs none:
``-c instance_type=inf2.48xlarge``. ``-c rehearsal=true`` applies the file's ``[rehearsal]`` table and changes
nothing else.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_origin

from pydantic import ValidationError

from app.plan.catalogue import UnknownNameError
from app.plan.planner import Plan
from infra.plan_check import AUTO, make_plan, plan_refusals
from infra.settings_checks import contradictions
from infra.settings_model import (
    FOLLOW_PROFILE,
    TABLE_OF,
    TABLES,
    Frozen,
    OperationsSettings,
    PlanSettings,
    Settings,
)

__all__ = [
    "FOLLOW_PROFILE",
    "OperationsSettings",
    "Settings",
    "SettingsError",
    "environment_names",
    "load_settings",
]

ENVIRONMENTS = Path(__file__).resolve().parent / "environments"
DEFAULT_ENVIRONMENT = "dev"

# Context keys that are not settings: which environment, which variant of it, which bundle.
_SELECTORS = frozenset({"env", "rehearsal", "bundle"})
_REHEARSAL_KEYS = {"profile": "engine", "model": "engine", "image": "fleet"}


class SettingsError(Exception):
    """One or more mistakes; ``mistakes`` holds a line for each."""

    def __init__(self, mistakes: list[str]) -> None:
        self.mistakes = tuple(mistakes)
        super().__init__("\n".join(mistakes))


def environment_names(folder: Path = ENVIRONMENTS) -> list[str]:
    """The environments that exist, sorted."""
    return sorted(path.stem for path in folder.glob("*.toml"))


def load_settings(
    environment: str = DEFAULT_ENVIRONMENT,
    context: Mapping[str, Any] | None = None,
    folder: Path = ENVIRONMENTS,
) -> Settings:
    """Read an environment's file, apply the rehearsal table if asked, then the overrides, and check it all.

    Args:
        environment: the file's name without ``.toml``.
        context: the CDK app's context. Keys that hold ``@``, ``:``, ``-`` or ``/`` belong to the CDK.
        folder: where the files are.

    Raises:
        SettingsError: every mistake at once, or an environment that does not exist.
    """
    names = environment_names(folder)
    if environment not in names:
        there = ", ".join(names) or "none"
        raise SettingsError([f"unknown environment {environment!r}: there are {there} (in {_shown(folder)})"])
    path = folder / f"{environment}.toml"
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError([f"{_shown(path)}: not TOML: {error}"]) from None
    return _Reader(_shown(path), environment, raw, context or {}).read()


def _shown(path: Path) -> str:
    root = ENVIRONMENTS.parent.parent
    return str(path.relative_to(root) if path.is_relative_to(root) else path)


class _Reader:
    """Applies the layers in order and remembers which values the command line gave."""

    def __init__(self, file: str, environment: str, raw: dict[str, Any], context: Mapping[str, Any]) -> None:
        self.file = file
        self.environment = environment
        self.raw = raw
        self.context = context
        self.mistakes: list[str] = []
        self.overridden: set[str] = set()

    def read(self) -> Settings:
        self._apply_rehearsal(self.raw.pop("rehearsal", None))
        self._apply_overrides()
        plan = self._plan()
        settings = self._validate()
        values = {
            key: self._table(table)[key] for key, table in TABLE_OF.items() if key in self._table(table)
        }
        self.mistakes.extend(f"{self.file}: {message}" for message in contradictions(values))
        if plan is not None:
            self.mistakes.extend(f"{self.file}: {message}" for message in plan_refusals(plan))
        if self.mistakes or settings is None:
            raise SettingsError(self.mistakes)
        return settings

    def _plan(self) -> Plan | None:
        """The plan of the values as they stand; tp_degree = "auto" becomes its choice. None where a value
        that the plan needs is wrong or missing: validation reports that."""
        wanted = {key: field.default for key, field in PlanSettings.model_fields.items()}
        try:
            plan = make_plan(self._table("fleet"), self._table("engine"), {**wanted, **self._table("plan")})
        except UnknownNameError as error:
            if str(error).startswith("unknown model"):
                self.mistakes.append(f"{self.file}: engine.model: {error}")
            return None
        except (KeyError, TypeError, ValueError):
            return None
        if plan is not None and self._table("engine")["tp_degree"] == AUTO:
            self._table("engine")["tp_degree"] = plan.fit.shape.tp_degree
        return plan

    def _table(self, name: str) -> dict[str, Any]:
        table = self.raw.setdefault(name, {})
        return table if isinstance(table, dict) else {}

    # -- layers

    def _apply_rehearsal(self, table: Any) -> None:
        """The table is checked on every synth, so that a mistake in it shows before a rehearsal needs it."""
        wanted = str(self.context.get("rehearsal", "false")).lower()
        if wanted not in ("true", "false"):
            self.mistakes.append(f"-c rehearsal = {self.context['rehearsal']!r}: allowed: true or false")
        if table is None:
            if wanted == "true":
                self.mistakes.append(f"{self.file}: [rehearsal] is missing, and -c rehearsal=true needs it")
            return
        if not isinstance(table, dict) or set(table) != set(_REHEARSAL_KEYS):
            keys = ", ".join(_REHEARSAL_KEYS)
            self.mistakes.append(f"{self.file}: [rehearsal] = {table!r}: allowed: exactly the keys {keys}")
            return
        for key, group in _REHEARSAL_KEYS.items():
            self._check_one(f"rehearsal.{key}", TABLES[group], key, table[key])
            if wanted == "true":
                self._table(group)[key] = table[key]

    def _apply_overrides(self) -> None:
        for key, value in sorted(self.context.items()):
            if key in _SELECTORS or any(mark in key for mark in "@:-/"):
                continue
            table, _, name = key.rpartition(".")
            if name not in TABLE_OF or table not in ("", TABLE_OF[name]):
                near = difflib.get_close_matches(name, TABLE_OF, n=3)
                hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(TABLE_OF)}"
                self.mistakes.append(f"-c {key} = {value!r}: no such setting; {hint}")
                continue
            table = TABLE_OF[name]
            self._table(table)[name] = _from_text(TABLES[table].model_fields[name].annotation, value)
            self.overridden.add(f"{table}.{name}")

    # -- mistakes

    def _check_one(self, shown: str, model: type[Frozen], key: str, value: Any) -> None:
        """Validate one field alone: what the others hold is irrelevant to it."""
        try:
            model.__pydantic_validator__.validate_assignment(model.model_construct(), key, value)
        except ValidationError as error:
            for problem in error.errors():
                if problem["loc"][:1] == (key,):
                    self._mistake(shown, value, problem["msg"], _allowed(model, key))

    def _validate(self) -> Settings | None:
        try:
            return Settings.model_validate({**self.raw, "environment": self.environment})
        except ValidationError as error:
            for problem in error.errors():
                # An element of a list is reported as its list.
                first, *rest = (str(part) for part in problem["loc"][:2])
                owner, key = (TABLES[first], rest[0]) if rest else (Settings, first)
                shown = ".".join((first, *rest))
                value = self._table(first).get(key) if rest else self.raw.get(first)
                if problem["type"] == "missing":
                    self.mistakes.append(f"{self.file}: {shown} is missing; allowed: {_allowed(owner, key)}")
                elif problem["type"] == "extra_forbidden":
                    near = difflib.get_close_matches(key, [*TABLE_OF, *TABLES], n=2)
                    hint = f"; did you mean {' or '.join(near)}?" if near else ""
                    self.mistakes.append(f"{self.file}: {shown} = {value!r}: no such setting{hint}")
                else:
                    self._mistake(shown, value, problem["msg"], _allowed(owner, key))
        return None

    def _mistake(self, shown: str, value: Any, message: str, allowed: str) -> None:
        where = f"-c {shown.split('.')[-1]}" if shown in self.overridden else f"{self.file}: {shown}"
        line = f"{where} = {value!r}: {message.removeprefix('Value error, ')}; allowed: {allowed}"
        if line not in self.mistakes:
            self.mistakes.append(line)


def _allowed(owner: type[Frozen], key: str) -> str:
    return owner.model_fields[key].description or "a table"


def _from_text(annotation: Any, value: Any) -> Any:
    """A context value as its setting's type. Text that does not fit stays, for validation to name it."""
    if not isinstance(value, str):
        return value
    if annotation is int and value.strip().removeprefix("-").isdecimal():
        return int(value)
    if annotation is bool and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if get_origin(annotation) is tuple:
        return [part.strip() for part in value.split(",") if part.strip()]
    return value
