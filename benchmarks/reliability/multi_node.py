"""DDP over two hosts, tried on one machine: two network namespaces joined by a cable, gloo on the CPU.

    python benchmarks/reliability/multi_node.py            # as root, on Linux with iproute2; about four minutes

Each host runs `accelerate launch --config_file accelerate_configs/multi_node.yaml ... train_ddpm.py` with one process, its own
host name and its own network stack; the file system is shared. It compares the losses with one process of the same global
batch, stops one host with SIGTERM and resumes, has torchrun restart killed processes, kills one host, and pulls the cable.
`--collective_timeout` is how long the survivors may wait. Whatever happens, namespaces and processes are gone at the end.
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(1, str(Path(__file__).parents[2] / "tests"))

from conftest import TINY_NETWORK, logged_scalars, same_bytes

from benchmarks.shared.real_script import ROOT

NAMES = ("steady-0", "steady-1")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
UPDATES = 200
GRACE = 30  # seconds after the timeout for every process of a host to be gone


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def connect_hosts() -> None:
    ip("link", "add", "cable-0", "type", "veth", "peer", "name", "cable-1")
    for rank, (name, address) in enumerate(zip(NAMES, ADDRESSES)):
        ip("netns", "add", name)
        ip("link", "set", f"cable-{rank}", "netns", name)
        ip("-n", name, "address", "add", f"{address}/24", "dev", f"cable-{rank}")
        ip("-n", name, "link", "set", "lo", "up")
        ip("-n", name, "link", "set", f"cable-{rank}", "up")


def processes(host: int) -> list[int]:
    return [int(pid) for pid in ip("netns", "pids", NAMES[host]).split()]


def kill_host(host: int) -> None:
    for pid in processes(host):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def remove_hosts() -> None:
    existing = ip("netns", "list").split()
    for host, name in enumerate(NAMES):
        if name in existing:
            kill_host(host)
            ip("netns", "delete", name)  # and with it its end of the cable
    subprocess.run(["ip", "link", "delete", "cable-0"], capture_output=True)  # where it never reached its host


def training_process(host: int) -> int:
    """The process under the launcher, which alone has a rank."""
    for pid in processes(host):
        with contextlib.suppress(OSError):
            if b"\0RANK=" in Path(f"/proc/{pid}/environ").read_bytes():
                return pid
    raise SystemExit(f"no training process on {NAMES[host]}")


class TwoHosts:
    """One training run on both hosts; `output[rank]` is what its launcher printed."""

    def __init__(self, flags: list[str], folder: Path, restarts: int = 0):
        """`restarts`: of all processes by torchrun, which starts them then."""
        self.logs = [folder / f"host-{rank}.log" for rank in (0, 1)]
        self.launchers = []
        for rank, log in enumerate(self.logs):
            command = f"""ip netns exec {NAMES[rank]} unshare --uts sh -c 'hostname host-{rank} && exec "$@"' launch
                {sys.executable} """
            command += (
                f"""-m torch.distributed.run --nnodes 2 --nproc_per_node 1 --max_restarts {restarts} --rdzv_backend c10d
                --rdzv_id steady --rdzv_endpoint {ADDRESSES[0]}:29400 --rdzv_conf is_host={1 - rank}
                --local_addr {ADDRESSES[rank]}"""
                if restarts
                else f"""-m accelerate.commands.launch --config_file {ROOT}/accelerate_configs/multi_node.yaml
                --num_machines 2 --num_processes 2 --machine_rank {rank} --main_process_ip {ADDRESSES[0]}"""
            )
            # gloo takes its address from the host name, which here (as on many machines) is not the one of the cable.
            environment = os.environ | {"GLOO_SOCKET_IFNAME": f"cable-{rank}", "ACCELERATE_USE_CPU": "true"}
            environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # see docs/reliability.md
            with open(log, "w") as file:
                words = [*shlex.split(command), str(ROOT / "train_ddpm.py"), *flags]
                self.launchers.append(subprocess.Popen(words, env=environment, stdout=file, stderr=subprocess.STDOUT))

    def finish(self, timeout: float, hosts=(0, 1)) -> float:
        """Waits until no process of `hosts` is left; seconds that this took."""
        start = time.monotonic()
        while time.monotonic() - start < timeout:
            ended = [self.launchers[host].poll() is not None for host in hosts]  # reaps them, too
            if all(ended) and not any(processes(host) for host in hosts):
                return time.monotonic() - start
            time.sleep(0.1)
        raise SystemExit(f"processes still run after {timeout:.0f} s\n" + "\n".join(log.read_text() for log in self.logs))

    def wait_for(self, path: Path, timeout: float = 120) -> None:
        start = time.monotonic()
        while not path.exists():
            if time.monotonic() - start > timeout or any(launcher.poll() is not None for launcher in self.launchers):
                raise SystemExit(f"{path.name} did not appear\n" + "\n".join(log.read_text() for log in self.logs))
            time.sleep(0.02)

    def training_status(self, host: int) -> int | None:
        """Exit status of the training process: what the launcher reports when it is not 0."""
        found = re.search(r"exitcode\s*: (-?\d+)", self.logs[host].read_text())
        return int(found[1]) if found else self.launchers[host].returncode


def largest_difference(run: Path, reference: Path, tag: str) -> float:
    """Largest relative difference over the updates 1 to UPDATES, of which none may be missing."""
    ours, theirs = logged_scalars(run, tag), logged_scalars(reference, tag)
    return max(abs(ours[step] - theirs[step]) / max(abs(theirs[step]), 1e-12) for step in range(1, UPDATES + 1))


def trial(folder: Path, collective_timeout: int) -> list[tuple[str, str, bool]]:
    (folder / "config.json").write_text(json.dumps(TINY_NETWORK))
    tiny = f"""--dataset_name digits --model_config_name_or_path {folder} --cache_dir {folder}/cache --resolution 16
        --image_channels 1 --eval_batch_size 4 --ddpm_num_inference_steps 3 --cpu_threads 1 --mixed_precision no
        --lr_warmup_steps 4 --learning_rate 1e-3 --logging_steps 1 --checkpointing_steps 40
        --collective_timeout {collective_timeout}
        --max_train_steps {UPDATES}""".split()
    rows = []

    def row(what: str, seen: str, good: bool) -> None:
        rows.append((what, seen, good))
        print(f"{'ok ' if good else 'BAD'} {what}: {seen}", flush=True)

    def start(name: str, *more: str) -> TwoHosts:
        return TwoHosts([*tiny, "--train_batch_size", "4", "--output_dir", str(folder / name), *more], folder)

    one = [sys.executable, ROOT / "train_ddpm.py", *tiny, "--train_batch_size", "8", "--output_dir", folder / "one"]
    subprocess.run(one, check=True, capture_output=True, env=os.environ | {"ACCELERATE_USE_CPU": "true"})

    run = start("two")
    seconds = run.finish(300)
    statuses = [launcher.returncode for launcher in run.launchers]
    if any(statuses):
        raise SystemExit(f"the launchers ended with {statuses}\n" + "\n".join(log.read_text() for log in run.logs))
    difference = largest_difference(folder / "two", folder / "one", "train/loss")
    row(f"loss, 2 hosts x 4 against 1 x 8, {UPDATES} updates", f"within {difference:.1e} relative", difference < 1e-5)
    difference = largest_difference(folder / "two", folder / "one", "train/lr")
    row("learning rate", f"within {difference:.1e} relative", difference == 0)
    row("the whole job on two hosts", f"{seconds:.0f} s", True)

    run = start("stopped")
    run.wait_for(folder / "stopped" / "checkpoint-40")
    os.kill(training_process(1), signal.SIGTERM)
    seconds = run.finish(60)
    statuses = [run.training_status(host) for host in (0, 1)]
    saved = sorted(int(path.name.split("-")[1]) for path in (folder / "stopped").glob("checkpoint-*"))
    stopped = re.search(r"stopped after (\d+) updates", run.logs[0].read_text())
    last = int(stopped[1]) if stopped else 0
    expected = sorted({*range(40, last, 40), last})
    parts = len(list((folder / "stopped" / f"checkpoint-{last}").glob("random_states_*")))
    seen = f"training processes ended with {statuses} in {seconds:.1f} s, checkpoints {saved}, {parts} ranks in the last"
    row("SIGTERM to the training process of host 1", seen, statuses == [75, 75] and saved == expected and parts == 2)

    run = start("stopped", "--resume_from_checkpoint", "latest")
    run.finish(300)
    difference = largest_difference(folder / "stopped", folder / "two", "train/loss")
    resumed = re.search(r"resumed from checkpoint-\d+", run.logs[0].read_text())
    seen = f"{resumed and resumed[0]}, then the losses of the unbroken run within {difference:.1e}"
    row("resumed on two hosts", seen, resumed is not None and difference < 1e-5)

    run = TwoHosts(
        [*tiny, "--train_batch_size", "4", "--output_dir", str(folder / "again"), "--resume_from_checkpoint", "latest"],
        folder,
        restarts=3,
    )
    for host, checkpoint in ((1, 40), (0, 120)):
        run.wait_for(folder / "again" / f"checkpoint-{checkpoint}")
        os.kill(training_process(host), signal.SIGKILL)
    run.finish(300)
    statuses = [launcher.returncode for launcher in run.launchers]
    weights = [folder / name / f"checkpoint-{UPDATES}" / "model.safetensors" for name in ("two", "again")]
    same = all(path.exists() for path in weights) and same_bytes(*weights)
    seen = f"the launchers ended with {statuses}, weights {'equal' if same else 'not equal'} those of the unbroken run"
    row("training processes of host 1, then of host 0 killed, torchrun --max_restarts 3", seen, statuses == [0, 0] and same)

    for what, name in (("kill -9 of every process of host 1", "killed"), ("cable pulled", "cut")):
        run = start(name, "--max_train_steps", "1000000")
        run.wait_for(folder / name / "checkpoint-40")
        limit = collective_timeout + GRACE
        if name == "killed":
            kill_host(1)
            survivors = (0,)
        else:
            ip("-n", NAMES[1], "link", "set", "cable-1", "down")
            survivors = (0, 1)
        start_time = time.monotonic()
        for host in survivors:
            run.finish(limit, [host])
            seconds = time.monotonic() - start_time
            launcher, training = run.launchers[host].returncode, run.training_status(host)
            seen = f"launcher {launcher}, training process {training} after {seconds:.1f} s, no process left"
            row(f"{what}: host {host}", seen, launcher != 0 and seconds < limit)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collective_timeout", type=int, default=20, help="seconds (20)")
    options = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("error: network namespaces need root")
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": "", "TQDM_MININTERVAL": "5"}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that it cleans up then, too
    remove_hosts()  # of a trial that was killed
    try:
        connect_hosts()
        with tempfile.TemporaryDirectory() as folder:
            rows = trial(Path(folder), options.collective_timeout)
    finally:
        remove_hosts()
    print("\n| what | seen |\n|---|---|")
    for what, seen, _ in rows:
        print(f"| {what} | {seen} |")
    sys.exit(not all(good for *_, good in rows))


if __name__ == "__main__":
    main()
