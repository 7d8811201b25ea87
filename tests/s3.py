"""A real S3 server of this machine (moto), and the environment by which a store finds it."""

from collections.abc import Generator

import boto3
import pytest
from moto.server import ThreadedMotoServer


def serve() -> Generator[str]:
    """The address of a server that runs meanwhile."""
    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


def point_to(server: str, monkeypatch: pytest.MonkeyPatch, bucket: str = "") -> None:
    """Have the environment name a server, with credentials; and a bucket made there."""
    keys = {"ACCESS_KEY_ID": "k", "SECRET_ACCESS_KEY": "s", "REGION": "us-east-1", "DEFAULT_REGION": "us-east-1"}
    for key, value in {**keys, "ENDPOINT_URL": server, "ENDPOINT": server, "ALLOW_HTTP": "true"}.items():
        monkeypatch.setenv(f"AWS_{key}", value)
    if bucket:
        boto3.client("s3", endpoint_url=server).create_bucket(Bucket=bucket)
