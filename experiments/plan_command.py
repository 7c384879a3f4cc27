"""Plan: `counterpoise plan TRACE`, a placement for what a recorded load says comes next, and why.

    counterpoise plan TRACE --ranks 8 --spare 16 --json plan.json
    counterpoise plan NEWER --ranks 8 --spare 16 --current plan.json --json next.json

The last samples of a trace go to `balancer.plan_placement`; what comes back is printed layer by layer beside
the placement that is there (or the usual homes, where there is none), and written as JSON.
"""

import argparse
import json
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from balancer.files import replace_whole
from balancer.packing import even_share_load
from balancer.placement_checks import home_slots
from balancer.plan import Plan, plan_from_dict, plan_to_dict
from balancer.planning import EFFORTS, MOVE_PRICE, plan_placement
from balancer.search import layer_peaks
from balancer.trace import load_trace
from experiments.sizes_arguments import add_sizes, chosen_slots

# samples of the trace that a plan looks at, where nothing else is said
_SAMPLES = 200
# layers that are printed, those with the largest gain first
_SHOWN = 12


def parser() -> argparse.ArgumentParser:
    """The arguments of `counterpoise plan`."""
    top = argparse.ArgumentParser(
        prog="counterpoise plan",
        description="Plan where the experts go, for the load that a recorded trace says comes next.",
        allow_abbrev=False,
    )
    add_sizes(top)
    add = top.add_argument
    add(
        "--nodes",
        metavar="M",
        type=int,
        default=1,
        help="nodes that the ranks are on; they bind only with --groups; 1",
    )
    add(
        "--groups",
        metavar="N",
        type=int,
        default=0,
        help="groups of experts that stay on one node, a multiple of the nodes; 0 = experts go anywhere",
    )
    add(
        "--homes",
        choices=("fixed", "free"),
        default="fixed",
        help="fixed, as training needs it: the first slots of every rank keep its own experts, in order; or "
        "free; fixed",
    )
    add(
        "--effort",
        choices=EFFORTS,
        default="robust",
        help="robust and repair: exact split; fast: even shares, the newest sample only; robust",
    )
    add("--current", metavar="PLAN", help="JSON of the plan in force (default: none yet)")
    add("--samples", metavar="N", type=int, default=_SAMPLES, help=f"last samples looked at; {_SAMPLES}")
    add(
        "--move-price",
        metavar="X",
        type=float,
        default=MOVE_PRICE,
        help=f"what a moved slot must gain, as a share of the layer's time; {MOVE_PRICE}",
    )
    add("--seed", metavar="N", type=int, default=0, help="of the scenarios; 0")
    add("--json", metavar="OUT", help="file for the plan")
    add("--force", action="store_true", help="overwrite the file if it is there")
    return top


def main(argv: Sequence[str]) -> int:
    """Plan, say what was found, write the plan."""
    args = parser().parse_args(argv)
    if args.samples < 1:
        raise ValueError(f"--samples {args.samples} must be 1 or more")
    out = Path(args.json) if args.json else None
    _check_free(out, args.force)
    current = read_plan(args.current) if args.current else None
    trace = load_trace(args.trace, **({"format": args.format} if args.format else {}))
    counts_WLE = np.asarray(trace.tokens_per_expert_WLE[-args.samples :])
    num_experts = counts_WLE.shape[2]
    num_slots = chosen_slots(num_experts, args.ranks, args.spare)
    if current is not None:
        _check_current(args.current, current, args.ranks, num_slots, num_experts)
    seen_WLE = counts_WLE[-1:] if args.effort == "fast" else counts_WLE
    started = time.perf_counter()
    plan = plan_placement(
        seen_WLE,
        num_ranks=args.ranks, num_slots=num_slots, num_nodes=args.nodes, num_groups=args.groups,
        current_LS=None if current is None else current.slot_to_expert_LS,
        fixed_homes=args.homes == "fixed", effort=args.effort, move_price=args.move_price, seed=args.seed,
    )  # fmt: skip
    took_s = time.perf_counter() - started
    print(f"{args.trace}: {_samples(len(seen_WLE), args.effort)}, up to step {int(trace.steps_W[-1])}")
    print(f"{args.ranks} ranks, {num_slots} slots for {num_experts} experts, homes {args.homes}")
    print(f"planned in {1e3 * took_s:.0f} ms (compiling or loading the kernels included)\n")
    print(textwrap.fill(f"{args.effort}: {plan.reason}", 108) + "\n")
    print(described(plan, current, counts_WLE[-1], shares="even" if args.effort == "fast" else "exact"))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        version = 1 if current is None else current.version + 1
        step = int(trace.steps_W[-1])
        record = plan_to_dict(plan) | {"version": version, "made_at_step": step, "applies_at_step": step}
        data = (json.dumps(record, allow_nan=False) + "\n").encode()
        replace_whole(out, [data])
        print(f"\nwrote {out} ({len(data) / 2**10:.0f} KiB)")
    return 0


def read_plan(path: str) -> Plan:
    """The plan of a file that `--json` wrote; ValueError that names the file."""
    try:
        return plan_from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ValueError(f"--current {path}: {error}") from None


def _check_free(out: Path | None, force: bool) -> None:
    """Raise ValueError for an output that is in the way, before any work is done."""
    if out is None:
        return
    if out.is_dir():
        raise ValueError(f"--json {out} is a folder; name a file")
    if out.exists() and not force:
        raise ValueError(f"{out} is there already; choose another name, or --force")


def _check_current(path: str, current: Plan, num_ranks: int, num_slots: int, num_experts: int) -> None:
    """Raise ValueError for a plan in force that is for other ranks or slots than those asked for."""
    if current.num_ranks != num_ranks:
        raise ValueError(
            f"--current {path} is a plan for {current.num_ranks} ranks, --ranks says {num_ranks}; give "
            f"--ranks {current.num_ranks}, or leave out --current to place the experts anew"
        )
    slots = int(current.slot_to_expert_LS.shape[1])
    if slots != num_slots:
        fits = f"give --spare {slots - num_experts}, or " if slots >= num_experts else ""
        raise ValueError(
            f"--current {path} is a plan for {slots} slots, asked for are {num_slots} ({num_experts} experts "
            f"and {num_slots - num_experts} spare); {fits}leave out --current to place the experts anew"
        )


def _samples(number: int, effort: str) -> str:
    """How many samples a plan was made on, in words."""
    if effort == "fast":
        return "the newest sample alone (--effort fast looks at no other)"
    return f"{number} sample{'' if number == 1 else 's'}"


def described(plan: Plan, current: Plan | None, load_LE: np.ndarray, *, shares: str) -> str:
    """A table: how busy the ranks are on the last load, before and after, and what it takes."""
    num_layers, num_experts = load_LE.shape
    if current is not None:
        before_LS, word = current.slot_to_expert_LS, "now"
    else:
        homes_E = home_slots(num_experts, plan.slot_to_expert_LS.shape[1], plan.num_ranks)
        before_LS = np.full(plan.slot_to_expert_LS.shape, -1, np.int64)
        before_LS[:, homes_E] = np.arange(num_experts)
        word = "homes"
    before_L, after_L = (
        busy(slots, load_LE, plan.num_ranks, shares) for slots in (before_LS, plan.slot_to_expert_LS)
    )
    gap_L = np.where(plan.bound_L > 0, plan.gap_L, np.nan)  # no load is expected: no gap either
    moves_L = np.bincount([move.layer for move in plan.moves], minlength=num_layers)
    order = np.argsort(-(after_L - before_L), kind="stable")[:_SHOWN]  # layers without load last
    lines = [f"{'layer':>7} {word + ' %':>9} {'plan %':>8} {'moves':>7} {'above bound %':>14}"]
    lines += [
        f"{layer:>7} {_percent(float(before_L[layer]), 2):>9} {_percent(float(after_L[layer]), 2):>8} "
        f"{moves_L[layer] if current else '-':>7} {_percent(float(gap_L[layer]), 3):>14}"
        for layer in order.tolist()
    ]
    if num_layers > _SHOWN:
        lines.append(f"{'... ' + str(num_layers - _SHOWN) + ' more':>16}")
    mean = f"{'mean':>7} {_percent(_mean(before_L), 2):>9} {_percent(_mean(after_L), 2):>8} "
    lines.append(mean + f"{len(plan.moves) if current else '-':>7} {_percent(_mean(gap_L), 3):>14}")
    lines.append(
        "% = mean over fullest rank on the last load; above bound: by how much the fullest rank of the\n"
        "expected load exceeds what no placement can be below; - = no load, left out of the means"
    )
    return "\n".join(lines)


def _percent(share: float, digits: int) -> str:
    """In per cent, "-" for NaN."""
    return "-" if np.isnan(share) else f"{100 * share:.{digits}f}"


def _mean(value_L: np.ndarray) -> float:
    """The mean over the layers where it is defined, NaN without any."""
    known = value_L[~np.isnan(value_L)]
    return float(known.mean()) if len(known) else float("nan")


def busy(slots_LS: np.ndarray, load_LE: np.ndarray, num_ranks: int, shares: str) -> np.ndarray:
    """Mean over fullest rank of every layer [L], NaN without load."""
    if shares == "even":
        peak_L = even_share_load(load_LE, slots_LS, num_ranks).max(axis=1)
    else:
        peak_L = layer_peaks(slots_LS, load_LE, num_ranks)[0]
    return np.where(peak_L > 0, load_LE.sum(axis=1) / num_ranks / np.where(peak_L > 0, peak_L, 1), np.nan)
