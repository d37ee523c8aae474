"""Trains a DDPM (Ho et al. 2020) and leaves a diffusers pipeline.

    accelerate launch train_ddpm.py                                    # digits, a few minutes on 2 CPU cores -> runs/digits
    accelerate launch train_ddpm.py --resume_from_checkpoint latest    # continue it, bit for bit
    accelerate launch train_ddpm.py --dataset_name uoft-cs/cifar10 --model_preset cifar10 --mixed_precision bf16 \\
        --output_dir runs/cifar10

Every flag of diffusers' `train_unconditional.py` works here with the same meaning.
Exit status: 0 done, 2 a mistake in the command or the data, 3 training diverged, 75 stopped by a signal (run it again).
"""

import argparse

from utils.cli import (
    add_data_flags,
    add_ema_flags,
    add_optimizer_flags,
    add_output_flags,
    add_report_flags,
    add_training_flags,
    parse_with_preset,
    positive_int,
    preset_table,
)
from utils.options import (
    batch_options,
    data_options,
    ema_options,
    evaluation_options,
    learning_rate_options,
    milestone_options,
    monitor_options,
    optimizer_options,
    plan_options,
    sample_options,
    unet_options,
)
from utils.script import run_script


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=preset_table(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # or a preset could not tell what was given, nor a secret be kept out of the records
    )
    add_data_flags(parser)
    group = parser.add_argument_group("network")
    group.add_argument("--model_preset", help="digits16, cifar10, celeba64 or 256, see below (chosen from the resolution)")
    group.add_argument("--model_config_name_or_path", help="config of a diffusers UNet2DModel: Hub name, folder or file")
    group.add_argument("--activation", choices=("silu", "mish", "gelu", "relu"), help="(the network's own)")
    group.add_argument("--dropout", type=float, help="(the network's own)")
    group.add_argument("--initialisation", choices=("default", "xavier", "he"), default="default")
    group.add_argument("--zero_init_output", action="store_true", help="start with an output layer of zeros")
    group.add_argument("--spectral_norm", action="store_true", help="largest singular value 1 in every layer but the last")
    group.add_argument(
        "--enable_xformers_memory_efficient_attention",
        action="store_true",
        help="needs xformers; torch's own attention is already memory-efficient",
    )
    group = parser.add_argument_group("diffusion")
    group.add_argument("--prediction_type", choices=("epsilon", "sample", "v_prediction"), default="epsilon")
    group.add_argument("--ddpm_num_steps", type=positive_int, default=1000, help="noise levels (1000)")
    group.add_argument(
        "--ddpm_beta_schedule",
        choices=("linear", "scaled_linear", "squaredcos_cap_v2", "sigmoid"),
        default="linear",
        help="squaredcos_cap_v2 is the cosine schedule (linear)",
    )
    group.add_argument("--rescale_betas_zero_snr", action="store_true", help="no signal left at the last timestep")
    group.add_argument(
        "--snr_gamma",
        type=float,
        help="min-SNR weighting of the loss, 5 in the paper; not with --rescale_betas_zero_snr (off)",
    )
    add_training_flags(parser)
    add_optimizer_flags(parser)
    add_ema_flags(parser)
    add_report_flags(parser)
    add_output_flags(parser)
    return parse_with_preset(parser, argv)


def main(args: argparse.Namespace) -> int:
    # Imported here, not above: `--help` and a mistyped flag should not wait for torch and diffusers.
    from contextlib import nullcontext
    from functools import partial
    from pathlib import Path

    import torch

    from utils import randomness
    from utils.bad_images import BadImageReport
    from utils.checkpoints import TrainState, attach_state_hooks, resume
    from utils.compile_check import check_compiled
    from utils.data import content_fingerprint, load_images
    from utils.data_check import check_data
    from utils.dataset_sources import hub_name
    from utils.diffusion import describe_schedule, loss_per_sample, loss_weights, make_noise_scheduler, training_target
    from utils.doctor import Doctor
    from utils.ema_snapshots import Snapshots, remove_snapshots_beyond
    from utils.errors import explain_out_of_memory
    from utils.export import check_export, export_pipeline, model_card, push_to_hub, write_card
    from utils.gradients import AdaptiveLimit, FixedLimit, clip_gradients
    from utils.ideal_denoiser import bytes_for_gap
    from utils.interrupts import EXIT_STOPPED, StopSignal, leave_on_signal
    from utils.launch import fix_bucket_order, make_accelerator, on_main_process
    from utils.memory_plan import NO_ACTIVATIONS, MemoryPlan
    from utils.milestones import Milestones
    from utils.monitors import Monitors
    from utils.nan_report import NanReports
    from utils.nonfinite import spread_to_gradient
    from utils.optimization import l1_norm, learning_rate_at, make_optimizer, set_learning_rate, step_if_finite
    from utils.power_ema import make_ema
    from utils.previews import Previews
    from utils.run_folder import RunFolder, command_line, shaping_options
    from utils.sampling import sampling_steps
    from utils.schedule import check_global_batch, updates_per_epoch
    from utils.tracking import PackingBar, ProgressBar, Trackers
    from utils.training_evaluation import TrainingEvaluation
    from utils.training_samples import TrainingSamples
    from utils.unet import make_unet, network_options, use_xformers
    from utils.validation import check_images, split_validation, validation_loss

    # ---- processes and the run's folder
    leave_on_signal()
    output_dir = Path(args.output_dir)
    accelerator = make_accelerator(
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        log_with=args.logger,
        project_dir=str(output_dir / args.logging_dir),
        cpu_threads=args.cpu_threads,
        collective_timeout=args.collective_timeout,
        tf32=args.tf32,
        cudnn_benchmark=args.cudnn_benchmark,
        broadcast_buffers=args.spectral_norm,  # whose power iteration moves them; the others are constants
    )
    device, is_main = accelerator.device, accelerator.is_main_process
    resuming = bool(args.resume_from_checkpoint)
    new_unet = partial(make_unet, **unet_options(args, device.type))
    new_optimizer = partial(make_optimizer, **optimizer_options(args))
    image_shape = (args.image_channels, args.resolution, args.resolution)
    plan = MemoryPlan(
        accelerator, new_unet, new_optimizer, probe_bytes=bytes_for_gap(image_shape, args.random_flip), **plan_options(args)
    )
    if args.global_batch_size:
        resumed = output_dir if resuming else None
        split = plan.split(**batch_options(args), resumed=resumed, try_out=not args.dry_run)
        args.train_batch_size, args.gradient_accumulation_steps = split
        accelerator.gradient_accumulation_steps = args.gradient_accumulation_steps
    explain_out_of_memory(partial(plan.explain, args.train_batch_size, args.gradient_accumulation_steps))
    if args.dry_run:
        on_main_process(accelerator, plan.show, args.train_batch_size, args.gradient_accumulation_steps)
        return 0
    folder = RunFolder(output_dir)
    on_main_process(accelerator, folder.claim, resuming=resuming, overwrite=args.overwrite_output_dir)

    # ---- data: packed uint8 [N, C, H, W], and every random number of a sample a function of its number
    images = load_images(**data_options(args), progress=PackingBar())
    check_images(images)
    train_images, validation_images = split_validation(images, args.validation_images, args.seed)
    samples = TrainingSamples(train_images, accelerator, **sample_options(args))
    global_batch_size = accelerator.num_processes * args.train_batch_size * args.gradient_accumulation_steps
    check_global_batch(len(train_images), global_batch_size)
    epoch_steps = updates_per_epoch(
        len(train_images), args.train_batch_size, accelerator.num_processes, args.gradient_accumulation_steps
    )
    max_train_steps = args.max_train_steps or args.num_epochs * epoch_steps

    # ---- network, noise schedule, optimizer, EMA
    unet = new_unet()
    if args.enable_xformers_memory_efficient_attention:
        use_xformers(unet)
    noise_scheduler = make_noise_scheduler(
        beta_schedule=args.ddpm_beta_schedule,
        num_train_timesteps=args.ddpm_num_steps,
        prediction_type=args.prediction_type,
        rescale_betas_zero_snr=args.rescale_betas_zero_snr,
    )
    num_inference_steps = sampling_steps(args.sampler, args.ddpm_num_inference_steps, noise_scheduler)
    weights_of_timesteps = loss_weights(noise_scheduler, args.snr_gamma).to(device)
    optimizer = new_optimizer(unet)
    if args.compile:
        unet.compile()  # in place, so that checkpoints and the EMA keep their clean names
    unet, optimizer = accelerator.prepare(unet, optimizer)
    fix_bucket_order(unet)
    raw_unet = accelerator.unwrap_model(unet)
    on_main_process(accelerator, check_export, raw_unet, noise_scheduler, output_dir)
    ema, ema_decay = make_ema(raw_unet, **ema_options(args)) if args.use_ema else (None, None)
    averaged = ema.swapped_into_model if ema is not None else nullcontext

    # ---- state: a fresh run or a resumed one
    state = TrainState(
        options=shaping_options(
            args,
            mixed_precision=accelerator.mixed_precision,
            global_batch_size=global_batch_size,
            data_fingerprint=content_fingerprint(images),
            **network_options(raw_unet),
        ),
        max_train_steps=max_train_steps,
    )
    attach_state_hooks(accelerator, ema, state)
    notes = [*images.notes, *resume(accelerator, output_dir, args.resume_from_checkpoint, state, args.allow_option_change)]
    resolved = {
        "max_train_steps": max_train_steps,
        "updates_per_epoch": epoch_steps,
        "global_batch_size": global_batch_size,
        "micro_batch_size": args.train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "num_processes": accelerator.num_processes,
        "mixed_precision": accelerator.mixed_precision,
        "device": str(device),
        "cpu_threads": torch.get_num_threads(),
        "parameters": sum(p.numel() for p in raw_unet.parameters()),
        "training_images": len(train_images),
        "validation_images": len(validation_images),
    }
    if resuming:
        on_main_process(accelerator, remove_snapshots_beyond, output_dir, state.step)
    else:
        on_main_process(accelerator, folder.clear, args.logging_dir)
    on_main_process(accelerator, folder.write_options, args, resolved)

    # ---- what is trained: the network's error about noised images (Ho et al. 2020, algorithm 1)
    def draw(batch: dict) -> dict[str, torch.Tensor]:
        sample_numbers, clean_images, noise = samples.on_device(batch)
        timesteps = randomness.integers(args.seed, "timesteps", sample_numbers, args.ddpm_num_steps)
        return {"clean_images": clean_images, "noise": noise, "timesteps": timesteps}

    def losses_of(network, step: int, micro_step: int, clean_images, noise, timesteps) -> torch.Tensor:
        """Losses [B] of one micro step of the update that follows `step` others."""
        noisy_images = noise_scheduler.add_noise(clean_images, noise, timesteps)
        target = training_target(noise_scheduler, clean_images, noise, timesteps)
        samples.seed_dropout(step, micro_step)
        return loss_per_sample(network(noisy_images, timesteps).sample, target, weights_of_timesteps[timesteps])

    def validate() -> float:
        """Mean loss on the held-out images."""
        process = (noise_scheduler, weights_of_timesteps)
        options = {"seed": args.seed, "batch_size": args.train_batch_size}
        return validation_loss(accelerator, raw_unet, validation_images, *process, **options)

    # ---- what watches and records
    stop = StopSignal(accelerator.num_processes, args.collective_timeout)
    progress = ProgressBar(is_main, state.step, max_train_steps)
    trackers = Trackers(accelerator, "train_ddpm", args.logger, first_step=state.step, say=progress.say)
    doctor = Doctor(
        output_dir,
        options=vars(args),
        resolved=resolved,
        first_step=state.step,
        expected_reports=max_train_steps // args.logging_steps,
        enabled=is_main,
        say=progress.say,
        log=trackers.log,
    )
    clipping = AdaptiveLimit(device, state.grad_norm_mean) if args.adaptive_clipping else FixedLimit(args.max_grad_norm)
    nan_reports = NanReports(
        accelerator,
        output_dir,
        raw_unet,
        samples,
        draw=draw,
        losses_of=lambda *micro_step, **batch: losses_of(raw_unet, *micro_step, **batch),
        facts=resolved,
        say=progress.say,
    )
    bad_images = BadImageReport(
        accelerator,
        output_dir / "bad_images.json",
        (train_images, validation_images),
        gathers=args.on_bad_image == "replace" and args.cache_images == "no",
        say=progress.say,
    )
    measures_eagerly = plan.measures_eagerly(args.train_batch_size, args.gradient_accumulation_steps)
    monitors = Monitors(
        accelerator,
        raw_unet,
        state,
        total_steps=max_train_steps,
        global_batch_size=global_batch_size,
        measures_eagerly=measures_eagerly,
        num_noise_levels=args.ddpm_num_steps,
        checks_noise=True,
        nan_reports=nan_reports,
        bad_images=bad_images,
        progress=progress,
        trackers=trackers,
        doctor=doctor,
        **monitor_options(args),
    )
    snapshots = Snapshots(accelerator, ema, output_dir, state, every=args.ema_snapshot_steps, dtype=args.ema_snapshot_dtype)
    previews = Previews(
        accelerator,
        raw_unet,
        ema,
        noise_scheduler,
        output_dir,
        samples=samples,
        held_out=validation_images,
        trackers=trackers,
        doctor=doctor,
        sampler=args.sampler,
        num_inference_steps=num_inference_steps,
        num_images=args.eval_batch_size,
        should_stop=lambda: stop.received is not None,
    )
    evaluation = TrainingEvaluation(
        accelerator,
        raw_unet,
        noise_scheduler,
        output_dir,
        training=train_images,
        held_out=validation_images,
        trackers=trackers,
        doctor=doctor,
        num_inference_steps=num_inference_steps,
        should_stop=lambda: stop.received is not None,
        say=progress.say,
        **evaluation_options(args),
    )

    def card() -> str:
        facts = {
            "title": output_dir.name,
            "data": images.description,
            "hub_dataset": hub_name(args.dataset_name),
            "command": command_line(args),
            "updates": state.step,
            "samples_seen": state.step * global_batch_size,
            "resolution": args.resolution,
            "prediction_type": args.prediction_type,
            "ema_decay": ema_decay(state.step) if ema else None,
            "ema_width": args.ema_widths[0] if ema and args.ema_type == "power" else None,
            "sampler": args.sampler,
            "sampler_steps": num_inference_steps,
            "metrics": state.metrics,
            "pipeline": args.hub_model_id or output_dir,
            "grid": previews.newest and previews.newest.relative_to(output_dir),
        }
        return model_card(facts)

    def export() -> None:
        """The diffusers pipeline at the top of the run's folder, with its model card."""
        with averaged():
            on_main_process(accelerator, export_pipeline, raw_unet, noise_scheduler, output_dir, card())

    milestones = Milestones(
        accelerator,
        raw_unet,
        state,
        output_dir,
        total_steps=max_train_steps,
        epoch_steps=epoch_steps,
        averaged=averaged,
        validate=validate if len(validation_images) else None,
        evaluation=evaluation,
        previews=previews,
        export=export,
        write_card=lambda: on_main_process(accelerator, write_card, output_dir, card()),
        snapshots=snapshots,
        clipping=clipping,
        stop=stop,
        monitors=monitors,
        progress=progress,
        trackers=trackers,
        doctor=doctor,
        **milestone_options(args),
    )
    for note in (", ".join(f"{name} {value}" for name, value in resolved.items()), *notes):
        progress.say(note)
    if is_main and not doctor.knows("data"):
        found = {"data": check_data(train_images, seed=args.seed), "schedule": describe_schedule(noise_scheduler)}
        doctor.record(state.step, found)
    bad_images.update()
    unet.train()
    parameters = [p for p in raw_unet.parameters() if p.requires_grad]

    if args.compile and not milestones.at_end():
        micro_batch = draw(next(samples.batches(state.step, state.step + 1)))

        def first_loss() -> torch.Tensor:
            return losses_of(raw_unet, state.step, 0, **micro_batch).mean()

        if not check_compiled(accelerator, unet, raw_unet, first_loss, progress.say):
            monitors.measure_eagerly()
        elif not measures_eagerly:
            progress.say(NO_ACTIVATIONS)

    # ---- the loop: one turn is one update
    batches = samples.batches(state.step, max_train_steps, args.dataloader_num_workers)
    exit_status = milestones.catch_up()
    while not exit_status and not milestones.at_end():
        step = state.step
        learning_rate = learning_rate_at(step, total_steps=max_train_steps, **learning_rate_options(args))
        set_learning_rate(optimizer, learning_rate)
        monitors.begin(step)
        for micro_step in range(args.gradient_accumulation_steps):
            with monitors.waiting_for_data():
                batch = next(batches)
            micro_batch = draw(batch)
            monitors.see_images(micro_batch["clean_images"])
            with accelerator.accumulate(unet):
                losses = losses_of(unet, step, micro_step, **micro_batch)
                loss = losses.mean() + (args.l1_weight * l1_norm(raw_unet) if args.l1_weight else 0.0)
                accelerator.backward(spread_to_gradient(loss))
            monitors.add_losses(losses, micro_batch["timesteps"])

        clip_value = clipping.limit()
        gradients = clip_gradients(accelerator, parameters, clip_value)
        clipping.add(gradients)
        monitors.before_step(step, gradients)
        step_if_finite(optimizer, gradients.finite)  # on any rank a NaN changes nothing on all of them
        monitors.after_step(gradients)
        unet.zero_grad()
        if ema is not None:
            decay = ema_decay(step + 1)
            ema.update(decay, gradients.finite)
        state.step = step + 1
        progress.update()

        if monitors.due:  # here alone the host waits for the device
            figures = {"train/lr": learning_rate, "train/clip_value": clip_value}
            if ema is not None:
                figures |= {"train/ema_decay": decay} | ema.report()
            exit_status = monitors.report(figures)
        exit_status = milestones.after_update(exit_status)

    # ---- the finished pipeline
    exit_status = milestones.finish(exit_status)
    if exit_status == 0:
        progress.say(f"done: DDPMPipeline.from_pretrained({str(output_dir)!r})")
    elif exit_status == EXIT_STOPPED:
        progress.say(f"stopped after {state.step} updates; continue with --resume_from_checkpoint latest")
    progress.close()
    stop.close()
    on_main_process(accelerator, folder.release, exit_status)
    doctor.finish()
    trackers.close()
    if args.push_to_hub and exit_status == 0 and is_main:  # last, so that no process waits for an upload
        push_to_hub(output_dir, args.hub_model_id, args.hub_token, args.hub_private_repo or None)
    return exit_status


if __name__ == "__main__":
    run_script(main, parse_args)
