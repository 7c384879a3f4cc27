"""Plan: a placement for all layers with what was expected of it, and what is refused in one.

Between a planner and whoever applies its plan. An applier reads attributes only (`slot_to_expert_LS`,
`home_slot_LE`, `version`), so that no other code needs this class; it takes a plan whole, at a step boundary,
or refuses it whole. `check_plan` says what is wrong: with the placement, with the moves that the plan names,
or with its time. `plan_to_dict` and `plan_from_dict` carry a plan through JSON.

    rank 0          rank 1              slots contiguous by rank, as many on every rank, -1 = empty
    [0 1 2 | 3 -1]  [3 4 5 | 0 2]       homes, which own the weights in training | spare slots: replicas
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancer.placement_checks import (
    Move,
    check_homes,
    check_placement,
    first_true,
    home_slots,
    list_moves,
    slot_table,
)
from balancer.split_checks import check_slots

__all__ = [
    "Move",
    "Plan",
    "check_placement",
    "check_plan",
    "home_slots",
    "list_moves",
    "plan_from_dict",
    "plan_to_dict",
]

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

# a peak and its bound come from other sums of the same load: they may differ by rounding
_ROUNDING = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plan:
    """A placement of all layers, checked as far as it can be by itself; `check_plan` does the rest.

    slot_to_expert_LS: [L, S] int64, expert of each slot, slots contiguous by rank, -1 = empty;  home_slot_LE:
    [L, E] int64, the slot that owns each expert, None = no homes (serving);  num_ranks: P, a divisor of S;
    moves: what must travel, by layer, then slot (`list_moves`);  bound_L, peak_L: [L] float64 in copies of
    the load planned on: no plan under the same constraints has a peak below the one, this plan has the
    other;  expected_gain_s, move_cost_s: seconds, over the horizon of the planner, and once;  version: more
    than that of every plan before;  made_at_step, applies_at_step: training steps, of the last sample that
    the planner knew, and before which the plan is applied;  reason: why, with figures.

    Raises ValueError for another type or shape, a number that is not finite, negative or out of range, homes
    that hold another expert, moves that the placement contradicts, a peak below its bound, or a plan that
    applies before it is made.
    """

    slot_to_expert_LS: Integers
    home_slot_LE: Integers | None
    num_ranks: int
    moves: tuple[Move, ...]
    bound_L: Floats
    peak_L: Floats
    expected_gain_s: float
    move_cost_s: float
    version: int = 0
    made_at_step: int = 0
    applies_at_step: int = 0
    reason: str = ""

    def __post_init__(self) -> None:
        _check_array("slot_to_expert_LS", self.slot_to_expert_LS, "[L, S]", np.int64)
        check_slots(self.slot_to_expert_LS.shape[1], self.num_ranks)
        if (self.slot_to_expert_LS < -1).any():
            layer, slot = first_true(self.slot_to_expert_LS < -1)
            expert = self.slot_to_expert_LS[layer, slot]
            raise ValueError(f"slot {slot} of layer {layer} has expert {expert}; an empty slot is -1")
        if self.home_slot_LE is not None:
            _check_array("home_slot_LE", self.home_slot_LE, "[L, E]", np.int64)
            check_homes(self.slot_to_expert_LS, self.home_slot_LE)
        self._check_numbers()
        _check_moves(self.moves, self.slot_to_expert_LS, self.num_ranks)

    def _check_numbers(self) -> None:
        num_layers = len(self.slot_to_expert_LS)
        for name, value_L in (("bound_L", self.bound_L), ("peak_L", self.peak_L)):
            _check_array(name, value_L, f"[L] = [{num_layers}]", np.float64)
            if len(value_L) != num_layers:
                raise ValueError(f"{name} has {len(value_L)} layers instead of {num_layers}; give one each")
            wrong = ~((value_L >= 0) & np.isfinite(value_L))
            if wrong.any():
                (layer,) = first_true(wrong)
                raise ValueError(f"{name}[{layer}]={value_L[layer]} is no load; must be finite, 0 or more")
        below = self.peak_L < self.bound_L * (1 - _ROUNDING)
        if below.any():
            (layer,) = first_true(below)
            raise ValueError(
                f"peak_L[{layer}]={self.peak_L[layer]} is below bound_L[{layer}]={self.bound_L[layer]}, "
                "under which no plan comes; both must be of one load and the same constraints"
            )
        if not (math.isfinite(self.expected_gain_s) and math.isfinite(self.move_cost_s)):
            raise ValueError(
                f"expected_gain_s={self.expected_gain_s} and move_cost_s={self.move_cost_s} must be finite"
            )
        for name in ("move_cost_s", "version", "made_at_step"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be 0 or more")
        if self.applies_at_step < self.made_at_step:
            raise ValueError(
                f"applies_at_step={self.applies_at_step} is before made_at_step={self.made_at_step}; a plan "
                "applies at the step it was made at or later"
            )

    @property
    def gap_L(self) -> Floats:
        """[L] float64, peak / bound - 1, at most how far the plan is from the optimum; 0 where bound is 0."""
        known = self.bound_L > 0
        return np.where(known, self.peak_L / np.where(known, self.bound_L, 1.0) - 1.0, 0.0)


def check_plan(
    plan: Plan,
    *,
    num_experts: int,
    current_LS: ArrayLike | None = None,
    version: int | None = None,
    step: int | None = None,
) -> None:
    """Raise ValueError for a plan that must not be applied, as a whole.

    num_experts: E;  current_LS: [L, S] integers, the placement in force, None = there is none or it is not
    known;  version: that in force;  step: training step now. None = not checked. Refused: what
    `check_placement` refuses; another shape than the current placement, homes elsewhere than now, moves that
    are not those from now to the plan; a version that is not newer; a step that has passed, or a plan from
    the future.
    """
    check_placement(
        plan.slot_to_expert_LS,
        num_experts=num_experts,
        num_ranks=plan.num_ranks,
        home_slot_LE=plan.home_slot_LE,
    )
    if current_LS is not None:
        _check_change(plan, slot_table("current_LS", current_LS))
    if version is not None and plan.version <= version:
        raise ValueError(
            f"plan version {plan.version} is not newer than {version}, which is in force; number plans "
            "upwards"
        )
    if step is not None and plan.applies_at_step < step:
        raise ValueError(
            f"the plan applies at step {plan.applies_at_step}, which has passed: it is step {step}; "
            "make it anew"
        )
    if step is not None and plan.made_at_step > step:
        raise ValueError(
            f"the plan was made at step {plan.made_at_step} and it is only step {step}; plan on the past"
        )


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """The plan as plain lists and numbers, for JSON; keys are the fields of `Plan`."""
    result: dict[str, Any] = {field.name: getattr(plan, field.name) for field in fields(Plan)}
    for name, value in result.items():
        if isinstance(value, np.ndarray | np.generic):
            result[name] = value.tolist()  # a number that came from numpy is none to JSON
    return result | {"moves": [[int(number) for number in move] for move in plan.moves]}


def plan_from_dict(record: Any) -> Plan:
    """The plan of a record that `plan_to_dict` made, checked as `Plan` is.

    Raises ValueError for unknown or missing keys, another type or shape, or whatever `Plan` refuses.
    """
    known = {field.name for field in fields(Plan)}
    if not isinstance(record, Mapping):
        raise ValueError(f"a plan is a {type(record).__name__}; expected an object with {sorted(known)}")
    given = cast("Mapping[str, Any]", record)
    if set(given) != known:
        raise ValueError(
            f"a plan lacks the keys {sorted(known - set(given))} and has the unknown keys "
            f"{sorted(set(given) - known)}; expected {sorted(known)}"
        )
    values = dict(given)
    for name in ("slot_to_expert_LS", "home_slot_LE"):
        if name != "home_slot_LE" or given[name] is not None:
            values[name] = _read_array(name, given[name], "iu", 2).astype(np.int64)
    for name in ("bound_L", "peak_L"):
        values[name] = _read_array(name, given[name], "iuf", 1).astype(np.float64)
    none = np.empty((0, len(Move._fields)), np.int64)
    move_n5 = _read_array("moves", none if given["moves"] == [] else given["moves"], "iu", 2)
    if move_n5.shape[1] != len(Move._fields):
        raise ValueError(f"moves have {move_n5.shape[1]} numbers each; expected {', '.join(Move._fields)}")
    values["moves"] = tuple(Move(*row) for row in move_n5.tolist())
    for name in ("num_ranks", "version", "made_at_step", "applies_at_step"):
        if type(given[name]) is not int:
            raise ValueError(f"{name}={given[name]!r} must be an integer")
    for name in ("expected_gain_s", "move_cost_s"):
        if type(given[name]) not in (int, float):
            raise ValueError(f"{name}={given[name]!r} must be a number of seconds")
        values[name] = float(given[name])
    if not isinstance(given["reason"], str):
        raise ValueError(f"reason={given['reason']!r} must be text")
    return Plan(**values)


# ---- checks ---------------------------------------------------------------------------------------------


def _check_array(name: str, array: Any, axes: str, dtype: type[np.generic]) -> None:
    """Raise ValueError unless it is a numpy array of the type, with as many axes as named, none empty."""
    kind = np.dtype(dtype)
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{name} is a {type(array).__name__}; expected a numpy array {kind} {axes}")
    found = cast("NDArray[Any]", array)
    if found.dtype != kind or found.ndim != axes.count(",") + 1 or found.size == 0:
        raise ValueError(f"{name} is {found.dtype} {found.shape}; expected {kind} {axes}, not empty")


def _read_array(name: str, given: Any, kinds: str, axes: int) -> NDArray[Any]:
    """Nested lists of numbers as an array; numpy would refuse ragged ones with a text of its own."""
    try:
        array = np.asarray(given)
    except (ValueError, OverflowError) as error:
        raise ValueError(
            f"{name} is no table of numbers: {error}; every row needs the same length"
        ) from error
    if array.dtype.kind not in kinds or array.ndim != axes:
        kind = "integers" if kinds == "iu" else "numbers"
        raise ValueError(f"{name} is {array.dtype} {array.shape}; expected {kind} with {axes} axes")
    return array


def _check_moves(moves: tuple[Move, ...], slots_LS: Integers, num_ranks: int) -> None:
    """Raise ValueError unless the moves are in order, each into a slot that holds its expert."""
    num_layers, num_slots = slots_LS.shape
    last = (-1, -1)
    for move in moves:
        if not (0 <= move.layer < num_layers and 0 <= move.slot < num_slots):
            raise ValueError(f"{move} is out of {num_layers} layers of {num_slots} slots")
        if move.rank != move.slot // (num_slots // num_ranks) or move.expert < 0 or move.replaced < -1:
            raise ValueError(
                f"{move}: slot, rank and experts do not fit {num_ranks} ranks of {num_slots} slots"
            )
        if move.expert != slots_LS[move.layer, move.slot]:
            raise ValueError(f"{move}: the plan has expert {slots_LS[move.layer, move.slot]} in that slot")
        if (move.layer, move.slot) <= last:
            raise ValueError(
                f"{move} comes after a move into slot {last[1]} of layer {last[0]}; by layer, slot"
            )
        last = (move.layer, move.slot)


def _check_change(plan: Plan, current_LS: Integers) -> None:
    """Raise ValueError unless the plan changes the placement in force, and only as its moves say."""
    if current_LS.shape != plan.slot_to_expert_LS.shape:
        raise ValueError(
            f"the plan is {plan.slot_to_expert_LS.shape} and the placement in force {current_LS.shape}; "
            "layers and slots must be the same"
        )
    if plan.home_slot_LE is not None:
        check_homes(current_LS, plan.home_slot_LE, "the one in force")
    needed = list_moves(current_LS, plan.slot_to_expert_LS, plan.num_ranks)
    if needed != plan.moves:
        missing = sorted(set(needed) - set(plan.moves))
        extra = sorted(set(plan.moves) - set(needed))
        raise ValueError(
            f"the plan lists {len(plan.moves)} moves, the change from the placement in force needs "
            f"{len(needed)}: missing {missing[:1]}, not needed {extra[:1]}; list_moves makes the list"
        )
