"""The accept loop that both servers share: connections outlive it, so that a stop can let them end."""

import socket
from collections.abc import Awaitable, Callable
from functools import partial

import trio

Handler = Callable[[trio.SocketStream], Awaitable[None]]


async def accept_until(
    closing: trio.Event,
    sockets: list[socket.socket],
    handler: Handler,
    connections: trio.Nursery,
    task_status: trio.TaskStatus[None],
) -> None:
    """Accept on ``sockets`` until ``closing`` is set; each connection runs ``handler`` in ``connections``."""
    listeners = [trio.SocketListener(trio.socket.from_stdlib_socket(sock)) for sock in sockets]
    with trio.CancelScope() as accepting:
        async with trio.open_nursery() as nursery:

            async def stop_accepting() -> None:
                await closing.wait()
                accepting.cancel()

            nursery.start_soon(stop_accepting)
            await nursery.start(partial(trio.serve_listeners, handler, listeners, handler_nursery=connections))
            task_status.started()
