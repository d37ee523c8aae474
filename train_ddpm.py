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
    run_script,
)


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
    group.add_argument("--snr_gamma", type=float, help="min-SNR weighting of the loss, 5 in the paper (off)")
    add_training_flags(parser)
    add_optimizer_flags(parser)
    add_ema_flags(parser)
    add_report_flags(parser)
    add_output_flags(parser)
    return parse_with_preset(parser, argv)


def main(args: argparse.Namespace) -> int:
    # Imported here, not above: `--help` and a mistyped flag should not wait for torch and diffusers.
    import math
    from contextlib import nullcontext
    from functools import partial
    from pathlib import Path

    import numpy as np
    import torch

    from utils import randomness
    from utils.augmentation import augment, to_unit_range
    from utils.bad_images import BadImageReport
    from utils.batches import SampleOrder, training_batches
    from utils.checkpoints import (
        TrainState,
        agree_on_checkpoint,
        attach_state_hooks,
        load_checkpoint,
        read_state,
        save_checkpoint,
    )
    from utils.data import content_fingerprint, load_images
    from utils.data_check import check_data
    from utils.dataset_sources import hub_name
    from utils.diffusion import describe_schedule, loss_per_sample, loss_weights, make_noise_scheduler, training_target
    from utils.doctor import Doctor
    from utils.dynamics import Dynamics
    from utils.ema import EMA, ema_decay
    from utils.errors import UserError
    from utils.export import export_pipeline, model_card, push_to_hub
    from utils.gradients import AdaptiveLimit, clip_gradients
    from utils.ideal_denoiser import denoiser_gap, gap_by_timestep
    from utils.interrupts import EXIT_DIVERGED, EXIT_STOPPED, StopSignal, leave_on_signal
    from utils.launch import from_main_process, make_accelerator, on_main_process
    from utils.nonfinite import ADVICE, MAX_REPORTS, BadUpdate, BadUpdates, spread_to_gradient, write_nan_report
    from utils.optimization import l1_norm, learning_rate_at, make_optimizer, set_learning_rate, step_if_finite
    from utils.previews import sampling_steps, save_previews
    from utils.probe import PROBE_IMAGES, probe_network, probe_timesteps
    from utils.run_folder import RunFolder, check_options, command_line, shaping_options
    from utils.sampling import full_precision
    from utils.schedule import check_global_batch, is_due, updates_per_epoch
    from utils.tracking import PackingBar, ProgressBar, StepStatistics, Stopwatch, Trackers, peak_memory_gib
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
    )
    device = accelerator.device
    resuming = bool(args.resume_from_checkpoint)
    folder = RunFolder(output_dir)
    on_main_process(accelerator, folder.claim, resuming=resuming, overwrite=args.overwrite_output_dir)

    # ---- data, as packed uint8 [N, C, H, W]
    images = load_images(
        dataset_name=args.dataset_name,
        dataset_config_name=args.dataset_config_name,
        dataset_split=args.dataset_split,
        dataset_revision=args.dataset_revision,
        train_data_dir=args.train_data_dir,
        cache_dir=args.cache_dir,
        image_column=args.image_column,
        label_column=args.label_column,
        resolution=args.resolution,
        image_channels=args.image_channels,
        center_crop=args.center_crop,
        background=args.background,
        preserve_input_precision=args.preserve_input_precision,
        cache_images=args.cache_images == "yes",
        max_images=args.max_train_images,
        on_bad_image=args.on_bad_image,
        max_bad_images=args.max_bad_images,
        progress=PackingBar(),
    )
    check_images(images)
    if args.balanced_sampling and images.labels is None:
        raise UserError("--balanced_sampling needs class labels; name their column with --label_column")
    train_images, validation_images = split_validation(images, args.validation_images, args.seed)
    global_batch_size = accelerator.num_processes * args.train_batch_size * args.gradient_accumulation_steps
    check_global_batch(len(train_images), global_batch_size)
    epoch_steps = updates_per_epoch(
        len(train_images), args.train_batch_size, accelerator.num_processes, args.gradient_accumulation_steps
    )
    max_train_steps = args.max_train_steps or args.num_epochs * epoch_steps

    # ---- network, noise schedule, optimizer, EMA
    unet = make_unet(
        resolution=args.resolution,
        image_channels=args.image_channels,
        preset=args.model_preset,
        config_name_or_path=args.model_config_name_or_path,
        cache_dir=args.cache_dir,
        activation=args.activation,
        dropout=args.dropout,
        initialisation=args.initialisation,
        zero_init_output=args.zero_init_output,
        spectral_norm=args.spectral_norm,
        seed=args.seed,
    )
    if args.gradient_checkpointing:
        unet.enable_gradient_checkpointing()
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
    optimizer = make_optimizer(
        unet,
        args.optimizer,
        learning_rate=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        weight_decay=args.adam_weight_decay,
        epsilon=args.adam_epsilon,
        momentum=args.momentum,
    )
    if args.compile:
        unet.compile()  # in place, so that checkpoints and the EMA keep their clean names
    unet, optimizer = accelerator.prepare(unet, optimizer)
    raw_unet = accelerator.unwrap_model(unet)
    ema = EMA(raw_unet) if args.use_ema else None

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
    notes = list(images.notes)
    if resuming:
        checkpoint, skipped = agree_on_checkpoint(accelerator, output_dir, args.resume_from_checkpoint)
        notes += skipped
        if checkpoint is not None:
            saved = read_state(checkpoint)
            on_main_process(accelerator, check_options, saved.options, state.options, args.allow_option_change)
            load_checkpoint(accelerator, checkpoint)
            if saved.max_train_steps != max_train_steps:
                notes.append(
                    f"the run was laid out for {saved.max_train_steps} updates and is now for {max_train_steps}: "
                    "from here on the learning rate follows the new curve"
                )
            notes.append(f"resumed from {checkpoint.name}: {state.step} of {max_train_steps} updates done")
        else:
            notes.append(f"no checkpoint in {output_dir} yet: starting a new run")
    resolved = {
        "max_train_steps": max_train_steps,
        "updates_per_epoch": epoch_steps,
        "global_batch_size": global_batch_size,
        "num_processes": accelerator.num_processes,
        "mixed_precision": accelerator.mixed_precision,
        "device": str(device),
        "cpu_threads": torch.get_num_threads(),
        "parameters": sum(p.numel() for p in raw_unet.parameters()),
        "training_images": len(train_images),
        "validation_images": len(validation_images),
    }
    if not resuming:
        on_main_process(accelerator, folder.clear, args.logging_dir)
    on_main_process(accelerator, folder.write_options, args, resolved)

    # ---- what a turn of the loop works on
    order = SampleOrder(len(train_images), args.seed, train_images.labels if args.balanced_sampling else None)
    batches_of_updates = partial(
        training_batches,
        train_images,
        order,
        seed=args.seed,
        train_batch_size=args.train_batch_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        process_index=accelerator.process_index,
        num_processes=accelerator.num_processes,
        pin_memory=device.type == "cuda",
        center_crop=args.center_crop,
    )

    def on_device(batch: dict) -> tuple[torch.Tensor, ...]:
        """Every random number belongs to its sample, whichever process and micro step trains on it."""
        sample_numbers = batch["sample_numbers"].to(device, non_blocking=True)
        clean_images = augment(
            batch["images"].to(device, non_blocking=True),
            sample_numbers,
            seed=args.seed,
            max_value=images.max_value,
            random_flip=args.random_flip,
            color_jitter=args.color_jitter,
        )
        noise = randomness.normal(args.seed, "noise", sample_numbers, images.shape)
        timesteps = randomness.integers(args.seed, "timesteps", sample_numbers, args.ddpm_num_steps)
        return sample_numbers, clean_images, noise, timesteps

    def seed_dropout(step: int, micro_step: int) -> None:
        """Dropout is the exception: it depends on the rank, so it repeats at the same number of processes only."""
        seed = randomness.derive_seed(args.seed, "dropout", step, micro_step, accelerator.process_index)
        randomness.seed_generator(device, seed)

    def due(steps: int | None, epochs: int) -> bool:
        return is_due(state.step, max_train_steps, steps=steps, epochs=epochs, epoch_steps=epoch_steps)

    def preview() -> None:
        """Sample grids of raw and EMA weights from the same noise, to disk and to the trackers."""
        nonlocal grid
        grid = save_previews(
            accelerator,
            raw_unet,
            ema,
            noise_scheduler,
            output_dir,
            trackers,
            doctor,
            state.step,
            sampler=args.sampler,
            num_inference_steps=num_inference_steps,
            num_images=args.eval_batch_size,
            seed=args.seed,
            shape=images.shape,
            should_stop=lambda: stop.received is not None,
        )
        if accelerator.is_main_process:
            with full_precision(raw_unet):
                probe()

    def probe() -> None:
        """What the network does with real images, and how far it is from the best denoiser that there can be for them."""
        first_images = on_device(next(batches_of_updates(first_step=0, max_train_steps=1)))[1][:PROBE_IMAGES]
        found = probe_network(raw_unet, noise_scheduler, first_images, args.seed, held_out_images())
        if device.type != "mps":  # which has no float64
            gap = denoiser_gap(
                raw_unet,
                noise_scheduler,
                train_images,
                validation_images,
                timesteps=probe_timesteps(args.ddpm_num_steps),
                seed=args.seed,
                device=device,
                images_per_timestep=PROBE_IMAGES,
                random_flip=args.random_flip,
            )
            found |= gap_by_timestep(gap)
        doctor.record(state.step, {"probe": found})

    def held_out_images() -> torch.Tensor | None:
        """Some of the held-out images, as the validation shows them; None where there are none."""
        if not validates:
            return None
        count = min(len(validation_images), PROBE_IMAGES)
        pixels = validation_images.fetch(np.arange(count), np.full((count, 2), 0.5, np.float32))
        return to_unit_range(torch.from_numpy(pixels).to(device), validation_images.max_value)

    def export() -> None:
        """The diffusers pipeline at the top of the run's folder, with its model card."""
        card = model_card(
            {
                "title": output_dir.name,
                "data": images.description,
                "hub_dataset": hub_name(args.dataset_name),
                "command": command_line(args),
                "updates": state.step,
                "samples_seen": state.step * global_batch_size,
                "resolution": args.resolution,
                "prediction_type": args.prediction_type,
                "ema_decay": ema_decay(state.step, args.ema_max_decay, args.ema_inv_gamma, args.ema_power) if ema else 0,
                "sampler": args.sampler,
                "sampler_steps": num_inference_steps,
                "metrics": state.metrics,
                "pipeline": args.hub_model_id or output_dir,
                "grid": grid and grid.relative_to(output_dir),
            }
        )
        with averaged():
            on_main_process(accelerator, export_pipeline, raw_unet, noise_scheduler, output_dir, card)

    def nan_report(bad: BadUpdate) -> None:
        """The report on a skipped update, for which its samples are made again from their numbers."""

        def micro_batches():
            for batch in batches_of_updates(first_step=bad.step, max_train_steps=bad.step + 1):
                sample_numbers, clean_images, noise, timesteps = on_device(batch)
                rows = train_images.dataset_rows(train_images.shown(order.indices(batch["sample_numbers"]).numpy()))
                tensors = {"sample_numbers": sample_numbers, "dataset_rows": rows, "timesteps": timesteps}
                yield tensors | {"clean_images": clean_images, "noise": noise}

        def losses_of(micro_step: int, clean_images, noise, timesteps, **_) -> torch.Tensor:
            noisy_images = noise_scheduler.add_noise(clean_images, noise, timesteps)
            target = training_target(noise_scheduler, clean_images, noise, timesteps)
            seed_dropout(bad.step, micro_step)
            return loss_per_sample(raw_unet(noisy_images, timesteps).sample, target, weights_of_timesteps[timesteps])

        facts = {"updates_done_when_computed_again": state.step, "learning_rate": learning_rate, **resolved}
        progress.say(write_nan_report(accelerator, output_dir, bad, raw_unet, micro_batches(), losses_of, facts))

    averaged = ema.swapped_into_model if ema is not None else nullcontext
    validates = len(validation_images) > 0
    stop = StopSignal(accelerator.num_processes, args.collective_timeout)
    statistics = StepStatistics(device, args.ddpm_num_steps)
    adaptive = AdaptiveLimit(device, state.grad_norm_mean) if args.adaptive_clipping else None
    num_tensors = sum(p.requires_grad for p in raw_unet.parameters())
    bad_updates = BadUpdates(accelerator, num_tensors, state.skipped_updates, state.scaler_skips, state.bad_in_a_row)
    stopwatch = Stopwatch(state.step)
    progress = ProgressBar(accelerator.is_main_process, state.step, max_train_steps)
    trackers = Trackers(accelerator, "train_ddpm", args.logger, first_step=state.step, say=progress.say)
    doctor = Doctor(
        output_dir,
        options=vars(args),
        resolved=resolved,
        first_step=state.step,
        expected_reports=max_train_steps // args.logging_steps,
        enabled=accelerator.is_main_process,
        say=progress.say,
    )
    dynamics = Dynamics(raw_unet)
    for note in (", ".join(f"{name} {value}" for name, value in resolved.items()), *notes):
        progress.say(note)
    if accelerator.is_main_process and not doctor.knows("data"):
        found = {"data": check_data(train_images, seed=args.seed), "schedule": describe_schedule(noise_scheduler)}
        doctor.record(state.step, found)
    exit_status, nan_reports = 0, 0
    bad_images = BadImageReport(
        accelerator,
        output_dir / "bad_images.json",
        (train_images, validation_images),
        gathers=args.on_bad_image == "replace" and args.cache_images == "no",
        say=progress.say,
    )
    bad_images.update()
    grid = None  # the newest sample grid
    unet.train()

    # ---- the loop: one turn is one update
    batches = batches_of_updates(
        first_step=state.step, max_train_steps=max_train_steps, num_workers=args.dataloader_num_workers
    )
    last_step = state.step if state.stopped_early(args.early_stopping_patience) else max_train_steps
    for step in range(state.step, last_step):
        learning_rate = learning_rate_at(
            step,
            schedule=args.lr_scheduler,
            base=args.learning_rate,
            warmup_steps=args.lr_warmup_steps,
            total_steps=max_train_steps,
            floor=args.lr_floor,
            cycles=args.lr_cycles,
            power=args.lr_power,
        )
        set_learning_rate(optimizer, learning_rate)
        reports = (step + 1) % args.logging_steps == 0 or step + 1 == max_train_steps
        dynamics.begin(reports)
        for micro_step in range(args.gradient_accumulation_steps):
            with stopwatch.waiting_for_data():
                batch = next(batches)
            _, clean_images, noise, timesteps = on_device(batch)
            noisy_images = noise_scheduler.add_noise(clean_images, noise, timesteps)
            target = training_target(noise_scheduler, clean_images, noise, timesteps)
            dynamics.see_images(clean_images)
            seed_dropout(step, micro_step)
            with accelerator.accumulate(unet):
                prediction = unet(noisy_images, timesteps).sample
                losses = loss_per_sample(prediction, target, weights_of_timesteps[timesteps])
                loss = losses.mean() + (args.l1_weight * l1_norm(raw_unet) if args.l1_weight else 0.0)
                accelerator.backward(spread_to_gradient(loss))
            statistics.add_losses(losses, timesteps)
            bad_updates.add_losses(losses)

        clip_value = adaptive.limit() if adaptive is not None else args.max_grad_norm
        gradients = clip_gradients(accelerator, unet, clip_value)
        bad_updates.add(step, gradients)
        dynamics.before_step()
        step_if_finite(optimizer, gradients.finite)  # on any rank a NaN changes nothing on all of them
        dynamics.end(gradients)
        unet.zero_grad()
        if ema is not None:
            decay = ema_decay(step + 1, args.ema_max_decay, args.ema_inv_gamma, args.ema_power)
            ema.update(decay, gradients.finite)
        if adaptive is not None:
            adaptive.add(gradients)
        statistics.add_update(gradients)
        state.step = step + 1
        progress.update()

        if reports:  # here alone the host waits for the device
            report = statistics.report(accelerator) | bad_updates.report() | stopwatch.report(state.step, global_batch_size)
            report |= bad_images.update()
            report |= {
                "train/lr": learning_rate,
                "train/clip_value": float(clip_value),
                "train/samples_seen": state.step * global_batch_size,
                "perf/peak_memory_gib": peak_memory_gib(device),
            }
            if ema is not None:
                report |= {"train/ema_decay": decay, "train/ema_distance": ema.distance().item()}
                report["train/ema_norm"] = ema.norm().item()
            if accelerator.scaler is not None:
                report["train/loss_scale"] = accelerator.scaler.get_scale()
            figures, layers = dynamics.report()
            report |= figures
            trackers.log(report, step=state.step)
            critical = doctor.record_report(state.step, report, layers)
            progress.show(report)
            if math.isfinite(report["train/loss"]):
                state.metrics["training loss"] = report["train/loss"]
            if bad_updates.first is not None and nan_reports < MAX_REPORTS:
                progress.attempt(nan_report, bad_updates.first)
                nan_reports += 1
            if bad_updates.row >= args.max_bad_steps:
                progress.say(
                    f"stopped: the last {bad_updates.row} updates in a row had a loss or gradient that is not finite; "
                    f"weights and EMA are those before them. See nan_report/ and {ADVICE}"
                )
                exit_status = EXIT_DIVERGED
            if args.stop_on == "critical" and from_main_process(critical):
                progress.say("stopped: a critical finding, see diagnosis.json (--stop_on critical)")
                exit_status = EXIT_DIVERGED

        with stopwatch.paused():
            improved = False
            if validates and (state.step % args.validation_steps == 0 or state.step == max_train_steps):
                with averaged(), full_precision(raw_unet):
                    value = validation_loss(
                        accelerator,
                        raw_unet,
                        validation_images,
                        noise_scheduler,
                        weights_of_timesteps,
                        seed=args.seed,
                        batch_size=args.train_batch_size,
                    )
                trackers.log({"validation/loss": value}, step=state.step)
                doctor.record(state.step, {"validation/loss": value})
                improved = state.record_validation(value)
            if due(args.save_images_steps, args.save_images_epochs):
                progress.attempt(preview)
            if due(args.save_model_steps, args.save_model_epochs):
                progress.attempt(export)
            if stop.agreed():  # by all ranks, so that they leave at the same update
                exit_status = exit_status or EXIT_STOPPED
            if improved or exit_status or state.step % args.checkpointing_steps == 0:
                state.skipped_updates, state.scaler_skips, state.bad_in_a_row = bad_updates.totals()
                state.grad_norm_mean = adaptive.mean if adaptive is not None else None
                bad_images.update()  # what comes after a resume does not list what came before
                problem = save_checkpoint(accelerator, output_dir, state, total_limit=args.checkpoints_total_limit)
                if problem:
                    progress.say(f"checkpoint-{state.step} was not saved, earlier ones are whole: {problem}")
                    exit_status = 1 if exit_status == EXIT_STOPPED else exit_status  # not "saved, run it again"
        if exit_status or state.stopped_early(args.early_stopping_patience):
            break

    bad_images.update()  # an early stop comes between two reports

    # ---- the finished pipeline
    if exit_status == 0:
        if grid is None or grid.stem != f"{state.step:07d}":
            progress.attempt(preview)
        if not progress.attempt(export):
            save_checkpoint(accelerator, output_dir, state, total_limit=args.checkpoints_total_limit)
            exit_status = 1
    if exit_status == 0:
        progress.say(f"done: DDPMPipeline.from_pretrained({str(output_dir)!r})")
    elif exit_status == EXIT_STOPPED:
        progress.say(f"stopped after {state.step} updates; continue with --resume_from_checkpoint latest")
    progress.close()
    stop.close()
    on_main_process(accelerator, folder.release, exit_status)
    if accelerator.is_main_process:
        doctor.examine()
        doctor.write_report()
    trackers.close()
    if args.push_to_hub and exit_status == 0 and accelerator.is_main_process:  # last, so that no process waits for an upload
        push_to_hub(output_dir, args.hub_model_id, args.hub_token, args.hub_private_repo or None)
    return exit_status


if __name__ == "__main__":
    run_script(main, parse_args)
