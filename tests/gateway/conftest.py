"""One engine and one gateway for the tests of a process."""

import gateway_cases
import pytest

from flowgrpo.gateway.server import Gateway


@pytest.fixture(scope="session")
def engine():
    with gateway_cases.make_engine(max_recorded_top_k=64, mixed=True) as engine:
        yield engine


@pytest.fixture
def gateway():
    with Gateway(model="tiny", decode=gateway_cases.tiny_model().tokenizer.decode, max_bytes=1 << 20) as gateway:
        yield gateway
