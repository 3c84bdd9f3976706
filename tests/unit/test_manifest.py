"""The artifact manifest: canonical bytes, and paths that must not leave the artifact's folder."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from app.compile.manifest import Manifest

ZERO = "0" * 64


def manifest(paths: list[str], **changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "model": "m",
        "model_digest": ZERO,
        "profile": "cpu",
        "versions": {"vllm": "1"},
        "tp_degree": 1,
        "batch_size": 1,
        "max_model_len": 1,
        "files": [{"path": path, "size": 1, "sha256": ZERO} for path in paths],
    }
    return Manifest.model_validate(values | changes)


@given(st.permutations(["a", "b/c", "b/d", "z.bin"]))
def test_the_order_of_files_does_not_matter(paths: list[str]) -> None:
    assert manifest(paths).canonical_bytes() == manifest(sorted(paths)).canonical_bytes()


def test_canonical_bytes_read_back_to_the_same_manifest() -> None:
    made = manifest(["a", "b/ü"], buckets=(128, 512))
    assert Manifest.model_validate_json(made.canonical_bytes()) == made
    assert b" " not in made.canonical_bytes()


@pytest.mark.parametrize(
    "path",
    ["", "/etc/passwd", "../x", "a/../../x", "a/./b", "a//b", "a/", "a\\b", "manifest.json", ".."],
)
def test_paths_that_leave_the_folder_are_refused(path: str) -> None:
    with pytest.raises(ValidationError):
        manifest([path])


def test_a_path_twice_is_refused() -> None:
    with pytest.raises(ValidationError, match="two files"):
        manifest(["a", "a"])


@pytest.mark.parametrize("field", ["tp_degree", "batch_size", "max_model_len"])
def test_counts_are_positive(field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        manifest(["a"], **{field: 0})
