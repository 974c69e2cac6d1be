import pytest

from tests.sharding import own_case


@pytest.fixture(scope="session")
def own(tmp_path_factory) -> own_case.Case:
    return own_case.make(tmp_path_factory.mktemp("own") / "target")
