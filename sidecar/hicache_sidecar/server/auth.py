"""HTTP credentials: bearer tokens from files, compared in constant time, and the loopback rule.

Without any token, a loopback server gives the role operator to everybody who can reach it; what destroys data or
loads code needs a token (interface.md). Any other bind without a token refuses to start (failures.md F93). With a
token, every route but the two health ones needs it.
"""

import hashlib
import hmac
import logging
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from hicache_proto.errors import Unauthenticated
from hicache_sidecar.core.actor import Actor, Role

log = logging.getLogger("hicache.server")

CREDENTIAL = "http-token"  # LoadCredential= name in the unit
VIEWER_CREDENTIAL = "http-viewer-token"
MAX_TOKEN_FILE_BYTES = 4096
GUESSABLE_CHARS = 16  # a shorter token can be guessed over the network


class TokenError(Exception):
    """A token file cannot be used; the text names the file, never its content."""


def read_token(path: Path) -> str:
    """The token in a file: one line, surrounding white space ignored.

    Raises:
        TokenError: unreadable, no regular file, empty, more than one line, not printable ASCII, or writable by others.
    """
    try:
        # Not blocking: opening a pipe that nobody writes would hold up the start for ever, and a reload the loop.
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            raw = file.read(MAX_TOKEN_FILE_BYTES + 1) if stat.S_ISREG(mode) else b""
    except OSError as exc:
        raise TokenError(f"token file {path} cannot be read: {exc.strerror}") from exc
    if not stat.S_ISREG(mode):
        raise TokenError(f"token file {path} is not a regular file")
    if mode & stat.S_IWOTH:
        raise TokenError(f"token file {path} can be written by everybody: chmod o-w it")
    if mode & stat.S_IROTH:
        log.warning("token file %s can be read by everybody on this host", path)
    token = raw.strip()
    if not token or len(raw) > MAX_TOKEN_FILE_BYTES:
        raise TokenError(f"token file {path} holds no token (1 to {MAX_TOKEN_FILE_BYTES} characters)")
    if len(token) < GUESSABLE_CHARS:
        log.warning("token file %s holds less than %d characters, which can be guessed", path, GUESSABLE_CHARS)
    if not all(0x21 <= byte <= 0x7E for byte in token):
        raise TokenError(f"token file {path} holds no token (one line of printable ASCII, no spaces)")
    return token.decode("ascii")


@dataclass(frozen=True)
class Tokens:
    """SHA-256 digests of the configured tokens; the texts are not kept."""

    full: bytes | None = None
    viewer: bytes | None = None

    @classmethod
    def load(cls, token_file: Path | None, viewer_file: Path | None, credentials_dir: Path | None = None) -> "Tokens":
        """Read the configured files; a systemd credential stands in where the config names none.

        Raises:
            TokenError: a file cannot be used, both hold the same token, or there is a viewer token alone.
        """
        if credentials_dir is not None:
            token_file = token_file or _existing(credentials_dir / CREDENTIAL)
            viewer_file = viewer_file or _existing(credentials_dir / VIEWER_CREDENTIAL)
        full = _digest(read_token(token_file)) if token_file else None
        viewer = _digest(read_token(viewer_file)) if viewer_file else None
        if viewer and not full:
            raise TokenError("http.viewer_token_file needs http.token_file: with it alone nobody could change anything")
        if viewer and viewer == full:
            raise TokenError("http.token_file and http.viewer_token_file hold the same token")
        return cls(full=full, viewer=viewer)

    @property
    def required(self) -> bool:
        """True when a request needs a token."""
        return self.full is not None

    def actor(self, authorization: str | None) -> Actor:
        """Who sends a request with this Authorization header.

        Raises:
            Unauthenticated: a token is needed, and this is none or a wrong one.
        """
        if not self.required:
            return Actor(name="loopback", role=Role.OPERATOR, transport="http")
        if authorization is None:
            raise Unauthenticated("this route needs a bearer token", details={"reason": "no_token"})
        scheme, _, token = authorization.partition(" ")
        digest = _digest(token.strip()) if scheme.lower() == "bearer" else b""
        # Both comparisons always run, over digests of one length: the time says nothing about either token.
        full = hmac.compare_digest(digest, self.full or b"")
        viewer = hmac.compare_digest(digest, self.viewer or b"") and self.viewer is not None
        if full:
            return Actor(name="token", role=Role.ADMIN, transport="http")
        if viewer:
            return Actor(name="viewer-token", role=Role.VIEWER, transport="http")
        raise Unauthenticated("wrong bearer token", details={"reason": "wrong_token"})


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _existing(path: Path) -> Path | None:
    """A credential that the unit was given. One that is there and cannot be read is an error, never "no token"."""
    try:
        return path if path.is_file() else None
    except OSError as exc:
        raise TokenError(f"credential {path} cannot be read: {exc.strerror}") from exc
