"""The split's benchmark: its rows are what they say, and it names what it does not know."""

import json

import pytest

from experiments import bench_split


def test_the_command_times_every_contender_of_a_case(tmp_path, capsys):
    out = tmp_path / "split.json"
    arguments = [
        "--cases",
        "E64 P8 S80 zipf heaviest",
        "--instances",
        "2",
        "--calls",
        "3",
        "--json",
        str(out),
    ]
    assert bench_split.main(arguments) == 0
    rows = json.loads(out.read_text())["rows"]
    found = {(row["contender"], row["metric"]): row["value"] for row in rows}
    assert {contender for contender, _ in found} >= {"peak", "solve", "rows", "wrapper", "twin"}
    for contender in ("peak", "solve", "rows", "twin"):
        median, slowest, call = (found[contender, m] for m in ("median_us", "max_us", "max_call_us"))
        assert 0 < median <= slowest <= call
    assert found["twin", "median_us"] > found["peak", "median_us"], "plain Python is no match"
    assert "E64 P8 S80 zipf heaviest" in capsys.readouterr().out


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="--instances 0 and --calls 15 must be 1 or more"):
        bench_split.main(["--instances", "0"])
    with pytest.raises(ValueError, match="--cases 'E7' matches no case"):
        bench_split.main(["--cases", "E7"])
