"""The S3 requests: signature by AWS's published example, answers and failures of a small server on loopback."""

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from hicache_hooks.backends.s3_client import S3Client, S3Error, S3Target
from hicache_hooks.describe import describe_exception

LIST = '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{}</ListBucketResult>'


class Bucket(BaseHTTPRequestHandler):
    """Objects by path; lists two at a time."""

    protocol_version = "HTTP/1.1"
    objects: ClassVar[dict[str, int]] = {}
    status: ClassVar[int] = 200
    seen: ClassVar[list[str]] = []

    def _answer(self, status: int, body: bytes = b"", length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def do_HEAD(self) -> None:
        name = self.path.removeprefix("/b/")
        self.seen.append(self.path)
        if self.status != 200:
            self._answer(self.status)
        elif name and name not in self.objects:
            self._answer(404)
        else:
            self._answer(200, length=self.objects.get(name, 0))

    def do_DELETE(self) -> None:
        self.objects.pop(self.path.removeprefix("/b/"), None)
        self._answer(self.status if self.status != 200 else 204)

    def do_GET(self) -> None:
        from urllib.parse import parse_qs, urlsplit

        query = parse_qs(urlsplit(self.path).query)
        names = sorted(name for name in self.objects if name.startswith(query["prefix"][0]))
        start = int(query.get("continuation-token", ["0"])[0])
        more = start + 2 < len(names)
        keys = "".join(f"<Contents><Key>{name}</Key></Contents>" for name in names[start : start + 2])
        token = f"<NextContinuationToken>{start + 2}</NextContinuationToken>" if more else ""
        text = LIST.format(f"<IsTruncated>{str(more).lower()}</IsTruncated>{keys}{token}")
        self._answer(self.status, text.encode())

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    Bucket.objects, Bucket.status, Bucket.seen = {}, 200, []
    made = ThreadingHTTPServer(("127.0.0.1", 0), Bucket)
    made.daemon_threads = True
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


@pytest.fixture
def client(server: ThreadingHTTPServer) -> Iterator[S3Client]:
    made = S3Client(target(server.server_address[1]), 2.0)
    yield made
    made.close()


def target(port: int) -> S3Target:
    return S3Target(bucket="b", endpoint=f"http://127.0.0.1:{port}", access_key="me", secret_key="s3cret")


def test_the_signature_is_that_of_the_published_example() -> None:
    """AWS, "Signature Calculations for the Authorization Header", example GET Bucket (List Objects)."""
    made = S3Client(
        S3Target(
            bucket="examplebucket", endpoint="s3.amazonaws.com", virtual_host=True, access_key="AKIAIOSFODNN7EXAMPLE",
            secret_key="wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
        ), 1.0,
    )  # fmt: skip
    headers = made._signed("GET", "/", "max-keys=2&prefix=J", now="20130524T000000Z")
    made.close()
    assert headers["host"] == "examplebucket.s3.amazonaws.com"
    assert headers["authorization"].endswith(
        "Signature=34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"
    )


def test_lengths_deletes_and_lists(client: S3Client) -> None:
    client.check_bucket()
    Bucket.objects = {f"ns/{i}": i for i in range(5)} | {"other/1": 7}
    assert client.lengths(["ns/3", "ns/9", "other/1"]) == [3, -1, 7]
    assert list(client.below("ns/")) == [f"ns/{i}" for i in range(5)], "over several answers"
    client.delete(["ns/1", "ns/9"])
    assert sorted(Bucket.objects) == ["ns/0", "ns/2", "ns/3", "ns/4", "other/1"]
    assert list(client.below("nothing/")) == []


def test_a_refusal_is_an_error_without_names(client: S3Client) -> None:
    """F94, F68: an error is never "not there", and never counts as deleted."""
    Bucket.objects = {"ns/1": 5}
    Bucket.status = 403
    for call in (client.check_bucket, lambda: client.lengths(["ns/1"]), lambda: client.delete(["ns/1"])):
        with pytest.raises(S3Error, match="403") as caught:
            call()
        assert "s3cret" not in str(caught.value)
    with pytest.raises(S3Error, match="403"):
        list(client.below("ns/"))
    assert "s3cret" not in repr(target(1))


def test_a_connection_that_the_server_closed_is_made_again(client: S3Client, server: ThreadingHTTPServer) -> None:
    client.check_bucket()
    for connection in client._connections:
        assert connection.sock is not None
        connection.sock.shutdown(socket.SHUT_RDWR)
    client.check_bucket()
    assert len(client._connections) == 1


def test_a_server_that_hangs_costs_the_time_out_once() -> None:
    """Connections are accepted by the kernel, nothing answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        made = S3Client(target(silent.getsockname()[1]), 0.2)
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            made.lengths(["a"])
        assert time.monotonic() - began < 2.0
        made.close()


def test_nothing_works_after_close(client: S3Client) -> None:
    client.close()
    client.close()
    with pytest.raises(RuntimeError):
        client.lengths(["a"])
    with pytest.raises(RuntimeError):
        client.check_bucket()


def test_a_bucket_that_cannot_be_used_says_why(client: S3Client) -> None:
    Bucket.status = 404
    with pytest.raises(S3Error) as caught:
        client.check_bucket()
    assert describe_exception(caught.value) == "the bucket answered 404: there is no such bucket"
