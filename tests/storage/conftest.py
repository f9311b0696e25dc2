import itertools

import pytest
from bucket_kit import BUCKET, environment, s3_server


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """The endpoint of a real S3 server."""
    with s3_server(tmp_path_factory.mktemp("s3")) as endpoint:
        yield endpoint


@pytest.fixture
def env(server, tmp_path, monkeypatch):
    """Set as a user sets it; the cache is this test's own."""
    values = environment(server, tmp_path / "cache")
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return values


_numbers = itertools.count()


@pytest.fixture
def address(env):
    return f"s3://{BUCKET}/test-{next(_numbers)}"
