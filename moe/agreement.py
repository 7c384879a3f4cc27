"""Agreement: what the ranks of a job tell each other before rows travel, and what they raise together.

    routing of every rank -> one all-gather -> counts [P, E]; or an error, the same on all ranks

A rank that raised alone would leave the others waiting in their next collective.
"""

from typing import NoReturn

import numpy as np
import torch

from moe.groups import Groups
from moe.kernels import kernels
from moe.placement import Placement
from moe.topology import Topology
from routing import Routing

INFINITE, MISPLACED = 1, 2  # what is wrong with a rank, as bits


class NonFiniteRouterError(RuntimeError):
    """The router of some rank produced NaN or infinite logits. Raised on every rank of the EP group alike."""

    def __init__(self, layer: int, ranks: list[int]) -> None:
        super().__init__(
            f"router logits of MoE layer {layer} are NaN or infinite on rank {', '.join(map(str, ranks))}"
        )
        self.layer, self.ranks = layer, ranks


class PlacementMismatchError(RuntimeError):
    """The ranks of an EP group hold different placements. Raised on every rank of the job alike."""

    def __init__(self, layer: int, ranks: list[int], version: int) -> None:
        super().__init__(
            f"placement of MoE layer {layer} on rank {', '.join(map(str, ranks))} differs from that of the "
            f"first rank of its EP group (here: version {version}); place the same slots on every rank"
        )
        self.layer, self.ranks = layer, ranks


def gather_counts(
    routing: Routing, placement: Placement, groups: Groups, topology: Topology, layer_id: int
) -> tuple[np.ndarray, torch.Tensor]:
    """The counts of every rank of the EP group, [P, E] int64 on the host, and their sum [E] on the device.

    One collective and one host sync. Two more columns: that a rank's logits are not finite, and its
    placement's fingerprint. With several EP groups a second, smaller gather over the EDP group sums the
    counts of all ranks and carries what is wrong.
    Raises NonFiniteRouterError and PlacementMismatchError, on all ranks of the job alike.
    """
    logits_TE = routing.logits_TE.detach()
    if routing.token_mask_T is not None:
        logits_TE = torch.where(routing.token_mask_T[:, None], logits_TE, 0.0)
    infinite = (~torch.isfinite(logits_TE)).any().to(torch.int64)
    checks = torch.stack([infinite, torch.full_like(infinite, placement.fingerprint)])
    gathered_PX = groups.ep.all_gather(torch.cat([routing.routed_E, checks]))
    wrong_P, counts_E = _wrong(gathered_PX[:, -2:]), gathered_PX[:, :-2].sum(dim=0)
    wrong_W, counts_E = _over_edp(wrong_P, counts_E, groups)
    num_ranks, num_experts = gathered_PX.shape[0], gathered_PX.shape[1] - 2
    host = torch.cat([gathered_PX[:, :-2].reshape(-1), wrong_W]).cpu().numpy()
    counts_PE, wrong = np.split(host, [num_ranks * num_experts])
    if wrong.any():
        _raise(wrong, placement, topology, layer_id)
    return counts_PE.reshape(num_ranks, num_experts), counts_E


def compare_placements(
    placement: Placement, groups: Groups, topology: Topology, layer_id: int, device: torch.device
) -> None:
    """Raise PlacementMismatchError, on all ranks of the job alike, where ranks of an EP group differ.

    A collective and a host sync, for what travels before the counts are gathered.
    """
    checks = torch.tensor([0, placement.fingerprint], dtype=torch.int64, device=device)
    wrong_P = _wrong(groups.ep.all_gather(checks))
    wrong_W, _ = _over_edp(wrong_P, wrong_P.new_empty(0), groups)
    wrong = wrong_W.cpu().numpy()
    if wrong.any():
        _raise(wrong, placement, topology, layer_id)


def _wrong(checks_P2: torch.Tensor) -> torch.Tensor:
    """[P] bits, from whether logits are not finite and the fingerprint."""
    return INFINITE * checks_P2[:, 0] + MISPLACED * (checks_P2[:, 1] != checks_P2[0, 1])


def _over_edp(
    wrong_P: torch.Tensor, counts_E: torch.Tensor, groups: Groups
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is wrong with every rank of the job, in the order of Topology.grid, and the counts of all."""
    if groups.edp.size == 1:
        return wrong_P, counts_E
    both_DX = groups.edp.all_gather(torch.cat([counts_E, wrong_P]))
    num_experts = counts_E.shape[0]
    return both_DX[:, num_experts:].reshape(-1), both_DX[:, :num_experts].sum(dim=0)


def _raise(wrong: np.ndarray, placement: Placement, topology: Topology, layer_id: int) -> NoReturn:
    ranks = (topology.grid() if wrong.size > topology.ep_size else topology.ep_ranks()).reshape(-1)
    if (wrong & MISPLACED).any():
        raise PlacementMismatchError(layer_id, ranks[(wrong & MISPLACED) > 0].tolist(), placement.version)
    raise NonFiniteRouterError(layer_id, ranks[wrong > 0].tolist())


def check_split(rows_PS: np.ndarray, counts_PE: np.ndarray, slot_to_expert_S: np.ndarray) -> np.ndarray:
    """The rows of every slot, [S] int64, after checking that the split sends every copy exactly once.

    rows_PS: what a split gave;  counts_PE: [P, E] int64;  slot_to_expert_S: [S] int64.
    Raises ValueError, before any collective is called: a backend may abort the process on a mismatch.
    """
    expected = (counts_PE.shape[0], slot_to_expert_S.shape[0])
    if not isinstance(rows_PS, np.ndarray) or rows_PS.dtype != np.int64 or rows_PS.shape != expected:
        given = getattr(rows_PS, "dtype", type(rows_PS).__name__), getattr(rows_PS, "shape", "no shape")
        raise ValueError(
            f"split gave rows of {given[0]} and shape {given[1]}; expected an array of int64 and shape "
            f"{expected}: the rows of every source rank for every slot"
        )
    rows_S, sent_E = np.zeros(expected[1], np.int64), np.empty(counts_PE.shape[1], np.int64)
    rows_PS, counts_PE = np.ascontiguousarray(rows_PS), np.ascontiguousarray(counts_PE)
    if not kernels().add_up(rows_PS, counts_PE, slot_to_expert_S, rows_S, sent_E):
        _refuse_split(rows_PS, counts_PE, slot_to_expert_S)
    return rows_S


def _refuse_split(rows_PS: np.ndarray, counts_PE: np.ndarray, slot_to_expert_S: np.ndarray) -> NoReturn:
    """Raise ValueError that names the first wrong entry."""
    if (rows_PS < 0).any():
        rank, slot = np.argwhere(rows_PS < 0)[0]
        raise ValueError(f"split sends {rows_PS[rank, slot]} rows of rank {rank} to slot {slot}; 0 or more")
    used = slot_to_expert_S >= 0
    if rows_PS[:, ~used].any():
        rank, slot = np.argwhere((rows_PS > 0) & ~used)[0]
        raise ValueError(
            f"split sends {rows_PS[rank, slot]} rows of rank {rank} to slot {slot}, which is empty (-1)"
        )
    sent_PE = np.zeros_like(counts_PE)
    np.add.at(sent_PE.T, slot_to_expert_S[used], rows_PS[:, used].T)
    rank, expert = np.argwhere(sent_PE != counts_PE)[0]
    raise ValueError(
        f"split sends {sent_PE[rank, expert]} rows of rank {rank} to expert {expert}, which has "
        f"{counts_PE[rank, expert]} copies there"
    )
