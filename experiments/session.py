"""Session: the parts of a training run and what it does beside the steps: open, restore, record, save,
close."""

import argparse
import contextlib
import math
import os
import shlex
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch

from experiments import checkpoint, control_records, rundir, saving
from experiments.communication import Communication
from experiments.config import Config, load_config
from experiments.control import TrainingControl, make_control, meter_settings
from experiments.corpus import Corpus
from experiments.data import load_corpus
from experiments.describe import describe, table, unit
from experiments.estimate import available_bytes, check_fits, estimate_memory, without_offloaded
from experiments.evaluate import baselines, validation_windows
from experiments.job import Job, decide_on_main, do_on_all
from experiments.progress import Progress
from experiments.records import Recorder
from experiments.reshape import remarks
from experiments.rundir import RunDir
from experiments.watching import Watching, add_hint, limit_waits
from experiments.weights import load_initial
from moe import LoadMeter, NonFiniteRouterError, zero
from moe.model import Transformer
from moe.naming import phase
from moe.timing import PhaseTimer
from moe.warmup import warm

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(kw_only=True, slots=True)
class Trainer:
    """Everything that a training step needs. records and lock: rank 0 only."""

    config: Config
    job: Job
    settings: dict[str, Any]
    corpus: Corpus
    run: RunDir
    meter: LoadMeter
    timer: PhaseTimer
    communication: Communication
    watch: Watching
    model: Transformer
    engine: Any
    windows: dict[str, Any]
    records: Recorder | None = None
    lock: IO[str] | None = None
    last_checkpoint: Path | None = None
    checkpoint_steps: tuple[int, ...] = ()
    control: TrainingControl | None = None
    router_lr_factor: float = 1.0  # on the learning rate of the routers' gate weights
    # name -> what has a state of its own besides the model's; registered before the run is restored
    loops: dict[str, saving.Stateful] = field(default_factory=dict)
    bigram: dict[str, float] = field(default_factory=dict)
    logged_at: float = 0.0
    logged_step: int = 0

    @contextlib.contextmanager
    def naming(self, step: int) -> Iterator[None]:
        """Errors of the routers in here get the step, and what to go back to."""
        try:
            yield
        except NonFiniteRouterError as error:
            error.args = (f"step {step}: {error}; {self.last_good()}",)
            raise

    def last_good(self) -> str:
        """Which checkpoint is left, in words."""
        if self.last_checkpoint is None:
            return "the run has no checkpoint yet"
        return f"the last good checkpoint is {self.last_checkpoint}"


# ---- opening --------------------------------------------------------------------------------------------


def read_corpus(config: Config) -> Corpus:
    """The domains; checked against the model's sequence length."""
    return load_corpus(config.data, seq_len=config.model.seq_len)


def check_memory(config: Config, job: Job, settings: dict[str, Any]) -> None:
    """Raise ValueError where the run will not fit into memory; the same on every rank."""

    def check() -> None:
        zero_settings = settings.get("zero_optimization", {})
        estimate = estimate_memory(config, job.topology, int(zero_settings.get("stage", 0)))
        if job.device.type != "cpu":  # on a CPU what is offloaded takes the same memory
            estimate = without_offloaded(estimate, zero_settings)
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", job.world_size))
        check_fits(estimate, available_bytes(job.device, local_ranks))

    decide_on_main(job, check)


def open_run(
    args: argparse.Namespace,
    config: Config,
    settings: dict[str, Any],
    resumed: RunDir | None,
    corpus: Corpus,
    job: Job,
) -> RunDir:
    """Make the folder of a new run, or check that the resumed one fits; rank 0 only."""
    facts = {"corpus_sha256": corpus.sha256, "world_size": job.world_size, "device": str(job.device)}
    facts["domains"] = {d.name: [len(d.train), len(d.valid)] for d in corpus.domains}
    if resumed is None:
        run = rundir.create(args.runs_dir, args.name, Path(args.config or "tiny.toml").stem)
    else:
        run = resumed
        old = rundir.read_facts(run)
        if old.get("corpus_sha256") != corpus.sha256:
            raise ValueError(
                f"{run.path} was trained on data with sha256 {old.get('corpus_sha256')}, and this has "
                f"{corpus.sha256}; resume it on the same data"
            )
        return run
    rundir.write_settings(run, config, settings, facts)
    return run


def build(
    config: Config, job: Job, settings: dict[str, Any], corpus: Corpus, run: RunDir, watch: Watching
) -> Trainer:
    """Model, meter, timer and engine."""
    lock = lock_on_main(job, run)
    meter = LoadMeter(job.world_size, job.rank, **meter_settings(config))
    timer = PhaseTimer(job.device)
    model = Transformer(
        config.model,
        job.topology,
        groups=watch.groups(job.groups),
        meter=meter,
        timer=timer,
        layer_class=zero.ZeroMoELayer,
    )
    model.init_weights(config.train.seed)
    # a run that has checkpoints takes its weights from there, or ends in restore where all are broken
    saved = any(path.suffix != ".partial" for path in run.checkpoints.glob("step-*"))
    if config.train.init and not saved:
        do_on_all(job, lambda: load_initial(model, Path(config.train.init)))
    if job.device.type == "cpu":
        warm(DTYPES[config.model.dtype])  # compile before the first step, not within it
    engine = zero.make_engine(model, settings, config.train.weight_decay)
    limit_waits(config.train.timeout_s)  # the engine's own groups too
    trainer = Trainer(
        config=config,
        job=job,
        settings=settings,
        corpus=corpus,
        run=run,
        meter=meter,
        timer=timer,
        communication=Communication(job.world_size, job.rank, on=config.train.ledger),
        watch=watch,
        model=model,
        engine=engine,
        windows=validation_windows(config, corpus),
        router_lr_factor=config.train.router_lr_factor,
        lock=lock,
    )
    trainer.control = make_control(trainer)
    return trainer


def lock_on_main(job: Job, run: RunDir) -> IO[str] | None:
    """Lock the run on rank 0; what goes wrong is raised on every rank."""
    held: list[IO[str]] = []
    decide_on_main(job, lambda: held.append(rundir.lock(run)))
    return held[0] if held else None


def restore(trainer: Trainer) -> int:
    """Load the last complete checkpoint on all ranks; returns its step, 0 where there is none."""
    job = trainer.job
    found = decide_on_main(job, lambda: checkpoint.latest(trainer.run, say=_say))
    if found is None:
        if job.is_main:
            _say(f"{trainer.run.path} has no complete checkpoint: starting from step 0")
        return 0
    saving.load(trainer, found)
    trainer.last_checkpoint = found.path
    steps = decide_on_main(job, lambda: saving.checkpoint_steps(trainer.run))
    trainer.checkpoint_steps = tuple(step for step in steps if step <= found.step)
    if job.is_main:
        _say(f"resuming {trainer.run.path} after step {found.step}")
    if found.step >= trainer.config.train.steps:
        raise ValueError(
            f"{trainer.run.path} is complete at step {found.step}; extend it with "
            f"--set train.steps=N, N > {found.step}"
        )
    return found.step


def open_records(trainer: Trainer, resumed_at: int | None) -> None:
    """Open the records on rank 0, and tell what is about to happen."""
    decide_on_main(trainer.job, lambda: _open_on_main(trainer, resumed_at))
    trainer.logged_at, trainer.logged_step = time.perf_counter(), resumed_at or 0
    trainer.meter.next_step = (resumed_at or 0) + 1  # statistics fall due in the steps that they would have


def _open_on_main(trainer: Trainer, resumed_at: int | None) -> None:
    if resumed_at is not None:  # only now: the run is locked, and everything about it has been checked
        facts = rundir.read_facts(trainer.run)
        shape = load_config(trainer.run.config), facts["world_size"], trainer.config, trainer.job.world_size
        for remark in remarks(*shape):
            _say(f"note: {remark}")
        facts |= {"world_size": trainer.job.world_size}
        rundir.write_settings(trainer.run, trainer.config, trainer.settings, facts)
    if resumed_at == 0:  # nothing is left of the run but its settings: its records start anew
        trainer.run.metrics.unlink(missing_ok=True)
        for folder in (trainer.run.loads, trainer.run.tensorboard):
            shutil.rmtree(folder, ignore_errors=True)
        resumed_at = None
    ep_size = trainer.job.topology.ep_size
    trainer.records = Recorder(trainer.run, trainer.config, trainer.meter.num_layers, ep_size, resumed_at)
    for line in describe(trainer):
        _say(line)
    if trainer.control is not None and trainer.config.control.acts:
        _say(control_records.described(trainer.config.control))
    simple = baselines(trainer.corpus, trainer.windows)
    trainer.bigram = simple["bigram"]
    if resumed_at is not None:
        trainer.records.event(resumed_at, "resume")
        return
    trainer.records.event(0, "baselines", **simple)
    for name, bits in simple.items():
        if not all(map(math.isnan, bits.values())):
            _say(f"{name:>10} {unit(trainer)}: {table(bits)}")


# ---- between the steps ----------------------------------------------------------------------------------


def control_step(trainer: Trainer, outcome: Any, progress: Progress) -> bool:
    """Let the control act on a step; returns whether the weights were rolled back."""
    if trainer.control is None:
        return False
    with trainer.timer("control"), phase("control"), trainer.watch.guard("control"):
        return trainer.control.after(outcome, progress)


def record_step(trainer: Trainer, outcome: Any, progress: Progress) -> None:
    """Write the step's load, and every log_every steps its figures."""
    train, step, records = trainer.config.train, outcome.sample.step, trainer.records
    progress.advance()
    if records is not None:
        records.load(outcome.sample)
        if train.heatmap_every and (step % train.heatmap_every == 0 or step == 1):
            records.heatmap(outcome.sample)
            if outcome.traffic is not None and trainer.job.world_size > 1:
                records.traffic(step, outcome.traffic)
    if step % train.log_every and step != train.steps and not outcome.stop:
        return
    now, steps = time.perf_counter(), step - trainer.logged_step
    times = {phase: ms / steps for phase, ms in trainer.timer.read().items()}
    rate = outcome.sample.num_tokens * steps / (now - trainer.logged_at)
    trainer.logged_at, trainer.logged_step = now, step
    if records is None:
        return
    values = {
        "loss/total": outcome.ce + outcome.aux,
        "loss/ce": outcome.ce,
        "optim/lr": outcome.lr,
        "optim/grad_norm": outcome.grad_norm,
        "speed/tokens_per_s": rate,
    }
    if outcome.traffic is not None:
        values |= outcome.traffic.scalars()
    if trainer.control is not None and trainer.control.report is not None:
        values |= control_records.scalars(trainer.control.report)
    scalars = records.step(outcome.sample, values, times)
    figures = {
        "loss": f"{outcome.ce:.3f}",
        "balancedness": f"{scalars['balance/balancedness_mean']:.3f}",
        "tok/s": f"{rate:,.0f}",
    }
    progress.show(step, figures)


def record_validation(trainer: Trainer, step: int, bits: dict[str, float], progress: Progress) -> None:
    """Write and tell a validation."""
    if trainer.records is not None:
        trainer.records.validation(step, bits)
        gains = [trainer.bigram[name] - bits[name] for name in bits]
        gain = "" if math.isnan(sum(gains)) else f" ({sum(gains) / len(gains):+.3f} against bigram)"
        progress.say(f"{f'step {step}':>10} {unit(trainer)}: {table(bits)}{gain}")
    restart_clock(trainer, step)


def restart_clock(trainer: Trainer, step: int) -> None:
    """Measure from here: what came before was no training, and its phases are not a step's."""
    trainer.timer.read()
    trainer.logged_at, trainer.logged_step = time.perf_counter(), step


def save(trainer: Trainer, step: int) -> None:
    """Write a checkpoint, and take no time of it for training's."""
    trainer.last_checkpoint, trainer.checkpoint_steps = saving.save(trainer, step)
    restart_clock(trainer, step)


def note_error(trainer: Trainer, error: BaseException) -> None:
    """Leave the reason in the run's own records, where the next reader looks."""
    trainer.watch.raised(error)
    add_hint(error, trainer.last_good())
    if trainer.records is not None:
        trainer.records.event(max(0, trainer.records.loads.last_step), "error", message=str(error))


def finish(trainer: Trainer, step: int) -> int:
    """Say where everything is and how to go on."""
    if not trainer.job.is_main:
        return 0
    name, steps = trainer.run.path.name, trainer.config.train.steps
    parent = trainer.run.path.parent
    where = "" if str(parent) == "runs" else f" --runs-dir {shlex.quote(str(parent))}"
    name = shlex.quote(name)
    if step < steps:
        _say(f"stopped after step {step} of {steps}, saved")
        _say(f"go on with:   ./lab train --resume {name}{where}")
    else:
        _say(f"done: {steps} steps in {trainer.run.path}")
    folder = shlex.quote(str(parent))
    _say(
        f"look at it:   .venv/bin/tensorboard --logdir {folder} --samples_per_plugin images=200,scalars=5000"
    )
    if trainer.config.train.export:
        _say(f"let it write: ./lab sample {name}{where}")
    return 0


def close(trainer: Trainer) -> None:
    """Close the records and the lock."""
    if trainer.records is not None:
        trainer.records.close()
    if trainer.lock is not None:
        trainer.lock.close()
    with contextlib.suppress(RuntimeError):
        trainer.engine.destroy()


def _say(text: str) -> None:
    print(text, flush=True)
