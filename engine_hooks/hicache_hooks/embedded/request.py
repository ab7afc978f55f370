"""One request on its way through a scheduler: held, waiting, loading, prefill, decode.

``held`` requests stand in front of the engine's queues while the gate is closed; the cache has not heard of them.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from hicache_hooks.embedded.batch import Span
from hicache_hooks.embedded.messages import Done, Submit
from hicache_hooks.embedded.options import EOS


@dataclass(slots=True, eq=False)
class Request:
    """``tokens`` grows by one per answer token; the first ``computed`` of them have their KV in ``pages``."""

    rid: str
    tokens: list[int]
    prompt_tokens: int
    max_new_tokens: int
    ignore_eos: bool
    arrived: float = field(default_factory=time.monotonic)
    begun: float = 0.0  # when it entered the queues: held requests arrive earlier
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    storage_tokens: int = 0

    @classmethod
    def of(cls, message: Submit) -> "Request":
        """A request that just arrived."""
        return cls(
            rid=message.rid,
            tokens=list(message.tokens),
            prompt_tokens=len(message.tokens),
            max_new_tokens=message.max_new_tokens,
            ignore_eos=message.ignore_eos,
        )

    @property
    def most_tokens(self) -> int:
        """KV slots it needs at most: the last answer token is never computed."""
        return self.prompt_tokens + self.max_new_tokens - 1

    @property
    def left(self) -> int:
        """Tokens known but not computed: more than one in prefill, one in decode."""
        return len(self.tokens) - self.computed

    @property
    def prefilling(self) -> bool:
        """True until the whole prompt is computed."""
        return self.computed < self.prompt_tokens

    @property
    def half_prefilled(self) -> bool:
        """Chunked prefill under way: some chunks are done, not all."""
        cached = self.device_tokens + self.host_tokens + self.storage_tokens
        return cached < self.computed < self.prompt_tokens

    def span(self, count: int) -> Span:
        """The next ``count`` tokens to compute."""
        end = self.computed + count
        return Span(self.tokens[self.computed : end], self.computed, self.pages, sample=end == len(self.tokens))

    @property
    def finish_reason(self) -> str | None:
        """Why it is over, None while it is not."""
        answer = len(self.tokens) - self.prompt_tokens
        if answer and not self.ignore_eos and self.tokens[-1] == EOS:
            return "stop"
        return "length" if answer >= self.max_new_tokens else None

    def done(self, reason: str) -> Done:
        """The answer."""
        return Done(
            rid=self.rid,
            output=self.tokens[self.prompt_tokens :],
            prompt_tokens=self.prompt_tokens,
            device=self.device_tokens,
            host=self.host_tokens,
            storage=self.storage_tokens,
            finish_reason=reason,
        )


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold ``tokens`` tokens."""
    return -(-tokens // page_size)


def oldest_ms(requests: Sequence[Request], now: float) -> int:
    """Age of the oldest request."""
    return int(1000 * (now - min(r.arrived for r in requests)))
