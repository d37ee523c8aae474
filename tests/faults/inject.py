"""Runs a training script with one fault in it, as `python inject.py ...`, under torchrun, or forked.

    python tests/faults/inject.py SCRIPT FAULT [--rank R] [--step N] [--value V] [--record FILE] [--phases FILE] -- FLAGS

Updates are counted from 1 in each process. FAULT is one of
    none
    nan            the loss is NaN in update N
    slow-compute   from forward pass N on, each takes V seconds longer
    slow-data      from the N-th time on that images are fetched, it takes V seconds longer
    hang           in update N, before the backward pass, the process waits for ever
    hang-unseen    the same, and no process waits in the backward pass of update N, as the host does not with NCCL
    hang-repeated  in the first update that is made again, before the backward pass, the process waits for ever
    stop           in update N, before the backward pass, the process stops (SIGSTOP) once the other ranks know where it is
    hang-data      the N-th time that images are fetched takes for ever
    nudge          after the backward pass of update N, the largest element of parameter V is one ulp larger
    flip           in update N, but not where it is made again, one bit of V = WHERE:BIT flips: WHERE is weights (after the
                   forward pass), gradient, activation or batch, BIT 0 to 31; N = 0: in each forward pass;
                   WHERE alone: bit 0 in update N, bit 1 in the next one, and so on
    oom            update N runs out of memory
    oom-between    random numbers for what happens between updates run out of memory: those whose purpose begins as V (V,W)
    fail-between   each validation fails: inside what a process does by itself (V = alone), or while the others meet (V = apart)
    wrong-compiler  --compile compiles to code that runs, with a backward pass whose gradients are V times too large
    signal         the process sends itself signal V (or several: V,W) in update N
    signal-in-setup  the process sends itself signal V before it loads the data
    signal-in-check  and before it checks the images
    disk-full      from update N on, for 2 updates, the file system of folder V is full
    disk-frozen    for V seconds from update N on, what opens a file for writing, renames, removes or flushes it waits
    clock          from update N on (0: from the start), the clock is V seconds behind
    file-size      from update N on, for 2 updates, no file can grow beyond V bytes
"""

import argparse
import contextlib
import functools
import importlib
import itertools
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import torch
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel

import utils.core.randomness
import utils.data.cache
import utils.data.dataset
import utils.data.latents
import utils.data.loader
import utils.data.training_data
import utils.runs.checkpoints
from benchmarks.shared.replace import check_fired, fired, replace_everywhere
from utils.core.entrypoint import run_script
from utils.optim.ema import EMA
from utils.training.evaluation import SampleEvaluation, Validation
from utils.training.monitor import Monitor
from utils.training.ranks import PERIOD, News
from utils.training.samples import SampleGrids

TOUCHES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


def at_update(step: int, action) -> None:
    """`action(loss)` gives the loss that update `step` takes its gradient of."""
    backward, updates = Accelerator.backward, itertools.count(1)

    def faulty(accelerator, loss, **keywords):
        backward(accelerator, action(loss) if next(updates) == step else loss, **keywords)

    Accelerator.backward = faulty


def nan(step: int, value: str) -> None:
    at_update(step, lambda loss: loss * float("nan"))


def nudge(step: int, name: str) -> None:
    backward, updates = Accelerator.backward, itertools.count(1)

    def faulty(accelerator, loss, **keywords):
        backward(accelerator, loss, **keywords)
        if next(updates) == step:
            weights = dict(accelerator.unwrap_model(accelerator._models[0]).named_parameters())[name].data.view(-1)
            place = weights.abs().argmax()  # whose exponent one update does not change
            weights[place] = torch.nextafter(weights[place], torch.tensor(torch.inf))

    Accelerator.backward = faulty


def flip(step: int, value: str) -> None:
    where, _, number = value.partition(":")
    begin, add_drawn, backward = Monitor.begin, Monitor.add_drawn, Accelerator.backward
    armed: list[int] = []  # the bit to flip, once

    def flipped(tensor: torch.Tensor) -> None:
        if armed:
            bit, values = armed.pop(), tensor.data.view(-1)
            chosen = values[(place := values.abs().argmax()) : place + 1].view(torch.int32)
            chosen ^= -(2**31) if bit == 31 else 1 << bit

    def new_turn(monitor, finished):
        first = not monitor.rerun.repeating
        begin(monitor, finished)
        armed[:] = [int(number)] if number and first and finished + 1 == step else []
        if not number and first and step <= finished + 1 < step + 32:
            armed[:] = [finished + 1 - step]

    def drawn(monitor, values):
        if where == "batch":
            flipped(values["clean_images"])
        add_drawn(monitor, values)

    def output(module, _, activation):
        if where == "activation" and isinstance(module, torch.nn.Conv2d) and module.training:
            flipped(activation)

    def own_backward(accelerator, loss, **keywords):
        network = accelerator.unwrap_model(accelerator._models[0])
        largest = max(network.parameters(), key=torch.numel)
        if where == "weights":
            flipped(largest)
        backward(accelerator, loss, **keywords)
        if where == "gradient":
            flipped(largest.grad)

    Monitor.begin, Monitor.add_drawn, Accelerator.backward = new_turn, drawn, own_backward
    torch.nn.modules.module.register_module_forward_hook(output)


def slow_compute(step: int, seconds: str) -> None:
    forward, passes = DistributedDataParallel.forward, itertools.count(1)

    def slow(model, *arguments, **keywords):
        time.sleep(float(seconds) * (next(passes) >= step))
        return forward(model, *arguments, **keywords)

    DistributedDataParallel.forward = slow


def slow_data(step: int, seconds: str) -> None:
    wait_in_fetch(lambda number: float(seconds) * (number >= step))


def hang_data(step: int, value: str) -> None:
    wait_in_fetch(lambda number: 3600 * (number == step))


def wait_in_fetch(seconds_of) -> None:
    fetch, batches = utils.data.dataset.ImageSet.fetch, itertools.count(1)

    def slow(images, indices, *arguments):
        time.sleep(seconds_of(next(batches)))
        return fetch(images, indices, *arguments)

    utils.data.dataset.ImageSet.fetch = slow


def hang(step: int, value: str) -> None:
    at_update(step, lambda loss: time.sleep(3600))


def hang_unseen(step: int, value: str) -> None:
    hang(step, value)
    all_reduce_later(step)


def all_reduce_later(step: int) -> None:
    """The gradients of update `step` are not reduced: as if the host did not wait for it, as with NCCL."""
    forward, passes = DistributedDataParallel.forward, itertools.count(1)

    def unsynchronized(model, *arguments, **keywords):
        model.require_backward_grad_sync &= next(passes) != step
        return forward(model, *arguments, **keywords)

    DistributedDataParallel.forward = unsynchronized


def hang_repeated(step: int, value: str) -> None:
    backward = Accelerator.backward
    begin, repeating = Monitor.begin, [False]

    def new_turn(monitor, finished):
        repeating[:] = [monitor.rerun.repeating]
        begin(monitor, finished)

    def stuck(accelerator, loss, **keywords):
        time.sleep(3600 * repeating[0])
        backward(accelerator, loss, **keywords)

    Monitor.begin, Accelerator.backward = new_turn, stuck


def stop(step: int, value: str) -> None:
    def stopped(loss):
        told = torch.distributed.distributed_c10d._get_default_store()
        while (news := News(*json.loads(told.get(f"hang/{os.environ['RANK']}")))).kind != "compute" or news.step != step:
            time.sleep(PERIOD / 10)
        time.sleep(3 * PERIOD)  # in which the others read it
        os.kill(os.getpid(), signal.SIGSTOP)

    at_update(step, stopped)


def oom(step: int, value: str) -> None:
    def fail(loss):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore lines\n")

    at_update(step, fail)


def oom_between(step: int, purposes: str) -> None:
    normal = utils.core.randomness.normal

    def fail(seed, purpose, *arguments):
        if purpose.startswith(tuple(purposes.split(","))):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore lines\n")
        return normal(seed, purpose, *arguments)

    replace_everywhere("utils.core.randomness.normal", fail)


def fail_between(step: int, where: str) -> None:
    def planted(*arguments):
        raise LookupError("planted")

    if where == "alone":
        utils.data.training_data.TrainingData.validation_batch = planted
    else:
        Validation.mean_loss = planted


def wrong_compiler(step: int, factor: str) -> None:
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def backward(graph, inputs):
        scaled = lambda *values: [g if g is None else g * float(factor) for g in graph(*values)]  # noqa: E731
        return make_boxed_func(scaled)

    backend = aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward), bw_compiler=backward)
    compile_module = torch.nn.Module.compile
    torch.nn.Module.compile = lambda module: compile_module(module, backend=backend)


def send_signal(step: int, value: str) -> None:
    def send(loss):
        for name in value.split(","):
            os.kill(os.getpid(), getattr(signal, name))
        return loss

    at_update(step, send)


def disk_full(step: int, folder: str) -> None:
    filler = Path(folder, "filler")

    def fill(loss):
        with open(filler, "wb", buffering=0) as file:
            for size in (1 << 16, 1 << 10, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError:  # no room for so much
                    pass
        return loss

    def free(loss):
        filler.unlink()
        return loss

    at_update(step, fill)
    at_update(step + 2, free)


def file_size(step: int, limit: str) -> None:
    def limit_to(size):
        return lambda loss: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY)) or loss

    at_update(step, limit_to(int(limit)))
    at_update(step + 2, limit_to(resource.RLIM_INFINITY))


def disk_frozen(step: int, seconds: str) -> None:
    thawed, fsync = 0.0, os.fsync

    def freeze(loss):
        nonlocal thawed
        thawed = time.monotonic() + float(seconds)
        return loss

    def wait() -> None:
        time.sleep(max(0.0, thawed - time.monotonic()))

    def watch(event: str, arguments: tuple) -> None:
        if event in TOUCHES or (event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")):
            wait()

    at_update(step, freeze)
    sys.addaudithook(watch)
    os.fsync = lambda *arguments: (wait(), fsync(*arguments))[1]  # not announced to audit hooks


def clock(step: int, seconds: str) -> None:
    now = time.time

    def set_back(loss=None):
        time.time = lambda: now() - float(seconds)
        return loss

    if step == 0:
        set_back()
    else:
        at_update(step, set_back)


def record(path: str) -> None:
    """Appends a line for each micro-batch that is trained on: the rank and the images (of latents: their rows) in it."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    fetch_samples, on_device = utils.data.loader._Samples.fetch, utils.data.training_data.TrainingSamples.on_device
    backward, fetched, batch = Accelerator.backward, [], []
    shown: dict[int, int] = {}  # sample number -> image, as it was fetched, perhaps with other micro-batches

    def noting(fetch):
        def noted(source, indices, *arguments):
            fetched[:] = map(int, indices)
            return fetch(source, indices, *arguments)

        return noted

    def noted_samples(samples, numbers):
        found = fetch_samples(samples, numbers)
        shown.update(zip(numbers.tolist(), fetched, strict=True))
        return found

    def moved(samples, one):
        batch[:] = [shown[number] for number in one["sample_numbers"].tolist()]
        return on_device(samples, one)

    def recorded(*arguments):
        os.write(file, f"{os.environ.get('RANK', 0)} {' '.join(map(str, batch))}\n".encode())
        return backward(*arguments)

    for source in (utils.data.dataset.ImageSet, utils.data.latents.PackedLatents):
        source.fetch = noting(source.fetch)
    Accelerator.backward = recorded
    utils.data.loader._Samples.fetch, utils.data.training_data.TrainingSamples.on_device = noted_samples, moved


def watch_phases(path: str) -> None:
    """Appends a line as each of these begins (+) and ends (-): its name and the time. Rank 0 alone."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    @contextlib.contextmanager
    def phase(name: str) -> Iterator[None]:
        os.write(file, f"+{name} {time.monotonic()}\n".encode())
        try:
            yield
        finally:
            os.write(file, f"-{name} {time.monotonic()}\n".encode())

    def within(name: str, function):
        return functools.wraps(function)(lambda *arguments, **options: phase(name)(function)(*arguments, **options))

    SampleGrids.make = within("preview", SampleGrids.make)
    SampleEvaluation.make = within("evaluation", SampleEvaluation.make)
    utils.data.cache._write = within("packing", utils.data.cache._write)
    for name, function in (("begin", "utils.training.run.begin_run"), ("save", "utils.runs.checkpoints.save_checkpoint")):
        module, _, attribute = function.rpartition(".")
        replace_everywhere(function, within(name, getattr(sys.modules[module], attribute)))
        fired[function] = 1  # it need not come
    swapped = EMA.swapped_into_model

    @contextlib.contextmanager
    def swapped_in_a_phase(ema):
        with swapped(ema) as model, phase("averaged"):
            yield model

    EMA.swapped_into_model = swapped_in_a_phase


def signal_in_setup(step: int, value: str, function: str = "utils.data.dataset.load_images") -> None:
    module, _, attribute = function.rpartition(".")
    inner = getattr(sys.modules[module], attribute)

    def interrupted(*arguments, **keywords):
        os.kill(os.getpid(), getattr(signal, value))
        return inner(*arguments, **keywords)

    replace_everywhere(function, interrupted)


def signal_in_check(step: int, value: str) -> None:
    signal_in_setup(step, value, "utils.diagnostics.data_checks.kept.records_of_images")


FUNCTIONS = (nan, hang, hang_unseen, hang_repeated, stop, hang_data, slow_compute, slow_data, nudge, flip, oom, oom_between)
FUNCTIONS += (fail_between, wrong_compiler, signal_in_setup, signal_in_check, disk_full, file_size, disk_frozen, clock)
FAULTS = {"none": None, "signal": send_signal} | {function.__name__.replace("_", "-"): function for function in FUNCTIONS}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("script")
    parser.add_argument("fault", choices=FAULTS)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--step", type=int, default=1)
    parser.add_argument("--value")
    parser.add_argument("--record")
    parser.add_argument("--phases")
    split = sys.argv.index("--")
    options = parser.parse_args(sys.argv[1:split])
    sys.argv = [options.script, *sys.argv[split + 1 :]]
    script = importlib.import_module(Path(options.script).stem)
    if FAULTS[options.fault] and options.rank == int(os.environ.get("RANK", 0)):
        FAULTS[options.fault](options.step, options.value)
    elif options.fault == "wrong-compiler":  # on the other ranks a right one, as quick
        wrong_compiler(options.step, "1")
    elif options.fault == "hang-unseen":
        all_reduce_later(options.step)
    if options.record:
        record(options.record)
    if options.phases and os.environ.get("RANK", "0") == "0":
        watch_phases(options.phases)
    run_script(check_fired(script.main), script.parse_args)
