"""The transformers-neuronx engine over the CPU emulation of its contract, with a real model (SmolLM2-135M).

Token for token what Hugging Face's generate gives. Runs in the engine venv (torch, transformers).
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the engine venv (scripts/engine_venv.sh)")
transformers = pytest.importorskip("transformers", reason="needs the engine venv (scripts/engine_venv.sh)")

from app.compile.embedded_model import ensure_embedded_model  # noqa: E402
from app.serve.engines.base import RequestRefused, TextRequest  # noqa: E402
from app.serve.engines.transformers_neuronx.contract import ContractError, Geometry  # noqa: E402
from app.serve.engines.transformers_neuronx.core import EngineCore  # noqa: E402
from app.serve.engines.transformers_neuronx.cpu_contract import CpuContract, load_cpu_contract  # noqa: E402
from app.serve.engines.transformers_neuronx.engine import AsyncEngine  # noqa: E402
from app.serve.engines.transformers_neuronx.metrics import EngineMetrics  # noqa: E402
from app.serve.engines.transformers_neuronx.request import GenerationRequest, Sampling  # noqa: E402
from app.serve.engines.transformers_neuronx.runner import ContractRunner, warm_up  # noqa: E402
from app.serve.engines.transformers_neuronx.start import (  # noqa: E402
    TnxSettings,
    start_transformers_neuronx,
)
from app.serve.policy.costs import StepCosts  # noqa: E402
from app.serve.policy.stall import StallPolicy  # noqa: E402
from app.serve.settings import ReplicaSettings  # noqa: E402

GEOMETRY = Geometry(
    slots=4, token_buckets=(64, 128, 192), context_buckets=(32, 64), vocabulary=49152, chunk_sizes=(16, 32)
)
PROMPTS = [
    "The capital of France is",
    "Hello",
    "Once upon a time there was a little robot who lived by the sea. Every morning it walked along the beach "
    "and counted the boats. One day a storm came and the boats did not return, so the robot",
    "1, 1, 2, 3, 5, 8,",
    "List three colours:\n1.",
    "In the year 2042 the city council met to discuss the new bridge. The mayor opened the session with a "
    "long speech about costs, delays and the weather. Then the chief engineer stood up, laid her drawings on "
    "the table, and explained with great patience why the pillars had to be moved by four metres to the "
    "east, and what that meant for the old fish market. The first question came from",
]
NEW_TOKENS = 8


@pytest.fixture(scope="module")
def model_dir() -> Path:
    return ensure_embedded_model()


@pytest.fixture(scope="module")
def contract(model_dir: Path) -> CpuContract:
    torch.set_num_threads(1)  # more only wait for each other on a busy machine
    return load_cpu_contract(model_dir, GEOMETRY)


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(model_dir)


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> list[tuple[int, ...]]:
    return [tuple(tokenizer.encode(prompt)) for prompt in PROMPTS] + [(tokenizer.encode("Water")[0],)]


@pytest.fixture(scope="module")
def expected(contract: CpuContract, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    """Hugging Face's own greedy generation, one prompt at a time."""
    model = contract._model
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=2,
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def new_core(
    contract: CpuContract, tokenizer: Any, policy: StallPolicy, costs: StepCosts | None = None
) -> EngineCore:
    return EngineCore(
        ContractRunner(contract, GEOMETRY),
        tokenizer,
        costs or StepCosts({32: 20, 64: 30}, {64: 10, 128: 11, 192: 12}, {16: 12, 32: 18}),
        policy=policy,
        eos=frozenset({2}),
        clock=time.monotonic,
        metrics=EngineMetrics(),
    )


def test_prompts_cover_every_way_in(prompts: list[tuple[int, ...]]) -> None:
    """One token; the smaller and the larger context bucket; over every bucket, so in chunks."""
    lengths = [len(prompt) for prompt in prompts]
    assert 1 in lengths
    assert any(1 < length <= 32 for length in lengths)
    assert any(32 < length <= 64 for length in lengths)
    assert any(length > 64 for length in lengths)


def test_staggered_requests_get_the_tokens_of_hugging_face_generate(
    contract: CpuContract, tokenizer: Any, prompts: list[tuple[int, ...]], expected: list[list[int]]
) -> None:
    """Seven prompts over four slots, one arriving every second step, a cancelled one between them."""
    core = new_core(contract, tokenizer, StallPolicy(tpot_slo_ms=30))
    # The policy sees the times written above, whatever this machine takes.
    core._costs.observe = lambda *_: None  # type: ignore[method-assign]
    waiting = [
        GenerationRequest(str(number), prompt, Sampling(NEW_TOKENS, temperature=0.0))
        for number, prompt in enumerate(prompts)
    ]
    waiting.insert(2, GenerationRequest("gone", prompts[5], Sampling(NEW_TOKENS, temperature=0.0)))
    got: dict[str, list[int]] = {}
    text: dict[str, str] = {}
    step = 0
    while waiting or not core.idle:
        if waiting and step % 2 == 0:
            core.add(waiting.pop(0))
        if step == 9:
            assert core.abort("gone") is not None
        for output in core.step():
            got.setdefault(output.request_id, []).extend(output.tokens)
            text[output.request_id] = text.get(output.request_id, "") + output.text
        step += 1
    for number, wanted in enumerate(expected):
        assert got[str(number)] == wanted
        assert text[str(number)] == tokenizer.decode(wanted, skip_special_tokens=True)
    assert core.metrics.counts.prefill_steps > len(prompts), (
        "the long prompts must have been prefilled in chunks"
    )


def test_a_slot_left_out_of_a_decode_call_loses_its_first_position(
    contract: CpuContract, prompts: list[tuple[int, ...]]
) -> None:
    """The emulation does what the library does: this is why half prefilled slots are held."""
    runner = ContractRunner(contract, GEOMETRY)
    prompt = prompts[2]
    runner.context(0, prompt)
    kept = runner.decode([(0, 5, len(prompt))])[0]
    runner.context(0, prompt)
    runner.context(1, prompts[0])
    runner.decode([(1, 5, len(prompts[0]))])
    lost = runner.decode([(0, 5, len(prompt))])[0]
    assert abs(kept - lost).max() > 1e-3


def test_calls_that_no_graph_takes_are_refused_before_anything_runs(contract: CpuContract) -> None:
    runner = ContractRunner(contract, GEOMETRY)
    for call in (
        lambda: runner.context(0, [1]),
        lambda: runner.context(0, [1] * 65),
        lambda: runner.chunk(0, [1] * 17, 32),
        lambda: runner.chunk(0, [1] * 16, 0),
        lambda: runner.decode([(0, 1, 192)]),
        lambda: contract.forward(torch.ones(1, 4, dtype=torch.long), torch.arange(4), torch.tensor([0])),
        lambda: contract.forward(
            torch.ones(1, 4, dtype=torch.long), torch.arange(4, dtype=torch.int32)[None], torch.tensor([0])
        ),
        lambda: contract.forward(
            torch.ones(1, 4, dtype=torch.long), torch.arange(3, 7)[None], torch.tensor([0])
        ),
    ):
        with pytest.raises(ContractError):
            call()


async def test_streams_side_by_side_and_a_closed_one_frees_its_slot(
    contract: CpuContract, tokenizer: Any, prompts: list[tuple[int, ...]], expected: list[list[int]]
) -> None:
    costs = await asyncio.to_thread(warm_up, ContractRunner(contract, GEOMETRY), time.monotonic, 1)
    assert set(costs.as_dict()["decode"]) == set(GEOMETRY.token_buckets)
    noted: list[int] = []
    core = new_core(contract, tokenizer, StallPolicy(tpot_slo_ms=200), costs)
    engine = AsyncEngine(core, noted.append)
    try:
        closed = engine.generate(GenerationRequest("closed", prompts[3], Sampling(100, 0.0, ignore_eos=True)))
        await anext(closed)

        async def collect(number: int) -> list[int]:
            request = GenerationRequest(str(number), prompts[number], Sampling(NEW_TOKENS, 0.0))
            return [token async for output in engine.generate(request) for token in output.tokens]

        answers = asyncio.gather(*(collect(number) for number in range(4)))
        await closed.aclose()
        assert await answers == expected[:4]
        assert core.metrics.counts.running == 0
        assert core.metrics.counts.finished["abort"] == 1
        assert sum(noted) >= sum(map(len, expected[:4]))
        assert engine.dead_reason is None
    finally:
        engine.shutdown()
    assert engine.dead_reason == "the engine was shut down"


async def test_the_started_engine_streams_text_as_the_replica_asks(
    model_dir: Path, tokenizer: Any, prompts: list[tuple[int, ...]], expected: list[list[int]]
) -> None:
    """From a replica's settings to text: load, warm up, stream, refuse, shut down."""
    settings = ReplicaSettings(
        profile="transformers-neuronx-2.25",
        model_dir=model_dir,
        model_name="smollm2",
        batch_size=2,
        max_model_len=48,
        buckets=(48,),
    )
    engine = await start_transformers_neuronx(settings, lambda _: None, TnxSettings(contract="cpu"))
    try:
        wanted = TextRequest(request_id="a", prompt=PROMPTS[0], max_tokens=NEW_TOKENS)
        text = "".join([piece async for piece in engine.stream_text(wanted)])
        assert text == tokenizer.decode(expected[0], skip_special_tokens=True)
        too_long = TextRequest(request_id="b", prompt=PROMPTS[5], max_tokens=5)
        with pytest.raises(RequestRefused, match="expected 1 to 47"):
            _ = [piece async for piece in engine.stream_text(too_long)]
        assert engine.dead_reason() is None
    finally:
        await asyncio.to_thread(engine.shutdown)
    assert engine.dead_reason() is not None
