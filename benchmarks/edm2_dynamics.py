"""Do magnitudes drift in a plain U-Net, and stay in EDM2's? Two real runs on the same data, one after the other.

    python benchmarks/edm2_dynamics.py --updates 1500 --output_dir runs/dynamics

trains the digits with the preset networks of train_ddpm.py and of train_edm2.py, both with Adam, a constant learning rate after
the same warm-up, no weight decay and the same batches, and writes output_dir/dynamics.html: root mean squares of the weights
and of the activations that each convolution and linear layer gives, over the training. Runs that are already there are not
trained again. Prints for each network the medians over the layers at a tenth of the training and at its end, and the largest
factor by which a layer grew in between.
"""

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from utils.page import write_page
from utils.plots import Curve, plot
from utils.run_record import RunRecord

COMMON = """--adam_weight_decay 0 --lr_scheduler constant_with_warmup --lr_warmup_steps 100 --train_batch_size 32 --seed 0
    --adam_beta1 0.9 --adam_beta2 0.99 --save_images_steps 100000 --save_model_steps 100000"""
RUNS = {
    "plain": ("train_ddpm.py", ["--optimizer", "adam", "--learning_rate", "2e-3"]),
    "EDM2": ("train_edm2.py", ["--optimizer", "adam", "--learning_rate", "1e-2"]),
}
KINDS = {"activation": "activations", "weight": "weights"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=1500)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/dynamics"))
    parser.add_argument("--cpu_threads", type=int, default=1)
    args = parser.parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    sections = {kind: [] for kind in KINDS}
    print("| network | what | at a tenth | at the end | most that a layer grew |\n|---|---|---|---|---|")
    for name, (script, flags) in RUNS.items():
        folder = args.output_dir / name.lower()
        if not (folder / "exit_status").exists():
            lengths = ["--max_train_steps", args.updates, "--logging_steps", max(1, args.updates // 50)]
            command = [
                sys.executable,
                Path(__file__).parent.parent / script,
                *COMMON.split(),
                *flags,
                *lengths,
                "--cpu_threads",
                args.cpu_threads,
            ]
            with open(args.output_dir / f"{name.lower()}.log", "w") as log:
                command += ["--output_dir", folder, "--overwrite_output_dir"]
                subprocess.run(list(map(str, command)), check=True, stdout=log, stderr=subprocess.STDOUT)
        records = RunRecord.read(folder).records("layers")
        for kind, words in KINDS.items():
            series = magnitudes(records, kind)
            tenth = len(records) // 10
            ratio = max(values[-1] / values[tenth] for values in series.values())
            early, late = (statistics.median(values[i] for values in series.values()) for i in (tenth, -1))
            print(f"| {name} | {words} | {early:.3f} | {late:.3f} | {ratio:.2f} |", flush=True)
            sections[kind].append(figure(f"{name}: {words}", [step for step, _ in records], series))
    header = "<header><h1>Magnitudes over the training</h1></header>"
    pages = [(words.capitalize(), "".join(sections[kind])) for kind, words in KINDS.items()]
    write_page(
        args.output_dir / "dynamics.html", title="Magnitudes", header=header, sections=pages, source=str(args.output_dir)
    )


def magnitudes(records: list[tuple[int, dict]], kind: str) -> dict[str, list[float]]:
    """Layer -> its magnitude at each record. Not of output layers, whose scale is what they are to tell, nor of EDM2's
    modulation, which is added to 1 and starts from 0."""
    left_out = ("conv_out.weight", "unet.conv_out.weight", "uncertainty.linear.weight")
    measured = [name for name, figures in records[0][1].items() if "activation" in figures]
    layers = [name for name in measured if name not in left_out and not name.endswith("modulation.weight")]
    return {name: [measured[name][kind] for _, measured in records] for name in layers}


def figure(title: str, steps: list[int], series: dict[str, list[float]]) -> str:
    """Lowest, median and highest layer."""
    columns = [sorted(values) for values in zip(*series.values())]
    curves = [
        Curve("median layer", steps, [statistics.median(column) for column in columns], "median"),
        Curve("highest layer", steps, [column[-1] for column in columns], 1),
        Curve("lowest layer", steps, [column[0] for column in columns], 2),
    ]
    return plot(title, curves, unit="root mean square", reading="Flat lines: the layers see the same all along.")


if __name__ == "__main__":
    main()
