"""Split: how the rows of each expert are shared among its slots, exactly, for every batch.

Stands between the counts that all ranks have gathered and the dispatch: counts [P, E] and placement [S] in,
rows [P, S] out, the same integers on every rank without communication.

    counts_PE -> exact_split -> rows_PS          the callable that an expert layer takes as its split
    counts_PE -> ExactSplit(...).solve           the same with options, a rank's part only, figures beside it
    load_E    -> balanced_peak                   the peak and the cut that proves it, for planners

The rows of an expert on a rank are a flow from the expert to the rank, so the smallest peak over integers is

    max over sets X of ranks of ceil(rows of the experts whose slots all lie in X / |X|)

(integrality of flows), and the fewest rows off their rank at that peak are a convex flow's minimum. The
loops are in split_kernels.py, which says how; compiled by numba here, and run as they stand by the twins.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from balancer import split_kernels, split_send
from balancer.compiled import compile_file
from balancer.split_checks import (
    Counts,
    check_ranks,
    check_slots,
    extra_load,
    integers,
    nearest_divisor,
    refuse,
    speeds,
)
from balancer.split_send import Rows

_NONE = np.empty(0, np.int64)
_NONE_2D = np.empty((0, 0), np.int64)
_EVEN = np.empty(0, np.float64)
_COMPILING = threading.Lock()


class BalancedPeak(NamedTuple):
    """rows_S [S]: rows of every slot;  peak: the largest rank load, with speeds the longest time;  cut_P [P]
    bool: ranks whose own load (experts with all slots among them) forces this peak."""

    rows_S: Counts
    peak: float
    cut_P: NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitResult:
    """A split and its figures, in rows.

    rows_PS: [P, S] int64, or None where one rank's part was asked for;  row_S: [S], that rank's rows to every
    slot;  columns_Ps: [P, s], the rows of every source for its own slots;  rank_load_P: [P], fixed extra load
    included;  peak: largest entry of rank_load_P (over its speed, where speeds are given);  optimum_peak: the
    smallest possible one, without min_rows;  excess: peak - optimum_peak;  off_rank_rows, off_node_rows: rows
    whose slot is on another rank, on another node (None without nodes).
    """

    rows_PS: Counts | None
    row_S: Counts | None
    columns_Ps: Counts | None
    rank_load_P: Counts
    peak: float
    optimum_peak: float
    excess: float
    off_rank_rows: int
    off_node_rows: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactSplit:
    """The exact split with options; call it as (counts_PE, slot_to_expert_S) -> rows_PS. Threads may share
    one.

    Among the splits with the smallest largest load: the fewest rows off their rank, then the fewest off their
    node. A row's own rank comes first, then its node, then sources in order fill slots in order.

    >>> split = ExactSplit(ranks_per_node=1)
    >>> split(np.array([[6, 0], [0, 2]]), np.array([0, -1, 1, 0])).tolist()
    [[4, 0, 0, 2], [0, 0, 2, 0]]
    """

    num_ranks: int | None = field(
        default=None,
        metadata={
            "help": "ranks that hold experts, where the sources are other ranks (no row is local); None = "
            "the sources themselves"
        },
    )
    ranks_per_node: int | None = field(
        default=None, metadata={"help": "ranks of a node; None = nodes count nothing"}
    )
    speed_P: tuple[float, ...] | None = field(
        default=None,
        metadata={"help": "relative speed of each rank; the peak is then rows / speed. None = all alike"},
    )
    extra_load_P: tuple[int, ...] | None = field(
        default=None, metadata={"help": "rows of other work that each rank does anyway; None = none"}
    )
    min_rows: int = field(
        default=0,
        metadata={"help": "a replica gets no rows or at least this many (rows); what fetching it is worth"},
    )
    locality: bool = field(
        default=True, metadata={"help": "fewest rows off their rank; False: only the peak counts, faster"}
    )
    home_slot_E: tuple[int, ...] | None = field(
        default=None,
        metadata={"help": "slot of each expert's home, which min_rows spares; None = its first slot"},
    )
    compiled: bool = field(default=True, metadata={"help": "False: the twin, plain Python"})
    _arrays: tuple[Counts, NDArray[np.float64], Counts] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.min_rows < 0:
            raise ValueError(f"min_rows={self.min_rows} must be 0 (no minimum) or more")
        for name in ("num_ranks", "ranks_per_node"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.num_ranks is not None and self.ranks_per_node is not None:
            raise ValueError("ranks_per_node counts local rows, which num_ranks says there are not; drop one")
        home = _NONE if self.home_slot_E is None else np.array(self.home_slot_E, np.int64)
        arrays = (home, speeds(self.speed_P), extra_load(self.extra_load_P))
        object.__setattr__(self, "_arrays", arrays)

    def __call__(self, counts_PE: Counts, slot_to_expert_S: Counts) -> Counts:
        """rows_PS [P, S] int64; the arguments and errors of `solve`."""
        rows_PS = self.solve(counts_PE, slot_to_expert_S).rows_PS
        assert rows_PS is not None, "solve without a rank gives all rows"
        return rows_PS

    def solve(self, counts_PE: Counts, slot_to_expert_S: Counts, rank: int | None = None) -> SplitResult:
        """Split one batch.

        counts_PE: [P, E] integers, copies of each expert on each source rank;  slot_to_expert_S: [S]
        integers, expert of each slot, slots contiguous by rank, -1 = empty;  rank: only the rows that this
        rank sends and receives. Raises ValueError where these do not fit each other or the options.
        """
        counts_PE = integers("counts_PE", counts_PE, 2)
        slot_to_expert_S = integers("slot_to_expert_S", slot_to_expert_S, 1)
        num_sources, num_slots = counts_PE.shape[0], slot_to_expert_S.shape[0]
        num_ranks = self.num_ranks or num_sources
        home_E, speed_G, extra_G = self._fitted(counts_PE.shape[1], num_slots, num_ranks)
        if rank is not None and self.num_ranks is not None:
            raise ValueError(f"rank={rank} has a row only where sources and ranks are the same; drop one")
        out = _outputs(num_sources, num_slots, num_ranks, rank)
        load_G, optimum_G = np.empty(num_ranks, np.int64), np.empty(num_ranks, np.int64)
        rows_S, off = np.zeros(num_slots, np.int64), np.empty(2, np.int64)
        local, nodes = self.num_ranks is None, self.ranks_per_node or 0
        run = _kernels(self.compiled)
        status = run.slot_split(
            counts_PE, slot_to_expert_S, home_E, speed_G, extra_G,
            (local and self.locality, nodes, self.min_rows), rows_S, load_G, optimum_G,
        )  # fmt: skip
        if status:
            refuse(status, counts_PE, slot_to_expert_S, home_E)
        run.send_rows(counts_PE, slot_to_expert_S, rows_S, num_ranks, local, nodes, out, off)
        peak, optimum = _peak(load_G, speed_G), _peak(optimum_G, speed_G)
        return SplitResult(
            rows_PS=out.rows_PS if rank is None else None,
            row_S=None if rank is None else out.row_S,
            columns_Ps=None if rank is None else out.columns_Ps,
            rank_load_P=load_G,
            peak=peak,
            optimum_peak=optimum,
            excess=peak - optimum,
            off_rank_rows=int(off[0]),
            off_node_rows=int(off[1]) if self.ranks_per_node else None,
        )

    def _fitted(
        self, num_experts: int, num_slots: int, num_ranks: int
    ) -> tuple[Counts, NDArray[np.float64], Counts]:
        """home_slot_E, speed and extra load as arrays, checked against the sizes of a batch."""
        home_E, speed_G, extra_G = self._arrays
        check_slots(num_slots, num_ranks)
        nodes = self.ranks_per_node
        if nodes and num_ranks % nodes:
            nearest = nearest_divisor(num_ranks, nodes)
            raise ValueError(f"ranks_per_node={nodes} does not divide {num_ranks} ranks; use {nearest}")
        if home_E.shape[0] not in (0, num_experts):
            raise ValueError(
                f"home_slot_E has {home_E.shape[0]} entries for {num_experts} experts; give one each"
            )
        check_ranks(speed_G, extra_G, num_ranks)
        return home_E, speed_G, extra_G if extra_G.shape[0] else np.zeros(num_ranks, np.int64)


def exact_split(counts_PE: Counts, slot_to_expert_S: Counts) -> Counts:
    """Rows of every source rank for every slot: smallest largest rank load, then fewest rows off their rank.

    counts_PE: [P, E] integers, copies of each expert on each source rank;  slot_to_expert_S: [S] integers,
    expert of each slot, slots contiguous by rank, -1 = empty.   Returns rows_PS [P, S] int64; over the slots
    of an expert a source's rows sum to its copies. Raises ValueError as `ExactSplit.solve` does.

    >>> exact_split(np.array([[8, 1], [2, 1]]), np.array([0, 1, 1, 0])).tolist()
    [[5, 1, 0, 3], [0, 0, 1, 2]]
    """
    return _PLAIN(counts_PE, slot_to_expert_S)


def exact_split_numpy(counts_PE: Counts, slot_to_expert_S: Counts) -> Counts:
    """Twin of `exact_split`: the same loops in plain Python, equal integers."""
    return _TWIN(counts_PE, slot_to_expert_S)


def split_rows(
    counts_PE: Counts,
    slot_to_expert_S: Counts,
    *,
    num_ranks: int | None = None,
    num_nodes: int = 1,
    min_rows: int = 0,
) -> Counts:
    """The exact split as one call; arguments of `ExactSplit`, with nodes by their number.

    num_ranks: ranks that hold experts, where the sources are others; None = the sources themselves.
    """
    if num_nodes == 1:
        return ExactSplit(num_ranks=num_ranks, min_rows=min_rows)(counts_PE, slot_to_expert_S)
    ranks = num_ranks or len(counts_PE)
    if num_nodes < 1 or ranks % num_nodes:
        nearest = nearest_divisor(ranks, num_nodes)
        raise ValueError(f"num_nodes={num_nodes} does not divide {ranks} ranks; use {nearest}")
    split = ExactSplit(num_ranks=num_ranks, ranks_per_node=ranks // num_nodes, min_rows=min_rows)
    return split(counts_PE, slot_to_expert_S)


def balanced_peak(
    load_E: Counts,
    slot_to_expert_S: Counts,
    num_ranks: int,
    *,
    speed_P: Sequence[float] | NDArray[np.float64] | None = None,
    extra_load_P: Sequence[int] | Counts | None = None,
    compiled: bool = True,
) -> BalancedPeak:
    """Smallest largest load of a rank that a placement allows, with the set of ranks that proves it.

    load_E: [E] integers, copies of each expert;  slot_to_expert_S: [S] integers, -1 = empty;  num_ranks: P;
    speed_P: [P], the peak is then the smallest possible max(load_P / speed_P);  extra_load_P: [P] rows;
    compiled: False runs the twin.   Raises ValueError as `ExactSplit.solve` does.

    >>> rows_S, peak, cut_P = balanced_peak(np.array([9, 1, 2]), np.array([0, -1, 0, -1, 1, 2]), 3)
    >>> rows_S.tolist(), peak, cut_P.tolist()
    ([5, 0, 4, 0, 1, 2], 5, [True, True, False])
    """
    load_E = integers("load_E", load_E, 1)
    slot_to_expert_S = integers("slot_to_expert_S", slot_to_expert_S, 1)
    check_slots(slot_to_expert_S.shape[0], num_ranks)
    speed_G, extra_G = speeds(speed_P), extra_load(extra_load_P)
    check_ranks(speed_G, extra_G, num_ranks)
    if extra_G.shape[0] == 0:
        extra_G = np.zeros(num_ranks, np.int64)
    rows_S = np.zeros(slot_to_expert_S.shape[0], np.int64)
    load_G, cut_G = np.empty((2, num_ranks), np.int64)
    status = _kernels(compiled).peak_split(load_E, slot_to_expert_S, speed_G, extra_G, rows_S, load_G, cut_G)
    if status:
        refuse(status, load_E[None], slot_to_expert_S, _NONE)
    return BalancedPeak(rows_S, _peak(load_G, speed_G), cut_G.astype(np.bool_))


# ---- the kernels ----------------------------------------------------------------------------------------


def warm_split() -> None:
    """Compile the kernels, or load them from disk, so that no step waits for it. Once an installation is
    enough."""
    _kernels(compiled=True)


def _kernels(compiled: bool) -> SimpleNamespace:
    """The entries of both kernel files, compiled for their types and kept on disk, or as they stand."""
    if not compiled:
        return _plain()
    with _COMPILING:  # ranks may be threads
        return _compile()


def _plain() -> SimpleNamespace:
    modules = (split_kernels, split_send)
    return SimpleNamespace(**{name: getattr(module, name) for module in modules for name in module.ENTRIES})


@lru_cache(maxsize=1)
def _compile() -> SimpleNamespace:
    from numba import types

    def array(dimensions: int, readonly: bool = False, dtype: Any = types.int64) -> Any:
        return types.Array(dtype, dimensions, "C", readonly=readonly)

    vector, matrix, number = array(1), array(2), types.int64
    given_1, given_2, speed = array(1, True), array(2, True), array(1, True, types.float64)
    options = types.UniTuple(number, 3)
    out = types.NamedTuple((number, matrix, vector, matrix), Rows)
    peak = types.int64(given_1, given_1, speed, given_1, vector, vector, vector)
    slot = types.int64(given_2, given_1, given_1, speed, given_1, options, vector, vector, vector)
    send = types.void(given_2, given_1, vector, number, number, number, out, vector)
    compiled = compile_file(split_kernels, {"peak_split": peak, "slot_split": slot})
    return SimpleNamespace(**compiled, **compile_file(split_send, {"send_rows": send}))


def _outputs(num_sources: int, num_slots: int, num_ranks: int, rank: int | None) -> Rows:
    """Zeros for the rows that are asked for."""
    if rank is None:
        return Rows(-1, np.zeros((num_sources, num_slots), np.int64), _NONE, _NONE_2D)
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank={rank} is out of 0..{num_ranks - 1}")
    columns_Ps = np.zeros((num_sources, num_slots // num_ranks), np.int64)
    return Rows(rank, _NONE_2D, np.zeros(num_slots, np.int64), columns_Ps)


def _peak(load_G: Counts, speed_G: NDArray[np.float64]) -> float:
    """The largest load, as int, or the longest time."""
    return float((load_G / speed_G).max()) if speed_G.shape[0] else int(load_G.max())


_PLAIN = ExactSplit()
_TWIN = ExactSplit(compiled=False)
