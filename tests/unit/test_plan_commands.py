"""The commands as users and scripts call them: keys, exit codes, and bad input without a traceback."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer
from typer.testing import CliRunner, Result

from app.plan.commands import register

ROWS = str(resources.files("app.plan").joinpath("data/published_inf2_performance.csv"))
SAMPLE = str(Path(__file__).parent / "plan_data" / "azure_llm_2023_conv_sample.csv")
PLAN_KEYS = [
    "fits",
    "reasons",
    "tp_degree",
    "replicas_per_instance",
    "weights_bytes_per_core",
    "kv_cache_bytes_per_core",
    "ttft_ms",
    "tpot_ms",
    "output_tokens_per_second",
    "usd_per_million_output_tokens",
    "warnings",
]

app = typer.Typer()
register(app)


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def document(*arguments: str, code: int = 0) -> dict:
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def test_plan_document_has_the_fixed_keys_first() -> None:
    found = document("plan", "--model", "Llama-3-8B", "--instance", "inf2.8xlarge", "--tp-degree", "2")
    assert list(found)[: len(PLAN_KEYS)] == PLAN_KEYS
    assert found["fits"] is True
    assert found["reasons"] == []
    assert (found["tp_degree"], found["replicas_per_instance"]) == (2, 1)
    low, high = found["ranges"]["tpot_ms"]
    assert low < found["tpot_ms"] < high
    assert found["usd_per_million_output_tokens"] > 0


@pytest.mark.parametrize("degree", ["3", "12", "16"])
def test_undocumented_degree_is_an_answer_not_an_error(degree: str) -> None:
    found = document(
        "plan", "--model", "Llama-3-8B", "--instance", "inf2.48xlarge", "--tp-degree", degree, code=1
    )
    assert found["fits"] is False
    assert f"degree {degree} is not documented" in found["reasons"][0]
    assert found["tpot_ms"] is None
    assert found["proposals"]


def test_plan_from_a_config_file(tmp_path: Path) -> None:
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    by_folder = document("plan", "--model", str(tmp_path), "--instance", "inf2.xlarge", "--tp-degree", "2")
    by_name = document("plan", "--model", "Qwen2.5-0.5B", "--instance", "inf2.xlarge", "--tp-degree", "2")
    for key in ("weights_bytes_per_core", "kv_cache_bytes_per_core", "tpot_ms"):
        assert by_folder[key] == by_name[key]


def test_plan_for_people() -> None:
    result = run("plan", "--model", "Llama-3-70B", "--instance", "inf2.24xlarge")
    assert result.exit_code == 1
    for text in ("does not fit", "a core needs", "Nearest plans that fit", "inf2.48xlarge"):
        assert text in result.stdout
    assert "80 % range" in run("plan", "--model", "Llama-3-8B").stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "nobody/nothing"), "unknown model 'nobody/nothing'"),
        (("--model", "Llama-3-8B", "--instance", "inf2.4xlarge"), "expected one of inf2.xlarge"),
        (("--model", "Llama-3-8B", "--profile", "latest"), "expected one of vllm-neuron-2.28"),
        (("--model", "Llama-3-8B", "--tp-degree", "many"), "--tp-degree 'many' must be"),
        (("--model", "Llama-3-8B", "--tp-degree", "0"), "--tp-degree '0' must be"),
        (("--model", "Llama-3-8B", "--weights-dtype", "fp8"), "must be one of bf16, int8"),
        (("--model", "Llama-3-8B", "--purchase", "gift"), "must be one of on_demand"),
        (("--model", "Llama-3-8B", "--region", "mars-1"), "no prices for region 'mars-1'"),
        (("--model", "Llama-3-8B", "--utilisation", "0"), "--utilisation 0.0 must be"),
        (("--model", "Llama-3-8B", "--context-buckets", "512,128"), "must be whole numbers, ascending"),
        (("--model", "Llama-3-8B", "--slo-tpot-ms", "-1"), "must be more than 0"),
        (("--model", "Llama-3-8B", "--prices", "/nowhere.json"), "cannot read prices"),
        (("--model", "Llama-3-8B", "--batch-size", "0"), "batch-size"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_bad_input_is_named_and_ends_with_2(arguments: tuple[str, ...], said: str, as_json: bool) -> None:
    result = run("plan", *arguments, *(["--json"] if as_json else []))
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stdout == ""


def test_page_is_self_contained_and_its_drawing_is_well_formed(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    result = run("plan", "--model", "Llama-3-8B", "--instance", "inf2.48xlarge", "--html", str(page))
    assert result.exit_code == 0
    text = page.read_text()
    assert not re.search(r"""(src|href)\s*=|url\(|@import|<script""", text)
    drawing = ElementTree.fromstring(re.search(r"<svg.*</svg>", text, re.DOTALL).group())
    names = {"inf2.8xlarge", "inf2.24xlarge", "inf2.48xlarge"}
    texts = {element.text for element in drawing.iter("text")}
    assert names <= texts
    assert "this plan" in texts
    line = next(drawing.iter("polyline")).attrib["points"].split()
    xs = [float(point.split(",")[0]) for point in line]
    ys = [float(point.split(",")[1]) for point in line]
    assert len(line) >= 3
    assert xs == sorted(xs)  # slower to the right …
    assert ys == sorted(ys)  # … and cheaper downwards
    assert all(0 <= x <= 880 for x in xs)
    assert all(0 <= y <= 500 for y in ys)


def test_page_of_a_plan_that_fits_nowhere(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    assert run("plan", "--model", "Llama-3.1-405B", "--html", str(page)).exit_code == 1
    assert "No plan of the sweep fits" in page.read_text()


def test_page_escapes_what_it_is_given(tmp_path: Path) -> None:
    folder = tmp_path / "<b>x"
    folder.mkdir()
    source = json.loads(resources.files("app.plan").joinpath("data/models.json").read_text())
    (folder / "config.json").write_text(json.dumps(source["models"][0]["config"]))
    page = tmp_path / "plan.html"
    assert run("plan", "--model", str(folder), "--html", str(page)).exit_code == 0
    assert "<b>x" not in page.read_text()
    assert "&lt;b&gt;x" in page.read_text()


def test_validate_scores_without_fitting() -> None:
    found = document("plan-validate", "--csv", ROWS)
    assert found["rows"] == 14
    assert set(found["mape"]) == {"ttft", "tpot", "throughput"}
    assert found["mape"]["tpot"] < 0.03
    assert set(found["leave_one_model_out"]) == {"Llama-2-7b", "Llama-3-8B", "Llama-3-70B"}
    assert "leaving one model out" in run("plan-validate", "--csv", ROWS).stdout


def test_validate_takes_models_that_the_fit_never_saw(tmp_path: Path) -> None:
    head = Path(ROWS).read_text().splitlines()[0]
    path = tmp_path / "rows.csv"
    path.write_text(f"{head}\nCodeLlama-13b-hf,24,1,128,3968,100,40,50,10,bf16,2.18.0,inf2.48xlarge\n")
    found = document("plan-validate", "--csv", str(path))
    assert found["rows"] == 1
    assert 0 < found["mape"]["tpot"] < 0.5


def test_validate_names_a_bad_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("model\nx\n")
    result = run("plan-validate", "--csv", str(path))
    assert result.exit_code == 2
    assert "missing column(s) tp_degree" in result.stderr


def test_buckets_document() -> None:
    found = document("buckets", "--trace", SAMPLE, "--count", "5", "--max-len", "4096")
    assert len(found["buckets"]) == 5
    assert found["buckets"][-1] == found["baseline_buckets"][-1] == 4096
    assert all(edge % 64 == 0 for edge in found["buckets"])
    assert found["padding_fraction"] <= found["baseline_padding_fraction"] / 2
    assert found["requests"] + found["over_max"] == 404


def test_buckets_says_what_does_not_count() -> None:
    result = run("buckets", "--trace", SAMPLE, "--count", "3", "--max-len", "2048", "--json")
    found = json.loads(result.stdout)
    assert found["over_max"] > 0
    assert re.search(rf"{found['over_max']} request\(s\) longer than 2048 tokens.*row \d+", result.stderr)


def test_buckets_for_people() -> None:
    result = run(
        *("buckets", "--trace", SAMPLE, "--max-len", "4096", "--edges", "512,4096"),
        *("--max-batch", "16", "--replicas", "2"),
    )
    assert result.exit_code == 0
    for text in ("█", "─", "worth compiling", "given edges 512, 4096: padding", "decode batch sizes: "):
        assert text in result.stdout


@pytest.mark.parametrize(
    ("content", "more", "said"),
    [
        ("length\n5\n-2\n", (), "1 row(s) with a negative length (row 3)"),
        ("length\n5\nx\n", (), "no whole number (row 3)"),
        ("length\n5000\n", (), "no request is at most 4096 tokens long"),
        ("length\n5\n", ("--edges", "9,3"), "must be whole numbers, ascending"),
        ("length\n5\n", ("--max-batch", "8"), "needs a trace with arrival times"),
        ("length\n5\n", ("--multiple", "0"), "multiple"),
        ("length\n5\n", ("--prefill-ms", "nan"), "--prefill-ms nan must be more than 0"),
        ("length\n5\n", ("--compile-minutes", "0"), "--compile-minutes 0 must be more than 0"),
        ("length\n5\n", ("--tpot-ms", "inf"), "--tpot-ms inf must be more than 0, and finite"),
        ("time,length\nnan,5\ninf,6\n1,7\n", (), "neither seconds nor a date and time (row 2, 3)"),
    ],
)
def test_buckets_name_bad_input(tmp_path: Path, content: str, more: tuple[str, ...], said: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(content)
    result = run("buckets", "--trace", str(path), "--max-len", "4096", *more)
    assert result.exit_code == 2
    assert said in result.stderr


def test_buckets_may_leave_faulty_rows_out(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("length\n5\n-2\n")
    result = run("buckets", "--trace", str(path), "--max-len", "64", "--count", "1", "--skip-bad", "--json")
    assert json.loads(result.stdout)["left_out"] == 1
    assert "left out: 1 row(s) with a negative length" in result.stderr


def test_compare_document_and_table() -> None:
    found = document("plan-compare")
    assert {row["claim"]["instance"] for row in found["rows"]} >= {"p4d.24xlarge", "inf2.48xlarge"}
    assert found["findings"]
    assert "not predicted" in " ".join(run("plan-compare").stdout.split())
