"""The port plan: disjoint, stable, where Linux takes no port of its own, and what security groups open."""

from __future__ import annotations

import pytest

from app.node import ports
from app.node.ports import MAX_RAYLETS, cluster_ingress, local_only, raylet_ports


def test_ports_are_disjoint_for_every_number_of_raylets() -> None:
    taken: set[int] = set(ports.HEAD_PORTS)
    assert len(taken) == 5
    for index in range(MAX_RAYLETS):
        own = raylet_ports(index)
        singles = 7
        assert len(own.all_ports()) == singles + ports.WORKER_PORTS_PER_RAYLET
        assert not taken & own.all_ports()
        taken |= own.all_ports()
    assert max(taken) < 32768  # from there on Linux takes the local ports of outgoing connections
    assert min(taken) > 1023
    assert not taken & set(range(23000, 24000))  # Ray's client server takes ports there
    assert 52365 not in taken


def test_ports_of_a_raylet_never_move() -> None:
    assert raylet_ports(3) == ports.RayletPorts(
        node_manager=6803,
        object_manager=6833,
        agent_grpc=6863,
        agent_http=6893,
        runtime_env_agent=6923,
        metrics_export=6953,
        min_worker=12000,
        max_worker=12499,
        serve_http=8003,
    )
    assert raylet_ports(0).serve_http == 8000


@pytest.mark.parametrize("count", [1, 4, 12, MAX_RAYLETS])
def test_ingress_holds_what_other_hosts_need_and_nothing_else(count: int) -> None:
    opened = {port for allowed in cluster_ingress(count) for port in allowed.ports}
    needed = {ports.GCS_PORT}
    for index in range(count):
        own = raylet_ports(index)
        needed |= {own.node_manager, own.object_manager, own.agent_grpc, own.agent_http}
        needed |= set(range(own.min_worker, own.max_worker + 1))
    assert opened == needed
    shut = {port for kept in local_only(count) for port in kept.ports}
    assert not shut & opened
    assert {8265, 10001, raylet_ports(0).metrics_export} <= shut


def test_every_port_but_serves_is_opened_or_shut() -> None:
    known = {port for one in (*cluster_ingress(), *local_only()) for port in one.ports}
    for index in range(MAX_RAYLETS):
        own = raylet_ports(index)
        assert own.all_ports() - known == {own.serve_http}


def test_only_the_head_listens_for_the_cluster() -> None:
    assert [r.first for r in cluster_ingress() if r.listener == "head"] == [6379]


@pytest.mark.parametrize("index", [-1, MAX_RAYLETS, 1000])
def test_an_index_outside_the_plan_is_refused(index: int) -> None:
    with pytest.raises(ValueError, match="has no ports"):
        raylet_ports(index)


@pytest.mark.parametrize("port", [6379, 6360, 8250, 10000, 10480, 22600 - 200, 80, 32760])
def test_a_serve_port_that_meets_another_is_refused(port: int) -> None:
    with pytest.raises(ValueError, match=f"serve port {port} cannot be used"):
        raylet_ports(0, serve_port=port)


def test_another_serve_port_is_taken() -> None:
    assert raylet_ports(2, serve_port=9000).serve_http == 9002
