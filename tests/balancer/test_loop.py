"""The balancer loop: parts in their order, any of them off, and a state with which it goes on bit by bit."""

from dataclasses import replace

import numpy as np
import pytest

from balancer.bias import init_bias, law, update_bias
from balancer.bias_record import read_measurement
from balancer.control_config import ControlConfig
from balancer.loop import BalancerLoop
from balancer.monitor import CollapseMonitor

LAYERS, EXPERTS, TOP_K, TOKENS = 3, 8, 2, 4096


def samples(steps, seed=0, growth=0.0, without=(), every=5):
    """Counts of a load, in layer 1 more and more uneven by `growth` a step; swap counts at times."""
    rng = np.random.default_rng(seed)
    spread_LE = rng.normal(0, 0.05, (LAYERS, EXPERTS))
    spread_LE[1, 0] += 0.3
    for step in range(1, steps + 1):
        logits_LE = spread_LE.copy()
        logits_LE[1] *= np.exp(growth * step)
        share_LE = np.exp(logits_LE) / np.exp(logits_LE).sum(axis=1, keepdims=True)
        counts_LE = np.array([rng.multinomial(TOKENS * TOP_K, share_E) for share_E in share_LE])
        sample = {"step": step, "tokens_per_expert_LE": counts_LE, "num_tokens": TOKENS}
        sample["balance_loss_L"] = np.ones(LAYERS)
        sample["rows_to_rank_LP"] = counts_LE.reshape(LAYERS, 2, -1).sum(axis=2)
        if step % every == 1:
            sample |= {"swaps_LE": counts_LE // 8, "wide_swaps_LE": counts_LE // 4, "swap_delta": 0.01}
        yield {name: value for name, value in sample.items() if name not in without}


class Host:
    """A framework of one feed: loop.step() takes the next sample; what it is told is kept."""

    def __init__(self, config, feed, **start):
        self.feed, self.biases, self.sample = iter(feed), [], None
        sizes = {"num_layers": LAYERS, "num_experts": EXPERTS, "top_k": TOP_K}
        self.loop = BalancerLoop(config, self.read, self.actuate, **sizes, **start)

    def read(self):
        self.sample = next(self.feed)
        return self.sample

    def actuate(self, bias_LE, plan):
        assert plan is None
        self.biases.append(None if bias_LE is None else bias_LE.copy())
        return len(self.biases)

    def run(self, steps, **given):
        return [self.loop.step(**given) for _ in range(steps)]


ALL = ControlConfig(bias="sign", supervisor=True)


def assert_same(mine, theirs, where="state"):
    if isinstance(mine, dict):
        assert mine.keys() == theirs.keys(), where
        for name in mine:
            assert_same(mine[name], theirs[name], f"{where}.{name}")
    elif isinstance(mine, list | tuple):
        assert len(mine) == len(theirs), where
        for number, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            assert_same(one, other, f"{where}[{number}]")
    else:
        np.testing.assert_array_equal(mine, theirs, err_msg=where)


# ---- the parts ------------------------------------------------------------------------------------------


def test_the_bias_is_that_of_the_law_and_goes_to_the_actuator():
    host = Host(ALL, samples(6), balance_loss=0.01)
    reports = host.run(6)
    rule, measured = law("sign"), samples(6)
    state = init_bias(rule, LAYERS, EXPERTS, TOP_K)
    for report, sample, given_LE in zip(reports, measured, host.biases, strict=True):
        bias_LE, state = update_bias(rule, read_measurement(sample, TOP_K), state)
        np.testing.assert_array_equal(report.bias_LE, bias_LE)
        np.testing.assert_array_equal(given_LE, bias_LE)
        np.testing.assert_array_equal(host.loop.routed_LE if sample["step"] == 6 else bias_LE, bias_LE)
    assert [report.version for report in reports] == [1, 2, 3, 4, 5, 6]
    assert [report.step for report in reports] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "config",
    [
        ControlConfig(),
        ControlConfig(monitor=False),
        ControlConfig(bias="sign", monitor=False),
        ControlConfig(supervisor=True),
        ALL,
    ],
    ids=["monitor", "nothing", "bias", "monitor+supervisor", "all"],
)
def test_any_part_may_be_off(config):
    host = Host(config, samples(5), balance_loss=0.01)
    for report in host.run(5):
        assert (report.bias_LE is not None) == (config.bias != "off")
        assert len(report.verdicts) == (LAYERS if config.monitor else 0)
        assert (report.balance_loss_L is not None) == config.supervisor
        assert ("entropy" in report.figures) == config.monitor
    assert (host.biases[-1] is not None) == (config.bias != "off")


def test_a_collapse_is_seen_in_its_layer_and_the_supervisor_answers():
    host = Host(ALL, samples(400, growth=0.02), balance_loss=0.0)
    seen, actions = [], []
    for report in host.run(200, checkpoint_steps=(0,)):
        seen += [(verdict.layer, verdict.state) for verdict in report.alarms]
        actions += report.actions
    assert seen == [(1, "COLLAPSING"), (1, "COLLAPSED")]
    assert actions[0].kind == "balance_loss"
    assert actions[0].layers == (1,)
    assert report.balance_loss_L[1] == ALL.override_balance_loss
    assert report.balance_loss_L[0] == report.balance_loss_L[2] == 0.0
    (back,) = [action for action in actions if action.kind == "rollback"]
    assert (back.layers, back.checkpoint_step) == ((1,), 0)
    assert report.router_lr_factor == 0.5


def test_the_gain_is_raised_while_a_layer_collapses_and_only_there():
    config = ControlConfig(bias="identified", supervisor=True, rollback=False)
    host = Host(config, samples(400, growth=0.02), balance_loss=0.01)
    (raised,) = [action for report in host.run(130) for action in report.actions if action.kind == "gain"]
    assert raised.layers == (1,)
    (gain,) = raised.values
    np.testing.assert_array_equal(host.loop.bias.state.law.least_gain_L, [0.0, gain, 0.0])
    figures = host.run(1)[0].figures
    assert figures["reinforcement"][1] < gain < figures["most_gain"][1]
    resumed = Host(config, samples(1), balance_loss=0.01)
    resumed.loop.load_state_dict(host.loop.state_dict())
    assert_same(resumed.loop.state_dict(), host.loop.state_dict())


def test_the_monitor_sees_the_bias_that_the_sample_was_routed_with():
    config = ControlConfig(bias="sign", bias_step=0.5, bias_limit=0.1, delay_steps=2)
    reports = Host(config, samples(6)).run(6)
    saturated = [report.figures["bias_saturation"].max() > 0 for report in reports]
    assert saturated == [False, False, False, True, True, True], "step 1's bias acts in step 4"


def test_with_a_delay_the_router_gets_the_bias_of_that_many_steps_before():
    host = Host(ControlConfig(bias="sign", delay_steps=2, monitor=False), samples(6))
    routed = [host.loop.routed_LE]
    for _ in range(6):
        host.run(1)
        routed.append(host.loop.routed_LE)
    for step in range(2):
        assert not routed[step + 1].any()
    np.testing.assert_array_equal(routed[3], host.biases[0])
    np.testing.assert_array_equal(routed[6], host.biases[3])


def test_ranks_with_the_same_samples_agree_to_the_bit():
    one, other = (Host(ALL, samples(30, growth=0.02), balance_loss=0.01) for _ in range(2))
    one.run(30), other.run(30)
    assert_same(one.loop.state_dict(), other.loop.state_dict())


def test_an_object_is_as_good_a_sample_as_a_mapping():
    class Sample:
        def __init__(self, fields):
            vars(self).update(fields)

    one = Host(ALL, samples(4), balance_loss=0.01)
    other = Host(ALL, map(Sample, samples(4)), balance_loss=0.01)
    one.run(4), other.run(4)
    assert_same(one.loop.state_dict(), other.loop.state_dict())


def test_an_action_is_a_change_of_the_bias_and_its_age_is_that_of_the_last_one():
    feed = list(samples(30))
    for sample in feed[9:20]:
        sample["tokens_per_expert_LE"] = np.full((LAYERS, EXPERTS), TOKENS * TOP_K // EXPERTS)
    config = ControlConfig(bias="sign", stale_after_steps=5)
    host = Host(config, feed)
    reports = host.run(12)
    resumed = Host(config, host.feed)  # which remembers it
    resumed.loop.load_state_dict(host.loop.state_dict())
    reports += resumed.run(18)
    age_W = [int(report.figures["balancer_age_steps"].max()) for report in reports[1:]]
    assert age_W == [1] * 9 + list(range(2, 13)) + [1] * 9, "exact balance is left alone, noise is not"
    assert [(verdict.layer, verdict.state) for verdict in reports[14].alarms] == [
        (layer, "STALE") for layer in range(LAYERS)
    ]
    assert "the balancer last acted 6 steps ago" in reports[14].verdicts[0].reasons
    assert reports[21].verdicts[0].state == "HEALTHY"


def test_a_law_that_never_acts_is_stale_in_the_end_and_no_law_at_all_is_not():
    feed = samples(12, without=("swaps_LE", "wide_swaps_LE"))  # without which it does not know its gain
    reports = Host(ControlConfig(bias="identified", stale_after_steps=10), feed).run(12)
    assert not any(report.bias_LE.any() for report in reports)
    states = [report.verdicts[0].state for report in reports]
    assert states == ["HEALTHY"] * 11 + ["STALE"], "counted from the first sample, step 1"
    for report in Host(ControlConfig(stale_after_steps=10), samples(12)).run(12):
        assert report.verdicts[0].state == "HEALTHY"
        assert np.isnan(report.figures["balancer_age_steps"]).all()


# ---- state ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", ["sign", "identified", "smebu"])
def test_a_loop_that_is_resumed_goes_on_bit_by_bit(bias):
    config = ControlConfig(bias=bias, supervisor=True, dead_band=1.0, delay_steps=1)
    whole = Host(config, samples(60, growth=0.02), balance_loss=0.01)
    first = Host(config, samples(60, growth=0.02), balance_loss=0.01)
    whole.run(60)
    first.run(25)
    second = Host(config, first.feed, balance_loss=0.01)
    second.loop.load_state_dict(first.loop.state_dict())
    second.run(35)
    assert_same(second.loop.state_dict(), whole.loop.state_dict())
    np.testing.assert_array_equal(second.biases[-1], whole.biases[-1])


def test_a_saved_state_is_a_copy_of_plain_arrays():
    host = Host(ALL, samples(10), balance_loss=0.01)
    host.run(5)
    saved = host.loop.state_dict()
    kept = saved["bias"]["bias"]["bias_LE"].copy()
    host.run(5)
    np.testing.assert_array_equal(saved["bias"]["bias"]["bias_LE"], kept)

    def leaves(tree):
        if isinstance(tree, dict | list):
            for part in tree.values() if isinstance(tree, dict) else tree:
                yield from leaves(part)
        else:
            yield tree

    assert all(leaf is None or type(leaf) in (int, float, np.ndarray) for leaf in leaves(saved))


def test_a_state_of_another_loop_is_refused():
    host = Host(ALL, samples(3), balance_loss=0.01)
    host.run(3)
    saved = host.loop.state_dict()
    with pytest.raises(ValueError, match="differ in having a supervisor"):
        Host(ControlConfig(bias="sign"), samples(3)).loop.load_state_dict(saved)
    with pytest.raises(ValueError, match=r"bias\.law is not of the fields"):
        Host(ControlConfig(bias="smebu", supervisor=True), samples(3)).loop.load_state_dict(saved)
    with pytest.raises(ValueError, match=r"history_DLE is float64 \(1, 3, 8\)"):
        Host(ControlConfig(bias="sign", supervisor=True, delay_steps=1), samples(3)).loop.load_state_dict(
            saved
        )


def test_a_monitor_that_was_off_starts_anew():
    host = Host(ControlConfig(bias="sign", monitor=False), samples(9))
    host.run(4)
    resumed = Host(ControlConfig(bias="sign"), host.feed)
    resumed.loop.load_state_dict(host.loop.state_dict())
    assert len(resumed.run(5)[-1].verdicts) == LAYERS


@pytest.mark.parametrize("bias", ["sign", "identified"])
def test_after_a_rollback_the_bias_is_that_of_the_checkpoint_and_the_supervisor_remembers(bias):
    config = ControlConfig(bias=bias, supervisor=True)
    host = Host(config, samples(60, growth=0.05), balance_loss=0.01)
    host.run(10)
    saved = host.loop.state_dict()
    host.run(30)
    before = host.loop.state_dict()
    assert (before["bias"]["bias"]["bias_LE"] != saved["bias"]["bias"]["bias_LE"]).any()
    host.loop.rolled_back(saved)
    after = host.loop.state_dict()
    np.testing.assert_array_equal(after["bias"]["bias"]["bias_LE"], saved["bias"]["bias"]["bias_LE"])
    for name, part in saved["monitor"]["monitor"].items():
        now = after["monitor"]["monitor"][name]
        np.testing.assert_array_equal(now, part + 30 * (name in STEPS), err_msg=name)
    assert_same(after["supervisor"], before["supervisor"])
    assert_same(after["bias"]["bias"]["law"], before["bias"]["bias"]["law"])
    assert host.run(1)[0].step == 41, "steps go on"


# fields of the monitor's state that are steps of training
STEPS = ("step", "since_L", "block_step_L", "earlier_step_L", "charts.onset_L")


def test_going_back_further_than_the_age_limit_raises_no_alarm():
    config = ControlConfig(bias="sign", supervisor=True, stale_after_steps=20)
    host = Host(config, samples(60), balance_loss=0.01)
    host.run(10)
    saved = host.loop.state_dict()
    host.run(40)
    host.loop.rolled_back(saved)
    for report in host.run(2):
        assert [verdict.state for verdict in report.verdicts] == ["HEALTHY", "SKEWED", "HEALTHY"]
        assert not report.alarms
        assert (report.figures["gap_steps"] == 1).all()
        assert (report.figures["balancer_age_steps"] == 1).all()


def test_a_monitor_that_went_back_goes_on_as_if_no_time_had_passed():
    feed = [sample["tokens_per_expert_LE"] for sample in samples(160, growth=0.04)]
    monitor, other = (CollapseMonitor(LAYERS, EXPERTS, TOP_K) for _ in range(2))
    for step in range(60):
        monitor.update(step, feed[step])
    saved = monitor.state_dict()
    assert saved["charts.onset_L"].any(), "a collapse has begun"
    for step in range(60, 110):
        monitor.update(step, feed[step])
    monitor.go_back(saved)
    other.load_state_dict(saved)
    states = set()
    for step in range(60, 160):
        mine, theirs = monitor.update(step + 50, feed[step]), other.update(step, feed[step])
        for name, figure_L in monitor.figures().items():
            np.testing.assert_array_equal(figure_L, other.figures()[name], err_msg=name)
        assert [(v.state, v.since_step) for v in mine] == [(v.state, v.since_step + 50) for v in theirs]
        states |= {verdict.state for verdict in mine}
    assert "COLLAPSED" in states
    for name, part in other.state_dict().items():
        moved = part + 50 * (name in STEPS)
        np.testing.assert_array_equal(monitor.state_dict()[name], moved, err_msg=name)


# ---- what is refused ------------------------------------------------------------------------------------


def without_a_delta(sample):
    sample["swap_delta"] = 0.0


def with_a_bin_too_many(sample):
    sample["score_histogram_LEB"] = np.ones((LAYERS, EXPERTS, 8))
    sample["score_edges_X"] = np.linspace(0.0, 1.0, 8)


def with_edges_that_fall(sample):
    sample["margin_histogram_LEB"] = np.ones((LAYERS, EXPERTS, 2))
    sample["margin_edges_X"] = np.array([1.0, 0.0, -1.0])


def with_an_expert_too_many(sample):
    sample["tokens_per_expert_LE"] = np.pad(sample["tokens_per_expert_LE"], ((0, 0), (0, 1)))
    for name in ("swaps_LE", "wide_swaps_LE", "rows_to_rank_LP"):
        sample.pop(name, None)


def with_a_negative_loss(sample):
    sample["balance_loss_L"] = -np.ones(LAYERS)


ALONE = ControlConfig(bias="identified", monitor=False)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (without_a_delta, "step 6: swap_delta=0.0 must be above 0"),
        (with_a_bin_too_many, r"score_edges_X is \(8,\) and must be 9 increasing numbers, .* of the 8 bins"),
        (with_edges_that_fall, "margin_edges_X is .* must be 3 increasing numbers"),
        (with_an_expert_too_many, r"step 6: the counts are \(3, 9\), and the loop was made for \(3, 8\)"),
    ],
)
def test_a_sample_that_the_law_refuses_leaves_every_part_as_it_was(spoil, words):
    for config in (ALONE, replace(ALONE, monitor=True, supervisor=True)):
        assert_refused(config, spoil, words)


def test_a_sample_that_the_monitor_refuses_leaves_every_part_as_it_was():
    assert_refused(replace(ALONE, monitor=True), with_a_negative_loss, "aux_loss_L holds negative")


def assert_refused(config, spoil, words):
    """Refused in step 6 with these words; a sample that is right is taken in then, as if nothing had been."""
    feed, good = list(samples(10)), list(samples(10))
    spoil(feed[5])
    host, other = (Host(config, fed, balance_loss=0.01) for fed in ([*feed[:6], *good[5:]], good))
    host.run(5)
    before = host.loop.state_dict()
    with pytest.raises(ValueError, match=words):
        host.run(1)
    assert_same(host.loop.state_dict(), before)
    host.run(5), other.run(10)
    assert_same(host.loop.state_dict(), other.loop.state_dict())


def test_a_statistic_that_never_comes_is_named_with_how_to_get_it():
    host = Host(
        ControlConfig(bias="identified", monitor=False), samples(150, without=("swaps_LE", "wide_swaps_LE"))
    )
    host.run(99)
    before = host.loop.state_dict()
    with pytest.raises(ValueError, match=r"identified needs swaps \(swaps_LE, wide_swaps_LE.*swaps_every=20"):
        host.run(1)
    assert_same(host.loop.state_dict(), before)


def test_copies_that_are_not_those_of_the_tokens_are_refused_with_the_difference():
    feed = list(samples(1))
    feed[0]["tokens_per_expert_LE"][2, 3] += 5
    with pytest.raises(ValueError, match=r"layer 2: 8197 copies for 4096 tokens of top_k=2 are off by \+5"):
        Host(ALL, feed, balance_loss=0.01).run(1)


def test_a_step_that_does_not_increase_is_refused():
    feed = list(samples(2))
    host = Host(ControlConfig(bias="sign", monitor=False), [feed[1], feed[1]])
    host.run(1)
    with pytest.raises(ValueError, match="step 2 does not come after the last one, 2"):
        host.run(1)


def test_an_idle_pass_is_no_balance_and_moves_no_bias():
    feed = list(samples(12))
    for name in ("tokens_per_expert_LE", "rows_to_rank_LP"):
        feed[9][name] = np.zeros_like(feed[9][name])
    feed[9]["num_tokens"] = 0
    host = Host(ALL, feed, balance_loss=0.01)
    reports = host.run(12)
    np.testing.assert_array_equal(host.biases[9], host.biases[8])
    assert [verdict.state for verdict in reports[9].verdicts] == [v.state for v in reports[8].verdicts]
    np.testing.assert_array_equal(reports[9].balance_loss_L, reports[8].balance_loss_L)
    assert np.isnan(reports[9].figures["entropy"]).all()
    assert (host.biases[11] != host.biases[10]).any()
