"""Settings files and overrides: what is right is read, and every mistake is named at once."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.settings import ENVIRONMENTS, SettingsError, environment_names, load_settings
from infra.settings_model import TABLE_OF, TABLES


def write(folder: Path, name: str = "dev", **changes: Any) -> Path:
    """A copy of dev.toml as ``name``, with settings changed (``table__key=value``; None removes it)."""
    raw = tomllib.loads((ENVIRONMENTS / "dev.toml").read_text())
    for dotted, value in changes.items():
        table, key = dotted.split("__")
        if value is None:
            del raw[table][key]
        else:
            raw[table][key] = value
    lines = [f"version = {raw.pop('version')}"]
    for table, values in raw.items():
        lines += [f"[{table}]", *(f"{key} = {toml(value)}" for key, value in values.items())]
    path = folder / f"{name}.toml"
    path.write_text("\n".join(lines))
    return path


def toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml(item) for item in value)}]"
    return str(value) if isinstance(value, int | float) else '"' + str(value) + '"'


def mistakes(folder: Path, context: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        load_settings("dev", context, folder)
    return list(caught.value.mistakes)


def test_every_shipped_environment_is_valid_with_and_without_its_rehearsal_table() -> None:
    assert environment_names() == ["blueprint", "dev", "prod"]
    for name in environment_names():
        assert load_settings(name).environment == name
        # prod runs NeuronFleet's own image, the others the vendor's: so do their rehearsals.
        image = "ami-0b0b0b0b0b0b0b0b0" if name == "prod" else "ami-0e0e0e0e0e0e0e0e0"
        assert load_settings(name, {"rehearsal": "true"}).fleet.image == image


def test_an_unknown_environment_lists_those_that_exist() -> None:
    with pytest.raises(SettingsError, match=r"unknown environment 'stage': there are blueprint, dev, prod"):
        load_settings("stage")


def test_an_environment_name_is_no_path() -> None:
    with pytest.raises(SettingsError, match="unknown environment"):
        load_settings("../environments/dev")


def test_a_file_that_is_not_toml_says_where(tmp_path: Path) -> None:
    (tmp_path / "dev.toml").write_text("version = 1\n[fleet\n")
    assert "line 2" in mistakes(tmp_path)[0]


def test_all_mistakes_of_a_file_are_named_at_once(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        fleet__instance_type="p5.48xlarge",
        fleet__desired_capacity=0,
        fleet__root_volume_gib=None,
        engine__profile="vllm",
        engine__tp_degre=2,
        edge__ingress_cidrs=["10.0.0.0/33"],
        edge__keep_alive_s=300,
        operations__log_retention_days=8,
    )
    found = mistakes(tmp_path)
    for fragment in (
        "fleet.instance_type = 'p5.48xlarge'",
        "fleet.desired_capacity = 0",
        "fleet.root_volume_gib is missing",
        "engine.profile = 'vllm'",
        "engine.tp_degre = 2: no such setting; did you mean tp_degree",
        "edge.ingress_cidrs = ['10.0.0.0/33']",
        "edge.keep_alive_s = 300 is not above edge.idle_timeout_s = 300",
        "operations.log_retention_days = 8",
    ):
        assert [line for line in found if fragment in line], (fragment, found)
    assert all(line.startswith(str(path)) for line in found)
    assert all("allowed: " in line or "did you mean" in line for line in found)


def test_a_missing_table_is_named(tmp_path: Path) -> None:
    (tmp_path / "dev.toml").write_text("version = 2\n")
    found = mistakes(tmp_path)
    assert sum("is missing" in line for line in found) >= len(TABLES)
    assert any("version = 2" in line for line in found)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fleet__desired_capacity": 3}, "fleet.max_capacity = 1 is below"),
        ({"fleet__topology": "cluster"}, "fleet.head_instance_type is missing"),
        ({"fleet__head_instance_type": "m7i.large"}, "topology cell has no head"),
        ({"network__egress": "none"}, "needs a way out"),
        ({"operations__retain": True}, "asks for a pin"),
        ({"engine__profile": "cpu"}, "has no public image"),
        ({"network__zones": ["us-west-2a"]}, "a load balancer needs two"),
        ({"network__zones": ["us-west-2a", "us-west-2a"]}, "a load balancer needs two"),
        ({"network__vpc_cidr": "10.0.0.0/26"}, "too small"),
        (
            {"edge__certificate_arn": "arn:aws:acm:us-west-2:111122223333:certificate/0a"},
            "edge.https = false",
        ),
        ({"edge__scheme": "internet-facing", "edge__ingress_cidrs": ["0.0.0.0/0"]}, "without HTTPS"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write(tmp_path, **changes)
    found = mistakes(tmp_path)
    assert len(found) == 1 and message in found[0] and "allowed: " in found[0], found


@settings(max_examples=30, deadline=None)
@given(key=st.sampled_from(sorted(TABLE_OF)), value=st.text(min_size=0, max_size=12))
def test_no_text_on_the_command_line_gets_past_validation_or_breaks_it(key: str, value: str) -> None:
    try:
        loaded = load_settings("dev", {key: value})
    except SettingsError as error:
        assert all(line.startswith(("-c ", "infra/environments/dev.toml: ")) for line in error.mistakes)
    else:
        got = getattr(getattr(loaded, TABLE_OF[key]), key)
        as_text = ",".join(got) if isinstance(got, tuple) else str(got)
        assert as_text.lower() == ",".join(part.strip() for part in value.lower().split(",") if part.strip())


@settings(max_examples=30, deadline=None)
@given(idle=st.integers(1, 4000), keep=st.integers(2, 5000))
def test_keep_alive_is_above_the_idle_timeout_or_refused(idle: int, keep: int) -> None:
    context = {"idle_timeout_s": str(idle), "keep_alive_s": str(keep)}
    try:
        edge = load_settings("dev", context).edge
    except SettingsError as error:
        assert keep <= idle and "edge.keep_alive_s" in str(error)
    else:
        assert edge.keep_alive_s > edge.idle_timeout_s


def test_names_are_unique_across_tables() -> None:
    assert len(TABLE_OF) == sum(len(table.model_fields) for table in TABLES.values())


def test_an_override_may_name_its_table() -> None:
    assert load_settings("dev", {"fleet.instance_type": "inf2.xlarge"}).fleet.instance_type == "inf2.xlarge"
    with pytest.raises(SettingsError, match=r"-c engine\.instance_type"):
        load_settings("dev", {"engine.instance_type": "inf2.xlarge"})


def test_an_unknown_override_is_refused_with_the_nearest_name_and_the_cdks_own_are_left_alone() -> None:
    with pytest.raises(SettingsError, match="did you mean desired_capacity"):
        load_settings("dev", {"desired_capacty": "2"})
    load_settings("dev", {"@aws-cdk/core:x": True, "aws:cdk:y": 1, "cli-telemetry": False})  # type: ignore[dict-item]


def test_several_wrong_overrides_are_all_named() -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings("dev", {"desired_capacity": "many", "https": "yes", "model": "a b", "rehearsal": "1"})
    named = {line.split(" = ")[0] for line in caught.value.mistakes}
    assert {"-c rehearsal", "-c desired_capacity", "-c model", "-c https"} <= named


def test_rehearsal_changes_profile_model_and_image_and_nothing_else() -> None:
    for name in environment_names():
        plain = load_settings(name).model_dump()
        rehearsed = load_settings(name, {"rehearsal": "true"}).model_dump()
        changed = {
            f"{table}.{key}"
            for table in TABLES
            for key in TABLES[table].model_fields
            if plain[table][key] != rehearsed[table][key]
        }
        assert changed == {"engine.profile", "engine.model", "fleet.image"}


def test_an_override_wins_over_the_rehearsal_table() -> None:
    settings = load_settings("dev", {"rehearsal": "true", "model": "org/other"})
    assert (settings.engine.model, settings.engine.profile) == ("org/other", "cpu")


@pytest.mark.parametrize("table", ['profile = "cpu"', 'profile = "no"\nmodel = "m"\nimage = "ami-1"'])
def test_a_wrong_rehearsal_table_is_refused_on_every_synth(tmp_path: Path, table: str) -> None:
    path = write(tmp_path)
    text = path.read_text()
    path.write_text(text[: text.index("[rehearsal]")] + f"[rehearsal]\n{table}\n")
    assert any("rehearsal" in line for line in mistakes(tmp_path))


def test_rehearsal_needs_its_table(tmp_path: Path) -> None:
    path = write(tmp_path)
    text = path.read_text()
    path.write_text(text[: text.index("[rehearsal]")])
    assert load_settings("dev", {}, tmp_path).environment == "dev"
    assert "[rehearsal] is missing" in mistakes(tmp_path, {"rehearsal": "true"})[0]
