"""Master weights and moments on disk: saved at one shape, read back at every other."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from moe import ModelConfig, MoEConfig, Topology, make_groups, shards, zero_state
from moe.model import Transformer
from moe.testing import run_ranks
from routing import RouterConfig

VOCAB, SEQ, BATCH = 19, 12, 8
KINDS = ("master", "exp_avg", "exp_avg_sq")


def config(activation: str = "swiglu") -> ModelConfig:
    """Odd sizes: nothing divides by the ranks, so that every flat partition ends in padding."""
    router = RouterConfig(d_model=18, num_experts=8, top_k=2, balance_loss=0.05)
    moe = MoEConfig(router=router, expert_hidden=7, shared_hidden=5, activation=activation)
    return ModelConfig(
        moe=moe, vocab_size=VOCAB, num_layers=2, num_dense_layers=1, d_model=18,
        num_heads=3, dense_hidden=11, seq_len=SEQ,
    )  # fmt: skip


def make_engine(rank, world, ep_size, stage, dtype, seed, activation="swiglu", clip=0.3, **zero_options):
    """clip: 0.3 is well below the norm, so that it acts in every step."""
    from moe import zero

    topology = Topology(world_size=world, ep_size=ep_size, rank=rank)
    model = Transformer(
        config(activation), topology, groups=make_groups(topology), layer_class=zero.ZeroMoELayer
    )
    model.init_weights(seed)
    settings = {
        "train_micro_batch_size_per_gpu": BATCH // world,
        "gradient_accumulation_steps": 1,
        "train_batch_size": BATCH,
        "gradient_clipping": clip,
        "zero_optimization": {
            "stage": stage, "reduce_bucket_size": 500, "allgather_bucket_size": 500,
            "stage3_param_persistence_threshold": 100, **zero_options,
        },
        "bf16": {"enabled": dtype == "bfloat16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    }  # fmt: skip
    return zero.make_engine(model, settings, weight_decay=0.1)


def step(engine, rank, world, number):
    """The same global batch however many ranks divide it."""
    generator = torch.Generator().manual_seed(number)
    batch = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=generator)
    batch = batch[rank * BATCH // world : (rank + 1) * BATCH // world]
    ce_sum, aux_sum = engine(batch[:, :-1], batch[:, 1:])
    engine.backward((ce_sum + aux_sum) / (BATCH * SEQ) * world)
    engine.step()


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def save(engine, folder: Path, rank: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    shards.save(engine, folder / f"rank-{rank}.safetensors")
    torch.distributed.barrier()


def whole_state(folder: Path) -> dict[str, np.ndarray]:
    """kind/name -> all elements."""
    stored = shards.StoredState(files(folder))
    sizes = {name: int(np.prod(stored.shape(name))) for name in stored.names()}
    return {
        f"{kind}/{name}": stored.read(kind, name, 0, size).numpy()
        for name, size in sizes.items()
        for kind in sorted(stored.kinds(name))
    }


def train_and_save(rank, world, cases, folder):
    """Two steps, save, three more steps with a save after each; returns counters and logical weights."""
    from moe import zero

    zero.init_distributed("gloo")
    outcomes = []
    for ep_size, stage, dtype in cases:
        engine = make_engine(rank, world, ep_size, stage, dtype, seed=5)
        base = folder / f"{ep_size}-{stage}-{dtype}"
        for number in range(5):
            step(engine, rank, world, number)
            if number > 0:
                save(engine, base / str(number), rank)
            if number == 1:
                counters = zero_state.counters(engine)
                outcomes.append((counters, _weights(engine)))
    return outcomes


def load_and_go_on(rank, world, sources, shapes, folder, counters):
    """Every source into every shape, in an engine that was at other weights; three more steps."""
    from moe import zero

    zero.init_distributed("gloo")
    outcomes = {}
    for source in sources:
        dtype = source.split("-")[2]
        for ep_size, stage in shapes:
            engine = make_engine(rank, world, ep_size, stage, dtype, seed=99)
            shards.load(engine, files(folder / source / "1"))
            zero_state.set_counters(engine, counters)
            base = folder / f"from-{source}-to-{world}-{ep_size}-{stage}"
            save(engine, base / "1", rank)
            weights = _weights(engine)
            check_experts(engine)
            for number in range(2, 5):
                step(engine, rank, world, number)
                save(engine, base / str(number), rank)
            outcomes[base.name] = (weights, zero_state.counters(engine))
    return outcomes


def check_experts(engine) -> None:
    """Experts differ between the ranks of an EP group and are equal on those of an EDP group."""
    import deepspeed

    layer = engine.module.blocks[1].feed_forward
    for weight in layer.experts.parameters():
        with deepspeed.zero.GatheredParameters([weight]):
            copies = layer.groups.edp.all_gather(weight.detach().float())
            others = layer.groups.ep.all_gather(weight.detach().float()).flatten(0, 1)
        assert all(torch.equal(copies[0], copy) for copy in copies)
        assert len({expert.sum().item() for expert in others}) == 8, "8 different experts"


def _weights(engine):
    from moe import zero

    weights = zero.gather_weights(engine.module, engine.module.topology)
    return None if weights is None else {name: w.float().numpy() for name, w in weights.items()}


def gradients(folder: Path, number: int) -> dict[str, np.ndarray]:
    """The clipped gradient of a step, as Adam's first moment has it: m' = 0.9 m + 0.1 g."""
    before, after = whole_state(folder / str(number - 1)), whole_state(folder / str(number))
    return {k: (after[k] - 0.9 * before[k]) / 0.1 for k in after if k.startswith("exp_avg/")}


SHAPES = {4: [(4, 1), (2, 0), (2, 3)], 1: [(1, 2)], 8: [(8, 3)]}
ALL_SHAPES = {
    4: [(ep, stage) for ep in (4, 2, 1) for stage in range(4)],
    1: [(1, stage) for stage in range(4)],
    2: [(ep, stage) for ep in (2, 1) for stage in range(4)],
    8: [(ep, stage) for ep in (8, 2) for stage in range(4)],
}


def check_reshaping(folder, sources, shapes):
    saved = run_ranks(train_and_save, 4, sources, folder, timeout_s=400)[0]
    names = [f"{ep_size}-{stage}-{dtype}" for ep_size, stage, dtype in sources]
    found = {}
    for world, there in shapes.items():
        counters = saved[0][0]
        found |= run_ranks(load_and_go_on, world, names, there, folder, counters, timeout_s=400)[0]
    assert len(found) == len(names) * sum(map(len, shapes.values()))
    for reshaped, (weights, counters) in found.items():
        source = reshaped.removeprefix("from-").split("-to-")[0]
        dtype = source.split("-")[2]
        counters_saved, weights_saved = saved[names.index(source)]
        assert weights.keys() == weights_saved.keys()
        for name, weight in weights_saved.items():
            np.testing.assert_array_equal(weights[name], weight, err_msg=f"{reshaped} {name}")
        before, after = whole_state(folder / source / "1"), whole_state(folder / reshaped / "1")
        assert before.keys() == after.keys()
        assert {kind for kind, _, _ in (key.partition("/") for key in before)} == set(KINDS)
        for key, value in before.items():
            np.testing.assert_array_equal(after[key], value, err_msg=f"{reshaped} {key}")
        assert counters["global_steps"] == counters_saved["global_steps"] + 3
        if reshaped.endswith("-to-4-" + source.removesuffix(f"-{dtype}")):  # the same shape
            last, want = whole_state(folder / reshaped / "4"), whole_state(folder / source / "4")
            for key, value in want.items():
                np.testing.assert_array_equal(last[key], value, err_msg=f"{reshaped} to the bit {key}")
        if dtype == "bfloat16":
            continue  # rounding of 2^-8 in the forward: gradients of other shapes differ by as much
        for number in (2, 3, 4):
            want = gradients(folder / source, number)
            for key, value in gradients(folder / reshaped, number).items():
                # the norm of all gradients is clipped to 0.3; float32 rounding differs with the shape
                np.testing.assert_allclose(value, want[key], atol=1e-6, err_msg=f"{reshaped} {number} {key}")


@pytest.mark.dist
@pytest.mark.deepspeed
def test_saved_at_ep_4_is_equal_at_ep_1_2_8_and_other_stages_and_trains_on_alike(tmp_path):
    check_reshaping(tmp_path, [(4, 1, "float32"), (4, 3, "bfloat16")], SHAPES)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.deepspeed
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_stage_reads_what_every_stage_wrote(tmp_path, dtype):
    check_reshaping(tmp_path, [(4, stage, dtype) for stage in range(4)], ALL_SHAPES)


def through_stages(rank, world, folder):
    """ZeRO 1 -> 3 -> 2, a step at each, beside one engine that stays at 1."""
    from moe import zero

    zero.init_distributed("gloo")
    stays = make_engine(rank, world, 2, 1, "float32", seed=5)
    for number in range(3):
        step(stays, rank, world, number)
    for number, stage in enumerate((1, 3, 2)):
        engine = make_engine(rank, world, 2, stage, "float32", seed=5 if number == 0 else 99)
        if number:
            shards.load(engine, files(folder / str(number - 1)))
        step(engine, rank, world, number)
        save(engine, folder / str(number), rank)
    return _weights(stays), _weights(engine)


@pytest.mark.dist
@pytest.mark.deepspeed
def test_zero_1_to_3_to_2_is_the_training_that_stayed_at_1(tmp_path):
    stays, moved = run_ranks(through_stages, 2, tmp_path)[0]
    for name, weight in stays.items():
        # Adam divides by the gradient's size, which lifts the rounding of tiny gradients
        np.testing.assert_allclose(moved[name], weight, atol=2e-5, err_msg=name)


def gelu_steps(rank, world, cases, folder):
    """Two steps with GELU experts; a third in another engine that took over."""
    from moe import zero

    zero.init_distributed("gloo")
    for ep_size, stage in cases:
        engine = make_engine(rank, world, ep_size, stage, "float32", 5, activation="gelu", clip=0.0)
        base = folder / f"{world}-{stage}"
        for number in range(2):
            step(engine, rank, world, number)
            save(engine, base / str(number), rank)
        engine = make_engine(
            rank, world, ep_size, (stage + 2) % 4, "float32", 99, activation="gelu", clip=0.0
        )
        shards.load(engine, files(base / "1"))
        step(engine, rank, world, 2)
        save(engine, base / "2", rank)


@pytest.mark.dist
@pytest.mark.deepspeed
def test_gelu_experts_train_and_are_saved_under_every_stage(tmp_path):
    run_ranks(gelu_steps, 1, [(1, 0)], tmp_path)
    run_ranks(gelu_steps, 2, [(2, stage) for stage in range(4)], tmp_path)
    assert not [key for key in whole_state(tmp_path / "2-1" / "0") if "experts.w3" in key]
    for stage in range(4):
        for number in (1, 2):
            want = gradients(tmp_path / "1-0", number)
            for key, value in gradients(tmp_path / f"2-{stage}", number).items():
                np.testing.assert_allclose(value, want[key], atol=1e-6, err_msg=f"{stage} {number} {key}")


def own_checkpoints(rank, world, folder):
    """DeepSpeed's own save and load, at one shape; stages 1 and 3."""
    from moe import zero

    zero.init_distributed("gloo")
    same = []
    for stage in (1, 3):
        engine = make_engine(rank, world, 2, stage, "float32", seed=5)
        step(engine, rank, world, 0)
        engine.save_checkpoint(str(folder), tag=f"stage-{stage}")
        step(engine, rank, world, 1)
        other = make_engine(rank, world, 2, stage, "float32", seed=99)
        other.load_checkpoint(str(folder), tag=f"stage-{stage}")
        step(other, rank, world, 1)
        whole, again = _weights(engine), _weights(other)
        same.append(whole is None or all(np.array_equal(whole[name], again[name]) for name in whole))
    return same


@pytest.mark.dist
@pytest.mark.deepspeed
def test_deepspeeds_own_checkpoints_work_at_the_same_shape(tmp_path):
    assert run_ranks(own_checkpoints, 2, tmp_path) == [[True, True]] * 2


def load_universal(rank, world, ep_size, stage, folder):
    """The weights after loading a universal checkpoint of DeepSpeed's into an engine that was at others."""
    from moe import zero

    zero.init_distributed("gloo")
    engine = make_engine(rank, world, ep_size, stage, "float32", seed=99)
    engine._config.load_universal_checkpoint = True
    engine.load_checkpoint(str(folder), tag=f"universal-{stage}")
    return _weights(engine)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.deepspeed
@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeeds_universal_checkpoints_load_at_other_ep_sizes(tmp_path, stage):
    """What moe/zero.py says of them; the marks on expert parameters are there for this."""
    run_ranks(own_checkpoints, 2, tmp_path)
    where = [
        "--input_folder",
        tmp_path / f"stage-{stage}",
        "--output_folder",
        tmp_path / f"universal-{stage}",
    ]
    workers = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    convert = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *map(str, where), *workers]
    done = subprocess.run(convert, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    same, *others = [
        run_ranks(load_universal, world, ep_size, stage, tmp_path)[0]
        for world, ep_size in ((2, 2), (2, 1), (1, 1))
    ]
    for weights in others:
        for name, weight in same.items():
            np.testing.assert_array_equal(weights[name], weight, err_msg=name)


# ---- files that do not fit ------------------------------------------------------------------------------


def write(path: Path, start: int, values, name="head.weight", shape=(6, 2), scalars=None, kind="master"):
    header = {name: {"shape": shape, "start": start, "scalars": scalars or {}}}
    tensors = {f"{kind}/{name}": np.asarray(values, dtype=np.float32)}
    save_file(tensors, path, metadata={"pieces": json.dumps(header)})


def test_any_interval_is_read_out_of_several_files(tmp_path):
    write(tmp_path / "0.safetensors", 0, range(5))
    write(tmp_path / "1.safetensors", 5, range(5, 11))
    write(tmp_path / "2.safetensors", 11, [11])
    stored = shards.StoredState(files(tmp_path))
    assert (stored.names(), stored.kinds("head.weight")) == ({"head.weight"}, {"master"})
    for start in range(12):
        for numel in range(1, 13 - start):
            got = stored.read("master", "head.weight", start, numel)
            assert got.tolist() == list(range(start, start + numel))


MISFITS = {
    "gap": ((0, 4), (6, 6), r"elements 4..5 of master of head.weight are missing"),
    "end missing": ((0, 4), (4, 6), r"elements 10..11 of master of head.weight are missing"),
    "overlap": ((0, 7), (6, 6), r"elements 6..6 of master of head.weight are there twice"),
    "too long": ((0, 6), (6, 8), r"elements 12..13 of master of head.weight are there twice"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_files_that_do_not_cover_a_tensor_once_are_refused(tmp_path, case):
    *spans, message = MISFITS[case]
    for number, (start, length) in enumerate(spans):
        write(tmp_path / f"{number}.safetensors", start, range(length))
    with pytest.raises(ValueError, match=message):
        shards.StoredState(files(tmp_path))


def test_files_of_two_checkpoints_are_refused(tmp_path):
    write(tmp_path / "0.safetensors", 0, range(6), scalars={"step": ["float32", 2.0]})
    write(tmp_path / "1.safetensors", 6, range(6), scalars={"step": ["float32", 3.0]})
    with pytest.raises(ValueError, match=r"1.safetensors says .*3.0.* of head.weight, and another .*2.0"):
        shards.StoredState(files(tmp_path))


def test_a_file_that_is_none_is_named(tmp_path):
    (tmp_path / "0.safetensors").write_bytes(b"\x00" * 40)
    with pytest.raises(ValueError, match=r"0.safetensors cannot be read as a file of states"):
        shards.StoredState(files(tmp_path))
    save_file({"a": np.zeros(2, np.float32)}, tmp_path / "0.safetensors")
    with pytest.raises(ValueError, match=r"0.safetensors cannot be read as a file of states"):
        shards.StoredState(files(tmp_path))
    with pytest.raises(ValueError, match="at least one file"):
        shards.StoredState([])


def refused_loads(rank, world, folder):
    """What loading says of checkpoints of other models, and whether the engine is as it was."""
    from moe import zero

    zero.init_distributed("gloo")
    engine = make_engine(rank, world, 1, 1, "float32", seed=5)
    step(engine, rank, world, 0)
    save(engine, folder / "own", rank)
    stored = shards.StoredState(files(folder / "own"))
    heads = {name: stored.shape(name) for name in stored.names()}
    said, before = [], _weights(engine)
    for change in ("name", "shape", "step"):
        path = folder / change
        path.mkdir()
        tensors, header = {}, {}
        for name, shape in heads.items():
            values = stored.read("master", name, 0, int(np.prod(shape))).numpy()
            new_name = "tail.weight" if (change, name) == ("name", "head.weight") else name
            shape = (1, *shape) if (change, name) == ("shape", "head.weight") else shape
            count = 7.0 if (change, name) == ("step", "head.weight") else 1.0
            tensors[f"master/{new_name}"] = values
            header[new_name] = {"shape": shape, "start": 0, "scalars": {"step": ["float32", count]}}
        save_file(tensors, path / "0.safetensors", metadata={"pieces": json.dumps(header)})
        with pytest.raises(ValueError) as refused:
            shards.load(engine, files(path))
        said.append(str(refused.value))
    after = _weights(engine)
    return said, all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.dist
@pytest.mark.deepspeed
def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(tmp_path):
    (name, shape, count), untouched = run_ranks(refused_loads, 1, tmp_path)[0]
    assert "has no ['head.weight'] and the model no ['tail.weight']" in name
    assert "head.weight is [1, 19, 18] in" in shape
    assert "[19, 18] in the model: the checkpoint is of another model" in shape
    assert "7.0" in count
    assert "load at the stage that they were saved at" in count
    assert untouched
