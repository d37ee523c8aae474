"""Trains a DDPM (Ho et al. 2020) and saves a diffusers pipeline.

    accelerate launch train_ddpm.py                                    # digits, a few minutes on 2 CPU cores -> runs/digits
    accelerate launch train_ddpm.py --resume_from_checkpoint latest    # continue it, bit for bit
    accelerate launch train_ddpm.py --dataset_name uoft-cs/cifar10 --model_preset cifar10 --mixed_precision bf16 \\
        --output_dir runs/cifar10

Every flag of diffusers' `train_unconditional.py` works here with the same meaning.
Exit status: 0 done; 2 a mistake in the command or the data; 3 the training diverged, its processes hold different weights,
or a dry run does not fit; 75 stopped by a signal: run it again. (Launchers return other numbers: docs/reliability.md)
"""

from utils.core.entrypoint import parse_early, run_script
from utils.options.flags import DDPMOptions
from utils.options.parser import parse_options
from utils.runs.start import nothing_to_do, recalled


def parse_args(argv: list[str] | None = None) -> DDPMOptions:
    return recalled(parse_options(DDPMOptions, __doc__, argv))


OPTIONS = parse_early(parse_args, nothing_to_do) if __name__ == "__main__" else None  # above the imports that take seconds

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from models.guided_pipeline import guided
from utils.core import randomness
from utils.core.distributed import fix_bucket_order
from utils.data.training_data import Batch, TrainingData
from utils.diagnostics.probe import examine_network
from utils.diffusion import flow
from utils.diffusion.classes import class_of_samples, classes_known, embedded, needed_classes, training_labels
from utils.diffusion.ddpm import describe_schedule, loss_per_sample, loss_weights, scheduler_of, training_target
from utils.diffusion.objective import CODE_LOADER, Losses, Objective
from utils.diffusion.transforms import ConditionedUNet
from utils.diffusion.unet import make_unet, use_xformers
from utils.optim.nonfinite import propagate_nonfinite, step_if_finite
from utils.optim.optimizers import l1_norm, learning_rate_at, make_optimizer, set_learning_rate
from utils.training.between_updates import Periodic
from utils.training.budget import within_budget
from utils.training.compile_check import check_first_batch
from utils.training.memory_plan import MemoryPlan
from utils.training.monitor import Monitor
from utils.training.pretrained import Pretrained, load_weights, start_autoencoder, start_from_pipeline
from utils.training.run import begin_run, claim_folder, load_data, start_processes, train_or_push


class DDPM(Objective):
    """The network's error about noised images (Ho et al. 2020, algorithm 1)."""

    level, loader = "timesteps", "DDPMPipeline.from_pretrained({path!r})"

    def __init__(self, unet: nn.Module, options: DDPMOptions, device: torch.device, start: Pretrained | None = None):
        self.exported = unet
        self.network = ConditionedUNet(unet) if options.augment_probability else unet
        self.options, self.classes = options, classes_known(unet)
        self.loader = CODE_LOADER if self.classes or options.vae else type(self).loader
        self.noise_scheduler = start.make_scheduler() if start else scheduler_of(vars(options))
        self.kept, self.notes = (start.kept, start.notes) if start else ({}, [])
        self.seed, self.num_bins = options.seed, options.ddpm_num_steps
        if options.objective == "ddpm":
            self.weights = loss_weights(self.noise_scheduler, options.snr_gamma).to(device)

    def draw(self, batch: Batch, quantiles: Tensor | None = None) -> dict[str, Tensor]:
        if quantiles is None:
            timesteps = randomness.integers(self.seed, "timesteps", batch.sample_numbers, self.num_bins)
        else:
            timesteps = (quantiles * self.num_bins).long().to(batch.clean_images.device)
        drawn = {"clean_images": batch.clean_images, "noise": batch.noise, "timesteps": timesteps}
        drawn |= {} if batch.transforms is None else {"transforms": batch.transforms}
        if not self.classes:
            return drawn
        dropout = self.options.label_dropout if quantiles is None else 0.0
        return drawn | {"labels": training_labels(self.seed, batch.sample_numbers, batch.classes(), dropout)}

    def losses(
        self,
        network: nn.Module,
        clean_images: Tensor,
        noise: Tensor,
        timesteps: Tensor,
        labels: Tensor | None = None,
        **transforms: Tensor,
    ) -> Losses:
        noisy_images = self.noise_scheduler.add_noise(clean_images, noise, timesteps)
        target = training_target(self.noise_scheduler, clean_images, noise, timesteps)
        told = () if labels is None else (embedded(labels, self.classes),)
        losses = loss_per_sample(network(noisy_images, timesteps, *told, **transforms).sample, target, self.weigh(timesteps))
        return Losses(losses, losses)

    def weigh(self, timesteps: Tensor) -> Tensor:
        return self.weights[timesteps]

    def bins(self, timesteps: Tensor, **_: Tensor) -> Tensor:
        return timesteps

    def path(self) -> list[float]:
        return [t for t in (999, 750, 500, 250, 100, 50, 0) if t < self.num_bins]

    def caption(self, timestep: float) -> str:
        return f"t={timestep:.0f}"

    def predict(self, scaled: Tensor, timestep: Tensor, sample_numbers: Tensor) -> Tensor:
        """By class in turn, where there are classes."""
        labels = class_of_samples(sample_numbers, self.classes)
        no_class = None if labels is None else torch.full_like(labels, self.classes)
        return guided(self.exported, scaled, timestep, labels, self.options.guidance, no_class=no_class)

    def probe(self, data: TrainingData) -> dict:
        return examine_network(self.exported, self.noise_scheduler, data.samples, data.validation)

    def schedule(self) -> dict:
        return describe_schedule(self.noise_scheduler)

    def card(self) -> dict:
        of_classes = {"classes": self.classes, "label_dropout": self.options.label_dropout} if self.classes else {}
        return {
            "prediction_type": self.noise_scheduler.config.prediction_type,
            "carries_code": self.loader == CODE_LOADER,
            **of_classes,
        }


class Flow(DDPM):
    """The velocity from image to noise on straight lines (Lipman et al. 2023), or the clean image by its velocity's error
    (Li & He 2025). Noise levels and weights alone differ from DDPM's; a timestep is sigma x 1000, and no whole number."""

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.num_bins, self.levels = flow.LEVELS, (self.options.P_mean, self.options.P_std)
        if self.options.prediction_type == "sample":
            self.loader = CODE_LOADER

    def draw(self, batch: Batch, quantiles: Tensor | None = None) -> dict[str, Tensor]:
        if quantiles is None:
            sigmas = flow.training_sigmas(self.seed, batch.sample_numbers, *self.levels)
        else:
            sigmas = flow.sigmas_at(quantiles, *self.levels).float().to(batch.clean_images.device)
        return super().draw(batch, quantiles) | {"timesteps": sigmas * flow.LEVELS}

    def weigh(self, timesteps: Tensor) -> Tensor:
        return flow.weights(self.options.prediction_type, timesteps / flow.LEVELS)

    def bins(self, timesteps: Tensor, **_: Tensor) -> Tensor:
        return flow.bins(timesteps / flow.LEVELS, *self.levels)


def new_objective(unet: nn.Module, options: DDPMOptions, device: torch.device, start: Pretrained | None = None) -> DDPM:
    return (DDPM if options.objective == "ddpm" else Flow)(unet, options, device, start)


def main(options: DDPMOptions) -> int:
    # ---- processes, a batch that fits, the run's folder
    accelerator = start_processes(options, broadcast_buffers=options.spectral_norm)  # its power iteration moves them
    new = partial(new_objective, device=accelerator.device)
    options = within_budget(options, accelerator, make_unet, new)  # as they are without --budget
    start = start_from_pipeline(options, accelerator)  # None without --pretrained
    autoencoder = start_autoencoder(options, accelerator, start)  # None without --vae
    shape = autoencoder.latent_shape if autoencoder else options.image_shape  # of what the network sees
    config = start.config if start else None
    make_network = partial(make_unet, device_type=accelerator.device.type, config=config, shape=shape)
    new_optimizer = partial(make_optimizer, options=options)
    plan = MemoryPlan(accelerator, options, make_network, new_optimizer, autoencoder)
    plan.settle()  # --train_batch_size auto and --global_batch_size become numbers
    if options.dry_run:
        return plan.show(describe_schedule(start.make_scheduler() if start else scheduler_of(vars(options))))
    folder = claim_folder(options, accelerator)
    if folder is None:  # its run is finished
        return 0

    # ---- data, network, noise schedule, optimizer, EMA; a fresh run or a resumed one, and what watches it
    data = load_data(options, accelerator, autoencoder)
    num_classes = needed_classes(data.images) if options.class_conditional else 0
    objective = new(make_network(options, num_classes=num_classes), options, start=start)
    if start is not None:
        load_weights(objective.exported, start, data.images.class_names)
    if options.enable_xformers_memory_efficient_attention:
        use_xformers(objective.exported)
    optimizer = new_optimizer(objective.network)
    if options.compile:
        objective.exported.compile()  # in place, so that checkpoints and the EMA keep their clean names
    model, optimizer = accelerator.prepare(objective.network, optimizer)
    fix_bucket_order(model)
    run = begin_run(options, accelerator, folder, data, objective, optimizer)
    monitor = Monitor(run, plan.measures_eagerly())
    periodic = Periodic(run, monitor)
    if options.compile and not periodic.at_end():
        check_first_batch(run, model, monitor)
    model.train()
    parameters = [parameter for parameter in objective.network.parameters() if parameter.requires_grad]

    # ---- the loop: one turn is one update
    periodic.catch_up()
    batches = data.samples.batches(run.state.step, run.length.max_train_steps, options.dataloader_num_workers)
    while not periodic.finished():
        step = run.state.step
        learning_rate = learning_rate_at(step, run.length.max_train_steps, options)
        set_learning_rate(optimizer, learning_rate)
        monitor.begin(step)
        for micro_step in range(options.gradient_accumulation_steps):
            drawn = objective.draw(data.samples.on_device(monitor.wait_for(batches)))
            monitor.add_drawn(drawn)
            data.samples.seed_dropout(step, micro_step)
            with accelerator.accumulate(model):
                losses = objective.losses(model, **drawn)
                loss = losses.trained.mean() + (options.l1_weight * l1_norm(objective.exported) if options.l1_weight else 0.0)
                monitor.before_backward(loss)
                accelerator.backward(propagate_nonfinite(loss))
            monitor.add(losses, drawn)
        gradients = run.clipping.clip(accelerator, parameters)
        with monitor.optimizer_step(gradients):
            step_if_finite(optimizer, gradients.finite)  # on any rank a NaN changes nothing on all of them
            objective.after_step(gradients.finite)
        optimizer.zero_grad()
        if run.ema is not None:
            run.ema.update(run.ema_decay(step + 1), gradients.finite)
        run.state.step = step + 1
        periodic.after_update(learning_rate)  # reports, validates, samples, exports, saves: here alone the host waits
    return periodic.finish()


if __name__ == "__main__":
    run_script(train_or_push(main), lambda: OPTIONS, outlives_output=True)
