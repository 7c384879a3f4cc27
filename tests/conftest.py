"""What all tests share: the folder of real traces, and the rule for tests that need a GPU."""

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--traces", metavar="DIR", default=None, help="folder of real load traces")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needing = [item for item in items if item.get_closest_marker("gpu")]
    if not needing:
        return
    import torch

    if not torch.cuda.is_available():
        for item in needing:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, torch sees none"))


@pytest.fixture(scope="session")
def traces_dir(request: pytest.FixtureRequest) -> Path:
    """The folder named by --traces; the test skips, and says how to give it, where there is none."""
    given = request.config.getoption("--traces")
    if given is None:
        pytest.skip("no real traces: give --traces DIR")
    if not Path(given).is_dir():
        pytest.skip(f"no real traces: {given} is not a folder; give --traces DIR")
    return Path(given)
