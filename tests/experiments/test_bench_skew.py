"""The skew benchmark: what it measures is what it says, on a tiny case."""

import json
from dataclasses import replace

import numpy as np
import pytest

from experiments import bench_skew
from experiments.bench_layer import Case

TINY = Case(experts=4, top_k=2, tokens=24, width=32, hidden=16)


def test_the_skew_of_a_case_is_the_load_of_its_fullest_rank():
    assert bench_skew.rank_skew(TINY) == 1.0
    assert bench_skew.rank_skew(replace(TINY, skew="only:0-1")) == 2.0
    # every token has expert 0, and one of the other three: rank 0 gets 24 + a third of 24, of a mean of 24
    assert 1.0 < bench_skew.rank_skew(replace(TINY, skew="always:0")) < 2.0


def test_the_forced_split_moves_the_rows_it_was_told_to():
    split = bench_skew._Take(30, 2)
    counts_PE = np.array([[24, 4, 9, 11], [20, 5, 10, 13]])
    rows_PS = split(counts_PE, np.array([0, 1, -1, 2, 3, 0]))
    assert rows_PS.tolist() == [[14, 4, 0, 9, 11, 10], [0, 5, 0, 10, 13, 20]]


@pytest.mark.dist
def test_the_command_measures_writes_and_draws(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_skew, "SWEEP", TINY)
    monkeypatch.setattr(bench_skew, "REPLICA", TINY)
    monkeypatch.setattr(bench_skew, "EXPONENTS", (0.0, 2.0))
    monkeypatch.setattr(bench_skew, "ROWS", (4, 8))
    monkeypatch.setattr(bench_skew, "ON_SKEW", ("balanced", "counterpoise", "replicas"))
    out, picture = tmp_path / "skew.json", tmp_path / "skew.png"
    assert bench_skew.main(["--json", str(out), "--plot", str(picture), "--rounds", "2"]) == 0
    figures = json.loads(out.read_text())
    assert [point["exponent"] for point in figures["sweep"]] == [0.0, 2.0]
    assert figures["sweep"][1]["skew"] > figures["sweep"][0]["skew"] >= 1.0
    assert figures["replica"]["formula_rows"] > 0 and len(figures["replica"]["with_ms"]) == 3
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "zipf 2.00, fullest rank" in printed and "replica of E4" in printed
    with pytest.raises(ValueError, match="--rounds 0"):
        bench_skew.main(["--rounds", "0"])
