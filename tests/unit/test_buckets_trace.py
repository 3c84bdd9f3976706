"""Traces: what is accepted, and how every fault is named, counted and placed."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.plan.trace import TraceError, read_trace

SAMPLE = Path(__file__).parent / "plan_data" / "azure_llm_2023_conv_sample.csv"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return path


def test_azure_conversation_sample() -> None:
    trace = read_trace(SAMPLE)
    assert trace.requests == 404 == len(trace.arrivals_s) == len(trace.output_tokens)
    assert trace.duration_h == pytest.approx(0.97, abs=0.02)
    assert trace.arrivals_s[0] == 0
    assert list(trace.arrivals_s) == sorted(trace.arrivals_s)


def test_histogram_weighs_by_its_counts(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, "length,count\n100,5\n200,0\n300,2\n100,1\n"))
    assert trace.counts == {100: 6, 300: 2}
    assert trace.duration_h is None


def test_one_number_a_line(tmp_path: Path) -> None:
    assert read_trace(written(tmp_path, "12\n\n12\n7\n")).counts == {12: 2, 7: 1}


def test_a_named_column(tmp_path: Path) -> None:
    path = written(tmp_path, "when,words\n1,9\n")
    with pytest.raises(TraceError, match=r"no length column.*the header has when, words.*--column"):
        read_trace(path)
    assert read_trace(path, column="words").counts == {9: 1}
    with pytest.raises(TraceError, match="expected letters"):
        read_trace(path, column="letters")


def test_faults_are_named_counted_and_placed(tmp_path: Path) -> None:
    path = written(tmp_path, "ContextTokens\n5\n-3\n\nabc\n7\n-1\n0\n1.5\n" + '""\n')
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    text = str(caught.value)
    for said in (
        "2 row(s) with a negative length (row 3, 7)",
        "2 row(s) with a length that is no whole number (row 5, 9)",
        "1 row(s) with a length of zero (row 8)",
        "2 row(s) with a missing length (row 4, 10)",
    ):
        assert said in text
    trace = read_trace(path, skip_bad=True)
    assert trace.counts == {5: 1, 7: 1}
    assert trace.faults.count == 7


def test_missing_cells_are_faults(tmp_path: Path) -> None:
    path = written(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens\n1,,4\n,,\n3,5,x\nsoon,5,4\n4,9,1\n\n")
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    for said in (
        "2 row(s) with a missing length (row 2, 3)",
        "output length that is no whole number (row 4)",
        "time that is neither seconds nor a date and time (row 5)",
    ):
        assert said in str(caught.value)


def test_no_usable_rows_says_why(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"no usable rows: 1 row\(s\) with a negative length \(row 2\)"):
        read_trace(written(tmp_path, "length\n-1\n\n"), skip_bad=True)


def test_numbers_are_read_as_tables_write_them(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"1 row\(s\) with a length that is no whole number \(row 2\)"):
        read_trace(written(tmp_path, "length\n1_000\n7\n"))


def test_many_faults_show_the_first(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"9 row\(s\) with a negative length \(row 2, 3, 4, 5, 6, …\)"):
        read_trace(written(tmp_path, "length\n" + "-1\n" * 9))


def test_lengths_over_the_maximum_are_counted_with_their_first_row(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, "length\n10\n99\n70\n99\n"))
    assert trace.over(50) == (3, 3)
    assert trace.over(100) == (0, None)


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "is empty"), (b"length\n", "no usable rows"), (b"\xff\xfe\x00", "cannot read")],
)
def test_unusable_files(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=said):
        read_trace(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot read"):
        read_trace(tmp_path / "nothing.csv")
