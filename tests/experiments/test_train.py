"""Training as a user starts it: what a run leaves behind, how it stops, resumes, and refuses."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_tensors

from balancer import load_trace
from experiments.config import TrainConfig, load_config
from experiments.state_tree import unpack
from experiments.train import learning_rate, set_rates

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.dist, pytest.mark.deepspeed]


def records(run: Path, kind: str) -> list[dict]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def losses(run: Path) -> dict[int, tuple[float, float, float]]:
    """Step -> figures that would differ in the last bit if anything did."""
    keys = ("loss/total", "loss/ce", "optim/grad_norm")
    return {r["step"]: tuple(r[key] for key in keys) for r in records(run, "train")}


def weights(run: Path) -> dict[str, np.ndarray]:
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    return load_file(newest / "model.safetensors")


def assert_same_run(run: Path, whole: Path) -> None:
    assert losses(run) == losses(whole)
    np.testing.assert_array_equal(
        load_trace(run / "loads").tokens_per_expert_WLE, load_trace(whole / "loads").tokens_per_expert_WLE
    )
    ours, theirs = weights(run), weights(whole)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)


# ---- what a run leaves behind ---------------------------------------------------------------------------


def test_run_directory_holds_what_the_readme_says(finished_run):
    names = {path.name for path in finished_run.iterdir()} - {".lock"}
    assert names == {
        "config.toml", "deepspeed.json", "versions.json", "metrics.jsonl", "loads", "tb", "checkpoints",
        "watch",
    }  # fmt: skip
    config = load_config(finished_run / "config.toml")
    assert config.train.steps == 6
    assert config.router.balance_scope == "previous"
    facts = json.loads((finished_run / "versions.json").read_text())
    assert facts["world_size"] == 2
    assert len(facts["corpus_sha256"]) == 64


def test_every_steps_load_is_in_the_trace_and_conserved(finished_run):
    trace = load_trace(finished_run / "loads")
    assert trace.steps_W.tolist() == [1, 2, 3, 4, 5, 6]
    # 2 ranks x 2 micro-batches x 2 sequences x 24 tokens x top 2, in each of the 2 MoE layers
    assert (trace.tokens_per_expert_WLE.sum(axis=2) == 2 * 2 * 2 * 24 * 2).all()
    assert trace.tokens_per_expert_WLE.shape == (6, 2, 4)


def test_metrics_hold_losses_validation_and_baselines(finished_run):
    steps = records(finished_run, "train")
    assert [r["step"] for r in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[-1]["loss/ce"] < steps[0]["loss/ce"]
    phases = ("route", "counts", "dispatch", "experts", "combine", "forward", "backward", "optimizer", "data")
    assert all(steps[0][f"time_ms/{phase}"] > 0 for phase in phases)
    valid = records(finished_run, "valid")
    assert [r["step"] for r in valid] == [3, 6]
    (simple,) = records(finished_run, "baselines")
    assert simple["bigram"].keys() == simple["lzma"].keys() == valid[0]["bits_per_byte"].keys()
    assert len(valid[0]["bits_per_byte"]) >= 4


def test_layer_balance_agrees_with_the_load_trace(finished_run):
    last = records(finished_run, "train")[-1]
    counts_LE = load_trace(finished_run / "loads").tokens_per_expert_WLE[-1]
    rows_LP = counts_LE.reshape(2, 2, 2).sum(axis=2)  # 4 experts at home on 2 ranks
    for layer in range(2):
        even = rows_LP[layer].mean() / rows_LP[layer].max()
        assert last[f"balance/layer_{layer:02d}"] == pytest.approx(even)


def test_sample_continues_a_prompt(finished_run, counterpoise):
    done = counterpoise("sample", "whole", "--prompt", "def ", "--tokens", 5, cwd=finished_run.parents[1])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("def ")


# ---- stopping and resuming ------------------------------------------------------------------------------


def test_extended_run_equals_one_that_never_stopped(finished_run, counterpoise, small_toml, tmp_path):
    """Stopped after 3 steps, extended to 6: every loss, count and weight to the bit (constant schedule of lr
    would do; the cosine of another length would not, so it is set aside)."""
    constant = ("--set", "train.schedule=constant")
    for name, steps in (("whole", 6), ("parts", 3)):
        length = ("--set", f"train.steps={steps}")
        done = counterpoise("train", "--config", small_toml, "--name", name, *constant, *length, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    done = counterpoise("train", "--resume", "parts", "--set", "train.steps=6", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resuming runs/parts after step 3" in done.stdout
    assert_same_run(tmp_path / "runs" / "parts", tmp_path / "runs" / "whole")


def copy_run(finished_run: Path, folder: Path, keep_step: int | None = 3) -> Path:
    """The finished run in another folder, with checkpoints up to a step only."""
    run = folder / "runs" / "copy"
    shutil.copytree(finished_run, run)
    for path in (run / "checkpoints").iterdir():
        if keep_step is None or int(path.name[-8:]) > keep_step:
            shutil.rmtree(path)
    return run


def test_resumed_run_replaces_what_was_recorded_after_its_checkpoint(finished_run, counterpoise, tmp_path):
    run = copy_run(finished_run, tmp_path)
    done = counterpoise("train", "--resume", "copy", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_run(run, finished_run)
    assert len(records(run, "train")) == 6
    assert len(records(run, "resume")) == 1


def test_truncated_checkpoint_is_named_and_the_previous_one_used(finished_run, counterpoise, tmp_path):
    run = copy_run(finished_run, tmp_path, keep_step=6)
    victim = run / "checkpoints" / "step-00000006" / "model.safetensors"
    victim.write_bytes(victim.read_bytes()[:-1])
    done = counterpoise("train", "--resume", "copy", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"step 6 is not usable: \S*model.safetensors has \d+ bytes, expected \d+", done.stdout)
    assert "resuming runs/copy after step 3" in done.stdout
    assert_same_run(run, finished_run)


def test_run_without_a_complete_checkpoint_starts_over_aloud(finished_run, counterpoise, tmp_path):
    run = copy_run(finished_run, tmp_path, keep_step=None)
    (run / "checkpoints" / "step-00000003.partial").mkdir()  # a save that was killed
    done = counterpoise("train", "--resume", "copy", "--set", "train.steps=6", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no complete checkpoint: starting from step 0" in done.stdout
    assert_same_run(run, finished_run)
    assert not list((run / "checkpoints").glob("*.partial"))


def test_reshaped_run_trains_on_as_if_nothing_had_changed(finished_run, counterpoise, tmp_path):
    """EP 2 under ZeRO 1 goes on as one rank under ZeRO 3, then as two ranks with an EP size of 1 under 2."""
    run = copy_run(finished_run, tmp_path)
    one = ("--ranks", 1, "--set", "train.deepspeed=zero3.json")
    refused = counterpoise("train", "--resume", "copy", "--reshape", *one, cwd=tmp_path)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert "= 4 sequences a step, but the run has had 8" in refused.stderr, refused.stderr
    assert "use --set train.micro_batch=2 --set train.accumulation=4" in refused.stderr, refused.stderr
    four = ("--set", "train.accumulation=4", *one)
    done = counterpoise("train", "--resume", "copy", "--reshape", *four, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ranks: 1 = EP 1 x EDP 1, ZeRO 3" in done.stdout
    assert_alike(run, finished_run)
    assert load_config(run / "config.toml").train.accumulation == 4
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    split = ("--ranks", 2, "--set", "train.ep_size=1", "--set", "train.deepspeed=zero2.json")
    back = (*split, "--set", "train.accumulation=2")
    done = counterpoise("train", "--resume", "copy", "--reshape", *back, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ranks: 2 = EP 1 x EDP 2, ZeRO 2" in done.stdout
    assert_alike(run, finished_run)


def assert_alike(run: Path, whole: Path) -> None:
    """Equal to rounding: sums over ranks and micro-batches are made in another order."""
    for step, values in losses(whole).items():
        assert losses(run)[step] == pytest.approx(values, rel=1e-5), step
    ours, theirs = load_trace(run / "loads"), load_trace(whole / "loads")
    np.testing.assert_array_equal(ours.tokens_per_expert_WLE.sum(2), theirs.tokens_per_expert_WLE.sum(2))
    assert abs(ours.tokens_per_expert_WLE - theirs.tokens_per_expert_WLE).sum() <= 8, "a near-tie or two"


WITH_LOOP = """
import sys
import numpy as np
import torch
from experiments import session, train

class Loop:
    def __init__(self):
        self.state = {"calls": 0, "steps": np.zeros(0, np.int64), "deep": [torch.zeros(2), None]}
        self.state["random"] = []
    def state_dict(self):
        return self.state
    def load_state_dict(self, state):
        self.state = state
    def update(self, step):
        self.state["calls"] += 1
        self.state["steps"] = np.append(self.state["steps"], step)
        self.state["deep"][0] += step
        self.state["random"].append(float(torch.rand(())))

build, record_step = session.build, session.record_step

def with_loop(*args):
    trainer = build(*args)
    trainer.loops["counter"] = Loop()
    return trainer

def counting(trainer, outcome, progress):
    trainer.loops["counter"].update(outcome.sample.step)
    trainer.model.blocks[1].feed_forward.router.bias.bias_E += torch.arange(4.0) * outcome.sample.step
    record_step(trainer, outcome, progress)

session.build, session.record_step = with_loop, counting
sys.exit(train.main())
"""


def test_loops_router_bias_forced_draws_and_random_numbers_are_taken_back(
    rank_env, counterpoise, small_toml, tmp_path
):
    (tmp_path / "with_loop.py").write_text(WITH_LOOP)
    env = {**rank_env, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    options = {"cwd": tmp_path, "env": env, "capture_output": True, "text": True, "timeout": 120}
    new = ["--config", str(small_toml), "--name", "loop", "--set", "train.steps=3"]
    new += ["--set", "router.forced=uniform", "--set", "train.schedule=constant"]
    for arguments in (new, ["--resume", "loop", "--set", "train.steps=5"]):
        script = f"from experiments.launch import launch; exit(launch({arguments}, 2, module='with_loop'))"
        done = subprocess.run([sys.executable, "-c", script], check=False, **options)
        assert done.returncode == 0, done.stdout + done.stderr
    path = tmp_path / "runs" / "loop" / "checkpoints" / "step-00000005"
    packed = json.loads((path / "run.json").read_text())["loops"]["counter"]
    state = unpack(packed, load_tensors(path / "loops.safetensors"))
    assert (state["calls"], state["steps"].tolist()) == (5, [1, 2, 3, 4, 5])
    assert (state["deep"][0].tolist(), state["deep"][1]) == ([15.0, 15.0], None)
    buffers = load_tensors(path / "buffers.safetensors")
    router = "blocks.1.feed_forward.router"
    assert buffers[f"{router}.bias.bias_E"].tolist() == [0.0, 15.0, 30.0, 45.0]
    assert buffers[f"{router}.forced.draws"].item() == 5 * 2, "one a training forward"
    saved = load_tensors(path.with_name("step-00000003") / "random" / "rank-0.safetensors")["cpu"]
    generator = torch.Generator()
    generator.set_state(saved)
    assert state["random"][3:] == torch.rand(2, generator=generator).tolist()
    done = counterpoise("train", "--resume", "loop", "--set", "train.steps=6", cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "has the state of the loops ['counter'], and this run has []" in done.stderr


def test_ctrl_c_saves_and_says_how_to_resume(counterpoise, rank_env, small_toml, tmp_path):
    command = [sys.executable, "-m", "experiments.cli", "train", "--config", str(small_toml), "--name", "cut"]
    steps = ["--set", "train.steps=4000", "--set", "train.schedule=constant", "--set", "train.valid_every=0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen([*command, *steps], cwd=tmp_path, env=rank_env, **pipes)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("step    4/"):
            process.send_signal(signal.SIGINT)
            break
    rest, _ = process.communicate(timeout=120)
    output = "".join(lines) + rest
    assert process.returncode == 130, output
    stopped = re.search(r"stopped after step (\d+) of 4000, saved", output)
    assert stopped, output
    assert "./lab train --resume cut" in output
    last = int(stopped[1])
    newest = sorted((tmp_path / "runs" / "cut" / "checkpoints").iterdir())[-1]
    assert newest.name == f"step-{last:08d}"
    done = counterpoise("train", "--resume", "cut", "--set", f"train.steps={last + 1}", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"resuming runs/cut after step {last}" in done.stdout


def test_ctrl_c_under_deepspeeds_launcher_saves_too(rank_env, small_toml, tmp_path):
    """A terminal's Ctrl-C reaches launcher and ranks; the launcher then sends the ranks SIGTERM at once."""
    from experiments.launch import free_port

    program = str(Path(sys.executable).with_name("deepspeed"))
    command = [program, "--num_gpus", "2", "--master_port", str(free_port())]
    command += [str(ROOT / "experiments" / "train.py"), "--config", str(small_toml), "--name", "cut"]
    command += ["--set", "train.steps=4000", "--set", "train.valid_every=0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, cwd=tmp_path, env=rank_env, start_new_session=True, **pipes)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("step    4/"):
            os.killpg(process.pid, signal.SIGINT)
            break
    rest, _ = process.communicate(timeout=120)
    output = "".join(lines) + rest
    stopped = re.search(r"stopped after step (\d+) of 4000, saved", output)
    assert stopped, output
    from experiments.checkpoint import verify

    path = tmp_path / "runs" / "cut" / "checkpoints" / f"step-{int(stopped[1]):08d}"
    assert verify(path).step == int(stopped[1])


# ---- every launcher, every stage ------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_zero_stages_train_alike(finished_run, counterpoise, small_toml, tmp_path, stage):
    """The first step's loss is that of ZeRO-1; later ones agree to rounding, clipped by the same norm."""
    short = ("--set", "train.clip=0.1", "--set", "train.steps=3")
    for name, number in (("one", 1), ("this", stage)):
        engine = ("--set", f"train.deepspeed=zero{number}.json")
        done = counterpoise("train", "--config", small_toml, "--name", name, *short, *engine, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    one, this = losses(tmp_path / "runs" / "one"), losses(tmp_path / "runs" / "this")
    for step in (1, 2, 3):
        assert this[step][0] == pytest.approx(one[step][0], rel=1e-5)
        assert this[step][2] == pytest.approx(one[step][2], rel=1e-4)


def test_bfloat16_trains(counterpoise, small_toml, tmp_path):
    done = counterpoise(
        "train", "--config", small_toml, "--name", "half", "--set", "model.dtype=bfloat16", cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    steps = records(tmp_path / "runs" / "half", "train")
    assert steps[-1]["loss/ce"] < steps[0]["loss/ce"]


LAUNCHERS = {
    "deepspeed": ["deepspeed", "--num_gpus", "2", "--master_port", "0"],
    "torchrun": ["torchrun", "--nproc_per_node", "2", "--master_port", "0"],
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launchers_start_the_same_training(finished_run, rank_env, small_toml, tmp_path, launcher):
    from experiments.launch import free_port

    program, *flags, _ = LAUNCHERS[launcher]
    flags = [*flags, str(free_port())]
    command = [str(Path(sys.executable).with_name(program)), *flags, str(ROOT / "experiments" / "train.py")]
    arguments = ["--config", str(small_toml), "--name", "launched", "--set", "train.steps=3"]
    arguments += ["--deepspeed_config", str(ROOT / "experiments" / "configs" / "zero1.json")]
    arguments += ["--set", "train.schedule=constant"]
    options = {"capture_output": True, "text": True, "timeout": 180, "check": False}
    done = subprocess.run([*command, *arguments], cwd=tmp_path, env=rank_env, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    run = losses(tmp_path / "runs" / "launched")
    whole = losses(finished_run)
    assert run[1] == whole[1]
    assert run[2] == whole[2], "the warm-up is the same in both schedules"


# ---- bad input ------------------------------------------------------------------------------------------


BAD_INPUT = {
    "unknown key": (["--set", "train.stpes=3"], r"unknown key train.stpes; did you mean .*steps"),
    "experts and ranks": (["--set", "router.num_experts=5"], r"5 is not divisible by .*2.* use .*4 or 6"),
    "k and experts": (["--set", "router.top_k=5"], r"router.top_k=5 is more than router.num_experts=4"),
    "missing path": (["--set", "data.paths=/nowhere/at/all"], r"/nowhere/at/all"),
    "missing config": (["--config", "nothing.toml"], r"nothing.toml: no such file"),
    "resume nothing": (["--resume", "lost"], r"no run 'lost' under runs; there are none"),
    "ranks": (["--ranks", "-1"], r"--ranks -1 must be 1 or more"),
    "name and resume": (["--resume", "a", "--name", "b"], r"name two runs"),
    "resume unnamed": (["--resume"], r"--resume needs the run's name"),
    "clip in both places": (
        ["--deepspeed_config", "CLIP.json"],
        r"CLIP.json: gradient_clipping = 0.5 but \S*small.toml: train.clip = 1.0",
    ),
    "will not fit": (
        ["--set", "moe.expert_hidden=100000000"],
        r"will not fit: a rank needs about [\d.]+ GiB .* lower train.micro_batch",
    ),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_clear_error_and_leaves_nothing(counterpoise, small_toml, tmp_path, case):
    arguments, message = BAD_INPUT[case]
    (tmp_path / "CLIP.json").write_text('{"gradient_clipping": 0.5, "zero_optimization": {"stage": 1}}')
    config = [] if "--config" in arguments or "--resume" in arguments else ["--config", small_toml]
    done = counterpoise("train", *config, *arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert re.search(message, done.stderr), done.stderr
    assert done.stderr.count("counterpoise: error:") == 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_empty_data_is_named(counterpoise, small_toml, tmp_path):
    (tmp_path / "empty").mkdir()
    done = counterpoise(
        "train", "--config", small_toml, "--set", f"data.paths={tmp_path / 'empty'}", cwd=tmp_path
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert re.search(r"error: .*empty", done.stderr), done.stderr
    assert not (tmp_path / "runs").exists()


def test_existing_run_is_never_overwritten(finished_run, counterpoise, small_toml):
    before = (finished_run / "metrics.jsonl").read_bytes()
    folder = finished_run.parents[1]
    done = counterpoise("train", "--config", small_toml, "--name", "whole", cwd=folder)
    assert done.returncode == 2
    assert "exists already; continue it with --resume whole" in done.stderr
    assert (finished_run / "metrics.jsonl").read_bytes() == before


def test_resuming_with_another_setting_names_it(finished_run, counterpoise, tmp_path):
    run = copy_run(finished_run, tmp_path)
    before = (run / "metrics.jsonl").read_bytes()
    done = counterpoise("train", "--resume", "copy", "--set", "train.lr=1e-4", cwd=tmp_path)
    assert done.returncode == 2
    assert re.search(r"train.lr was 0.002 and is now 0.0001", done.stderr), done.stderr
    assert (run / "metrics.jsonl").read_bytes() == before


def test_resuming_on_another_number_of_ranks_is_refused(finished_run, counterpoise, tmp_path):
    copy_run(finished_run, tmp_path)
    done = counterpoise("train", "--resume", "copy", "--ranks", 1, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "world_size=2, and this is 1" in done.stderr
    assert "--ranks" in done.stderr


def test_refused_resumes_change_nothing_in_the_run(finished_run, counterpoise, tmp_path):
    run = copy_run(finished_run, tmp_path, keep_step=6)
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    shorter = ("--set", "train.steps=3", "--set", "train.valid_every=77")
    done = counterpoise("train", "--resume", "copy", *shorter, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "is complete at step 6; extend it" in done.stderr
    after = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    after.pop(".lock", None)
    before.pop(".lock", None)
    assert after == before


def test_changed_engine_settings_are_refused_on_resume(counterpoise, small_toml, tmp_path):
    (tmp_path / "mine.json").write_text('{"zero_optimization": {"stage": 1}}')
    mine = ("--set", "train.deepspeed=mine.json", "--set", "train.steps=3")
    done = counterpoise("train", "--config", small_toml, "--name", "own", *mine, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "mine.json").write_text('{"zero_optimization": {"stage": 2}}')
    done = counterpoise("train", "--resume", "own", "--set", "train.steps=4", cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert re.search(r"mine.json differs from \S*deepspeed.json in zero_optimization", done.stderr)
    assert "or add --reshape" in done.stderr
    done = counterpoise("train", "--resume", "own", "--reshape", "--set", "train.steps=4", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ZeRO 2" in done.stdout, "the file as it is now, not the run's copy"
    (tmp_path / "mine.json").unlink()
    done = counterpoise("train", "--resume", "own", "--set", "train.steps=5", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_run_that_died_before_its_records_resumes_from_nothing(finished_run, counterpoise, tmp_path):
    run = copy_run(finished_run, tmp_path, keep_step=None)
    (run / "metrics.jsonl").unlink()
    shutil.rmtree(run / "tb")
    done = counterpoise("train", "--resume", "copy", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_run(run, finished_run)
    assert len(records(run, "baselines")) == 1


def test_two_processes_cannot_write_to_one_run(finished_run, counterpoise, tmp_path):
    import fcntl

    run = copy_run(finished_run, tmp_path)
    with open(run / ".lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        done = counterpoise("train", "--resume", "copy", cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "another process is writing to this run" in done.stderr


NAN_RANK = """
import sys
import torch
from experiments import session, train

build = session.build

def poisoned(*args):
    trainer = build(*args)
    forward = trainer.engine.forward
    def poison(*inputs):
        if trainer.job.rank == 1 and trainer.engine.global_steps == 4:
            trainer.model.blocks[2].feed_forward.router.gate.weight.data[0, 0] = float("nan")
        return forward(*inputs)
    trainer.engine.forward = poison
    return trainer

session.build = poisoned
sys.exit(train.main())
"""


def test_nan_in_one_ranks_router_ends_all_ranks_and_keeps_the_checkpoint(rank_env, small_toml, tmp_path):
    """Rank 1's gate turns NaN before step 5: both ranks end and name layer, rank and step; step 3 is safe."""
    (tmp_path / "nan_rank.py").write_text(NAN_RANK)
    arguments = ["--config", str(small_toml), "--name", "nan"]
    script = f"from experiments.launch import launch; exit(launch({arguments}, 2, module='nan_rank'))"
    env = {**rank_env, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    begun = time.monotonic()
    options = {"capture_output": True, "text": True, "timeout": 120, "check": False}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env, **options)
    assert done.returncode == 3, done.stdout + done.stderr
    assert time.monotonic() - begun < 60, "the ranks end together, not by a timeout"
    said = re.findall(r"error: step 5: router logits of MoE layer 1 are NaN .*? on rank 1", done.stderr)
    assert len(said) == 2, done.stderr
    assert "last good checkpoint is runs/nan/checkpoints/step-00000003" in done.stderr
    run = tmp_path / "runs" / "nan"
    assert "rank 1" in records(run, "error")[0]["message"]
    from experiments.checkpoint import verify

    assert verify(run / "checkpoints" / "step-00000003").step == 3


NAN_GRADIENT = """
import sys
from experiments import session, train

build = session.build

def poisoned(*args):
    trainer = build(*args)
    step = lambda: trainer.engine.global_steps + 1
    trainer.model.head.weight.register_hook(lambda grad: grad * float("nan") if step() == 5 else grad)
    return trainer

session.build = poisoned
sys.exit(train.main())
"""


@pytest.mark.parametrize(
    ("stage", "clip", "message"),
    [
        (0, "1.0", "step 5: the gradient norm is not finite"),
        (1, "1.0", "step 5: the gradient norm is not finite"),
        (0, "0.0", "step 5: the gradient norm is not finite"),
    ],
)
def test_a_gradient_that_is_not_finite_ends_the_run_before_it_is_saved(
    rank_env, small_toml, tmp_path, stage, clip, message
):
    """The loss of step 5 is fine, its gradient is not: without a check ZeRO-0 would save NaN weights."""
    (tmp_path / "nan_gradient.py").write_text(NAN_GRADIENT)
    arguments = ["--config", str(small_toml), "--name", "nan", "--set", f"train.deepspeed=zero{stage}.json"]
    arguments += ["--set", f"train.clip={clip}", "--set", "train.steps=5", "--set", "train.schedule=constant"]
    script = f"from experiments.launch import launch; exit(launch({arguments}, 2, module='nan_gradient'))"
    env = {**rank_env, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    options = {"capture_output": True, "text": True, "timeout": 120, "check": False}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env, **options)
    assert done.returncode == 3, done.stdout + done.stderr
    assert re.search(message, done.stderr), done.stderr
    assert "last good checkpoint is runs/nan/checkpoints/step-00000003" in done.stderr
    assert [path.name for path in (tmp_path / "runs" / "nan" / "checkpoints").iterdir()] == ["step-00000003"]
    for name, value in weights(tmp_path / "runs" / "nan").items():
        assert np.isfinite(value).all(), name


NO_ROOM = """
import os, sys
from experiments import train
from moe import shards

save = shards.save

def full_disk(engine, path):
    if os.environ["RANK"] == "1" and engine.global_steps == 4:
        raise {error}
    save(engine, path)

shards.save = full_disk
sys.exit(train.main())
"""


@pytest.mark.parametrize("error", ["OSError('No space left on device')", "KeyError('a fault of ours')"])
def test_a_save_that_fails_on_one_rank_fails_alike_on_all(rank_env, small_toml, tmp_path, error):
    (tmp_path / "no_room.py").write_text(NO_ROOM.format(error=error))
    arguments = ["--config", str(small_toml), "--name", "full", "--set", "train.checkpoint_every=2"]
    script = f"from experiments.launch import launch; exit(launch({arguments}, 2, module='no_room'))"
    env = {**rank_env, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    options = {"capture_output": True, "text": True, "timeout": 120, "check": False}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env, **options)
    assert done.returncode == 1, done.stdout + done.stderr
    text = "No space left on device" if "OSError" in error else "KeyError: 'a fault of ours'"
    said = f"the checkpoint of step 4 was not saved: rank 1: {text}; the last good checkpoint is runs/full/"
    assert len(re.findall(rf"Error: .*{re.escape(said)}checkpoints/step-00000002", done.stderr)) >= 2
    left = [path.name for path in (tmp_path / "runs" / "full" / "checkpoints").iterdir()]
    assert left == ["step-00000002"], "what was written in vain takes no room"


SWAPPED = """
import sys
import torch
from experiments import session, train

build = session.build

def swapped(*args):
    trainer = build(*args)
    trainer.model.head = torch.nn.Linear(32, 256, bias=False)
    return trainer

session.build = swapped
sys.exit(train.main())
"""


@pytest.mark.parametrize(("steps", "every"), [(12, 0), (3, 2)], ids=["check", "save"])
def test_modules_swapped_behind_the_optimizer_are_named(rank_env, small_toml, tmp_path, steps, every):
    """They would stay as they were drawn: told after 10 steps, or by the first save before that."""
    (tmp_path / "swapped.py").write_text(SWAPPED)
    arguments = ["--config", str(small_toml), "--name", "swapped", "--set", f"train.steps={steps}"]
    arguments += ["--set", f"train.checkpoint_every={every}", "--set", "train.valid_every=0"]
    script = f"from experiments.launch import launch; exit(launch({arguments}, 2, module='swapped'))"
    env = {**rank_env, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    options = {"capture_output": True, "text": True, "timeout": 120, "check": False}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env, **options)
    assert done.returncode == 1, done.stdout + done.stderr
    if every == 0:
        message = r"error: step 10: 1 trainable parameters are as they were 10 steps ago: head.weight. Either"
        assert "Traceback" not in done.stderr, done.stderr
    else:
        message = r"head.weight are trainable, and the engine's optimizer does not have them"
    assert re.search(message, done.stderr), done.stderr


# ---- the schedule ---------------------------------------------------------------------------------------


def test_learning_rate_warms_up_and_falls_to_its_floor():
    train = TrainConfig(steps=100, warmup_steps=10, lr=1.0, min_lr_frac=0.1)
    assert [learning_rate(train, step) for step in (1, 10)] == [0.1, 1.0]
    assert learning_rate(train, 55) == pytest.approx(0.55)
    assert learning_rate(train, 100) == pytest.approx(0.1)
    constant = TrainConfig(steps=100, warmup_steps=0, lr=0.5, schedule="constant")
    assert learning_rate(constant, 1) == learning_rate(constant, 100) == 0.5
    assert learning_rate(TrainConfig(schedule="deepspeed"), 3) is None


def trainer_at(schedule, router_lr_factor):
    """As much of a trainer as its learning rates need."""
    groups = [{"lr": 0.25, "name": name} for name in ("matrices", "router", "vectors", "ep_size_2")]
    train = TrainConfig(lr=0.5, schedule=schedule, warmup_steps=0, router_lr_factor=router_lr_factor)
    engine = SimpleNamespace(optimizer=SimpleNamespace(param_groups=groups))
    config = SimpleNamespace(train=train)
    return SimpleNamespace(config=config, engine=engine, router_lr_factor=router_lr_factor)


def test_routers_have_their_share_of_the_learning_rate_also_when_it_is_changed():
    trainer = trainer_at("constant", 0.5)
    assert set_rates(trainer, 3) == 0.5
    rates = [group["lr"] for group in trainer.engine.optimizer.param_groups]
    assert rates == [0.5, 0.25, 0.5, 0.5]
    trainer.router_lr_factor = 0.125
    assert set_rates(trainer, 4) == 0.5
    assert [group["lr"] for group in trainer.engine.optimizer.param_groups] == [0.5, 0.0625, 0.5, 0.5]


def test_deepspeeds_scheduler_keeps_its_rates_and_another_factor_is_refused():
    trainer = trainer_at("deepspeed", 1.0)
    assert set_rates(trainer, 3) == 0.25
    trainer.router_lr_factor = 0.5
    with pytest.raises(ValueError, match=r'router_lr_factor=0.5 in step 4: under train.schedule="deepspeed"'):
        set_rates(trainer, 4)
    assert [group["lr"] for group in trainer.engine.optimizer.param_groups] == [0.25] * 4
