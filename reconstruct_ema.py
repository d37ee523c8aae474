"""The EMA of any length, from the snapshots of a run that trained with --ema_type power.

    python reconstruct_ema.py runs/digits-edm2 --width 0.15 --output_dir out

makes the pipeline that averaging with a relative width of 0.15 would have given; --step for an earlier point of the training.
The same command again replaces it. Works for the runs of train_ddpm.py and train_edm2.py. It reads the snapshots one after the
other: memory for a few networks is enough, however many there are.
"""

import argparse
from pathlib import Path

from utils.cli import positive_int, run_script
from utils.errors import UserError


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of the run, with its exported pipeline and ema_snapshots/")
    parser.add_argument("--width", type=float, required=True, help="relative width, between 0 and 0.28; 0.05 to 0.15 is usual")
    parser.add_argument("--step", type=positive_int, help="updates done (default: at the last snapshot)")
    parser.add_argument("--output_dir", type=Path, required=True, help="folder for the pipeline")
    return parser.parse_args(argv)


def main(args: argparse.Namespace) -> None:
    # Imported here because torch and diffusers take seconds, which --help and a mistyped flag should not pay for.
    from utils.ema_snapshots import list_snapshots, reconstruct
    from utils.export import export_pipeline, model_card
    from utils.reconstruction import check_output, describe, load_run

    snapshots = list_snapshots(args.run)
    check_output(args.output_dir, args.run)
    unet, scheduler = load_run(args.run)
    step = args.step or snapshots[-1].step
    weights = reconstruct(snapshots, args.width, step)
    try:
        unet.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(f"the snapshots are not of the pipeline in {args.run}: {str(error).splitlines()[0]}") from None
    card = model_card(describe(args.run, unet) | {"updates": step, "ema_width": args.width, "pipeline": str(args.output_dir)})
    export_pipeline(unet, scheduler, args.output_dir, card)
    used = sum(snapshot.step <= step for snapshot in snapshots)
    print(f"EMA of width {args.width} after {step} updates, from {used} snapshots: {args.output_dir}")


if __name__ == "__main__":
    run_script(main, parse_args)
