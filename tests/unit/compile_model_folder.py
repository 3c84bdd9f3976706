"""A small model's folder and an emulated compiler on PATH, for the tests of the compile step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from app.compile.compile_request import CompileRequest, Machine

COMPILER_FOLDER = Path(__file__).resolve().parents[2] / "rehearsal/compiler"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def model_folder(folder: Path, **config: Any) -> Path:
    """A folder with a config, weights (not a model's) and a tokenizer's file."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    (folder / "model.safetensors").write_bytes(b"weights" * 100)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def request(tmp_path: Path, **changes: Any) -> CompileRequest:
    """A request that may start on :func:`machine`."""
    values: dict[str, Any] = {
        "model": str(tmp_path / "model"),
        "profile": "emulated",
        "tp_degree": 2,
        "batch_size": 4,
        "max_model_len": 2048,
        "out": tmp_path / "out",
        "work": tmp_path / "work",
        "name": "tiny",
        "context_buckets": (512, 2048),
    }
    return CompileRequest(**{**values, **changes})


def machine(path: Path = COMPILER_FOLDER, *, devices: int = 0, free: int = 10**12) -> Machine:
    """A machine whose PATH begins with ``path``."""
    return Machine(
        environment={"PATH": f"{path}:/usr/bin:/bin"},
        devices=lambda: devices,
        free_bytes=lambda _: free,
    )


def real_compiler(folder: Path, version: str = "2.23.6484.0+3b612583") -> Path:
    """A folder with a compiler that says what the vendor's says to ``--version``, and does nothing else."""
    folder.mkdir(parents=True)
    path = folder / "neuronx-cc"
    path.write_text(f"#!/bin/sh\necho 'NeuronX Compiler version {version}'\n")
    path.chmod(0o755)
    return folder
