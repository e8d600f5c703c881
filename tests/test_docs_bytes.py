"""Every number of docs/bytes.md that stands in an example is computed again."""

import doctest
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "bytes.md"


def test_the_examples_give_what_the_page_says() -> None:
    failed, attempted = doctest.testfile(str(PAGE), module_relative=False)
    assert attempted > 20
    assert failed == 0
