"""Watch records: what a rank leaves about itself, and what another makes of it."""

import json
import os
import signal
import subprocess
import time

import pytest

from moe.watch_record import (
    BEAT,
    MISSED_BEATS,
    OPERATION,
    STATE,
    Record,
    fate,
    own_place,
    process_stat,
    process_state,
    read_record,
    write_area,
)


@pytest.fixture
def file(tmp_path):
    """The descriptor of rank 0's record, with all three areas written."""
    descriptor = os.open(tmp_path / "rank-0", os.O_RDWR | os.O_CREAT)
    write_area(descriptor, BEAT, json.dumps({**own_place(), "beat": 3, "beat_s": 5.0, "interval_s": 0.2}))
    write_area(descriptor, OPERATION, "7 2 4.500 layer 3 dispatch forward")
    write_area(descriptor, STATE, "raised ValueError: bad batch")
    yield descriptor
    os.close(descriptor)


def test_a_record_reads_back_as_it_was_written(file, tmp_path):
    record = read_record(tmp_path, 0)
    assert (record.pid, record.started) == (os.getpid(), process_stat("self")[1])
    assert (record.beat, record.beat_s, record.interval_s) == (3, 5.0, 0.2)
    assert (record.number, record.step, record.begun_s) == (7, 2, 4.5)
    assert (record.state, record.message) == ("raised", "ValueError: bad batch")
    assert record.where == "layer 3 dispatch forward (operation 7, step 2)"
    assert Record().where == "no exchange yet"
    assert read_record(tmp_path, 1) is None


def test_an_area_has_its_size_whatever_is_written_to_it(file, tmp_path):
    for text in ("x" * 5000, "\u00e9" * 5000, ""):  # a character may be cut through, the area stays whole
        write_area(file, STATE, "raised " + text)
        assert os.fstat(file).st_size == 2048
        assert read_record(tmp_path, 0).state == "raised"
        assert read_record(tmp_path, 0).number == 7


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (OPERATION, {"number": 0, "operation": "", "state": "raised"}),
        (STATE, {"number": 7, "state": "running", "message": ""}),
    ],
)
def test_a_torn_area_keeps_its_defaults_and_the_others_their_values(file, tmp_path, start, expected):
    os.pwrite(file, b"?", start + 20)
    record = read_record(tmp_path, 0)
    assert {name: getattr(record, name) for name in expected} == expected
    os.pwrite(file, b"?", BEAT + 20)
    assert read_record(tmp_path, 0) is None


def test_a_killed_process_is_gone_before_its_parent_has_waited_for_it():
    child = subprocess.Popen(["sleep", "60"])
    started = process_stat(str(child.pid))[1]
    record = Record(**{**own_place(), "pid": child.pid, "started": started})

    def becomes(state):
        deadline = time.monotonic() + 5
        while process_state(record) != state and time.monotonic() < deadline:
            time.sleep(0.01)
        return process_state(record) == state

    try:
        assert becomes("alive")
        child.send_signal(signal.SIGSTOP)
        assert becomes("stopped")
    finally:
        child.kill()
    assert becomes("gone")  # a zombie
    child.wait()
    assert becomes("gone")


def test_a_process_of_another_host_or_container_is_not_looked_for():
    here = own_place()
    assert process_state(Record(**here)) == "alive"
    for other in ({"host": "elsewhere"}, {"namespace": "pid:[1]"}):
        assert process_state(Record(**{**here, **other})) == "unknown"
    assert process_state(Record(**{**here, "started": "1"})) == "gone", "another process has its pid now"


def test_silence_needs_as_many_missed_heartbeats_of_that_ranks_own_interval():
    now = Record(**own_place(), interval_s=0.5, beat=9)
    enough_s = MISSED_BEATS * 0.5
    assert fate(now, now, Record(), enough_s - 0.01) == ("", "is alive, at the same operation")
    kind, text = fate(now, now, Record(), enough_s)
    assert (kind, text[:50]) == ("silent", "its heartbeats stopped though its process exists (")
    before = Record(**own_place(), interval_s=0.5, beat=8)
    assert fate(now, before, Record(), enough_s)[0] == ""
    assert fate(now, None, Record(), enough_s)[0] == ""
