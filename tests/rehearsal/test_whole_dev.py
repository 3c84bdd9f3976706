"""The whole deploy of ``dev``: the real cdk, cloud-init, systemd, numactl, Ray, vLLM and load balancer."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.rehearsal.streaming import SHORT_ANSWER_SPAN_S, assert_really_streamed, chat
from tests.rehearsal.whole import Deployed, deployed, needs_root, run_up

pytestmark = [pytest.mark.rehearsal, needs_root, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def dev() -> Iterator[Deployed]:
    with deployed("dev") as up:
        yield up


def test_make_up_streams_the_answer_and_says_where_the_time_went(dev: Deployed) -> None:
    assert "Paris" in dev.output
    for words in (
        "Where the time went",
        "model load",
        "first token",
        dev.url,
        "neuronfleet status",
        "make down",
    ):
        assert words in dev.output


def test_the_stacks_are_complete_and_the_host_is_a_healthy_cell(dev: Deployed) -> None:
    assert {stack["status"] for stack in dev.status["stacks"]} <= {"CREATE_COMPLETE", "UPDATE_COMPLETE"}
    (host,) = dev.hosts
    assert (host["role"], host["instance_type"], host["target_health"]) == ("cell", "inf2.8xlarge", "healthy")
    assert [raylet["cores"] for raylet in host["raylets"]] == [[0, 1]]
    assert [replica["cores"] for replica in host["replicas"]] == [[0, 1]]


def test_tokens_stream_through_the_load_balancer(dev: Deployed) -> None:
    long = "Count from one to twenty in words."
    stream = assert_really_streamed(lambda: chat(dev.url, long))
    assert "text/event-stream" in stream.headers["content-type"]
    assert len(stream.finish_reasons) == 1 and stream.finish_reasons[0] in ("stop", "length")
    question = "What is the capital of France?"
    answer = assert_really_streamed(lambda: chat(dev.url, question), span_s=SHORT_ANSWER_SPAN_S)
    assert "Paris" in answer.text
    assert answer.finish_reasons == ["stop"]


def test_the_openai_package_streams(dev: Deployed) -> None:
    client = openai.OpenAI(base_url=f"{dev.url}/v1", api_key="none")
    model = client.models.list().data[0].id
    assert model == "SmolLM2-135M-Instruct"
    stream = client.completions.create(
        model=model, prompt="The capital of France is", max_tokens=8, temperature=0, stream=True
    )
    pieces = [choice.text for chunk in stream for choice in chunk.choices]
    assert "Paris" in "".join(pieces)
    assert len(pieces) >= 4


def test_raylet_and_replica_are_bound_by_numactl(dev: Deployed) -> None:
    """The unit's command shows numactl; only /proc shows the binding, since numactl execs."""
    (host,) = dev.hosts
    command = dev.run(host["instance_id"], "systemctl show -p ExecStart neuronfleet-ray-head")
    assert "numactl" in command and "--cpunodebind=0" in command and "--membind=0" in command
    for item in (*host["raylets"], *host["replicas"]):
        policy = dev.run(host["instance_id"], f"head -1 /proc/{item['live']['pid']}/numa_maps")
        assert "bind:0" in policy
        assert item["live"]["ok"], item


def test_services_run_as_their_own_user_and_ray_asks_for_its_token(dev: Deployed) -> None:
    (host,) = dev.hosts
    pid = host["raylets"][0]["live"]["pid"]
    owner = dev.run(host["instance_id"], f"stat -c %U /proc/{pid}")
    assert owner.strip() == "neuronfleet"
    code = dev.run(
        host["instance_id"], "curl -s -o /dev/null -w '%{http_code}' http://127.0.0.1:8265/api/jobs/ || true"
    )
    assert code.strip() in ("401", "403")
    listening = dev.run(host["instance_id"], "cat /proc/net/tcp")
    dashboard = [
        line.split()[1] for line in listening.splitlines()[1:] if line.split()[1].endswith(f":{8265:04X}")
    ]
    assert dashboard and all(address.startswith("0100007F") for address in dashboard), dashboard


def test_the_replica_tells_its_binding_to_whoever_scrapes_it(dev: Deployed) -> None:
    text = httpx.get(f"{dev.url}/metrics", timeout=30).text
    assert "neuronfleet_topology_plan 1.0" in text
    assert 'neuronfleet_raylet_bound{raylet="0"} 1.0' in text
    assert "neuronfleet_admission_admitted_total" in text


def test_a_second_make_up_changes_nothing(dev: Deployed) -> None:
    before = {host["instance_id"] for host in dev.hosts}
    code, output, seconds = run_up("dev")
    assert code == 0, output[-4000:]
    assert "Paris" in output
    assert {host["instance_id"] for host in dev.refresh()["hosts"]} == before
    assert seconds < 240


def test_a_host_that_dies_is_replaced_and_serves(dev: Deployed) -> None:
    """Terminated behind CloudFormation's back: the group launches another, which boots by itself."""
    (host,) = dev.hosts
    dev.target().client("ec2").terminate_instances(InstanceIds=[host["instance_id"]])

    def replaced(status: dict[str, list[dict[str, str]]]) -> bool:
        ids = {item["instance_id"]: item["target_health"] for item in status["hosts"]}
        return host["instance_id"] not in ids and "healthy" in ids.values()

    dev.wait_until("a new healthy host", replaced, timeout_s=420)
    deadline = time.monotonic() + 30
    while "Paris" not in (text := chat(dev.url, "What is the capital of France?").text):
        assert time.monotonic() < deadline, text
