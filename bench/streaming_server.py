"""One server of the streaming benchmark, in a process of its own: ``python -m bench.streaming_server KIND``.

The same emulated engine under each: vLLM's own server app on uvicorn (``vllm``), our front on the replica's
own server (``direct``), and our front behind Serve's default proxy (``proxy``). Prints ``ready`` and serves
until its standard input closes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from typing import Any

from app.compile.embedded_model import ensure_embedded_model

MODEL = "SmolLM2-135M-Instruct"
KINDS = ("vllm", "direct", "proxy")


def settings_for(itl_ms: float) -> dict[str, Any]:
    """The engine's settings: a batch that holds every client, no prefill time, admission out of the way."""
    return {
        "profile": "emulated",
        "model_dir": str(ensure_embedded_model()),
        "model_name": MODEL,
        "emulated_ttft_ms": 0.0,
        "emulated_itl_ms": itl_ms,
        "emulated_output_tokens": 4000,
        "batch_size": 256,
        "queue_limit": 1024,
        "max_model_len": 4096,
    }


async def _in_process(kind: str, port: int, itl_ms: float) -> None:
    from app.serve.direct import DirectServer
    from app.serve.engines.base import start_engine
    from app.serve.front import front_for
    from app.serve.readiness import Readiness, TokenWatch
    from app.serve.replica import _SWITCH_INTERVAL_S
    from app.serve.settings import ReplicaSettings

    settings = ReplicaSettings.model_validate(settings_for(itl_ms))
    engine: Any = await start_engine(settings, lambda tokens: None)
    if kind == "vllm":
        # vLLM's own: its generators again, its app alone, Python's own switch interval.
        state = engine.app.state
        del state.openai_serving_chat.chat_completion_stream_generator
        del state.openai_serving_completion.completion_stream_generator
        front = engine.app
    else:
        sys.setswitchinterval(_SWITCH_INTERVAL_S)

        async def canary() -> None: ...

        readiness = Readiness(TokenWatch(), canary, engine.dead_reason, 10.0, 4.0)
        front = front_for(engine, readiness, settings, "bench")
    server = DirectServer(front, "127.0.0.1", port, 75)
    await server.start()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    os._exit(0)  # threads of vLLM's are not waited for


def _behind_proxy(port: int, itl_ms: float) -> None:
    from app.serve.local import deploy_local, local_ray, start_http, wait_until_running

    with local_ray():
        from ray import serve

        start_http(port)
        deploy_local({key: str(value) for key, value in settings_for(itl_ms).items()})
        wait_until_running(300)
        print("ready", flush=True)
        sys.stdin.read()
        serve.shutdown()


def main() -> None:
    """Serve until standard input closes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--itl-ms", type=float, required=True)
    options = parser.parse_args()
    if options.kind == "proxy":
        _behind_proxy(options.port, options.itl_ms)
    else:
        import uvloop

        uvloop.run(_in_process(options.kind, options.port, options.itl_ms))


if __name__ == "__main__":
    main()
