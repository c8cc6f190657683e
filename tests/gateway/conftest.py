"""One engine and one gateway for the tests of a process."""

import gateway_cases
import pytest

from flowgrpo.gateway.server import Gateway


@pytest.fixture(scope="session")
def engine():
    with gateway_cases.make_engine(kept=64, mixed=True) as engine:
        yield engine


@pytest.fixture
def gateway():
    with Gateway(model="tiny", spell=gateway_cases.tiny_model().text.decode, max_bytes=1 << 20) as gateway:
        yield gateway
