"""A rank that is lost in the middle of training: the others end in time, and say which, where and at what."""

import json
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from experiments.job import Job
from experiments.launch import free_port
from experiments.train import EXIT_FAILED, EXIT_RANK_LOST
from experiments.watching import add_hint, open_watch
from moe import Topology, make_groups
from moe.watch import RankLostError

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.dist, pytest.mark.deepspeed]

# The training as it is, but one rank of it does the deed in the first micro-batch of step 3 of 2 each.
SABOTAGE = """
import contextlib, json, os, signal, sys
import torch
from torch.distributed import distributed_c10d as c10d
from experiments import train
from moe.exchange import DistExchange
from moe.naming import current_tag, in_backward

start_rows, calls = DistExchange.start_rows, []

def sockets():
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the list's own descriptor
            if (target := os.readlink(f"/proc/self/fd/{{name}}")).startswith("socket:["):
                yield target[8:-1]

def timeouts_s():
    groups = [group._get_backend(torch.device("cpu")) for group in c10d._world.pg_map]
    return [group.options._timeout.total_seconds() for group in groups]

def sabotaged(*args, **kwargs):
    if current_tag() + (" backward" if in_backward() else " forward") == {where!r}:
        calls.append(1)
        if len(calls) == 4:
            with open(f"rank-{{os.environ['RANK']}}.json", "w") as file:
                json.dump({{"sockets": list(sockets()), "timeouts_s": timeouts_s()}}, file)
        if len(calls) == 5 and os.environ["RANK"] == "{rank}":
            {deed}
    return start_rows(*args, **kwargs)

DistExchange.start_rows = sabotaged
sys.exit(train.main())
"""
DEEDS = {
    "kill": "os.kill(os.getpid(), signal.SIGKILL)",
    "stop": "os.kill(os.getpid(), signal.SIGSTOP)",
    "raise": "raise ArithmeticError('an error of its own')",
}


def sabotage(folder: Path, deed: str, rank: int, where: str) -> None:
    (folder / "sabotage.py").write_text(SABOTAGE.format(deed=DEEDS[deed], rank=rank, where=where))


def arguments(small_toml: Path, **train: object) -> list[str]:
    settings = {"steps": 4, "warmup_steps": 0, "valid_every": 0, "valid_sequences": 1, "export": "false"}
    settings |= {"schedule": "constant", **train}
    listed = [part for key, value in settings.items() for part in ("--set", f"train.{key}={value}")]
    return ["--config", str(small_toml), "--name", "lost", *listed]


def launch(
    folder: Path, env: dict[str, str], given: list[str], *, module: str = "sabotage", grace_s: float = 15.0
) -> tuple[int, str]:
    """Let the launcher start the two ranks, as `counterpoise train` does; its exit code and what is said."""
    call = f"launch({given}, 2, module={module!r}, grace_s={grace_s})"
    script = f"from experiments.launch import launch; exit({call})"
    options = {"capture_output": True, "text": True, "timeout": 100, "check": False}
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, env=path_to(folder, env), **options)
    return done.returncode, done.stdout + done.stderr


def path_to(folder: Path, env: dict[str, str]) -> dict[str, str]:
    return {**env, "PYTHONPATH": f"{ROOT}:{folder}"}


def noted(folder: Path, rank: int) -> dict:
    """What a rank has noted about itself shortly before the deed."""
    return json.loads((folder / f"rank-{rank}.json").read_text())


def nothing_is_left(folder: Path) -> bool:
    """Whether no process has the folder in its environment, and no socket of the ranks is open."""
    tables = [Path(f"/proc/net/{name}") for name in ("tcp", "tcp6")]
    lines = [line.split() for t in tables if t.exists() for line in t.read_text().splitlines()[1:]]
    had = [inode for rank in (0, 1) for inode in noted(folder, rank)["sockets"]]
    assert len(had) >= 2, "a rank of gloo has a socket at least"
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f":{folder}".encode() in path.read_bytes():
                return False
    return not {fields[9] for fields in lines} & set(had)


def test_a_killed_rank_is_named_by_the_other_and_the_run_resumes(rank_env, small_toml, tmp_path):
    sabotage(tmp_path, "kill", 1, "layer 1 dispatch forward")
    code, said = launch(tmp_path, rank_env, arguments(small_toml, checkpoint_every=2))
    assert code in (128 + signal.SIGKILL, EXIT_RANK_LOST), said  # the other may be seen to end first
    assert "did not end within" not in said, "the other rank ends by itself"
    lost = re.search(r"^counterpoise: error: step 3: (rank 1 \(pid \d+ on .*(\n  .*)+)", said, re.MULTILINE)
    assert lost, said
    assert "its process is gone" in lost[1]
    assert re.search(r"Its last operation: layer 1 dispatch forward \(operation \d+, step 3\)", lost[1])
    assert "This is rank 0, at layer 1 " in lost[1]
    assert "the last good checkpoint is runs/lost/checkpoints/step-00000002" in lost[1]
    assert "Traceback" not in said
    run = tmp_path / "runs" / "lost"
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert events[-1]["kind"] == "error"
    assert events[-1]["message"].startswith("step 3: rank 1 (pid ")
    assert nothing_is_left(tmp_path)

    again = ["--resume", "lost", "--set", "train.steps=3"]
    code, said = launch(tmp_path, rank_env, again, module="experiments.train")
    assert code == 0, said
    assert "resuming runs/lost after step 2" in said
    assert all(b"done" in (run / "watch" / f"rank-{rank}").read_bytes() for rank in (0, 1))


def test_a_stopped_rank_is_named_once_the_timeout_is_over(rank_env, small_toml, tmp_path):
    """4 s, not less: the waits of the start-up have to pass on a loaded machine too."""
    sabotage(tmp_path, "stop", 0, "layer 1 combine backward")
    begun = time.monotonic()
    code, said = launch(tmp_path, rank_env, arguments(small_toml, timeout_s=4), grace_s=1)
    assert code == EXIT_RANK_LOST, said
    assert time.monotonic() - begun < 60, "gloo itself gives up after 30 minutes"
    assert re.search(r"^\[rank 1\] counterpoise: error: step 3: rank 0 \(pid \d+ on ", said, re.MULTILINE), (
        said
    )
    assert "its process is stopped by a signal" in said
    assert re.search(r"Its last operation: layer 1 combine backward \(operation \d+, step 3\)", said)
    for rank in (0, 1):
        waits_s = noted(tmp_path, rank)["timeouts_s"]
        assert set(waits_s) == {4.0}, "the groups that the engine has made as well"
        assert len(waits_s) > 1
    assert "ranks [0] did not end within" in said, "a stopped rank does not take SIGTERM"
    assert nothing_is_left(tmp_path)


def test_a_rank_that_raises_keeps_its_message_and_the_other_repeats_it(rank_env, small_toml, tmp_path):
    """Without a launcher that ends anybody: both ranks end by themselves."""
    sabotage(tmp_path, "raise", 0, "layer 0 dispatch backward")
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(free_port())}
    ranks = []
    for rank in (0, 1):
        env = {**path_to(tmp_path, rank_env), **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, "-P", "-m", "sabotage", *arguments(small_toml)]
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        ranks.append(subprocess.Popen(command, cwd=tmp_path, env=env, **pipes))
    try:
        said = [process.communicate(timeout=100)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert [process.returncode for process in ranks] == [EXIT_FAILED, EXIT_RANK_LOST], said
    assert "ArithmeticError: an error of its own" in said[0]
    assert "RankLostError" not in said[0]
    lost = re.search(r"^counterpoise: error: step 3: rank 0 \(pid \d+ on .*\): (raised .*)", said[1], re.M)
    assert lost, said[1]
    assert lost[1].startswith("raised ArithmeticError: an error of its own. Its last operation: layer 0 disp")
    assert re.search(r"layer 0 dispatch backward \(operation \d+, step 3\)\. This is rank 1, at ", lost[1])
    assert "Traceback" not in said[1]
    assert nothing_is_left(tmp_path)


def test_a_world_of_one_keeps_no_records(tmp_path):
    topology = Topology(world_size=1, ep_size=1, rank=0)
    job = Job(topology=topology, groups=make_groups(topology), device=torch.device("cpu"))
    with open_watch(job, tmp_path / "watch") as watch, watch.guard("forward"):
        watch.step(1)
        assert watch.groups(job.groups) == job.groups
        watch.raised(ValueError("v"))
    assert not (tmp_path / "watch").exists()


def test_a_hint_is_for_lost_ranks_only():
    lost = RankLostError("rank 1: gone", rank=1, kind="gone", operation="", own_operation="")
    own = ValueError("v")
    for error in (lost, own):
        add_hint(error, "go back")
    assert (str(lost), str(own)) == ("rank 1: gone\n  go back", "v")
