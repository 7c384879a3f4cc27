"""The README's examples with their output, as they stand."""

import doctest
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"


def test_the_examples_of_the_readme_print_what_it_says():
    found = doctest.testfile(str(README), module_relative=False)
    assert found.attempted >= 9
    assert found.failed == 0
