"""Everything here starts vLLM engines."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/engine" in item.path.as_posix():
            item.add_marker(pytest.mark.engine)
