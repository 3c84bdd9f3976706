"""Reading templates: order, durations, policies; and what hosts say on their console."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rehearsal.api.emulated import generate_password
from rehearsal.api.patches import Patch, Patches
from rehearsal.api.signals import SignalBook, reason_on_console
from rehearsal.api.template import (
    RollingUpdatePolicy,
    SignalPolicy,
    creation_order,
    dependencies,
    duration_s,
    kept_on_delete,
    sorter,
)
from rehearsal.events import EventLog
from rehearsal.interfaces import RehearsalError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("PT15M", 900), ("PT1H30M", 5400), ("PT0S", 0), ("P1DT1S", 86401), ("PT90S", 90)],
)
def test_durations(text: str, seconds: float) -> None:
    assert duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "15M", "PT", "P", "PT1.5M", "pt1m", "PT1M1H"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="ISO 8601"):
        duration_s(text)


def test_dependencies_by_every_kind_of_reference() -> None:
    resources: dict[str, Any] = {
        "A": {},
        "B": {"Properties": {"X": {"Ref": "A"}, "Y": {"Ref": "AWS::Region"}}},
        "C": {"Properties": {"X": {"Fn::GetAtt": ["B", "Arn"]}}},
        "D": {"Properties": {"X": {"Fn::GetAtt": "C.Arn"}}},
        "E": {"Properties": {"X": {"Fn::Sub": "${D.Arn}/${AWS::Region}/${!A}"}}},
        "F": {"Properties": {"X": {"Fn::Sub": ["${A}-${E}", {"A": {"Ref": "B"}}]}}},
        "G": {"DependsOn": ["F", "A"]},
        "H": {"DependsOn": "G", "Properties": {"X": {"Fn::Join": ["", [{"Ref": "H"}]]}}},
    }
    assert dependencies(resources) == {
        "A": set(),
        "B": {"A"},
        "C": {"B"},
        "D": {"C"},
        "E": {"D"},
        "F": {"B", "E"},
        "G": {"F", "A"},
        "H": {"G"},
    }
    assert creation_order(resources) == list("ABCDEFGH")


def test_a_circle_names_its_members() -> None:
    with pytest.raises(ValueError, match=r"Circular.*'A'.*'B'"):
        sorter({"A": {"DependsOn": "B"}, "B": {"DependsOn": "A"}, "C": {}})


@given(st.lists(st.tuples(st.integers(0, 15), st.integers(0, 15)), max_size=40))
def test_dependencies_come_first_in_any_acyclic_template(edges: list[tuple[int, int]]) -> None:
    resources: dict[str, Any] = {f"R{n}": {"DependsOn": []} for n in range(16)}
    for a, b in edges:
        if a != b:
            resources[f"R{max(a, b)}"]["DependsOn"].append(f"R{min(a, b)}")
    order = creation_order(resources)
    for name, needed in dependencies(resources).items():
        assert all(order.index(other) < order.index(name) for other in needed)


def test_policies() -> None:
    assert SignalPolicy.of({}) is None
    assert SignalPolicy.of({"CreationPolicy": {"ResourceSignal": {"Count": 0}}}) is None
    assert SignalPolicy.of({"CreationPolicy": {"ResourceSignal": {"Timeout": "PT9M"}}}) == SignalPolicy(
        1, 540
    )
    rolling = RollingUpdatePolicy.of(
        {"UpdatePolicy": {"AutoScalingRollingUpdate": {"WaitOnResourceSignals": "true"}}}
    )
    assert rolling == RollingUpdatePolicy(1, 0, 100, 300, True, ())
    assert RollingUpdatePolicy.of({"UpdatePolicy": {}}) is None


@pytest.mark.parametrize(
    ("policy", "rollback", "kept"),
    [
        ("Retain", False, True),
        ("Retain", True, True),
        ("RetainExceptOnCreate", True, False),
        ("RetainExceptOnCreate", False, True),
        ("Delete", False, False),
    ],
)
def test_what_a_deletion_policy_keeps(policy: str, rollback: bool, kept: bool) -> None:
    assert kept_on_delete({"DeletionPolicy": policy}, rollback_of_create=rollback) is kept


def test_a_host_counts_once_whatever_it_says_next() -> None:
    book = SignalBook()
    assert book.record("i-1", "SUCCESS")
    assert not book.record("i-1", "FAILURE")
    assert (book.successes, book.failures) == ({"i-1"}, set())


def test_the_last_failure_on_a_console_is_the_reason() -> None:
    console = (
        "[  3.1] cloud-init: neuronfleet: fetching the bundle\n"
        "neuronfleet: FAILURE i-0abc: user data, exit 22: line 40: call s3\n"
        "\r\nneuronfleet-failed: i-0abc neuronfleet-fetch.service: sha256 differs\r\n"
    )
    assert reason_on_console(console) == "neuronfleet-fetch.service: sha256 differs"
    assert reason_on_console(console.splitlines()[1]) == "user data, exit 22: line 40: call s3"
    assert reason_on_console("Debian GNU/Linux 12\nlogin:") == ""


@given(st.integers(4, 200), st.booleans(), st.text("abcXYZ012", max_size=6))
def test_passwords_follow_their_rule(length: int, punctuation: bool, unwanted: str) -> None:
    rule = {"PasswordLength": length, "ExcludePunctuation": punctuation, "ExcludeCharacters": unwanted}
    made = generate_password(rule)
    assert len(made) == length
    assert not set(made) & set(unwanted)
    assert made.isalnum() or not punctuation
    assert (
        any(c.islower() for c in made) and any(c.isupper() for c in made) and any(c.isdigit() for c in made)
    )


class Owner:
    """Stands for a class of moto's."""

    there = 1


def test_a_patch_whose_target_moved_stops_everything() -> None:
    patches = Patches(
        [
            Patch(Owner, "there", 2, "a"),
            Patch(Owner, "moved", 2, "because of b"),
            Patch(Owner, "there", 2, "because of c", new=True),
        ]
    )
    with pytest.raises(RehearsalError, match=r"moved.*because of b[\s\S]*grown.*because of c"):
        patches.install()
    assert Owner.there == 1


def test_patches_can_be_taken_back() -> None:
    patches = Patches([Patch(Owner, "there", 2, "a"), Patch(Owner, "more", 3, "b", new=True)])
    patches.install()
    assert (Owner.there, vars(Owner)["more"]) == (2, 3)
    patches.remove()
    assert Owner.there == 1
    assert not hasattr(Owner, "more")


def test_events_are_kept_and_written(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.add("stack.status", "one", stack="s")
    log.add("stack.status", "two")
    assert [event.message for event in log.since(1)] == ["two"]
    assert log.since(2) == []
    assert '"stack": "s"' in (tmp_path / "events.jsonl").read_text().splitlines()[0]
    assert not log.wait_until(lambda: False, 0.05)
    assert log.wait_until(lambda: True, 0.0)
