"""An S3-compatible server (moto) in a process of its own on loopback. Tests read its contents without fsspec.

Its clients are imported where they are used: every process of a test run collects the files that import this one.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

from tests.harness import DEADLINE_S, environment, wait_for


class S3:
    """One server with the bucket `bucket`. `env` is what its clients need."""

    def __init__(self) -> None:
        import boto3
        from botocore.config import Config

        command = [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", "0"]
        self._process = subprocess.Popen(
            command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        self._received: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        found = wait_for(lambda: re.search(r"Running on (http://\S+)", "".join(self._received)), "moto's server")
        self.env = {
            "AWS_ENDPOINT_URL": found[1],
            "AWS_ACCESS_KEY_ID": "a-key",
            "AWS_SECRET_ACCESS_KEY": "a-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        self.client: Any = boto3.client(
            "s3",
            endpoint_url=found[1],
            aws_access_key_id="a-key",
            aws_secret_access_key="a-secret",
            region_name="us-east-1",
            config=Config(retries={"max_attempts": 1}),
        )
        self.client.create_bucket(Bucket="bucket")

    def keys(self, prefix: str = "") -> list[str]:
        """The keys in the bucket, sorted."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket="bucket", Prefix=prefix)
        return [each["Key"] for page in pages for each in page.get("Contents", [])]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        assert self._process.stderr is not None
        self._process.stderr.close()
        self.client.close()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._received.append(line)


@contextlib.contextmanager
def s3_server() -> Iterator[S3]:
    import fsspec

    server = S3()
    try:
        yield server
    finally:
        server.close()
        # fsspec caches clients in this process. The next server's tests would use clients with this server's address.
        fsspec.get_filesystem_class("s3").clear_instance_cache()
