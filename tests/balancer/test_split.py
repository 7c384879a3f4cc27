"""The exact split's options, properties, errors and plumbing. Its optimality: test_split_oracle.py."""

import doctest
import itertools
import math
import subprocess
import sys
import threading

import numpy as np
import pytest

from balancer import split
from balancer.split import ExactSplit, balanced_peak, exact_split, exact_split_numpy, split_rows

SEEDS = range(40)


def draw(seed, ranks=None, spare=None):
    """A small batch: counts_PE, slot_to_expert_S with every expert in a slot at least."""
    rng = np.random.default_rng(seed)
    ranks = ranks or int(rng.integers(2, 7))
    experts = int(rng.integers(1, 13))
    extra = rng.integers(0, 2 * ranks) if spare is None else spare
    slots = np.concatenate([np.arange(experts), rng.integers(0, experts, extra)])
    slots = rng.permutation(np.concatenate([slots, np.full(-slots.size % ranks, -1)]))
    counts_PE = rng.multinomial(rng.integers(0, 400), rng.dirichlet(np.full(experts, 0.4)), size=ranks)
    return counts_PE, slots


def rank_of_slots(slots, ranks):
    return np.arange(slots.size) // (slots.size // ranks)


def assert_conserved(counts_PE, slots, rows_PS):
    assert rows_PS.dtype == np.int64
    assert rows_PS.min(initial=0) >= 0
    assert not rows_PS[:, slots < 0].any()
    for expert in range(counts_PE.shape[1]):
        np.testing.assert_array_equal(rows_PS[:, slots == expert].sum(axis=1), counts_PE[:, expert])


def test_examples_in_docstrings_print_what_they_say():
    result = doctest.testmod(split)
    assert result.attempted > 3
    assert result.failed == 0


# ---- properties -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_permuting_the_ranks_keeps_the_figures(seed):
    counts_PE, slots = draw(seed)
    ranks = counts_PE.shape[0]
    order = np.random.default_rng(seed).permutation(ranks)
    one = ExactSplit().solve(counts_PE, slots)
    other = ExactSplit().solve(counts_PE[order], slots.reshape(ranks, -1)[order].ravel())
    assert (one.peak, one.off_rank_rows) == (other.peak, other.off_rank_rows)


def test_permuting_the_ranks_permutes_loads_that_have_no_choice():
    counts_PE, slots = np.array([[9, 0, 1], [0, 4, 0], [3, 0, 2]]), np.array([0, 1, 2])
    load_P = ExactSplit().solve(counts_PE, slots).rank_load_P
    for order in itertools.permutations(range(3)):
        shuffled = ExactSplit().solve(counts_PE[list(order)], slots[list(order)]).rank_load_P
        np.testing.assert_array_equal(shuffled, load_P[list(order)])


@pytest.mark.parametrize("seed", SEEDS)
def test_one_more_replica_never_raises_the_peak(seed):
    counts_PE, slots = draw(seed)
    ranks = counts_PE.shape[0]
    wider = np.full((ranks, slots.size // ranks + 1), -1)
    wider[:, :-1] = slots.reshape(ranks, -1)
    peak = ExactSplit().solve(counts_PE, wider.ravel()).peak
    assert peak == ExactSplit().solve(counts_PE, slots).peak
    for expert, rank in itertools.product(range(counts_PE.shape[1]), range(ranks)):
        more = wider.copy()
        more[rank, -1] = expert
        assert ExactSplit().solve(counts_PE, more.ravel()).peak <= peak


def test_no_copies_give_no_rows():
    result = ExactSplit(ranks_per_node=1).solve(np.zeros((2, 3), int), np.array([0, 1, 2, 0, -1, 1]))
    assert not result.rows_PS.any()
    assert (result.peak, result.off_rank_rows, result.off_node_rows) == (0, 0, 0)


def test_one_rank_keeps_everything():
    rows_PS = exact_split(np.array([[3, 0, 4]]), np.array([2, 0, -1, 1, 2]))
    assert rows_PS.tolist() == [[4, 3, 0, 0, 0]]


def test_an_expert_without_copies_needs_no_slot():
    assert exact_split(np.array([[3, 0], [1, 0]]), np.array([0, -1])).tolist() == [[3, 0], [1, 0]]


def test_several_slots_on_one_rank_share_as_one_and_the_home_takes_the_rows():
    counts_PE, slots = np.array([[6], [4]]), np.array([0, 0, 0, -1])
    assert exact_split(counts_PE, slots).tolist() == [[5, 0, 1, 0], [0, 0, 4, 0]]
    assert ExactSplit(home_slot_E=(1,))(counts_PE, slots).tolist() == [[0, 5, 1, 0], [0, 0, 4, 0]]


def test_own_rank_comes_first_then_own_node_then_sources_in_order():
    """One expert on ranks 1 and 2 of nodes (0, 1) (2, 3): 5 rows each; rank 0's stay in its node."""
    counts_PE = np.array([[3], [2], [1], [4]])
    rows_PS = ExactSplit(ranks_per_node=2)(counts_PE, np.array([-1, 0, 0, -1]))
    assert rows_PS[:, 1:3].tolist() == [[3, 0], [2, 0], [0, 1], [0, 4]]


def test_rows_that_must_leave_their_rank_stay_in_their_node():
    """Rank 2 has 4 rows too many; ranks 0 and 3 have room for 4 each, and rank 3 is of its node."""
    counts_PE = np.zeros((4, 4), int)
    counts_PE[2, 0], counts_PE[0, 1], counts_PE[1, 2], counts_PE[3, 3] = 12, 4, 8, 4
    result = ExactSplit(ranks_per_node=2).solve(counts_PE, np.array([1, 0, 2, -1, 0, -1, 3, 0]))
    assert result.rank_load_P.tolist() == [4, 8, 8, 8]
    assert (result.off_rank_rows, result.off_node_rows) == (4, 0)


@pytest.mark.parametrize("seed", SEEDS)
def test_without_locality_the_peak_is_the_same_and_no_fewer_rows_move(seed):
    counts_PE, slots = draw(seed)
    loose, tight = (ExactSplit(locality=flag).solve(counts_PE, slots) for flag in (False, True))
    assert_conserved(counts_PE, slots, loose.rows_PS)
    assert loose.peak == tight.peak
    assert loose.off_rank_rows >= tight.off_rank_rows


# ---- speeds and extra load --------------------------------------------------------------------------------


def all_loads(load_E, slots, ranks):
    """Every vector of rank loads that integer splits of a small load can give."""
    rank_S = rank_of_slots(slots, ranks)
    loads = {(0,) * ranks}
    for expert, load in enumerate(load_E.tolist()):
        on = sorted({int(rank) for rank in rank_S[slots == expert]})
        shares = [parts for parts in itertools.product(range(load + 1), repeat=len(on)) if sum(parts) == load]
        loads = {
            tuple(int(had[rank] + dict(zip(on, parts)).get(rank, 0)) for rank in range(ranks))
            for had in loads
            for parts in shares
        }
    return np.array(sorted(loads))


@pytest.mark.parametrize("seed", SEEDS)
def test_with_speeds_and_extra_load_the_longest_time_is_the_smallest_of_all_splits(seed):
    rng = np.random.default_rng(seed)
    ranks = 3
    slots = np.concatenate([[0, 1, 2], rng.integers(-1, 3, 3)])
    counts_PE = rng.integers(0, 3, (ranks, 3))
    speed_P = tuple(rng.choice([0.3, 1.0, 1.1, 2.0, 7.0], ranks).tolist())
    extra_P = tuple(rng.integers(0, 6, ranks).tolist())
    loads = all_loads(counts_PE.sum(axis=0), slots, ranks) + np.array(extra_P)
    options = {"speed_P": speed_P, "extra_load_P": extra_P}
    result = ExactSplit(**options).solve(counts_PE, slots)
    assert result.peak == (loads / np.array(speed_P)).max(axis=1).min()  # the very float: one division
    assert result.peak == (result.rank_load_P / np.array(speed_P)).max()
    assert_conserved(counts_PE, slots, result.rows_PS)
    assert balanced_peak(counts_PE.sum(axis=0), slots, ranks, **options).peak == result.peak
    even = ExactSplit(extra_load_P=extra_P).solve(counts_PE, slots)
    assert even.peak == loads.max(axis=1).min()


def test_equal_speeds_give_the_split_without_speeds():
    for seed in SEEDS:
        counts_PE, slots = draw(seed)
        equal = ExactSplit(speed_P=(1.0,) * counts_PE.shape[0])(counts_PE, slots)
        np.testing.assert_array_equal(equal, exact_split(counts_PE, slots))


def test_speeds_far_apart_leave_the_slow_rank_alone():
    result = ExactSplit(speed_P=(1e-200, 1e200)).solve(np.array([[50], [50]]), np.array([0, 0]))
    assert result.rank_load_P.tolist() == [0, 100]


# ---- the cut ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_the_cut_proves_the_peak(seed):
    counts_PE, slots = draw(seed)
    load_E, ranks = counts_PE.sum(axis=0), counts_PE.shape[0]
    rows_S, peak, cut_P = balanced_peak(load_E, slots, ranks)
    rank_S = rank_of_slots(slots, ranks)
    inside_E = [cut_P[rank_S[slots == expert]].all() for expert in range(load_E.size)]
    assert peak == -(-load_E[inside_E].sum() // cut_P.sum())
    assert np.bincount(rank_S, rows_S, ranks).max() == peak
    assert peak == ExactSplit().solve(counts_PE, slots).peak
    for expert in range(load_E.size):
        assert rows_S[slots == expert].sum() == load_E[expert]


# ---- min_rows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("min_rows", [2, 20, 10**6])
def test_replicas_get_no_rows_or_min_rows_and_the_excess_is_told(seed, min_rows):
    counts_PE, slots = draw(seed)
    experts, ranks = counts_PE.shape[1], counts_PE.shape[0]
    home_E = np.array([np.random.default_rng(seed).choice(np.nonzero(slots == e)[0]) for e in range(experts)])
    result = ExactSplit(min_rows=min_rows, home_slot_E=tuple(home_E.tolist())).solve(counts_PE, slots)
    assert_conserved(counts_PE, slots, result.rows_PS)
    taken_S = result.rows_PS.sum(axis=0)
    replicas_S = np.delete(taken_S, home_E)
    assert ((replicas_S == 0) | (replicas_S >= min_rows)).all()
    load_P = np.bincount(rank_of_slots(slots, ranks), taken_S, ranks)
    np.testing.assert_array_equal(result.rank_load_P, load_P)
    assert result.optimum_peak == ExactSplit().solve(counts_PE, slots).peak
    assert result.peak == load_P.max()
    assert result.excess == result.peak - result.optimum_peak >= 0


def test_min_rows_closes_a_replica_that_is_not_needed_and_fills_one_that_is():
    # 10 + 2 rows over two ranks: the replica of expert 0 would take 4 of its 10 rows
    counts_PE, slots = np.array([[10, 0], [0, 2]]), np.array([0, -1, 1, 0])
    assert ExactSplit().solve(counts_PE, slots).rank_load_P.tolist() == [6, 6]
    closed = ExactSplit(min_rows=5, home_slot_E=(0, 2)).solve(counts_PE, slots)
    assert (closed.rank_load_P.tolist(), closed.excess) == ([10, 2], 4)
    # a third rank holds the peak at 8: expert 0 cannot stay at home, and rank 1 has room for 5 of its rows
    counts_PE, slots = np.array([[10, 0, 0], [0, 2, 0], [0, 0, 8]]), np.array([0, -1, 1, 0, 2, -1])
    assert ExactSplit().solve(counts_PE, slots).rank_load_P.tolist() == [8, 4, 8]
    filled = ExactSplit(min_rows=5, home_slot_E=(0, 2, 4)).solve(counts_PE, slots)
    assert (filled.rank_load_P.tolist(), filled.excess) == ([5, 7, 8], 0)


@pytest.mark.parametrize("seed", SEEDS)
def test_min_rows_of_one_changes_nothing(seed):
    counts_PE, slots = draw(seed)
    np.testing.assert_array_equal(ExactSplit(min_rows=1)(counts_PE, slots), exact_split(counts_PE, slots))


# ---- what a rank asks for, ranks apart, threads, inputs ------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rank_gets_its_row_and_the_columns_of_its_slots(seed):
    counts_PE, slots = draw(seed)
    ranks = counts_PE.shape[0]
    whole = ExactSplit(ranks_per_node=1).solve(counts_PE, slots)
    for rank in range(ranks):
        part = ExactSplit(ranks_per_node=1).solve(counts_PE, slots, rank)
        assert part.rows_PS is None
        np.testing.assert_array_equal(part.row_S, whole.rows_PS[rank])
        np.testing.assert_array_equal(part.columns_Ps, whole.rows_PS[:, rank_of_slots(slots, ranks) == rank])
        assert (part.peak, part.off_rank_rows) == (whole.peak, whole.off_rank_rows)


@pytest.mark.parametrize("seed", SEEDS)
def test_expert_ranks_apart_from_the_sources_are_balanced_and_no_row_is_local(seed):
    counts_PE, slots = draw(seed)
    ranks = counts_PE.shape[0]
    more_sources = np.concatenate([counts_PE, counts_PE[:1], counts_PE])
    result = ExactSplit(num_ranks=ranks).solve(more_sources, slots)
    assert result.rows_PS.shape == (more_sources.shape[0], slots.size)
    assert_conserved(more_sources, slots, result.rows_PS)
    assert result.peak == balanced_peak(more_sources.sum(axis=0), slots, ranks).peak
    assert result.off_rank_rows == more_sources.sum()
    np.testing.assert_array_equal(split_rows(more_sources, slots, num_ranks=ranks), result.rows_PS)


def test_split_rows_takes_nodes_by_their_number():
    counts_PE, slots = draw(3, ranks=4)
    by_number = split_rows(counts_PE, slots, num_nodes=2)
    np.testing.assert_array_equal(by_number, ExactSplit(ranks_per_node=2)(counts_PE, slots))
    np.testing.assert_array_equal(split_rows(counts_PE, slots), exact_split(counts_PE, slots))


def test_threads_may_share_a_split():
    shared = ExactSplit(ranks_per_node=2)
    cases = [draw(seed, ranks=4) for seed in range(8)]
    expected = [shared(*case) for case in cases]
    wrong = []

    def work(number):
        for _ in range(200):
            if not np.array_equal(shared(*cases[number]), expected[number]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_any_integer_type_layout_and_read_only_arrays_are_taken_and_left_alone():
    counts_PE, slots = draw(5)
    expected = exact_split(counts_PE, slots)
    for counts, places in (
        (counts_PE.astype(np.int32), slots.astype(np.int16)),
        (np.asfortranarray(counts_PE), np.repeat(slots, 2)[::2]),
        (counts_PE.astype(np.uint64), slots.tolist()),
    ):
        np.testing.assert_array_equal(exact_split(counts, places), expected)
    frozen, places = counts_PE.copy(), slots.copy()
    frozen.flags.writeable = places.flags.writeable = False
    np.testing.assert_array_equal(exact_split(frozen, places), expected)
    np.testing.assert_array_equal(exact_split_numpy(frozen, places), expected)


def test_huge_counts_are_exact():
    counts_PE = np.full((16, 4), 2**40 + 1)
    slots = np.tile(np.arange(4), 16)
    result = ExactSplit().solve(counts_PE, slots)
    assert result.peak == 4 * (2**40 + 1)
    assert result.off_rank_rows == 0
    shared = ExactSplit().solve(np.array([[2**61], [2**60]]), np.array([0, 0]))
    assert shared.rank_load_P.tolist() == [3 * 2**59] * 2


def test_kernels_are_compiled_for_one_signature_and_never_in_a_step():
    run = split._kernels(compiled=True)
    for seed in SEEDS:
        ExactSplit(ranks_per_node=1, min_rows=seed)(*draw(seed))
    for kernel in (run.peak_split, run.slot_split, run.send_rows):
        assert len(kernel.signatures) == 1


def test_importing_the_split_loads_no_numba_and_no_scipy():
    code = "import sys, balancer.split, balancer.spare, balancer.split_device\n"
    code += "print([name for name in ('numba', 'scipy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---- errors -----------------------------------------------------------------------------------------------

GOOD = (np.array([[1, 2], [3, 4]]), np.array([0, 1, 1, -1]))


@pytest.mark.parametrize(
    ("counts", "slots", "message"),
    [
        ([[1, -2], [3, 4]], GOOD[1], "counts of source 0, expert 1 are -2; copies must be 0 or more"),
        ([[1.0, 2.0]], GOOD[1], "counts_PE has type float64; it must be integers"),
        ([[True, False]], GOOD[1], "counts_PE has type bool"),
        ([1, 2], GOOD[1], r"counts_PE has shape \(2,\); expected \[P, E\]"),
        (np.zeros((0, 2), int), GOOD[1], r"counts_PE has shape \(0, 2\)"),
        (GOOD[0], [[0, 1]], r"slot_to_expert_S has shape \(1, 2\); expected \[S\]"),
        (GOOD[0], [0.0, 1.0], "slot_to_expert_S has type float64"),
        (GOOD[0], [0, 1, 1], "3 slots are not a multiple of 2 ranks; use 2 or 4"),
        (GOOD[0], [0, 2, 1, 1], r"slot 1 has expert 2, out of 0\.\.1"),
        (GOOD[0], [0, -2, 1, 1], "slot 1 has expert -2"),
        (GOOD[0], [0, -1, 0, -1], "expert 1 has 6 copies and no slot; give it a slot"),
        ([[2**62, 0], [0, 0]], GOOD[1], r"sum to 4.61e\+18 rows or more, which must stay below 2\^62"),
        ([[2**63 - 1, 2**63 - 1]], [0, 1], r"must stay below 2\^62"),
        (np.array([[2**63 + 1]], np.uint64), [0], "counts_PE has an entry 9223372036854775809"),
    ],
)
@pytest.mark.parametrize("callable_", [exact_split, exact_split_numpy], ids=["compiled", "twin"])
def test_wrong_batches_are_refused(counts, slots, message, callable_):
    with pytest.raises(ValueError, match=message):
        callable_(np.array(counts), np.array(slots))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks_per_node": 3}, "ranks_per_node=3 does not divide 2 ranks; use 2"),
        ({"ranks_per_node": 0}, "ranks_per_node=0 must be at least 1"),
        ({"num_ranks": -1}, "num_ranks=-1 must be at least 1"),
        ({"num_ranks": 2, "ranks_per_node": 1}, "drop one"),
        ({"speed_P": (1.0, 0.0)}, r"speed_P\[1\]=0.0 must be finite and above 0"),
        ({"speed_P": (math.nan, 1.0)}, r"speed_P\[0\]=nan"),
        ({"speed_P": (math.inf, 1.0)}, r"speed_P\[0\]=inf"),
        ({"speed_P": (1.0,)}, "speed_P has 1 entries for 2 ranks"),
        ({"extra_load_P": (0, -3)}, r"extra_load_P\[1\]=-3 must be 0 rows or more"),
        ({"extra_load_P": (0.5, 1.0)}, "extra_load_P has type float64"),
        ({"extra_load_P": (1, 1, 1)}, "extra_load_P has 3 entries for 2 ranks"),
        ({"extra_load_P": (2**62, 0)}, r"must stay below 2\^62"),
        ({"min_rows": -1}, "min_rows=-1 must be 0"),
        ({"home_slot_E": (0,)}, "home_slot_E has 1 entries for 2 experts"),
        ({"home_slot_E": (0, 3)}, r"home_slot_E\[1\]=3 is no slot of expert 1"),
        ({"home_slot_E": (0, 9)}, r"home_slot_E\[1\]=9 is no slot of expert 1"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ExactSplit(**options)(*GOOD)


def test_other_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match=r"rank=2 is out of 0\.\.1"):
        ExactSplit().solve(*GOOD, rank=2)
    with pytest.raises(ValueError, match="rank=0 has a row only where sources and ranks are the same"):
        ExactSplit(num_ranks=2).solve(*GOOD, rank=0)
    with pytest.raises(ValueError, match="num_nodes=3 does not divide 2 ranks; use 2"):
        split_rows(*GOOD, num_nodes=3)
    with pytest.raises(ValueError, match="num_ranks=0 must be at least 1"):
        balanced_peak(GOOD[0][0], GOOD[1], 0)
    with pytest.raises(ValueError, match="9007199254740992"):
        ExactSplit(speed_P=(1.0, 2.0))(np.array([[2**53, 0], [0, 0]]), GOOD[1])
