"""The parent's side of the workers: a measurer in its own process, and a pool of compilers.

A worker that crashes or does not answer in time is killed; the caller learns it as `WorkerDied` and the run goes on.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from queue import Empty, PriorityQueue
from typing import Any, Callable

START_SECONDS = 180.0


class WorkerDied(Exception):
    """The worker crashed or hung; the message says which."""


class WorkerError(Exception):
    """The worker is fine, but the call raised."""


class Worker:
    """One worker process. Calls are synchronous and have a time limit."""

    module = f"{__package__}.worker"

    def __init__(self, kind: str, setting: dict[str, Any], environment: dict[str, str] | None = None) -> None:
        package = str(Path(__file__).resolve().parents[2])
        inherited = os.environ.get("PYTHONPATH")
        path = os.pathsep.join([package, *([inherited] if inherited else [])])
        kept = {k: v for k, v in os.environ.items() if not k.startswith("LIGER_HW_CONFIG_")}
        if kind == "compile":
            for name in ("TRITON_INTERPRET", "LIGER_HW_INTERPRET"):
                kept.pop(name, None)
        settings = {"LIGER_HW_AUTOTUNE": "0", "LIGER_HW_DETERMINISTIC": "0", "LIGER_HW_LOCK_FILE": ""}
        self._process = subprocess.Popen(
            [sys.executable, "-m", self.module, kind, json.dumps(setting)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in the terminal reaches the parent only
            env={**kept, **settings, **(environment or {}), "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
        )
        self._buffer = b""
        self._complaints: list[bytes] = []
        threading.Thread(target=self._listen, daemon=True).start()
        self._ready = False

    def _listen(self) -> None:
        """Keeps the end of stderr: what a dying worker said last."""
        for line in self._process.stderr:
            self._complaints.append(line)
            del self._complaints[:-20]

    def call(self, name: str, *args: Any, seconds: float) -> Any:
        """Raises `WorkerDied` (the process is gone then) or `WorkerError`."""
        if not self._ready:
            self._answer(START_SECONDS)
            self._ready = True
        try:
            self._process.stdin.write((json.dumps({"call": name, "args": args}) + "\n").encode())
            self._process.stdin.flush()
        except OSError:
            raise self._died("crashed") from None
        answer = self._answer(seconds)
        if "error" in answer:
            if answer.get("fatal"):
                self.kill()
                raise WorkerDied(f"crashed the device: {answer['error']}")
            raise WorkerError(answer["error"])
        return answer["value"]

    def _answer(self, seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                raise self._died(f"hung for {seconds:.0f} s")
            chunk = os.read(pipe, 1 << 16)
            if not chunk:
                raise self._died("crashed")
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    def _died(self, what: str) -> WorkerDied:
        self.kill()
        code = self._process.returncode
        said = b"".join(self._complaints[-3:]).decode(errors="replace").strip()
        ended = f" (signal {-code})" if code and code < 0 and what == "crashed" else ""
        return WorkerDied(f"{what}{ended}{': ' + said[-300:] if said and what == 'crashed' else ''}")

    def kill(self) -> None:
        if self._process.poll() is None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)  # its own session: ptxas children too
            except ProcessLookupError:
                pass
        self._process.wait()


class RemoteMeasurer:
    """The measurer (`LocalMeasurer`'s methods) in a process of its own, started again after it died."""

    LIMITS = {"prepare": 90.0, "time": 60.0, "open": 180.0, "scan": 180.0, "verify": 180.0, "facts": 120.0}

    def __init__(self, device: str, limits: dict[str, float] | None = None, environment: dict | None = None) -> None:
        self.device, self.limits, self.environment = device, {**self.LIMITS, **(limits or {})}, environment
        self._worker: Worker | None = None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args: self._call(name, *args)

    def _call(self, name: str, *args: Any) -> Any:
        if self._worker is None:
            self._worker = Worker("measure", {"device": self.device}, self.environment)
        try:
            return self._worker.call(name, *args, seconds=self.limits.get(name, 60.0))
        except WorkerDied:
            self._worker = None
            raise

    def close(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker = None


class CompilePool:
    """Compiles candidates in `workers` processes, urgent ones first. `wait` gives a candidate's result."""

    def __init__(self, target: dict[str, Any], workers: int, seconds: float = 60.0) -> None:
        self._target, self._seconds = target, seconds
        self._queue: PriorityQueue = PriorityQueue()
        self._results: dict[str, dict[str, Any] | None] = {}
        self._taken: set[str] = set()
        self._done = threading.Condition()
        self._stop = False
        self._sequence = 0
        self._workers: list[Worker] = []
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(workers)]
        for thread in self._threads:
            thread.start()

    def submit(self, recipe: str, args: list[Any], urgent: bool = False) -> None:
        """Queue a candidate (op, sizes, dtype, variant, configuration) under the name `recipe`, once.

        Submitted again as urgent it moves to the front; the entry it leaves behind is skipped.
        """
        with self._done:
            if recipe in self._taken or (recipe in self._results and not urgent):
                return
            self._results.setdefault(recipe, None)
            self._sequence += 1
            self._queue.put((0 if urgent else 1, self._sequence, recipe, args))

    def wait(self, recipe: str) -> dict[str, Any]:
        """`{resources}`, `{error}` or `{unknown}` of a submitted candidate."""
        with self._done:
            while self._results.get(recipe) is None and not self._stop and self._threads:
                self._done.wait(1.0)
            return self._results.get(recipe) or {"unknown": "not compiled ahead"}

    def _serve(self) -> None:
        worker: Worker | None = None
        deaths = 0
        while not self._stop:
            try:
                _, _, recipe, args = self._queue.get(timeout=0.2)
            except Empty:
                continue
            with self._done:
                if recipe in self._taken:
                    continue
                self._taken.add(recipe)
            result: dict[str, Any] = {"unknown": "the compile workers do not start"}
            if deaths < 20:
                try:
                    if worker is None:
                        worker = Worker("compile", {"target": self._target}, {"CUDA_VISIBLE_DEVICES": ""})
                        self._workers.append(worker)
                    result = worker.call("compile", *args, seconds=self._seconds)
                except WorkerError as error:
                    result = {"unknown": str(error)}
                except WorkerDied as error:
                    worker, deaths = None, deaths + 1
                    result = {"error": f"the compiler {error}"}
            with self._done:
                self._results[recipe] = result
                self._done.notify_all()

    def close(self) -> None:
        self._stop = True
        for worker in self._workers:
            worker.kill()
        with self._done:
            self._done.notify_all()
