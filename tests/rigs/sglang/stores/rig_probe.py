"""A second plugin, for the bench: how long each pass of the leader's scheduler loop keeps the scheduler busy.

A pass lasts from one pull of requests to the next, or to the sleep in between. Passes over a fifth of a millisecond are
appended to the file named by RIG_PROBE, as "end-of-pass busy-seconds" on the system's monotonic clock. Both our
operations and the engine's own run inside such a pass, so both are measured by the same instrument.
"""

import os
import time

WORTH_S = 0.0002


def entry():
    """Entry point of group `sglang.srt.plugins`."""
    path = os.environ.get("RIG_PROBE")
    if not path:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    state = {"began": time.monotonic(), "leader": False, "file": None}

    def ended():
        """The scheduler was busy from ``began`` until now."""
        now = time.monotonic()
        busy, state["began"] = now - state["began"], now
        if state["leader"] and busy > WORTH_S:  # other ranks wait here for their leader
            if state["file"] is None:
                state["file"] = open(path, "a", buffering=1)  # noqa: SIM115 - as long as the process
            state["file"].write(f"{now:.6f} {busy:.6f}\n")

    def around_pull(pull, *args, **kwargs):
        ended()
        pulled = pull(*args, **kwargs)
        state["leader"] = pulled is not None
        return pulled

    def around_sleep(sleep, *args, **kwargs):
        ended()
        try:
            return sleep(*args, **kwargs)
        finally:
            state["began"] = time.monotonic()

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
