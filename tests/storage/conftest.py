import itertools

import pytest
from bucket_kit import BUCKET, S3Server, environment

from vocagnolm.data.sources import forget_client


@pytest.fixture(scope="session")
def s3(tmp_path_factory):
    """A real S3 server."""
    one = S3Server(tmp_path_factory.mktemp("s3"))
    yield one
    one.kill()


@pytest.fixture
def server(s3):
    return s3.endpoint


@pytest.fixture
def env(server, tmp_path, monkeypatch):
    """Set as a user sets it; the cache is this test's own."""
    values = environment(server, tmp_path / "cache")
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    forget_client("s3://")
    return values


_numbers = itertools.count()


@pytest.fixture
def address(env):
    return f"s3://{BUCKET}/test-{next(_numbers)}"
