"""The configuration: it reads back as written, and every mistake is named with its place and remedy."""

import dataclasses
import json
from pathlib import Path

import pytest

from experiments import config as module
from experiments.arguments import help_table, train_parser
from experiments.config import (
    DERIVED,
    RESUMABLE,
    SECTIONS,
    Config,
    TrainConfig,
    check_resume,
    check_world,
    differences,
    load_config,
    settable,
    to_toml,
)
from experiments.engine_config import load_deepspeed_config, merge_deepspeed


@pytest.fixture
def toml(tmp_path: Path):
    """Writes a TOML file and returns its path."""

    def write(text: str = "", name: str = "run.toml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def fails(path: Path, *overrides: str) -> str:
    with pytest.raises(ValueError) as caught:
        load_config(path, overrides)
    return str(caught.value)


# ---- reading --------------------------------------------------------------------------------------------


def test_an_empty_file_gives_the_defaults(toml):
    config = load_config(toml())
    assert config.train == TrainConfig()
    assert config.router == config.model.moe.router
    assert config.moe == config.model.moe


def test_values_reach_their_dataclasses_and_derived_ones_follow(toml):
    path = toml(
        "[data]\nvocab_size = 1000\npaths = ['a', 'b']\n[model]\nd_model = 64\nrope_base = 500\n"
        "[moe]\nexpert_hidden = 32\n[router]\ntop_k = 1\nnormalize = false\n[train]\nlr = 1\n"
    )
    config = load_config(path)
    assert config.data.paths == ("a", "b")
    assert config.model.vocab_size == 1000
    assert config.router.d_model == config.model.d_model == 64
    assert (config.moe.expert_hidden, config.router.top_k, config.router.normalize) == (32, 1, False)
    # an integer is welcome where a float is expected, and becomes one
    assert config.train.lr == 1.0
    assert type(config.train.lr) is float
    assert type(config.model.rope_base) is float


def test_derived_follows_the_default_when_the_file_is_silent(toml):
    config = load_config(toml(), ["router.top_k=1"])
    assert config.router.d_model == config.model.d_model


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[trian]\nsteps = 1", ["run.toml", "[trian]", "did you mean train?"]),
        ("[zzz]\n", ["[zzz]", "known: data, model, moe, router, train"]),
        ("[train]\nstepz = 1", ["run.toml", "train.stepz", "did you mean steps?"]),
        ("[model]\ntop_k = 1", ["model.top_k", "did you mean router.top_k?"]),
        ("[train]\nqqqqq = 1", ["train.qqqqq", "known: steps, ep_size"]),
        ("steps = 1", ["run.toml", "steps stands outside a section", "[train]"]),
        ("[train]\nsteps = 1.5", ["run.toml: train.steps = 1.5", "an integer", "float"]),
        ("[train]\nsteps = true", ["train.steps = True", "an integer", "bool"]),
        ("[train]\nlr = true", ["train.lr = True", "a number", "bool"]),
        ("[train]\nlr = '1e-3'", ["train.lr = '1e-3'", "a number", "str"]),
        ("[train]\nexport = 1", ["train.export = 1", "true or false", "int"]),
        ("[train]\nschedule = 1", ["train.schedule = 1", "a string", "int"]),
        ("[train]\nlr = inf", ["train.lr = inf", "finite"]),
        ("[train]\nlr = " + "9" * 400, ["train.lr", "too large for a float"]),
        ("[train.steps]\nx = 1", ["train.steps", "an integer", "dict"]),
        ("[data]\npaths = 'a'", ["data.paths = 'a'", "a list, each entry a string", "str"]),
        ("[data]\npaths = ['a', 1]", ["data.paths[1] = 1", "a string"]),
        ("[router]\nd_model = 1", ["run.toml", "router.d_model", "model.d_model"]),
        ("[model]\nvocab_size = 1", ["model.vocab_size", "data.vocab_size"]),
        ("[moe.router]\ntop_k = 1", ["moe.router", "section [router]"]),
        ("[model.moe]\nexpert_hidden = 1", ["model.moe", "section [moe]"]),
        ("[train]\nsteps = \n", ["run.toml", "not valid TOML", "line 2"]),
        ("[model]\nd_model = 0", ["run.toml", "model.d_model=0 must be at least 1"]),
        ("[model]\nd_model = 100", ["run.toml", "model.d_model=100", "use 96 or 104"]),
        ("[router]\ntop_k = 9", ["run.toml", "router.top_k=9", "num_experts=8"]),
        ("[train]\nsteps = 0", ["run.toml", "train.steps=0 must be 1 or more"]),
        ("[train]\nep_size = -1", ["train.ep_size=-1 must be 0 or more"]),
        ("[train]\nlr = 0.0", ["train.lr=0.0 must be more than 0"]),
        ("[train]\nrouter_lr_factor = 0", ["train.router_lr_factor=0.0", "more than 0"]),
        (
            "[train]\nrouter_lr_factor = 0.5\nschedule = 'deepspeed'",
            ["train.router_lr_factor=0.5", 'train.schedule="deepspeed"', "cosine"],
        ),
        ("[train]\nmin_lr_frac = 2", ["train.min_lr_frac=2.0", "0..1"]),
        ("[train]\nbeta2 = 1", ["train.beta2=1.0 must be below 1"]),
        ("[train]\nclip = -1", ["train.clip=-1.0 must be 0 or more"]),
        ("[train]\nsteps = 5\nwarmup_steps = 6", ["train.warmup_steps=6", "train.steps=5", "<= 5"]),
        ("[train]\nschedule = 'linear'", ["train.schedule='linear'", "cosine, constant, deepspeed"]),
        ("[train]\ndeepspeed = ''", ["train.deepspeed is empty", "zero1.json"]),
    ],
)
def test_a_mistake_in_the_file_is_named(toml, text, parts):
    message = fails(toml(text))
    for part in parts:
        assert part in message


def test_a_missing_file_lists_the_packaged_ones(tmp_path, monkeypatch):
    packaged = tmp_path / "configs"
    packaged.mkdir()
    (packaged / "tiny.toml").write_text("")
    monkeypatch.setattr(module, "CONFIGS", packaged)
    monkeypatch.chdir(tmp_path)
    assert "absent.toml: no such file" in fails(Path("absent.toml"))
    assert "tiny.toml" in fails(Path("absent.toml"))
    assert load_config("tiny.toml").train == TrainConfig()
    # a packaged name must be bare: a wrong folder is a mistake, not a request for the packaged file
    assert "no such file" in fails(Path("elsewhere/tiny.toml"))


def test_a_file_of_the_current_folder_comes_before_the_packaged_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("zero1.json").write_text('{"mine": 1}')
    assert load_deepspeed_config("zero1.json") == {"mine": 1}


def test_a_file_that_is_not_utf8_is_named(tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes(b"[data]\npaths = ['\xff']\n")
    assert "run.toml: not a text file in UTF-8" in fails(path)


# ---- --set ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.steps=20", 20),
        ("train.steps = 1_000", 1000),
        ("train.lr=3", 3.0),
        ("train.lr=1e-4", 1e-4),
        ("train.export=true", True),
        ("train.schedule=constant", "constant"),
        ('train.schedule="constant"', "constant"),
        ("train.schedule='constant'", "constant"),
        ("train.deepspeed=a=b.json", "a=b.json"),
        ("train.deepspeed=123", "123"),
        ("data.paths=a,b c", ("a", "b c")),
        ("data.paths=a", ("a",)),
        ("data.paths=", ()),
        ('data.paths=["a,b", "c"]', ("a,b", "c")),
        ("data.weights=1,2.5", (1.0, 2.5)),
        ("data.weights=[1, 2.5]", (1.0, 2.5)),
    ],
)
def test_an_override_is_typed_by_its_field(toml, override, expected):
    config = load_config(toml("[train]\nsteps = 400\nwarmup_steps = 1\n"), [override])
    section, name = override.split("=")[0].strip().split(".")
    value = getattr(getattr(config, section), name)
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("train.steps", ["--set train.steps", "section.key=value"]),
        ("steps=3", ["--set steps=3", "section.key=value"]),
        ("trian.steps=3", ["--set trian.steps=3", "did you mean train?"]),
        ("train.step=3", ["--set train.step=3", "did you mean steps?"]),
        ("train.a.b=3", ["unknown key train.a.b"]),
        ("train.steps=abc", ["--set train.steps = 'abc'", "an integer"]),
        ("train.steps=", ["--set train.steps = ''", "an integer"]),
        ("train.steps=1.0", ["an integer, not float"]),
        ("train.steps=1\nlr=2", ["an integer"]),
        ("train.export=True", ["--set train.export = 'True'", "true or false"]),
        ("train.export=1", ["true or false, not int"]),
        ('train.schedule="constant', ["train.schedule = None", "a string"]),
        ("data.weights=1,x", ["data.weights[1] = 'x'", "a number"]),
        ("data.paths=[1", ["data.paths = '[1'", "a list"]),
        ("router.d_model=3", ["router.d_model", "model.d_model"]),
        ("train.steps=0", ["run.toml --set train.steps=0", "must be 1 or more"]),
    ],
)
def test_a_mistake_in_an_override_is_named(toml, override, parts):
    message = fails(toml(), override)
    for part in parts:
        assert part in message


def test_an_override_beats_the_file_and_may_be_given_once(toml):
    path = toml("[train]\nsteps = 100\n")
    assert load_config(path, ["train.steps=50"]).train.steps == 50
    assert "train.steps is set twice" in fails(path, "train.steps=50", "train.steps=60")


# ---- writing, comparing ---------------------------------------------------------------------------------

UNUSUAL = [
    "train.lr=0.1000000000000000055511151231257827",
    "train.weight_decay=1e-300",
    "train.clip=12345678901234567890",
    "train.export=false",
    "train.seed=9007199254740993",
    'data.paths=["a b", "q\\"uote", "back\\\\slash", "tab\\t\\u007f", "\\U0001F600\\u00e9", "\'"]',
    "model.dtype=bfloat16",
    "router.normalize=false",
]


@pytest.mark.parametrize("overrides", [[], UNUSUAL], ids=["defaults", "unusual"])
def test_what_is_written_reads_back_equal(toml, overrides):
    config = load_config(toml(), overrides)
    text = to_toml(config)
    assert text.isascii()
    assert load_config(toml(text, "again.toml")) == config
    assert differences(config, load_config(toml(text, "again.toml"))) == []


def test_every_settable_key_is_written_and_no_derived_one(toml):
    text = to_toml(load_config(toml()))
    for section in SECTIONS:
        for name in settable(section):
            assert f"\n{name} = " in text
    for key in DERIVED:
        assert key.split(".")[1] not in settable(key.split(".")[0])


def test_a_string_that_toml_cannot_hold_is_refused(toml):
    config = load_config(toml())
    bad = dataclasses.replace(config.train, deepspeed="a\udcff")
    with pytest.raises(ValueError, match=r"U\+DCFF"):
        to_toml(Config(data=config.data, model=config.model, train=bad))


def test_differences_name_the_key_once_with_both_values(toml):
    old = load_config(toml())
    new = load_config(toml(), ["model.d_model=64", "train.steps=50"])
    # router.d_model differs too, but follows model.d_model and is not named
    assert differences(old, new) == [("model.d_model", 128, 64), ("train.steps", 400, 50)]


def test_resume_allows_the_documented_keys_only(toml):
    old = load_config(toml())
    longer = load_config(toml(), ["train.steps=500", "train.log_every=1", "train.export=false"])
    check_resume(old, longer)
    with pytest.raises(ValueError) as caught:
        check_resume(old, load_config(toml(), ["train.lr=1", "router.top_k=1", "train.steps=500"]))
    message = str(caught.value)
    assert "train.lr was 0.002 and is now 1.0" in message
    assert "router.top_k was 2 and is now 1" in message
    assert "train.steps was" not in message
    assert "train.checkpoint_every" in message


def test_resumable_keys_exist():
    known = {f"{section}.{name}" for section in SECTIONS for name in settable(section)}
    assert known > RESUMABLE


# ---- ranks ----------------------------------------------------------------------------------------------


def test_ep_size_zero_means_all_ranks(toml):
    assert check_world(load_config(toml()), 4) == 4
    assert check_world(load_config(toml(), ["train.ep_size=2"]), 4) == 2


@pytest.mark.parametrize(
    ("overrides", "world", "parts"),
    [
        (["train.ep_size=4"], 6, ["train.ep_size=4", "6 ranks", "ep_size=3 or 6", "or 8 ranks"]),
        (["train.ep_size=8"], 2, ["train.ep_size=8", "ep_size=2", "or 8 ranks"]),
        ([], 3, ["num_experts=8", "3 ranks", "num_experts=6 or 9", "2 or 4 ranks"]),
        ([], 16, ["num_experts=8", "num_experts=16", "8 ranks"]),
        ([], 0, ["world_size=0"]),
    ],
)
def test_ranks_that_do_not_fit_are_named_with_the_nearest_that_do(toml, overrides, world, parts):
    with pytest.raises(ValueError) as caught:
        check_world(load_config(toml(), overrides), world)
    for part in parts:
        assert part in str(caught.value)


# ---- DeepSpeed's JSON -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_packaged_json_files_are_what_expert_layers_need(stage):
    zero = load_deepspeed_config(f"zero{stage}.json")["zero_optimization"]
    assert zero["stage"] == stage
    assert zero["contiguous_gradients"] is True
    assert zero["reduce_scatter"] is True
    assert zero.get("stage3_param_persistence_threshold") == (0 if stage == 3 else None)


@pytest.mark.deepspeed
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_accepts_the_merged_settings(toml, stage):
    from deepspeed.runtime.config import DeepSpeedConfig

    merged = merge_deepspeed(load_deepspeed_config(f"zero{stage}.json"), load_config(toml()), 1)
    parsed = DeepSpeedConfig(merged)
    assert parsed.zero_optimization_stage == stage
    assert parsed.gradient_clipping == 1.0
    assert parsed.train_batch_size == 8
    assert parsed.optimizer_name == "adamw"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('{"a": 1,}', ["ds.json, line 1, column"]),
        ('{\n"a": }', ["ds.json, line 2, column 6"]),
        ("[1]", ["ds.json", "object", "list"]),
        ('{"a": {"b": 1, "b": 2}}', ["ds.json", "'b' is given twice"]),
    ],
)
def test_a_mistake_in_the_json_is_named(tmp_path, text, parts):
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        load_deepspeed_config(path)
    for part in parts:
        assert part in str(caught.value)


def merged(toml, given: dict, *overrides: str, world: int = 2) -> dict:
    return merge_deepspeed(
        given, load_config(toml(), overrides), world, json_name="ds.json", toml_name="tiny.toml"
    )


def test_what_the_json_leaves_out_is_filled_and_the_rest_passes(toml):
    given = {"zero_optimization": {"stage": 2}, "comms_logger": {"enabled": True}, "wall": ["auto"]}
    before = json.dumps(given)
    result = merged(toml, given, "train.accumulation=3", "train.clip=0", "model.dtype=bfloat16")
    assert json.dumps(given) == before
    assert result.pop("steps_per_print") > 10**6
    assert result == {
        **given,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 3,
        "train_batch_size": 48,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "optimizer": {
            "type": "AdamW",
            "params": {"torch_adam": True, "lr": 0.002, "weight_decay": 0.1, "betas": [0.9, 0.95]},
        },
    }


def test_auto_counts_as_missing(toml):
    given = {
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "steps_per_print": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_min_lr": "auto"}},
        "zero_optimization": {
            "stage": 1,
            "reduce_bucket_size": "auto",
            "offload_optimizer": {"device": "auto"},
        },
    }
    before = json.dumps(given)
    result = merged(toml, given, "train.schedule=deepspeed")
    assert json.dumps(given) == before
    assert "auto" not in json.dumps(result)
    assert result["train_batch_size"] == 16
    assert result["bf16"] == {"enabled": False}
    assert result["optimizer"]["params"] == {"lr": 0.002, "weight_decay": 0.1, "betas": [0.9, 0.95]}
    assert result["scheduler"]["params"] == {"warmup_num_steps": 20}


def test_equal_values_in_both_places_are_no_conflict(toml):
    given = {
        "train_batch_size": 16,
        "gradient_clipping": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.002}},
        "steps_per_print": 5,
    }
    assert merged(toml, given)["steps_per_print"] == 5


def test_an_optimizer_without_betas_gets_none(toml):
    given = {"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}}
    params = merged(toml, given)["optimizer"]["params"]
    assert params == {"momentum": 0.9, "lr": 0.002, "weight_decay": 0.1}


@pytest.mark.parametrize(
    ("given", "overrides", "parts"),
    [
        ({"gradient_clipping": 1.0}, ["train.clip=0.5"], ["gradient_clipping = 1.0", "train.clip = 0.5"]),
        ({"train_micro_batch_size_per_gpu": 4}, [], ["gpu = 4", "train.micro_batch = 8"]),
        ({"gradient_accumulation_steps": 4}, [], ["steps = 4", "train.accumulation = 1"]),
        ({"train_batch_size": 4}, [], ["size = 4", "train.micro_batch * train.accumulation * 2 ranks = 16"]),
        ({"gradient_accumulation_steps": True}, [], ["steps = true", "train.accumulation = 1"]),
        ({"bf16": {"enabled": True}}, [], ["bf16.enabled = true", "model.dtype = 'float32'"]),
        ({"bfloat16": {"enabled": True}}, [], ["bfloat16.enabled = true", "model.dtype = 'float32'"]),
        ({"optimizer": {"type": "Adam", "params": {"lr": 1}}}, [], ["optimizer.params.lr = 1", "train.lr"]),
        ({"optimizer": {"params": {"betas": [0, 0]}}}, [], ["betas = [0, 0]", "train.beta1"]),
        ({"scheduler": {"type": "WarmupLR"}}, [], ["has a scheduler", "train.schedule = 'cosine'"]),
        ({}, ["train.schedule=deepspeed"], ['"deepspeed"', "has no scheduler"]),
        ({"scheduler": None}, ["train.schedule=deepspeed"], ["has no scheduler"]),
        ({"fp16": {"enabled": True}}, [], ["fp16.enabled = true", "bfloat16"]),
        ({"bf16": 3}, [], ["bf16 = 3 must be an object"]),
    ],
)
def test_a_conflict_names_both_places(toml, given, overrides, parts):
    with pytest.raises(ValueError) as caught:
        merged(toml, given, *overrides)
    for part in ["ds.json", *parts]:
        assert part in str(caught.value)
    assert "tiny.toml" in str(caught.value) or "fp16" in given or given == {"bf16": 3}


# ---- help -----------------------------------------------------------------------------------------------


def test_every_field_is_documented_and_shown():
    shown = help_table()
    for section, cls in SECTIONS.items():
        for entry in dataclasses.fields(cls):
            if f"{section}.{entry.name}" in DERIVED:
                assert f"{section}.{entry.name} =" not in shown
            else:
                assert entry.metadata["help"].strip()
                assert f"  {section}.{entry.name} = " in shown
    assert shown.isascii()
    assert max(len(line) for line in shown.splitlines()) <= 110


def test_help_of_one_section():
    shown = help_table(["router"])
    assert "one of softmax, sigmoid" in " ".join(shown.split())
    assert "train." not in shown
    with pytest.raises(ValueError, match="unknown section"):
        help_table(["rooter"])


def test_the_train_parser_reads_what_users_and_launchers_pass():
    parser = train_parser()
    assert help_table() in parser.format_help()
    arguments = parser.parse_args(["--local_rank=1", "--set", "a.b=1", "--set", "c.d=2", "--resume"])
    assert (arguments.local_rank, arguments.set, arguments.resume) == (1, ["a.b=1", "c.d=2"], "")
    defaults = parser.parse_args([])
    assert (defaults.config, defaults.ranks, defaults.runs_dir) == (None, None, "runs")
    assert (defaults.resume, defaults.set, defaults.hostfile, defaults.deepspeed_config) == (
        None,
        [],
        None,
        None,
    )
    assert parser.parse_args(["--resume", "tiny-1"]).resume == "tiny-1"


def test_the_train_parser_accepts_no_abbreviations(capsys):
    with pytest.raises(SystemExit):  # --deepspeed would otherwise be read as --deepspeed_config
        train_parser().parse_args(["--deepspeed", "x"])
    assert "unrecognized arguments" in capsys.readouterr().err
