"""The supervisor: a trim that is slow and bounded, an override that ends, rollbacks that change something."""

import math

import numpy as np
import pytest

from balancer.control_config import ControlConfig
from balancer.dispersion import draw_counts
from balancer.forecast_record import copy_state
from balancer.loop import BalancerLoop
from balancer.supervisor import Signals, init_supervisor, needed_checkpoint, update_supervisor

CONFIG = ControlConfig(supervisor=True, trim_memory_steps=5, release_steps=10, override_gain=0.5)
FASTEST = (1 - 0.95) * math.log(2)


def signals(step, *states, excess=None, gains=None, checkpoints=()):
    excess_L = (
        np.full(len(states), CONFIG.trim_reference) if excess is None else np.array(excess, dtype=float)
    )
    limits = {}
    if gains is not None:
        names = ("gain_L", "reinforcement_L", "most_gain_L")
        limits = {name: np.full(len(states), value) for name, value in zip(names, gains, strict=True)}
    return Signals(step=step, states=states, excess_L=excess_L, checkpoint_steps=checkpoints, **limits)


class Run:
    """A supervisor in its steps: run.step("HEALTHY", ...) -> the step's actions."""

    def __init__(self, num_layers=1, balance_loss=0.01, config=CONFIG, **start):
        self.config = config
        self.state = init_supervisor(config, num_layers, balance_loss, **start)
        self.now = 0

    def step(self, *states, times=1, **given):
        actions = ()
        for _ in range(times):
            self.now += 1
            found, self.state = update_supervisor(
                self.config, signals(self.now, *states, **given), self.state
            )
            actions += found
        return actions

    def kinds(self, *states, **given):
        return [action.kind for action in self.step(*states, **given)]


# ---- the trim -------------------------------------------------------------------------------------------


def test_a_layer_at_the_reference_is_left_alone():
    run = Run(num_layers=2)
    assert run.kinds("HEALTHY", "SKEWED", times=200) == []
    assert run.state.coefficient_L.tolist() == [0.01, 0.01]
    assert run.state.router_lr_factor == 1.0
    assert not run.state.gain_L.any()


def test_the_trim_follows_the_excess_of_each_layer_by_itself():
    run = Run(num_layers=3)
    run.step("SKEWED", "HEALTHY", "HEALTHY", times=40, excess=[1.2, 0.2, 0.0])
    up, same, down = run.state.coefficient_L
    # smoothing takes 5 steps away: ln grows by trim_rate * (1.2 - 0.2) a step
    assert math.log(up / 0.01) == pytest.approx(0.01 * 1.0 * (40 - 4), rel=0.02)
    assert same == 0.01
    assert math.log(down / 0.01) == pytest.approx(0.01 * -0.2 * (40 - 4), rel=0.02)


def test_no_trim_is_faster_than_the_optimizers_memory():
    run = Run(config=ControlConfig(supervisor=True, trim_rate=1.0, trim_memory_steps=5))
    before = run.state.coefficient_L[0]
    for _ in range(30):
        run.step("SKEWED", excess=[50.0])
        grown = math.log(run.state.coefficient_L[0] / before)
        assert grown <= FASTEST * (1 + 1e-12)
        before = run.state.coefficient_L[0]
    assert grown == pytest.approx(FASTEST) or before == run.config.balance_loss_most


def test_the_trim_stays_within_its_bounds_and_does_not_wind_up():
    run = Run()
    run.step("SKEWED", times=1000, excess=[30.0])
    assert run.state.coefficient_L[0] == CONFIG.balance_loss_most
    run.step("HEALTHY", times=30, excess=[0.0])
    assert run.state.coefficient_L[0] < CONFIG.balance_loss_most, "it must come back at once"
    run.step("HEALTHY", times=5000, excess=[0.0])
    assert run.state.coefficient_L[0] == CONFIG.balance_loss_least


def test_a_coefficient_of_0_stays_0_until_an_alarm():
    run = Run(balance_loss=0.0)
    run.step("SKEWED", times=500, excess=[3.0])
    assert run.state.coefficient_L[0] == 0.0
    run.step("COLLAPSING", excess=[3.0])
    assert run.state.coefficient_L[0] == CONFIG.override_balance_loss
    run.step("HEALTHY", times=300)
    assert run.state.coefficient_L[0] == pytest.approx(CONFIG.balance_loss_start)


def test_a_layer_without_load_is_not_trimmed():
    run = Run(num_layers=2)
    run.step("HEALTHY", "HEALTHY", times=50, excess=[np.nan, 2.0])
    assert run.state.coefficient_L[0] == 0.01
    assert np.isfinite(run.state.excess_L).all()
    assert run.state.coefficient_L[1] > 0.01


def trimmed(spread, phi, steps=600):
    """Coefficient of a loop that starts with 1e-3, after so many steps of one load and its noise."""
    rng, samples = np.random.default_rng(1), []
    weight_LE = np.exp(spread * rng.standard_normal((2, 32)))
    loop = BalancerLoop(
        ControlConfig(supervisor=True), lambda: samples[-1], lambda *_: 0, num_layers=2, num_experts=32,
        top_k=2, balance_loss=1e-3,
    )  # fmt: skip
    for step in range(steps):
        counts_LE = draw_counts(rng, weight_LE / weight_LE.sum(axis=1, keepdims=True), 4096, phi)
        samples.append({"step": step, "tokens_per_expert_LE": counts_LE})
        coefficient_L = loop.step().balance_loss_L
    return coefficient_L


@pytest.mark.parametrize("phi", [1.0, 2.3, 8.0])
def test_noise_of_an_even_router_raises_no_coefficient_whatever_its_dispersion(phi):
    assert (trimmed(0.0, phi) < 1e-3).all()


@pytest.mark.parametrize("phi", [1.0, 8.0])
def test_an_uneven_router_is_trimmed_whatever_its_dispersion(phi):
    assert (trimmed(0.3, phi) > 2e-3).all()


def test_the_trim_is_told_at_each_doubling_with_its_figures():
    run = Run()
    actions = run.step("SKEWED", times=150, excess=[1.2])
    assert [action.kind for action in actions] == ["trim", "trim"]
    assert "violation 1.200 over its noise against a reference of 0.200" in actions[1].reason
    assert actions[0].values[0] == pytest.approx(0.02, rel=0.02)


# ---- the override ---------------------------------------------------------------------------------------


def test_a_collapsing_layer_is_overridden_once_and_alone():
    run = Run(num_layers=3)
    actions = run.step("HEALTHY", "COLLAPSING", "HEALTHY", gains=(0.2, 0.3, 1.0))
    assert [(action.kind, action.layers) for action in actions] == [("balance_loss", (1,)), ("gain", (1,))]
    assert run.state.coefficient_L.tolist() == [0.01, 0.05, 0.01]
    np.testing.assert_allclose(run.state.gain_L, [0.0, 0.65, 0.0])
    assert "layer 1 COLLAPSING since step 1: balance loss 1.00e-02 -> 5.00e-02" in actions[0].reason
    assert "0.200 -> 0.650, between reinforcement 0.300 and stability limit 1.000" in actions[1].reason
    assert run.kinds("HEALTHY", "COLLAPSING", "HEALTHY", times=5, gains=(0.65, 0.3, 1.0)) == []


@pytest.mark.parametrize(
    ("gains", "words"),
    [
        ((0.2, 1.1, 1.0), "no gain lies between reinforcement 1.100 and stability limit 1.000"),
        ((0.9, 0.3, 1.0), "it is high enough"),
        ((0.2, np.nan, 1.0), "does not know its limits yet"),
    ],
)
def test_the_gain_never_leaves_its_limits_and_the_reason_is_given(gains, words):
    run = Run()
    actions = run.step("COLLAPSING", gains=gains)
    assert [action.kind for action in actions] == ["balance_loss", "no-gain"]
    assert words in actions[1].reason
    assert run.state.gain_L[0] == 0.0


def test_the_gain_is_raised_later_where_the_law_learns_its_limits_later():
    run = Run()
    run.step("COLLAPSING", gains=(0.2, np.nan, 1.0))
    assert run.kinds("COLLAPSING", gains=(0.2, np.nan, 1.0)) == []
    assert run.kinds("COLLAPSING", gains=(0.2, 0.3, 1.0)) == ["gain"]


def test_without_a_law_only_the_coefficient_is_overridden():
    assert Run().kinds("COLLAPSING") == ["balance_loss"]


def test_an_override_ends_after_health_only_and_then_decays_slowly():
    run = Run(num_layers=2)
    run.step("COLLAPSING", "HEALTHY", gains=(0.2, 0.3, 1.0))
    run.step("HEALTHY", "HEALTHY", times=9)
    run.step("COLLAPSING", "HEALTHY")  # the count begins again
    run.step("HEALTHY", "HEALTHY", times=9)
    run.step("SKEWED", "HEALTHY", times=50)
    assert run.state.coefficient_L[0] == 0.05, "SKEWED is no health"
    (ended,) = run.step("HEALTHY", "HEALTHY")
    assert (ended.kind, ended.layers) == ("release", (0,))
    assert "healthy for 10 steps" in ended.reason
    assert run.state.gain_L[0] == 0.0
    falling = [run.state.coefficient_L[0]]
    for _ in range(100):
        run.step("HEALTHY", "HEALTHY")
        falling.append(run.state.coefficient_L[0])
    steps = -np.diff(np.log(falling))
    assert steps.max() <= FASTEST * (1 + 1e-12)
    assert falling[0] == 0.05
    assert falling[-1] == 0.01
    assert run.kinds("COLLAPSING", "HEALTHY") == ["balance_loss"], "a new event jumps again"


def test_an_overridden_layer_is_not_trimmed():
    run = Run()
    run.step("COLLAPSING", times=100, excess=[5.0])
    assert run.state.base_L[0] == pytest.approx(0.01, rel=0.04)  # but in the first of these steps


# ---- rollback -------------------------------------------------------------------------------------------


def test_a_collapse_goes_back_before_its_onset_with_a_lower_learning_rate():
    run = Run(num_layers=2)
    run.step("HEALTHY", "HEALTHY", times=29)
    run.step("COLLAPSING", "HEALTHY", times=5)
    (back,) = run.step("COLLAPSED", "HEALTHY", checkpoints=(10, 20, 30, 34))
    assert (back.kind, back.layers, back.checkpoint_step, back.values) == ("rollback", (0,), 20, (0.5,))
    assert "layer 0 COLLAPSED, the first alarm in step 30: back to the weights of step 20" in back.reason
    assert "times 0.5 (was 1)" in back.reason
    assert run.state.router_lr_factor == 0.5
    assert run.state.coefficient_L[0] == 0.05, "the override goes on"


def test_a_verdict_that_flickers_keeps_the_onset():
    run = Run()
    run.step("HEALTHY", times=9)
    run.step("COLLAPSING")
    run.step("SKEWED", times=5)
    run.step("COLLAPSING")
    (back,) = run.step("COLLAPSED", checkpoints=(5, 12))
    assert back.checkpoint_step == 5


def test_a_collapse_that_comes_back_goes_further_back_and_changes_more():
    run = Run()
    run.step("HEALTHY", times=27)
    run.step("COLLAPSING", times=2)
    run.step("COLLAPSED", checkpoints=(10, 20))
    run.step("HEALTHY", times=3)
    (again,) = (a for a in run.step("COLLAPSED", checkpoints=(10, 20, 29)) if a.kind == "rollback")
    assert (again.checkpoint_step, again.values) == (10, (0.25,)), (
        "20 did not help, 29 was saved in the collapse"
    )
    run.step("HEALTHY", times=3)
    (third,) = (a for a in run.step("COLLAPSED", checkpoints=(10, 20, 29)) if a.kind == "rollback")
    assert third.checkpoint_step == 20, "each with a lower learning rate than before"
    assert third.values == (0.125,)


def test_a_checkpoint_saved_after_a_rollback_is_as_good_as_any():
    run = Run()
    run.step("HEALTHY", times=29)
    run.step("COLLAPSED", checkpoints=(20,))
    run.step("HEALTHY", times=20)
    (again,) = (a for a in run.step("COLLAPSED", checkpoints=(20, 40)) if a.kind == "rollback")
    assert again.checkpoint_step == 40


def test_rollbacks_are_counted_and_the_end_is_told_once():
    run = Run(config=ControlConfig(supervisor=True, trim_memory_steps=5, release_steps=10, most_rollbacks=1))
    run.step("HEALTHY", times=5)
    assert run.kinds("COLLAPSED", checkpoints=(3,)) == ["balance_loss", "rollback"]
    assert run.kinds("COLLAPSED", times=5, checkpoints=(3,)) == [], "not before it was seen to be better"
    run.step("SKEWED")
    (told,) = run.step("COLLAPSED", checkpoints=(3,))
    assert told.kind == "no-rollback"
    assert "1 rollbacks are all that control.most_rollbacks allows" in told.reason
    assert run.kinds("COLLAPSED", times=5, checkpoints=(3,)) == []


def test_without_an_older_checkpoint_the_reason_is_told_and_nothing_changed():
    run = Run()
    run.step("HEALTHY", times=5)
    actions = run.step("COLLAPSED", checkpoints=(6, 7))
    assert [action.kind for action in actions] == ["balance_loss", "no-rollback"]
    assert "no checkpoint from before it (there: 6, 7)" in actions[1].reason
    assert run.state.router_lr_factor == 1.0
    assert run.kinds("COLLAPSED", checkpoints=(6, 7)) == []


def test_rollback_can_be_turned_off():
    run = Run(config=ControlConfig(supervisor=True, rollback=False))
    run.step("HEALTHY", times=5)
    assert run.kinds("COLLAPSED", checkpoints=(3,)) == ["balance_loss"]


def test_the_checkpoint_that_a_rollback_may_need_is_named():
    run = Run()
    run.step("HEALTHY", times=29)
    assert needed_checkpoint(CONFIG, (10, 20), run.state) == 20
    run.step("COLLAPSING", times=20)
    assert needed_checkpoint(CONFIG, (10, 20, 30, 40), run.state) == 20
    assert needed_checkpoint(CONFIG, (), run.state) == -1
    no_more = ControlConfig(supervisor=True, most_rollbacks=0)
    assert needed_checkpoint(no_more, (10, 20), run.state) == -1
    assert needed_checkpoint(ControlConfig(supervisor=True, rollback=False), (10,), run.state) == -1


def test_a_collapse_goes_back_before_the_first_alarm_of_any_layer():
    run = Run(num_layers=2)
    run.step("HEALTHY", "HEALTHY", times=29)
    run.step("COLLAPSING", "HEALTHY", times=10)
    run.step("COLLAPSING", "COLLAPSING", times=5)
    (back,) = run.step("COLLAPSING", "COLLAPSED", checkpoints=(20, 35))
    assert back.checkpoint_step == 20, "35 holds the beginning of layer 0's collapse"
    assert run.state.rollbacks_R3[0].tolist() == [30, 44, 20]


# ---- whole ----------------------------------------------------------------------------------------------


def test_a_stale_verdict_moves_nothing():
    run = Run()
    run.step("COLLAPSING", gains=(0.2, 0.3, 1.0))
    before = run.state.coefficient_L[0], run.state.healthy_L[0], run.state.since_L[0], run.state.event_L[0]
    assert run.kinds("STALE", times=30) == []
    after = run.state.coefficient_L[0], run.state.healthy_L[0], run.state.since_L[0], run.state.event_L[0]
    assert before == after


def test_layers_are_supervised_alike_whatever_their_order():
    rng = np.random.default_rng(0)
    names = ("HEALTHY", "SKEWED", "COLLAPSING", "COLLAPSED", "STALE")
    order = rng.permutation(6)
    one, other = Run(num_layers=6), Run(num_layers=6)
    for _ in range(60):
        states, excess_L = rng.choice(names, 6, p=(0.6, 0.2, 0.1, 0.05, 0.05)), rng.exponential(0.5, 6)
        one.step(*states, excess=excess_L, checkpoints=(3, 9))
        other.step(*states[order], excess=excess_L[order], checkpoints=(3, 9))
    for name, part in one.state._asdict().items():
        mine = getattr(other.state, name)
        np.testing.assert_array_equal(part[order] if name.endswith("_L") else part, mine, err_msg=name)


def test_a_copied_state_goes_on_bit_by_bit():
    run = Run(num_layers=2)
    run.step("COLLAPSING", "SKEWED", times=7, excess=[2.0, 0.7], gains=(0.2, 0.3, 1.0))
    kept = copy_state(run.state)
    first = run.step("HEALTHY", "COLLAPSED", times=20, excess=[0.1, 3.0], checkpoints=(5,))
    ended, run.state, run.now = run.state, kept, 7
    assert run.step("HEALTHY", "COLLAPSED", times=20, excess=[0.1, 3.0], checkpoints=(5,)) == first
    for mine, theirs in zip(run.state, ended, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("start", [0.5, 1e-6, -0.1, math.nan])
def test_a_start_out_of_the_bounds_is_refused(start):
    with pytest.raises(ValueError, match=r"out of 0\.0001 to 0\.1"):
        init_supervisor(CONFIG, 1, start)


def test_bad_signals_and_settings_are_refused():
    with pytest.raises(ValueError, match=r"1 verdicts and \(1,\) figures for 2 layers"):
        update_supervisor(CONFIG, signals(1, "HEALTHY"), init_supervisor(CONFIG, 2, 0.01))
    with pytest.raises(ValueError, match="beta2=1"):
        init_supervisor(CONFIG, 1, 0.01, beta2=1)
    with pytest.raises(ValueError, match="num_layers=0"):
        init_supervisor(CONFIG, 0, 0.01)
    with pytest.raises(ValueError, match="router_lr_factor=0"):
        init_supervisor(CONFIG, 1, 0.01, router_lr_factor=0)
