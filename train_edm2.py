"""Trains a class-conditional EDM2 network (Karras et al. 2024) and leaves a diffusers pipeline that carries its code.

    accelerate launch train_edm2.py                                    # digits, minutes on 2 CPU cores -> runs/digits-edm2
    accelerate launch train_edm2.py --resume_from_checkpoint latest    # continue it, bit for bit
    accelerate launch train_edm2.py --dataset_name uoft-cs/cifar10 --resolution 32 --model_preset XS --mixed_precision fp16 \\
        --output_dir runs/cifar10-edm2

The flags of train_ddpm.py, as far as they have a meaning here; a data set without labels trains an unconditional network.
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
    preset_table,
)
from utils.options import (
    batch_options,
    data_options,
    edm2_unet_options,
    ema_options,
    evaluation_options,
    learning_rate_options,
    milestone_options,
    monitor_options,
    optimizer_options,
    plan_options,
    sample_options,
)
from utils.presets import EDM2_ABOUT, EDM2_FLAGS
from utils.script import run_script


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=preset_table(EDM2_FLAGS, EDM2_ABOUT),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # or a preset could not tell what was given, nor a secret be kept out of the records
    )
    add_data_flags(parser)
    group = parser.add_argument_group("network")
    group.add_argument("--model_preset", help="digits16, or XXS, XS, S, M, L, XL, XXL (XS; digits16 for the digits)")
    group.add_argument("--model_config_name_or_path", help="config of an EDM2UNet: Hub name, folder or file")
    group.add_argument("--dropout", type=float, help="(the network's own)")
    group.add_argument(
        "--force_weight_norm",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="every stored weight vector at unit variance after each update (yes)",
    )
    group = parser.add_argument_group("diffusion")
    group.add_argument("--P_mean", type=float, default=-0.8, help="mean of ln sigma in training (-0.8; -0.4 for latents)")
    group.add_argument("--P_std", type=float, default=1.6, help="standard deviation of ln sigma (1.6; 1.0 for latents)")
    group.add_argument("--sigma_data", type=float, default=0.5, help="standard deviation of the images in [-1, 1] (0.5)")
    group.add_argument(
        "--class_conditional", action=argparse.BooleanOptionalAction, default=True, help="where there are labels (yes)"
    )
    group.add_argument(
        "--label_dropout", type=float, default=0.1, help="share of samples trained without label, for guidance (0.1)"
    )
    add_training_flags(parser)
    add_optimizer_flags(
        parser,
        epsilon_help="as in the reference, whose loss is a sum over channels and pixels; here it is their mean, so epsilon is "
        "divided by channels x pixels (1e-8)",
    )
    add_ema_flags(parser)
    add_report_flags(parser, ("heun", "dpmsolver++"), "--num_inference_steps", "sampling steps (32)")
    add_output_flags(parser)
    parser.set_defaults(
        optimizer="adam",
        learning_rate=0.01,
        lr_scheduler="inverse_sqrt",
        adam_beta1=0.9,
        adam_beta2=0.99,
        adam_weight_decay=0.0,
        ema_type="power",
        output_dir="edm2-model-64",
    )
    return parse_with_preset(parser, argv, EDM2_FLAGS, usual_preset="XS")


def main(args: argparse.Namespace) -> int:
    # Imported here, not above: `--help` and a mistyped flag should not wait for torch and diffusers.
    from contextlib import nullcontext
    from functools import partial
    from pathlib import Path

    import torch

    from models.edm2_unet import force_weight_norm
    from models.edm_heun import EDMHeunScheduler
    from utils.bad_images import BadImageReport
    from utils.checkpoints import TrainState, attach_state_hooks, resume
    from utils.compile_check import check_compiled
    from utils.data import content_fingerprint, load_images
    from utils.data_check import check_data
    from utils.dataset_sources import hub_name
    from utils.doctor import Doctor
    from utils.edm import (
        NOISE_RANKS,
        EDM2Denoiser,
        Losses,
        denoise,
        losses_per_sample,
        noise_levels_at,
        noise_ranks,
        training_labels,
        training_noise_levels,
    )
    from utils.edm2_network import count_classes, make_edm2_unet
    from utils.edm_previews import EDM2Previews
    from utils.ema_snapshots import Snapshots, remove_snapshots_beyond
    from utils.errors import explain_out_of_memory
    from utils.export import check_export, export_pipeline, model_card, push_to_hub, write_card
    from utils.gradients import AdaptiveLimit, FixedLimit, clip_gradients
    from utils.interrupts import EXIT_STOPPED, StopSignal, leave_on_signal
    from utils.launch import fix_bucket_order, make_accelerator, on_main_process
    from utils.memory_plan import NO_ACTIVATIONS, MemoryPlan
    from utils.milestones import Milestones
    from utils.monitors import Monitors
    from utils.nan_report import NanReports
    from utils.nonfinite import spread_to_gradient
    from utils.optimization import l1_norm, learning_rate_at, make_optimizer, set_learning_rate, step_if_finite
    from utils.power_ema import make_ema
    from utils.run_folder import RunFolder, command_line, shaping_options
    from utils.sampling import sampling_steps
    from utils.schedule import check_global_batch, updates_per_epoch
    from utils.tracking import PackingBar, ProgressBar, Trackers
    from utils.training_evaluation import TrainingEvaluation
    from utils.training_samples import TrainingSamples
    from utils.unet import network_options
    from utils.validation import check_images, mean_loss, split_validation

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
    )
    device, is_main = accelerator.device, accelerator.is_main_process
    resuming = bool(args.resume_from_checkpoint)
    new_unet = partial(make_edm2_unet, **edm2_unet_options(args, device.type))
    # The reference sums lambda / exp(u) (D - y)^2 + u over the N channels and pixels of an image, where we take the mean: for
    # all parameters, those of u too, its gradient is N times ours, and N m / (N sqrt(v) + eps) = m / (sqrt(v) + eps / N).
    epsilon = args.adam_epsilon / (args.image_channels * args.resolution**2)
    new_optimizer = partial(make_optimizer, **optimizer_options(args) | {"epsilon": epsilon})
    plan = MemoryPlan(accelerator, new_unet, new_optimizer, probe_bytes=0, **plan_options(args))
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

    # ---- network, noise levels, optimizer, EMA
    unet = new_unet(num_classes=count_classes(images) if args.class_conditional else 0)
    denoiser = EDM2Denoiser(unet, args.sigma_data, args.seed)
    if args.force_weight_norm:
        force_weight_norm(denoiser)
    noise_scheduler = EDMHeunScheduler(sigma_data=args.sigma_data)
    num_inference_steps = sampling_steps(args.sampler, args.num_inference_steps, noise_scheduler)
    optimizer = new_optimizer(denoiser)
    if args.compile:
        denoiser.unet.compile()  # in place, so that checkpoints and the EMA keep their clean names
    denoiser, optimizer = accelerator.prepare(denoiser, optimizer)
    fix_bucket_order(denoiser)
    raw_denoiser = accelerator.unwrap_model(denoiser)
    raw_unet = raw_denoiser.unet  # without u(sigma), which is of use in training alone
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
    used_epsilon = optimizer.param_groups[0].get("eps")  # the checkpoint's, where there was one; SGD has none
    if used_epsilon not in (None, epsilon):
        notes.append(f"the optimizer keeps the checkpoint's epsilon, {used_epsilon:.3g}; a new run would take {epsilon:.3g}")
    resolved = {
        "max_train_steps": max_train_steps,
        "updates_per_epoch": epoch_steps,
        "global_batch_size": global_batch_size,
        "micro_batch_size": args.train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "num_processes": accelerator.num_processes,
        "mixed_precision": accelerator.mixed_precision,
        "optimizer_epsilon": used_epsilon,
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

    # ---- what is trained: the denoised image, by noise levels that weigh alike (Karras et al. 2024, section 2 and eq. 14)
    def draw(batch: dict) -> dict[str, torch.Tensor]:
        sample_numbers, clean_images, noise = samples.on_device(batch)
        return {
            "clean_images": clean_images,
            "noise": noise,
            "sigmas": training_noise_levels(args.seed, sample_numbers, args.P_mean, args.P_std),
            "labels": training_labels(args.seed, sample_numbers, samples.labels(batch), args.label_dropout),
        }

    def losses_of(network, step: int, micro_step: int, clean_images, noise, sigmas, labels) -> Losses:
        """Losses [B] of one micro step of the update that follows `step` others."""
        noisy_images = clean_images + sigmas[:, None, None, None] * noise
        samples.seed_dropout(step, micro_step)
        denoised, uncertainty = network(noisy_images, sigmas, labels)
        return losses_per_sample(denoised, clean_images, sigmas, uncertainty, args.sigma_data)

    def validation_losses(clean_images, noise, places, labels) -> torch.Tensor:
        sigmas = noise_levels_at(places, args.P_mean, args.P_std).to(device, torch.float32)
        noisy_images = clean_images + sigmas[:, None, None, None] * noise
        denoised = denoise(raw_unet, noisy_images, sigmas, args.sigma_data, labels)
        return losses_per_sample(denoised, clean_images, sigmas, torch.zeros_like(sigmas), args.sigma_data).weighted

    def validate() -> float:
        """Mean weighted loss on the held-out images."""
        return mean_loss(accelerator, validation_images, validation_losses, seed=args.seed, batch_size=args.train_batch_size)

    # ---- what watches and records
    stop = StopSignal(accelerator.num_processes, args.collective_timeout)
    progress = ProgressBar(is_main, state.step, max_train_steps)
    trackers = Trackers(accelerator, "train_edm2", args.logger, first_step=state.step, say=progress.say)
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
        raw_denoiser,
        samples,
        draw=draw,
        losses_of=lambda *micro_step, **batch: losses_of(raw_denoiser, *micro_step, **batch).total,
        facts=resolved,
        say=progress.say,
        noise_level="sigmas",
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
        raw_denoiser,
        state,
        total_steps=max_train_steps,
        global_batch_size=global_batch_size,
        measures_eagerly=measures_eagerly,
        num_noise_levels=NOISE_RANKS,
        checks_noise=False,
        nan_reports=nan_reports,
        bad_images=bad_images,
        progress=progress,
        trackers=trackers,
        doctor=doctor,
        **monitor_options(args),
    )
    snapshots = Snapshots(accelerator, ema, output_dir, state, every=args.ema_snapshot_steps, dtype=args.ema_snapshot_dtype)
    previews = EDM2Previews(
        accelerator,
        raw_denoiser,
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
        predict=previews.predict,
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
            "noise_levels": f"normal, mean {args.P_mean}, standard deviation {args.P_std}",
            "classes": raw_unet.config.num_class_embeds or None,
            "label_dropout": args.label_dropout if raw_unet.config.num_class_embeds else None,
            "carries_code": True,
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
        doctor.record(state.step, {"data": check_data(train_images, seed=args.seed)})
    bad_images.update()
    denoiser.train()
    parameters = [p for p in raw_denoiser.parameters() if p.requires_grad]

    if args.compile and not milestones.at_end():
        micro_batch = draw(next(samples.batches(state.step, state.step + 1)))

        def first_loss() -> torch.Tensor:
            return losses_of(raw_denoiser, state.step, 0, **micro_batch).total.mean()

        if not check_compiled(accelerator, denoiser, raw_unet, first_loss, progress.say):
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
            with accelerator.accumulate(denoiser):
                losses = losses_of(denoiser, step, micro_step, **micro_batch)
                loss = losses.total.mean() + (args.l1_weight * l1_norm(raw_unet) if args.l1_weight else 0.0)
                accelerator.backward(spread_to_gradient(loss))
            ranks = noise_ranks(micro_batch["sigmas"], args.P_mean, args.P_std)
            monitors.add_losses(losses.weighted, ranks, trained=losses.total)

        clip_value = clipping.limit()
        gradients = clip_gradients(accelerator, parameters, clip_value)
        clipping.add(gradients)
        monitors.before_step(step, gradients)
        step_if_finite(optimizer, gradients.finite)  # on any rank a NaN changes nothing on all of them
        if args.force_weight_norm:
            force_weight_norm(raw_denoiser, gradients.finite)
        monitors.after_step(gradients)
        denoiser.zero_grad()
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
        progress.say(f"done: DiffusionPipeline.from_pretrained({str(output_dir)!r}, trust_remote_code=True)")
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
