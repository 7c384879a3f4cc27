"""Load traces on disk: what was written comes back, damage is named or cut off, nothing is executed."""

import json
import warnings

import numpy as np
import pytest

from balancer import trace as trace_module
from balancer.trace import Trace, TraceWriter, check_conservation, load_trace, save_npz

L, E = 3, 5
ROW_BYTES = 8 * (1 + L * E)
# the largest count of which a layer can hold E
MOST = (2**63 - 1) // E


def _counts(step: int) -> np.ndarray:
    """Counts that name their step, layer and expert, so that a shifted row cannot pass."""
    layer, expert = np.meshgrid(np.arange(L), np.arange(E), indexing="ij")
    return step * 10000 + layer * 100 + expert


def _write(path, steps, meta=None, **options) -> None:
    with TraceWriter(path, L, E, meta, **options) as writer:
        for step in steps:
            writer.append(step, _counts(step))


def _check(trace: Trace, steps: list[int]) -> None:
    assert trace.steps_W.tolist() == steps
    assert trace.tokens_per_expert_WLE.dtype == np.int64
    assert trace.tokens_per_expert_WLE.shape == (len(steps), L, E)
    for w, step in enumerate(steps):
        assert (trace.tokens_per_expert_WLE[w] == _counts(step)).all()


def _is_mapped(array: np.ndarray) -> bool:
    while array is not None:
        if isinstance(array, np.memmap):
            return True
        array = array.base
    return False


# --- folder ---


def test_what_was_appended_comes_back_with_its_meta(tmp_path):
    _write(tmp_path / "loads", [1, 4, 11], {"copies_per_step": 7, "name": "run"})
    trace = load_trace(tmp_path / "loads")
    _check(trace, [1, 4, 11])
    assert trace.meta == {"copies_per_step": 7, "name": "run"}


def test_folder_holds_a_header_and_raw_little_endian_rows(tmp_path):
    _write(tmp_path / "loads", [2])
    assert sorted(p.name for p in (tmp_path / "loads").iterdir()) == ["header.json", "rows.i64"]
    raw = np.frombuffer((tmp_path / "loads/rows.i64").read_bytes(), dtype="<i8")
    assert raw.tolist() == [2, *_counts(2).ravel().tolist()]


def test_a_folder_is_mapped_not_read_and_cannot_be_changed_through_the_trace(tmp_path):
    _write(tmp_path / "loads", [1, 2])
    counts = load_trace(tmp_path / "loads").tokens_per_expert_WLE
    assert _is_mapped(counts)
    assert not counts.flags.writeable


def test_a_trace_without_rows_is_a_trace(tmp_path):
    _write(tmp_path / "loads", [])
    assert load_trace(tmp_path / "loads").tokens_per_expert_WLE.shape == (0, L, E)


def test_rows_are_readable_while_the_writer_is_open(tmp_path):
    writer = TraceWriter(tmp_path / "loads", L, E)
    writer.append(3, _counts(3))
    _check(load_trace(tmp_path / "loads"), [3])
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="closed"):
        writer.append(4, _counts(4))
    with pytest.raises(ValueError, match="closed"):
        writer.flush()


def test_a_torn_last_row_is_dropped_and_the_warning_says_how_many_bytes(tmp_path):
    _write(tmp_path / "loads", [1, 2])
    with open(tmp_path / "loads/rows.i64", "ab") as file:
        file.write(b"\x01" * 13)
    with pytest.warns(UserWarning, match=f"13 of its {ROW_BYTES} bytes dropped, 2 whole rows kept"):
        trace = load_trace(tmp_path / "loads")
    _check(trace, [1, 2])


@pytest.mark.parametrize(
    ("step", "counts", "message"),
    [
        (5, _counts(5), "step 5 must be 6 or more"),
        (4, _counts(4), "step 4 must be 6 or more"),
        (6, _counts(6).T, r"shape \(5, 3\), expected \[L, E\] = \(3, 5\)"),
        (6, _counts(6)[None], "shape"),
        (6, _counts(6) / 2, "float64"),
        (6, _counts(6) > 0, "bool"),
        (6, -_counts(6), r"layer 0, expert 0: negative count -60000"),
        (6, np.full((L, E), 2**63, dtype=np.uint64), "more than int64"),
        (6, np.full((L, E), MOST + 1), f"layer 0, expert 0: count {MOST + 1} must be at most {MOST}"),
        (2**62, _counts(6), "step 4611686018427387904 must be below 2.62"),
        (10**50, _counts(6), "step an integer of 167 bits must be below 2.62"),
    ],
)
def test_a_bad_row_is_refused_and_nothing_is_written(tmp_path, step, counts, message):
    with TraceWriter(tmp_path / "loads", L, E) as writer:
        writer.append(5, _counts(5))
        with pytest.raises(ValueError, match=message):
            writer.append(step, counts)
        assert writer.last_step == 5
        writer.append(np.int64(6), _counts(6).astype(np.int32))
    _check(load_trace(tmp_path / "loads"), [5, 6])


def test_a_negative_first_step_is_refused(tmp_path):
    with TraceWriter(tmp_path / "loads", L, E) as writer, pytest.raises(ValueError, match="0 or more"):
        writer.append(-1, _counts(0))


def test_a_write_that_fails_half_way_leaves_whole_rows_only(tmp_path):
    class FullDisk:
        """A file whose second write of a row fails, after the first has taken some bytes."""

        def __init__(self, file):
            self.file, self.calls = file, 0
            self.fileno, self.close, self.closed = file.fileno, file.close, False

        def write(self, data):
            self.calls += 1
            if self.calls > 1:
                raise OSError(28, "No space left on device")
            return self.file.write(data[:10])

    writer = TraceWriter(tmp_path / "loads", L, E)
    writer.append(1, _counts(1))
    whole = writer._file
    writer._file = FullDisk(whole)
    with pytest.raises(OSError, match="No space"):
        writer.append(2, _counts(2))
    writer._file = whole
    writer.append(3, _counts(3))
    writer.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _check(load_trace(tmp_path / "loads"), [1, 3])


def test_an_existing_folder_or_file_is_refused_and_untouched(tmp_path):
    _write(tmp_path / "loads", [1])
    with pytest.raises(ValueError, match="resume_after_step"):
        TraceWriter(tmp_path / "loads", L, E)
    _check(load_trace(tmp_path / "loads"), [1])
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match="already"):
            TraceWriter(path, L, E)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("after", "kept"), [(0, []), (1, [1]), (3, [1]), (4, [1, 4]), (11, [1, 4, 11]), (99, [1, 4, 11])]
)
def test_resume_cuts_later_rows_and_a_torn_one(tmp_path, after, kept):
    _write(tmp_path / "loads", [1, 4, 11])
    with open(tmp_path / "loads/rows.i64", "ab") as file:
        file.write(b"\x01" * (ROW_BYTES - 1))
    with TraceWriter(tmp_path / "loads", L, E, resume_after_step=after) as writer:
        assert writer.last_step == (kept[-1] if kept else -1)
        writer.append(100, _counts(100))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _check(load_trace(tmp_path / "loads"), [*kept, 100])


def test_resume_refuses_another_shape_another_meta_or_nothing_and_cuts_nothing(tmp_path):
    _write(tmp_path / "loads", [1, 4], {"seed": 1, "same": [1, 2]})
    with pytest.raises(ValueError, match=r"\(3, 5\), not \(3, 6\)"):
        TraceWriter(tmp_path / "loads", L, E + 1, resume_after_step=0)
    with pytest.raises(ValueError, match=r"meta differs in seed \(seed: 1 there, 2 given\)"):
        TraceWriter(tmp_path / "loads", L, E, {"seed": 2, "same": [1, 2]}, resume_after_step=0)
    with pytest.raises(ValueError, match="no trace to continue"):
        TraceWriter(tmp_path / "absent", L, E, resume_after_step=0)
    assert not (tmp_path / "absent").exists()
    _check(load_trace(tmp_path / "loads"), [1, 4])
    TraceWriter(tmp_path / "loads", L, E, {"seed": 1, "same": (1, 2)}, resume_after_step=4).close()


@pytest.mark.parametrize(("sizes", "name"), [((0, 5), "num_layers"), ((5, 0), "num_experts")])
def test_sizes_below_one_are_refused_before_anything_is_made(tmp_path, sizes, name):
    with pytest.raises(ValueError, match=f"{name}=0"):
        TraceWriter(tmp_path / "loads", *sizes)
    assert not (tmp_path / "loads").exists()


@pytest.mark.parametrize("meta", [{"x": np.nan}, {"x": object()}, {"x": {1, 2}}])
def test_meta_that_is_not_json_is_refused_before_anything_is_made(tmp_path, meta):
    with pytest.raises(ValueError, match="JSON only"):
        TraceWriter(tmp_path / "loads", L, E, meta)
    assert not (tmp_path / "loads").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version is 2, this program reads 1"),
        ({"format": "other"}, "format is 'other'"),
        ({"num_layers": "3"}, "num_layers is '3'"),
        ({"num_experts": 0}, "num_experts is 0"),
        ({"num_experts": True}, "num_experts is True"),
        ({"meta": [1]}, r"meta is \[1\]"),
    ],
)
def test_a_wrong_header_names_file_and_field(tmp_path, change, message):
    _write(tmp_path / "loads", [1])
    header = tmp_path / "loads/header.json"
    header.write_text(json.dumps({**json.loads(header.read_text()), **change}))
    with pytest.raises(ValueError, match=message) as error:
        load_trace(tmp_path / "loads")
    assert str(header) in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "\xff", "[" * 100000])
def test_a_header_that_is_no_object_is_refused(tmp_path, text):
    _write(tmp_path / "loads", [1])
    (tmp_path / "loads/header.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"header\.json"):
        load_trace(tmp_path / "loads")


def test_missing_places_are_named(tmp_path):
    with pytest.raises(ValueError, match="no load trace there"):
        load_trace(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"header\.json is missing"):
        load_trace(tmp_path / "empty")
    _write(tmp_path / "loads", [1])
    (tmp_path / "loads/rows.i64").unlink()
    with pytest.raises(ValueError, match=r"rows\.i64 is missing"):
        load_trace(tmp_path / "loads")


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (16 + 1 + 7, -3, r"record 1 \(step 4\), layer 1, expert 2: negative count -3"),
        (16, 1, "record 1: step 1 does not come after step 1"),
        (0, -9, "record 0: step -9 is negative"),
        (32, 2**62, "record 2: step 4611686018427387904 must be below 2.62"),
        (
            2 * 16 + 1 + 7,
            MOST + 1,
            rf"record 2 \(step 11\), layer 1, expert 2: count {MOST + 1} must be at most {MOST}",
        ),
    ],
)
def test_damaged_rows_name_record_and_field(tmp_path, index, value, message):
    _write(tmp_path / "loads", [1, 4, 11])
    rows = np.memmap(tmp_path / "loads/rows.i64", dtype="<i8", mode="r+")
    rows[index] = value
    rows.flush()
    with pytest.raises(ValueError, match=message) as error:
        load_trace(tmp_path / "loads")
    assert "rows.i64" in str(error.value)


def test_a_negative_count_is_found_in_every_piece_of_a_long_trace(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_module, "_CHECK_VALUES", 2 * L * E)
    _write(tmp_path / "loads", range(7))
    for w in range(7):
        rows = np.fromfile(tmp_path / "loads/rows.i64", dtype="<i8").reshape(7, -1)
        rows[w, -1] = -1
        with pytest.raises(ValueError, match=rf"record {w} \(step {w}\), layer 2, expert 4"):
            Trace(tokens_per_expert_WLE=rows[:, 1:].reshape(7, L, E), steps_W=rows[:, 0])


def test_the_largest_counts_and_steps_are_taken_and_their_sums_are_exact(tmp_path):
    with TraceWriter(tmp_path / "loads", L, E) as writer:
        writer.append(0, np.full((L, E), MOST))
        writer.append(2**62 - 1, _counts(1))
    trace = load_trace(tmp_path / "loads")
    assert trace.steps_W.tolist() == [0, 2**62 - 1]
    assert trace.tokens_per_expert_WLE.sum(axis=-1)[0].tolist() == [E * MOST] * L


# --- npz ---


def _arrays(steps=(1, 4, 11)) -> dict:
    return {"counts": np.stack([_counts(s) for s in steps]).astype(np.int32), "steps": np.array(steps)}


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint32", "uint64", ">i4"])
@pytest.mark.parametrize("name", ["steps", "iters"])
def test_an_npz_of_any_integer_type_is_read(tmp_path, dtype, name):
    arrays = _arrays()
    np.savez(tmp_path / "t.npz", counts=arrays["counts"].astype(dtype), **{name: arrays["steps"]})
    trace = load_trace(tmp_path / "t.npz")
    _check(trace, [1, 4, 11])
    assert trace.meta == {}


def test_a_saved_npz_comes_back(tmp_path):
    _write(tmp_path / "loads", [1, 4], {"seed": 3})
    save_npz(tmp_path / "t.npz", load_trace(tmp_path / "loads"))
    trace = load_trace(str(tmp_path / "t.npz"))
    _check(trace, [1, 4])
    assert trace.meta == {"seed": 3}
    with pytest.raises(ValueError, match="already"):
        save_npz(tmp_path / "t.npz", trace)
    with pytest.raises(ValueError, match=r"\.npz"):
        save_npz(tmp_path / "t.npy", trace)


class _Trap:
    """An object whose unpickling would leave a mark."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (open, (str(self.mark), "w"))


@pytest.mark.parametrize("name", ["counts", "steps", "meta"])
def test_an_object_array_is_refused_and_not_executed(tmp_path, name):
    mark = tmp_path / "executed"
    trap = np.empty(1, dtype=object)
    trap[0] = _Trap(mark)
    np.savez(tmp_path / "t.npz", **{**_arrays(), name: trap})
    with pytest.raises(ValueError, match=f"field {name}: Object arrays cannot be loaded") as error:
        load_trace(tmp_path / "t.npz")
    assert "t.npz" in str(error.value)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"counts": np.ones((3, L, E))}, "field counts has type float64"),
        ({"counts": np.ones((3, L, E), dtype=bool)}, "field counts has type bool"),
        ({"steps": np.array([1.0, 2.0, 3.0])}, "field steps has type float64"),
        ({"counts": np.ones((3, E), dtype=int)}, "expected int64 with 3 axes"),
        ({"steps": np.ones((3, 1), dtype=int)}, "expected int64 with 1 axes"),
        ({"steps": np.array([1, 4])}, r"expected one \[L, E\]"),
        ({"counts": np.ones((3, L, 0), dtype=int)}, "at least one layer and one expert"),
        ({"steps": np.array([1, 4, 4])}, "record 2: step 4 does not come after step 4"),
        ({"counts": -_arrays()["counts"]}, r"record 0 \(step 1\), layer 0, expert 0: negative count -10000"),
        ({"counts": np.full((3, L, E), 2**63, dtype=np.uint64)}, "more than int64"),
        ({"iters": np.array([1, 4, 11])}, "steps or iters"),
        ({"meta": np.array("{")}, "meta is not JSON"),
        ({"meta": np.array("[1]")}, "expected a JSON object"),
        ({"meta": np.array([1, 2])}, "expected one text"),
    ],
)
def test_a_wrong_npz_names_file_and_field(tmp_path, change, message):
    np.savez(tmp_path / "t.npz", **{**_arrays(), **change})
    with pytest.raises(ValueError, match=message) as error:
        load_trace(tmp_path / "t.npz")
    assert "t.npz" in str(error.value)


@pytest.mark.parametrize("missing", ["counts", "steps"])
def test_a_missing_field_is_named_with_what_was_found(tmp_path, missing):
    arrays = _arrays()
    del arrays[missing]
    np.savez(tmp_path / "t.npz", **arrays)
    with pytest.raises(ValueError, match=rf"expected the fields counts .* found \['{next(iter(arrays))}'\]"):
        load_trace(tmp_path / "t.npz")


def test_an_unknown_field_is_not_silently_ignored(tmp_path):
    np.savez(tmp_path / "t.npz", **_arrays(), weights=np.ones(3))
    with pytest.warns(UserWarning, match="field weights is no part"):
        _check(load_trace(tmp_path / "t.npz"), [1, 4, 11])


@pytest.mark.parametrize("keep", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_npz_is_refused(tmp_path, keep):
    np.savez_compressed(tmp_path / "t.npz", **_arrays(tuple(range(200))))
    data = (tmp_path / "t.npz").read_bytes()
    (tmp_path / "t.npz").write_bytes(data[: int(keep * len(data))])
    with pytest.raises(ValueError, match=r"t\.npz: cannot be read as a load trace"):
        load_trace(tmp_path / "t.npz")


def test_a_flipped_byte_in_an_npz_is_never_read_as_other_counts(tmp_path):
    np.savez_compressed(tmp_path / "t.npz", **_arrays(tuple(range(50))))
    data = (tmp_path / "t.npz").read_bytes()
    for place in range(60, len(data), 97):
        (tmp_path / "t.npz").write_bytes(data[:place] + bytes([data[place] ^ 255]) + data[place + 1 :])
        try:
            trace = load_trace(tmp_path / "t.npz")
        except ValueError:
            continue
        _check(trace, list(range(50)))  # a byte that carries nothing, such as a date


@pytest.mark.parametrize("data", [b"hello", b"\x80\x04K\x01.", b"PK\x03\x04"])
def test_a_file_of_another_kind_is_refused(tmp_path, data):
    (tmp_path / "t.npz").write_bytes(data)
    with pytest.raises(ValueError, match="cannot be read as a load trace"):
        load_trace(tmp_path / "t.npz")


def test_a_single_array_is_refused(tmp_path):
    np.save(tmp_path / "t.npy", _arrays()["counts"])
    with pytest.raises(ValueError, match="single array"):
        load_trace(tmp_path / "t.npy")


# --- the record ---


def test_a_trace_takes_int64_only():
    with pytest.raises(ValueError, match="tokens_per_expert_WLE is int32"):
        Trace(tokens_per_expert_WLE=np.ones((1, L, E), dtype=np.int32), steps_W=np.array([1]))


def test_counts_whose_sum_wraps_to_zero_are_refused(tmp_path):
    np.savez(tmp_path / "t.npz", counts=np.full((1, 1, 4), 2**62), steps=np.array([3]))
    with pytest.raises(ValueError, match=r"t\.npz: record 0 \(step 3\), layer 0, expert 0: count 4611686018"):
        load_trace(tmp_path / "t.npz")


def test_conservation_says_where_and_by_how_much():
    counts = np.full((3, 2, 4), 25)
    trace = Trace(tokens_per_expert_WLE=counts, steps_W=np.array([5, 6, 9]), meta={"copies_per_step": 100})
    check_conservation(trace)
    check_conservation(trace, 100)
    check_conservation(trace, [100, 100, 100])
    counts[1, 1, 2] += 3
    counts[2, 0, 0] -= 1
    with pytest.raises(ValueError, match=r"step 6, layer 1: the experts hold 103 copies, 3 too many.*2 of 6"):
        check_conservation(trace)
    counts[1, 1, 2] -= 3
    with pytest.raises(ValueError, match=r"step 9, layer 0: .* 1 too few \(expected 100\)"):
        check_conservation(trace, np.array([100, 100, 100]))


@pytest.mark.parametrize("copies", [None, 1.5, [100], "many"])
def test_conservation_needs_something_to_check_against(copies):
    trace = Trace(tokens_per_expert_WLE=np.full((3, 2, 4), 25), steps_W=np.array([5, 6, 9]))
    with pytest.raises(ValueError, match="copies"):
        check_conservation(trace, copies)


def test_a_real_trace_loads_and_conserves_its_copies(traces_dir):
    trace = load_trace(traces_dir / "smartmoe.npz")
    assert trace.tokens_per_expert_WLE.shape == (501, 24, 32)
    assert trace.steps_W[:3].tolist() == [1, 11, 21]
    check_conservation(trace, 262144)
