"""A second plugin, for the bench: how long each pass of the leader's scheduler loop keeps the scheduler busy.

A pass lasts from one pull of requests to the next; where the scheduler sleeps, from the end of one sleep to the next,
which is as long as a request that comes at the wrong moment waits. Passes over a fifth of a millisecond are written to
the file named by RIG_PROBE, as "end-of-pass busy-seconds cpu-seconds" on the system's monotonic clock and that of the
thread. Both our operations and the engine's own run inside such a pass, so both are measured by the same instrument.

It writes right before a sleep, outside any pass: a write lets go of the interpreter lock, and would let other threads
into the pass that it measures.
"""

import os
import time

WORTH_S = 0.0002
MANY = 1000  # rows that a scheduler which does not sleep keeps


def entry():
    """Entry point of group `sglang.srt.plugins`."""
    path = os.environ.get("RIG_PROBE")
    if not path:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    state = {"began": time.monotonic(), "cpu": time.thread_time(), "leader": False, "woken": False, "file": None}
    rows = []

    def ended():
        """The scheduler was busy from ``began`` until now."""
        now, cpu = time.monotonic(), time.thread_time()
        busy, used = now - state["began"], cpu - state["cpu"]
        state["began"], state["cpu"] = now, cpu
        if state["leader"] and busy > WORTH_S:  # other ranks wait here for their leader
            rows.append(f"{now:.6f} {busy:.6f} {used:.6f}\n")

    def write():
        if rows:
            if state["file"] is None:
                state["file"] = open(path, "a")  # noqa: SIM115 - as long as the process
            state["file"].writelines(rows)
            state["file"].flush()
            rows.clear()

    def around_pull(pull, *args, **kwargs):
        if state["woken"]:
            state["woken"] = False  # the pass began when the sleep ended
        else:
            ended()
            if len(rows) >= MANY:
                write()
        pulled = pull(*args, **kwargs)
        state["leader"] = pulled is not None
        return pulled

    def around_sleep(sleep, *args, **kwargs):
        ended()
        write()
        try:
            return sleep(*args, **kwargs)
        finally:
            state["began"], state["cpu"], state["woken"] = time.monotonic(), time.thread_time(), True

    HookRegistry.register(
        "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver._pull_raw_reqs",
        around_pull, HookType.AROUND,
    )  # fmt: skip
    HookRegistry.register("sglang.srt.managers.scheduler_components.idle_sleeper.IdleSleeper.maybe_sleep",
                          around_sleep, HookType.AROUND)  # fmt: skip


def install(target):
    """Make the plugin findable in `target`, a directory on the server's path."""
    info = target / "rig_probe-0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rig-probe\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nrig_probe = rig_probe:entry\n")
