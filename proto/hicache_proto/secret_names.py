"""Which option holds a secret, by its name: one answer for the hooks and the sidecar (failures.md F94).

A name tells by whole words (``token`` does, ``tokenizer`` and ``max_tokens`` do not), unless its last word says that it
is something else: where a secret lies (``password_file``) or a time (``token_ttl``). The knobs of the prefetch and of
the guard are ours and hold none. A word that is nearly one of them tells as well: ``pasword`` is refused as an unknown
option, and is then shown with the refused operation.
"""

import difflib
import itertools
import re
from functools import lru_cache

from hicache_proto.model import KNOBS

WORDS = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")
SECRET_WORDS = frozenset(
    {
        "password", "passwd", "pwd", "passphrase", "secret", "token", "credential", "credentials", "accesskey",
        "secretkey", "apikey", "privatekey", "authkey", "auth", "authorization", "signature", "sas",
    }
)  # fmt: skip
# ``key`` alone is a cache key; after one of these it is a secret.
KEY_OWNERS = frozenset({"access", "secret", "api", "private", "encryption", "auth", "account", "session", "sas"})
SHORT = frozenset({"ak", "sk"})  # as object stores name access and secret key
# Long enough to be told when a letter is missing, doubled or out of place ("pasword", "secert").
LONG_WORDS = ("password", "passphrase", "secret", "credential", "credentials", "accesskey", "secretkey", "privatekey")
NEARNESS = 0.8  # of difflib, 0..1
HARMLESS_ENDS = frozenset({"file", "path", "ttl", "s", "seconds"})


@lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """True when an option of this name holds a secret by itself."""
    if name in KNOBS or name.startswith("guard_"):
        return False
    words = [word.lower() for word in WORDS.findall(name)]
    if not words or words[-1] in HARMLESS_ENDS:
        return False
    if not SECRET_WORDS.isdisjoint(words) or words[0] in SHORT or words[-1] in SHORT:
        return True
    if any(_misspelt(word) for word in words):
        return True
    return any(b == "key" and a in KEY_OWNERS for a, b in itertools.pairwise(words))


def _misspelt(word: str) -> bool:
    near = (known for known in LONG_WORDS if abs(len(known) - len(word)) <= 1)
    return any(difflib.SequenceMatcher(None, word, known).ratio() >= NEARNESS for known in near)
