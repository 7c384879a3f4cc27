"""When deduplicated dispatch pays: the bytes that it moves, and a rule over a measured link.

    plain:         4 x copies * D * b                     rows out and back, forward and backward
    deduplicated:  4 x pairs * D * b  +  3 w * copies     position and weight out, the weight's gradient back
                   + two more collectives                 metadata, weight gradients

copies and pairs count what leaves the rank; b bytes an element, w bytes a weight (4 in float32).
"""

import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from moe.exchange import Exchange
from moe.naming import tag
from moe.traffic import Volume

EXTRA_CALLS = 2
# what the pair tables and the second sum take on a core, seconds a copy
LOCAL_S = 1e-7


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """What an all-to-all costs between the ranks of a group.

    latency_s: seconds of a call that moves next to nothing;  bytes_per_s: bytes that one rank sends to others
    in a second, all ranks sending at once (infinite where nothing ever leaves: a group of one rank).
    """

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not (self.latency_s >= 0 and self.bytes_per_s > 0):
            raise ValueError(
                f"latency_s={self.latency_s} and bytes_per_s={self.bytes_per_s} make no link; a latency is 0 "
                "or more, a bandwidth more than 0"
            )

    @property
    def call_bytes(self) -> float:
        """Bytes that travel in the time that a call costs by itself: latency * bandwidth."""
        return self.latency_s * self.bytes_per_s if self.latency_s else 0.0


# ---- bytes ------------------------------------------------------------------------------------------------


def expected_pairs(top_k: int, experts: int, ranks: int) -> float:
    """Rows a token under uniform routing: P (1 - C(E - E/P, k) / C(E, k)), of which (P-1)/P leave the rank.

    Each rank holds E/P of the E experts, and a token selects k different ones.
    Raises ValueError for sizes that do not fit each other.

    >>> [round(expected_pairs(8, 256, ranks), 3) for ranks in (1, 4, 8, 16)]
    [1.0, 3.614, 5.295, 6.523]
    """
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k={top_k} is out of 1..{experts}, the number of experts")
    if ranks < 1 or experts % ranks:
        raise ValueError(f"{experts} experts do not spread evenly over {ranks} ranks")
    return ranks * (1 - math.comb(experts - experts // ranks, top_k) / math.comb(experts, top_k))


def saved_frac(top_k: int, experts: int, ranks: int) -> float:
    """The share of the rows that need not travel under uniform routing: 1 - expected_pairs / k.

    >>> [round(saved_frac(8, 256, ranks), 2) for ranks in (4, 8, 16)]
    [0.55, 0.34, 0.18]
    """
    return 1 - expected_pairs(top_k, experts, ranks) / top_k


def plain_bytes(rows_PS: np.ndarray, rank: int, width: int, element_bytes: int) -> Mapping[str, Volume]:
    """Bytes of one rank in dispatch and combine; see `unique_bytes`."""
    copies_PP = _copies(rows_PS, rank, width, element_bytes)
    return {
        "forward dispatch": _volume(copies_PP, rank, width * element_bytes),
        "forward combine": _volume(copies_PP.T, rank, width * element_bytes),
        "backward combine": _volume(copies_PP, rank, width * element_bytes),
        "backward dispatch": _volume(copies_PP.T, rank, width * element_bytes),
    }


def unique_bytes(
    rows_PS: np.ndarray,
    sent_pairs_P: np.ndarray,
    received_pairs_P: np.ndarray,
    rank: int,
    width: int,
    element_bytes: int,
    weight_bytes: int = 4,
) -> Mapping[str, Volume]:
    """Bytes of one rank in dispatch_unique and combine_unique, by phase and collective, in their order.

    rows_PS: [P, S] int64, rows from every rank to every slot;  sent_pairs_P, received_pairs_P: [P] int64,
    pairs to and from each rank, as in UniqueHandle;  width: D;  element_bytes: of the rows;  weight_bytes: of
    a router weight.
    Raises ValueError where the arrays do not fit each other, and for sizes below 1.

    >>> volume = unique_bytes(np.array([[3, 2], [0, 2]]), np.array([3, 1]), np.array([3, 0]), 0, 16, 2)
    >>> volume["forward dispatch"], volume["forward metadata"].sent_bytes
    (Volume(sent_bytes=32, received_bytes=0), 16)
    """
    copies_PP = _copies(rows_PS, rank, width, element_bytes)
    for pairs_P, copies_P in ((sent_pairs_P, copies_PP[rank]), (received_pairs_P, copies_PP[:, rank])):
        if pairs_P.shape != copies_P.shape or (pairs_P > copies_P).any() or (pairs_P < 0).any():
            raise ValueError(
                f"pairs {pairs_P.tolist()} do not fit the copies {copies_P.tolist()} of rank {rank}: give as "
                "many ranks, and from 0 to as many pairs as copies"
            )
    if weight_bytes < 1:
        raise ValueError(f"weight_bytes={weight_bytes} is not 1 or more; 4 in float32, 8 in float64")
    there, back = (_others(p, rank) * width * element_bytes for p in (sent_pairs_P, received_pairs_P))
    out = Volume(sent_bytes=there, received_bytes=back)
    home = Volume(sent_bytes=back, received_bytes=there)
    return {
        "forward metadata": _volume(copies_PP, rank, 2 * weight_bytes),
        "forward dispatch": out,
        "forward combine": home,
        "backward combine": out,
        "backward dispatch": home,
        "backward metadata": _volume(copies_PP.T, rank, weight_bytes),
    }


def _copies(rows_PS: np.ndarray, rank: int, width: int, element_bytes: int) -> np.ndarray:
    """Copies from rank to rank, [P, P], once the arguments are checked."""
    num_ranks = rows_PS.shape[0]
    if rows_PS.ndim != 2 or not num_ranks or rows_PS.shape[1] % num_ranks or (rows_PS < 0).any():
        raise ValueError(
            f"rows_PS has shape {rows_PS.shape} and minimum {rows_PS.min(initial=0)}; expected [P, S] with S "
            "a multiple of P, 0 or more"
        )
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank={rank} is out of 0..{num_ranks - 1}")
    if width < 1 or element_bytes < 1:
        raise ValueError(f"width={width} and element_bytes={element_bytes} must be 1 or more")
    return rows_PS.reshape(num_ranks, num_ranks, -1).sum(axis=2)


def _volume(rows_PP: np.ndarray, rank: int, row_bytes: int) -> Volume:
    return Volume(
        sent_bytes=_others(rows_PP[rank], rank) * row_bytes,
        received_bytes=_others(rows_PP[:, rank], rank) * row_bytes,
    )


def _others(rows_P: np.ndarray, rank: int) -> int:
    """The rows to or from other ranks."""
    return int(rows_P.sum() - rows_P[rank])


# ---- the rule ---------------------------------------------------------------------------------------------


def pays(
    copies: float,
    pairs: float,
    *,
    width: int,
    element_bytes: int,
    link: Link,
    weight_bytes: int = 4,
    local_s: float = 0.0,
) -> bool:
    """Whether deduplicated dispatch takes less time than the plain one, in a forward and backward of a layer.

    copies, pairs: rows that leave the rank in a forward, without and with deduplication, of the rank that
    sends most, or expected ones: tokens * top_k * (P-1)/P and tokens * expected_pairs * (P-1)/P;
    link: from `measure_link`;  local_s: seconds by which a rank's own passes over rows and tables take
    longer: about 0.1 microseconds a copy on a core, or left at 0.
    Raises ValueError where there are more pairs than copies, and for sizes below 1.

    >>> nvlink, ethernet = Link(latency_s=2e-5, bytes_per_s=4e11), Link(latency_s=5e-5, bytes_per_s=3e9)
    >>> [pays(6144, 2770, width=256, element_bytes=2, link=link) for link in (nvlink, ethernet)]
    [False, True]
    """
    if not 0 <= pairs <= copies:
        raise ValueError(f"pairs={pairs} is out of 0..copies={copies}")
    if min(width, element_bytes, weight_bytes) < 1 or local_s < 0:
        raise ValueError(
            f"width={width}, element_bytes={element_bytes} and weight_bytes={weight_bytes} must be 1 or "
            f"more, local_s={local_s} 0 or more"
        )
    saved_bytes = 4 * (copies - pairs) * width * element_bytes
    extra_bytes = 3 * weight_bytes * copies + EXTRA_CALLS * link.call_bytes
    if local_s:
        extra_bytes += local_s * link.bytes_per_s
    return saved_bytes > extra_bytes


def pays_in_batch(
    rows_PS: np.ndarray, top_k: int, *, width: int, element_bytes: int, weight_bytes: int, link: Link
) -> bool:
    """`pays` for one batch, from its split alone: the same answer on every rank, before any pair is counted.

    rows_PS: [P, S] int64;  top_k: K. A token of rank p has one of its K copies on rank q with the share of q
    in the copies of p, so K draws give T_p (1 - (1 - share)^K) expected pairs (with replacement: somewhat
    fewer than there are). The rank that would send most speaks for all.
    """
    num_ranks = rows_PS.shape[0]
    copies_PP = rows_PS.reshape(num_ranks, num_ranks, -1).sum(axis=2).astype(np.float64)
    total_P1 = np.maximum(copies_PP.sum(axis=1, keepdims=True), 1.0)
    pairs_PP = total_P1 / top_k * (1 - (1 - copies_PP / total_P1) ** top_k)
    away = ~np.eye(num_ranks, dtype=bool)
    copies_P, pairs_P = (np.where(away, matrix, 0.0).sum(axis=1) for matrix in (copies_PP, pairs_PP))
    rank = int(copies_P.argmax())
    pairs = min(float(pairs_P[rank]), float(copies_P[rank]))
    local_s = LOCAL_S * float(copies_PP[rank].sum())
    sizes = {"width": width, "element_bytes": element_bytes, "weight_bytes": weight_bytes}
    return pays(float(copies_P[rank]), pairs, link=link, local_s=local_s, **sizes)


def measure_link(
    exchange: Exchange, *, num_bytes: int = 2**20, calls: int = 15, device: torch.device | None = None
) -> Link:
    """Time a handful of all-to-alls on the group itself. A collective; every rank gets the same Link.

    The latency is the median small call, for what a call usually waits is what it costs; the bandwidth is by
    how much the quickest large call takes longer than the quickest small one, for that is not about waiting.
    Both of the slowest rank.
    num_bytes: bytes that a rank sends to every other rank in the large ones, 64 or more;  calls: of each
    size;  device: of the buffers, None = cpu.
    """
    if num_bytes < 64 or calls < 1:
        raise ValueError(f"num_bytes={num_bytes} must be 64 or more, calls={calls} 1 or more")
    if exchange.size == 1:
        return Link(latency_s=0.0, bytes_per_s=math.inf)
    device = device if device is not None else torch.device("cpu")
    with tag("measure link"):
        small_s, large_s = (_seconds(exchange, size, calls, device) for size in (1, num_bytes))
        figures = [statistics.median(small_s), min(small_s), min(large_s)]
        all_P3 = exchange.all_gather(torch.tensor(figures, dtype=torch.float64, device=device))
    latency_s, quick_s, large_s = all_P3.amax(dim=0).tolist()
    moving_s = max(large_s - quick_s, 1e-3 * large_s)  # noise may turn them round on a link too fast to tell
    return Link(latency_s=latency_s, bytes_per_s=(exchange.size - 1) * num_bytes / moving_s)


def _seconds(exchange: Exchange, num_bytes: int, calls: int, device: torch.device) -> list[float]:
    """Seconds of all-to-alls of equal blocks, after one to warm up."""
    rows = torch.zeros((exchange.size, num_bytes), dtype=torch.uint8, device=device)
    splits, taken = [1] * exchange.size, []
    for _ in range(calls + 1):
        begun = time.perf_counter()
        exchange.send_rows(rows, splits, splits)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - begun)
    return taken[1:]
