"""Studies of many runs: what is read, cached and paired; a real run where that takes seconds only."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments import bench_training, studies
from experiments.studies import Result, Run, interval, paired, read_result, train_all
from experiments.training_plots import bits_by_violation, dead_over_steps

ROOT = Path(__file__).resolve().parents[2]


def result(bits: float, seed: int = 0) -> Result:
    rng = np.random.default_rng(seed)
    return Result(
        bits_per_byte=bits, step_W=np.arange(10.0), dead_W=np.arange(10.0), violation_W=rng.uniform(1, 2, 10),
        entropy_W=np.linspace(1, 0.5, 10), floor=0.1, alarms=((3, "COLLAPSING"),),
    )  # fmt: skip


def write(path, lines):
    path.mkdir()
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_result_is_what_the_run_wrote(tmp_path):
    names = ("step", "balance/dead_experts", "balance/max_violation", "balance/entropy")
    floor = {"kind": "train", "balance/max_violation_floor": 0.2}
    write(tmp_path / "run", [
        floor | dict(zip(names, (10, 1.0, 3.0, 0.5))),
        {"kind": "alarm", "step": 12, "state": "COLLAPSING", "layer": 0},
        {"kind": "alarm", "step": 15, "state": "HEALTHY", "layer": 0},
        floor | dict(zip(names, (20, 2.0, 1.0, 0.7))),
        {"kind": "valid", "step": 20, "mean": 3.5},
    ])  # fmt: skip
    found = read_result(tmp_path / "run")
    assert found.bits_per_byte == 3.5 and found.dead == 2.0 and found.excess == pytest.approx(0.8)
    assert found.alarms == ((12, "COLLAPSING"),)


def test_a_run_without_a_validation_is_refused(tmp_path):
    write(tmp_path / "run", [{"kind": "start", "step": 0}])
    with pytest.raises(ValueError, match="not validated"):
        read_result(tmp_path / "run")


def test_runs_are_paired_by_their_seeds():
    difference = paired({1: 1.0, 2: 2.0, 3: 9.0}, {1: 0.9, 2: 2.2, 4: 0.0})
    assert difference[0] == pytest.approx(-0.05) and difference[1] == pytest.approx(-0.2)
    with pytest.raises(ValueError, match="none in common"):
        paired({1: 1.0}, {2: 1.0})


def test_the_interval_covers_the_mean_in_about_19_of_20_studies():
    rng = np.random.default_rng(1)
    inside = [low <= 0 <= high for _, low, high in (interval(rng.normal(size=30)) for _ in range(200))]
    assert 0.88 < np.mean(inside) < 0.99


def test_a_run_that_is_there_is_not_trained_again_and_one_that_fails_says_why(tmp_path, monkeypatch):
    trained = []

    def pretend(run, config, folder):
        trained.append(run)
        path = folder / studies._name(run, config)
        write(path, [{"kind": "train", "step": 1, "balance/dead_experts": 0, "balance/max_violation": 1,
                      "balance/entropy": 1, "balance/max_violation_floor": 0.1},
                     {"kind": "valid", "step": 1, "mean": 2.0}])  # fmt: skip
        (path / "complete").touch()

    monkeypatch.setattr(studies, "_train", pretend)
    runs = [Run("c", "a", seed, ("train.steps=1",)) for seed in (1, 2)]
    said = []
    for _ in range(2):
        found = train_all(runs, "collapse.toml", tmp_path / "runs", workers=1, say=said.append)
    assert len(trained) == 2 and set(found) == set(runs) and said[1].startswith("2/2 c, a, seed 2")
    assert said[2:] == [f"2 of 2 runs are in {tmp_path / 'runs'} already, of the same code"]
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match=r"unknown key train\.stepz"):
        train_all([Run("c", "a", 1, ("train.stepz=1",))], "collapse.toml", tmp_path / "runs", workers=1)


def test_a_run_of_a_changed_config_is_another_run(tmp_path):
    config, run = tmp_path / "a.toml", Run("c", "a", 1, ())
    names = set()
    for text in ("[train]\nsteps = 1\n", "[train]\nsteps = 2\n"):
        config.write_text(text)
        names.add(studies._name(run, str(config)))
    assert len(names) == 2 and studies._name(run._replace(case="d"), str(config)) in names


def test_a_run_after_a_change_of_code_is_another_run(tmp_path, monkeypatch):
    for name in ("balancer/a.py", "moe/b.py", "routing/c.py", "experiments/d.py", "experiments/bench_e.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")

    def name_now():
        studies.code_digest.cache_clear()
        return studies._name(Run("c", "a", 1, ()), "collapse.toml")

    monkeypatch.setattr(studies, "_ROOT", tmp_path)
    names = [name_now()]
    for changed in ("balancer/a.py", "moe/b.py", "routing/c.py", "experiments/d.py"):
        (tmp_path / changed).write_text("x = 2\n")
        names.append(name_now())
    (tmp_path / "balancer" / "a.py").rename(tmp_path / "balancer" / "z.py")
    names.append(name_now())
    (tmp_path / "moe" / "deeper").mkdir()
    (tmp_path / "moe" / "deeper" / "f.py").touch()
    names.append(name_now())
    assert len(set(names)) == 7
    (tmp_path / "experiments" / "bench_e.py").write_text("x = 2\n")  # which reads results, and makes none
    assert name_now() == names[-1]
    monkeypatch.undo()
    assert name_now() not in names


def test_no_training_runs_the_code_of_a_benchmark():
    code = (
        "import sys, experiments.train; print([name for name in sys.modules if 'experiments.bench' in name])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_the_plots_are_pictures():
    arms = {"off": [result(3.0), result(3.1, 1)], "on": [result(2.9, 2)]}
    for data in (dead_over_steps({"a": arms, "b": arms}), bits_by_violation(arms)):
        assert data.startswith(b"\x89PNG")


def test_sizes_below_one_are_refused():
    with pytest.raises(ValueError, match="--seeds 0"):
        bench_training.main(["--seeds", "0"])


@pytest.mark.slow
def test_a_small_study_trains_and_writes_its_table(tmp_path, capsys):
    arguments = ["--part", "collapse", "--seeds", "1", "--steps", "12", "--folder", str(tmp_path / "runs")]
    assert (
        bench_training.main([*arguments, "--json", str(tmp_path / "o.json"), "--plots", str(tmp_path)]) == 0
    )
    rows = json.loads((tmp_path / "o.json").read_text())["rows"]
    assert len(rows) == 4 * 3 * 4 and (tmp_path / "training_collapse.png").is_file()
    assert "fast router" in capsys.readouterr().out
