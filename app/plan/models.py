"""Models as the plan sees them: the sizes in a ``config.json`` that decide memory, bandwidth and FLOPs.

A model is named by a Hugging Face id that the offline registry (``data/models.json``) knows, by the last
part of one, or by the path of a folder with a ``config.json`` or of that file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from app.plan.catalogue import UnknownNameError
from app.plan.profiles import Family

# What each architecture adds to the llama layout: biases on Q, K, V, and norms on Q and K.
_ARCHITECTURES: Mapping[str, tuple[Family, bool, bool]] = {
    "LlamaForCausalLM": ("llama", False, False),
    "MistralForCausalLM": ("mistral", False, False),
    "Qwen2ForCausalLM": ("qwen2", True, False),
    "Qwen3ForCausalLM": ("qwen3", False, True),
}
_REQUIRED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
)
# No size of a real model comes near; larger ones are slips of the pen.
_MOST = 10**9
# Parts of a name that say who made or tuned a model, not how large it is.
_NOT_SIZES = frozenset({"meta", "instruct", "chat", "base", "hf", "it"})


class ModelError(ValueError):
    """A model that cannot be planned; the message names every fault of its config."""


class ModelConfig(BaseModel):
    """The sizes of a decoder of the llama layout (gated MLP, RMS norms, rotary positions).

    Lengths are in tokens, sizes in elements.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    architecture: str
    family: Family
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int | None
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    notes: tuple[str, ...] = ()
    """What the config left open, and how it was taken: said with every plan."""

    @property
    def parameters(self) -> int:
        """Parameters of the checkpoint (tied embeddings counted once)."""
        attention = self.hidden_size * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        attention += self.head_dim * (self.heads + 2 * self.kv_heads) if self.qkv_bias else 0
        attention += 2 * self.head_dim if self.qk_norm else 0
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return self.layers * layer + embeddings + self.hidden_size

    @property
    def checkpoint_bytes(self) -> int:
        """Size of the checkpoint in bf16, bytes."""
        return 2 * self.parameters


def load_model(name: str) -> ModelConfig:
    """The model of that name, folder or ``config.json``.

    Raises:
        UnknownNameError: neither a known name nor a path; the message says what is known.
        ModelError: a config that is missing keys, of an unknown architecture, or contradicts itself.
    """
    if not name.strip():
        raise ModelError("the model's name is empty; give a Hugging Face id, a folder or a config.json")
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ModelError(f"folder {name} holds no config.json")
    if path.is_file():
        return parse_config(_read_json(path), name=_display_name(path))
    if path.suffix == ".json" or name.startswith((".", "/")):
        raise ModelError(f"no such file or folder: {name}")
    config = _registry().get(_key(name))
    if config is None:
        raise UnknownNameError(
            f"unknown model {name!r}; give the path of its folder or config.json, or one of: "
            + ", ".join(known_models())
        )
    return parse_config(config, name=name)


def known_models() -> tuple[str, ...]:
    """The Hugging Face ids that can be planned offline, one for each distinct model."""
    return tuple(entry["ids"][0] for entry in _registry_file()["models"])


def parse_config(config: Mapping[str, Any], *, name: str) -> ModelConfig:
    """A model from the contents of its ``config.json``.

    Raises:
        ModelError: every fault at once.
    """
    problems: list[str] = []
    notes: list[str] = []
    architecture = _architecture(config, problems)
    sizes = {key: _size(config, key, problems) for key in _REQUIRED}
    heads, hidden = sizes["num_attention_heads"], sizes["hidden_size"]
    kv_heads = _kv_heads(config, architecture, heads, problems, notes)
    head_dim = _size(config, "head_dim", problems, default=hidden // heads if heads else 0)
    if heads and hidden and config.get("head_dim") is None and hidden % heads:
        problems.append(
            f"num_attention_heads {heads} does not divide hidden_size {hidden} and no head_dim is given"
        )
    elif head_dim % 2:
        problems.append(f"a head of {head_dim} elements cannot hold rotary positions: they go in pairs")
    if heads and kv_heads and heads % kv_heads:
        problems.append(f"num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}")
    positions = _size(config, "max_position_embeddings", problems, default=0)
    if not positions:
        notes.append("its config has no max_position_embeddings: lengths are not checked against the model")
    if config.get("quantization_config") is not None:
        notes.append(
            "its config has a quantization_config, which is not considered: sizes are of bf16 or int8"
        )
    tied = _flag(config, "tie_word_embeddings", problems)
    attention_bias = _flag(config, "attention_bias", problems)
    if problems:
        raise ModelError(f"config of {name}: " + "; ".join(problems))
    family, bias, norm = _ARCHITECTURES[architecture]
    return ModelConfig(
        name=name,
        architecture=architecture,
        family=family,
        hidden_size=hidden,
        layers=sizes["num_hidden_layers"],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=sizes["intermediate_size"],
        vocab_size=sizes["vocab_size"],
        max_positions=positions or None,
        tied_embeddings=tied,
        qkv_bias=bias or attention_bias,
        qk_norm=norm,
        notes=tuple(notes),
    )


def _architecture(config: Mapping[str, Any], problems: list[str]) -> str:
    known = ", ".join(_ARCHITECTURES)
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        problems.append(f"architectures is missing or no list; expected one of {known}")
        return ""
    name = names[0]
    if not isinstance(name, str) or name not in _ARCHITECTURES:
        problems.append(f"architecture {name!r} is not known to the plan; expected one of {known}")
        return ""
    return name


def _kv_heads(
    config: Mapping[str, Any], architecture: str, heads: int, problems: list[str], notes: list[str]
) -> int:
    """KV heads. Configs of the first Llama models have no such key and mean one a query head; of the other
    architectures the libraries' defaults are fixed numbers, so a missing key is a fault."""
    if architecture == "LlamaForCausalLM" and heads and config.get("num_key_value_heads") is None:
        notes.append(f"its config has no num_key_value_heads: taken as {heads}, one a query head")
        return heads
    return _size(config, "num_key_value_heads", problems)


def _flag(config: Mapping[str, Any], key: str, problems: list[str]) -> bool:
    value = config.get(key, False)
    if not isinstance(value, bool):
        problems.append(f"{key} {value!r} must be true or false")
    return value is True


def _size(config: Mapping[str, Any], key: str, problems: list[str], default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if value is None:
        problems.append(f"{key} is missing")
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
        shown = repr(value) if len(repr(value)) < 40 else f"{repr(value)[:40]}…"
        problems.append(f"{key} {shown} must be a whole number, 1 to {_MOST}")
        return 0
    return value


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        # ValueError: no UTF-8, no JSON, or a number too long for Python.
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(config).__name__}")
    return config


def _display_name(path: Path) -> str:
    return path.resolve().parent.name or str(path)


def _key(name: str) -> str:
    """What the spellings of one model share: the last part of an id, without case, maker or tuning."""
    last = re.sub(r"^(meta[-_ ])?llama(?=\d)", "llama-", name.rstrip("/").rsplit("/", 1)[-1].casefold())
    return "-".join(part for part in re.split(r"[-_ ]+", last) if part not in _NOT_SIZES)


@cache
def _registry_file() -> Any:
    return json.loads(resources.files("app.plan").joinpath("data/models.json").read_text())


@cache
def _registry() -> dict[str, Mapping[str, Any]]:
    table: dict[str, Mapping[str, Any]] = {}
    for entry in _registry_file()["models"]:
        for name in entry["ids"]:
            table.setdefault(_key(name), entry["config"])
    # Tables often leave a version out: the first one that the registry has of that name stands for it.
    for key in list(table):
        table.setdefault(re.sub(r"-v\d+(\.\d+)*$", "", key), table[key])
    return table
