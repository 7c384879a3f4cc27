"""Bench placement, part `gap`: how far even-share placements of random heavy loads are from their bound.

Loads: lognormal of sigma 1, 58 layers of 256 experts, several draws. All contenders place the same loads on
the same ranks; the gap of a layer is its fullest rank over the bound that no placement gets below, less 1.
"""

from typing import Any, NamedTuple

import numpy as np

from balancer.bound import peak_bound
from balancer.even import even_placement
from balancer.packing import even_share_load, rebalance_experts
from experiments.bench_placement_parts import Floats, Found, Integers, Options
from experiments.forecast_plots_parts import grid, log_y, look, png

_DRAWS = 3


class Case(NamedTuple):
    """Sizes of a case; target: mean gap in per cent."""

    slots: int
    ranks: int
    nodes: int
    groups: int
    target: float

    @property
    def name(self) -> str:
        where = f"{self.nodes} nodes, {self.groups} groups" if self.nodes > 1 else "global"
        return f"{self.slots}/{self.ranks} {where}"

    def place(self, load_LE: Floats, contender: str) -> Integers:
        """The placement of a contender."""
        if contender == "greedy":
            return rebalance_experts(load_LE, self.slots, self.groups, self.nodes, self.ranks)[0]
        return even_placement(
            load_LE, self.slots, self.ranks, num_nodes=self.nodes, num_groups=self.groups,
            effort=contender.removeprefix("even "),
        )  # fmt: skip


# groups: 8, as a router that chooses some of 8 groups has them; one or two on a node
CASES = tuple(
    Case(slots, ranks, nodes, 8 if nodes > 1 else 0, target)
    for slots, ranks, target in ((288, 32, 0.05), (320, 64, 0.2))
    for nodes in (1, 4, 8)
)
CONTENDERS = ("greedy", "even fast", "even thorough")


def run(options: Options) -> Found:
    """All cases and contenders."""
    found = Found()
    loads = [
        np.random.default_rng([3, draw]).lognormal(0.0, 1.0, (6 if options.quick else 58, 256))
        for draw in range(1 if options.quick else _DRAWS)
    ]
    load_XE = np.concatenate(loads)
    for case in CASES:
        _run_case(found, case, load_XE)
    found.plots["gap"] = _plot(found.rows)
    return found


def _run_case(found: Found, case: Case, load_XE: Floats) -> None:
    bound_X = peak_bound(
        load_XE, case.slots, case.ranks, shares="even", num_nodes=case.nodes, num_groups=case.groups
    )
    greedy_X = np.full(len(load_XE), np.inf)
    for contender in CONTENDERS:
        peak_X = even_share_load(load_XE, case.place(load_XE, contender), case.ranks).max(axis=1)
        greedy_X = peak_X if contender == "greedy" else greedy_X
        gap_X = 100 * (peak_X / bound_X - 1)
        ours: dict[str, Any] = {} if contender == "greedy" else {"target": case.target}
        floor = float(bound_X.mean())
        found.add(case.name, contender, "gap_mean_percent", float(gap_X.mean()), **ours)
        found.add(case.name, contender, "gap_max_percent", float(gap_X.max()))
        found.add(case.name, contender, "peak_mean", float(peak_X.mean()), floor=floor)
        if ours:
            worse = float((peak_X > greedy_X * (1 + 1e-12)).mean())
            found.add(case.name, contender, "layers_worse_than_greedy", worse, target=0.0)


def _plot(rows: list[dict[str, Any]]) -> bytes:
    figure, ((ax,),) = grid(1, 1, (9.5, 4.2))
    gaps = {(r["case"], r["contender"]): r["value"] for r in rows if r["metric"] == "gap_mean_percent"}
    place_C = np.arange(len(CASES))
    for i, contender in enumerate(CONTENDERS):
        height = [max(gaps[case.name, contender], 1e-4) for case in CASES]
        ax.bar(place_C + 0.27 * (i - 1), height, 0.25, color=look(i)["color"], label=contender)
    targets = [case.target for case in CASES]
    ax.hlines(targets, place_C - 0.42, place_C + 0.42, color="black", ls=":", label="target")
    log_y(ax)
    ax.set_xticks(place_C, [case.name.replace(" ", "\n", 1) for case in CASES])
    ax.set_ylabel("mean gap to the bound (%)")
    ax.legend(fontsize=9, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.13), frameon=False)
    return png(figure, "Even shares: how far the fullest rank is above the bound (256 experts, slots/ranks)")
