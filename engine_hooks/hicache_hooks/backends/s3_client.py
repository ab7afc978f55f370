"""The few S3 requests that a page store needs beside its data path: HEAD, DELETE, list by prefix. Standard library.

NIXL's OBJ plugin moves bytes but cannot delete, list, or tell an object's length (query_memory says ``{}``), and its
calls block for 25 to 58 s when the server is gone. Here every request has a socket timeout. Requests are signed
(AWS Signature Version 4, single chunk; requests have no body).
"""

import datetime
import hashlib
import hmac
import http.client
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import quote, urlencode, urlsplit
from xml.etree import ElementTree

from hicache_hooks.describe import Said

PARALLEL = 8  # requests at once; also the number of kept connections
LIST_PAGE = 1000
MAX_ANSWER_BYTES = 4 << 20  # a page of 1000 long keys is below 1 MiB

# HEAD has no body that would say more.
_BUCKET_ANSWERS = {
    301: "it is in another region",
    400: "the request was not understood: region, or a key for another server?",
    403: "these credentials may not see it, or are wrong",
    404: "there is no such bucket",
}


class S3Error(Said, OSError):
    """A request failed; the text holds method and status only, never a key or a signature (F94)."""


class Answer(NamedTuple):
    """Status, length of the object (-1 when not said), body."""

    status: int
    length: int
    body: bytes


@dataclass(frozen=True, slots=True)
class S3Target:
    """Where a bucket is and how to sign for it. Holds a secret: never logged."""

    bucket: str
    endpoint: str = ""  # "host:port" or a URL; empty: AWS
    scheme: str = "https"
    region: str = "us-east-1"
    access_key: str = ""
    secret_key: str = ""
    session_token: str = ""
    virtual_host: bool = False
    ca_bundle: str = ""

    def __repr__(self) -> str:
        return f"S3Target({self.scheme}, {self.bucket!r})"

    def host(self) -> str:
        """``host[:port]`` of the bucket."""
        host = urlsplit(self.endpoint).netloc if "//" in self.endpoint else self.endpoint.rstrip("/")
        host = host or f"s3.{self.region}.amazonaws.com"
        return f"{self.bucket}.{host}" if self.virtual_host else host

    def path(self, key: str) -> str:
        """Encoded path of an object, or of the bucket (empty key)."""
        inside = quote(key, safe="/-_.~")
        return f"/{inside}" if self.virtual_host else f"/{quote(self.bucket, safe='-_.~')}/{inside}"

    def tls(self) -> bool:
        """True for https; the endpoint's own scheme wins."""
        return (urlsplit(self.endpoint).scheme if "//" in self.endpoint else self.scheme) == "https"


class S3Client:
    """One bucket. Thread-safe; each thread keeps one connection. After ``close`` every request raises."""

    def __init__(self, target: S3Target, timeout_s: float) -> None:
        """``timeout_s``: most seconds without progress of one request."""
        self._target = target
        self._timeout_s = timeout_s
        self._local = threading.local()
        self._lock = threading.Lock()
        self._connections: set[http.client.HTTPConnection] = set()
        self._pool: ThreadPoolExecutor | None = ThreadPoolExecutor(PARALLEL, "s3")
        self._tls = ssl.create_default_context(cafile=target.ca_bundle or None) if target.tls() else None

    def close(self) -> None:
        """Close every connection. Idempotent."""
        with self._lock:
            pool, self._pool = self._pool, None
            connections, self._connections = self._connections, set()
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
        for connection in connections:
            connection.close()
        if pool is not None:
            pool.shutdown(wait=True)  # requests end at the latest with their timeout

    # ------------------------------------------------------------ what a store asks

    def check_bucket(self) -> None:
        """Raises ``S3Error`` unless the bucket is there and readable."""
        answer = self._request("HEAD", "")
        if answer.status != 200:
            why = _BUCKET_ANSWERS.get(answer.status, "")
            raise S3Error(f"the bucket answered {answer.status}{why and f': {why}'}")

    def lengths(self, keys: list[str]) -> list[int]:
        """Bytes of each object; -1 when it is not there.

        Raises:
            S3Error, OSError: the server failed; then nothing is known about any key.
        """
        return self._each(self._length, keys)

    def delete(self, keys: list[str]) -> None:
        """Remove objects; missing ones are no error.

        Raises:
            S3Error, OSError: at least one could not be removed.
        """
        self._each(self._delete, keys)

    def below(self, prefix: str) -> Iterator[str]:
        """Keys that start with ``prefix``.

        Raises:
            S3Error, OSError: the server failed.
        """
        token = ""
        while True:
            query = {"list-type": "2", "max-keys": str(LIST_PAGE), "prefix": prefix}
            if token:
                query["continuation-token"] = token
            answer = self._request("GET", "", query)
            if answer.status != 200:
                raise S3Error(f"list answered {answer.status}")
            try:
                root = ElementTree.fromstring(answer.body)
            except ElementTree.ParseError:
                raise S3Error("list answered something else than XML") from None
            space = root.tag.partition("}")[0] + "}" if "}" in root.tag else ""
            for found in root.iter(f"{space}Contents"):
                yield found.findtext(f"{space}Key") or ""
            token = root.findtext(f"{space}NextContinuationToken") or ""
            if root.findtext(f"{space}IsTruncated") != "true" or not token:
                return

    # ------------------------------------------------------------ requests

    def _length(self, key: str) -> int:
        answer = self._request("HEAD", key)
        if answer.status == 404:
            return -1
        if answer.status != 200:
            raise S3Error(f"HEAD answered {answer.status}")
        return answer.length

    def _delete(self, key: str) -> int:
        answer = self._request("DELETE", key)
        if answer.status not in (200, 204, 404):
            raise S3Error(f"DELETE answered {answer.status}")
        return 0

    def _each(self, one: Callable[[str], int], keys: list[str]) -> list[int]:
        pool = self._pool
        if pool is None:
            raise RuntimeError("the S3 client is closed")
        return list(pool.map(one, keys))

    def _request(self, method: str, key: str, query: Mapping[str, str] | None = None) -> Answer:
        path = self._target.path(key)
        text = urlencode(sorted((query or {}).items()), quote_via=quote, safe="-_.~")
        headers = self._signed(method, path, text)
        url = f"{path}?{text}" if text else path
        connection, fresh = self._connection()
        try:
            return _exchange(connection, method, url, headers)
        except (http.client.HTTPException, OSError) as exc:
            self._forget(connection)
            # A kept connection may have been closed by the server meanwhile: once more on a new one.
            if fresh or isinstance(exc, TimeoutError):
                raise _plain(exc) from None
        connection, _ = self._connection()
        try:
            return _exchange(connection, method, url, headers)
        except (http.client.HTTPException, OSError) as exc:
            self._forget(connection)
            raise _plain(exc) from None

    def _connection(self) -> tuple[http.client.HTTPConnection, bool]:
        kept: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if kept is not None:
            return kept, False
        host = self._target.host()
        made: http.client.HTTPConnection = (
            http.client.HTTPConnection(host, timeout=self._timeout_s)
            if self._tls is None
            else http.client.HTTPSConnection(host, timeout=self._timeout_s, context=self._tls)
        )
        with self._lock:
            if self._pool is None:
                raise RuntimeError("the S3 client is closed")
            self._connections.add(made)
        self._local.connection = made
        return made, True

    def _forget(self, connection: http.client.HTTPConnection) -> None:
        connection.close()
        with self._lock:
            self._connections.discard(connection)
        self._local.connection = None

    def _signed(self, method: str, path: str, query: str, body: bytes = b"", now: str = "") -> dict[str, str]:
        target = self._target
        content = hashlib.sha256(body).hexdigest()
        now = now or datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
        headers = {"host": target.host(), "x-amz-content-sha256": content, "x-amz-date": now}
        if target.session_token:
            headers["x-amz-security-token"] = target.session_token
        if not target.access_key:
            return headers  # an open server
        names = ";".join(sorted(headers))
        lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
        canonical = "\n".join((method, path, query, lines, names, content))
        scope = f"{now[:8]}/{target.region}/s3/aws4_request"
        signing = "\n".join(("AWS4-HMAC-SHA256", now, scope, hashlib.sha256(canonical.encode()).hexdigest()))
        key = f"AWS4{target.secret_key}".encode()
        for part in (now[:8], target.region, "s3", "aws4_request"):
            key = hmac.digest(key, part.encode(), "sha256")
        signature = hmac.digest(key, signing.encode(), "sha256").hex()
        credential = f"Credential={target.access_key}/{scope}"
        headers["authorization"] = f"AWS4-HMAC-SHA256 {credential}, SignedHeaders={names}, Signature={signature}"
        return headers


def _exchange(connection: http.client.HTTPConnection, method: str, url: str, headers: dict[str, str]) -> Answer:
    connection.request(method, url, headers=headers)
    response = connection.getresponse()
    body = response.read(MAX_ANSWER_BYTES)
    if response.read(1):
        raise S3Error("an answer that is too long")
    length = response.headers.get("content-length", "")
    return Answer(response.status, int(length) if length.isdigit() else -1, body)


def _plain(exc: Exception) -> OSError:
    return exc if isinstance(exc, OSError) else S3Error(type(exc).__name__)
