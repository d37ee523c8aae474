"""Runs Python scripts without their imports: a server that has imported torch and its friends once forks a child per run.

    with ForkServer() as server:
        [run] = server.start(["train_ddpm.py", "--output_dir", "run"])
        run.kill()

A child is a process like any other, in a session of its own, with its own `sys.argv`, exit status and output file. Several
processes find each other as they do under torchrun: through its variables and a store that the test holds.
"""

import atexit
import importlib
import json
import os
import pkgutil
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


class Run:
    """One forked process. Its number stays its own until `poll` has seen its end, so it can be signaled safely."""

    def __init__(self, server: "ForkServer", pid: int, output: Path):
        self.server, self.pid, self.output, self.status = server, pid, output, None

    def poll(self) -> int | None:
        """Exit status as subprocess counts it (-9: killed), None while it runs."""
        if self.status is None:
            self.status = self.server.ask({"poll": self.pid})
        return self.status

    def wait(self, timeout: float = 300) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(f"still running after {timeout} s:\n{self.text()[-3000:]}")
            time.sleep(0.002)
        return self.status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        self.wait()

    def text(self) -> str:
        return self.output.read_text()


class ForkServer:
    def __init__(self):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        environment["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as utils.core.entrypoint sets it before it imports torch
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(name, None)
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self._outputs = tempfile.TemporaryDirectory()
        self._runs: list[Run] = []
        self._stores = []

    def ask(self, request: dict):
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def start(self, command: list, num_processes: int = 1, own_store: bool = False) -> list[Run]:
        """Starts `command` (a script and its flags) once per rank. `own_store`: rank 0 holds the store, not the test."""
        runs, port = [], self._new_store(own_store) if num_processes > 1 else 0
        for rank in range(num_processes):
            environment = rank_environment(rank, num_processes, port, own_store) if num_processes > 1 else {}
            output = Path(self._outputs.name, f"{len(self._runs)}.txt")
            request = {"argv": [str(word) for word in command], "environment": environment, "output": str(output)}
            runs.append(Run(self, self.ask(request), output))
            self._runs.append(runs[-1])
        return runs

    def run(self, command: list, num_processes: int = 1, ends: int = 0) -> str:
        """Runs `command` to its end, where all ranks exit with status `ends`, and returns what they printed."""
        runs = self.start(command, num_processes)
        statuses, printed = [run.wait() for run in runs], "\n".join(run.text() for run in runs)
        assert statuses == [ends] * num_processes, printed[-3000:]
        return printed

    def _new_store(self, own: bool) -> int:
        """The port of one that outlives every rank, as torchrun's does; else a free one."""
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        if not own:
            self._stores.append(store)
        return store.port

    def __enter__(self) -> "ForkServer":
        return self

    def __exit__(self, *exception) -> None:
        for run in self._runs:
            if run.poll() is None:
                run.kill()
        self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._outputs.cleanup()


def rank_environment(rank: int, num_processes: int, port: int, own_store: bool) -> dict[str, str]:
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_processes, "LOCAL_WORLD_SIZE": num_processes}
    values |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RESTART_COUNT": 0}
    values |= {} if own_store else {"TORCHELASTIC_USE_AGENT_STORE": True}
    return {name: str(value) for name, value in values.items()} | {"ACCELERATE_USE_CPU": "true"}


def serve() -> dict | None:
    """Answers requests until stdin ends; in a forked child it returns at once, with what the child is to run."""
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                return request
        print(json.dumps(answer), flush=True)
    return None


def become(argv: list[str], environment: dict[str, str], output: str) -> None:
    """Turns a forked child into a run of the script `argv[0]`."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environment)
    os.chdir("/")
    script = ROOT / argv[0]
    sys.argv = [str(script), *argv[1:]]
    sys.path[0] = str(script.parent)
    status = 0
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # as at the end of any Python, but for taking apart the inherited modules, which takes seconds
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def import_everything() -> None:
    sys.path.insert(1, str(ROOT))
    import utils

    for module in pkgutil.walk_packages(utils.__path__, "utils."):
        importlib.import_module(module.name)
    assert "utils.training.run" in sys.modules
    copies = sys.modules["utils.diagnostics.data_checks.copies"]  # each start of a run looks for them: among few images here
    copies.QUERIES, copies.REFERENCES = 8, 64
    for name in ("accelerate.tracking", "datasets", "sklearn.datasets", "torch.utils.tensorboard"):
        importlib.import_module(name)
    from diffusers import DDIMScheduler, DDPMPipeline, DDPMScheduler, UNet2DModel  # noqa: F401 (imported when first named)


if __name__ == "__main__":
    import_everything()
    if job := serve():
        become(**job)
    os._exit(0)  # what was imported takes seconds to take apart, and once did not end
