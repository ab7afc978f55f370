"""``hicachectl demo``: the main job, end to end, on the embedded engine.

Starts a real sidecar and a real engine with two replicas, runs the commands that a user would type, and checks after
each what it promises: exit code, effect, equal output. Any promise that is not kept ends the demo with exit code 1.
"""

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hicache_sidecar.cli.arguments import parse, parser
from hicache_sidecar.cli.context import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_NOT_IDLE, PROGRAM, Context
from hicache_sidecar.cli.demo_stage import Background, Stage, StageError, clean_environment
from hicache_sidecar.cli.demo_text import CARROLL, DICKENS

REPLICAS = 2
ANSWER_TOKENS = 48
BUSY_TOKENS = 900  # keeps one replica busy for some seconds
COMMAND_TIMEOUT_S = 90.0
SETTLE_TIMEOUT_S = 30.0
POLL_S = 0.05


class BrokenPromise(Exception):
    """Something came out otherwise than the demo says."""


def run_demo(context: Context, arguments: list[str]) -> int:
    """Run the demo; 0 when every promise was kept."""
    made = parser("demo", "The main job, end to end, on the embedded engine. Needs the extras sidecar and engine.")
    made.add_argument("--keep", action="store_true", help="keep the temporary directory (logs, pages)")
    parsed = parse(context, made, arguments)
    show = Show(context)
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    kept: Path | None = None
    try:
        _require_extras()
        with Stage(parsed.keep) as stage:
            kept = stage.path if parsed.keep else None
            Story(stage, show).tell()
        show.result = EXIT_DONE
    except (BrokenPromise, StageError) as error:
        show.failed(str(error))
    except KeyboardInterrupt:
        show.result = EXIT_INTERRUPTED
        show.failed("interrupted")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    show.end(kept)
    return show.result


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _require_extras() -> None:
    from hicache_proto import extras

    if absent := extras.missing(tuple(dict.fromkeys((*extras.SIDECAR, *extras.ENGINE)))):
        raise StageError(f"the demo {extras.advice(absent, 'sidecar', 'engine')}")


class Show:
    """What the user sees, and the same as one document for ``-o json``."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.result = EXIT_FAILED
        self.steps: list[dict[str, Any]] = []
        self.error: str | None = None
        self._begun = time.monotonic()

    def step(self, title: str) -> None:
        self.steps.append({"title": title, "commands": [], "checks": []})
        if not self.context.json:
            self.context.line(f"\n== {len(self.steps)}. {title}")
            sys.stdout.flush()

    def command(self, typed: str, output: str = "", code: int | None = None) -> None:
        self.steps[-1]["commands"].append({"command": typed, "output": output, "exit_code": code})
        if self.context.json:
            return
        self.context.line(f"$ {typed}")
        if not self.context.quiet:
            for line in output.rstrip().splitlines():
                self.context.line(f"  {line}")
        if code:
            self.context.line(f"  (exit code {code})")
        sys.stdout.flush()

    def expect(self, kept: bool, promise: str) -> None:
        """Note a promise.

        Raises:
            BrokenPromise: it was not kept.
        """
        self.steps[-1]["checks"].append({"promise": promise, "kept": bool(kept)})
        if not kept:
            raise BrokenPromise(promise)
        if not self.context.json:
            self.context.line(f"  ok: {promise}")

    def failed(self, why: str) -> None:
        self.error = why

    def end(self, kept: Path | None) -> None:
        seconds = round(time.monotonic() - self._begun, 1)
        checks = sum(len(step["checks"]) for step in self.steps)
        if self.context.json:
            self.context.document({"success": self.result == EXIT_DONE, "seconds": seconds, "checks": checks,
                                   "error": self.error, "steps": self.steps})  # fmt: skip
            return
        if self.error is not None:
            self.context.note(f"\n{PROGRAM}: demo FAILED: {self.error}")
        else:
            self.context.line(f"\nDone: {checks} checks held in {seconds:g} s; sidecar and engine are stopped.")
        if kept is not None:
            self.context.line(f"Kept: {kept}")


class Story:
    """The steps, in order."""

    def __init__(self, stage: Stage, show: Show) -> None:
        self.stage = stage
        self.show = show
        self.config = ""

    def tell(self) -> None:
        """All of it."""
        self.start()
        reference = self.plain()
        self.refusal()
        self.attach()
        self.store(reference)
        self.reload(reference)
        self.policy()
        self.swap(reference)
        self.detach(reference)

    # ---- helpers

    def ctl(self, *words: str, code: int = EXIT_DONE, typed: str | None = None) -> str:
        """Run one hicachectl command as a process of its own and check its exit code; returns what it printed."""
        ran = subprocess.run(
            [sys.executable, "-m", "hicache_sidecar.cli.main", *words],
            env=clean_environment() | {"HICACHE_SIDECAR_SOCKET": self.stage.socket},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False,
        )  # fmt: skip
        output = ran.stdout + ran.stderr
        self.show.command(typed or shlex.join([PROGRAM, *words]), output, ran.returncode)
        if ran.returncode != code:
            raise BrokenPromise(f"`{PROGRAM} {words[0]}` exits with {code} (it gave {ran.returncode})")
        return output

    def document(self, *words: str) -> dict[str, Any]:
        """A command's JSON document, without showing it."""
        ran = subprocess.run(
            [sys.executable, "-m", "hicache_sidecar.cli.main", "-o", "json", *words],
            env=clean_environment() | {"HICACHE_SIDECAR_SOCKET": self.stage.socket},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False,
        )  # fmt: skip
        decoded = json.loads(ran.stdout)
        return decoded if isinstance(decoded, dict) else {}

    def until(self, what: str, condition: Callable[[], bool]) -> None:
        """Wait for something that the engine does by itself."""
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while not condition():
            if time.monotonic() > deadline:
                raise BrokenPromise(f"{what} within {SETTLE_TIMEOUT_S:g} s")
            time.sleep(POLL_S)

    def generate(self, prompts: list[str]) -> tuple[list[list[int]], list[dict[str, int]]]:
        """Each prompt on its replica; output tokens, and where cached tokens came from."""
        outputs, origins = [], []
        for replica, prompt in enumerate(prompts):
            answer = self.stage.generate(prompt, ANSWER_TOKENS, replica)
            meta = answer["meta_info"]
            details = dict(meta["cached_tokens_details"])
            outputs.append(list(answer["output_ids"]))
            origins.append(details)
            origin = ", ".join(f"{name} {details.get(name, 0)}" for name in ("device", "host", "storage"))
            self.show.command(
                self.curl(prompt, ANSWER_TOKENS, replica),
                f"{meta['prompt_tokens']} prompt tokens, cached: {origin}; "
                f"{len(answer['output_ids'])} new tokens, first ones {answer['output_ids'][:6]}",
            )
        return outputs, origins

    def busy(self) -> Background:
        """A long request on replica 1, running when this returns."""
        background = Background(lambda: self.stage.generate(DICKENS, BUSY_TOKENS, 1))
        self.show.command(f"{self.curl(DICKENS, BUSY_TOKENS, 1)} &")
        self.until("the engine gets busy", lambda: not self.document("idle")["idle"])
        return background

    def curl(self, prompt: str, tokens: int, replica: int) -> str:
        """The request as a user would type it, its prompt cut short."""
        body = {"text": prompt[:24] + "...", "sampling_params": {"max_new_tokens": tokens}, "dp_rank": replica}
        return f"curl -d {shlex.quote(json.dumps(body))} {self.stage.engine_url}/generate"

    def flush(self) -> None:
        """Empty L1 and L2."""
        answer = self.stage.flush()
        self.show.command(f"curl -X POST {self.stage.engine_url}/flush_cache", json.dumps(answer)[:200])

    # ---- the steps

    def start(self) -> None:
        """Both programs, in any order; the engine announces itself."""
        self.show.step("Start the sidecar, and an engine with two data-parallel replicas")
        self.show.command(shlex.join(self.stage.start_sidecar()) + " &")
        self.show.command(shlex.join(self.stage.start_engine(REPLICAS)) + " &")
        self.show.command(f"export HICACHE_SIDECAR_SOCKET={self.stage.socket}")
        self.ctl("ranks")
        ranks = self.document("ranks")
        self.show.expect(
            len(ranks["ranks"]) == REPLICAS and not ranks["missing_ranks"],
            f"all {REPLICAS} ranks said hello by themselves",
        )
        self.show.expect(self.document("status")["state"] == "detached", "no storage backend is attached")

    def plain(self) -> list[list[int]]:
        """Reference output without any L3."""
        self.show.step("Generate from real text without L3: the reference output")
        outputs, origins = self.generate([CARROLL, DICKENS])
        self.show.expect(all(o.get("storage", 0) == 0 for o in origins), "nothing came from storage")
        return outputs

    def refusal(self) -> None:
        """A busy engine is refused, with every blocker, and nothing changes."""
        self.show.step("Attach while the engine is busy: refused at once, with the blockers, nothing changed")
        self.config = json.dumps({"file_storage_path": str(self.stage.path / "store"), "prefetch_threshold": 64})
        busy = self.busy()
        refused = self.ctl("attach", "file", "--config", self.config, code=EXIT_NOT_IDLE)
        self.show.expect("scheduler is not idle" in refused, "the refusal says that the scheduler is not idle")
        self.show.expect("running_batch=" in refused and "rank 1" in refused, "it names the blocker and its rank")
        self.show.expect(self.document("status")["state"] == "detached", "still detached on every rank")
        busy.wait(COMMAND_TIMEOUT_S)

    def attach(self) -> None:
        """One operation on all ranks."""
        self.show.step("Attach the backend `file` on both replicas, while the engine keeps running")
        self.ctl("check", "file", "--config", self.config, "--wait", "10")
        self.show.expect(self.document("status")["state"] == "detached", "a dry run leaves everything as it was")
        self.ctl("attach", "file", "--config", self.config, "--prefetch-policy", "wait_complete", "--wait", "10",
                 "--reason", "demo")  # fmt: skip
        status = self.document("status")
        self.show.expect(
            [r["hicache_storage_backend"] for r in status["ranks"]] == ["file"] * REPLICAS, "every rank reports `file`"
        )
        again = self.document("attach", "file", "--config", self.config, "--wait", "10")
        self.show.expect(again.get("changed") is False, "the same attach again changes nothing")

    def store(self, reference: list[list[int]]) -> None:
        """Pages reach the store."""
        self.show.step("Generate with L3 attached: pages are backed up to storage")
        self.flush()
        outputs, _ = self.generate([CARROLL, DICKENS])
        self.show.expect(outputs == reference, "the output is the same as without L3")
        self.until("every backup is done", lambda: bool(self.document("idle")["idle"]))
        files = sum(1 for path in (self.stage.path / "store").rglob("*") if path.is_file())
        self.show.expect(files > 0, f"the store holds files now ({files})")

    def reload(self, reference: list[list[int]]) -> None:
        """Tokens come back from storage."""
        self.show.step("Flush L1 and L2, generate again: tokens come back from storage, same output")
        self.flush()
        outputs, origins = self.generate([CARROLL, DICKENS])
        for replica, origin in enumerate(origins):
            count = origin.get("storage", 0)
            self.show.expect(count > 0, f"replica {replica}: {count} tokens came from storage")
        self.show.expect(outputs == reference, "the output is the same token for token")
        self.ctl("status", "--fresh")

    def policy(self) -> None:
        """Live keys change without a rebuild."""
        self.show.step("Change policies and a knob: applied on every rank, nothing is rebuilt")
        self.ctl("policy", "--prefetch-policy", "timeout", "--write-policy", "write_through_selective",
                 "--prefetch-threshold", "128", "--wait", "10")  # fmt: skip
        ranks = self.document("status")["ranks"]
        self.show.expect(
            all(r["hicache_storage_prefetch_policy"] == "timeout" for r in ranks),
            "every rank reports prefetch `timeout`",
        )
        self.show.expect(
            all(r["hicache_write_policy"] == "write_through_selective" for r in ranks),
            "every rank reports write policy `write_through_selective`",
        )

    def swap(self, reference: list[list[int]]) -> None:
        """Another store in one operation, under traffic."""
        self.show.step("Swap to another directory in one operation, in hot mode, while a request runs")
        other = self.stage.path / "store-2"
        config = json.dumps({"file_storage_path": str(other)})
        self.flush()
        busy = self.busy()
        self.ctl("swap", "file", "--config", config, "--mode", "hot")
        status = self.document("status")
        self.show.expect(
            all(str(other) in str(r["hicache_storage_backend_extra_config"]) for r in status["ranks"]),
            "every rank reports the new directory",
        )
        answer = busy.wait(COMMAND_TIMEOUT_S)
        self.show.expect(
            answer["output_ids"][:ANSWER_TOKENS] == reference[1], "the running request ended with the right tokens"
        )

    def detach(self, reference: list[list[int]]) -> None:
        """L3 is gone, the store keeps its pages."""
        self.show.step("Detach: L3 is no longer used, the store keeps what it has")
        files = sum(1 for path in (self.stage.path / "store").rglob("*") if path.is_file())
        self.ctl("detach", "--wait", "10")
        self.flush()
        outputs, origins = self.generate([CARROLL, DICKENS])
        self.show.expect(all(o.get("storage", 0) == 0 for o in origins), "nothing comes from storage any more")
        self.show.expect(outputs == reference, "the output is the same")
        left = sum(1 for path in (self.stage.path / "store").rglob("*") if path.is_file())
        self.show.expect(left >= files > 0, "the first store still holds its pages")
        self.show.expect(self.document("detach").get("changed") is False, "a second detach changes nothing")
        self.ctl("history")
