"""Makes images with a trained pipeline, on all processes.

    accelerate launch generate.py --pipeline runs/digits --num_images 5000 --output_dir out --seed 0

This writes out/000000.png ... out/004999.png and out/grid.png; images that no PNG holds (more than 4 channels, or 16 bits in
several) become arrays, out/000000.npy. If it was stopped, run the same command again: it makes only
the missing images. A larger --num_images adds images to the folder.

It works with all unconditional DDPM and DDIM pipelines of diffusers and with those of train_ddpm.py and train_edm2.py, from a
folder or from the Hub. With classes, it makes all classes in turn, or those of --class_labels.

Each image depends only on the seed and on its own number, so any number of processes writes the same files. The batch size
and, on a CPU, the number of threads change float rounding: a few pixels may differ by one level. So all images of a folder
have the same batch size. On a CPU, each process uses one thread. To use more cores, start more processes
(accelerate_configs/multi_cpu.yaml) or set --cpu_threads.
"""

from utils.core.entrypoint import loading_libraries, run_script
from utils.core.errors import UserError
from utils.options.flags import GenerateOptions
from utils.options.parser import parse_options


def parse_args(argv: list[str] | None = None) -> GenerateOptions:
    return parse_options(GenerateOptions, __doc__, argv)


def main(args: GenerateOptions) -> None:
    # Imported here because torch and diffusers take seconds, which --help and a mistyped flag should not pay for.
    with loading_libraries(args):
        import torch

        from utils.core.bars import Bar
        from utils.core.distributed import make_accelerator, on_main_process, waited_for
        from utils.diffusion.generated import GeneratedFolder, claim_folder, weights_hash
        from utils.diffusion.pipelines import trained_bits
        from utils.diffusion.sampled import SampledPipeline, load_guide
        from utils.diffusion.sampling import sample, sampler_version
        from utils.evaluation.newest import agreed

    accelerator = make_accelerator(mixed_precision=args.mixed_precision, cpu_threads=args.cpu_threads)
    shown = accelerator.is_main_process and not args.quiet

    # Pipeline: a wrong number, class or guide ends here, before the folder is touched
    args.pipeline = agreed(accelerator, args.pipeline)
    args.guide_pipeline = args.guide_pipeline and agreed(accelerator, args.guide_pipeline)
    guide = load_guide(accelerator, args.guide_pipeline)
    pipeline = SampledPipeline(accelerator, args.pipeline, args, guide)
    plan = pipeline.plan(args.seed)
    bits = args.bits or trained_bits(args.pipeline)
    folder = GeneratedFolder(args.output_dir, pipeline.image_shape, bits)

    # Settings: one folder holds one set of images
    settings = {
        "pipeline": args.pipeline,
        "weights_sha256": weights_hash(pipeline.unet, pipeline.scheduler_config),
        "autoencoder": plan.autoencoder and [plan.autoencoder.fingerprint(), *(plan.autoencoder.scale or ())],
        "seed": args.seed,
        "sampler": pipeline.sampler,
        "sampler_version": sampler_version(pipeline.sampler, pipeline.scheduler_config),
        "num_inference_steps": pipeline.num_inference_steps,
        "batch_size": args.batch_size,
        "mixed_precision": args.mixed_precision,
        "compile": args.compile,
        "class_labels": pipeline.class_labels,
        "guidance": None if args.guidance == 1.0 else args.guidance,
        "guide_sha256": weights_hash(*guide) if guide else None,
        "bits": bits,
        "num_images": args.num_images,
    }
    on_main_process(accelerator, "claiming the folder", claim_folder, args.output_dir, settings)

    # Work: whole chunks that lack an image, shared out evenly
    chunks = torch.arange(args.num_images).split(args.batch_size)
    complete = torch.zeros(len(chunks), device=accelerator.device)
    with Bar(what := "looking for existing images", shown=shown), waited_for(accelerator, what):
        for c in range(accelerator.process_index, len(chunks), accelerator.num_processes):
            complete[c] = folder.has(chunks[c].tolist())
    todo = [chunk for chunk, done in zip(chunks, accelerator.reduce(complete, "sum").tolist()) if not done]
    if args.compile:
        for network in pipeline.networks:
            network.to(memory_format=torch.channels_last)
            network.compile()
    done = args.num_images - sum(map(len, todo))
    bar = Bar("making images", args.num_images, shown=shown, done=done, afterwards="writing the grid")
    # One process may have a batch more to make, or be slower.
    waited = waited_for(accelerator, "making images")
    with bar, pipeline.sampling(plan, compiled=args.compile), waited:
        for first in range(0, len(todo), accelerator.num_processes):
            turn = todo[first : first + accelerator.num_processes]
            if accelerator.process_index < len(turn):
                numbers = turn[accelerator.process_index]
                counted = accelerator.num_processes * len(numbers) / plan.denoising_steps(len(numbers))

                def step(counted: float = counted) -> bool:  # called before every step
                    bar.update(counted)
                    return False

                with accelerator.autocast():
                    images = sample(pipeline.unet, plan, numbers, should_stop=step, predict=pipeline.predict)
                if not images.isfinite().all():
                    raise UserError(f"{args.pipeline} made NaN or infinite pixels\ntry --mixed_precision no")
                folder.save(numbers, images)
            done += sum(map(len, turn))
            bar.done = done  # the other processes keep about the same pace
    if accelerator.is_main_process:
        folder.save_grid(args.num_images)
        print(f"{args.num_images} images in {args.output_dir}")


if __name__ == "__main__":
    run_script(main, parse_args)
