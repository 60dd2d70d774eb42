"""Worker processes: one that measures on the device, several that compile.

A candidate may crash or hang the process that compiles or launches it, so neither happens in the caller's. A worker
that crashes or does not answer in time is killed; the caller gets `WorkerDied` and goes on with another worker.

Calls and answers are objects sent through a pipe that only the two processes have. The output of a worker and its
libraries is kept for the message of `WorkerDied`. A worker ends with its parent.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.pool import AsyncResult, ThreadPool
from pathlib import Path
from types import MappingProxyType
from typing import Any, Callable, Hashable, Mapping

from ..backends import LaunchConfig, Target, backend

START_SECONDS = 180.0


class WorkerDied(Exception):
    """The worker crashed or hung (the message says which)."""


class WorkerError(Exception):
    """The worker is fine, but the call raised."""


class Worker:
    """One worker process. Calls are synchronous and have a time limit.

    kind: `measure` (on `device`) or `compile`; settings: environment variables of the process
    """

    module = __name__
    """The module whose `main` the process runs."""

    def __init__(self, kind: str, device: str = "", settings: Mapping[str, str] = MappingProxyType({})) -> None:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("LIGER_HW_CONFIG_")}
        kept |= {"LIGER_HW_DETERMINISTIC": "0", "LIGER_HW_LOCK_FILE": ""}
        if kind == "compile":
            kept = {k: v for k, v in kept.items() if k not in ("TRITON_INTERPRET", "LIGER_HW_INTERPRET")}
            kept["CUDA_VISIBLE_DEVICES"] = ""
        package = str(Path(__file__).resolve().parents[2])
        kept |= settings
        kept |= {"PYTHONPATH": os.pathsep.join([package, *filter(None, sys.path)]), "PYTHONUNBUFFERED": "1"}
        self._pipe, theirs = Pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"from {self.module} import main; main()", kind, device, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in the terminal reaches the parent only
            env=kept,
        )
        theirs.close()
        self._said: deque[bytes] = deque(maxlen=20)
        self._listener = threading.Thread(target=lambda: self._said.extend(self.process.stdout), daemon=True)
        self._listener.start()
        self._ready = False

    def call(self, name: str, *args: Any, seconds: float) -> Any:
        """The value of a call. Raises `WorkerDied` (the process is gone then) or `WorkerError`."""
        try:
            if not self._ready:
                self._answer(START_SECONDS)
                self._ready = True
            self._pipe.send((name, args))
            kind, value = self._answer(seconds)
        except (EOFError, OSError):
            raise self._died("crashed") from None
        if kind == "fatal":
            self.kill()
            raise WorkerDied(f"crashed the device: {value}")
        if kind == "error":
            raise WorkerError(value)
        return value

    def _answer(self, seconds: float) -> tuple[str, Any]:
        if not self._pipe.poll(seconds):
            raise self._died(f"hung for {seconds:.0f} s")
        return self._pipe.recv()

    def _died(self, what: str) -> WorkerDied:
        self.kill()
        if what == "crashed":
            self._listener.join(10.0)  # until all its output is read, also on a busy machine
            code = self.process.returncode
            what += f" (signal {-code})" if code and code < 0 else ""
            last_words = b"".join([*self._said][-3:]).decode(errors="replace").strip()
            what += f": {last_words[-300:]}" if last_words else ""
        return WorkerDied(what)

    def kill(self) -> None:
        """End the process, from any thread: a call that waits in another one raises `WorkerDied`."""
        if self.process.poll() is None:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)  # its own session: ptxas children too
            except ProcessLookupError:
                pass
        self.process.wait()


class RemoteMeasurer:
    """`measure.LocalMeasurer`'s methods in another process, which is restarted when it dies."""

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
    """Compiles in `workers` processes, in the order of the requests, and keeps every answer. A context manager.

    seconds: after these a compilation counts as hung and its process is replaced; settings: as for a `Worker`
    """

    def __init__(
        self, workers: int = 2, seconds: float = 300.0, settings: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._seconds, self._settings = seconds, settings
        self._threads, self._of_thread = ThreadPool(workers), threading.local()
        self._workers: list[Worker] = []
        self._answers: dict[Hashable, AsyncResult] = {}
        self._closed, self._lock = False, threading.Lock()

    def __enter__(self) -> "CompilePool":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def submit(self, name: Hashable, call: str, *args: Any) -> None:
        """Queue a call under `name`, once. call: `compile` (a launch) or `candidate`; see `_compiling`."""
        if name not in self._answers:
            self._answers[name] = self._threads.apply_async(self._answer, (call, args))

    def wait(self, name: Hashable) -> dict[str, Any]:
        """The answer to a submitted request, with the `seconds` it took: `{error}` where it killed its process,
        `{unknown}` if it cannot be compiled here."""
        return self._answers[name].get()

    def _answer(self, call: str, args: tuple) -> dict[str, Any]:
        """Each thread calls its own worker."""
        began = time.monotonic()
        try:
            answer = self._worker().call(call, *args, seconds=self._seconds)
        except WorkerError as error:
            answer = {"unknown": str(error)}
        except WorkerDied as error:
            self._of_thread.worker = None
            answer = {"error": f"the compiler {error}"}
        return {**answer, "seconds": time.monotonic() - began}

    def _worker(self) -> Worker:
        with self._lock:
            if self._closed:
                raise WorkerError("the pool is closed")
            if getattr(self._of_thread, "worker", None) is None:
                self._of_thread.worker = Worker("compile", settings=self._settings)
                self._workers.append(self._of_thread.worker)
            return self._of_thread.worker

    def close(self) -> None:
        """End the processes. Waiting calls end, and queued requests are dropped."""
        with self._lock:
            self._closed = True
        for worker in self._workers:
            worker.kill()
        self._threads.close()
        self._threads.join()


# -- in the worker ---------------------------------------------------------------------------------------------------


def main() -> None:
    kind, device = sys.argv[1:3]
    serve(lambda: _measuring(device) if kind == "measure" else _compiling(), device)


def serve(make: Callable[[], Callable[[str, tuple], Any]], device: str = "") -> None:
    """Answer the parent's calls until it ends. make: returns a function (name, arguments) -> answer."""
    pipe = Connection(int(sys.argv[3]))
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    from . import store
    from .record import Rejected

    store.mute()
    handler = make()
    pipe.send(("value", "ready"))
    while True:
        try:
            name, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = "value", handler(name, args)
        except Rejected as reason:
            answer = "error", str(reason)
        except BaseException as error:
            lost = isinstance(error, (KeyboardInterrupt, SystemExit)) or _is_lost(device)
            answer = "fatal" if lost else "error", f"{type(error).__name__}: {str(error)[:2000]}"
        pipe.send(answer)
        if answer[0] == "fatal":
            os._exit(3)


def _measuring(device: str) -> Callable[[str, tuple], Any]:
    from .measure import LocalMeasurer

    measurer = LocalMeasurer(device)
    return lambda name, args: getattr(measurer, name)(*args)


def _compiling() -> Callable[[str, tuple], Any]:
    """`compile`: one recorded launch (`compile.compiled`). `candidate`: all that an op launches under a configuration
    of one tunable, so that the measuring worker finds it in Triton's cache on disk."""
    import torch

    from . import compile as aot

    known: dict[tuple, dict[str, Any]] = {}

    def candidate(target: Target, op: str, sizes: tuple, dtype: str, forced: str, config: LaunchConfig) -> dict:
        if backend(target.vendor).triton_target(target) is None:
            return {"unknown": f"the stock Triton has no compiler for {target.arch}"}
        try:
            launches = aot.trace(op, sizes, getattr(torch, dtype), target, configs={forced: config}, shipped=False)
        except Exception as error:  # the op does not run on fake tensors: the measuring worker compiles for itself
            return {"unknown": f"{type(error).__name__}: {error}"}
        answer: dict[str, Any] = {"resources": None}
        for launch in launches:
            if launch.same() not in known:
                known[launch.same()] = aot.compiled(launch)
            if launch.tunable == forced and launch.layer == "explicit":
                answer = known[launch.same()]
                if "error" in answer:
                    return answer
        return answer

    calls = {"compile": aot.compiled, "candidate": candidate}
    return lambda name, args: calls[name](*args)


def _is_lost(device: str) -> bool:
    """Whether the device no longer works in this process, as after an illegal memory access."""
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
