"""The scheduler's bench: one JSON document; the policy bounds what first come, first served does not."""

from __future__ import annotations

import json

import pytest

from bench.tnx_scheduler import main


def test_the_policy_bounds_stalls_that_first_come_first_served_has(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--json", "--requests", "120", "--rate", "2"]) == 0
    report = json.loads(capsys.readouterr().out)
    costs, results = report["costs_ms"], report["results"]
    largest, budget = max(costs["context"].values()), 100 - min(costs["decode"].values())
    assert results["first_come_first_served"]["max_stall_ms"] >= largest
    assert results["policy"]["max_stall_ms"] == pytest.approx(largest, abs=0.11)
    assert results["policy_with_chunks"]["max_stall_ms"] <= budget
    tokens = {result["output_tokens_per_second"] for result in results.values()}
    assert min(tokens) > 0.8 * max(tokens)
