"""``hicache-engine``: flags, the HTTP front, and the scheduler processes behind it."""

import argparse
import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import msgspec

from hicache_hooks.embedded.options import EngineOptions, Layout, ModelShape, WritePolicy, split_address
from hicache_proto import extras

PROG = "hicache-engine"


def parser() -> argparse.ArgumentParser:
    """Flags; their defaults are those of ``EngineOptions``."""
    base, shape = EngineOptions(), ModelShape()
    p = argparse.ArgumentParser(prog=PROG, description="A small LLM engine with a three-tier KV cache (HiCache).")
    add = p.add_argument
    add("--sidecar", metavar="ENDPOINT", help="hooks.sock of hicache-sidecar (ipc://…); default: $HICACHE_SIDECAR")
    add("--http", metavar="HOST:PORT", default=base.http, help="default: %(default)s; port 0 picks a free one")
    add("--engine-id", default=base.engine_id, help="what this engine calls itself at the sidecar (%(default)s)")
    add("--dp", type=int, default=base.dp, help="data-parallel replicas, one process each (%(default)s)")
    add("--device", choices=("cpu", "cuda"), default=base.device)
    add("--layout", choices=get_args(Layout), default=base.layout, help="of host pages (%(default)s)")
    add("--page-size", type=int, default=base.page_size, metavar="TOKENS", help="(%(default)s)")
    add("--l1-tokens", type=int, default=base.l1_tokens, metavar="N", help="device pool (%(default)s)")
    add("--l2-tokens", type=int, default=base.l2_tokens, metavar="N", help="host pool (%(default)s)")
    add("--context", type=int, default=base.context, metavar="N", help="prompt and answer (%(default)s)")
    add("--write-policy", choices=get_args(WritePolicy), default=base.write_policy, help="(%(default)s)")
    add("--chunk-tokens", type=int, default=base.chunk_tokens, metavar="N", help="prefill chunk (%(default)s)")
    add("--max-running", type=int, default=base.max_running, metavar="N", help="batch size (%(default)s)")
    add("--stop-timeout", type=float, default=base.stop_timeout, metavar="S", help="(%(default)s)")
    sizes = p.add_argument_group("model", "Weights are drawn from the seed. Float32.")
    for name in ("seed", "layers", "hidden", "heads", "kv_heads", "head_dim"):
        flag = "--" + name.replace("_", "-")
        sizes.add_argument(flag, type=int, default=getattr(shape, name), metavar="N", help="(%(default)s)")
    sizes.add_argument("--intermediate", type=int, default=0, metavar="N", help="(3 x hidden)")
    return p


def parse(argv: Sequence[str] | None = None) -> EngineOptions:
    """Options from the command line and the environment; exits with 2 on a bad value."""
    p = parser()
    values: dict[str, Any] = vars(p.parse_args(argv))
    values["sidecar"] = values["sidecar"] or os.environ.get("HICACHE_SIDECAR") or None
    values["model"] = {name: values.pop(name) for name in ModelShape.__struct_fields__}
    try:
        options = msgspec.convert(values, EngineOptions)
        options.check()
    except (ValueError, msgspec.ValidationError) as error:
        p.error(str(error))
    return options


def entry() -> None:
    """Console script."""
    sys.exit(main())


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT; 0 when everything left in good order."""
    options = parse(argv)
    if absent := extras.missing(extras.ENGINE):
        print(f"{PROG} {extras.advice(absent, 'engine')}", file=sys.stderr)
        return 1
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=f"{PROG}: %(levelname)s: %(message)s")
    try:
        listener = _listen(options.http)
    except OSError as error:
        print(f"{PROG}: cannot listen on {options.http}: {error}", file=sys.stderr)
        return 1
    with listener, _private_directory() as directory:
        return asyncio.run(_serve(options, listener, directory))


async def _serve(options: EngineOptions, listener: socket.socket, directory: str) -> int:
    import uvicorn

    from hicache_hooks.embedded.front import Front
    from hicache_hooks.embedded.router import Router
    from hicache_hooks.embedded.supervisor import Supervisor

    class Server(uvicorn.Server):
        """Signals are ours: they stop the schedulers too."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    began = time.monotonic()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    endpoint = f"ipc://{directory}/front.sock"
    router = Router(options.dp)
    router.bind(endpoint)
    supervisor = Supervisor(options, router, endpoint)
    front = Front(router, options)
    supervisor.start()
    config = uvicorn.Config(
        front.app(), log_level="warning", access_log=False, lifespan="off", ws="none",
        timeout_graceful_shutdown=max(1, int(options.stop_timeout / 2)),
    )  # fmt: skip
    server = Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stopped = asyncio.create_task(stop.wait())
    ready = asyncio.create_task(supervisor.ready())
    await asyncio.wait({stopped, ready, serving}, return_when=asyncio.FIRST_COMPLETED)
    started = ready.done() and ready.result()
    if started:
        _say_ready(options, listener, time.monotonic() - began)
        await asyncio.wait({stopped, serving}, return_when=asyncio.FIRST_COMPLETED)
    by = time.monotonic() + options.stop_timeout
    front.closing = True
    server.should_exit = True  # no new connections; open requests have half of the budget
    await asyncio.wait({serving}, timeout=options.stop_timeout / 2 + 0.5)
    clean = await supervisor.stop(max(2.0, by - time.monotonic()))
    for task in (serving, stopped, ready):
        task.cancel()
    await asyncio.gather(serving, stopped, ready, return_exceptions=True)
    router.close()
    if ready.done() and not started:
        print(f"{PROG}: a scheduler process could not be started; its message is above", file=sys.stderr)
        return 1
    return 0 if clean else 1


def _say_ready(options: EngineOptions, listener: socket.socket, seconds: float) -> None:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    sidecar = options.sidecar or "none"
    print(
        f"{PROG}: ready on http://{shown}:{port} dp={options.dp} sidecar={sidecar} after {seconds:.1f} s",
        file=sys.stderr, flush=True,
    )  # fmt: skip


def _listen(address: str) -> socket.socket:
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


@contextlib.contextmanager
def _private_directory() -> Iterator[str]:
    """0700, gone afterwards; the runtime directory is preferred to the shared temporary folder (F96)."""
    directory = tempfile.mkdtemp(prefix="hicache-engine-", dir=os.environ.get("XDG_RUNTIME_DIR") or None)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
