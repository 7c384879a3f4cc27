"""Train: a mixture-of-experts language model, expert-parallel, under DeepSpeed. Reads from top to bottom.

    counterpoise train --config tiny.toml                                      starts the ranks itself
    deepspeed --num_gpus 2 experiments/train.py --config tiny.toml             or the launcher of your choice
    torchrun --nproc_per_node 2 experiments/train.py --config tiny.toml

settings -> job -> corpus -> model and engine -> steps (forward, backward, update, records) -> checkpoint
"""

import os
import sys
from pathlib import Path

if not __package__:  # started as a file: import the packages beside it, not the files in its folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import logging
import math
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from experiments.arguments import train_parser
from experiments.config import (
    Config,
    TrainConfig,
    check_resume,
    check_world,
    find_file,
    load_config,
)
from experiments.engine_config import load_deepspeed_config, merge_deepspeed
from experiments.reshape import RESHAPED, check_batch, check_kept, without_batch
from experiments.rundir import RunDir, check_new, check_ranks, find, read_facts
from experiments.stop import StopSignal

if TYPE_CHECKING:
    from experiments.session import Trainer

EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_NOT_FINITE = 3
EXIT_RANK_LOST = 4


def main(argv: Sequence[str] | None = None) -> int:
    """Train, as one rank of a launcher's job, or by starting the ranks when no launcher has (RANK unset)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = train_parser().parse_args(arguments)
    if args.hostfile:
        from experiments.launch import exec_hostfile

        exec_hostfile(arguments, args.hostfile)
    if "RANK" in os.environ:
        _end_process(_run_rank(args))
    from experiments.launch import launch

    config, resumed = read_settings(args)  # a mistake is told once, before any rank starts
    ranks = num_ranks(args, resumed)
    check_world(config, ranks)
    engine_settings(args, config, resumed, ranks)
    return launch(arguments, ranks)


def num_ranks(args: argparse.Namespace, resumed: RunDir | None) -> int:
    """Ranks to start: --ranks, else those of the resumed run, else one a GPU, else 2.

    Raises ValueError for less than one, and for more than there are GPUs.
    """
    gpus = 0
    if os.environ.get("DS_ACCELERATOR") != "cpu":
        import torch

        gpus = torch.cuda.device_count()
    ranks = args.ranks
    if ranks is None:
        ranks = read_facts(resumed).get("world_size", 2) if resumed else gpus or 2
    if ranks < 1:
        raise ValueError(f"--ranks {ranks} must be 1 or more")
    if gpus and ranks > gpus:
        raise ValueError(f"--ranks {ranks} is more than the {gpus} GPUs here; use --ranks {gpus} or less")
    return ranks


def engine_settings(
    args: argparse.Namespace, config: Config, resumed: RunDir | None, world_size: int
) -> dict[str, Any]:
    """DeepSpeed's settings for this run.

    A resumed run keeps its engine: its own deepspeed.json, or the file that this was made from while it still
    says the same. Reshaped, it takes what the file says now, and keeps all but ZeRO's own settings. Raises
    ValueError naming what differs.
    """
    toml_name = str(args.config or (resumed.config if resumed else "tiny.toml"))
    name = config.train.deepspeed

    def merged(table: dict[str, Any], settings: Config = config, ranks: int = world_size) -> dict[str, Any]:
        return merge_deepspeed(table, settings, ranks, toml_name=toml_name)

    if resumed is None:
        return merged(load_deepspeed_config(name))
    old_config, old_ranks = load_config(resumed.config), read_facts(resumed)["world_size"]
    own, differs = load_deepspeed_config(resumed.deepspeed), f"{name} differs from {resumed.deepspeed}"
    try:
        file = load_deepspeed_config(find_file(name))
    except ValueError:  # moved or gone: the run has its own copy
        file = own if not args.reshape else without_batch(own)
    if args.reshape:
        check_batch(old_config, old_ranks, config, world_size)
        check_kept(merged(without_batch(file), old_config, old_ranks), own, differs, free=RESHAPED)
        return merged(file)
    check_ranks(resumed, world_size)
    if file is not own:
        check_kept(merged(file, old_config), own, differs)
    return merged(file)


def read_settings(args: argparse.Namespace) -> tuple[Config, RunDir | None]:
    """The configuration, and the run to resume (None: a new run).

    A resumed run takes its own config.toml where --config is not given; --set works on top. Raises ValueError
    where it differs from the run's own in a key that may not change.
    """
    overrides = list(args.set)
    if args.deepspeed_config:
        overrides.append(f"train.deepspeed={args.deepspeed_config}")
    if args.resume is None:
        if args.reshape:
            raise ValueError("--reshape fits a run that is there to another shape: it needs --resume NAME")
        check_new(args.runs_dir, args.name)
        return load_config(args.config or "tiny.toml", overrides), None
    name = args.resume or args.name
    if not name:
        raise ValueError("--resume needs the run's name: --resume NAME")
    if args.name and args.resume and args.name != args.resume:
        raise ValueError(f"--resume {args.resume} and --name {args.name} name two runs; give one of them")
    run = find(args.runs_dir, name)
    config = load_config(args.config or run.config, overrides)
    check_resume(load_config(run.config), config, reshape=args.reshape)
    return config, run


def _run_rank(args: argparse.Namespace) -> int:
    """One rank. A user's mistake is raised on every rank alike, and told by rank 0."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # DeepSpeed still calls collectives by names that this torch has renamed
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    from experiments.moving import FrozenParameterError
    from moe import NonFiniteRouterError
    from moe.watch import RankLostError

    rank = int(os.environ["RANK"])
    try:
        return _train_and_leave(args)
    except ValueError as error:
        if rank == 0:
            print(f"counterpoise: error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except (NonFiniteRouterError, FloatingPointError) as error:
        sys.stderr.write(f"counterpoise: error: {error}\n")  # in one piece: every rank says it
        return EXIT_NOT_FINITE
    except RankLostError as error:
        sys.stderr.write(f"counterpoise: error: {error}\n")  # the trace of a victim says nothing
        return EXIT_RANK_LOST
    except FrozenParameterError as error:
        if rank == 0:
            print(f"counterpoise: error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except Exception:
        traceback.print_exc()
        return EXIT_FAILED


def _end_process(code: int) -> NoReturn:
    """End this rank's process without tearing the interpreter down.

    Threads of gloo and of the engine may outlive it, and then abort a process that has done all its work. The
    files are closed by now.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _train_and_leave(args: argparse.Namespace) -> int:
    from experiments.job import leave_job

    try:
        return train(args)
    finally:
        leave_job()


# ---- the run --------------------------------------------------------------------------------------------


def train(args: argparse.Namespace) -> int:
    """The whole run on this rank; returns its exit code."""
    with StopSignal() as stop:
        # heavy imports stand here, so that --help and a wrong setting answer at once
        from experiments import session
        from experiments.job import check_same, decide_on_main, do_on_all, start_job
        from experiments.watching import limit_waits, open_watch

        config, resumed = read_settings(args)
        world_size = int(os.environ.get("WORLD_SIZE", "0"))
        job = start_job(check_world(config, world_size))
        limit_waits(config.train.timeout_s)
        settings = engine_settings(args, config, resumed, world_size)
        corpus = do_on_all(job, lambda: session.read_corpus(config))
        check_same(job, "the corpus (sha256)", corpus.sha256)
        session.check_memory(config, job, settings)
        run = decide_on_main(job, lambda: session.open_run(args, config, settings, resumed, corpus, job))

        with open_watch(job, run.path / "watch") as watch:
            trainer = session.build(config, job, settings, corpus, run, watch)
            start = session.restore(trainer) if resumed else 0
            session.open_records(trainer, resumed_at=start if resumed else None)
            try:
                with trainer.communication:
                    return run_steps(trainer, start, stop)
            except Exception as error:
                session.note_error(trainer, error)
                if isinstance(error, ValueError):  # no user's mistake any more: it deserves its traceback
                    raise RuntimeError(f"error in a step: {error}") from error
                raise
            finally:
                session.close(trainer)


def run_steps(trainer: "Trainer", start: int, stop: Any) -> int:
    """Optimizer steps start+1 .. train.steps, with everything that happens between them."""
    from experiments import session
    from experiments.evaluate import bits_per_token
    from experiments.moving import Moving
    from experiments.progress import Progress
    from moe.naming import phase

    train, job = trainer.config.train, trainer.job
    progress = Progress(start, train.steps, shown=job.is_main)
    moving = Moving(trainer, progress.say)
    step = start
    for step in range(start + 1, train.steps + 1):
        trainer.watch.step(step)
        with trainer.timer("step"):
            outcome = train_step(trainer, step, stop.received)
            rolled_back = session.control_step(trainer, outcome, progress)
        session.record_step(trainer, outcome, progress)
        if rolled_back:  # weights are as they were once, and were seen to move then
            moving = Moving(trainer, progress.say)
        with phase("sample"), trainer.watch.guard("check of the updates"):
            moving.after(step, outcome.lr)
        last = step == train.steps or outcome.stop
        if _due(step, train.valid_every, last and not outcome.stop):
            with trainer.naming(step), phase("eval"), trainer.watch.guard("validation"):
                bits = bits_per_token(trainer.engine, job, trainer.windows, train.micro_batch)
            session.record_validation(trainer, step, bits, progress)
        if _due(step, train.checkpoint_every, last):
            with phase("checkpoint"), trainer.watch.guard("checkpoint"):
                session.save(trainer, step)
        if outcome.stop:
            break
    progress.close()
    return session.finish(trainer, step)


def _due(step: int, every: int, last: bool) -> bool:
    return last or (every > 0 and step % every == 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """What one optimizer step gave, the same on every rank.

    sample: LoadSample of the step;  ce, aux: nats per token of the global batch;  stop: somebody asked to
    stop;  traffic: Traffic of the steps since the last report, None where this step reports none;
    checks_P: [world] what each rank's control had set for this step, empty without a control.
    """

    sample: Any
    traffic: Any
    ce: float
    aux: float
    lr: float
    grad_norm: float
    stop: bool
    checks_P: Any


def train_step(trainer: "Trainer", step: int, stop: bool) -> StepOutcome:
    """One optimizer step: accumulation micro-batches forward and backward, then the update.

    The loss of a rank is its sum over tokens, divided by the tokens of the whole global batch and multiplied
    by what the engine divides by (ranks, micro-batches): so the gradient is that of the mean over the global
    batch, however it is divided.
    """
    import torch

    from experiments.communication import reports
    from experiments.data import global_batch
    from moe.naming import phase

    config, job, engine, timer = trainer.config, trainer.job, trainer.engine, trainer.timer
    train, length, guard = config.train, config.model.seq_len, trainer.watch.guard
    lr = set_rates(trainer, step)
    # every sequence of the corpus is full, so all ranks know the valid tokens of the global batch
    global_tokens = train.micro_batch * train.accumulation * job.world_size * length
    factor = job.world_size * train.accumulation / global_tokens
    sums_3 = torch.zeros(3, dtype=torch.float64, device=job.device)
    sums_3[2] = stop
    for micro in range(train.accumulation):
        with timer("data"):
            first = (micro * job.world_size + job.rank) * train.micro_batch
            tokens = global_batch(trainer.corpus, config.data, step, first, train.micro_batch, length)
            batch = torch.from_numpy(tokens).to(job.device, non_blocking=True)
        with timer("forward"), trainer.naming(step), phase("forward"), guard("forward"):
            ce_sum, aux_sum = engine(batch[:, :-1], batch[:, 1:])
        with timer("backward"), phase("backward"), guard("backward"):
            engine.backward((ce_sum + aux_sum) * factor)
        with timer("optimizer"), phase("optimizer"), guard("optimizer step"):
            engine.step()
        sums_3[0] += ce_sum.detach()
        sums_3[1] += aux_sum.detach()
    trainer.communication.end_step()
    figures_X = trainer.communication.figures(reports(train, step)).to(job.device)
    checks_P = trainer.control.checks() if trainer.control is not None else sums_3[:0]
    with phase("sample"), guard("load sample"):
        sample = trainer.meter.sample(step, torch.cat([sums_3, checks_P, figures_X]))
    ce, aux = sample.extra_X[0] / global_tokens, sample.extra_X[1] / global_tokens
    if not math.isfinite(ce + aux):
        raise FloatingPointError(
            f"step {step}: the loss is {ce + aux} (cross entropy {ce}, auxiliary {aux}); "
            f"{trainer.last_good()}"
        )
    norm = engine.get_global_grad_norm()
    if norm is not None and not 0 <= norm < math.inf:  # DeepSpeed says -1 for NaN and infinity at some stages
        raise FloatingPointError(f"step {step}: the gradient norm is not finite; {trainer.last_good()}")
    return StepOutcome(
        sample=sample,
        traffic=trainer.communication.traffic(sample.extra_X[3 + checks_P.numel() :]),
        checks_P=sample.extra_X[3 : 3 + checks_P.numel()],
        ce=float(ce),
        aux=float(aux),
        lr=lr,
        grad_norm=math.nan if norm is None else float(norm),
        stop=bool(sample.extra_X[2] > 0),
    )


def set_rates(trainer: "Trainer", step: int) -> float:
    """Set the learning rate of every group for this step; returns that of all but the routers' weights.

    The routers' is it times trainer.router_lr_factor, which is train.router_lr_factor at first. Raises
    ValueError for a factor other than 1 where DeepSpeed's scheduler is in charge.
    """
    from moe import zero

    train, groups = trainer.config.train, trainer.engine.optimizer.param_groups
    lr, factor = learning_rate(train, step), trainer.router_lr_factor
    if lr is not None:
        zero.set_learning_rates(trainer.engine, lr, factor)
    elif factor != 1.0:
        raise ValueError(
            f'router_lr_factor={factor} in step {step}: under train.schedule="deepspeed" its scheduler sets '
            'every learning rate; use schedule="cosine" or "constant"'
        )
    # before the step: a scheduler moves it on
    return float(next(group["lr"] for group in groups if group.get("name") != zero.ROUTER))


def learning_rate(train: TrainConfig, step: int) -> float | None:
    """The learning rate of a step (1, 2, ...): a pure function, so that a resumed run needs no state of it.

    Linear warm-up to lr, then a half cosine down to min_lr_frac * lr at train.steps, or constant. None where
    DeepSpeed's own scheduler is in charge.
    """
    if train.schedule == "deepspeed":
        return None
    if step <= train.warmup_steps:
        return train.lr * step / train.warmup_steps
    if train.schedule == "constant":
        return train.lr
    done = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    floor = train.min_lr_frac
    return train.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


if __name__ == "__main__":
    from experiments.cli import run_command

    sys.exit(run_command(lambda: main, sys.argv[1:]))
