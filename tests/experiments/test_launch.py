"""The launcher: what ranks are given, how they end, and that none of them is ever left behind.

Stand-in modules play the training. Where a signal must reach the launcher, it runs in a process of its own.
"""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from experiments import launch as module
from experiments.launch import exec_hostfile, free_port, hostfile_command, launch, num_cores

WAIT_S = 20.0  # far beyond what any step here takes, so that only a hang reaches it


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Writes a module of the given body and makes it importable; the ranks note their pids in this folder."""
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    )
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.chdir(tmp_path)
    prelude = """
        import os, signal, subprocess, sys, time
        from pathlib import Path
        rank = int(os.environ["RANK"])
        def note(name, text=""):
            part = Path(f"{name}.part.{rank}")
            part.write_text(str(text))
            part.rename(f"{name}.{rank}")  # seen whole or not at all
        def wait_for(*names):
            while not all(Path(name).exists() for name in names):
                time.sleep(0.01)
    """

    def write(body: str) -> Path:
        source = textwrap.dedent(prelude) + textwrap.dedent(body)
        (tmp_path / "stand_in.py").write_text(source)
        return tmp_path

    return write


def start_launcher(num_ranks: int, grace_s: float = 25.0) -> subprocess.Popen[str]:
    code = (
        "import sys; from experiments.launch import launch;"
        f"sys.exit(launch([], {num_ranks}, module='stand_in', grace_s={grace_s}, poll_s=0.01))"
    )
    root = str(Path(module.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ["PYTHONPATH"]])}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=_hang_up_counts,
    )


def _hang_up_counts() -> None:
    """Under nohup SIGHUP would be ignored, and the launcher leaves it so."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def wait_until(condition, what: str) -> None:
    limit = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < limit, f"waited {WAIT_S} s for {what}"
        time.sleep(0.01)


def wait_for_files(folder: Path, *names: str) -> None:
    wait_until(lambda: all((folder / name).exists() for name in names), f"files {names}")


def is_gone(pid: int) -> bool:
    """Whether no process of this id runs (a zombie that its new parent has not reaped yet counts as gone)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def pids(folder: Path, name: str = "pid") -> list[int]:
    return [int(path.read_text()) for path in sorted(folder.glob(f"{name}.[0-9]*"))]


def end(launcher: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = launcher.communicate(timeout=WAIT_S)
    except subprocess.TimeoutExpired:
        launcher.kill()
        raise
    return launcher.returncode, out, err


# ---- a run that goes well -------------------------------------------------------------------------------


def test_each_rank_is_given_its_place(stand_in, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    names = (
        "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS DS_ACCELERATOR"
    )
    folder = stand_in(f"note('seen', [sys.argv[1:], *(os.environ[n] for n in '{names}'.split())])")
    assert launch(["--a", "b c"], 2, module="stand_in") == 0
    seen = [eval_list((folder / f"seen.{rank}").read_text()) for rank in range(2)]
    threads = str(max(1, num_cores() // 2))
    for rank in range(2):
        assert seen[rank][0] == ["--a", "b c"]
        assert seen[rank][1:6] == [str(rank), str(rank), "2", "2", "127.0.0.1"]
        assert seen[rank][7:] == [threads, "cpu"]
    assert seen[0][6] == seen[1][6]
    assert 0 < int(seen[0][6]) < 65536


def eval_list(text: str) -> list:
    import ast

    return ast.literal_eval(text)


def test_the_users_thread_count_is_kept(stand_in, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    folder = stand_in("note('threads', os.environ['OMP_NUM_THREADS'])")
    assert launch([], 1, module="stand_in") == 0
    assert (folder / "threads.0").read_text() == "7"


def test_the_accelerator_is_named_only_where_torch_sees_no_gpu(stand_in, monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR")
    folder = stand_in("note('device', os.environ.get('DS_ACCELERATOR'))")
    for has_cuda, expected in ((True, "None"), (False, "cpu")):
        monkeypatch.setattr(module, "_has_cuda", lambda has_cuda=has_cuda: has_cuda)
        assert launch([], 1, module="stand_in") == 0
        assert (folder / "device.0").read_text() == expected


def test_a_folder_of_the_users_does_not_shadow_our_packages(stand_in, tmp_path, monkeypatch):
    folder = stand_in("import moe; note('moe', moe.__file__)")
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "moe").mkdir(parents=True)
    (elsewhere / "moe" / "__init__.py").write_text("raise RuntimeError('the wrong moe')")
    monkeypatch.chdir(elsewhere)
    assert launch([], 1, module="stand_in") == 0
    assert "elsewhere" not in (elsewhere / "moe.0").read_text()
    assert folder == tmp_path


@pytest.mark.dist
def test_the_ranks_find_each_other(stand_in):
    folder = stand_in("""
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor([rank + 1])
        dist.all_reduce(total)
        note("total", total.item())
        dist.destroy_process_group()
    """)
    assert launch([], 2, module="stand_in") == 0
    assert [(folder / f"total.{rank}").read_text() for rank in range(2)] == ["3", "3"]


def test_ranks_below_one_are_refused():
    with pytest.raises(ValueError, match="--ranks 0 must be at least 1"):
        launch([], 0)


def test_rank_0_is_untouched_and_the_others_carry_their_number(stand_in, capfd):
    stand_in("""
        if rank == 1:
            wait_for("written.0")  # rank 0 writes between the lines of the others otherwise
        for stream, name in ((sys.stdout, "out"), (sys.stderr, "err")):
            stream.write(f"{name} one {rank}\\n{name} two {rank}")
            stream.flush()
        note("written")
    """)
    assert launch([], 2, module="stand_in") == 0
    out, err = capfd.readouterr()
    for name, text in (("out", out), ("err", err)):
        assert f"[rank 1] {name} one 1\n[rank 1] {name} two 1\n" in text
        assert f"{name} one 0\n{name} two 0" in text
        assert "[rank 0]" not in text


def test_a_rank_that_writes_much_is_not_blocked(stand_in, capfd):
    stand_in("sys.stdout.write(('x' * 99 + '\\n') * 20000)")  # 2 MB, far beyond a pipe's buffer
    assert launch([], 2, module="stand_in") == 0
    assert capfd.readouterr().out.count("[rank 1] xxx") == 20000


def test_handlers_come_back_afterwards(stand_in):
    stand_in("")
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert launch([], 1, module="stand_in") == 0
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_a_free_port_can_be_bound():
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port()))


# ---- ranks that die -------------------------------------------------------------------------------------


def test_the_first_rank_that_fails_is_named_and_ends_the_others(stand_in, capfd):
    folder = stand_in("""
        note("pid", os.getpid())
        if rank == 1:
            wait_for("pid.0", "pid.2")
            sys.exit(3)
        time.sleep(60)
    """)
    start = time.monotonic()
    assert launch([], 3, module="stand_in", poll_s=0.01) == 3
    assert time.monotonic() - start < WAIT_S
    err = capfd.readouterr().err
    assert "counterpoise: rank 1 ended with exit code 3; ending the other ranks" in err
    assert err.count("counterpoise:") == 1
    assert len(pids(folder)) == 3
    assert all(is_gone(pid) for pid in pids(folder))


def test_a_death_by_signal_is_named_and_counted_as_shells_do(stand_in, capfd):
    stand_in("os.kill(os.getpid(), signal.SIGKILL) if rank == 0 else time.sleep(60)")
    assert launch([], 2, module="stand_in", poll_s=0.01) == 128 + signal.SIGKILL
    assert "rank 0 was ended by SIGKILL" in capfd.readouterr().err


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace(stand_in, capfd):
    folder = stand_in("""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        note("pid", os.getpid())
        if rank == 0:
            wait_for("pid.1")
            sys.exit(4)
        time.sleep(60)
    """)
    start = time.monotonic()
    assert launch([], 2, module="stand_in", grace_s=0.5, poll_s=0.01) == 4
    assert 0.5 < time.monotonic() - start < WAIT_S
    assert "ranks [1] did not end within 0.5 s of SIGTERM: killing them" in capfd.readouterr().err
    assert all(is_gone(pid) for pid in pids(folder))


def test_a_ranks_own_children_do_not_outlive_the_run(stand_in):
    folder = stand_in("""
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        note("child", child.pid)
    """)
    assert launch([], 2, module="stand_in") == 0
    assert len(pids(folder, "child")) == 2
    wait_until(lambda: all(is_gone(pid) for pid in pids(folder, "child")), "the children's end")


def test_an_exception_in_the_launcher_leaves_no_rank(stand_in, monkeypatch):
    folder = stand_in("note('pid', os.getpid()); time.sleep(60)")

    def broken(*arguments):
        wait_for_files(folder, "pid.0", "pid.1")
        raise RuntimeError("broken")

    monkeypatch.setattr(module, "_watch", broken)
    with pytest.raises(RuntimeError, match="broken"):
        launch([], 2, module="stand_in")
    assert all(is_gone(pid) for pid in pids(folder))


# ---- Ctrl-C ---------------------------------------------------------------------------------------------

SAVES = """
    caught = []
    signal.signal(signal.SIGINT, lambda *_: caught.append(1))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
    note("pid", os.getpid())
    while not caught:
        time.sleep(0.01)
    note("saving")
    time.sleep(0.3)  # a second signal, were one forwarded, would be counted here
    note("saved", len(caught))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_reaches_every_rank_once_and_the_save_is_waited_for(stand_in, number):
    folder = stand_in(SAVES)
    launcher = start_launcher(2)
    wait_for_files(folder, "pid.0", "pid.1")
    os.killpg(launcher.pid, number)  # as a terminal does: the whole foreground group, the ranks not in it
    code, _, err = end(launcher)
    assert code == 130
    assert [(folder / f"saved.{rank}").read_text() for rank in range(2)] == ["1", "1"]
    assert "finish this step and save" in err
    assert all(is_gone(pid) for pid in pids(folder))


def test_a_second_interrupt_ends_and_a_third_kills(stand_in):
    folder = stand_in("""
        for number, name in ((signal.SIGINT, "int"), (signal.SIGTERM, "term")):
            signal.signal(number, lambda *_, name=name: note(name))
        note("pid", os.getpid())
        while True:
            time.sleep(0.01)
    """)
    launcher = start_launcher(2)
    wait_for_files(folder, "pid.0", "pid.1")
    launcher.send_signal(signal.SIGINT)
    wait_for_files(folder, "int.0", "int.1")
    assert not (folder / "term.0").exists()
    launcher.send_signal(signal.SIGINT)
    wait_for_files(folder, "term.0", "term.1")
    launcher.send_signal(signal.SIGINT)
    code, _, err = end(launcher)
    assert code == 128 + signal.SIGKILL
    assert "killing the ranks" in err
    assert all(is_gone(pid) for pid in pids(folder))


def test_a_rank_that_fails_while_saving_gives_its_own_code(stand_in):
    folder = stand_in(SAVES + "    sys.exit(5 if rank else 0)\n")
    launcher = start_launcher(2)
    wait_for_files(folder, "pid.0", "pid.1")
    launcher.send_signal(signal.SIGINT)
    code, _, err = end(launcher)
    assert code == 5
    assert "rank 1 ended with exit code 5" in err


# ---- several machines -----------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", [["--hostfile", "hosts"], ["--hostfile=hosts"]])
def test_the_hostfile_goes_to_the_deepspeed_launcher_and_the_rest_to_the_training(spelling):
    command = hostfile_command(["--config", "a.toml", *spelling, "--set", "x.y=1"], "hosts")
    assert Path(command[0]).name == "deepspeed"
    assert command[1:3] == ["--hostfile", "hosts"]
    assert command[3].endswith(os.path.join("experiments", "train.py"))
    assert command[4:] == ["--config", "a.toml", "--set", "x.y=1"]


@pytest.mark.parametrize("spelling", [["--ranks", "4"], ["--ranks=4"]])
def test_ranks_and_hostfile_exclude_each_other(spelling):
    with pytest.raises(ValueError, match="--ranks and --hostfile"):
        hostfile_command([*spelling, "--hostfile", "hosts"], "hosts")


def test_a_missing_launcher_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="deepspeed launcher is not installed"):
        hostfile_command([], "hosts")


def test_the_hostfile_must_exist_and_is_then_handed_over(monkeypatch, tmp_path):
    calls: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(os, "execv", lambda program, command: calls.append((program, command)))
    with pytest.raises(ValueError, match=r"--hostfile .*absent: no such file"):
        exec_hostfile([], str(tmp_path / "absent"))
    hosts = tmp_path / "hosts"
    hosts.write_text("worker-1 slots=2\n")
    exec_hostfile(["--hostfile", str(hosts), "--run", "x"], str(hosts))
    program, command = calls[0]
    assert program == command[0]
    assert command[2] == str(hosts)
    assert command[-2:] == ["--run", "x"]
