"""Makes an EMA of any length from the snapshots of a run with --ema_type power.

    python reconstruct_ema.py runs/digits-edm2 --width 0.15 --output_dir wider
    python reconstruct_ema.py runs/digits-edm2 --widths 0.02:0.25:0.01 --metric fd_randconv --output_dir best

The first command makes a pipeline with an EMA of the relative width 0.15 at the end of the training. --step chooses an
earlier snapshot. The second command tries each width: it measures the distance between samples and training images. It
writes out/sweep.html and out/sweep.json, and makes a pipeline with the best width. It works for runs of train_ddpm.py and
train_edm2.py. It reads one snapshot at a time, so memory for a few networks is enough.
"""

from utils.core.entrypoint import loading_libraries, run_script
from utils.options.flags import ReconstructionOptions, read_widths
from utils.options.parser import parse_options


def parse_args(argv: list[str] | None = None) -> ReconstructionOptions:
    return parse_options(ReconstructionOptions, __doc__, argv)


def main(args: ReconstructionOptions) -> None:
    # Imported here because torch and diffusers take seconds, which --help and a mistyped flag should not pay for.
    with loading_libraries(args):
        from utils.core.distributed import make_accelerator
        from utils.diffusion.export import export_pipeline
        from utils.diffusion.model_card import model_card
        from utils.diffusion.pipelines import load_decoder, names_of_classes
        from utils.evaluation.ema_reconstruction import check_output, describe, load_run, load_weights, make_judge, write_sweep
        from utils.evaluation.newest import loadable
        from utils.runs.ema_snapshots import list_snapshots, recipe, reconstruct

    widths = [args.width] if args.width is not None else read_widths(args.widths or "")
    snapshots = list_snapshots(args.run)
    step = args.step or snapshots[-1].step
    recipes = {width: recipe(snapshots, width, step) for width in widths}  # refuses what cannot be made
    check_output(args.output_dir, args.run)
    pipeline = loadable(str(args.run))  # of which the weights are replaced
    unet, scheduler = load_run(args.run, pipeline)
    decoder = load_decoder(pipeline, unet)

    best = widths[0]
    if args.widths is not None:
        accelerator = make_accelerator(cpu_threads=args.cpu_threads)
        sampling = {"num_images": args.num_images, "batch_size": args.batch_size, "seed": args.seed}
        judge = make_judge(accelerator, args.run, scheduler, args.metric, decoder, **sampling)
        values = {}
        for width in widths:
            load_weights(unet, reconstruct(snapshots, width, step), args.run)
            values[width] = judge(unet)
            print(f"width {width:g}: {args.metric} {values[width]:.5g}", flush=True)
        best = min(values, key=lambda width: values[width])
        write_sweep(args.output_dir, args.run, args.metric, step, args.num_images, values)

    load_weights(unet, reconstruct(snapshots, best, step), args.run)
    facts = {"ema_width": best, "pipeline": args.output_dir.resolve().name}
    names = names_of_classes(pipeline)
    card = model_card(describe(args.run, unet, scheduler, step, names) | facts)
    export_pipeline(unet, scheduler, args.output_dir, card, class_names=names, autoencoder=decoder)
    used, error = recipes[best].snapshots, recipes[best].error
    what = f"EMA of width {best:g} after {step} updates, from {len(used)} snapshots, profile {error:.1%} off"
    print(f"{what}: {args.output_dir}")


if __name__ == "__main__":
    run_script(main, parse_args)
