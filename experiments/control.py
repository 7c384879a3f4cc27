"""Control: the balancer's loop in training, once an optimizer step and alike on every rank.

    sample of the step -> BalancerLoop -> selection bias, balance loss, routers' learning rate -> next step
                                       -> rollback: weights of an older checkpoint (experiments/saving.py)
                                       -> alarms, actions, figures (experiments/control_records.py)

Nothing travels for it: every rank computes the same from the same sums. A figure of each rank's routers rides
on the next step's sums, and a rank that differs ends the run.
"""

import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from balancer.bias_record import Actuated, read_measurement
from balancer.control_config import ControlConfig, build_law
from balancer.loop import BalancerLoop, Report
from experiments import control_records, saving
from experiments.config import Config
from moe.layer import MoELayer

if TYPE_CHECKING:
    from experiments.progress import Progress
    from experiments.session import Trainer
    from experiments.train import StepOutcome

NAME = "control"
# steps between two samples of what a law needs; those of 20 change slowly, and cost more
_USED_EVERY = 20  # of what a law only works better with; when it needs it, it asks
_EVERY = {"swaps": 20, "scores": 1, "margins": 1, "pairs": 20, "sample": 1}
_SAMPLE_TOKENS = 256  # a rank, for a law that prices experts by them: with few of them chance sets the price
# what the loop reads of a LoadSample, beside step, counts and tokens, and what only a bias law reads
_READ = (
    "swaps_LE", "wide_swaps_LE", "swap_delta", "squares_LE", "tokens_squared", "rows_to_rank_LP",
    "balance_loss_L", "logit_rms_L", "confidence_L",
)  # fmt: skip
_READ_BY_LAWS = (
    "score_histogram_LEB", "score_edges_X", "margin_histogram_LEB", "margin_edges_X", "swap_pairs_LEE",
    "wide_swap_pairs_LEE", "sample_LME",
)  # fmt: skip


def meter_settings(config: Config) -> dict[str, Any]:
    """Return the arguments of `LoadMeter` with which the bias law gets what it needs."""
    law = build_law(config.control)
    settings: dict[str, Any] = {}
    if law is not None:  # the limit of the bias follows the scores, as they drift
        settings["scores_every"] = 20
        settings |= {f"{name}_every": _EVERY[name] for name in law.needs}
        settings |= {f"{name}_every": _USED_EVERY for name in law.uses}
        if "sample" in law.needs:
            settings["sample_tokens"] = min(_SAMPLE_TOKENS, config.train.micro_batch * config.model.seq_len)
    if config.router.score == "sigmoid":  # such scores lie wider apart
        settings["swap_delta"] = 1.0 / config.router.num_experts
    return settings


def make_control(trainer: "Trainer") -> "TrainingControl | None":
    """Return the control of a run, registered as a loop; None where all of it is off, or where every token
    selects every expert, so that there is nothing to control.

    Raises ValueError where the settings contradict one another.
    """
    control, router = trainer.config.control, trainer.config.router
    if not control.on or (router.top_k == router.num_experts and not control.acts):
        return None
    made = TrainingControl(trainer)
    trainer.loops[NAME] = made
    return made


class TrainingControl:
    """The control of one run, on one rank."""

    def __init__(self, trainer: "Trainer") -> None:
        config, meter, router = trainer.config, trainer.meter, trainer.config.router
        self._trainer = trainer
        self._layers = _metered_layers(trainer)
        self._sample: dict[str, Any] = {}
        self._version = 0
        betas = trainer.engine.optimizer.param_groups[0].get("betas", (0.0, 0.0))
        self.loop = BalancerLoop(
            config.control,
            lambda: self._sample,
            self._actuate,
            num_layers=meter.num_layers,
            num_experts=router.num_experts,
            top_k=router.top_k,
            balance_loss=router.balance_loss,
            beta2=float(betas[1]),
            router_lr_factor=trainer.router_lr_factor,
        )
        self.report: Report | None = None
        _compile(config.control, router.num_experts, router.top_k)

    # ---- a step -----------------------------------------------------------------------------------------

    def after(self, outcome: "StepOutcome", progress: "Progress") -> bool:
        """Take in a step, set what the next one is to be routed with, and tell. Collective on a rollback.

        Returns whether the weights were rolled back. Raises RuntimeError where the ranks' routers differ.
        """
        trainer, step = self._trainer, outcome.sample.step
        self._compare(step, outcome.checks_P)
        names = _READ if self.loop.bias is None else _READ + _READ_BY_LAWS
        self._sample = {name: getattr(outcome.sample, name, None) for name in names}
        self._sample |= {"step": step, "num_tokens": outcome.sample.num_tokens}
        self._sample["tokens_per_expert_LE"] = outcome.sample.tokens_per_expert_LE
        self._sample["bytes_PP"] = None if outcome.traffic is None else outcome.traffic.bytes_PP
        self.report = self.loop.step(checkpoint_steps=trainer.checkpoint_steps)
        if trainer.records is not None:
            control_records.tell(self.report, trainer.records, progress.say)
        back = [action.checkpoint_step for action in self.report.actions if action.kind == "rollback"]
        for checkpoint_step in back:
            self.loop.rolled_back(saving.roll_back(trainer, checkpoint_step)[NAME]["loop"])
        self.apply()
        return bool(back)

    def _actuate(self, bias_LE: np.ndarray | None, plan: Any) -> int:
        """Number the biases that are set; `apply` sets them, once a rollback has been made."""
        del plan
        self._version += bias_LE is not None
        return self._version

    def apply(self) -> None:
        """Set bias, balance loss and learning rate of the routers, as the next step is to have them."""
        bias_LE, supervisor = self.loop.routed_LE, self.loop.supervisor
        if bias_LE is not None:
            rows_LE = torch.from_numpy(bias_LE.astype(np.float32))
            for layer, bias_E in zip(self._layers, rows_LE, strict=True):
                layer.router.bias.set(bias_E)
        self._trainer.meter.request(self.loop.asks)
        if supervisor is not None:
            for layer, coefficient in zip(self._layers, supervisor.state.coefficient_L.tolist(), strict=True):
                layer.set_balance_loss(coefficient)
            self._trainer.router_lr_factor = self.loop.router_lr_factor

    # ---- the ranks agree --------------------------------------------------------------------------------

    def checks(self) -> torch.Tensor:
        """[world] float64, zero but for this rank: a number that stands for all that its routers were set to.

        On the routers' device, where nothing waits for it; whole, so that sums over the ranks are exact.
        """
        bits_X = torch.cat([layer.router.bias.bias_E for layer in self._layers]).view(torch.int32).long()
        places_X = torch.arange(1, bits_X.numel() + 1, device=bits_X.device) * 2_654_435_761 % 2**31
        job = self._trainer.job
        checks_P = torch.zeros(job.world_size, dtype=torch.float64, device=bits_X.device)
        checks_P[job.rank] = (bits_X * places_X).sum() % 2**31
        numbers = [layer.balance_loss for layer in self._layers] + [self._trainer.router_lr_factor]
        checks_P[job.rank] += zlib.crc32(np.array(numbers).tobytes())
        return checks_P

    def _compare(self, step: int, checks_P: np.ndarray) -> None:
        differing = np.flatnonzero(checks_P != checks_P[0])
        if differing.size:
            raise RuntimeError(
                f"step {step}: bias, balance loss or learning rate of the routers of rank {differing[0]} "
                "are not those of rank 0: something else has set them, or the ranks have computed from "
                f"different samples; {self._trainer.last_good()}"
            )

    # ---- state ------------------------------------------------------------------------------------------

    def needed_checkpoint(self, steps: tuple[int, ...]) -> int:
        """Return which of the checkpoints a rollback may need, -1 for none."""
        supervisor = self.loop.supervisor
        return -1 if supervisor is None else supervisor.needed_checkpoint(steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the loop's state."""
        return {"loop": self.loop.state_dict(), "version": self._version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back the loop's state, and set the routers to it."""
        self.loop.load_state_dict(state["loop"])
        self._version = state["version"]
        self.apply()


def _metered_layers(trainer: "Trainer") -> list[MoELayer]:
    """The layers in the order in which they report to the meter; the first blocks may have none."""
    layers = [module for module in trainer.model.modules() if isinstance(module, MoELayer)]
    layers.sort(key=lambda layer: layer.meter_row)
    assert [layer.meter_row for layer in layers] == list(range(trainer.meter.num_layers)), "all are metered"
    return layers


def _compile(control: ControlConfig, num_experts: int, top_k: int) -> None:
    """Let the law load and compile what it runs before the first step, not within it: in an even step of one
    layer, with the swaps and margins without which it would not get that far."""
    law = build_law(control)
    if law is None:
        return
    tokens, fair = 100 * num_experts, 100 * top_k
    sample: dict[str, Any] = {"step": 0, "num_tokens": tokens, "swap_delta": 0.01}
    sample["tokens_per_expert_LE"] = counts_LE = np.full((1, num_experts), fair)
    sample |= {"swaps_LE": counts_LE // 10, "wide_swaps_LE": counts_LE // 5}
    sample["margin_histogram_LEB"] = np.tile([tokens - fair, fair], (1, num_experts, 1))
    sample["margin_edges_X"] = np.array([-1.0, 0.0, 1.0])
    zeros_LE = np.zeros((1, num_experts))
    state = law.init(1, num_experts, top_k)
    law.update(read_measurement(sample, top_k), Actuated(zeros_LE, zeros_LE, zeros_LE), state)
