"""The exact split against oracles that share no code with it, over random placements and real loads.

The peak: the maximum over all sets of ranks, by a transform over the 2^P sets, exact in integers; and HiGHS.
The rows off their rank: the criterion of negative cycles (no chain of moves saves a row); and HiGHS. The
rows off their node: HiGHS. Of the programs and the twins a part runs always, the rest under the mark slow.
"""

import dataclasses

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from balancer.spare import fill_spare_slots
from balancer.split import ExactSplit, balanced_peak
from balancer.trace import load_trace

INSTANCES, BLOCK = 10_000, 1_000
LP_ALWAYS, LP_ALL = 300, 3_000
TWINS_ALWAYS = 600


@dataclasses.dataclass(frozen=True)
class Instance:
    counts_PE: np.ndarray
    slot_to_expert_S: np.ndarray

    @property
    def num_ranks(self):
        return self.counts_PE.shape[0]

    @property
    def rank_S(self):
        num_slots = self.slot_to_expert_S.shape[0]
        return np.arange(num_slots) // (num_slots // self.num_ranks)

    @property
    def sites_EP(self):
        """[E, P] bool: experts that have a slot on a rank."""
        sites_EP = np.zeros((self.counts_PE.shape[1], self.num_ranks), dtype=bool)
        used_S = self.slot_to_expert_S >= 0
        sites_EP[self.slot_to_expert_S[used_S], self.rank_S[used_S]] = True
        return sites_EP


def draw(seed, max_experts=64, max_ranks=16):
    """Placement of 1 to P slots an expert or of random spare slots; loads flat to one-hot, with zeros."""
    rng = np.random.default_rng(seed)
    ranks, experts = int(rng.integers(1, max_ranks + 1)), int(rng.integers(1, max_experts + 1))
    kind = rng.choice(["replicas", "random", "one expert"])
    if kind == "replicas":
        replicas_E = np.minimum(rng.geometric(rng.choice([0.2, 0.5]), experts), ranks)
        spare = np.repeat(np.arange(experts), replicas_E - 1)
    else:
        spare = rng.integers(0, experts, rng.integers(0, 2 * ranks + 1))
    if kind == "one expert":
        spare[:] = rng.integers(experts)
    slots = np.concatenate([np.arange(experts), spare])
    slots = np.concatenate([slots, np.full(-slots.size % ranks + ranks * rng.integers(0, 2), -1)])
    rng.shuffle(slots)
    # sources alike, or each with experts of its own: then rows stay, and chains of moves matter
    alike = np.full(experts, rng.choice([0.02, 0.3, 1.0, 20.0]))
    share_PE = (
        np.tile(rng.dirichlet(alike), (ranks, 1)) if rng.random() < 0.4 else rng.dirichlet(alike, ranks)
    )
    if rng.random() < 0.1:
        share_PE[:] = np.eye(experts)[rng.integers(experts)]
    copies_P = rng.integers(0, rng.choice([2, 60, 5000]) + 1, ranks)
    counts_PE = rng.multinomial(copies_P, share_PE)
    counts_PE[:, rng.random(experts) < 0.1] = 0
    if rng.random() < 0.15:
        counts_PE = np.where(counts_PE > 0, rng.integers(1, 2**40, counts_PE.shape), 0)
    return Instance(counts_PE.astype(np.int64), slots.astype(np.int64))


# ---- oracles ----------------------------------------------------------------------------------------------


def peak_over_all_sets(case):
    """max over sets X of ceil(rows of the experts with all slots in X / |X|), a set as a bit mask."""
    load = np.zeros(2**case.num_ranks, dtype=np.int64)
    masks_E = case.sites_EP @ (1 << np.arange(case.num_ranks))
    np.add.at(load, masks_E, case.counts_PE.sum(axis=0))
    for rank in range(case.num_ranks):  # load of a set: own entry and those of its subsets
        pairs = load.reshape(-1, 2, 2**rank)
        pairs[:, 1] += pairs[:, 0]
    size = np.bitwise_count(np.arange(1, load.size))
    return int((-(-load[1:] // size)).max())


def a_chain_of_moves_saves_a_row(case, rows_PS, peak):
    """Whether a cycle of single-row moves has negative cost in rows off their rank: it has none iff they are
    fewest. Vertices: the ranks, and one more for the room below the peak."""
    ranks = case.num_ranks
    load_G = np.bincount(case.rank_S, weights=rows_PS.sum(axis=0), minlength=ranks)
    cost = np.full((ranks + 1, ranks + 1), np.inf)
    for expert, sites_P in enumerate(case.sites_EP):
        on_P = np.nonzero(sites_P)[0]
        if on_P.size > 1:
            rows_P = rows_PS[:, case.slot_to_expert_S == expert].sum(axis=0)
            taken_P = np.bincount(case.rank_S[case.slot_to_expert_S == expert], rows_P, ranks)[on_P]
            own_P = case.counts_PE[on_P, expert]
            leave = np.where(taken_P > own_P, -1.0, np.where(taken_P > 0, 0.0, np.inf))
            arrive = np.where(taken_P >= own_P, 1.0, 0.0)
            cells = np.ix_(on_P, on_P)
            cost[cells] = np.minimum(cost[cells], leave[:, None] + arrive[None])
    cost[:-1, -1] = np.where(load_G < peak, 0.0, np.inf)
    cost[-1, :-1] = 0.0
    np.fill_diagonal(cost, 0.0)
    for middle in range(ranks + 1):
        cost = np.minimum(cost, cost[:, middle, None] + cost[None, middle])
    return bool((np.diag(cost) < 0).any())


def optima_by_linear_program(case, ranks_per_node):
    """Peak, rows off their rank, rows off their node: three programs, each with the last one's value kept."""
    expert_I, rank_I = np.nonzero(case.sites_EP)
    source_F, site_F = (a.ravel() for a in np.indices((case.num_ranks, expert_I.size)))  # one flow each
    flows = source_F.size
    cell_F = source_F * case.counts_PE.shape[1] + expert_I[site_F]
    supply = coo_matrix((np.ones(flows), (cell_F, np.arange(flows))), shape=(case.counts_PE.size, flows + 1))
    into_rank = np.zeros((case.num_ranks, flows + 1))
    into_rank[rank_I[site_F], np.arange(flows)] = 1
    into_rank[:, -1] = -1  # the last variable is the peak
    off_rank = np.append(rank_I[site_F] != source_F, 0).astype(float)
    off_node = np.append(rank_I[site_F] // ranks_per_node != source_F // ranks_per_node, 0).astype(float)

    def solve(cost, peak, most_off_rank):
        bounds = [(0, None)] * flows + [(0, peak)]
        limits, b_ub = into_rank, np.zeros(case.num_ranks)
        if most_off_rank is not None:
            limits, b_ub = np.vstack([into_rank, off_rank]), np.append(b_ub, most_off_rank)
        found = linprog(cost, limits, b_ub, supply, case.counts_PE.ravel(), bounds, method="highs")
        assert found.status == 0, found.message
        return found.fun

    # counts here are below 1e5, so HiGHS is right to 1e-6 and the optima at integer bounds are integers
    peak = int(np.ceil(solve(np.append(np.zeros(flows), 1.0), None, None) - 1e-6))
    least_off_rank = round(solve(off_rank, peak, None))
    return peak, least_off_rank, round(solve(off_node, peak, least_off_rank))


# ---- tests ------------------------------------------------------------------------------------------------


def check(case, result):
    """Conservation, the figures as counted from the rows, the optimal peak and the fewest rows off rank."""
    rows_PS = result.rows_PS
    assert rows_PS.min(initial=0) >= 0
    one_hot_SE = case.slot_to_expert_S[:, None] == np.arange(case.counts_PE.shape[1])
    np.testing.assert_array_equal(rows_PS @ one_hot_SE.astype(np.int64), case.counts_PE)
    assert not rows_PS[:, case.slot_to_expert_S < 0].any()
    load_P = rows_PS.sum(axis=0).reshape(case.num_ranks, -1).sum(axis=1)
    np.testing.assert_array_equal(result.rank_load_P, load_P)
    assert result.peak == result.optimum_peak == load_P.max() == peak_over_all_sets(case)
    off_rank_PS = case.rank_S[None] != np.arange(case.num_ranks)[:, None]
    assert result.off_rank_rows == rows_PS[off_rank_PS].sum()
    assert not a_chain_of_moves_saves_a_row(case, rows_PS, result.peak)


def check_block(seeds):
    for seed in seeds:
        case = draw(seed)
        check(case, ExactSplit().solve(case.counts_PE, case.slot_to_expert_S))


@pytest.mark.parametrize("start", range(0, INSTANCES, BLOCK))
def test_random_instances_are_optimal_and_conserve_rows(start):
    check_block(range(start, start + BLOCK))


def draw_on_nodes(seed):
    """A small batch where most sources have their own experts, and a number of ranks a node."""
    rng = np.random.default_rng(seed)
    ranks = int(rng.choice([3, 4, 6, 8]))
    nodes = int(rng.choice([d for d in range(1, ranks + 1) if ranks % d == 0]))
    experts = int(rng.integers(1, 2 * ranks))
    slots = np.concatenate([np.arange(experts), rng.integers(0, experts, rng.integers(0, 3 * ranks))])
    slots = rng.permutation(np.concatenate([slots, np.full(-slots.size % ranks, -1)]))
    counts_PE = rng.integers(0, 50, (ranks, experts)) * (rng.random((ranks, experts)) < 0.3)
    return Instance(counts_PE, slots), nodes


def check_against_linear_program(seeds):
    for seed in seeds:
        case, nodes = draw_on_nodes(seed)
        result = ExactSplit(ranks_per_node=nodes).solve(case.counts_PE, case.slot_to_expert_S)
        found = (result.peak, result.off_rank_rows, result.off_node_rows)
        assert found == optima_by_linear_program(case, nodes), f"seed {seed}, {nodes} ranks a node"
        off_node_PS = case.rank_S[None] // nodes != np.arange(case.num_ranks)[:, None] // nodes
        assert result.off_node_rows == result.rows_PS[off_node_PS].sum()


def test_peak_and_rows_off_rank_and_node_equal_the_linear_programs():
    check_against_linear_program(range(LP_ALWAYS))


@pytest.mark.slow
def test_more_peaks_and_rows_off_rank_and_node_equal_the_linear_programs():
    check_against_linear_program(range(LP_ALWAYS, LP_ALL))


def check_twins(seeds):
    for seed in seeds:
        rng = np.random.default_rng(seed)
        case = draw(seed)
        ranks = case.num_ranks
        options = {
            "ranks_per_node": int(rng.choice([d for d in range(1, ranks + 1) if ranks % d == 0])),
            "min_rows": int(rng.choice([0, 0, 3, 50])),
            "locality": bool(rng.random() < 0.8),
        }
        if rng.random() < 0.3:
            options["speed_P"] = tuple(rng.uniform(0.5, 2.0, ranks).tolist())
        if rng.random() < 0.3:
            options["extra_load_P"] = tuple(rng.integers(0, 2000, ranks).tolist())
        fast, twin = (
            ExactSplit(compiled=compiled, **options).solve(case.counts_PE, case.slot_to_expert_S)
            for compiled in (True, False)
        )
        for field in dataclasses.fields(fast):
            np.testing.assert_array_equal(getattr(fast, field.name), getattr(twin, field.name), str(options))
        load_E = case.counts_PE.sum(axis=0)
        for one, other in zip(
            balanced_peak(load_E, case.slot_to_expert_S, ranks),
            balanced_peak(load_E, case.slot_to_expert_S, ranks, compiled=False),
        ):
            np.testing.assert_array_equal(one, other)


def test_the_twin_gives_equal_integers():
    check_twins(range(TWINS_ALWAYS))


@pytest.mark.slow
def test_the_twin_gives_equal_integers_everywhere():
    check_twins(range(TWINS_ALWAYS, INSTANCES))


def trace_cases(traces_dir, every):
    """Placements made for one snapshot of a real trace, and counts of the next, dealt to 8 ranks."""
    counts_WLE = load_trace(traces_dir / "smartmoe.npz").tokens_per_expert_WLE
    ranks, slots_per_rank = 8, 6
    rng = np.random.default_rng(0)
    homes_E = np.arange(32) // 4 * slots_per_rank + np.arange(32) % 4
    for sample in range(1, counts_WLE.shape[0], every):
        layer = sample % counts_WLE.shape[1]
        planned_E, load_E = counts_WLE[sample - 1, layer], counts_WLE[sample, layer]
        slots = fill_spare_slots(planned_E.astype(np.int64), homes_E, slots_per_rank, ranks)
        counts_EP = np.stack([rng.multinomial(load, np.full(ranks, 1 / ranks)) for load in load_E])
        yield Instance(np.ascontiguousarray(counts_EP.T), slots)


def test_counts_of_a_real_trace_are_split_exactly(traces_dir):
    cases = list(trace_cases(traces_dir, every=25))
    assert len(cases) == 20
    for case in cases:
        result = ExactSplit(ranks_per_node=4).solve(case.counts_PE, case.slot_to_expert_S)
        check(case, result)
        twin = ExactSplit(ranks_per_node=4, compiled=False)(case.counts_PE, case.slot_to_expert_S)
        np.testing.assert_array_equal(result.rows_PS, twin)
    # 262,144 copies: HiGHS is right to 1e-6 of them, so to less than a row
    assert optima_by_linear_program(case, 4) == (result.peak, result.off_rank_rows, result.off_node_rows)


@pytest.mark.slow
def test_all_counts_of_a_real_trace_are_split_exactly(traces_dir):
    for case in trace_cases(traces_dir, every=1):
        check(case, ExactSplit().solve(case.counts_PE, case.slot_to_expert_S))


# ---- the oracles can tell ----------------------------------------------------------------------------


def test_the_oracle_of_moves_sees_rows_that_left_without_need():
    case = Instance(np.array([[4, 0], [4, 0]]), np.array([0, 1, 0, -1]))
    local = np.array([[4, 0, 0, 0], [0, 0, 4, 0]])
    assert not a_chain_of_moves_saves_a_row(case, local, 4)
    assert a_chain_of_moves_saves_a_row(case, local[[1, 0]], 4) is False  # loads alike: same flow per site
    shifted = Instance(np.array([[8, 0], [0, 0]]), case.slot_to_expert_S)
    assert a_chain_of_moves_saves_a_row(shifted, np.array([[4, 0, 4, 0], [0, 0, 0, 0]]), 8)
    assert not a_chain_of_moves_saves_a_row(shifted, np.array([[4, 0, 4, 0], [0, 0, 0, 0]]), 4)


def test_the_oracle_of_sets_takes_the_worst_set():
    case = Instance(np.array([[9, 1, 2], [0, 0, 0], [0, 0, 0]]), np.array([0, -1, 0, -1, 1, 2]))
    assert peak_over_all_sets(case) == 5
