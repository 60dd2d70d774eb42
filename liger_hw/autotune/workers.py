"""Worker processes, one that measures on the device and several that compile: a candidate may crash or hang them.

A worker that crashes or does not answer in time is killed. The caller gets `WorkerDied`, and its next call starts
another process. Calls and answers are objects sent through a pipe. The message of `WorkerDied` has the last lines that
the process printed. A worker ends when its parent ends.
"""

from __future__ import annotations

import contextlib
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
from queue import LifoQueue
from types import MappingProxyType
from typing import Any, Callable, Hashable, Mapping

from ..backends import LaunchConfig, Target, backend

START_SECONDS = 180.0


class WorkerDied(Exception):
    """The worker process crashed or hung (the message says which)."""


class WorkerError(Exception):
    """A call raised, and its worker is still usable."""


class Worker:
    """A worker process, started by the first call, and again by the first call after it died.

    kind: `measure` (on `device`) or `compile`; settings: environment variables of the process
    """

    module = __name__
    """The module whose `main` the process runs."""

    def __init__(self, kind: str, device: str = "", settings: Mapping[str, str] = MappingProxyType({})) -> None:
        self.kind, self.device, self.settings = kind, device, settings
        self.process: subprocess.Popen | None = None
        self._closed, self._starting = False, threading.Lock()

    def _start(self) -> None:
        variables = {k: v for k, v in os.environ.items() if not k.startswith("LIGER_HW_CONFIG_")}
        variables |= {"LIGER_HW_DETERMINISTIC": "0", "LIGER_HW_LOCK_FILE": ""}
        if self.kind == "compile":
            variables = {k: v for k, v in variables.items() if k not in ("TRITON_INTERPRET", "LIGER_HW_INTERPRET")}
            variables["CUDA_VISIBLE_DEVICES"] = ""
        package = str(Path(__file__).resolve().parents[2])
        variables |= self.settings
        variables |= {"PYTHONPATH": os.pathsep.join([package, *filter(None, sys.path)]), "PYTHONUNBUFFERED": "1"}
        self._pipe, child_end = Pipe()
        program = f"from {self.module} import main; main()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, self.kind, self.device, str(child_end.fileno())],
            pass_fds=[child_end.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in the terminal reaches the parent only
            env=variables,
        )
        child_end.close()
        output, self._last_lines = self.process.stdout, deque(maxlen=3)
        self._reader = threading.Thread(target=self._last_lines.extend, args=(output,), daemon=True)
        self._reader.start()

    def call(self, name: str, *args: Any, seconds: float) -> Any:
        """The answer to a call. Raises `WorkerDied`, after which the process is gone, or `WorkerError`."""
        with self._starting:
            if self._closed:
                raise WorkerError("the worker is closed")
            if is_new := self.process is None:
                self._start()
        try:
            if is_new:
                self._answer(START_SECONDS)
            self._pipe.send((name, args))
            kind, value = self._answer(seconds)
        except (EOFError, OSError):
            raise self._died("crashed") from None
        if kind == "fatal":
            raise self._died(f"crashed the device: {value}")
        if kind == "error":
            raise WorkerError(value)
        return value

    def _answer(self, seconds: float) -> tuple[str, Any]:
        if not self._pipe.poll(seconds):
            raise self._died(f"hung for {seconds:.0f} s")
        return self._pipe.recv()

    def _died(self, what: str) -> WorkerDied:
        process = self.kill()
        self.process = None  # the next call starts another
        if what == "crashed":
            self._reader.join(10.0)  # until all its output is read, also on a busy machine
            code = process.returncode
            what += f" (signal {-code})" if code and code < 0 else ""
            printed = b"".join(self._last_lines).decode(errors="replace").strip()
            what += f": {printed[-300:]}" if printed else ""
        return WorkerDied(what)

    def kill(self) -> subprocess.Popen | None:
        """End the process. A call that waits in another thread raises `WorkerDied`."""
        if (process := self.process) is not None:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # the whole session, which includes ptxas
            process.wait()
        return process

    def close(self) -> None:
        """End the process for good."""
        with self._starting:
            self._closed = True
        self.kill()


class RemoteMeasurer(Worker):
    """The methods of `measure.LocalMeasurer`, run in another process."""

    LIMITS = {"prepare": 90.0, "time": 60.0, "open": 180.0, "verify": 180.0, "facts": 120.0}
    """Method -> the seconds that a call may take."""

    def __init__(self, device: str) -> None:
        super().__init__("measure", device)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in self.LIMITS:
            raise AttributeError(name)
        return lambda *args: self.call(name, *args, seconds=self.LIMITS[name])


class CompilePool:
    """Compiles in `workers` processes, in the order of the requests, and stores every answer. A context manager.

    seconds: after this time a compilation counts as hung, and its process is replaced; settings: as for a `Worker`
    """

    def __init__(
        self, workers: int = 2, seconds: float = 300.0, settings: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._seconds, self._threads = seconds, ThreadPool(workers)
        self._workers = [Worker("compile", settings=settings) for _ in range(workers)]
        self._idle: LifoQueue[Worker] = LifoQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._answers: dict[Hashable, AsyncResult] = {}

    def __enter__(self) -> "CompilePool":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def submit(self, name: Hashable, call: str, *args: Any) -> None:
        """Queue a call (`compile` or `candidate`, see `_compiling`) under `name`, if that name is new."""
        if name not in self._answers:
            self._answers[name] = self._threads.apply_async(self._answer, (call, args))

    def wait(self, name: Hashable) -> dict[str, Any]:
        """The answer to the call queued under `name`, with the `seconds` that it took. It has an `error` if the call
        killed the process, and is `unknown` if it cannot be compiled here."""
        return self._answers[name].get()

    def _answer(self, call: str, args: tuple) -> dict[str, Any]:
        began, worker = time.monotonic(), self._idle.get()  # never waits: there are as many threads as workers
        try:
            answer = worker.call(call, *args, seconds=self._seconds)
        except WorkerError as error:
            answer = {"unknown": str(error)}
        except WorkerDied as error:
            answer = {"error": f"the compiler {error}"}
        finally:
            self._idle.put(worker)
        return {**answer, "seconds": time.monotonic() - began}

    def close(self) -> None:
        """End the processes, waiting calls and queued requests."""
        for worker in self._workers:
            worker.close()
        self._threads.close()
        self._threads.join()


# -- in the worker ---------------------------------------------------------------------------------------------------


def main() -> None:
    kind, device = sys.argv[1:3]
    serve((lambda: _measuring(device)) if kind == "measure" else _compiling, device)


def serve(make: Callable[[], Callable[[str, tuple], Any]], device: str = "") -> None:
    """Answer the parent's calls until the parent ends. make: returns a function (name, arguments) -> answer."""
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
    """`compile` compiles one recorded launch. `candidate` compiles all launches of an op with one tunable's
    configuration forced; the measuring worker then finds them in Triton's cache on disk."""
    import torch

    from . import compile as aot

    known: dict[tuple, dict[str, Any]] = {}

    def candidate(target: Target, op: str, sizes: tuple, dtype: str, forced: str, config: LaunchConfig) -> dict:
        if backend(target.vendor).triton_target(target) is None:
            return {"unknown": f"the stock Triton has no compiler for {target.arch}"}
        try:
            launches = aot.trace(op, sizes, getattr(torch, dtype), target, configs={forced: config}, shipped=False)
        except Exception as error:  # the op does not run on fake tensors; the measuring worker compiles it
            return {"unknown": f"{type(error).__name__}: {error}"}
        answer: dict[str, Any] = {"resources": None}
        for launch in launches:
            if launch.compile_key() not in known:
                known[launch.compile_key()] = aot.compiled(launch)
            if launch.tunable == forced and launch.layer == "explicit":
                answer = known[launch.compile_key()]
                if "error" in answer:
                    return answer
        return answer

    calls = {"compile": aot.compiled, "candidate": candidate}
    return lambda name, args: calls[name](*args)


def _is_lost(device: str) -> bool:
    """Whether the device is unusable for the rest of this process, as after an illegal memory access."""
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
