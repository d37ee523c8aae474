"""Trains a class-conditional EDM2 network (Karras et al. 2024) and saves a diffusers pipeline with its code.

    accelerate launch train_edm2.py                                    # digits, minutes on 2 CPU cores -> runs/digits-edm2
    accelerate launch train_edm2.py --resume_from_checkpoint latest    # continue it, bit for bit
    accelerate launch train_edm2.py --dataset_name uoft-cs/cifar10 --resolution 32 --output_dir runs/cifar10-edm2

It has the flags of train_ddpm.py that apply to EDM2. If the dataset has no labels, the network is unconditional.
Exit status: 0 done; 2 a mistake in the command or the data; 3 the training diverged, its processes hold different weights,
or a dry run does not fit; 75 stopped by a signal: run it again. (Launchers return other numbers: docs/reliability.md)
"""

from utils.core.entrypoint import parse_early, run_script
from utils.options.flags import EDM2Options
from utils.options.parser import parse_options
from utils.runs.start import nothing_to_do, recalled


def parse_args(argv: list[str] | None = None) -> EDM2Options:
    return recalled(parse_options(EDM2Options, __doc__, argv))


OPTIONS = parse_early(parse_args, nothing_to_do) if __name__ == "__main__" else None  # above the imports that take seconds

import math
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from models.edm2_unet import EDM2UNet, force_weight_norm
from models.edm_heun import EDMHeunScheduler
from models.guided_pipeline import guided
from utils.core.distributed import fix_bucket_order
from utils.data.training_data import Batch, TrainingData
from utils.diagnostics.probe import examine_denoiser, path_timesteps, sigma_caption
from utils.diffusion import edm2
from utils.diffusion.classes import class_of_samples, count_classes, training_labels
from utils.diffusion.objective import CODE_LOADER, Losses, Objective
from utils.diffusion.unet import make_edm2_unet
from utils.optim.nonfinite import propagate_nonfinite, step_if_finite
from utils.optim.optimizers import l1_norm, learning_rate_at, make_optimizer, set_learning_rate
from utils.training.between_updates import Periodic
from utils.training.budget import within_budget
from utils.training.compile_check import check_first_batch
from utils.training.memory_plan import MemoryPlan
from utils.training.monitor import Monitor
from utils.training.pretrained import Pretrained, load_weights, start_autoencoder, start_from_pipeline
from utils.training.run import begin_run, claim_folder, load_data, start_processes, train_or_push


class EDM2(Objective):
    """The denoised image, by noise levels that weigh alike (Karras et al. 2024, section 2 and eq. 14)."""

    level, num_bins, loader = "sigmas", edm2.NOISE_BINS, CODE_LOADER
    path, caption = staticmethod(path_timesteps), staticmethod(sigma_caption)
    network: edm2.EDM2Denoiser

    def __init__(self, unet: EDM2UNet, options: EDM2Options, start: Pretrained | None = None):
        denoiser = edm2.EDM2Denoiser(unet, options.sigma_data, options.seed, bool(options.augment_probability))
        self.network, self.exported = denoiser, unet
        self.noise_scheduler = EDMHeunScheduler(sigma_data=options.sigma_data)
        self.options, self.classes = options, unet.config.num_class_embeds
        self.kept, self.notes = (start.kept, start.notes) if start else ({}, [])
        self.after_step(None)

    def draw(self, batch: Batch, quantiles: Tensor | None = None) -> dict[str, Tensor]:
        options, labels = self.options, batch.classes()
        if quantiles is None:
            sigmas = edm2.training_noise_levels(options.seed, batch.sample_numbers, options.P_mean, options.P_std)
            labels = training_labels(options.seed, batch.sample_numbers, labels, options.label_dropout)
        else:
            sigmas = edm2.noise_levels_at(quantiles, options.P_mean, options.P_std).float().to(labels.device)
        drawn = {"clean_images": batch.clean_images, "noise": batch.noise, "sigmas": sigmas, "labels": labels}
        return drawn | ({} if batch.transforms is None else {"transforms": batch.transforms})

    def losses(
        self, network: nn.Module, clean_images: Tensor, noise: Tensor, sigmas: Tensor, labels: Tensor, **transforms: Tensor
    ) -> Losses:
        noisy_images = clean_images + sigmas[:, None, None, None] * noise
        denoised, uncertainty = network(noisy_images, sigmas, labels, **transforms)
        return edm2.losses_per_sample(denoised, clean_images, sigmas, uncertainty, self.options.sigma_data)

    def bins(self, sigmas: Tensor, **_: Tensor) -> Tensor:
        return edm2.noise_bins(sigmas, self.options.P_mean, self.options.P_std)

    def after_step(self, finite: Tensor | None) -> None:
        if self.options.force_weight_norm:
            force_weight_norm(self.network, finite)

    def predict(self, scaled: Tensor, timestep: Tensor, sample_numbers: Tensor) -> Tensor:
        """By class in turn."""
        labels = class_of_samples(sample_numbers, self.classes)
        return guided(self.exported, scaled, timestep, labels, self.options.guidance if self.classes else 1.0)

    def probe(self, data: TrainingData) -> dict:
        return examine_denoiser(self.network, data.samples)

    def card(self) -> dict:
        noise_levels = f"normal, mean {self.options.P_mean}, standard deviation {self.options.P_std}"
        of_classes = {"classes": self.classes, "label_dropout": self.options.label_dropout} if self.classes else {}
        return {"noise_levels": noise_levels, "carries_code": True, **of_classes}


def epsilon_of_means(options: EDM2Options, shape: tuple[int, int, int]) -> float:
    """The reference sums lambda / exp(u) (D - y)^2 + u over the N channels and pixels of an image, where we take the mean: for
    all parameters, those of u too, its gradient is N times ours, and N m / (N sqrt(v) + eps) = m / (sqrt(v) + eps / N)."""
    return options.adam_epsilon / math.prod(shape)


def main(options: EDM2Options) -> int:
    # ---- processes, a batch that fits, the run's folder
    accelerator = start_processes(options)
    options = within_budget(options, accelerator, make_edm2_unet, EDM2)  # as they are without --budget
    start = start_from_pipeline(options, accelerator)  # None without --pretrained
    autoencoder = start_autoencoder(options, accelerator, start)  # None without --vae
    shape = autoencoder.latent_shape if autoencoder else options.image_shape  # of what the network sees
    config = start.config if start else None
    make_network = partial(make_edm2_unet, device_type=accelerator.device.type, config=config, shape=shape)
    new_optimizer = partial(make_optimizer, options=replace(options, adam_epsilon=epsilon_of_means(options, shape)))
    plan = MemoryPlan(accelerator, options, make_network, new_optimizer, autoencoder)
    plan.settle()  # --train_batch_size auto and --global_batch_size become numbers
    if options.dry_run:
        return plan.show()
    folder = claim_folder(options, accelerator)
    if folder is None:  # its run is finished
        return 0

    # ---- data, network, noise levels, optimizer, EMA; a fresh run or a resumed one, and what watches it
    data = load_data(options, accelerator, autoencoder)
    num_classes = count_classes(data.images) if options.class_conditional else 0
    objective = EDM2(make_network(options, num_classes=num_classes), options, start)
    if start is not None:
        load_weights(objective.exported, start, data.images.class_names)
        objective.after_step(None)
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
