"""TensorBoard on a finished run, through its own HTTP interface: what a browser would be given."""

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

import pytest

from experiments.launch import free_port

pytestmark = [pytest.mark.dist, pytest.mark.deepspeed]

Get = Callable[[str], bytes]


@pytest.fixture(scope="module")
def board(finished_run) -> Iterator[Get]:
    """get(path): the answer of a TensorBoard that shows the run."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "tensorboard.main",
        "--logdir",
        str(finished_run.parent),
        "--port",
        str(port),
    ]
    options = [
        "--host",
        "127.0.0.1",
        "--samples_per_plugin",
        "images=200,scalars=5000",
        "--load_fast",
        "false",
    ]
    process = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def get(path: str) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/data/{path}", timeout=20) as answer:
            return answer.read()

    try:
        wait_for(lambda: "whole/tb" in json.loads(get("plugin/images/tags")), limit_s=60)
        yield get
    finally:
        process.kill()
        process.wait()


def wait_for(ready: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            if ready():
                return
        except (urllib.error.URLError, ConnectionError):
            pass
        time.sleep(0.2)
    raise AssertionError(f"TensorBoard showed no run within {limit_s} s")


def test_scalars_are_served_with_every_logged_step(board):
    tags = json.loads(board("plugin/scalars/tags"))["whole/tb"]
    expected = ("loss/total", "loss/balance", "balance/balancedness_mean", "balance/layer_00", "optim/lr")
    assert set(expected) <= set(tags)
    assert {
        f"time_ms/{p}" for p in ("route", "counts", "dispatch", "experts", "combine", "optimizer")
    } <= set(tags)
    assert {tag for tag in tags if tag.startswith("bpb/valid/")} > {"bpb/valid/mean", "bpb/valid/python"}
    assert len(tags) < 500
    points = json.loads(board("plugin/scalars/scalars?run=whole/tb&tag=loss/total"))
    assert [step for _, step, _ in points] == [1, 2, 3, 4, 5, 6]


def test_heat_map_is_served_as_an_image(board):
    images = json.loads(board("plugin/images/images?run=whole/tb&tag=load/experts&sample=0"))
    assert [image["step"] for image in images] == [1, 3, 6]
    png = board("plugin/images/individualImage?" + images[-1]["query"])
    assert png.startswith(b"\x89PNG")
    width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))
    assert width > 200, "cells of a few pixels would not be seen"
    assert height > 100


def test_custom_layout_is_served(board):
    layout = json.loads(board("plugin/custom_scalars/layout"))
    assert [category["title"] for category in layout["category"]] == [
        "Balance", "Control", "Collapse", "Loss", "Speed",
    ]  # fmt: skip
