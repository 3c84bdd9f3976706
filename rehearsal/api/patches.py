"""The one list of what the rehearsal changes in moto, and why.

Each patch names the attribute that it replaces; installing fails when this moto has no such attribute, so
that an upgrade of moto that moves one is noticed at start and not as a strange rehearsal. ``new=True`` marks
what moto lacks altogether; installing then fails when moto has grown it, for ours should then go.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from rehearsal.interfaces import RehearsalError

MOTO_VERSION = "5.2.5"
_MISSING = object()


@dataclass(frozen=True)
class Patch:
    """Replace ``owner.name`` by ``value`` because ``why``."""

    owner: Any
    name: str
    value: Any
    why: str
    new: bool = False

    @property
    def target(self) -> str:
        """Dotted name, for messages."""
        owner = self.owner
        module = getattr(owner, "__module__", None)
        return f"{module}.{owner.__name__}.{self.name}" if module else f"{owner.__name__}.{self.name}"


class Patches:
    """A set of patches that is installed whole or not at all, and can be taken back (tests do)."""

    def __init__(self, patches: list[Patch]) -> None:
        self.patches = patches
        self._originals: list[tuple[Any, str, Any]] = []

    def check(self) -> list[str]:
        """What does not fit this moto, one line each; empty when all is well."""
        found: list[str] = []
        if version("moto") != MOTO_VERSION:
            found.append(f"moto is {version('moto')}, the patches are for {MOTO_VERSION}: see requirements/")
        for patch in self.patches:
            exists = hasattr(patch.owner, patch.name)
            if patch.new and exists:
                found.append(f"moto has grown {patch.target}: drop the rehearsal's own ({patch.why})")
            elif not patch.new and not exists:
                found.append(f"moto no longer has {patch.target}: adapt the patch ({patch.why})")
        return found

    def install(self) -> None:
        """Put every patch in place.

        Raises:
            RehearsalError: naming every patch that does not fit; then none is in place.
        """
        if problems := self.check():
            raise RehearsalError("this moto cannot be extended:\n  " + "\n  ".join(problems))
        for patch in self.patches:
            self._originals.append((patch.owner, patch.name, vars(patch.owner).get(patch.name, _MISSING)))
            setattr(patch.owner, patch.name, patch.value)

    def remove(self) -> None:
        """Put moto's own back."""
        while self._originals:
            owner, name, original = self._originals.pop()
            if original is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
