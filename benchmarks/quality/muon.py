"""Does Muon (torch.optim.Muon) train train_ddpm.py's digits better than AdamW in the same seconds?

    python benchmarks/quality/muon.py --seconds 60 --seeds 0 1 2

Rows: the preset's AdamW; Muon for the matrices of the network (attention, embeddings), the only parameters that torch's
takes; Muon for its convolutions too, whose kernels are handed over as matrices [out, in * height * width]. The first and the
last convolution, biases and norms stay with AdamW. Muon's learning rate is scaled to the size of AdamW's updates
(adjust_lr_fn="match_rms_adamw"), and may be multiplied by a factor. The rest is that of the preset. Seconds are those of
one processor core: two short runs tell what an update takes, and a run makes as many as fit, with its learning rate laid out
for just these. evaluate.py judges all from the same seed, by DDPM sampling in 50 steps. What is already there is not made
again.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import nn

import train_ddpm
import utils.core.entrypoint
from benchmarks.shared.real_script import ROOT
from utils.options.flags import OptimizerOptions

SHORT, LONGER = 30, 130  # updates of the runs that tell the time of one
ROWS = [("adamw", 1.0), ("matrices", 1.0), ("kernels", 1.0)]


class MuonBesideAdamW(torch.optim.AdamW):
    """AdamW that leaves some parameters to Muon, at `factor` times its own learning rate."""

    def __init__(self, network: nn.Module, options: OptimizerOptions, kernels: bool, factor: float):
        trained = dict(network.named_parameters())
        outer = ("conv_in.", "conv_out.")
        chosen = [n for n, p in trained.items() if p.ndim == 2 or (kernels and p.ndim == 4 and not n.startswith(outer))]
        rest = [parameter for name, parameter in trained.items() if name not in chosen]
        decay = options.adam_weight_decay
        groups = [{"params": [p for p in rest if p.ndim > 1], "weight_decay": decay}]
        groups += [{"params": [p for p in rest if p.ndim <= 1], "weight_decay": 0.0}]
        betas = (options.adam_beta1, options.adam_beta2)
        super().__init__(groups, lr=options.learning_rate, betas=betas, eps=options.adam_epsilon, fused=True)
        self._factor, self._chosen = factor, [trained[name] for name in chosen]
        self._matrices = [nn.Parameter(p.detach().view(len(p), -1)) for p in self._chosen]  # the same memory
        self._muon = torch.optim.Muon(self._matrices, weight_decay=decay, adjust_lr_fn="match_rms_adamw")

    def step(self, closure: Any = None) -> Any:
        for parameter, matrix in zip(self._chosen, self._matrices):
            matrix.grad = parameter.grad.view_as(matrix)
        self._muon.param_groups[0]["lr"] = self._factor * self.param_groups[0]["lr"]
        self._muon.step()
        return super().step(closure)


def train(kind: str, factor: float, flags: list[str]) -> None:
    if kind != "adamw":
        train_ddpm.make_optimizer = lambda network, options: MuonBesideAdamW(network, options, kind == "kernels", factor)
    utils.core.entrypoint.run_script(train_ddpm.main, lambda: train_ddpm.parse_args(flags))


def run(command: list, log: Path) -> float:
    """Returns the seconds of processor time."""
    log.parent.mkdir(parents=True, exist_ok=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with open(log, "w") as file:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *map(str, command)]
        subprocess.run(command, check=True, env=environment, stdout=file, stderr=subprocess.STDOUT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def trained(row: tuple[str, float], updates: int, seed: int, folder: Path) -> float:
    """Seconds of processor time of a run."""
    told = folder.with_name(f"{folder.name}.json")
    if not told.exists():
        flags = ["--output_dir", folder, "--overwrite_output_dir", "--max_train_steps", updates, "--seed", seed]
        flags += ["--cpu_threads", 1, "--save_images_steps", 10**6, "--save_model_steps", 10**6]
        flags += ["--checkpointing_steps", 10**6, "--validation_steps", 10**6]
        told.write_text(json.dumps(run([__file__, "--train", *row, *flags], folder.with_name(f"{folder.name}.log"))))
    return json.loads(told.read_text())


def distance(pipeline: Path, num_images: int) -> float:
    told = pipeline.with_name(f"{pipeline.name}-fd.json")
    if not told.exists():
        command = [ROOT / "evaluate.py", "--pipeline", pipeline, "--dataset_name", "digits", "--num_images", num_images]
        command += ["--sampler", "ddpm", "--num_inference_steps", 50, "--cpu_threads", 1, "--json"]
        command += ["--output_dir", pipeline.with_name(f"{pipeline.name}-fd")]
        log = told.with_suffix(".log")
        run(command, log)
        told.write_text(log.read_text()[log.read_text().index("{") :])
    return json.loads(told.read_text())["results"][0]["figures"]["fd"]


def main() -> None:
    if sys.argv[1:2] == ["--train"]:
        return train(sys.argv[2], float(sys.argv[3]), sys.argv[4:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of one core, for the updates")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--num_images", type=int, default=500, help="samples that are judged")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/muon"))
    args = parser.parse_args()
    folder = args.output_dir.resolve()
    print("| optimizer | ms of an update | updates | distance of each run | median |\n|---|---|---|---|---|")
    for row in ROWS:
        name = f"{row[0]}-{row[1]:g}"
        times = [trained(row, updates, 0, folder / f"timing-{name}-{updates}") for updates in (SHORT, LONGER)]
        seconds = (times[1] - times[0]) / (LONGER - SHORT)
        updates, distances = round(args.seconds / seconds), []
        for seed in args.seeds:
            pipeline = folder / f"{name}-{seed}"
            trained(row, updates, seed, pipeline)
            distances.append(distance(pipeline, args.num_images))
        told = " ".join(f"{each:.2f}" for each in distances)
        print(f"| {name} | {1e3 * seconds:.1f} | {updates} | {told} | {statistics.median(distances):.2f} |", flush=True)


if __name__ == "__main__":
    main()
