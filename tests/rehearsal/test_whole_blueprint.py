"""The whole deploy of ``blueprint``: one Ray cluster of a head host and two workers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rehearsal.streaming import SHORT_ANSWER_SPAN_S, assert_really_streamed, chat
from tests.rehearsal.whole import Deployed, deployed, needs_root

pytestmark = [pytest.mark.rehearsal, needs_root, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def blueprint() -> Iterator[Deployed]:
    with deployed("blueprint") as up:
        yield up


def test_a_head_and_two_workers_with_a_replica_each(blueprint: Deployed) -> None:
    by_role: dict[str, list[dict[str, object]]] = {}
    for host in blueprint.hosts:
        by_role.setdefault(host["role"], []).append(host)
    assert {role: len(hosts) for role, hosts in by_role.items()} == {"head": 1, "worker": 2}
    (head,) = by_role["head"]
    assert head["target_health"] == "none"
    assert head["replicas"] == []
    for worker in by_role["worker"]:
        assert worker["target_health"] == "healthy"
        assert worker["instance_type"] == "inf2.24xlarge"
        replicas = worker["replicas"]
        assert isinstance(replicas, list) and len(replicas) == 1
        # TP 8 on twelve cores: one whole block, four cores idle.
        assert len(replicas[0]["cores"]) == 8
        assert replicas[0]["live"]["ok"], replicas


def test_every_raylet_starts_through_numactl(blueprint: Deployed) -> None:
    for host in blueprint.hosts:
        for raylet in host["raylets"]:
            command = blueprint.run(
                host["instance_id"], f"systemctl show -p ExecStart 'neuronfleet-{raylet['name']}'"
            )
            assert "numactl" in command, command
            policy = blueprint.run(host["instance_id"], f"head -1 /proc/{raylet['live']['pid']}/numa_maps")
            assert "bind:0" in policy


def test_tokens_stream_through_the_load_balancer(blueprint: Deployed) -> None:
    question = "What is the capital of France?"
    for _ in range(2):  # both workers' proxies are asked
        answer = chat(blueprint.url, question)
        assert "Paris" in answer.text
        assert answer.finish_reasons == ["stop"]
    assert_really_streamed(lambda: chat(blueprint.url, question), span_s=SHORT_ANSWER_SPAN_S)
    assert_really_streamed(lambda: chat(blueprint.url, "Count from one to twenty in words."))


def test_the_cluster_shares_one_token_from_secrets_manager(blueprint: Deployed) -> None:
    tokens = {
        blueprint.run(host["instance_id"], "sha256sum /etc/neuronfleet/ray-token") for host in blueprint.hosts
    }
    assert len(tokens) == 1
    modes = {
        blueprint.run(host["instance_id"], "stat -c '%a %U' /etc/neuronfleet/ray-token").strip()
        for host in blueprint.hosts
    }
    assert all(mode.split()[0] in ("400", "600") for mode in modes), modes
