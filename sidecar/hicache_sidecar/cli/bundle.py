"""``bundle``: what a bug report needs, in one JSON file that is written for its owner alone.

It asks what every viewer may ask. A part that cannot be had is named with its error instead, so that a bundle can be
made of a host whose sidecar is down. The sidecar shows no secret, and texts are as it redacted them; fields that bear a
secret's name are blanked here once more, at any depth.
"""

from typing import Any

from hicache_proto.errors import HicacheError
from hicache_proto.secret_names import is_secret_name
from hicache_sidecar.cli.arguments import parse, parser
from hicache_sidecar.cli.context import EXIT_DONE, Context, UsageError
from hicache_sidecar.client.connection import Connection
from hicache_sidecar.client.errors import ClientError

FORMAT = 1
ASKED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("status", {"type": "status", "fresh": True}),
    ("idle", {"type": "idle"}),
    ("ranks", {"type": "ranks"}),
    ("backends", {"type": "backends"}),
    ("failover", {"type": "failover"}),
    ("operations", {"type": "operations"}),
    ("history", {"type": "history"}),
)
PART_TIMEOUT_S = 10.0
PACKAGES = (
    "hicache-sidecar", "msgspec", "trio", "pyzmq", "torch", "sglang", "nixl-cu12", "nixl", "mooncake-transfer-engine",
    "mooncake-transfer-engine-non-cuda", "aibrix-kvcache", "redis",
)  # fmt: skip
JOURNAL_LINES = 500
JOURNAL_TIMEOUT_S = 10.0
BLANK = "***"


def run_bundle(context: Context, arguments: list[str]) -> int:
    """Write the file; 0 also when parts are missing, which are named."""
    made = parser("bundle", "Everything that a bug report needs, in one new file, without secrets. Look through it.")
    made.add_argument("path", nargs="?", help="of the new file (default: hicache-bundle-TIME.json here)")
    made.add_argument("--unit", default="hicache-sidecar.service", help="whose journal (default: %(default)s)")
    options = parse(context, made, arguments)
    import time

    at = time.gmtime()
    path = options.path or time.strftime("hicache-bundle-%Y%m%dT%H%M%SZ.json", at)
    parts, failed = _asked(context)
    parts["host"] = _host()
    parts["journal"] = journal = _journal(options.unit)
    if "error" in journal:
        failed["journal"] = journal["error"]
    document = {"format": FORMAT, "made_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", at), "failed": failed, **parts}
    nbytes = _write(path, blanked(document))
    if context.json:
        context.document({"path": path, "bytes": nbytes, "failed": failed})
    else:
        context.say(f"{path}: {nbytes} bytes")
        for name, why in failed.items():
            context.note(f"not in it: {name}: {why}")
    return EXIT_DONE


def _asked(context: Context) -> tuple[dict[str, Any], dict[str, str]]:
    """Each part, and what failed instead."""
    parts: dict[str, Any] = {}
    failed: dict[str, str] = {}
    try:
        with context.connect() as connection:
            parts["sidecar"] = connection.hello
            for name, body in ASKED:
                try:
                    parts[name] = connection.call(body, PART_TIMEOUT_S)
                except HicacheError as error:  # this part alone
                    failed[name] = error.message
            parts["events"] = _events(connection)
    except (HicacheError, ClientError) as error:
        for name in ("sidecar", *(name for name, _ in ASKED), "events"):
            if name not in parts:
                failed.setdefault(name, error.message)
    return parts, failed


def _events(connection: Connection) -> list[dict[str, Any]]:
    """A snapshot, and the events before it that the sidecar still has."""
    snapshot = next(connection.stream({"type": "watch", "last_event_id": None}, PART_TIMEOUT_S), None)
    if snapshot is None:  # the sidecar is stopping
        return []
    found = [snapshot]
    last, oldest = snapshot["id"], (snapshot.get("data") or {}).get("oldest_event_id")
    if oldest is not None and oldest <= last:
        for event in connection.stream({"type": "watch", "last_event_id": oldest - 1}, PART_TIMEOUT_S):
            found.append(event)
            if event["id"] >= last:
                break
    return found


def _host() -> dict[str, Any]:
    """Of this host, with the packages of this Python: the engine's may have others."""
    import importlib.metadata
    import os
    import platform
    import sys

    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "platform": platform.platform(),
        "python": sys.version.split()[0],
        "processors": os.cpu_count(),
        "packages": versions,
    }


def _journal(unit: str) -> dict[str, Any]:
    """The last lines of the unit's journal."""
    import subprocess

    argv = ["journalctl", "--unit", unit, "--lines", str(JOURNAL_LINES), "--no-pager", "--output", "short-iso"]
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, errors="replace", timeout=JOURNAL_TIMEOUT_S, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except FileNotFoundError:
        return {"error": "no journalctl here"}
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": f"journalctl: {type(error).__name__}"}
    if done.returncode:
        return {"error": f"journalctl exited with {done.returncode}: {done.stderr.strip()[:200]}"}
    return {"unit": unit, "lines": done.stdout.splitlines()}


def blanked(value: Any) -> Any:
    """A copy in which what bears a secret's name is blank."""
    if isinstance(value, dict):
        return {
            key: BLANK if isinstance(item, str) and item and is_secret_name(str(key)) else blanked(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [blanked(item) for item in value]
    return value


def _write(path: str, document: dict[str, Any]) -> int:
    """A new file, complete or not there. Returns its length.

    Raises:
        UsageError: the file exists, or cannot be written.
    """
    import os
    from contextlib import suppress

    import msgspec

    text = msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"
    made = False
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        made = True
        with open(fd, "wb") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"bundle: {path} is there already") from None
    except (OSError, ValueError) as error:
        if made:
            with suppress(OSError):
                os.unlink(path)
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"bundle: cannot write {path}: {why}") from None
    return len(text)
