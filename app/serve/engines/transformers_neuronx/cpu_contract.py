"""Emulation of the transformers-neuronx forward contract on the CPU, over a Hugging Face Llama model.

The same arguments, shapes, refusals and side effects on the cache as :mod:`contract` lists, so that a
scheduler that is wrong on the device is wrong here: padding of a context bucket is computed and written,
slots left out of a decode call lose their position 0, a chunk must have a compiled length. What it does not
emulate is the compiler and the device's numbers: it computes in the model's own dtype with transformers' own
Llama modules.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from app.serve.engines.transformers_neuronx.contract import ContractError, Geometry, bucket_for


class _SlotCache:
    """Keys and values, per layer (slots, KV heads, positions, head size), in transformers' cache interface.

    ``rows`` and ``positions`` (rows by tokens) say where the next forward pass writes; it attends to the
    first ``length`` positions of those rows.
    """

    def __init__(self, config: Any, slots: int, n_positions: int, dtype: Any) -> None:
        import torch

        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, slots, config.num_key_value_heads, n_positions, head)
        self._keys = torch.zeros(shape, dtype=dtype)
        self._values = torch.zeros(shape, dtype=dtype)
        self.rows: Any = None
        self.positions: Any = None
        self.length = 0

    def update(self, keys: Any, values: Any, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Write this pass's keys and values, and return what it may attend to."""
        rows = self.rows[:, None]
        for cache, new in ((self._keys, keys), (self._values, values)):
            cache[layer_idx][rows, :, self.positions] = new.transpose(1, 2)
        return (
            self._keys[layer_idx][self.rows, :, : self.length],
            self._values[layer_idx][self.rows, :, : self.length],
        )

    def get_seq_length(self, *_: Any) -> int:
        """Positions are always given: nothing counts from here."""
        return 0


class CpuContract:
    """A Llama-architecture model behind the contract."""

    def __init__(self, model: Any, geometry: Geometry) -> None:
        self.geometry = geometry
        self._model = model
        self._cache = _SlotCache(model.config, geometry.slots, geometry.context_limit, model.dtype)

    def forward(self, input_ids: Any, cache_ids: Any = None, start_ids: Any = None) -> Any:
        """Context encoding or decode, as the library tells them apart."""
        _check_arguments(input_ids, cache_ids, start_ids)
        if input_ids.shape[1] == 1:
            return self._decode(input_ids, cache_ids, start_ids)
        if int(cache_ids.flatten()[0]) == 0:
            return self._context(input_ids, start_ids)
        raise ContractError("several tokens behind a cached prompt are for speculative_forward()")

    def speculative_forward(
        self,
        input_ids: Any,
        cache_ids: Any = None,
        start_ids: Any = None,
        speculation_length: int | None = None,
    ) -> Any:
        """Tokens behind what a slot has cached; logits (tokens, vocabulary, sequences)."""
        _check_arguments(input_ids, cache_ids, start_ids)
        sequences, count = input_ids.shape
        if sequences != 1 or count not in self.geometry.chunk_sizes or speculation_length != count:
            raise ContractError(
                f"no speculative graph for {sequences} sequences of {count} tokens (speculation_length "
                f"{speculation_length}); compiled: 1 sequence of {self.geometry.chunk_sizes}"
            )
        bucket = bucket_for(self.geometry.token_buckets, int(cache_ids.max()) + 1)
        hidden = self._run(input_ids, cache_ids, start_ids, bucket)
        return self._logits(hidden[0])[:, :, None]

    def _context(self, input_ids: Any, start_ids: Any) -> Any:
        import torch

        if input_ids.shape[0] != 1:
            raise ContractError(f"{input_ids.shape[0]} prompts in a context call; its graph takes one")
        count = input_ids.shape[1]
        bucket = bucket_for(self.geometry.context_buckets, count)
        padded = torch.nn.functional.pad(input_ids, (0, bucket - count))
        hidden = self._run(padded, torch.arange(bucket)[None], start_ids, bucket)
        return self._logits(hidden[:, count - 1])

    def _decode(self, input_ids: Any, cache_ids: Any, start_ids: Any) -> Any:
        import torch

        slots = self.geometry.slots
        tokens = torch.zeros(slots, 1, dtype=input_ids.dtype)
        positions = torch.zeros(slots, 1, dtype=input_ids.dtype)
        tokens[start_ids] = input_ids
        positions[start_ids] = cache_ids
        bucket = bucket_for(self.geometry.token_buckets, int(positions.max()) + 1)
        hidden = self._run(tokens, positions, torch.arange(slots), bucket)
        return self._logits(hidden[start_ids, -1])

    def _run(self, tokens: Any, positions: Any, slots: Any, bucket: int) -> Any:
        """One pass; each token attends to its slot's positions up to its own, within the bucket."""
        import torch

        cache = self._cache
        cache.rows, cache.positions, cache.length = slots, positions, bucket
        seen = torch.arange(bucket)[None, None, :] <= positions[:, :, None]
        mask = torch.zeros(seen.shape, dtype=self._model.dtype)
        mask.masked_fill_(~seen, torch.finfo(self._model.dtype).min)
        return self._model.model(
            input_ids=tokens,
            attention_mask=mask[:, None],
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state

    def _logits(self, hidden: Any) -> Any:
        return self._model.lm_head(hidden).float()


def _check_arguments(input_ids: Any, cache_ids: Any, start_ids: Any) -> None:
    """What the library's indexing and scattering need, said in words."""
    if cache_ids is None or start_ids is None or cache_ids.ndim != 2 or input_ids.ndim != 2:
        raise ContractError(
            "with continuous batching, input_ids and cache_ids are 2-D and start_ids are given"
        )
    if input_ids.shape != cache_ids.shape or start_ids.flatten().shape[0] != input_ids.shape[0]:
        raise ContractError(
            f"input_ids {tuple(input_ids.shape)}, cache_ids {tuple(cache_ids.shape)} and start_ids "
            f"{tuple(start_ids.shape)} do not belong together"
        )
    if input_ids.dtype != cache_ids.dtype:
        raise ContractError(
            f"cache_ids are {cache_ids.dtype}, input_ids {input_ids.dtype}; expected one dtype"
        )


def load_cpu_contract(model_dir: Path, geometry: Geometry, *, dtype: str = "float32") -> CpuContract:
    """Load a Llama-architecture model from a local folder (never from a hub)."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=getattr(torch, dtype), attn_implementation="eager", local_files_only=True
    ).eval()
    if model.config.model_type != "llama":
        raise ContractError(
            f"{model_dir} is a {model.config.model_type} model; the emulation runs llama models"
        )
    return CpuContract(model, geometry)
