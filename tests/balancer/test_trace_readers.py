"""One suite over every reader of load traces: what was written comes back exactly, damage is named."""

import json
import re
import tracemalloc
import warnings
import zipfile

import numpy as np
import pytest

from balancer.trace import load_trace
from balancer.trace_formats import FORMATS

WRITERS = [
    *("folder", "npz", "json", "json-list", "json-lines", "csv", "csv-long", "exp-counts", "vllm"),
    *("vllm-layers", "vllm-physical", "megatron", "sglang-json", "sglang-pt-stat", "sglang-pt-passes"),
]
TEXT = [name for name in WRITERS if name not in ("folder", "npz") and not name.startswith("sglang-pt")]
# SGLang's logical counts say no step
COUNTED = ("sglang-json", "sglang-pt-stat")


def _form(name: str) -> str:
    return max((form for form in FORMATS if name.startswith(form)), key=len)


def _load(name, path, counts):
    """Load without a warning; Megatron's router traces do not say how many experts there are."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load_trace(path, num_experts=counts.shape[2] if name == "megatron" else None)


def _check(trace, name, counts, steps):
    assert trace.tokens_per_expert_WLE.dtype == np.int64
    assert trace.tokens_per_expert_WLE.tolist() == counts.tolist()
    assert trace.steps_W.tolist() == (list(range(len(steps))) if name in COUNTED else steps)
    assert trace.meta.get("source") == (None if name in ("folder", "npz") else _form(name))


@pytest.mark.parametrize("name", WRITERS)
def test_every_form_comes_back_exactly(name, trace_writers, tmp_path):
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 900, size=(4, 3, 5))
    counts[1, 2, 0], counts[3, 0, 4] = 0, 40_000
    if name != "megatron":  # it lists every token
        counts[2, 1, 3] = 2**40
    steps = [1, 11, 31, 2**40]  # one sample is missing: kept as it is
    _check(_load(name, trace_writers[name](tmp_path, counts, steps), counts), name, counts, steps)


@pytest.mark.parametrize("shape", [(1, 3, 4), (3, 1, 4), (3, 2, 1), (1, 1, 1)])
@pytest.mark.parametrize("name", WRITERS)
def test_one_sample_one_layer_one_expert(name, shape, trace_writers, tmp_path):
    counts = np.arange(1, 1 + np.prod(shape)).reshape(shape)
    steps = [5, 6, 9][: shape[0]]
    _check(_load(name, trace_writers[name](tmp_path, counts, steps), counts), name, counts, steps)


@pytest.mark.parametrize("name", WRITERS)
def test_the_form_is_told_without_the_ending_and_may_be_given(name, trace_writers, tmp_path):
    counts, steps = np.arange(1, 9).reshape(2, 2, 2), [0, 1]
    path = trace_writers[name](tmp_path, counts, steps)
    path = path.rename(tmp_path / "plain")
    _check(_load(name, path, counts), name, counts, steps)
    assert load_trace(path, format=_form(name), num_experts=2).steps_W.tolist() == steps


@pytest.mark.parametrize("name", WRITERS)
def test_another_form_is_refused_by_name_and_the_valid_ones_are_listed(name, trace_writers, tmp_path):
    path = trace_writers[name](tmp_path, np.arange(1, 9).reshape(2, 2, 2), [0, 1])
    with pytest.raises(ValueError, match=r"format='sql' is unknown; use one of folder, npz, sglang-pt, "):
        load_trace(path, format="sql")
    for form in set(FORMATS) - {_form(name)}:
        if {form, _form(name)} != {"json", "vllm"}:  # one reads the lines of the other: they are the same
            with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
                load_trace(path, format=form)


@pytest.mark.parametrize("name", WRITERS[2:])  # the meta of the first two is what the writer put there
def test_constant_copies_get_into_the_meta_and_others_do_not(name, trace_writers, tmp_path):
    counts = np.array([[[3, 1], [2, 2]], [[4, 0], [1, 3]]])
    assert _load(name, trace_writers[name](tmp_path, counts, [1, 2]), counts).meta["copies_per_step"] == 4
    counts[1, 1, 0] += 1
    trace = _load(name, trace_writers[name](tmp_path, counts, [1, 2]), counts)
    assert "copies_per_step" not in trace.meta


@pytest.mark.parametrize("name", [name for name in WRITERS if name != "folder"])
def test_a_truncated_file_is_told(name, trace_writers, tmp_path):
    counts = np.arange(101, 165).reshape(4, 4, 4)
    path = trace_writers[name](tmp_path, counts, [1, 2, 3, 4])
    data = path.read_bytes().rstrip()
    for keep in (0, 1, len(data) // 3, len(data) // 2, len(data) - 2, len(data) - 1):
        path.write_bytes(data[:keep])
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                trace = load_trace(path)
            except ValueError as error:
                trace, text = None, str(error)
        if trace is None:
            assert str(path) in text
        elif not any("may have been cut" in str(w.message) for w in told):  # cut between two samples
            assert trace.tokens_per_expert_WLE.tolist() == counts[: len(trace.steps_W)].tolist()


@pytest.mark.parametrize(
    "bad", ["-3", "1.5", "1e300", "1e17", "NaN", "true", "9" * 19, "9" * 5000, '"7"', "null", ""]
)
@pytest.mark.parametrize("name", [name for name in TEXT if name != "megatron"])
def test_a_count_that_is_none_is_named_with_its_place(name, bad, trace_writers, tmp_path):
    counts = np.arange(101, 113).reshape(3, 2, 2)
    counts[1, 1, 1] = 777
    path = trace_writers[name](tmp_path, counts, [1, 2, 3])
    path.write_text(re.sub(r"\b777\b", bad, path.read_text(), count=1))
    with pytest.raises(ValueError, match=re.escape(str(path))) as error:
        load_trace(path)
    assert len(str(error.value)) < len(str(path)) + 300
    assert "record 1" in str(error.value) or "line" in str(error.value) or "json" in name


@pytest.mark.parametrize("name", ["json", "json-list", "json-lines", "csv", "csv-long"])
@pytest.mark.parametrize("whole", ["777.0", "7.77e2"])
def test_plain_files_may_write_whole_numbers_as_floats(name, whole, trace_writers, tmp_path):
    counts = np.arange(1, 9).reshape(2, 2, 2)
    counts[1, 0, 1] = 777
    path = trace_writers[name](tmp_path, counts, [1, 2])
    path.write_text(re.sub(r"\b777\b", whole, path.read_text()))
    _check(_load(name, path, counts), name, counts, [1, 2])


@pytest.mark.parametrize(
    "name", ["json-lines", "csv", "csv-long", "exp-counts", "vllm", "vllm-layers", "megatron"]
)
def test_records_twice_missing_or_out_of_order_are_named(name, trace_writers, tmp_path):
    path = trace_writers[name](tmp_path, np.arange(1, 19).reshape(3, 2, 3), [1, 4, 6])
    lines = path.read_text().splitlines()
    for changed, message in (
        (lines + [lines[-1]], "second time"),
        (lines + [lines[1]], "step [14] does not come after step 6"),
        (lines[:-1] if name not in ("json-lines", "vllm") else [], "missing|no record|cannot be read"),
    ):
        path.write_text("\n".join(changed) + "\n")
        with pytest.raises(ValueError, match=message) as error:
            load_trace(path)
        assert str(path) in str(error.value)


@pytest.mark.parametrize("name", [name for name in TEXT if name != "megatron"])  # no rows of experts there
def test_a_row_of_another_length_is_named(name, trace_writers, tmp_path):
    path = trace_writers[name](tmp_path, np.full((2, 2, 3), 555), [1, 2])
    text = path.read_text()
    # the last count; of the long CSV its whole line
    last = list(re.finditer(r"2,1,1,555\n" if name == "csv-long" else r",\s*555", text))[-1]
    path.write_text(text[: last.start()] + text[last.end() :])
    with pytest.raises(ValueError, match=re.escape(str(path))):
        load_trace(path)


@pytest.mark.parametrize("name", ["json-list", "json-lines", "vllm", "vllm-layers", "json"])
def test_sums_that_are_not_what_the_file_says_are_told_by_how_much(name, trace_writers, tmp_path):
    counts = np.full((2, 2, 4), 8)
    path = trace_writers[name](tmp_path, counts, [1, 2])
    said = '"num_tokens": 16, "top_k": 2, '
    path.write_text(re.sub(r'"(step|iteration|steps)":', lambda m: said + m.group(0), path.read_text()))
    assert load_trace(path).meta["copies_per_step"] == 32
    text = path.read_text()
    path.write_text(text[: text.rindex("8")] + "11" + text[text.rindex("8") + 1 :])
    with pytest.raises(
        ValueError, match=r"step 2, layer [01]: the experts hold 35 copies, 3 too many"
    ) as error:
        load_trace(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("name", TEXT)
def test_what_cannot_be_read_as_text_or_is_nested_deep_is_refused(name, trace_writers, tmp_path):
    path = trace_writers[name](tmp_path, np.arange(1, 9).reshape(2, 2, 2), [1, 2])
    for data in (b"\xff\xfe" + path.read_bytes(), b"[" * 200_000, b'{"a":' * 200_000, b"", b"\n\n"):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=re.escape(str(path))):
            load_trace(path, format=_form(name))


def test_the_number_of_experts_is_checked_in_every_form(trace_writers, tmp_path):
    path = trace_writers["csv"](tmp_path, np.arange(1, 9).reshape(2, 2, 2), [1, 2])
    with pytest.raises(ValueError, match="holds 2 experts, num_experts=3 was given"):
        load_trace(path, num_experts=3)
    with pytest.raises(ValueError, match="assume_map_constant is for sglang-pt dumps; the form here is csv"):
        load_trace(path, assume_map_constant=True)


def test_a_run_folder_means_its_loads(trace_writers, tmp_path):
    counts = np.arange(1, 9).reshape(2, 2, 2)
    trace_writers["folder"](tmp_path, counts, [1, 2])
    _check(load_trace(tmp_path), "folder", counts, [1, 2])


# --- npz ---


def test_an_npz_whose_header_claims_more_than_it_holds_is_refused_before_it_is_allocated(tmp_path):
    path = tmp_path / "t.npz"
    header = {"descr": "<i8", "fortran_order": False, "shape": (2**20, 32, 32)}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("counts.npy", "w") as file:
            np.lib.format.write_array_header_1_0(file, header)
    tracemalloc.start()
    with pytest.raises(
        ValueError, match="field counts: its header claims 8589934592 bytes, the archive holds 0"
    ):
        load_trace(path)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_a_zip_bomb_is_refused_before_it_is_unpacked(tmp_path):
    path = tmp_path / "t.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("counts.npy", "w") as file:
            header = {"descr": "<i8", "fortran_order": False, "shape": (2**16, 32, 17)}
            np.lib.format.write_array_header_1_0(file, header)
            for _ in range(17):
                file.write(bytes(2**24))
    assert path.stat().st_size < 2**20
    tracemalloc.start()
    with pytest.raises(ValueError, match="zip bomb"):
        load_trace(path)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


# --- Megatron ---


def _router(**change) -> str:
    record = {"step": 3, "stage": 0, "block": 1, "layer": 2, "rank": 0, "num_tokens": 2, "topk": 2}
    return json.dumps({**record, "top_indices": [[0, 3], [3, 1]], **change}) + "\n"


def test_router_traces_sum_their_ranks_and_name_their_layers(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(_router(rank=1, stage=1) + _router() + _router(rank=1) + _router(rank=2, stage=1))
    with pytest.warns(UserWarning, match="4 taken, the largest id . 1.*num_experts"):
        trace = load_trace(path)
    assert trace.tokens_per_expert_WLE.tolist() == [[[2, 2, 0, 4], [2, 2, 0, 4]]]
    assert trace.meta["layers"] == [[0, 1, 2], [1, 1, 2]]
    assert (trace.meta["ranks_summed"], trace.meta["copies_per_step"]) == (2, 8)
    assert load_trace(path, num_experts=6).tokens_per_expert_WLE.shape == (1, 2, 6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_tokens": 3}, "expected num_tokens=3 lists"),
        ({"topk": 3}, r"top_indices\[0\] is a list of 2, expected topk=3 experts"),
        ({"top_indices": [[0, 3], [3, 8]]}, r"top_indices\[1\]\[1\] is 8, expected an expert from 0 to 7"),
        ({"top_indices": [[0, 3], [3, -1]]}, r"top_indices\[1\]\[1\] is -1"),
        ({"top_indices": [[0, 3], [3, True]]}, r"top_indices\[1\]\[1\] is True"),
        ({"top_indices": [[0, 3], [3, 3]]}, r"top_indices\[1\] names an expert twice"),
        ({"rank": 1}, "second time"),
        ({"rank": None}, "rank is None"),
        ({"stage": [1]}, "stage is a list of 1"),
        ({"step": 2}, "step 2 does not come after step 3"),
        ({"layer": 7}, r"layer 7: a record is missing: it has 1 ranks, another layer 2"),
        ({"step": 4}, r"step 4, .*: a record is missing: it has ranks \[2\], step 3 \[0, 1\]"),
    ],
)
def test_a_wrong_router_record_names_line_and_field(change, message, tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(_router() + _router(rank=1) + _router(**{"rank": 2, **change}))
    with pytest.raises(ValueError, match=message) as error:
        load_trace(path, num_experts=8)
    assert str(path) in str(error.value)


def test_a_damaged_expert_id_does_not_allocate(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("".join(_router(step=s, top_indices=[[0, 3], [65_535, 1]]) for s in range(40)))
    with pytest.raises(ValueError, match=r"65536 experts in 40 steps and 1 layers are more than so small"):
        load_trace(path)
    path.write_text(_router(top_indices=[[0, 3], [65_536, 1]]))
    with pytest.raises(ValueError, match=r"top_indices\[1\]\[0\] is 65536"):
        load_trace(path)


# --- exp_counts ---


@pytest.mark.parametrize(
    "line",
    [
        "step 12 layer 3 exp_counts: tensor([3, 1])",
        "[INFO] global_step=12, moe_layer=3, exp_counts=[3, 1]",
        "iteration: 12 layers.3.moe exp_counts tensor([ 3,\n         1], device='cuda:0') rest",
        "{'step': 12} iter 12 moe_layer_id: 3 'exp_counts': [3,1]",
    ],
)
def test_the_ways_in_which_exp_counts_are_printed(line, tmp_path):
    path = tmp_path / "t.log"
    path.write_text(f"start\n{line}\nloss 2.0 [1]\n")
    trace = load_trace(path)
    assert trace.tokens_per_expert_WLE.tolist() == [[[3, 1]]]
    assert trace.steps_W.tolist() == [12]
    assert trace.meta["lines_skipped"] == 2
    assert trace.meta["layers"] == [3]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("layer 3 exp_counts: [3, 1]", "line 2: no step numbers in the line; expected words like: step 12"),
        ("step 1 exp_counts: [3, 1]", "line 2: no layer numbers"),
        ("step 1 step 2 layer 3 exp_counts: [3, 1]", "line 2: 2 step numbers"),
        ("step 1 layer 3 exp_counts: none", "line 2: exp_counts without its numbers"),
        ("step 1 layer 3 exp_counts: [3, 1", "line 2: the bracket of exp_counts is never closed"),
        ("step 1 layer 3 exp_counts: tensor([3, ..., 1])", r"line 2: torch left counts out"),
        ("step 1 layer 3 exp_counts: [3, one]", r"line 2: exp_counts\[1\] is 'one'"),
        ("step 1 layer 3 exp_counts: []", r"line 2: exp_counts\[0\] is ''"),
    ],
)
def test_exp_counts_outside_the_grammar_name_the_line(line, message, tmp_path):
    path = tmp_path / "t.log"
    path.write_text(f"start\n{line}\nend\n")
    with pytest.raises(ValueError, match=message) as error:
        load_trace(path)
    assert str(path) in str(error.value)


# --- vLLM, SGLang's JSON ---


def test_physical_counts_need_the_map_of_their_own_step(tmp_path):
    path = tmp_path / "t.jsonl"
    first = {"step": 1, "physical_expert_load": [[5, 2, 1]], "physical_to_logical_map": [[0, 1, 0]]}
    # the same slots, after a rebalance: slot 0 holds expert 1 now
    second = {"step": 2, "physical_expert_load": [[5, 2, 1]], "physical_to_logical_map": [[1, 1, 0]]}
    path.write_text(json.dumps(first) + "\n" + json.dumps(second) + "\n")
    assert load_trace(path).tokens_per_expert_WLE.tolist() == [[[6, 2]], [[1, 7]]]
    del second["physical_to_logical_map"]
    path.write_text(json.dumps(first) + "\n" + json.dumps(second) + "\n")
    with pytest.raises(ValueError, match="line 2: physical_expert_load without the physical_to_logical_map"):
        load_trace(path)


@pytest.mark.parametrize(
    ("slot_map", "message"),
    [
        ([[0, 1]], r"counts of \(1, 3\) slots but a physical_to_logical_map of \(1, 2\)"),
        ([[0, 2, 0]], "expert 1 has no slot"),
        ([[0, 1, -1]], "1 copies in empty slots"),
        ([[0, 1, -2]], "physical_to_logical_map"),
        ([[0, 3, 1]], "names experts 0 to 3"),
    ],
)
def test_a_map_that_does_not_fit_is_refused(slot_map, message, tmp_path):
    path = tmp_path / "t.jsonl"
    record = {"step": 1, "physical_expert_load": [[5, 2, 1]], "physical_to_logical_map": slot_map}
    path.write_text(json.dumps(record) + "\n")
    with pytest.raises(ValueError, match=message):
        load_trace(path)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (
            '"step": 1, "num_tokens": 7, "top_k": 1',
            "line 2: num_tokens . top_k is 7, but 6 in an earlier record",
        ),
        ('"step": 2', "step 2 says no num_tokens and top_k, which other steps say"),
        ('"step": true', "line 2: step is True, expected an integer of 0 or more"),
        ('"step": 1.0', "line 2: step is 1.0"),
        (
            '"step": 1, "iteration": 1',
            "line 2: expected one of the fields step, iteration, .* found step, iteration",
        ),
        ('"step": 1, "expert_load": [4, 2]', "line 2: expected one of the fields expert_load, "),
        ('"step": 1, "layer_id": 1', "line 2: expected one of the fields layer, layer_id"),
    ],
)
def test_records_that_contradict_themselves_are_refused(second, message, tmp_path):
    path = tmp_path / "t.jsonl"
    first = '{"layer": 0, "step": 1, "num_tokens": 3, "top_k": 2, "load": [4, 2]}'
    path.write_text(first + '\n{"layer": 1, "load": [4, 2], ' + second + "}\n")
    if "says no" in message:
        path.write_text(path.read_text().replace('"layer": 1', '"layer": 0'))
    with pytest.raises(ValueError, match=message) as error:
        load_trace(path, format="vllm")
    assert str(path) in str(error.value)


def test_fields_that_are_not_read_are_told(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"step": 1, "expert_load": [[1, 2]], "time": 3.0}\n')
    assert load_trace(path).meta["fields_not_read"] == ["time"]
    path.write_text('{"steps": [1], "tokens_per_expert": [[[1, 2]]], "time": 3.0}\n')
    with pytest.warns(UserWarning, match="field 'time' is no part of a load trace"):
        load_trace(path)
    path.write_text('{"steps": [1], "steps": [2], "tokens_per_expert": [[[1, 2]]]}\n')
    with pytest.raises(ValueError, match="field 'steps' is there twice"):
        load_trace(path)


def test_a_placement_is_no_load(tmp_path):
    path = tmp_path / "t.json"
    path.write_text('{"physical_to_logical_map": [[0, 1, 0]]}')
    with pytest.raises(ValueError, match="physical_to_logical_map is a placement, not a load"):
        load_trace(path)
    path.write_text('{"logical_count": [[4, 1, 0]]}')
    assert load_trace(path).tokens_per_expert_WLE.tolist() == [[[4, 1, 0]]]


def test_unused_rows_of_a_buffer_are_dropped_and_told(tmp_path):
    path = tmp_path / "t.json"
    path.write_text('{"logical_count": [[[4, 1]], [[0, 0]], [[2, 3]], [[0, 0]], [[0, 0]]]}')
    with pytest.warns(UserWarning, match="the last 2 of 5 steps are zero everywhere"):
        assert load_trace(path).tokens_per_expert_WLE.tolist() == [[[4, 1]], [[0, 0]], [[2, 3]]]
    path.write_text('{"logical_count": [[[0, 0]], [[0, 0]]]}')
    with pytest.raises(ValueError, match="nothing was recorded"):
        load_trace(path)


def test_a_line_without_end_is_refused_before_it_is_held(tmp_path, monkeypatch):
    from balancer import trace_values

    monkeypatch.setattr(trace_values, "MAX_LINE_BYTES", 1000)
    monkeypatch.setattr(trace_values, "MAX_JSON_BYTES", 1000)
    (tmp_path / "t.csv").write_text("step,layer,expert_0\n" + "1" * 1001 + "\n")
    with pytest.raises(ValueError, match=r"line 2: longer than 1000 bytes"):
        load_trace(tmp_path / "t.csv")
    (tmp_path / "t.json").write_text('{"logical_count": [[' + "1, " * 1000 + "1]]}")
    with pytest.raises(ValueError, match=r"t\.json: 3024 bytes of JSON in one piece, at most 1000 are read"):
        load_trace(tmp_path / "t.json")


@pytest.mark.parametrize(
    "text",
    [
        '{"steps": [4], "tokens_per_expert": [[[TABLE]]]}',
        '\ufeff \n{"meta": {}, "tokens_per_expert" : [ [[TABLE]]], "steps": [4]}\n',
        '[{"step": 4, "tokens_per_expert": [[TABLE]]}]',
        '{\n"tokens_per_expert": [[[TABLE]]],\n"steps": [4]}',
        '{\n"steps": [4],\n"tokens_per_expert": [[[TABLE]]]}',
    ],
)
def test_json_in_one_piece_may_have_lines_longer_than_a_record(text, tmp_path, monkeypatch):
    monkeypatch.setattr("balancer.trace_values.MAX_LINE_BYTES", 100)
    path = tmp_path / "t.json"
    path.write_text(text.replace("TABLE", ", ".join(["7"] * 100)), encoding="utf-8")
    trace = load_trace(path, format="json")
    assert trace.steps_W.tolist() == [4] and trace.tokens_per_expert_WLE.tolist() == [[[7] * 100]]


@pytest.mark.parametrize("start", ['{"step": 4, "tokens_per_expert": [[', '{"tokens_per_expert": [['])
def test_a_record_of_a_step_is_no_longer_than_a_line_may_be(start, tmp_path, monkeypatch):
    monkeypatch.setattr("balancer.trace_values.MAX_LINE_BYTES", 100)
    (tmp_path / "t.json").write_text(start + "7, " * 100 + "7]]}\n" + '{"step": 5}\n')
    with pytest.raises(ValueError, match="line 1: longer than 100 bytes; one record stands on each line"):
        load_trace(tmp_path / "t.json", format="json")


def test_a_real_trace_survives_every_plain_form(traces_dir, trace_writers, tmp_path):
    real = load_trace(traces_dir / "smartmoe.npz")
    counts = real.tokens_per_expert_WLE[:30]
    for name in ("csv", "json", "json-lines", "vllm", "exp-counts"):
        trace = load_trace(trace_writers[name](tmp_path, counts, real.steps_W[:30].tolist()))
        assert (trace.tokens_per_expert_WLE == counts).all()
        assert trace.meta["copies_per_step"] == 262144
