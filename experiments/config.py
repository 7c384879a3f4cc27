"""The configuration of a run: strict TOML and `--set`, into frozen dataclasses; DeepSpeed's JSON beside it.

It stands at the start of the flow: the command line and the training read a `Config` here, and nothing
further down reads a file of settings. Each section of the TOML belongs to one package's dataclass; the
DeepSpeed JSON stays DeepSpeed's own, and only what it leaves out is filled from the TOML.
"""

import difflib
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, cast, get_args, get_origin, get_type_hints

from balancer.control_config import ControlConfig
from balancer.supervisor import init_supervisor
from experiments.data import DataConfig
from experiments.train_config import TrainConfig
from moe.config import ModelConfig, MoEConfig
from routing.config import RouterConfig

CONFIGS = Path(__file__).with_name("configs")


SECTIONS: dict[str, type] = {
    "data": DataConfig,
    "model": ModelConfig,
    "moe": MoEConfig,
    "router": RouterConfig,
    "train": TrainConfig,
    "control": ControlConfig,
}

# Fields that follow from another setting. Setting one in TOML is an error that names where to set it.
DERIVED: dict[str, str] = {
    "router.d_model": "model.d_model",
    "model.vocab_size": "data.vocab_size",
    "moe.router": "section [router]",
    "model.moe": "section [moe]",
}

# Settings that may change when a run is resumed, and what the change means.
RESUMABLE_WHY: dict[str, str] = {
    "train.steps": "a run may be extended or cut short; the cosine is then that of the new length",
    "train.log_every": "only how often metrics are written",
    "train.valid_every": "only how often validation runs",
    "train.checkpoint_every": "only how often the run is saved",
    "train.keep_checkpoints": "only how many checkpoints stay on disk",
    "train.heatmap_every": "only how often loads and traffic are drawn",
    "train.timeout_s": "only how long a rank waits for the others",
    "train.ledger": "only whether traffic is recorded",
    "train.export": "only whether the final model is also written as safetensors",
    "control.monitor": "it only watches; turned on it starts anew",
    "control.stale_after_steps": "only when the monitor says so",
}
RESUMABLE: frozenset[str] = frozenset(RESUMABLE_WHY)
RESHAPABLE_WHY: dict[str, str] = {
    "train.ep_size": "checkpoints hold experts by their logical number",
    "train.deepspeed": "checkpoints hold master weights and moments of whole parameters, at any ZeRO stage",
    "train.micro_batch": "the global batch stays; a balance loss that counts in micro-batches changes",
    "train.accumulation": "the global batch stays; a balance loss that counts in micro-batches changes",
}
RESHAPABLE: frozenset[str] = frozenset(RESHAPABLE_WHY)


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """All settings of a run. `moe` and `router` are inside `model`, where the model reads them."""

    data: DataConfig
    model: ModelConfig
    train: TrainConfig
    control: ControlConfig = field(default_factory=ControlConfig)

    @property
    def moe(self) -> MoEConfig:
        return self.model.moe

    @property
    def router(self) -> RouterConfig:
        return self.model.moe.router


# ---- reading --------------------------------------------------------------------------------------------


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The settings in a TOML file, with `section.key=value` overrides on top.

    path: a file, or the name of a packaged one ("tiny.toml"). overrides: as given to `--set`, each key once;
    typed by the field: numbers and true/false as in TOML, strings bare or quoted, lists comma-separated or as
    a TOML list. What neither sets has its default.
    Raises ValueError, naming file and key, for anything unknown, of a wrong type, derived or out of bounds.
    """
    source = find_file(path)
    values = _read_toml(source)
    for key, value in _parse_overrides(overrides).items():
        section, name = key.split(".")
        values.setdefault(section, {})[name] = value
    try:
        return _build(values)
    except ValueError as error:
        changed = "".join(f" --set {override}" for override in overrides)
        raise ValueError(f"{source}{changed}: {error}") from error


def find_file(path: str | Path) -> Path:
    """The file at `path`, or the packaged one of that name; ValueError with the packaged names otherwise."""
    given = Path(path)
    for candidate in (given, CONFIGS / given.name):
        if candidate.is_file() and (candidate is given or given.name == str(path)):
            return candidate
    packaged = sorted(entry.name for entry in CONFIGS.iterdir() if entry.suffix == (given.suffix or ".toml"))
    raise ValueError(
        f"{path}: no such file; give a path, or the name of a packaged one: {', '.join(packaged)}"
    )


def settable(section: str) -> dict[str, Any]:
    """The keys of a section that TOML may set, each with its type annotation, in order."""
    hints = get_type_hints(SECTIONS[section])
    names = [entry.name for entry in fields(SECTIONS[section])]
    return {name: hints[name] for name in names if f"{section}.{name}" not in DERIVED}


def _read_toml(source: Path) -> dict[str, dict[str, Any]]:
    try:
        table = tomllib.loads(source.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{source}: not a text file in UTF-8 ({error})") from error
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{source}: not valid TOML: {error}") from error
    values: dict[str, dict[str, Any]] = {}
    for section, content in table.items():
        if not isinstance(content, dict):
            raise ValueError(
                f"{source}: {section} stands outside a section; put it under one of {_sections()}"
            )
        check_section(section, str(source))
        values[section] = {
            name: _convert(value, _hint(section, name, str(source)), f"{source}: {section}.{name}")
            for name, value in cast(dict[str, Any], content).items()
        }
    return values


def _sections() -> str:
    return ", ".join(f"[{section}]" for section in SECTIONS)


def _did_you_mean(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(known)}"


def check_section(section: str, source: str) -> None:
    if section not in SECTIONS:
        raise ValueError(f"{source}: unknown section [{section}]{_did_you_mean(section, list(SECTIONS))}")


def _hint(section: str, name: str, source: str) -> Any:
    """The type of a settable key; ValueError for a derived or unknown one."""
    key = f"{section}.{name}"
    if key in DERIVED:
        raise ValueError(f"{source}: {key} is not set here, it follows from {DERIVED[key]}: set that instead")
    known = settable(section)
    if name not in known:
        keys = [f"{other}.{entry}" for other in SECTIONS for entry in settable(other)]
        elsewhere = [entry for entry in keys if entry.endswith(f".{name}")]
        close = difflib.get_close_matches(name, list(known), n=1)
        hint = (
            f"; did you mean {elsewhere[0]}?" if elsewhere and not close else _did_you_mean(name, list(known))
        )
        raise ValueError(f"{source}: unknown key {key}{hint}")
    return known[name]


def _convert(value: Any, hint: Any, where: str) -> Any:
    """`value` as the annotated type: lists become tuples, ints are welcome as floats, bools are no ints."""
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where} = {value!r} must be {_type_name(hint)}, not {type(value).__name__}")
        inner = get_args(hint)[0]
        return tuple(_convert(item, inner, f"{where}[{i}]") for i, item in enumerate(cast(list[Any], value)))
    if hint is float and type(value) is int:
        try:
            value = float(value)
        except OverflowError as error:
            raise ValueError(f"{where} is an integer too large for a float") from error
    if type(value) is not hint:
        raise ValueError(f"{where} = {value!r} must be {_type_name(hint)}, not {type(value).__name__}")
    if hint is float and not math.isfinite(value):
        raise ValueError(f"{where} = {value} must be finite")
    return value


def _type_name(hint: Any) -> str:
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
    if get_origin(hint) is tuple:
        return f"a list, each entry {names[get_args(hint)[0]]}"
    return names[hint]


def _parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        section, dot, name = key.strip().partition(".")
        if not (equals and dot and section and name):
            raise ValueError(f"--set {override}: write section.key=value, for example --set train.steps=20")
        check_section(section, f"--set {override}")
        hint = _hint(section, name, f"--set {override}")
        if f"{section}.{name}" in values:
            raise ValueError(f"--set {override}: {section}.{name} is set twice; keep one")
        values[f"{section}.{name}"] = _convert(
            _parse_text(text.strip(), hint), hint, f"--set {section}.{name}"
        )
    return values


def _parse_text(text: str, hint: Any) -> Any:
    """The value that a command line's text stands for, before its type is checked."""
    if get_origin(hint) is tuple:
        if text.startswith("["):
            return _toml_value(text, default=text)
        inner = get_args(hint)[0]
        return [_parse_text(part.strip(), inner) for part in text.split(",")] if text else []
    if hint is str:
        quoted = text[:1] in ("'", '"')
        return _toml_value(text, default=None) if quoted else text
    return _toml_value(text, default=text)


def _toml_value(text: str, default: Any) -> Any:
    if "\n" in text:  # would smuggle in a second assignment
        return default
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return default


def _build(values: Mapping[str, Mapping[str, Any]]) -> Config:
    def given(section: str) -> Mapping[str, Any]:
        return values.get(section, {})

    data = DataConfig(**given("data"))
    d_model = given("model").get("d_model", defaults_of("model")["d_model"])
    if d_model < 1:  # the router would complain of its own d_model, which nobody can set
        raise ValueError(f"model.d_model={d_model} must be at least 1")
    router = RouterConfig(d_model=d_model, **given("router"))
    moe = MoEConfig(router=router, **given("moe"))
    model = ModelConfig(moe=moe, vocab_size=data.vocab_size, **given("model"))
    train, control = TrainConfig(**given("train")), ControlConfig(**given("control"))
    _check_control(control, router, train)
    return Config(data=data, model=model, train=train, control=control)


def _check_control(control: ControlConfig, router: RouterConfig, train: TrainConfig) -> None:
    """Raise ValueError for a control that router or schedule leave nothing to do."""
    if control.bias != "off" and router.forced:
        raise ValueError(
            f"control.bias={control.bias!r} has no effect: router.forced={router.forced!r} draws the experts "
            "whatever the scores say; leave one of the two out"
        )
    if control.supervisor and router.forced:
        raise ValueError(
            f"control.supervisor=true has no effect on the load: router.forced={router.forced!r} draws the "
            "experts whatever the scores say; leave one of the two out"
        )
    if control.acts and router.top_k >= router.num_experts:
        raise ValueError(
            f"router.top_k={router.top_k} of router.num_experts={router.num_experts} experts: every token "
            "selects all, and no control can move the load; use control.bias=off, control.supervisor=false"
        )
    if control.supervisor:
        init_supervisor(control, 1, router.balance_loss)
        if control.rollback and train.schedule == "deepspeed":
            raise ValueError(
                "control.rollback=true lowers the routers' learning rate, and with "
                "train.schedule='deepspeed' the JSON's scheduler sets it: use control.rollback=false, or "
                "another schedule"
            )


def defaults_of(section: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for entry in fields(SECTIONS[section]):
        if entry.default is not MISSING:
            found[entry.name] = entry.default
        elif entry.default_factory is not MISSING:
            found[entry.name] = entry.default_factory()
    return found


# ---- writing, comparing ---------------------------------------------------------------------------------


def to_toml(config: Config) -> str:
    """The whole configuration as TOML that `load_config` reads back to an equal one.

    Only settable keys are written. Raises ValueError for a string that TOML cannot hold (lone surrogates).
    """
    lines: list[str] = []
    for section in SECTIONS:
        lines += [f"[{section}]"]
        lines += [
            f"{name} = {to_toml_value(getattr(_part(config, section), name))}" for name in settable(section)
        ]
        lines += [""]
    return "\n".join(lines)


def _part(config: Config, section: str) -> Any:
    return getattr(config, section)


def to_toml_value(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(to_toml_value(item) for item in cast(tuple[Any, ...], value)) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + "".join(_escape(char) for char in value) + '"'
    return repr(value)  # repr of a float is the shortest text that reads back to the same bits


def _escape(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    code = ord(char)
    if 0xD800 <= code <= 0xDFFF:
        raise ValueError(
            f"the character U+{code:04X} (part of a file name that is not UTF-8?) cannot stand in TOML"
        )
    return char if 0x20 <= code < 0x7F else f"\\U{code:08X}"


def differences(old: Config, new: Config) -> list[tuple[str, Any, Any]]:
    """The settable keys in which two configurations differ, as (section.key, old value, new value)."""
    found: list[tuple[str, Any, Any]] = []
    for section in SECTIONS:
        for name in settable(section):
            before, after = getattr(_part(old, section), name), getattr(_part(new, section), name)
            if before != after:
                found.append((f"{section}.{name}", before, after))
    return found


def check_resume(old: Config, new: Config, reshape: bool = False) -> None:
    """Raises ValueError, naming every key, where `new` differs from the run's `old` beyond RESUMABLE.

    reshape: keys of RESHAPABLE may differ too.
    """
    free = RESUMABLE | RESHAPABLE if reshape else RESUMABLE
    offending = [entry for entry in differences(old, new) if entry[0] not in free]
    if offending:
        listed = "; ".join(f"{key} was {before!r} and is now {after!r}" for key, before, after in offending)
        remedy = "Take these changes back, or start a new run"
        if all(key in RESHAPABLE for key, _, _ in offending):
            remedy = "Take these changes back, or add --reshape, which fits the checkpoint to them"
        raise ValueError(
            f"this run cannot be resumed with other settings: {listed}. {remedy}; only these may change: "
            f"{', '.join(sorted(free))}"
        )


def check_world(config: Config, world_size: int) -> int:
    """The number of ranks that share one set of experts, once the world's size is known.

    world_size: ranks of the run. Raises ValueError with the nearest numbers that work when ep_size does not
    divide it, the experts do not divide evenly among the ranks of a set, or no block has experts.
    """
    if world_size < 1:
        raise ValueError(f"world_size={world_size} must be at least 1")
    if config.model.num_dense_layers == config.model.num_layers:
        raise ValueError(
            f"model.num_dense_layers={config.model.num_dense_layers} leaves no block with experts, so "
            f"there is nothing to balance; use at most {config.model.num_layers - 1} (model.num_layers - 1), "
            "or make experts of the dense weights: counterpoise weights upcycle"
        )
    ep_size = config.train.ep_size or world_size
    if world_size % ep_size:
        divisors = _nearest([n for n in range(1, world_size + 1) if world_size % n == 0], ep_size)
        above = -(-world_size // ep_size) * ep_size
        raise ValueError(
            f"train.ep_size={ep_size} does not divide the {world_size} ranks; use train.ep_size={divisors} "
            f"(0 = all ranks), or {above} ranks"
        )
    experts = config.router.num_experts
    if experts % ep_size:
        multiples = _nearest([ep_size * n for n in range(1, experts // ep_size + 2)], experts)
        divisors = _nearest([n for n in range(1, experts + 1) if experts % n == 0], ep_size)
        raise ValueError(
            f"router.num_experts={experts} is not divisible by the {ep_size} ranks that share them; use "
            f"router.num_experts={multiples}, or {divisors} ranks (train.ep_size, --ranks)"
        )
    return ep_size


def _nearest(valid: Sequence[int], wanted: int) -> str:
    """The nearest valid number on either side of `wanted`, as text."""
    below = [n for n in valid if n < wanted][-1:]
    above = [n for n in valid if n > wanted][:1]
    return " or ".join(str(n) for n in below + above)
