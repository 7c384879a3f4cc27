"""MoELayer: the forward of an expert-parallel layer in a few lines. The file to read first in this package.

    x_TD -> router -> Routing -> counts [P, E] -> split -> dispatch -> experts -> combine -> y_TD

The split, the groups, the meter and the timer come in from outside; no engine is needed.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import numpy as np
import torch
from torch import nn

from moe.agreement import check_split, compare_placements, gather_counts
from moe.config import MoEConfig
from moe.dedup import combine_unique, dispatch_unique
from moe.dedup_rule import Link, measure_link, pays_in_batch
from moe.dispatch import combine, dispatch, dispatch_weights
from moe.exchange import DistExchange, SoloExchange
from moe.experts import Experts, SwiGLU, init_experts
from moe.groups import Groups
from moe.meter import LoadMeter
from moe.naming import forward_phase, in_backward, tag
from moe.placement import Placement, Split, even_split, make_placement
from moe.recompute import Route, as_leaf, current_memory, kept
from moe.replicate import Replicas
from moe.timing import no_timer
from moe.topology import Topology
from routing import Router, Routing, losses


class MoELayer(nn.Module):
    """A mixture-of-experts feed-forward whose experts are spread over the ranks of an EP group.

    config:   shapes and router settings;  topology: the rank grid;
    groups:   this rank's process groups; None where the EP group is one rank, or the whole job;
    slot_to_expert_S: [S] int64, which slot holds which expert; slots contiguous by rank, as many on every
              rank, -1 = empty; None: one slot an expert, in the order of the experts;
    home_slot_E: [E] int64, the slot that owns each expert, others of it are replicas; see `make_placement`;
    split:    (counts_PE, slot_to_expert_S) -> rows_PS, the share of every slot in this batch. Every rank
              calls it for itself: it must give the same integers for the same arguments on all of them;
    meter:    LoadMeter that the layer reports to;  timer: part of the forward -> context manager;
    layer_id: what errors, the ledger and the watch call it; None = its number with the meter, else 0.

    >>> _ = torch.manual_seed(0)
    >>> layer = MoELayer(MoEConfig(), Topology())
    >>> y, aux_loss = layer(torch.randn(2, 5, 128))
    >>> y.shape, bool(aux_loss > 0)
    (torch.Size([2, 5, 128]), True)
    """

    previous_counts_E: torch.Tensor
    running_counts_E: torch.Tensor

    def __init__(
        self,
        config: MoEConfig,
        topology: Topology,
        *,
        groups: Groups | None = None,
        slot_to_expert_S: np.ndarray | None = None,
        home_slot_E: np.ndarray | None = None,
        split: Split = even_split,
        meter: LoadMeter | None = None,
        timer: Callable[[str], AbstractContextManager[None]] = no_timer,
        layer_id: int | None = None,
    ) -> None:
        nn.Module.__init__(self)  # by name: an engine's class may stand between in a subclass
        router = config.router
        self.config, self.topology = config, topology
        self.groups = groups if groups is not None else _default_groups(topology)
        self.split, self.meter, self.timer = split, meter, timer
        self.placement = make_placement(slot_to_expert_S, router.num_experts, topology.ep_size, home_slot_E)
        self.home_experts = self.slot_to_expert_S[self.placement.home_slots(topology.ep_rank)]
        self._prefetched: Replicas | None = None
        self._fetched_versions: list[int] = []
        self._link: Link | None = None  # measured where "auto" wants to know it
        self._inside_step = False  # a forward since the last optimizer step has used the placement
        self.balance_loss = router.balance_loss
        self.router = Router(router)
        self.experts = Experts(
            self.home_experts.shape[0], router.d_model, config.expert_hidden, config.activation, config.method
        )
        init_experts(self.experts, self.home_experts)  # by their numbers in the whole layer
        self.shared_expert = SwiGLU(router.d_model, config.shared_hidden) if config.shared_hidden else None
        # int64 buffers: no cast of the model touches them. The last step's counts make up scope "previous".
        zeros_E = torch.zeros(router.num_experts, dtype=torch.int64)
        self.register_buffer("previous_counts_E", zeros_E)
        self.register_buffer("running_counts_E", zeros_E.clone(), persistent=False)
        self.meter_row = meter.register(self, router.num_experts) if meter is not None else 0
        self.layer_id = self.meter_row if layer_id is None else layer_id
        self.router.stream = (self.layer_id, topology.rank)  # a forced selection draws for itself in each

    @property
    def slot_to_expert_S(self) -> np.ndarray:
        """[S] int64, the expert of every slot of the EP group, -1 = empty."""
        return self.placement.slot_to_expert_S

    def place(self, slot_to_expert_S: np.ndarray, version: int | None = None) -> Placement:
        """Change the replicas from the next forward on; on every rank alike, between optimizer steps.

        slot_to_expert_S: [S], another S too; homes stay on their ranks, in their order;  version: the plan's
        number; None = one more. Nothing travels now: weights are fetched forward by forward. It is no part of
        the state dict: place again after loading. Returns the placement. Raises ValueError for slots without
        a home, RuntimeError after a training forward of an optimizer step that `end_step` has not ended; the
        old placement then stays.
        """
        placement = self.placement.with_replicas(slot_to_expert_S, version)
        if self._inside_step:
            raise RuntimeError(
                f"MoE layer {self.layer_id} has run forward since the last optimizer step under placement "
                f"version {self.placement.version}: call place() after optimizer.step() and end_step() (a "
                "LoadMeter's sample() calls that), before the next forward"
            )
        self._drop_prefetched()
        self.placement = placement
        return placement

    def set_balance_loss(self, value: float) -> None:
        """Change the coefficient of the balance loss, attribute `balance_loss`, from the next forward on.

        value: 0 or more; config.router.balance_loss at first. On every rank alike, between optimizer steps:
        the step's gradient is linear in it. It is no part of the state dict: set it again after loading.
        Raises ValueError for a negative, infinite or NaN value; the old one then stays.
        """
        if not 0 <= value < math.inf:
            raise ValueError(
                f"MoE layer {self.layer_id}: balance_loss={value} must be 0 or more, and finite; 0 = no loss"
            )
        self.balance_loss = float(value)

    def prefetch(self) -> None:
        """Send the replicas' weights on their way, all of them, ahead of the next forward. Collective.

        Worth its while where work stands between, a block's attention say. Without it a forward fetches those
        replicas only that get rows. Nothing to do where it was called before. Call it under the same autocast
        as the forward; weights that are changed between the two are fetched again. Raises
        PlacementMismatchError on every rank where ranks differ.
        """
        if self._prefetched is not None:
            return
        with forward_phase(), tag(f"layer {self.layer_id} placement"):
            if not self._inside_step:  # else compared already, and held since
                device = self.experts.w1.device
                compare_placements(self.placement, self.groups, self.topology, self.layer_id, device)
            if self.placement.replica_slots.size:
                self._prefetched = self._replicas(self.placement)
                self.experts.fetch(self._prefetched)
                self._fetched_versions = self._versions()

    def _replicas(self, placement: Placement) -> Replicas:
        return Replicas(placement, self.groups.ep, f"layer {self.layer_id} replicas")

    def _versions(self) -> list[int]:
        """How often the home weights were written, as torch counts it."""
        return [parameter._version for parameter in self.experts.parameters()]

    def _drop_prefetched(self) -> None:
        if self._prefetched is not None:  # what is under way must arrive
            self._prefetched.wait()
            self._prefetched = None

    def forward(
        self, x: torch.Tensor, token_mask_T: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Route, dispatch, compute, combine.

        x: [..., D], T = product of the leading sizes; [B, S, D] where the balance loss is per sequence;
        token_mask_T: [T] bool, False = padding, which is sent nowhere, counted nowhere, and gives zeros.
        Returns y [..., D] like x, and the weighted auxiliary loss: a scalar *sum* over this rank's valid
        tokens (divide by the valid tokens of the global batch, as the model's own loss). Raises
        NonFiniteRouterError on every rank where any rank's logits are not finite.
        """
        x_TD = x.reshape(-1, x.shape[-1])
        self.router.check(x_TD, token_mask_T)
        if token_mask_T is not None:  # padding may hold NaN, which 0 * NaN would carry into gradients
            x_TD = torch.where(token_mask_T[:, None], x_TD, 0.0)
        with forward_phase():
            routing, route = self._route(x_TD, token_mask_T)
            self._split(route)
            aside: list[torch.Tensor] = []
            y_TD = self._experts(
                x_TD, routing, route, lambda: aside.extend(self._aside(x, x_TD, routing, route))
            )
        aux_loss, *shared_TD = aside
        return (y_TD + shared_TD[0] if shared_TD else y_TD).view_as(x), aux_loss

    def _route(self, x_TD: torch.Tensor, token_mask_T: torch.Tensor | None) -> tuple[Routing, Route]:
        """Routing and counts of all ranks; those of the first forward where a checkpoint runs it again."""
        memory = current_memory()
        route = memory.replay() if memory is not None and memory.replaying else None
        if route is not None and route.routing is not None:
            return route.routing, route
        with self._part("route"), kept(memory):
            routing = self.router.route(x_TD, token_mask_T, None if route is None else route.expert_TK)
        if route is not None:
            return routing, route
        with self._part("counts"):
            counts_PE, counts_E = self.gather_counts(routing)
        expert_TK = routing.expert_N.view(routing.num_tokens, self.config.router.top_k)
        route = Route(expert_TK=expert_TK, counts_PE=counts_PE, counts_E=counts_E, placement=self.placement)
        if memory is not None:
            memory.record(route, routing)
        return routing, route

    def _split(self, route: Route) -> None:
        """Settle the rows of every source rank for every slot, [P, S]; a second forward keeps the first's."""
        if route.rows_PS is None:
            slots = route.placement.slot_to_expert_S
            with self._part("split"):
                rows_PS = self.split(route.counts_PE, slots)
                route.rows_S = check_split(rows_PS, route.counts_PE, slots)
                route.rows_PS = rows_PS
        with_gradients = torch.is_grad_enabled() or current_memory() is not None
        self._inside_step |= self.training and with_gradients

    def _aside(
        self, x: torch.Tensor, x_TD: torch.Tensor, routing: Routing, route: Route
    ) -> list[torch.Tensor]:
        """What needs no rows of other ranks, done while they travel: auxiliary loss, shared expert."""
        memory, aux_loss = current_memory(), route.aux_loss
        if aux_loss is None:
            assert route.rows_S is not None, "the split has counted them"
            rows_P = route.rows_S.reshape(self.topology.ep_size, -1).sum(axis=1)
            sequences = x.shape[0] if x.ndim == 3 else 1
            with kept(memory):
                aux_loss = self.auxiliary_loss(routing, route, rows_P=rows_P, num_sequences=sequences)
            if memory is not None and memory.keep_rows:
                route.aux_loss = as_leaf(aux_loss)
        if self.shared_expert is None:
            return [aux_loss]
        with tag(f"layer {self.layer_id} shared"):
            return [aux_loss, self.shared_expert(x_TD)]

    def _experts(
        self, x_TD: torch.Tensor, routing: Routing, route: Route, meanwhile: Callable[[], None]
    ) -> torch.Tensor:
        """Dispatch, experts, combine; without the last where a checkpoint has kept what it gave."""
        before = self.config.weight_position == "before"
        with self._part("dispatch"):
            rows_RD, rows_Ps, weight_R, combined = self._dispatch(x_TD, routing, route, meanwhile)
        replicas = self._take_replicas(route)
        if replicas is None:
            rows_Ps = rows_Ps[:, route.placement.home_columns(self.topology.ep_rank)]
        with self._part("experts"):
            rows_RD = self.experts(rows_RD, rows_Ps, weight_R, route.y_TD is None, replicas)
        if route.y_TD is not None:
            return route.y_TD
        memory = current_memory()
        with self._part("combine"), kept(memory):
            y_TD = combined(rows_RD, weighted=not before)
        if memory is not None and memory.keep_rows:
            route.y_TD = as_leaf(y_TD)
        return y_TD

    def _dispatch(
        self, x_TD: torch.Tensor, routing: Routing, route: Route, meanwhile: Callable[[], None]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, Callable[..., torch.Tensor]]:
        """Rows [R, D], their numbers by (source, slot), their router weights [R] where the experts want them,
        and the way back."""
        slots, exchange, rows_PS = route.placement.slot_to_expert_S, self.groups.ep, route.rows_PS
        assert rows_PS is not None, "the batch has been split"
        before = self.config.weight_position == "before"
        if self._deduplicates(x_TD, routing, rows_PS):
            rows_RD, unique = dispatch_unique(x_TD, routing, rows_PS, slots, exchange, meanwhile)
            weight_R = unique.weight_R if before else None
            return rows_RD, unique.rows_Ps, weight_R, partial(combine_unique, handle=unique)
        rows_RD, handle = dispatch(x_TD, routing, rows_PS, slots, exchange, meanwhile, by_slot=False)
        weight_R = dispatch_weights(handle) if before else None
        return rows_RD, handle.rows_by_source_Ps, weight_R, partial(combine, handle=handle)

    def _deduplicates(self, x_TD: torch.Tensor, routing: Routing, rows_PS: np.ndarray) -> bool:
        """Whether a token's row travels once to each rank; the same answer on every rank."""
        if self.config.dedup != "auto" or self.groups.ep.size == 1:
            return self.config.dedup == "on"
        if self._link is None:
            self._link = measure_link(self.groups.ep, device=x_TD.device)
        sizes = {"width": x_TD.shape[1], "element_bytes": x_TD.element_size()}
        sizes["weight_bytes"] = routing.weight_N.element_size()
        return pays_in_batch(rows_PS, self.config.router.top_k, link=self._link, **sizes)

    def _take_replicas(self, route: Route) -> Replicas | None:
        """The replicas of this forward; None where the placement has none."""
        if not route.placement.replica_slots.size:
            return None
        replicas = self._prefetched
        if replicas is not None and (
            replicas.placement is not route.placement or self._fetched_versions != self._versions()
        ):
            self._drop_prefetched()
        replicas, self._prefetched = self._prefetched, None
        if replicas is None:
            replicas = self._replicas(route.placement)
        else:  # a second forward is to fetch the same ones
            route.fetched_ahead = True
        assert route.rows_S is not None, "the split has counted them"
        replicas.use(route.rows_S, fetch_all=route.fetched_ahead)
        return replicas

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        """A part of the forward: timed, and its collectives tagged, "layer 3 dispatch"."""
        with tag(f"layer {self.layer_id} {name}"), self.timer(name):
            yield

    def gather_counts(self, routing: Routing) -> tuple[np.ndarray, torch.Tensor]:
        """The counts of every rank of the EP group, and their sum; see moe/agreement.py."""
        return gather_counts(routing, self.placement, self.groups, self.topology, self.layer_id)

    def auxiliary_loss(
        self, routing: Routing, route: Route, *, rows_P: np.ndarray, num_sequences: int
    ) -> torch.Tensor:
        """Balance loss in the configured scope and z-loss, weighted and summed; reports both to the meter.

        The first with `balance_loss` as it is now, the second with config.router.z_loss.
        """
        router = self.config.router
        counting = self.training and not in_backward()  # in a backward: recomputation
        mask_T = routing.token_mask_T
        if router.score == "softmax":  # scores that sum to 1: they are the probabilities
            probs_TE = routing.scores_TE
        else:
            probs_TE = losses.router_probs(routing.logits_TE, router.score)
        if router.balance_scope == "sequence":
            expert_TK = routing.expert_N.view(routing.num_tokens, router.top_k)
            balance = losses.sequence_balance_loss(probs_TE, expert_TK, num_sequences, mask_T)
        else:
            if route.scope_counts_E is None:
                route.scope_counts_E = self._counts_in_scope(routing, route.counts_E, counting)
            counts_E = route.scope_counts_E
            balance = losses.balance_loss(probs_TE, losses.load_fraction(counts_E, probs_TE.dtype), mask_T)
        z_sum = losses.z_loss(routing.logits_TE, mask_T)
        if counting and self.meter is not None:
            self.meter.record(
                self.meter_row,
                routing,
                rows=rows_P,
                bias_E=self.router.bias.bias_E,
                balance_sum=balance,
                z_sum=z_sum,
            )
        return self.balance_loss * balance + router.z_loss * z_sum

    def end_step(self, tokens_per_expert_E: torch.Tensor | None = None) -> None:
        """An optimizer step has just ended; its global counts [E] int64, where somebody has them.

        Weights that were prefetched before it are out of date, and dropped.
        """
        if tokens_per_expert_E is not None:
            self.previous_counts_E.copy_(tokens_per_expert_E)
        self.running_counts_E.zero_()
        self._inside_step = False
        self._drop_prefetched()

    def _counts_in_scope(
        self, routing: Routing, global_counts_E: torch.Tensor, counting: bool
    ) -> torch.Tensor:
        """Counts [E] whose shares enter the balance loss, by the scope's name."""
        scope = self.config.router.balance_scope
        if scope == "local":
            return routing.demand_E
        if scope == "previous":
            return self.previous_counts_E
        if scope == "global":
            return global_counts_E
        if self.training and not counting:  # recomputation: the forward has added this micro-batch already
            return self.running_counts_E
        running_E = self.running_counts_E + global_counts_E
        if counting:
            self.running_counts_E.copy_(running_E)
        return running_E


def _default_groups(topology: Topology) -> Groups:
    if topology.ep_size == 1:
        if topology.edp_size > 1:
            return Groups(ep=SoloExchange(), edp=DistExchange(None))
        return Groups(ep=SoloExchange(), edp=SoloExchange())
    if topology.ep_size == topology.world_size:
        return Groups(ep=DistExchange(None), edp=SoloExchange())
    raise ValueError(
        f"ep_size={topology.ep_size} is a part of world_size={topology.world_size}: the layer needs process "
        "groups; pass groups=moe.make_groups(topology)"
    )
