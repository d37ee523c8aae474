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
    from contextlib import nullcontext
    from pathlib import Path

    import torch

    from utils import randomness
    from utils.augmentation import augment
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
    from utils.dataset_sources import hub_name
    from utils.diffusion import loss_per_sample, loss_weights, make_noise_scheduler, training_target
    from utils.ema import EMA, ema_decay
    from utils.errors import UserError
    from utils.export import export_pipeline, model_card, push_to_hub
    from utils.gradients import clip_gradients
    from utils.interrupts import EXIT_DIVERGED, EXIT_STOPPED, StopSignal
    from utils.launch import make_accelerator, on_main_process
    from utils.optimization import l1_norm, learning_rate_at, make_optimizer, set_learning_rate, step_if_finite
    from utils.previews import sampling_steps, save_previews
    from utils.run_folder import check_options, check_output_dir, clear_output_dir, command_line, shaping_options, write_options
    from utils.sampling import full_precision
    from utils.schedule import check_global_batch, is_due, updates_per_epoch
    from utils.tracking import PackingBar, ProgressBar, StepStatistics, Stopwatch, init_trackers, peak_memory_gib
    from utils.unet import make_unet, use_xformers
    from utils.validation import check_images, split_validation, validation_loss

    # ---- processes and the run's folder
    output_dir = Path(args.output_dir)
    accelerator = make_accelerator(
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        log_with=args.logger,
        project_dir=str(output_dir / args.logging_dir),
        cpu_threads=args.cpu_threads,
    )
    device = accelerator.device
    resuming = bool(args.resume_from_checkpoint)
    on_main_process(accelerator, check_output_dir, output_dir, resuming=resuming, overwrite=args.overwrite_output_dir)

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
        on_main_process(accelerator, clear_output_dir, output_dir, args.logging_dir)
    on_main_process(accelerator, write_options, output_dir, args, resolved)
    init_trackers(accelerator, "train_ddpm", args.logger, first_step=state.step)

    # ---- the loop: one turn is one update
    order = SampleOrder(len(train_images), args.seed, train_images.labels if args.balanced_sampling else None)
    batches = iter(
        training_batches(
            train_images,
            order,
            seed=args.seed,
            first_step=state.step,
            max_train_steps=max_train_steps,
            train_batch_size=args.train_batch_size,
            gradient_accumulation_steps=args.gradient_accumulation_steps,
            process_index=accelerator.process_index,
            num_processes=accelerator.num_processes,
            num_workers=args.dataloader_num_workers,
            pin_memory=device.type == "cuda",
            center_crop=args.center_crop,
        )
    )

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
            state.step,
            sampler=args.sampler,
            num_inference_steps=num_inference_steps,
            num_images=args.eval_batch_size,
            seed=args.seed,
            shape=images.shape,
            should_stop=lambda: stop.received is not None,
        )

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

    averaged = ema.swapped_into_model if ema is not None else nullcontext
    validates = len(validation_images) > 0
    stop = StopSignal(accelerator.num_processes)
    statistics = StepStatistics(device, args.ddpm_num_steps, state.skipped_updates)
    stopwatch = Stopwatch(state.step)
    progress = ProgressBar(accelerator.is_main_process, state.step, max_train_steps)
    for note in (", ".join(f"{name} {value}" for name, value in resolved.items()), *notes):
        progress.say(note)
    exit_status = 0
    grid = None  # the newest sample grid
    unet.train()

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
        for micro_step in range(args.gradient_accumulation_steps):
            with stopwatch.waiting_for_data():
                batch = next(batches)
            # Every random number belongs to its sample, whichever process and micro step trains on it.
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
            noisy_images = noise_scheduler.add_noise(clean_images, noise, timesteps)
            target = training_target(noise_scheduler, clean_images, noise, timesteps)
            # Dropout is the exception: it depends on the rank, so it repeats at the same number of processes only.
            torch.manual_seed(randomness.derive_seed(args.seed, "dropout", step, micro_step, accelerator.process_index))
            with accelerator.accumulate(unet):
                prediction = unet(noisy_images, timesteps).sample
                losses = loss_per_sample(prediction, target, weights_of_timesteps[timesteps])
                loss = losses.mean() + (args.l1_weight * l1_norm(raw_unet) if args.l1_weight else 0.0)
                accelerator.backward(loss)
            statistics.add_losses(losses, timesteps)

        grad_norm, finite = clip_gradients(accelerator, unet, args.max_grad_norm)
        step_if_finite(optimizer, finite)  # on any rank a NaN changes nothing on all of them
        optimizer.zero_grad()
        if ema is not None:
            decay = ema_decay(step + 1, args.ema_max_decay, args.ema_inv_gamma, args.ema_power)
            ema.update(decay, finite)
        statistics.add_update(grad_norm, finite)
        state.step = step + 1
        progress.update()

        if state.step % args.logging_steps == 0 or state.step == max_train_steps:  # here alone the host waits for the device
            report = statistics.report(accelerator) | stopwatch.report(state.step, global_batch_size)
            report |= {
                "train/lr": learning_rate,
                "train/clip_value": args.max_grad_norm,
                "train/samples_seen": state.step * global_batch_size,
                "perf/peak_memory_gib": peak_memory_gib(device),
            }
            if ema is not None:
                report |= {"train/ema_decay": decay, "train/ema_distance": ema.distance().item()}
            accelerator.log(report, step=state.step)
            progress.show(report)
            state.metrics["training loss"] = report["train/loss"]
            if report["train/bad_updates_in_a_row"] >= args.max_bad_steps:
                progress.say(
                    f"stopped: {report['train/bad_updates_in_a_row']:.0f} updates in a row had a gradient that is not finite; "
                    "weights and EMA are untouched. Try a lower --learning_rate, a longer --lr_warmup_steps, bf16 for fp16"
                )
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
                accelerator.log({"validation/loss": value}, step=state.step)
                improved = state.record_validation(value)
            if due(args.save_images_steps, args.save_images_epochs):
                preview()
            if due(args.save_model_steps, args.save_model_epochs):
                export()
            if stop.agreed():  # by all ranks, so that they leave at the same update
                exit_status = EXIT_STOPPED
            if improved or exit_status or state.step % args.checkpointing_steps == 0:
                state.skipped_updates = statistics.skipped_updates
                problem = save_checkpoint(accelerator, output_dir, state, total_limit=args.checkpoints_total_limit)
                if problem:
                    progress.say(f"checkpoint-{state.step} was not saved, earlier ones are whole: {problem}")
        if exit_status or state.stopped_early(args.early_stopping_patience):
            break

    # ---- the finished pipeline
    if exit_status == 0:
        if grid is None or grid.stem != f"{state.step:07d}":
            preview()
        export()
        progress.say(f"done: DDPMPipeline.from_pretrained({str(output_dir)!r})")
    elif exit_status == EXIT_STOPPED:
        progress.say(f"stopped after {state.step} updates; continue with --resume_from_checkpoint latest")
    progress.close()
    stop.close()
    is_main_process = accelerator.is_main_process
    accelerator.end_training()
    if args.push_to_hub and exit_status == 0 and is_main_process:  # last, so that no process waits for an upload
        push_to_hub(output_dir, args.hub_model_id, args.hub_token, args.hub_private_repo or None)
    return exit_status


if __name__ == "__main__":
    run_script(main, parse_args)
