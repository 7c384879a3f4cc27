"""A replay scores the next sample under the last decision, leaves idle layers out, and refuses cheats."""

import dataclasses
import math

import numpy as np
import pytest

from balancer.cost import CostModel
from balancer.metrics import balancedness, moved_slots
from balancer.packing import even_share_load
from balancer.policies import Decision, Policy, Setup, policy, start_placement
from balancer.split import balanced_peak
from balancer.trace import Trace
from experiments import replay_checks, replay_run
from experiments.replay_checks import asked_samples, check_causality
from experiments.replay_run import balance_over_time, figures, gap_over_time, replay
from experiments.replay_score import layer_times, rank_loads, replica_bytes, time_floors

COST = CostModel.of_machine("nvlink", 1024, 512)
SETUP = Setup(num_layers=2, num_experts=6, num_ranks=3, num_slots=9, every_steps=10, cost=COST)
HELD: dict[str, object] = {}


def trace_of(counts_WLE, interval=10):
    counts_WLE = np.array(counts_WLE, dtype=np.int64)
    steps_W = 1 + interval * np.arange(len(counts_WLE), dtype=np.int64)
    return Trace(tokens_per_expert_WLE=counts_WLE, steps_W=steps_W)


@pytest.fixture
def trace():
    return trace_of(np.random.default_rng(0).integers(1, 400, size=(30, 2, 6)))


def swapped(slots_LS):
    """The placement with the replicas of the first two ranks exchanged."""
    made = slots_LS.copy()
    made[:, [2, 5]] = made[:, [5, 2]]
    return made


def made_policy(update, name="mine", shares="even", **more):
    return Policy(name, shares, lambda setup, start_LS: 0, update, **more)


# ---- scores ------------------------------------------------------------------------------------------------


def test_a_sample_is_scored_under_what_was_decided_before_it(trace):
    def update(step, counts_LE, slots_LS, state):
        return Decision(swapped(slots_LS) if step == 51 else slots_LS, f"at {step}"), state

    start_LS = np.tile([0, 1, 4, 2, 3, 5, 4, 5, 0], (2, 1))
    made = replay(trace, [made_policy(update)], SETUP, start_LS)
    (run,) = made.runs
    assert made.steps_W.tolist() == trace.steps_W[1:].tolist()
    for w in range(29):  # scored sample w is sample w + 1; step 51 is sample 5
        slots_LS = swapped(start_LS) if w + 1 > 5 else start_LS
        load_LG = even_share_load(trace.tokens_per_expert_WLE[w + 1], slots_LS, 3)
        assert np.allclose(run.peak_WL[w], load_LG.max(axis=1), rtol=1e-12)
    moves_L = moved_slots(start_LS, swapped(start_LS), 3)
    assert run.moves_WL[5].tolist() == moves_L.tolist() and run.moves_WL.sum() == moves_L.sum() > 0
    (change,) = run.changes
    assert (change.step, change.w, change.reason) == (51, 5, "at 51")
    assert (change.moves, change.layers, len(run.plan_ms)) == (int(moves_L.sum()), 2, 1)


def test_both_kinds_of_shares_are_scored_by_their_definitions(trace):
    counts_LE, slots_LS = trace.tokens_per_expert_WLE[3], start_placement(SETUP)
    even = rank_loads(counts_LE, slots_LS, "even", 3)
    assert np.array_equal(even.load_LG, even_share_load(counts_LE, slots_LS, 3))
    assert (even.active_LG == 3).all()
    exact = rank_loads(counts_LE, slots_LS, "exact", 3)
    peaks = [balanced_peak(c, s, 3).peak for c, s in zip(counts_LE, slots_LS)]
    assert exact.load_LG.max(axis=1).tolist() == peaks
    assert np.array_equal(exact.load_LG.sum(axis=1), counts_LE.sum(axis=1))
    holes_LS = np.tile([0, 1, -1, 2, 3, -1, 4, 5, -1], (2, 1))
    for shares in ("even", "exact"):
        assert (rank_loads(counts_LE, holes_LS, shares, 3).active_LG == 2).all(), shares
    one_hot = np.zeros_like(counts_LE)
    one_hot[:, 4] = 9
    assert rank_loads(one_hot, slots_LS, "even", 3).active_LG.sum() == (slots_LS == 4).sum()


def test_figures_are_those_of_their_definitions(trace):
    made = replay(trace, [policy("eplb"), policy("none")], SETUP, offline=True)
    assert [run.name for run in made.runs] == ["eplb", "none", "offline"]
    eplb = made.runs[0]
    row = figures(made, eplb)
    # both forms once more, from the loads of the placements themselves
    forms, at = [], dict.fromkeys(range(29))
    for slots_LS, first, number in eplb.spans:
        at |= dict.fromkeys(range(first, first + number), slots_LS)
    for w, slots_LS in at.items():
        load_LG = even_share_load(trace.tokens_per_expert_WLE[w + 1], slots_LS, 3)
        forms.append((balancedness(load_LG).mean(), load_LG.mean(axis=1).sum() / load_LG.max(axis=1).sum()))
    mean_W, sum_W = np.array(forms).T
    assert row["balancedness_mean"] == pytest.approx(mean_W.mean())
    assert row["balancedness_sum"] == pytest.approx(sum_W.mean())
    assert row["balancedness_first20"] == pytest.approx(mean_W[:20].mean())
    assert row["balancedness_after20"] == pytest.approx(mean_W[20:].mean())
    assert row["plans"] == len(eplb.changes) == 29 and row["moves"] == eplb.moves_WL.sum()
    assert row["bytes_moved"] == row["moves"] * COST.expert_bytes
    assert row["time_s"] == pytest.approx(10 * eplb.time_WL.sum()) and row["plan_ms_median"] > 0
    assert figures(made, made.runs[1])["plan_ms_median"] is None
    for run in made.runs:
        assert (run.time_WL >= made.floor_WL * (1 - 1e-12)).all(), run.name
        assert (run.peak_WL >= run.bound_WL * (1 - 1e-9)).all(), run.name


def test_nobody_with_its_shares_beats_the_offline_optimum(trace):
    names = ["none", "even", "lplb-ring", "eplb"]
    made = replay(trace, [policy(name) for name in names], SETUP, offline=True)
    rows = {run.name: figures(made, run) for run in made.runs}
    assert rows["offline"]["regret_s"] == 0 and rows["offline"]["sees_future"]
    assert rows["lplb-ring"]["regret_s"] >= -1e-9
    best = made.run("offline")
    assert best.shares == "either" and best.moves_WL.sum() == rows["offline"]["moves"]
    assert made.run("split") is None


@pytest.mark.parametrize("solve_s", [0.0, 1e-5, 1.0])
def test_nobody_beats_the_offline_optimum_however_it_shares_and_whatever_a_split_costs(trace, solve_s):
    setup = dataclasses.replace(SETUP, cost=dataclasses.replace(COST, solve_s=solve_s))
    names = ["none", "none+split", "even", "split", "lplb-ring", "eplb"]
    made = replay(trace, [policy(name) for name in names], setup, offline=True)
    rows = {run.name: figures(made, run) for run in made.runs}
    assert rows["eplb"]["regret_s"] is None  # it moves homes, which the optimum must not
    for name in names[:-1]:
        assert rows[name]["regret_s"] >= -1e-9 * rows[name]["time_s"], name
    best = made.run("offline")
    assert (best.peak_WL >= best.bound_WL * (1 - 1e-9)).all()
    if solve_s == 1.0:
        assert rows["offline"]["time_s"] < 1.0 < rows["none+split"]["time_s"]


def test_where_homes_are_free_all_are_compared_with_the_offline_optimum(trace):
    setup = dataclasses.replace(SETUP, fixed_homes=False)
    made = replay(trace, [policy("eplb"), policy("none+split")], setup, offline=True)
    assert all(figures(made, run)["regret_s"] >= -1e-12 for run in made.runs)


# one layer of 2 experts on 2 ranks; a row takes 1 s to compute, a replica 2 * 4 bytes at 2 bytes/s
PLAIN = CostModel(
    row_s=1.0, active_s=0.5, row_bytes=0.0, expert_bytes=4.0, grad_bytes=4.0, bandwidth_bytes_per_s=2.0,
    move_price_s=0.0, solve_s=0.25,
)  # fmt: skip
TWO = Setup(num_layers=1, num_experts=2, num_ranks=2, num_slots=4, cost=PLAIN)


def test_times_are_those_computed_by_hand():
    counts_WLE = [[[8, 2]], [[8, 2]]]
    # replica of 0 on rank 1, of 1 on rank 0: each port carries one there and one back, both ways at once
    start_LS = np.array([[0, 1, 1, 0]])
    made = replay(trace_of(counts_WLE, 1), [policy("none"), policy("none+split")], TWO, start_LS)
    # 4 + 1 rows on each rank, 2 slots with rows, one replica: 5 + 1 + 4; the split is solved besides
    assert made.run("none").time_WL.item() == pytest.approx(10.0)
    split = made.run("none+split")
    active = rank_loads(np.array([[8, 2]]), start_LS, "exact", 2).active_LG.max()
    assert split.peak_WL.item() == 5
    assert split.time_WL.item() == pytest.approx(5 + 0.5 * active + 4 + 0.25)
    # an even load: 5 rows and 1 slot for each rank
    assert made.floor_WL.item() == pytest.approx(5.5)
    # without replicas: 8 rows in one slot
    alone = replay(trace_of(counts_WLE, 1), [policy("none")], TWO, np.array([[0, -1, 1, -1]]))
    assert alone.runs[0].time_WL.item() == pytest.approx(8.5)


@pytest.mark.parametrize(
    ("counts_E", "start_S", "even_s", "exact_s"),
    [
        ([8, 0], [0, -1, 1, -1], 8.5, 8.5 + 0.25),  # nothing to split: solving is for nothing
        ([8, 2], [0, 1, 1, -1], 9 + 2 * 0.5 + 4, 8 + 0.5 + 4 + 0.25),  # half of the 2 rows join the 8
    ],
)
def test_the_offline_optimum_takes_the_faster_way_of_sharing_at_its_price(
    monkeypatch, counts_E, start_S, even_s, exact_s
):
    monkeypatch.setattr(replay_run, "_POOL", 1)
    monkeypatch.setattr(replay_run, "_HINDSIGHT", 0)
    policies = [policy("none"), policy("none+split")]
    made = replay(trace_of([[counts_E]] * 2, 1), policies, TWO, np.array([start_S]), offline=True)
    assert [run.time_WL.item() for run in made.runs[:2]] == pytest.approx([even_s, exact_s])
    # by its own pool, as nobody's way is allowed to stand in for it
    monkeypatch.setattr(replay_run, "_layer_cost", lambda *a: math.inf)
    alone = replay(trace_of([[counts_E]] * 2, 1), policies, TWO, np.array([start_S]), offline=True)
    for best in (made.runs[2], alone.runs[2]):
        assert best.time_WL.item() == pytest.approx(min(even_s, exact_s))
        assert best.peak_WL.item() == 8


def random_setup(rng):
    """Sizes and prices of any kind, nodes within a node no slower than across."""
    ranks, nodes = [(2, 1), (3, 1), (4, 2), (4, 1), (6, 3)][int(rng.integers(5))]
    experts = int(rng.integers(1, 9))
    slots = ranks * (-(-experts // ranks) + int(rng.integers(0, 3)))
    row_s, active_s, row_bytes, expert_bytes, solve_s = rng.choice([0.01, 1.0, 5.0], 5)
    cost = CostModel(
        row_s=row_s, active_s=active_s, row_bytes=row_bytes, expert_bytes=expert_bytes, solve_s=solve_s,
        bandwidth_bytes_per_s=2.0, node_bandwidth_bytes_per_s=float(rng.choice([0.5, 2.0])),
        overlap_frac=float(rng.choice([0.0, 0.5, 1.0])), micro_batches=int(rng.integers(1, 4)),
        trained=bool(rng.integers(2)),
    )  # fmt: skip
    return Setup(
        num_layers=1, num_experts=experts, num_ranks=ranks, num_slots=slots, num_nodes=nodes, cost=cost
    )


def test_no_placement_takes_less_time_than_the_floor():
    least = np.inf
    for seed in range(300):
        rng = np.random.default_rng(seed)
        setup = random_setup(rng)
        counts_LE = rng.integers(0, 12, (1, setup.num_experts)) * rng.integers(0, 2, (1, setup.num_experts))
        slots_S = rng.integers(-1, setup.num_experts, setup.num_slots)
        slots_S[rng.permutation(setup.num_slots)[: setup.num_experts]] = np.arange(setup.num_experts)
        floor = time_floors(setup, counts_LE[None]).item()
        for shares in ("even", "exact"):
            found = rank_loads(counts_LE, slots_S[None], shares, setup.num_ranks)
            replica_LG = replica_bytes(setup, slots_S[None], free_slots=True)
            solved = shares == "exact"
            time_s = layer_times(setup, found.load_LG, found.active_LG, replica_LG, solved=solved).item()
            assert floor <= time_s * (1 + 1e-12), (seed, shares)
            least = min(least, time_s / floor) if floor else least
    assert least < 1.05  # the floor is no empty claim


@pytest.mark.parametrize("hot", [[6, 6, 6], [6, 0, 6]])
def test_the_floor_is_the_time_of_an_even_load(hot):
    counts_LE = np.array([hot])
    ranks = int((counts_LE > 0).sum())
    setup = Setup(num_layers=1, num_experts=3, num_ranks=ranks, num_slots=2 * ranks, cost=COST)
    slots_LS = np.array([[0, 1, 2, -1], [0, -1, 1, -1, 2, -1]][ranks - 2])[None]
    found = rank_loads(counts_LE, slots_LS, "even", ranks)
    times_L = layer_times(setup, found.load_LG, found.active_LG, None, solved=False)
    assert time_floors(setup, counts_LE[None]).item() == pytest.approx(times_L.item(), rel=1e-12)


# rank 1 has nearly all of the load, and no replica elsewhere that could take any
HOT_E, STUCK_S = [10, 10, 500, 400, 10, 10], [0, 1, 4, 2, 3, 5, 4, 5, 0]


def hot(move_price_s, interval=10):
    """The replay of the ring and its offline optimum along a hot load, in serving (nothing is fetched)."""
    cost = dataclasses.replace(COST, trained=False, move_price_s=move_price_s)
    trace = trace_of(1000 * np.tile(HOT_E, (4, 2, 1)), interval)
    setup = dataclasses.replace(SETUP, cost=cost)
    return replay(trace, [policy("lplb-ring")], setup, np.tile(STUCK_S, (2, 1)), offline=True)


def test_a_pool_that_is_too_small_leaves_nobodys_own_way_out(monkeypatch):
    monkeypatch.setattr(replay_run, "_POOL", 1)
    monkeypatch.setattr(replay_run, "_HINDSIGHT", 0)
    made = hot(move_price_s=0.0)
    ring, best = (figures(made, run) for run in made.runs)
    assert ring["moves"] == best["moves"] > 0 and ring["time_s"] == best["time_s"]


def test_the_offline_optimum_moves_where_the_steps_that_gain_are_many():
    moves = [int(hot(1.0, interval).run("offline").moves_WL.sum()) for interval in (1, 10**7)]
    assert moves[0] == 0 < moves[1]


def test_steps_that_a_sample_stands_for_weigh_its_time():
    counts_WLE = np.random.default_rng(1).integers(1, 99, size=(4, 2, 6))
    steps_W = np.array([0, 10, 20, 1020])
    made = replay(Trace(tokens_per_expert_WLE=counts_WLE, steps_W=steps_W), [policy("none")], SETUP)
    assert made.stands_W.tolist() == [10, 10, 1000]
    times_W = made.runs[0].time_WL.sum(axis=1)
    assert figures(made, made.runs[0])["time_s"] == pytest.approx(times_W @ [10, 10, 1000])


# ---- idle, short and odd traces ----------------------------------------------------------------------------


def test_idle_layers_are_undefined_counted_and_never_perfect():
    counts_WLE = np.random.default_rng(2).integers(1, 400, size=(8, 2, 6))
    counts_WLE[3], counts_WLE[5, 0] = 0, 0
    made = replay(trace_of(counts_WLE), [policy("eplb"), policy("lplb-ring")], SETUP, offline=True)
    assert made.idle_layers == 3
    for run in made.runs:
        mean_W, sum_W = balance_over_time(made, run)
        assert np.isnan(mean_W[2]) and np.isnan(sum_W[2]) and not np.isnan(np.delete(mean_W, 2)).any()
        gap = run.peak_WL[4, 1] / run.bound_WL[4, 1] - 1
        assert gap_over_time(made, run)[4] == pytest.approx(gap)
        assert mean_W[4] == pytest.approx(made.mean_WL[4, 1] / run.peak_WL[4, 1])
        row = figures(made, run)
        assert row["balancedness_mean"] == pytest.approx(np.nanmean(mean_W)) and row["balancedness_mean"] < 1
        assert row["balancedness_after20"] is None
        assert all(math.isfinite(v) for v in row.values() if isinstance(v, float))


@pytest.mark.parametrize(
    ("num_samples", "message"),
    [(0, "the trace has 0 samples"), (1, "the trace has 1 samples.*give 2 or more")],
)
def test_a_trace_that_is_too_short_is_refused(num_samples, message):
    with pytest.raises(ValueError, match=message):
        replay(trace_of(np.ones((num_samples, 2, 6))), [policy("none")], SETUP)


def test_two_samples_are_enough_and_a_trace_without_load_is_not():
    made = replay(trace_of(np.ones((2, 2, 6))), [policy("eplb")], SETUP, offline=True)
    assert len(made.steps_W) == 1
    with pytest.raises(ValueError, match="no layer of the trace has load"):
        replay(trace_of(np.zeros((3, 2, 6))), [policy("none")], SETUP)


def test_arguments_that_do_not_fit_are_refused(trace):
    with pytest.raises(ValueError, match="2 layers of 6 experts and the setup 2 of 9"):
        replay(
            trace, [policy("none")], Setup(num_layers=2, num_experts=9, num_ranks=3, num_slots=9, cost=COST)
        )
    for names in ([], ["none", "none"]):
        with pytest.raises(ValueError, match="each once"):
            replay(trace, [policy(name) for name in names], SETUP)
    with pytest.raises(ValueError, match="home of expert 0"):
        replay(trace, [policy("none")], SETUP, swapped(start_placement(SETUP))[:, ::-1].copy())


# ---- cheats ------------------------------------------------------------------------------------------------


def changed(slots_LS, expert):
    """The first replica slot taken over by an expert that its rank does not hold."""
    made = slots_LS.copy()
    made[:, 2] = expert
    return made


def foreseeing(counts_LE):
    """The heaviest expert of a load that is not at home on rank 0."""
    return 2 + int(counts_LE[0, 2:].argmax())


def refused(trace, one, message, start_LS=None):
    with pytest.raises(ValueError, match=message):
        replay(trace, [one], SETUP, start_LS)


def test_a_policy_that_holds_the_whole_trace_is_refused_and_the_trace_is_as_before(trace):
    def update(step, counts_LE, slots_LS, state):
        return Decision(changed(slots_LS, foreseeing(trace.tokens_per_expert_WLE[step // 10 + 1]))), state

    before_WLE = trace.tokens_per_expert_WLE.copy()
    refused(trace, made_policy(update), "'mine' sees the future: after step ")
    assert np.array_equal(trace.tokens_per_expert_WLE, before_WLE)
    assert trace.tokens_per_expert_WLE.flags.writeable


def test_a_policy_that_takes_the_trace_along_in_its_state_is_refused(trace):
    def update(step, counts_LE, slots_LS, state):
        return Decision(changed(slots_LS, foreseeing(state[step // 10 + 1]))), state

    one = Policy("mine", "even", lambda setup, start_LS: trace.tokens_per_expert_WLE.copy(), update)
    refused(trace, one, "sees the future")


def test_a_policy_that_looks_ahead_late_only_is_refused(trace):
    def update(step, counts_LE, slots_LS, state):
        w = step // 10
        late = trace.tokens_per_expert_WLE[w + 1] if w >= 12 else counts_LE
        return Decision(changed(slots_LS, foreseeing(late))), state

    refused(trace, made_policy(update), "sees the future: after step 121 ")


def test_a_policy_that_learns_the_trace_in_a_global_is_refused(trace):
    def update(step, counts_LE, slots_LS, state):
        HELD[str(step)] = counts_LE.copy()
        return Decision(changed(slots_LS, foreseeing(HELD.get(str(step + 10), counts_LE)))), state

    HELD.clear()
    refused(trace, made_policy(update), "sees the future")


def test_a_policy_that_draws_from_outside_its_state_is_refused(trace):
    rng = np.random.default_rng(0)

    def update(step, counts_LE, slots_LS, state):
        return Decision(changed(slots_LS, int(rng.integers(2, 6)))), state

    refused(trace, made_policy(update), "does not give the same answer twice")


def test_an_honest_policy_passes_also_by_itself_and_with_changing_state(trace):
    def update(step, counts_LE, slots_LS, state):
        state.append(foreseeing(counts_LE))  # a state that is changed in place must not upset the check
        return Decision(changed(slots_LS, state[-min(len(state), 3)])), state

    one = Policy("mine", "even", lambda setup, start_LS: [], update)
    check_causality(one, trace, SETUP, start_placement(SETUP))
    assert replay(trace, [one], SETUP).runs[0].changes


def test_a_trace_that_cannot_be_written_to_is_replayed_all_the_same(trace):
    trace.tokens_per_expert_WLE.setflags(write=False)
    assert replay(trace, [policy("eplb")], SETUP).runs


def test_the_check_looks_at_the_first_samples_and_over_the_rest(monkeypatch):
    assert asked_samples(2) == {0} and asked_samples(3) == {0, 1}
    found = asked_samples(500)
    assert set(range(12)) < found and max(found) == 498 and len(found) == 18
    assert max(asked_samples(13)) == 11 and replay_checks.asked_samples(14) == set(range(13))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda s: changed(s, 0), "layer 0, rank 0: expert 0 stands there twice and rank"),
        (lambda s: np.where(s == 4, 5, s), "'mine', step 1: layer 0: expert 4 has no slot"),
        (lambda s: changed(s, 6), "out of 0..5"),
        (lambda s: s[:, ::-1].copy(), "is the home of expert"),
        (lambda s: s[:, :6], r"slots_LS is int64 \(2, 6\); expected int64 \(2, 9\)"),
        (lambda s: s.astype(np.int32), "slots_LS is int32"),
        (lambda s: s.tolist(), "slots_LS is list"),
    ],
)
def test_a_placement_that_cannot_be_run_is_refused(trace, make, message):
    start_LS = np.tile([0, 1, 4, 2, 3, 5, 4, 5, 0], (2, 1))
    free = "no slot" in message
    one = made_policy(lambda step, c, slots_LS, state: (Decision(make(slots_LS)), state), free_slots=free)
    refused(trace, one, message, start_LS)


def test_a_policy_that_changes_what_it_was_given_is_refused(trace):
    def writes(step, counts_LE, slots_LS, state):
        counts_LE.setflags(write=True)
        counts_LE[0] = 0
        return Decision(slots_LS), state

    refused(trace, made_policy(writes), "'mine', step 1: it changed the arrays")

    def stores(step, counts_LE, slots_LS, state):
        counts_LE[0] = 0
        return Decision(slots_LS), state

    refused(trace, made_policy(stores), "read-only")


def test_an_answer_that_is_none_and_a_state_without_a_copy_are_refused(trace):
    refused(trace, made_policy(lambda *a: None), "update gave NoneType; expected Decision, state")
    one = Policy("mine", "even", lambda setup, start_LS: (x for x in ()), policy("none").update)
    refused(trace, one, "its state cannot be copied")
