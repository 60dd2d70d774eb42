"""Worker processes: one that measures on the device, several that compile; `liger-hw models` has one of its own.

A candidate may crash or hang the process that compiles or launches it, so neither happens in the caller's. A worker
that crashes or does not answer in time is killed; the caller gets `WorkerDied` and goes on with another worker.

Each call is one line of JSON to the worker's stdin, `{"call": name, "args": [...]}`, and one from its stdout,
`{"value": ...}` or `{"error": ..., "fatal": ...}`. What libraries print goes to stderr. A worker ends with its parent.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from queue import PriorityQueue
from types import MappingProxyType
from typing import Any, Callable, Hashable, Mapping

from ..backends import LaunchConfig, Target, backend

START_SECONDS = 180.0


class WorkerDied(Exception):
    """The worker crashed or hung; the message says which."""


class WorkerError(Exception):
    """The worker is fine, but the call raised."""


class Worker:
    """One worker process. Calls are synchronous and have a time limit.

    kind: `measure` (on `device`) or `compile`; settings: environment variables of the process
    """

    module = __name__
    """Where the `main` is that the process runs."""

    def __init__(self, kind: str, device: str = "", settings: Mapping[str, str] = MappingProxyType({})) -> None:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("LIGER_HW_CONFIG_")}
        kept |= {"LIGER_HW_AUTOTUNE": "0", "LIGER_HW_DETERMINISTIC": "0", "LIGER_HW_LOCK_FILE": ""}
        if kind == "compile":
            kept = {k: v for k, v in kept.items() if k not in ("TRITON_INTERPRET", "LIGER_HW_INTERPRET")}
            kept["CUDA_VISIBLE_DEVICES"] = ""
        package = str(Path(__file__).resolve().parents[2])
        kept |= settings
        kept |= {"PYTHONPATH": os.pathsep.join([package, *filter(None, sys.path)]), "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"from {self.module} import main; main()", kind, device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in the terminal reaches the parent only
            env=kept,
        )
        self._buffer = b""
        self._stderr_tail: list[bytes] = []
        threading.Thread(target=self._listen, daemon=True).start()
        self._ready = False

    def _listen(self) -> None:
        """Keep the end of stderr: what a dying worker said last."""
        for line in self.process.stderr:
            self._stderr_tail.append(line)
            del self._stderr_tail[:-20]

    def call(self, name: str, *args: Any, seconds: float) -> Any:
        """The value of a call. Raises `WorkerDied` (the process is gone then) or `WorkerError`."""
        if not self._ready:
            self._answer(START_SECONDS)
            self._ready = True
        try:
            self.process.stdin.write((json.dumps({"call": name, "args": args}) + "\n").encode())
            self.process.stdin.flush()
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
        pipe = self.process.stdout.fileno()
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
        if what == "crashed":
            code = self.process.returncode
            what += f" (signal {-code})" if code and code < 0 else ""
            last_words = b"".join(self._stderr_tail[-3:]).decode(errors="replace").strip()
            what += f": {last_words[-300:]}" if last_words else ""
        return WorkerDied(what)

    def kill(self) -> None:
        if self.process.poll() is None:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)  # its own session: ptxas children too
            except ProcessLookupError:
                pass
        self.process.wait()


class RemoteMeasurer:
    """`measure.LocalMeasurer`'s methods in a process of its own, which is started again after it died."""

    LIMITS = {"prepare": 90.0, "time": 60.0, "open": 180.0, "verify": 180.0, "facts": 120.0}
    """Seconds a call may take."""

    def __init__(self, device: str, limits: dict[str, float] | None = None) -> None:
        self.device, self.limits = device, {**self.LIMITS, **(limits or {})}
        self._worker: Worker | None = None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args: self._call(name, *args)

    def _call(self, name: str, *args: Any) -> Any:
        if self._worker is None:
            self._worker = Worker("measure", self.device)
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
    """Compiles in `workers` processes, urgent requests first, and keeps every answer. A context manager.

    seconds: after which a compilation counts as hung and its process is replaced
    """

    MAX_DEATHS = 20
    """Consecutive deaths after which a worker is no longer replaced."""

    def __init__(self, workers: int = 2, seconds: float = 300.0) -> None:
        self._seconds = seconds
        self._queue: PriorityQueue = PriorityQueue()
        self._answers: dict[Hashable, dict[str, Any] | None] = {}
        self._taken: set[Hashable] = set()
        self._done = threading.Condition()
        self._closed = False
        self._sequence = itertools.count()
        self._workers: list[Worker] = []
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(workers)]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> "CompilePool":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def submit(self, name: Hashable, call: str, request: dict[str, Any], urgent: bool = False) -> None:
        """Queue a request under `name`, once. call: `compile` (a launch) or `candidate`; see `_compiling`.

        A request that is submitted again as urgent moves to the front; the entry it leaves behind is skipped.
        """
        with self._done:
            if name in self._taken or (name in self._answers and not urgent):
                return
            self._answers.setdefault(name, None)
            self._queue.put((0 if urgent else 1, next(self._sequence), name, call, request))

    def wait(self, name: Hashable) -> dict[str, Any]:
        """The answer to a submitted request, with the `seconds` it took: `{error}` where it killed its process,
        `{unknown}` where nothing can be said."""
        with self._done:
            while self._answers.get(name) is None and not self._closed and self._threads:
                self._done.wait(1.0)
            return self._answers.get(name) or {"unknown": "not compiled ahead"}

    def _serve(self) -> None:
        worker: Worker | None = None
        deaths = 0
        while True:
            _, _, name, call, request = self._queue.get()
            if self._closed:
                return
            with self._done:
                if name in self._taken:
                    continue
                self._taken.add(name)
            began = time.monotonic()
            answer: dict[str, Any] = {"unknown": "the compile workers do not start"}
            if deaths < self.MAX_DEATHS:
                try:
                    if worker is None:
                        worker = Worker("compile")
                        self._workers.append(worker)
                    answer = worker.call(call, request, seconds=self._seconds)
                    deaths = 0
                except WorkerError as error:
                    answer = {"unknown": str(error)}
                except WorkerDied as error:
                    worker, deaths = None, deaths + 1
                    answer = {"error": f"the compiler {error}"}
            with self._done:
                self._answers[name] = {**answer, "seconds": time.monotonic() - began}
                self._done.notify_all()

    def close(self) -> None:
        self._closed = True
        for worker in self._workers:
            worker.kill()
        for _ in self._threads:
            self._queue.put((-1, next(self._sequence), None, "", {}))
        with self._done:
            self._done.notify_all()


# -- in the worker ---------------------------------------------------------------------------------------------------


def main() -> None:
    kind, device = sys.argv[1:3]
    serve(lambda: _measuring(device) if kind == "measure" else _compiling(), device)


def serve(make: Callable[[], Callable[[str, list], Any]], device: str = "") -> None:
    """Answer calls from stdin until it ends. What `make` returns gets a call's name and arguments."""
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # a library's print must not end up between the answers
    sys.stdout = sys.stderr
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    from . import notes

    notes.mute()
    handler = make()
    answers.write('{"value": "ready"}\n')
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"value": handler(request["call"], request["args"])}
        except BaseException as error:
            ended = isinstance(error, (KeyboardInterrupt, SystemExit))
            answer = {"error": f"{type(error).__name__}: {str(error)[:2000]}", "fatal": ended or _is_lost(device)}
        answers.write(json.dumps(answer) + "\n")
        if answer.get("fatal"):
            os._exit(3)


def _measuring(device: str) -> Callable[[str, list], Any]:
    from .measure import LocalMeasurer

    measurer = LocalMeasurer(device)
    return lambda name, args: getattr(measurer, name)(*args)


def _compiling() -> Callable[[str, list], Any]:
    """`compile`: one recorded launch (`compile.request_of`). `candidate`: all that an op launches under a configuration
    of one tunable, so that Triton's cache on disk has it when the measuring worker asks."""
    import torch

    from . import compile as aot

    known: dict[tuple, dict[str, Any]] = {}

    def candidate(request: dict[str, Any]) -> dict[str, Any]:
        target, forced = Target.from_json(request["target"]), request["tunable"]
        if backend(target.vendor).triton_target(target) is None:
            return {"unknown": f"the stock Triton has no compiler for {target.arch}"}
        configs = {forced: LaunchConfig.from_json(request["config"])}
        dtype = getattr(torch, request["dtype"])
        try:
            launches = aot.trace(request["op"], request["sizes"], dtype, target, configs=configs, shipped=False)
        except Exception as error:  # the op does not run on fake tensors: the measuring worker compiles for itself
            return {"unknown": f"{type(error).__name__}: {error}"}
        answer: dict[str, Any] = {"resources": {}}
        for launch in launches:
            if launch.same() not in known:
                known[launch.same()] = aot.compile_request(aot.request_of(launch))
            if launch.tunable == forced and launch.layer == "explicit":
                answer = known[launch.same()]
                if "error" in answer:
                    return answer
        return answer

    calls = {"compile": aot.compile_request, "candidate": candidate}
    return lambda name, args: calls[name](*args)


def _is_lost(device: str) -> bool:
    """Whether the device answers nothing any more in this process, as after an illegal memory access."""
    if device in ("", "cpu"):
        return False
    try:
        import torch

        torch.get_device_module(torch.device(device)).synchronize()
        torch.zeros(1, device=device).item()
        return False
    except Exception:
        return True


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(4)
