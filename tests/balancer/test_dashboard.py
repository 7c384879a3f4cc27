"""What the dashboard writes is read back through TensorBoard's own reader; JSONL records survive crashes."""

import io
import json
import math
import re
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from balancer.dashboard import Dashboard, JsonlSink, load_heatmap, read_jsonl, training_layout
from balancer.synth import collapse_trace

ROOT = Path(__file__).resolve().parents[2]
SIZE_GUIDANCE = {"scalars": 0, "images": 0, "tensors": 0}


def _events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance=SIZE_GUIDANCE)
    accumulator.Reload()
    return accumulator


def _page_events(folder):
    """The reader behind TensorBoard's page, which treats restarts in its own way."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    accumulator.Reload()
    return accumulator


def _series(folder, tag):
    return [(event.step, event.value) for event in _events(folder).Scalars(tag)]


def _pixels(png: bytes) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(png)))


# --- TensorBoard ---


def test_scalars_come_back_with_their_steps(tmp_path):
    with Dashboard(tmp_path / "tb") as board:
        board.scalars(3, {"loss/total": 1.5, "balance/layer_00": np.float32(0.25)})
        board.scalars(np.int64(7), {"loss/total": 2, "balance/layer_00": math.nan})
    assert _series(tmp_path / "tb", "loss/total") == [(3, 1.5), (7, 2.0)]
    (first, value), (second, missing) = _series(tmp_path / "tb", "balance/layer_00")
    assert (first, value, second) == (3, 0.25, 7)
    assert math.isnan(missing)


def test_flush_brings_events_to_the_file_while_it_is_open(tmp_path):
    board = Dashboard(tmp_path / "tb")
    board.scalars(1, {"loss/total": 1.0})
    board.flush()
    assert _series(tmp_path / "tb", "loss/total") == [(1, 1.0)]
    board.close()
    board.close()


def test_an_image_comes_back_pixel_for_pixel(tmp_path):
    rgb = np.random.default_rng(0).integers(0, 256, (5, 9, 3), dtype=np.uint8)
    with Dashboard(tmp_path / "tb") as board:
        board.image(4, "balance/load", rgb)
    (event,) = _events(tmp_path / "tb").Images("balance/load")
    assert (event.step, event.height, event.width) == (4, 5, 9)
    assert (_pixels(event.encoded_image_string) == rgb).all()


def test_text_comes_back_and_belongs_to_the_text_page(tmp_path):
    from tensorboard.util import tensor_util

    with Dashboard(tmp_path / "tb") as board:
        board.text(2, "run/config", "**E** = 8")
    events = _events(tmp_path / "tb")
    (event,) = events.Tensors("run/config")
    assert event.step == 2
    assert tensor_util.make_ndarray(event.tensor_proto).item() == b"**E** = 8"
    assert "run/config" in events.PluginTagToContent("text")


def test_layout_comes_back_and_belongs_to_the_custom_scalars_page(tmp_path):
    from tensorboard.plugins.custom_scalar import layout_pb2, metadata
    from tensorboard.util import tensor_util

    with Dashboard(tmp_path / "tb") as board:
        board.layout(training_layout())
    events = _events(tmp_path / "tb")
    (event,) = events.Tensors(metadata.CONFIG_SUMMARY_TAG)
    layout = layout_pb2.Layout.FromString(tensor_util.make_ndarray(event.tensor_proto).item())
    read = {c.title: {chart.title: list(chart.multiline.tag) for chart in c.chart} for c in layout.category}
    assert read == training_layout()
    assert metadata.CONFIG_SUMMARY_TAG in events.PluginTagToContent(metadata.PLUGIN_NAME)


def test_layout_draws_every_tag_of_a_training_run_and_no_other():
    tags = [f"loss/{name}" for name in ("total", "ce", "balance", "z")] + [
        "bpb/valid/prose",
        "bpb/valid/c_code",
    ]
    tags += [f"balance/{name}" for name in ("balancedness_mean", "balancedness_sum", "max_violation")]
    tags += ["balance/entropy", "balance/dead_experts", "balance/layer_00", "balance/layer_59"]
    phases = ("data", "route", "counts", "dispatch", "experts", "combine", "forward", "backward", "optimizer")
    tags += [f"time_ms/{name}" for name in (*phases, "control", "step")]
    tags += ["control/balance_loss_mean", "control/gain_mean", "collapse/state_worst", "collapse/excess_most"]
    tags += ["speed/tokens_per_s", "optim/lr", "optim/grad_norm"]
    layout = training_layout()
    assert list(layout) == ["Balance", "Control", "Collapse", "Loss", "Speed"]
    patterns = [p for charts in layout.values() for chart in charts.values() for p in chart]
    for tag in tags:
        assert sum(bool(re.match(p, tag)) for p in patterns) == 1, tag
    for tag in ("balance/load", "loss/total_other", "time_ms/", "bpb/valid/"):
        assert not any(re.match(p, tag) for p in patterns), tag


@pytest.mark.parametrize("times", [1, 2])
def test_resume_purges_the_steps_that_are_written_again(tmp_path, times):
    with Dashboard(tmp_path / "tb") as board:
        for step in range(6):
            board.scalars(step, {"loss/total": step})
            board.scalars(step, {"only/before": step})
    for attempt in range(times):
        with Dashboard(tmp_path / "tb", purge_step=4) as board:
            board.scalars(5, {"loss/total": 100 + attempt})
    expected = [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)]
    assert _series(tmp_path / "tb", "loss/total") == [*expected, (5, 99.0 + times)]
    # a tag that the resumed run has not written yet must not keep steps of the dead branch
    assert _series(tmp_path / "tb", "only/before") == expected
    page = _page_events(tmp_path / "tb")
    assert [event.step for event in page.Tensors("only/before")] == [0, 1, 2, 3]
    assert [event.step for event in page.Tensors("loss/total")] == [0, 1, 2, 3, 5]


def test_events_or_a_file_in_the_way_are_refused(tmp_path):
    Dashboard(tmp_path / "tb").close()
    with pytest.raises(ValueError, match="purge_step=STEP"):
        Dashboard(tmp_path / "tb")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="in the way"):
        Dashboard(tmp_path / "file")
    with pytest.raises(ValueError, match="purge_step=-1"):
        Dashboard(tmp_path / "tb", purge_step=-1)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda b: b.scalars(-1, {"a": 1.0}), "step=-1"),
        (lambda b: b.scalars(1, {" ": 1.0}), "empty"),
        (lambda b: b.scalars(1, {"a": "much"}), "scalar 'a' is 'much'"),
        (lambda b: b.image(1, "a", np.zeros((4, 4, 3))), "float64"),
        (lambda b: b.image(1, "a", np.zeros((4, 4), dtype=np.uint8)), r"\(4, 4\)"),
        (lambda b: b.image(1, "a", np.zeros((0, 4, 3), dtype=np.uint8)), r"\(0, 4, 3\)"),
        (lambda b: b.layout({"A": {"chart": ["("]}}), "chart 'chart'.*no regular expression"),
    ],
)
def test_bad_input_is_refused_with_its_name(tmp_path, write, message):
    with Dashboard(tmp_path / "tb") as board, pytest.raises(ValueError, match=message):
        write(board)


def test_60_layers_of_256_experts_are_summarised_without_tags_per_expert(tmp_path):
    from balancer.metrics import balancedness, mean_balancedness

    counts = collapse_trace(num_samples=3, num_layers=60, num_experts=256, copies=2**20)
    steps = 20
    with Dashboard(tmp_path / "tb") as board:
        for step in range(steps):
            load = counts.tokens_per_expert_WLE[step % 3]
            layers = {f"balance/layer_{i:02d}": float(b) for i, b in enumerate(balancedness(load))}
            board.scalars(step, {"balance/balancedness_mean": float(mean_balancedness(load)), **layers})
        board.image(0, "balance/load", load_heatmap(counts.tokens_per_expert_WLE[2]))
    events = _events(tmp_path / "tb")
    tags = events.Tags()
    assert len(tags["scalars"]) == 61  # not 15360
    assert tags["images"] == ["balance/load"]
    assert len(events.Scalars("balance/layer_59")) == steps
    (file,) = (tmp_path / "tb").iterdir()
    # 61 values of about 30 bytes a step (a tag for each expert: 500 kB a step), 50 kB the picture
    assert file.stat().st_size < steps * 3000 + 100_000


def test_the_dashboard_works_without_torch(tmp_path):
    code = (
        "import sys, numpy as np\n"
        "from balancer import Dashboard, load_heatmap, training_layout\n"
        "board = Dashboard(sys.argv[1])\n"
        "board.layout(training_layout()); board.text(0, 'a', 'b'); board.scalars(0, {'a': 1})\n"
        "board.image(0, 'c', load_heatmap(np.ones((2, 4)))); board.close()\n"
        "print([m for m in ('torch', 'tensorflow', 'matplotlib.pyplot', 'numba') if m in sys.modules])\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "tb")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.stdout.strip() == "[]", run.stderr


# --- heat map ---


@pytest.mark.parametrize("shape", [(1, 1), (2, 4), (4, 8), (24, 32), (60, 256), (3, 100)])
def test_heatmap_has_a_readable_size_for_any_model(shape):
    image = load_heatmap(np.ones(shape, dtype=np.int64))
    height, width, channels = image.shape
    assert image.dtype == np.uint8
    assert channels == 3
    assert 200 <= height <= 700
    assert 400 <= width <= 1300


def _cells(image: np.ndarray, num_layers: int, num_experts: int) -> np.ndarray:
    """Colours at the middle of every cell; the cells are the widest block of colour that touches no white."""
    inner = (image != 255).any(axis=-1)
    rows, columns = np.flatnonzero(inner.mean(axis=1) > 0.6), np.flatnonzero(inner.mean(axis=0) > 0.4)
    top, bottom, left = rows[0], rows[-1] + 1, columns[0]
    right = left + int(np.flatnonzero(np.diff(columns) > 1)[0]) + 1  # the colour scale stands apart
    y = top + (np.arange(num_layers) * 2 + 1) * (bottom - top) // (2 * num_layers)
    x = left + (np.arange(num_experts) * 2 + 1) * (right - left) // (2 * num_experts)
    return image[np.ix_(y, x)].astype(int)


def test_heatmap_shows_the_right_cell_bright_dark_and_fair():
    load = np.full((3, 5), 100)
    load[1] = [0, 700, 100, 100, 100]  # fair share 200: expert 0 dead, expert 1 hot
    cells = _cells(load_heatmap(load), 3, 5)
    fair = cells[0, 0]
    assert (cells[0] == fair).all()
    assert (cells[2] == fair).all()
    brightness = cells.sum(axis=-1)
    assert brightness[1].argmin() == 0
    assert brightness[1].argmax() == 1
    assert brightness[1, 0] < brightness[1, 2] < fair.sum() < brightness[1, 1]


def test_heatmap_scale_runs_from_hot_to_cold_with_the_fair_share_in_its_middle():
    from matplotlib import colormaps

    image = load_heatmap(np.full((4, 7), 100)).astype(int)
    inner = (image != 255).any(axis=-1)
    rows, columns = np.flatnonzero(inner.mean(axis=1) > 0.6), np.flatnonzero(inner.mean(axis=0) > 0.4)
    scale = image[rows, columns[-1] - 3]  # the last wide block of colour
    ends = [np.array(colormaps["cividis"](level, bytes=True)[:3]).astype(int) for level in (1.0, 0.5, 0.0)]
    assert (scale[0] == ends[0]).all()
    assert (scale[-1] == ends[2]).all()
    assert (_cells(image, 4, 7) == ends[1]).all()
    assert np.abs(scale[len(scale) // 2] - ends[1]).max() <= 2  # a step of the ramp beside the middle


def test_heatmap_colours_depend_on_shares_only_and_not_on_the_step():
    load = np.random.default_rng(1).integers(1, 50, (4, 8))
    assert (load_heatmap(load) == load_heatmap(load * 1000)).all()
    other = load.copy()
    other[0] = [10000, 1, 1, 1, 1, 1, 1, 1]  # another layer's hot expert leaves the colours of this one
    assert (_cells(load_heatmap(load), 4, 8)[1:] == _cells(load_heatmap(other), 4, 8)[1:]).all()


def test_heatmap_shows_a_layer_without_load_in_white():
    load = np.ones((5, 6))
    load[2] = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        image = load_heatmap(load)
    assert (_cells(image, 5, 6)[2] == 255).all()


def test_heatmap_title_tells_experts_from_ranks():
    load = np.array([[3, 1, 1, 3]])
    assert not (load_heatmap(load) == load_heatmap(load, num_ranks=2)).all()


@pytest.mark.parametrize(
    ("load", "options", "message"),
    [
        (np.ones(4), {}, r"expected \[L, E\]"),
        (np.ones((2, 3, 4)), {}, r"expected \[L, E\]"),
        (-np.ones((2, 4)), {}, "0 or more"),
        (np.ones((2, 4), dtype=int), {"num_ranks": 3}, "use 2 or 4"),
    ],
)
def test_heatmap_refuses_bad_loads(load, options, message):
    with pytest.raises(ValueError, match=message):
        load_heatmap(load, **options)


def test_heatmap_of_a_large_model_is_quick():
    load = np.random.default_rng(0).integers(0, 100, (60, 256))
    load_heatmap(load)  # imports matplotlib
    spent = []
    for _ in range(5):
        start = time.process_time()  # of this process: others may use the cores
        load_heatmap(load)
        spent.append(time.process_time() - start)
    assert min(spent) < 0.08


# --- JSONL ---


def _fill(path, steps, **options):
    with JsonlSink(path, **options) as sink:
        for step in steps:
            sink.write({"step": step, "loss": step / 2})


def _steps(path):
    return [record["step"] for record in read_jsonl(path)]


def test_records_come_back_and_are_there_at_once(tmp_path):
    sink = JsonlSink(tmp_path / "m.jsonl")
    sink.write({"step": 1, "loss": 0.5, "who": "a\nb", "layers": [1, {"x": None}]})
    assert read_jsonl(tmp_path / "m.jsonl") == [
        {"step": 1, "loss": 0.5, "who": "a\nb", "layers": [1, {"x": None}]}
    ]
    sink.flush()
    sink.close()
    sink.close()
    with pytest.raises(ValueError, match="closed"):
        sink.write({"step": 2})


def test_nan_and_infinity_become_null_and_numpy_becomes_plain(tmp_path):
    with JsonlSink(tmp_path / "m.jsonl") as sink:
        sink.write({"step": np.int32(3), "a": math.nan, "b": [1.0, -math.inf], "c": np.array([1, 2])})
        sink.write({"step": 4, "d": np.float32("nan"), "e": np.array([np.nan, 0.5]), "f": np.bool_(True)})
    lines = (tmp_path / "m.jsonl").read_text().splitlines()
    assert json.loads(lines[0]) == {"step": 3, "a": None, "b": [1.0, None], "c": [1, 2]}
    assert json.loads(lines[1]) == {"step": 4, "d": None, "e": [None, 0.5], "f": True}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"loss": 1}, "step=None"),
        ({"step": 1.5}, "step=1.5"),
        ({"step": -1}, "step=-1"),
        ({"step": True}, "step=True"),
        ({"step": 1, "a": {"b": [0, {1, 2}]}}, r"record\['a'\]\['b'\]\[1\] is set"),
        ({"step": 1, "a": {2: 3}}, r"record\['a'\]: key 2 is int"),
        ({"step": 1, "a": np.array([object()])}, "object"),
    ],
)
def test_a_bad_record_is_refused_and_nothing_is_written(tmp_path, record, message):
    with JsonlSink(tmp_path / "m.jsonl") as sink:
        sink.write({"step": 0})
        with pytest.raises(ValueError, match=message):
            sink.write(record)
        sink.write({"step": 2})
    assert _steps(tmp_path / "m.jsonl") == [0, 2]


@pytest.mark.parametrize("torn", [b"", b'{"step": 9, "los', b'{"step": 2}'])
def test_resume_cuts_later_steps_and_a_torn_line(tmp_path, torn):
    path = tmp_path / "m.jsonl"
    _fill(path, [1, 2, 3, 2, 5])
    with open(path, "ab") as file:
        file.write(torn)
    _fill(path, [7], resume_after_step=2)
    assert _steps(path) == [1, 2, 2, 7]
    assert [p.name for p in tmp_path.iterdir()] == ["m.jsonl"]


def test_reading_drops_a_torn_last_line_and_says_so(tmp_path):
    _fill(tmp_path / "m.jsonl", [1, 2])
    with open(tmp_path / "m.jsonl", "ab") as file:
        file.write(b'{"st')
    with pytest.warns(UserWarning, match="4 bytes dropped"):
        assert _steps(tmp_path / "m.jsonl") == [1, 2]


def test_an_existing_file_is_refused_and_a_missing_one_cannot_be_resumed(tmp_path):
    _fill(tmp_path / "m.jsonl", [1])
    with pytest.raises(ValueError, match="resume_after_step=STEP"):
        JsonlSink(tmp_path / "m.jsonl")
    with pytest.raises(ValueError, match="no file to continue"):
        JsonlSink(tmp_path / "absent.jsonl", resume_after_step=3)
    with pytest.raises(ValueError, match="no such file"):
        read_jsonl(tmp_path / "absent.jsonl")
    assert _steps(tmp_path / "m.jsonl") == [1]


@pytest.mark.parametrize("line", [b"{", b"[1]", b'{"loss": 1}', b'{"step": "1"}', b"\xff", b""])
def test_a_broken_line_in_the_middle_is_named_and_never_cut(tmp_path, line):
    path = tmp_path / "m.jsonl"
    data = b'{"step": 1}\n' + line + b'\n{"step": 2}\n'
    path.write_bytes(data)
    for attempt in (lambda: read_jsonl(path), lambda: JsonlSink(path, resume_after_step=1)):
        with pytest.raises(ValueError, match=r"m\.jsonl, line 2"):
            attempt()
    assert path.read_bytes() == data
    assert [p.name for p in tmp_path.iterdir()] == ["m.jsonl"]


def test_a_failed_write_leaves_whole_lines_only(tmp_path):
    from balancer.files import append_whole

    with open(tmp_path / "f", "ab", buffering=0) as file:
        append_whole(file, b"whole\n")

        class FullDisk:
            fileno = file.fileno
            calls = 0

            def write(self, data):
                self.calls += 1
                if self.calls > 1:
                    raise OSError(28, "No space left on device")
                return file.write(data[:3])

        with pytest.raises(OSError, match="No space"):
            append_whole(FullDisk(), b"torn line\n")
        append_whole(file, b"next\n")
    assert (tmp_path / "f").read_bytes() == b"whole\nnext\n"
