"""The pairs of versions that `make test-versions` takes."""

import pytest
from run_versions import SUPPORTED, Pair, pair_of


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("oldest", Pair(*SUPPORTED[0].split("+"))),
        ("newest", Pair(*SUPPORTED[-1].split("+"))),
        ("2.11+3.6", Pair("2.11.0", "3.6.0")),
        ("2.1+3.6", Pair("2.1", "3.6")),  # no beginning of 2.11
    ],
)
def test_a_pair_is_named_by_its_place_or_the_first_numbers(text: str, pair: Pair) -> None:
    assert pair_of(text) == pair


def test_a_version_alone_is_no_pair() -> None:
    with pytest.raises(SystemExit, match=r"expected pairs like"):
        pair_of("2.11")
