"""`counterpoise doctor`: each judgement on machines that are not here, and the whole on this one."""

from dataclasses import replace

import pytest

from experiments import doctor
from experiments.doctor import BAD, GIB, OK, WARN, Facts, check, collect_facts, table

HEALTHY = Facts(
    python=(3, 11, 7),
    versions={"torch": "2.13.0+cpu", "deepspeed": "0.19.8", "numba": "0.68.1", "tensorboard": "2.21.0"},
    backends=("gloo",),
    cores=2,
    memory=16 * GIB,
    memory_free=8 * GIB,
    disk_free=50 * GIB,
    shm_hook=True,
)
GPU = replace(
    HEALTHY,
    versions={**HEALTHY.versions, "torch": "2.13.0"},
    torch_cuda="13.0",
    devices=("H200",),
    nvidia_gpus=("GPU 0: H200",),
    backends=("gloo", "nccl"),
)


def with_version(name: str, version: str | None) -> Facts:
    versions = {**HEALTHY.versions, name: version}
    return replace(HEALTHY, versions={key: value for key, value in versions.items() if value})


@pytest.mark.parametrize("facts", [HEALTHY, GPU], ids=["cpu", "gpu"])
def test_a_healthy_machine_has_nothing_to_do(facts):
    rows = check(facts)
    assert {row.state for row in rows} == {OK}
    assert not any(row.remedy for row in rows)
    assert table(rows).endswith("all is well")


@pytest.mark.parametrize(
    ("facts", "name", "state", "remedy"),
    [
        (replace(HEALTHY, python=(3, 10, 9)), "Python", BAD, "3.11 or newer"),
        (with_version("torch", None), "torch", BAD, "requirements.lock"),
        (replace(HEALTHY, torch_error="ImportError: libx"), "torch", BAD, "requirements.lock"),
        (with_version("torch", "2.9.1"), "torch", BAD, "2.13 or newer"),
        (with_version("torch", "2.14.0"), "torch", WARN, "tested: 2.13.0"),
        (replace(HEALTHY, nvidia_gpus=("GPU 0: H200",)), "torch", WARN, "./lab --torch-index URL"),
        (with_version("deepspeed", None), "DeepSpeed", BAD, "requirements.lock"),
        (with_version("deepspeed", "0.19.9"), "DeepSpeed", WARN, "tested with 0.19.8"),
        (with_version("deepspeed", "0.19.7"), "DeepSpeed", BAD, "0.19.8"),
        (with_version("deepspeed", "0.20.0"), "DeepSpeed", BAD, "0.19.8"),
        (replace(HEALTHY, shm_hook=None, shm_error="ImportError: x"), "DeepSpeed", BAD, "requirements.lock"),
        (replace(HEALTHY, shm_hook=None), "DeepSpeed's op", BAD, "requirements.lock"),
        (replace(HEALTHY, shm_hook=None), "DeepSpeed's parts", BAD, "requirements.lock"),
        (replace(HEALTHY, contract_problems=("x is gone",)), "DeepSpeed's parts", BAD, "install DeepSpeed"),
        (replace(HEALTHY, shm_hook=False), "DeepSpeed's op", BAD, "g++"),
        (replace(HEALTHY, shm_hook=False, has_compiler=True), "DeepSpeed's op", WARN, "without compiling"),
        (replace(GPU, devices=()), "accelerator", WARN, "nvidia-smi"),
        (replace(GPU, backends=("gloo",)), "back end", BAD, "requirements.lock"),
        (replace(HEALTHY, backends=()), "back end", BAD, "requirements.lock"),
        (replace(HEALTHY, cores=1), "cores", WARN, "--ranks 1"),
        (replace(HEALTHY, memory_free=2 * GIB), "memory", WARN, "--ranks 1"),
        (replace(HEALTHY, memory_free=GIB // 2), "memory", BAD, "1 GiB"),
        (replace(HEALTHY, memory=None), "memory", WARN, "psutil"),
        (replace(HEALTHY, disk_free=GIB), "free disk", WARN, "--runs-dir"),
        (replace(HEALTHY, disk_free=GIB // 4), "free disk", BAD, "--runs-dir"),
        (replace(HEALTHY, disk_free=None), "free disk", WARN, "permissions"),
        (with_version("numba", None), "numba", BAD, "kernels"),
        (with_version("tensorboard", None), "tensorboard", BAD, "heat maps"),
        (with_version("transformers", "5.23.0"), "transformers", WARN, ">=5.0,<5.23"),
        (with_version("transformers", "4.57.1"), "transformers", WARN, ">=5.0,<5.23"),
        (with_version("transformers", "5.22.1"), "transformers", OK, ""),
    ],
)
def test_what_is_wrong_is_said_with_what_to_do(facts, name, state, remedy):
    found = {row.name: row for row in check(facts)}[name]
    assert found.state == state
    assert remedy in found.remedy
    assert bool(found.remedy) == (state != OK)


def test_the_table_is_aligned_and_sums_up():
    text = table(check(replace(HEALTHY, cores=1, python=(3, 10, 0))))
    lines = text.splitlines()
    assert lines[0].startswith("bad   Python ")
    assert "3.10.0" in lines[0]
    assert lines[0].index("3.10.0") == lines[1].index("->")
    assert lines[-1] == "1 bad, 1 to look at"
    assert text.isascii()


@pytest.mark.parametrize(("facts", "code"), [(HEALTHY, 0), (replace(HEALTHY, cores=1), 0), (GPU, 0)])
def test_warnings_do_not_fail(monkeypatch, capsys, facts, code):
    monkeypatch.setattr(doctor, "collect_facts", lambda: facts)
    assert doctor.main([]) == code
    assert "ok    Python" in capsys.readouterr().out


def test_something_bad_fails(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "collect_facts", lambda: replace(HEALTHY, shm_hook=None))
    assert doctor.main([]) == 1
    assert "3 bad" in capsys.readouterr().out


def test_an_argument_is_an_error(capsys):
    with pytest.raises(SystemExit) as caught:
        doctor.main(["--fix"])
    assert caught.value.code == 2
    assert "--fix" in capsys.readouterr().err


@pytest.mark.deepspeed
def test_the_facts_of_this_machine_are_found():
    facts = collect_facts()
    assert {"torch", "deepspeed", "numba", "tensorboard"} <= set(facts.versions)
    assert not facts.torch_error
    assert "gloo" in facts.backends
    assert facts.contract_problems == ()
    assert facts.shm_hook is True, facts.shm_error  # the private switch: a new DeepSpeed may drop it
    assert facts.memory is not None
    assert facts.memory_free is not None
    assert 0 < facts.memory_free <= facts.memory
    assert facts.cores >= 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2.13.0+cpu", (2, 13, 0)), ("5.23", (5, 23)), ("0.19.8rc1", (0, 19, 8)), ("unknown", ())],
)
def test_release_reads_the_numbers(text, expected):
    assert doctor.release(text) == expected
