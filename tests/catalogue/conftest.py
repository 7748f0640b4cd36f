import pytest
from helpers.catalogue import COMPOSED
from helpers.rows import INTERPRETING


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items if INTERPRETING else ():
        name = getattr(item, "callspec", None) and item.callspec.params.get("name")
        if "catalogue" in item.nodeid and name in COMPOSED:
            item.add_marker(pytest.mark.skip(reason="it runs in PyTorch, not on a kernel"))
