"""Every flag of ``hicache-engine`` in one struct, its defaults and its checks. Imports no torch: the front reads it.

The same struct travels to the scheduler processes as JSON, so that a rank is started from data, not from a
command line that would have to be parsed twice.
"""

from typing import Literal

import msgspec

VOCABULARY = 272  # 256 bytes, then specials; a multiple of 16 keeps rows of the output matrix aligned
BOS, EOS, PAD = 256, 257, 258

Layout = Literal["layer_first", "page_first", "page_first_direct", "page_head"]
WritePolicy = Literal["write_back", "write_through", "write_through_selective"]


class ModelShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes of the transformer. Float32 throughout; ``intermediate`` 0 means 3 x hidden."""

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 0
    seed: int = 0

    @property
    def mlp(self) -> int:
        """Width of the feed-forward layer."""
        return self.intermediate or 3 * self.hidden

    def check(self) -> None:
        """
        Raises:
            ValueError: a size that no model can have.
        """
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
        if self.hidden % 16 or self.mlp % 16 or self.head_dim % 16:
            raise ValueError("--hidden, --intermediate and --head-dim must be multiples of 16")
        if self.heads % self.kv_heads:
            raise ValueError("--heads must be a multiple of --kv-heads")
        if self.seed < 0:
            raise ValueError("--seed must not be negative")


class EngineOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one engine is started with. Names are the flags' with ``_`` for ``-``; interface.md fixes the defaults."""

    sidecar: str | None = None  # ZMQ endpoint of hicache-sidecar; None: serve without one
    http: str = "127.0.0.1:30000"
    engine_id: str = "embedded"
    dp: int = 1
    device: Literal["cpu", "cuda"] = "cpu"
    layout: Layout = "page_first"
    page_size: int = 16  # tokens
    l1_tokens: int = 8192
    l2_tokens: int = 32768
    context: int = 4096  # tokens of prompt and answer together
    write_policy: WritePolicy = "write_through"
    chunk_tokens: int = 256  # prompt tokens that one pass computes: bounds how long a pass holds up decoding
    max_running: int = 32  # requests in the running batch
    stop_timeout: float = 10.0  # seconds from SIGTERM to the last process gone
    model: ModelShape = ModelShape()

    def check(self) -> None:
        """
        Raises:
            ValueError: a value outside its range, or values that do not fit together.
        """
        self.model.check()
        for name in ("dp", "page_size", "l1_tokens", "l2_tokens", "context", "chunk_tokens", "max_running"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
        for name in ("l1_tokens", "l2_tokens"):
            if getattr(self, name) < self.page_size:
                raise ValueError(f"--{name.replace('_', '-')} must hold at least one page of {self.page_size} tokens")
        if not 0 < self.stop_timeout < 3600:
            raise ValueError("--stop-timeout must be between 0 and 3600 seconds")
        if not self.engine_id or len(self.engine_id) > 128:
            raise ValueError("--engine-id must have 1 to 128 characters")
        split_address(self.http)

    @property
    def l1_pages(self) -> int:
        """Pages of the device pool."""
        return self.l1_tokens // self.page_size

    @property
    def l2_pages(self) -> int:
        """Pages of the host pool."""
        return self.l2_tokens // self.page_size

    @property
    def request_tokens(self) -> int:
        """Most tokens, prompt and answer together, that one request may have: context, or what L1 can hold."""
        return min(self.context, self.l1_pages * self.page_size)


def split_address(text: str) -> tuple[str, int]:
    """``HOST:PORT`` or ``[V6]:PORT``.

    Raises:
        ValueError: not of that form.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"address {text!r}: expected HOST:PORT")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not host:
        raise ValueError(f"address {text!r}: the host is missing")
    return host, int(port)
