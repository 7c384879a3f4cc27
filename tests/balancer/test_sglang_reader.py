"""SGLang's recorder dumps: counts are read with the map of their own moment, and nothing in a file runs."""

import io
import pickle
import re
import tracemalloc
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from balancer.adapters import sglang
from balancer.trace import load_trace

MAP = torch.tensor([[0, 1, 2, 0], [0, 1, 2, 1]])


def _record(step: int, rank: int = 0, **change) -> dict:
    counts = torch.tensor([[4, 1, 0, 2], [1, 1, 3, 2]], dtype=torch.int32) + step
    record = {
        "forward_pass_id": step,
        "rank": rank,
        "gatherer_key": "primary",
        "global_physical_count": counts,
    }
    return {**record, "physical_to_logical_map": MAP, **change}


def _save(path: Path, records: list[dict], **change) -> Path:
    torch.save({"records": records, "last_physical_to_logical_map": MAP, **change}, path)
    return path


def _without_map(record: dict) -> dict:
    return {key: value for key, value in record.items() if key != "physical_to_logical_map"}


def test_counts_taken_under_an_old_placement_are_not_read_with_the_new_map(tmp_path):
    old, new = _record(0), _record(1, physical_to_logical_map=MAP.flip(1))
    trace = load_trace(_save(tmp_path / "t.pt", [old, new]))
    assert trace.tokens_per_expert_WLE.tolist() == [
        [[6, 1, 0], [1, 3, 3]],
        [[8, 1, 2], [3, 6, 2]],
    ]
    bare = _save(tmp_path / "bare.pt", [_without_map(old), _without_map(new)])
    with pytest.raises(
        ValueError, match="record 0: physical counts without the placement of that pass"
    ) as error:
        load_trace(bare)
    for word in (str(bare), "last_physical_to_logical_map", "rebalance", "--assume-map-constant"):
        assert word in str(error.value)
    assumed = load_trace(bare, assume_map_constant=True)
    assert assumed.tokens_per_expert_WLE[1].tolist() == [[8, 2, 1], [2, 5, 4]]


def test_a_records_own_map_goes_before_the_last_one(tmp_path):
    path = _save(tmp_path / "t.pt", [_record(0)], last_physical_to_logical_map=MAP.flip(1))
    assert load_trace(path, assume_map_constant=True).tokens_per_expert_WLE.tolist() == [
        [[6, 1, 0], [1, 3, 3]]
    ]


def test_the_ranks_of_a_pass_are_summed_in_any_order_and_over_files(tmp_path):
    one = load_trace(_save(tmp_path / "one.pt", [_record(7, 1), _record(3, 0), _record(7, 0), _record(3, 1)]))
    assert one.steps_W.tolist() == [3, 7]
    assert one.tokens_per_expert_WLE[0].tolist() == (2 * np.array([[12, 4, 3], [4, 9, 6]])).tolist()
    folder = tmp_path / "dumps"
    folder.mkdir()
    for rank in (0, 1):
        records = [_record(3, rank), _record(7, rank)]
        _save(folder / f"expert_distribution_recorder_17.5_{rank}.pt", records)
    for form in (None, "sglang-pt"):
        both = load_trace(folder, format=form)
        assert (both.tokens_per_expert_WLE == one.tokens_per_expert_WLE).all()
        assert both.meta["ranks_summed"] == 2


def test_the_parts_of_a_pass_that_two_gatherers_saw_are_summed(tmp_path):
    """Two-batch overlap records the two halves of a pass apart."""
    halves = [_record(3, gatherer_key="child_a"), _record(3, gatherer_key="child_b")]
    assert load_trace(_save(tmp_path / "t.pt", halves)).tokens_per_expert_WLE[0, 0].tolist() == [24, 8, 6]


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([_record(3), _record(3)], "record 1: forward_pass_id 3 of rank 0 is there a second time"),
        ([_record(3), _record(4), _record(4, 1)], "forward_pass_id 3: the record of rank 1 is missing"),
        ([_record(3, physical_to_logical_map=MAP[:, :3])], r"counts of \(2, 4\) slots but .* \(2, 3\)"),
        ([_record(3, physical_to_logical_map=MAP + 1)], "expert 0 has no slot|names experts 1 to 3"),
        ([_record(3, global_physical_count=torch.ones(2, 4))], "torch.float32 .* expected an integer tensor"),
        ([_record(3, global_physical_count=torch.ones(2, 4).bool())], "torch.bool"),
        ([_record(3, global_physical_count=torch.ones(4).int())], "expected an integer tensor with 2 axes"),
        ([_record(3, global_physical_count=[[1, 2]])], "global_physical_count is a list of 1"),
        ([_record(3, global_physical_count=-torch.ones(2, 4).int())], "a count of -1"),
        ([_record(3, global_physical_count=torch.full((2, 4), 2**62))], "a count of 4611686018427387904"),
        ([_record(-3)], "forward_pass_id is -3"),
        ([_record(3, rank="0")], "rank is '0'"),
        ([3], "record 0: 3 is no record"),
        ([], "no record of a load"),
        ({"a": 1}, "neither logical_count nor records"),
    ],
)
def test_a_wrong_record_names_file_record_and_field(records, message, tmp_path):
    path = _save(tmp_path / "t.pt", records)
    with pytest.raises(ValueError, match=message) as error:
        load_trace(path)
    assert str(path) in str(error.value)


def test_unused_rows_of_a_stat_dump_are_dropped_and_told(tmp_path):
    counts = torch.zeros(5, 2, 3, dtype=torch.int32)
    counts[0] = counts[2] = 4
    torch.save({"rank": 0, "logical_count": counts}, tmp_path / "t.pt")
    with pytest.warns(UserWarning, match="the last 2 of 5 steps are zero everywhere"):
        trace = load_trace(tmp_path / "t.pt")
    assert trace.steps_W.tolist() == [0, 1, 2]
    assert trace.meta == {"source": "sglang-pt", "steps_counted": True}
    torch.save({"rank": 0, "logical_count": counts}, tmp_path / "u.pt")
    with pytest.raises(ValueError, match="2 dumps of logical counts"):
        load_trace(tmp_path, format="sglang-pt")


class _Trap:
    """An object whose unpickling would leave a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return (open, (str(self.mark), "w"))


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_pickle_that_would_act_is_refused_before_torch_sees_it(protocol, tmp_path, monkeypatch):
    mark, path = tmp_path / "executed", tmp_path / "t.pt"
    torch.save({"logical_count": torch.ones(1, 1, 1).int(), "x": _Trap(mark)}, path, pickle_protocol=protocol)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("torch saw it"))
    with pytest.raises(ValueError, match="its pickle names") as error:
        load_trace(path)
    assert str(path) in str(error.value)
    assert not mark.exists()


@pytest.mark.parametrize("kind", ["pickle", "legacy", "zip", "empty"])
def test_what_is_no_file_of_torch_save_is_refused(kind, tmp_path):
    path, mark = tmp_path / "t.pt", tmp_path / "executed"
    if kind == "legacy":
        torch.save({"x": 1}, path, _use_new_zipfile_serialization=False)
    elif kind == "zip":
        np.savez(path.with_suffix(".npz"), counts=np.ones(3))
        path.with_suffix(".npz").rename(path)
    else:
        path.write_bytes(pickle.dumps(_Trap(mark)) if kind == "pickle" else b"")
    with pytest.raises(ValueError, match=re.escape(str(path))):
        load_trace(path)
    assert not mark.exists()


def _changed(path: Path, *changes: tuple[bytes, bytes]) -> None:
    """Put other bytes into the pickle of a dump, and pack it so that its checksums hold."""
    out = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            data = old.read(info)
            for before, after in changes if info.filename.endswith(".pkl") else ():
                assert before in data
                data = data.replace(before, after, 1)
            new.writestr(info.filename, data)
    path.write_bytes(out.getvalue())


# how the pickle writes 2^36, the shape (2, 2, 3) and the stride (6, 3, 1)
BIG, SHAPE, STRIDE = b"\x8a\x05\x00\x00\x00\x00\x10", b"K\x02K\x02K\x03\x87", b"K\x06K\x03K\x01\x87"
BIG_SHAPE = BIG + b"K\x02K\x03\x87"


@pytest.mark.parametrize(
    "changes",
    [
        [(SHAPE, BIG_SHAPE)],
        [(STRIDE, b"K\x00K\x00K\x00\x87"), (SHAPE, BIG_SHAPE)],
        [(b"QK\x00", b"Q" + BIG)],
        [(b"K\x0ct", BIG + b"t"), (SHAPE, BIG_SHAPE)],
    ],
    ids=["shape", "shape with stride 0", "offset", "storage and shape"],
)
def test_a_tensor_that_claims_more_than_its_file_is_refused_without_memory(changes, tmp_path):
    path = tmp_path / "t.pt"
    torch.save({"logical_count": torch.arange(1, 13).reshape(2, 2, 3)}, path)
    _changed(path, *changes)
    tracemalloc.start()
    with pytest.raises(ValueError, match=re.escape(str(path))):
        load_trace(path)
    assert tracemalloc.get_traced_memory()[1] < 2**23
    tracemalloc.stop()


def test_a_storage_that_claims_more_than_its_tensor_needs_is_read_as_far_as_it_goes(tmp_path):
    path = tmp_path / "t.pt"
    counts = torch.arange(1, 13).reshape(2, 2, 3)
    torch.save({"logical_count": counts}, path)
    _changed(path, (b"K\x0ct", BIG + b"t"))
    assert load_trace(path).tokens_per_expert_WLE.tolist() == counts.tolist()


def test_records_that_share_one_storage_cannot_claim_it_again_and_again(tmp_path):
    counts = torch.ones(64, 64, dtype=torch.int64)
    slot_map = torch.arange(64).repeat(64, 1)
    records = [
        _record(step, global_physical_count=counts, physical_to_logical_map=slot_map) for step in range(200)
    ]
    with pytest.raises(ValueError, match="the records claim more counts than the file holds"):
        load_trace(_save(tmp_path / "t.pt", records))


def test_a_flipped_bit_in_the_counts_is_noticed(tmp_path):
    path = tmp_path / "t.pt"
    torch.save({"logical_count": torch.full((2, 2, 3), 0x0102030405)}, path)
    data = path.read_bytes()
    place = data.index(b"\x05\x04\x03\x02\x01")
    path.write_bytes(data[:place] + b"\x04" + data[place + 1 :])
    with pytest.raises(ValueError, match="CRC"):
        load_trace(path)


def test_reading_is_silent_and_the_file_may_go_afterwards(tmp_path):
    path = _save(tmp_path / "t.pt", [_record(0), _record(1)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace = load_trace(path)
    path.write_bytes(b"")
    assert trace.tokens_per_expert_WLE.sum() > 0
    assert sglang.dump_files(path) == [path]
