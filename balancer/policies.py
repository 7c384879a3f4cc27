"""Policies: ways to place experts along a trace, ours and others', behind one pair of functions.

After the planners, before the replay (and any loop that wants a baseline beside it). A policy is told a
sample of the load at a time, and answers with the placement from the next sample on:

    state = policy.init(setup, start_LS)
    decision, state = policy.update(step, counts_LE, slots_LS, state)     slots_LS: in force for this sample

It knows what it was told and nothing else; its state is a NamedTuple of arrays and numbers, so that a run can
be taken up anywhere. A layer without load tells nothing: its placement stays.

    none                    nothing ever changes
    none+split              the same with the exact split: what splitting gains without any planning
    eplb                    greedy replicate-and-pack on the last sample, every n steps; slots free
    eplb-strong             the same with ranks renamed for few moves, only where it helps by 5 %; slots free
    even                    few changes, each of which pays, for systems that share an expert's load evenly
    split                   the placement controller, for the exact split
    lplb-ring, lplb-cube    replicas in slots of a fixed pattern, for the exact split
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from balancer.connect import default_placement
from balancer.cost import CostModel
from balancer.even import even_repair
from balancer.lplb import lplb_placement, partners
from balancer.packing import rebalance_experts
from balancer.placement import PlacementConfig, PlacementState, placement_controller
from balancer.placement_checks import home_slots
from balancer.relabelled import strong_baseline
from balancer.split_checks import check_slots, nearest_divisor

Integers = NDArray[np.int64]

# What `even` plans on: so many of the last samples, equally likely to come again. On their mean alone it
# follows noise: twice the moves for the same balance.
_EVEN_SAMPLES = 4
# What a move must gain of a layer's time, as a share of it, to be made by `even`. Cheaper: more moves.
_EVEN_MOVE_PRICE = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What a policy places, where, and at which prices. Raises ValueError for sizes that do not fit."""

    num_layers: int = field(metadata={"help": "MoE layers L"})
    num_experts: int = field(metadata={"help": "experts of a layer, E"})
    num_ranks: int = field(metadata={"help": "ranks P; rank g has the slots g*S/P to (g+1)*S/P - 1"})
    num_slots: int = field(metadata={"help": "slots over all ranks, S: a multiple of P, E or more"})
    num_nodes: int = field(default=1, metadata={"help": "nodes M, a divisor of P"})
    fixed_homes: bool = field(
        default=True, metadata={"help": "every expert keeps its home slot, as training needs it"}
    )
    every_steps: int = field(
        default=100, metadata={"help": "training steps between plans, of the policies that plan by the clock"}
    )
    cost: CostModel = field(metadata={"help": "prices of rows, weights and moves"})
    sample_steps: int = field(default=1, metadata={"help": "training steps between samples, usually"})
    seed: int = field(default=0, metadata={"help": "of a policy that draws"})

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_experts", "num_ranks", "num_nodes", "every_steps", "sample_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        check_slots(self.num_slots, self.num_ranks)
        if self.num_slots < self.num_experts:
            least = -(-self.num_experts // self.num_ranks) * self.num_ranks
            raise ValueError(
                f"num_slots={self.num_slots} is less than num_experts={self.num_experts}; use {least} or more"
            )
        if self.num_ranks % self.num_nodes:
            nearest = nearest_divisor(self.num_ranks, self.num_nodes)
            raise ValueError(
                f"num_nodes={self.num_nodes} does not divide num_ranks={self.num_ranks}; use {nearest}"
            )

    @property
    def home_slot_E(self) -> Integers:
        """[E] int64: the slot that owns each expert."""
        return home_slots(self.num_experts, self.num_slots, self.num_ranks)

    @property
    def home_slot_LE(self) -> Integers:
        """[L, E] int64: the same for every layer."""
        return np.tile(self.home_slot_E, (self.num_layers, 1))


class Decision(NamedTuple):
    """slots_LS: [L, S] int64, the placement from the next sample on, the array given for no change;  reason:
    why, in words with figures, "" where nothing changes."""

    slots_LS: Integers
    reason: str = ""


State = Any
Init = Callable[[Setup, Integers], State]
Update = Callable[[int, Integers, Integers, State], tuple[Decision, State]]


class Policy(NamedTuple):
    """name;  shares: "even" or "exact", how the system that it plans for shares an expert's rows among its
    slots;  init, update;  free_slots: it places homes anew even where `fixed_homes` asks to keep them;
    distinct: it never puts an expert twice on a rank while another rank has none of it."""

    name: str
    shares: str
    init: Init
    update: Update
    free_slots: bool = False
    distinct: bool = True


class Clock(NamedTuple):
    """State of a policy that plans by the clock: its setup, and the step of its last plan, -1 = none yet."""

    setup: Setup
    planned_at: int = -1


class Recent(NamedTuple):
    """State of `even`: its setup, and the last few samples, the newest last."""

    setup: Setup
    samples: tuple[Integers, ...] = ()


class Control(NamedTuple):
    """State of `split`: the controller's configuration, and what it knows."""

    config: PlacementConfig
    known: PlacementState


def policy(name: str) -> Policy:
    """The policy of a name; ValueError with the nearest name for one that is not known."""
    if name not in POLICIES:
        near = difflib.get_close_matches(name, POLICIES, n=1, cutoff=0.3)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"policy {name!r} is unknown; {meant}known are {', '.join(POLICIES)}")
    return POLICIES[name]


def start_placement(setup: Setup) -> Integers:
    """Where all policies start: homes, and replicas chosen before any load is known, [L, S] int64."""
    return default_placement(setup.num_layers, setup.num_experts, setup.num_slots, setup.num_ranks)


# ---- nothing, and greedy packing by the clock ------------------------------------------------------------


def _clock(setup: Setup, start_LS: Integers) -> Clock:
    return Clock(setup)


def _stay(step: int, counts_LE: Integers, slots_LS: Integers, state: Clock) -> tuple[Decision, Clock]:
    return Decision(slots_LS), state


def _by_the_clock(plan: Callable[[Setup, Integers, Integers], Integers], what: str) -> Update:
    """An update that plans on the sample at hand once `every_steps` have passed since the last plan."""

    def update(step: int, counts_LE: Integers, slots_LS: Integers, state: Clock) -> tuple[Decision, Clock]:
        due = state.planned_at < 0 or step - state.planned_at >= state.setup.every_steps
        if not due or not counts_LE.any():
            return Decision(slots_LS), state
        planned_LS = plan(state.setup, counts_LE, slots_LS)
        idle_L1 = ~counts_LE.any(axis=1, keepdims=True)
        reason = f"{what} on the load of step {step}; due every {state.setup.every_steps} steps"
        return Decision(np.where(idle_L1, slots_LS, planned_LS), reason), Clock(state.setup, step)

    return update


def _greedy(setup: Setup, counts_LE: Integers, slots_LS: Integers) -> Integers:
    """EPLB as public systems call it: by the load at hand, whatever the placement in force.

    Without groups that a router is limited to nothing ties an expert to a node: the global form.
    """
    return rebalance_experts(counts_LE, setup.num_slots, 0, setup.num_nodes, setup.num_ranks)[0]


def _strong(setup: Setup, counts_LE: Integers, slots_LS: Integers) -> Integers:
    """The same with its ranks renamed, and only where it is clearly better."""
    return strong_baseline(counts_LE, slots_LS, setup.num_ranks, num_nodes=setup.num_nodes)


# ---- ours ------------------------------------------------------------------------------------------------


def _recent(setup: Setup, start_LS: Integers) -> Recent:
    return Recent(setup)


def _even(step: int, counts_LE: Integers, slots_LS: Integers, state: Recent) -> tuple[Decision, Recent]:
    """A repair for the last samples together, at every sample; few changes, each of which pays."""
    setup = state.setup
    samples = (*state.samples, counts_LE)[-_EVEN_SAMPLES:]
    planned_LS = even_repair(
        np.stack(samples),
        np.full(len(samples), 1 / len(samples)),
        slots_LS,
        setup.num_ranks,
        home_slot_E=setup.home_slot_E if setup.fixed_homes else None,
        move_price=_EVEN_MOVE_PRICE,
    )
    planned_LS = np.where(~counts_LE.any(axis=1, keepdims=True), slots_LS, planned_LS)
    if (planned_LS == slots_LS).all():
        return Decision(slots_LS), Recent(setup, samples)
    layers = int((planned_LS != slots_LS).any(axis=1).sum())
    reason = (
        f"in {layers} of {setup.num_layers} layers a change is worth its moves over the last "
        f"{len(samples)} samples, up to step {step}"
    )
    return Decision(planned_LS, reason), Recent(setup, samples)


def _control_init(setup: Setup, start_LS: Integers) -> Control:
    config = PlacementConfig(
        num_ranks=setup.num_ranks,
        num_slots=setup.num_slots,
        num_nodes=setup.num_nodes,
        cost=setup.cost,
        sample_steps=setup.sample_steps,
        fixed_homes=setup.fixed_homes,
        seed=setup.seed,
    )
    controller = placement_controller(config)
    return Control(config, controller.init(setup.num_layers, setup.num_experts, start_LS))


def _control(step: int, counts_LE: Integers, slots_LS: Integers, state: Control) -> tuple[Decision, Control]:
    """The controller's plan, applied at once; layers without load stay."""
    plan, known = placement_controller(state.config).update(step, counts_LE, slots_LS, state.known)
    if plan is None:
        return Decision(slots_LS), Control(state.config, known)
    return Decision(plan.slot_to_expert_LS, plan.reason), Control(state.config, known)


# ---- fixed patterns --------------------------------------------------------------------------------------


def _pattern_init(kind: str) -> Init:
    def init(setup: Setup, start_LS: Integers) -> Clock:
        partners(kind, setup.num_ranks, 1)  # a number of ranks that has no such pattern is refused here
        return Clock(setup)

    return init


def _pattern(kind: str) -> Update:
    def plan(setup: Setup, counts_LE: Integers, slots_LS: Integers) -> Integers:
        return lplb_placement(counts_LE, setup.num_slots, setup.num_ranks, kind=kind)

    return _by_the_clock(plan, f"heaviest experts of the partner ranks ({kind})")


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        made.name: made
        for made in (
            Policy("none", "even", _clock, _stay),
            Policy("none+split", "exact", _clock, _stay),
            Policy(
                "eplb",
                "even",
                _clock,
                _by_the_clock(_greedy, "greedy replicate-and-pack"),
                free_slots=True,
                distinct=False,
            ),
            Policy(
                "eplb-strong",
                "even",
                _clock,
                _by_the_clock(_strong, "greedy replicate-and-pack, ranks renamed, 5 % better"),
                free_slots=True,
                distinct=False,
            ),
            Policy("even", "even", _recent, _even),
            Policy("split", "exact", _control_init, _control),
            Policy("lplb-ring", "exact", _pattern_init("ring"), _pattern("ring")),
            Policy("lplb-cube", "exact", _pattern_init("cube"), _pattern("cube")),
        )
    }
)
