"""The signal that ends a run after its step."""

import os
import signal

import pytest

from experiments import stop as stop_module
from experiments.stop import StopSignal


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_at_once_are_one_wish_and_a_later_one_acts_as_before(number, monkeypatch):
    """deepspeed's launcher answers a Ctrl-C that the ranks have seen too with SIGTERM: still one wish."""
    before = signal.getsignal(number)
    caught = []
    signal.signal(number, lambda *_: caught.append(number))
    try:
        with StopSignal() as stop:
            assert not stop.received
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.received
            assert not caught
            monkeypatch.setattr(stop_module, "SAME_WISH_S", 0.0)
            os.kill(os.getpid(), number)
            assert caught == [number]
        os.kill(os.getpid(), number)
        assert caught == [number, number]
    finally:
        signal.signal(number, before)
