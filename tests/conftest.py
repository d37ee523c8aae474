"""What the tests share: tiny runs of the training script, in this process or launched as a user would."""

import contextlib
import faulthandler
import functools
import hashlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import clean_environment  # before anything reads the environment
import pytest

from utils.core.signals import STOP_SIGNALS

ROOT = Path(__file__).parent.parent
SCRIPTS = ["train_ddpm.py", "train_edm2.py"]  # the training scripts, all of which pass the tests in tests/faults

TINY_NETWORK = {
    "_class_name": "UNet2DModel",
    "sample_size": 16,
    "in_channels": 1,
    "out_channels": 1,
    "block_out_channels": [8, 16],
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "down_block_types": ["DownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "UpBlock2D"],
}


TINY_EDM2_NETWORK = {
    "_class_name": "EDM2UNet",
    "in_channels": 1,
    "out_channels": 1,
    "model_channels": 8,
    "channel_multipliers": [1, 2],
    "layers_per_block": 1,
    "attention_resolutions": [],
    "attention_head_dim": 8,
}


THOROUGH = [pytest.mark.slow, pytest.mark.thorough]


def slow_turns(*values, ids: list[str | None] | None = None) -> list:
    """These values of a parametrized test, tuples being those of several arguments: each is a slow test, and a thorough one,
    because another value of the same test is no such test."""
    turns = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*turn, marks=THOROUGH, id=name) for turn, name in zip(turns, ids or [None] * len(turns))]


left_out = []  # the counts of slow tests: one, or those of xdist's workers, which all collect the same


def pytest_deselected(items):
    left_out.append(sum(item.get_closest_marker("slow") is not None for item in items))


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = max(left_out, default=0)
    else:
        clean_environment.remove_home()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Skips a test that hung, or ended its process: xdist hands it to another worker, which would be lost, too."""
    started = Path(clean_environment.HOME, hashlib.sha1(item.nodeid.encode()).hexdigest())
    if started.exists():
        item.add_marker(pytest.mark.skip(reason="it ended its process"))
    started.touch()
    result = yield
    started.unlink()
    return result


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node):
    """For a debugger, pytest lets a test that failed take its time. What takes it apart may hang like any other."""
    from _pytest.faulthandler import fault_handler_stderr_fd_key

    file, seconds = node.config.stash.get(fault_handler_stderr_fd_key, None), float(node.config.getini("faulthandler_timeout"))
    if file and seconds > 0:
        faulthandler.dump_traceback_later(seconds, exit=True, file=file)


@pytest.fixture(scope="session", autouse=True)
def elsewhere(tmp_path_factory):
    """Tests work in an empty folder, not in the checkout, which has what people leave there (runs/, data/, .venv/). They leave
    nothing in it."""
    with contextlib.chdir(folder := tmp_path_factory.mktemp("elsewhere")):
        yield
    assert not (left := [path.name for path in folder.iterdir()]), f"tests left {left} in the working directory"


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    left_out.append(getattr(node, "workeroutput", {}).get("left_out", 0))


def pytest_terminal_summary(terminalreporter, config):
    if any(left_out) and config.option.markexpr == "not slow":
        terminalreporter.write_line(f"left out: {max(left_out)} slow tests; pytest -m slow runs them")


@pytest.fixture(scope="session")
def tiny_flags(tmp_path_factory) -> list[str]:
    """Of train_ddpm.py."""
    return make_tiny_flags(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def script_flags(script, tmp_path_factory) -> list[str]:
    """`tiny_flags` for each of the SCRIPTS."""
    return make_tiny_flags(tmp_path_factory.mktemp("tiny"), script)


def make_tiny_flags(folder: Path, script: str = "train_ddpm.py") -> list[str]:
    """Flags of a run on the digits that takes a second: a network of some 40 k parameters, batch 8."""
    network, steps = TINY_NETWORK, "--ddpm_num_inference_steps"
    if script == "train_edm2.py":
        network, steps = TINY_EDM2_NETWORK, "--ema_snapshot_steps 5 --num_inference_steps"
    (folder / "config.json").write_text(json.dumps(network))
    flags = f"""--dataset_name digits --model_config_name_or_path {folder} --cache_dir {folder / "cache"} --resolution 16
        --image_channels 1 --train_batch_size 8 --eval_batch_size 4 {steps} 3 --cpu_threads 1
        --lr_warmup_steps 4 --learning_rate 1e-3 --logging_steps 1 --max_train_steps 8"""
    return flags.split()


def small_kl(**others):
    """An AutoencoderKL of random weights, the same ones each time: 1 channel to 3, and half the sides."""
    import torch
    from diffusers import AutoencoderKL

    torch.manual_seed(3)
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    sizes = {"block_out_channels": (8, 8), "layers_per_block": 1, "norm_num_groups": 4, "latent_channels": 3}
    return AutoencoderKL(**{"in_channels": 1, "out_channels": 1} | blocks | sizes | others)


@pytest.fixture
def files_no_larger_than():
    """For a `with` block in which no file can grow beyond so many bytes, as on a full disk: what is written last is cut."""
    import resource

    @contextlib.contextmanager
    def limited(size: int):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limited


@pytest.fixture
def opened(tmp_path):
    """Opens images with these options, at 8x8 and with a cache of the test's own where they say nothing else."""
    from utils.data.dataset import load_images
    from utils.options.flags import DataOptions

    return lambda **options: load_images(DataOptions(**{"resolution": 8, "cache_dir": str(tmp_path / "cache")} | options))


@pytest.fixture(scope="session", params=[SCRIPTS[0], *slow_turns(SCRIPTS[1])])
def script(request) -> str:
    """Each of the SCRIPTS. Most of what they promise together is the same code: the second one's turn is a thorough test."""
    return request.param


@pytest.fixture(scope="session")
def server():
    """Starts scripts without their imports: tests/faults/fork_server.py."""
    from fork_server import ForkServer

    with ForkServer() as server:
        yield server


def script_environment(num_processes: int = 1) -> dict[str, str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": "", "HF_HUB_OFFLINE": "1", "TQDM_MININTERVAL": "5"}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    if num_processes > 1:
        environment["ACCELERATE_USE_CPU"] = "true"
    return environment


def script_command(script: str, flags: list[str], num_processes: int = 1) -> list[str]:
    launcher = [sys.executable]
    if num_processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_processes}"]
    return [*launcher, str(ROOT / script), *map(str, flags)]


def run_script(script: str, flags: list, num_processes: int = 1, timeout: float = 300) -> subprocess.CompletedProcess:
    """Runs a script to its end; whatever happens, none of its processes is left."""
    return run_command(script_command(script, flags, num_processes), script_environment(num_processes), timeout)


def run_command(command: list, environment: dict[str, str], timeout: float = 300) -> subprocess.CompletedProcess:
    process = start_command(command, environment)
    try:
        output, errors = process.communicate(timeout=timeout)
    finally:
        end_group(process)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def without_progress(errors: str) -> list[str]:
    """The lines on stderr but for those about work that takes long, which a busy machine adds."""
    return [line for line in errors.splitlines() if line.strip() and not line.endswith(" so far")]


def start_command(command: list, environment: dict[str, str]) -> subprocess.Popen:
    return subprocess.Popen(
        [str(word) for word in command],
        env=environment,
        cwd="/",  # the scripts must not rely on being started in the repository
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end_group(process: subprocess.Popen) -> None:
    """Kills the process's group and its descendants, which torchrun puts into sessions of their own."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended just now
            parents[int(status.parent.name)] = int(status.read_text().rsplit(")", 1)[1].split()[1])
    family = [process.pid]
    for member in family:
        family += [child for child, parent in parents.items() if parent == member]
    for member in family:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(member, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture
def train_script(train, script):
    """`train` for each of the SCRIPTS."""
    return functools.partial(train, script=importlib.import_module(Path(script).stem))


@pytest.fixture(scope="session")
def train():
    """Runs train_ddpm.main in this process (an import of diffusers cheaper than a launch); returns its exit status."""
    import train_ddpm
    from utils.diagnostics.data_checks import copies

    def run(flags: list[str], script=train_ddpm, fails: bool = False) -> int:
        """`fails`: whether something is meant to fail that a run can do without; it would go unnoticed else."""
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
        handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        try:
            # Each start of a run looks for copies among its images: among few of them here.
            with patch.multiple(copies, QUERIES=8, REFERENCES=64):
                options = script.parse_args([str(flag) for flag in flags])
                status = script.main(options)
                if not fails:
                    assert [path.read_text() for path in Path(options.output_dir, "errors").glob("*")] == []
                return status
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            for number, handler in handlers.items():  # a script keeps its own to the end of its process
                signal.signal(number, handler)

    return run


@pytest.fixture(scope="session")
def rehearse(train):
    """Runs a script's main on the device of tests/rehearsal.py; returns that device, which noted all that crossed. Whatever
    fails ends it. Without the `doctor`, which reads what it measures in the updates that it looks at."""
    from rehearsal import Device, stand_ins

    from utils.training.attempts import Attempts

    def run(flags: list, script, doctor: str = "off") -> Device:
        with pytest.MonkeyPatch.context() as monkeypatch, Device() as device:
            stand_ins(device, monkeypatch)
            monkeypatch.setattr(Attempts, "make", lambda self, what, action, *arguments: action(*arguments) or True)
            assert train([*flags, "--doctor", doctor], script=script) == 0
        return device

    return run


def step_seen(folder: Path) -> tuple[set[str], dict[str, dict]]:
    """(stages of the training step that the doctor measured in the run of this folder, what it found by code). Fails where one
    of its looks did."""
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    audits = [line["audit"] for line in lines if "audit" in line]
    assert not [audit["failed"] for audit in audits if "failed" in audit]
    found = {one["code"]: one for audit in audits for one in audit["found"]}
    return {stage for audit in audits for stage in audit["measured"]}, found


def made_elsewhere(pipeline: Path, home: Path, **asked):
    """Images [N, H, W, C] that diffusers alone makes of a pipeline, in an interpreter that does not find this repository."""
    import numpy as np

    code = """if True:
        import json, sys, numpy, torch
        from diffusers import DiffusionPipeline
        pipeline = DiffusionPipeline.from_pretrained(sys.argv[1], trust_remote_code=True)
        pipeline.set_progress_bar_config(disable=True)
        asked = {"generator": torch.Generator().manual_seed(0), "num_inference_steps": 3, "output_type": "np"}
        numpy.save(sys.argv[2], pipeline(**asked, **json.loads(sys.argv[3])).images)
        assert not {"models", "utils"} & {name.split(".")[0] for name in sys.modules}, "the repository was found"
    """
    command = [sys.executable, "-c", code, pipeline, home / "images.npy", json.dumps(asked)]
    done = run_command(command, script_environment() | {"HF_HOME": str(home / "home")})
    assert done.returncode == 0, done.stderr
    return np.load(home / "images.npy")


def same_bytes(path: Path, expected: Path | bytes) -> bool:
    """For asserts about files: where CI is set, pytest compares two long byte strings line by line, which takes hours."""
    return path.read_bytes() == (expected if isinstance(expected, bytes) else expected.read_bytes())


@pytest.fixture(scope="session")
def resumed_alike(train):
    """Trains to update 8, and once more from its checkpoint 4 on, with flags that may be others; asserts that checkpoint and
    pipeline have the same bytes, and that the doctor finds nothing. Returns the folder of the whole run."""
    import train_ddpm

    def run(flags: list, folder: Path, script=train_ddpm, more: tuple = ()) -> Path:
        whole, resumed = folder / "whole", folder / "resumed"
        flags = [*flags, "--checkpointing_steps", "4"]
        assert train([*flags, "--output_dir", whole], script) == 0
        shutil.copytree(whole / "checkpoint-4", resumed / "checkpoint-4")
        assert train([*flags, "--output_dir", resumed, "--resume_from_checkpoint", "latest", *more], script) == 0
        names = [f"checkpoint-8/{name}.safetensors" for name in ("model", "ema")]
        names += ["checkpoint-8/optimizer.bin", "checkpoint-8/state.json", "unet/diffusion_pytorch_model.safetensors"]
        for name in names:
            without_averages = "ema" in name and not (whole / name).exists()
            assert without_averages or same_bytes(whole / name, resumed / name), name
        assert step_seen(whole)[1] == step_seen(resumed)[1] == {}
        return whole

    return run


def logged_scalars(output_dir: Path, tag: str) -> dict[int, float]:
    """Step -> value of a TensorBoard tag, as TensorBoard itself reads the folder of the one script that logged there."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (logs,) = Path(output_dir, "logs").iterdir()
    events = EventAccumulator(str(logs), size_guidance={"scalars": 0})
    events.Reload()
    shown = tag if tag.startswith(("train/", "validation/")) else f"x_{tag}"
    values = [(event.step, event.value) for event in events.Scalars(shown)]
    assert len(dict(values)) == len(values), f"{tag} has several values for a step"
    return dict(values)


_GROUPS: list = []


@pytest.fixture
def process_group():
    """Gloo's, of one process: DDP's buckets are those of many. It is kept to the end of all tests: while it is freed, it waits
    with Python's lock for its threads, which may wait for that lock."""
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    _GROUPS.append(distributed.distributed_c10d._get_default_group())
    yield
    distributed.destroy_process_group()
