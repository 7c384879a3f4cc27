"""The `lab` script, without a network: what it says is missing, when it installs, and what it passes on.

It runs in a copy of the project's root with a PATH of its own; a small shell script plays Python and pip and
writes down each call.
"""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("bash", "cat", "chmod", "dirname", "env", "flock", "grep", "mkdir", "readlink", "rm", "sha256sum")
TOOLS += ("sleep", "uname")

# Plays `python3` and, once copied into a .venv, its python: -V, -c, -m venv, -m pip, -m ruff, -m pytest.
FAKE_PYTHON = """\
#!/usr/bin/env bash
here=$(dirname "$0")
case "$1 $2" in
  "-V "*) echo "Python ${FAKE_VERSION:-3.11.7}" ;;
  "-c "*version_info*) echo "${FAKE_NUMBER:-311}" ;;
  "-c "*ensurepip*) [[ -z ${FAKE_NO_VENV:-} ]] ;;
  "-m venv")
    echo "venv $3" >>"$LOG"
    mkdir -p "$3/bin"
    cat "$0" >"$3/bin/python"
    printf '#!/usr/bin/env bash\\necho "counterpoise: $* in $PWD"\\n' >"$3/bin/counterpoise"
    printf '#!/usr/bin/env bash\\necho "basedpyright $*" >>"$LOG"\\n[[ $FAKE_FAIL != *basedpyright* ]]\\n' \\
      >"$3/bin/basedpyright"
    chmod +x "$3"/bin/* ;;
  "-m pip")
    shift 2
    [[ $1 == --version ]] && exit 0
    if [[ $1 == index ]]; then echo "Available versions: ${FAKE_TORCH:-2.13.0}"; exit 0; fi
    echo "pip $* [$PIP_REQUIRE_VIRTUALENV ${PIP_TARGET:-} ${PIP_INDEX_URL:-} $DS_BUILD_OPS]" >>"$LOG"
    [[ -z ${FAKE_SLOW:-} ]] || sleep "$FAKE_SLOW"
    [[ -z ${FAKE_PIP_FAILS:-} || "$*" != *$FAKE_PIP_FAILS* ]] ;;
  "-m "*)
    echo "$2 ${*:3}" >>"$LOG"
    [[ -z ${FAKE_FAIL:-} || $FAKE_FAIL != *$2* ]] ;;
esac
"""


class Lab:
    """A copy of the root in a folder of its own, and the PATH that its `lab` sees."""

    def __init__(self, folder: Path) -> None:
        self.root, self.bin, self.log = folder / "root", folder / "bin", folder / "log"
        self.elsewhere = folder / "else where"
        for made in (self.root, self.bin, self.elsewhere):
            made.mkdir()
        for name in ("lab", "requirements.lock", "pyproject.toml"):
            shutil.copy(ROOT / name, self.root / name)
        for name in TOOLS:
            found = shutil.which(name)
            if found:
                (self.bin / name).symlink_to(found)
        self.add("python3", FAKE_PYTHON)

    def add(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def environment(self, settings: dict[str, str]) -> dict[str, str]:
        return {"PATH": str(self.bin), "LOG": str(self.log), "HOME": str(self.root), **settings}

    def __call__(self, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
        self.log.write_text("")
        return subprocess.run(
            [str(self.bin / "bash"), str(self.root / "lab"), *arguments],
            env=self.environment(settings),
            cwd=self.elsewhere,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


@pytest.fixture
def installed(lab: Lab) -> Lab:
    assert lab("doctor").returncode == 0
    return lab


# ---- installing -----------------------------------------------------------------------------------------


def test_kernels_that_cannot_be_compiled_do_not_spoil_the_installation(lab):
    done = lab("doctor", FAKE_FAIL="experiments.warm")
    assert done.returncode == 0 and "kernels could not be compiled now" in done.stderr
    assert lab("doctor").stderr == "", "nothing is installed again"


def test_the_first_call_installs_in_order_and_passes_on(lab):
    done = lab("train", "--set", "a.b=c d")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"counterpoise: train --set a.b=c d in {lab.elsewhere}\n"
    venv, torch, rest, itself, warm = lab.calls()
    assert warm == "experiments.warm "
    assert venv == f"venv {lab.root}/.venv"
    assert torch.startswith(f"pip install --quiet --quiet --constraint {lab.root}/requirements.lock torch==")
    assert f"--requirement {lab.root}/requirements.lock" in rest
    assert f"--no-deps --no-build-isolation --editable {lab.root}" in itself
    assert [line[:10] for line in done.stderr.splitlines() if "/5]" in line] == [
        f"lab: [{i}/5]" for i in range(1, 6)
    ]


def test_the_next_call_installs_nothing_and_is_quick(installed):
    start = time.monotonic()
    done = installed("doctor")
    assert time.monotonic() - start < 2.0  # some 20 ms; the rest is for a busy machine
    assert (done.returncode, done.stderr, installed.calls()) == (0, "", [])


@pytest.mark.parametrize("name", ["requirements.lock", "pyproject.toml"])
def test_a_changed_file_is_installed_again_in_place(installed, name):
    with (installed.root / name).open("a") as file:
        file.write("# changed\n")
    done = installed("doctor")
    assert done.returncode == 0
    assert len(installed.calls()) == 4
    assert not any(call.startswith("venv") for call in installed.calls())
    installed("doctor")
    assert installed.calls() == []


def test_another_python_version_is_noticed(installed):
    assert installed("doctor", FAKE_VERSION="3.12.1").returncode == 0
    assert installed.calls()


def test_a_moved_project_is_installed_again(installed, tmp_path):
    installed.root = installed.root.rename(tmp_path / "moved")
    assert installed("doctor").returncode == 0
    assert installed.calls()


@pytest.mark.parametrize("step", ["torch==", "--requirement", "--editable"])
def test_a_failed_step_is_said_and_redone(lab, step):
    done = lab("doctor", FAKE_PIP_FAILS=step)
    assert done.returncode == 1
    assert "pip could not install" in done.stderr
    assert "counterpoise:" not in done.stdout
    done = lab("doctor")
    assert done.returncode == 0
    assert "interrupted: starting it again" in done.stderr
    assert lab.calls()[0].startswith("venv")
    lab("doctor")
    assert lab.calls() == []


def test_an_installation_killed_in_the_middle_is_redone(lab):
    lab.log.write_text("")
    process = subprocess.Popen(
        [str(lab.bin / "bash"), str(lab.root / "lab"), "doctor"],
        env=lab.environment({"FAKE_SLOW": "30"}),
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    limit = time.monotonic() + 20
    while not any(call.startswith("pip") for call in lab.calls()):
        assert time.monotonic() < limit, "the installation did not start"
        time.sleep(0.01)
    os.killpg(process.pid, 9)
    process.wait()
    done = lab("doctor")
    assert done.returncode == 0
    assert "interrupted" in done.stderr
    assert lab.calls()[0].startswith("venv")


def test_two_calls_at_once_install_once(lab):
    if shutil.which("flock") is None:
        pytest.skip("needs flock, which this machine lacks")
    lab.log.write_text("")
    processes = [
        subprocess.Popen(
            [str(lab.bin / "bash"), str(lab.root / "lab"), "doctor"],
            env=lab.environment({"FAKE_SLOW": "0.2"}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    results = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert all("counterpoise: doctor" in out for out, _ in results)
    assert len(lab.calls()) == 5
    assert sum("waiting" in err for _, err in results) == 1


def test_an_environment_of_the_users_own_is_left_alone(lab):
    (lab.root / ".venv").mkdir()
    (lab.root / ".venv" / "mine").write_text("x")
    done = lab("doctor")
    assert done.returncode == 1
    assert "was not made by lab: move it away" in done.stderr
    assert (lab.root / ".venv" / "mine").exists()
    assert lab.calls() == []


def test_pips_settings_are_honoured_but_for_where_it_installs(lab):
    lab("doctor", PIP_TARGET="/somewhere", PIP_INDEX_URL="file:///mine", DS_BUILD_OPS="1")
    pips = [call for call in lab.calls() if call.startswith("pip")]
    assert len(pips) == 3
    assert all(call.endswith("[1  file:///mine 0]") for call in pips)


# ---- torch's index --------------------------------------------------------------------------------------


def test_the_torch_index_is_for_torch_only_and_is_remembered(lab):
    assert lab("--torch-index", "file:///cpu", "doctor").returncode == 0
    _, torch, rest, itself, _ = lab.calls()
    assert "--no-deps --index-url file:///cpu torch==" in torch
    assert "file:///cpu" not in rest + itself
    assert lab("doctor").returncode == 0
    assert lab.calls() == []
    with (lab.root / "requirements.lock").open("a") as file:
        file.write("# changed\n")
    lab("doctor")
    assert any("--index-url file:///cpu" in call for call in lab.calls())


def test_another_torch_index_replaces_torch(installed):
    installed("--torch-index=file:///cpu", "doctor")
    uninstall, torch = installed.calls()[:2]
    assert uninstall.startswith("pip uninstall --quiet --yes torch")
    assert "--index-url file:///cpu" in torch
    installed("--torch-index=", "doctor")
    assert installed.calls()[0].startswith("pip uninstall")
    assert not any("--index-url" in call for call in installed.calls())


def test_the_torch_index_survives_an_interrupted_installation(lab):
    assert lab("--torch-index", "file:///cpu", "doctor", FAKE_PIP_FAILS="--requirement").returncode == 1
    assert lab("doctor").returncode == 0
    assert any("--index-url file:///cpu" in call for call in lab.calls())


def test_a_torch_index_without_address_is_an_error(lab):
    done = lab("--torch-index")
    assert done.returncode == 1
    assert "--torch-index needs an address" in done.stderr


def test_the_cuda_build_is_announced_where_no_gpu_is(lab):
    if os.uname().sysname != "Linux":
        pytest.skip("only Linux has the CUDA build")
    assert "saves gigabytes" in lab("doctor").stderr


def test_no_such_notice_where_pip_finds_the_cpu_build_or_a_gpu_is(lab):
    assert "saves gigabytes" not in lab("doctor", FAKE_TORCH="2.13.0+cpu, 2.13.0").stderr
    shutil.rmtree(lab.root / ".venv")
    lab.add("nvidia-smi", "#!/usr/bin/env bash\necho 'GPU 0: H200'\n")
    assert "saves gigabytes" not in lab("doctor").stderr


# ---- finding a Python -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"FAKE_NUMBER": "310"}, ["Python 3.11 or newer is needed", "python3 (310)"]),
        ({"FAKE_NO_VENV": "1"}, ["no venv module", "apt install python3-venv"]),
        ({"PYTHON": "/no/python"}, ["PYTHON=/no/python is no command"]),
    ],
)
def test_an_unfit_python_is_named_in_one_line(lab, settings, words):
    done = lab("doctor", **settings)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    for word in words:
        assert word in done.stderr
    assert lab.calls() == []


def test_a_missing_python_is_named_in_one_line(lab):
    (lab.bin / "python3").unlink()
    done = lab("doctor")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "lab: python3 is missing: install Python 3.11 or newer with venv "
        "(Debian: apt install python3 python3-venv)"
    ]


def test_the_newest_suitable_python_is_taken_and_the_users_choice_first(lab):
    lab.add("python3.12", FAKE_PYTHON.replace(":-311", ":-312"))
    lab.add(
        "python3.13", FAKE_PYTHON.replace(":-311", ":-313").replace("[[ -z ${FAKE_NO_VENV:-} ]]", "false")
    )
    assert f"making .venv with {lab.bin}/python3.12" in lab("doctor").stderr
    shutil.rmtree(lab.root / ".venv")
    assert f"making .venv with {lab.bin}/python3\n" in lab("doctor", PYTHON="python3").stderr


# ---- commands -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",), ("help",)])
def test_help_installs_nothing(lab, arguments):
    done = lab(*arguments)
    assert done.returncode == 0
    assert "usage: ./lab" in done.stdout
    assert lab.calls() == []
    assert not (lab.root / ".venv").exists()


def test_help_shows_all_commands_once_installed(installed):
    assert "counterpoise: --help" in installed("--help").stdout


def test_an_unknown_option_before_the_command_is_an_error(lab):
    done = lab("--torch-idx", "x", "doctor")
    assert done.returncode == 1
    assert "unknown option --torch-idx" in done.stderr
    assert lab.calls() == []


def test_the_test_command_runs_every_step_and_sums_up(installed):
    done = installed("test", "--traces", "data/traces", "-k", "a or b")
    assert done.returncode == 0
    assert installed.calls() == [
        "ruff check .",
        "ruff format --check .",
        f"basedpyright --pythonpath {installed.root}/.venv/bin/python",
        f"pytest -m not slow --traces={installed.elsewhere}/data/traces -k a or b",
    ]
    assert done.stderr.splitlines()[-1] == (
        "lab: test: ruff check ok, ruff format ok, basedpyright ok, pytest ok"
    )
    assert done.stderr.splitlines()[0] == "lab: test: ruff check"


@pytest.mark.parametrize("failing", ["ruff", "basedpyright", "pytest"])
def test_a_failing_step_does_not_stop_the_others(installed, failing):
    done = installed("test", "--traces=/abs", FAKE_FAIL=failing)
    assert done.returncode == 1
    assert len(installed.calls()) == 5
    # nothing selected: tests that start no ranks run two at a time
    assert installed.calls()[3] == "pytest -m not slow and not dist -n 2 --dist loadfile --traces=/abs"
    assert installed.calls()[4] == "pytest -m not slow and dist --traces=/abs"
    summary = done.stderr.splitlines()[-1]
    assert f"{failing} FAILED" in summary or "ruff check FAILED, ruff format FAILED" in summary
    assert summary.count("FAILED") == (1 if failing == "basedpyright" else 2)


def test_lab_works_through_a_symbolic_link(installed, tmp_path):
    (tmp_path / "link").symlink_to(Path("root") / "lab")
    done = subprocess.run(
        [str(installed.bin / "bash"), str(tmp_path / "link"), "doctor"],
        env=installed.environment({}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


# ---- the files beside it --------------------------------------------------------------------------------


def test_the_lock_pins_every_requirement_of_the_project_exactly():
    import tomllib

    lines = (ROOT / "requirements.lock").read_text(encoding="ascii").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(pin.count("==") == 1 and "+" not in pin for pin in pins)
    names = {pin.split("==")[0].lower() for pin in pins}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    assert {requirement.split(">")[0] for requirement in wanted} <= names


def test_the_scripts_are_executable_and_ascii():
    for name in ("lab", ".ci/run"):
        assert os.access(ROOT / name, os.X_OK)
        assert (ROOT / name).read_text(encoding="ascii").startswith("#!/usr/bin/env bash\n")
    lines = (ROOT / ".ci/run").read_text().splitlines()
    assert lines[-1].startswith("exec ./lab test --traces ")
