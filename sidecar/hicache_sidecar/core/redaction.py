"""Secrets out of everything that is shown: config strings, error texts, details (failures.md F94).

Which key names a secret is ``hicache_proto.secret_names``'s. Redaction is by key for anything that parses,
and by pattern for text that does not. Values learnt from a config can also be scrubbed from foreign text, such as
a vendor's exception that quotes what it was given. Pure.
"""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from hicache_proto.secret_names import is_secret_name

REDACTED = "***"
_MIN_SCRUB = 4  # shorter values would redact half of an innocent sentence

# The lookbehinds keep both patterns linear: a match starts at the start of a word only.
# key = value / "key": "value" / key: value, in text that did not parse
_KEY_IN_TEXT = re.compile(r"""(?<![\w.\-])(?P<key>["']?[A-Za-z_][\w.\-]*["']?)\s*[:=]\s*""")
_VALUE_IN_TEXT = re.compile(r"""\"(?:[^"\\]|\\.)*"?|'(?:[^'\\]|\\.)*'?|[^\s,;}\])]+""")
_URL_USERINFO = re.compile(
    r"(?<![A-Za-z0-9+.\-])(?P<scheme>[A-Za-z][A-Za-z0-9+.\-]*://)(?P<user>[^\s/@:]*):(?P<password>[^\s/@]+)@"
)


def redact_value(value: Any) -> Any:
    """A copy of a decoded document with secret values replaced, at any depth; URLs lose their password."""
    if isinstance(value, dict):
        return {
            k: (REDACTED if is_secret_name(str(k)) and not _empty(v) else redact_value(v)) for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact_value(v) for v in value]
    if isinstance(value, str):
        return _URL_USERINFO.sub(rf"\g<scheme>\g<user>:{REDACTED}@", value)
    return value


def redact_config(config: str | None) -> str | None:
    """An extra config string for showing: JSON by key, ``@/path`` as it is, anything else by pattern."""
    if config is None:
        return None
    text = config.strip()
    if text.startswith("@"):
        return config
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return redact_text(config)
    if not isinstance(document, dict | list):
        return redact_text(config)
    changed = redact_value(document)
    return config if changed == document else json.dumps(changed)


def redact_text(text: str, known: Iterable[str] = ()) -> str:
    """Free text with secret-looking assignments, URL passwords and ``known`` secret values replaced."""
    for secret in sorted(set(known), key=len, reverse=True):
        if len(secret) >= _MIN_SCRUB:
            text = text.replace(secret, REDACTED)

    text = _URL_USERINFO.sub(rf"\g<scheme>\g<user>:{REDACTED}@", text)
    done, parts = 0, []
    for start, end in _secret_spans(text):
        quote = text[start] if text[start] in "\"'" else ""
        parts += [text[done:start], quote, REDACTED, quote]
        done = end
    return "".join([*parts, text[done:]])


def _secret_spans(text: str) -> Iterator[tuple[int, int]]:
    """Where values of secret keys stand in free text. A plain key's value may itself hold an assignment."""
    at = 0
    while (key := _KEY_IN_TEXT.search(text, at)) is not None:
        at = key.end()
        value = _VALUE_IN_TEXT.match(text, at) if is_secret_name(key["key"].strip("\"'")) else None
        if value is not None:
            yield value.span()
            at = value.end()


def secrets_in(config: str | None) -> set[str]:
    """Secret values inside a JSON config, to be scrubbed from what others say about it."""
    if config is None:
        return set()
    try:
        document = json.loads(config)
    except (ValueError, RecursionError):
        return {config[start:end].strip("\"'") for start, end in _secret_spans(config)}
    found: set[str] = set()
    _collect(document, False, found)
    return found


def _collect(value: Any, secret: bool, found: set[str]) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            _collect(inner, secret or is_secret_name(str(key)), found)
    elif isinstance(value, list):
        for inner in value:
            _collect(inner, secret, found)
    elif isinstance(value, str):
        if secret:
            found.add(value)
        found.update(m["password"] for m in _URL_USERINFO.finditer(value))
    elif secret and value is not None and not isinstance(value, bool):
        found.add(str(value))


def _empty(value: Any) -> bool:
    return value is None or value == "" or isinstance(value, bool)


def scrub(value: Any, known: Iterable[str]) -> Any:
    """``redact_text`` on every string of a document, keys left alone."""
    known = list(known)
    if isinstance(value, dict):
        return {k: scrub(v, known) for k, v in redact_value(value).items()}
    if isinstance(value, list | tuple):
        return [scrub(v, known) for v in value]
    return redact_text(value, known) if isinstance(value, str) else value
