"""Faults of a training step, each an edit of the script or module that a user would edit, and the stage that it changes.

The doctor is asked about them by audit.py. They were written down, with the stage expected of each, before the doctor's step
audit stood, and without a look at it. `source` is "ours", or the public threads in which people reported the fault; the number
before them is theirs in our list of such threads.
"""

from dataclasses import dataclass, field

from benchmarks.doctor.trials import Edit

DDPM, EDM2 = "train_ddpm.py", "train_edm2.py"
OURS = "ours"

# Files that are edited.
AUGMENTATION, DECODE, LOADER = "utils/data/augmentation.py", "utils/data/decode.py", "utils/data/loader.py"
DATASET, TRAINING_DATA = "utils/data/dataset.py", "utils/data/training_data.py"
OBJECTIVE, EDM2_OBJECTIVE, UNET = "utils/diffusion/ddpm.py", "utils/diffusion/edm2.py", "utils/diffusion/unet.py"
CLASSES = "utils/diffusion/classes.py"
EDM2_UNET, HEUN = "models/edm2_unet.py", "models/edm_heun.py"
SAMPLING, EXPORT_FILE = "utils/diffusion/sampling.py", "utils/diffusion/export.py"
OPTIMIZERS, CLIPPING = "utils/optim/optimizers.py", "utils/optim/clipping.py"
EMA, POWER_EMA = "utils/optim/ema.py", "utils/optim/power_ema.py"
DISTRIBUTED, CHECKPOINTS = "utils/core/distributed.py", "utils/runs/checkpoints.py"
RUN, EXPORT, SAMPLES = "utils/training/run.py", "utils/training/export.py", "utils/training/samples.py"

COLOR, CROPPED = ("shapes", "textures", "letters"), ("textures",)  # data sets with three channels; with images that are cropped


@dataclass(frozen=True)
class StepFault:
    stage: str | tuple[str, ...]  # of the audit's stages; several where each would be right
    edits: tuple[Edit, ...]
    script: str = DDPM
    source: str = OURS
    flags: dict = field(default_factory=dict)  # the run's, over those of its kind
    processes: int = 1
    resumed: bool = False  # half of the run is made without the fault, and resumed with it
    datasets: tuple[str, ...] | None = None  # on which it can show; None: on all

    @property
    def stages(self) -> tuple[str, ...]:
        return (self.stage,) if isinstance(self.stage, str) else self.stage


STEP_FAULTS: dict[str, StepFault] = {}


def fault(name: str, stage: str | tuple[str, ...], *edits: tuple[str, str, str], **options) -> None:
    """Notes a fault; an edit is (file, old, new)."""
    if name in STEP_FAULTS:
        raise ValueError(f"two faults of the name {name!r}")
    STEP_FAULTS[name] = StepFault(stage, tuple(Edit(*edit) for edit in edits), **options)


ACCUMULATED = {"gradient_accumulation_steps": 2, "train_batch_size": 8}
MIN_SNR = {"snr_gamma": 5.0}
EPSILON = {"prediction_type": "epsilon", "ddpm_beta_schedule": "linear"}
SAMPLE = {"prediction_type": "sample", "ddpm_beta_schedule": "linear"}
V = {"prediction_type": "v_prediction", "ddpm_beta_schedule": "squaredcos_cap_v2"}
FLIPPED = {"random_flip": True}
CLIPPED = {"max_grad_norm": 0.05}  # so that every update is clipped
DECAYED = {"adam_weight_decay": 0.1}

# Lines of both scripts that several faults change.
STEP = "            step_if_finite(optimizer, gradients.finite)  # on any rank a NaN changes nothing on all of them\n"
CLIP = "        gradients = run.clipping.clip(accelerator, parameters)\n"
BACKWARD = "                accelerator.backward(propagate_nonfinite(loss))\n"
EMA_UPDATE = "            run.ema.update(run.ema_decay(step + 1), gradients.finite)\n"
IF_EMA = "        if run.ema is not None:\n"
COUNTED = "        run.state.step = step + 1\n"
ZERO_GRAD = "        optimizer.zero_grad()\n"
FORWARD = "                losses = objective.losses(model, **drawn)\n"
TRAIN_MODE = "    model.train()\n"
RATE = "learning_rate_at(step, run.length.max_train_steps, options)"
MEAN = "losses.trained.mean()"
MICRO_STEP_ENDS = "            monitor.add(losses, drawn)\n"
AFTER_STEP = "            objective.after_step(gradients.finite)\n"

# ---- data

SCALED = "return images.to(torch.float32).div_(max_value / 2).sub_(1)"
PIXELS = "    pixels = to_unit_range(images, max_value)\n"

fault(
    "pixels from 0 to 255",
    "data",
    (AUGMENTATION, SCALED, "return images.to(torch.float32)"),
    source="34: lucidrains 20",
)
fault("pixels from 0 to 1", "data", (AUGMENTATION, SCALED, "return images.to(torch.float32).div_(max_value)"))
fault(
    "pixels through a gamma of 2.2",
    "data",
    (AUGMENTATION, SCALED, "return images.to(torch.float32).div_(max_value).pow_(2.2).mul_(2).sub_(1)"),
)
fault(
    "scale of another autoencoder",
    "data",
    (AUGMENTATION, PIXELS, "    pixels = to_unit_range(images, max_value) * 0.18215\n"),
    source="26-30: diffusers 8887, 5166; MONAI 212; Open-Sora 493",
)
fault(
    "scale divided by twice",
    "data",
    (AUGMENTATION, PIXELS, "    pixels = to_unit_range(images, max_value) / 0.7 / 0.7\n"),
    source="26-30: diffusers 8887, 5166; MONAI 212; Open-Sora 493",
    script=EDM2,
)
fault(
    "shift forgotten",
    "data",
    (AUGMENTATION, PIXELS, "    pixels = to_unit_range(images, max_value) + 0.1159\n"),
    source="26-30: diffusers 8887, 5166; MONAI 212; Open-Sora 493",
)
fault(
    "each image standardized by itself",
    "data",
    (
        AUGMENTATION,
        PIXELS,
        "    pixels = to_unit_range(images, max_value)\n"
        "    pixels = (pixels - pixels.mean((1, 2, 3), keepdim=True)) / (pixels.std((1, 2, 3), keepdim=True) + 1e-3)\n",
    ),
)
fault(
    "blue before red",
    "data",
    (AUGMENTATION, PIXELS, "    pixels = to_unit_range(images, max_value).flip(1)\n"),
    datasets=COLOR,
)
fault(
    "red in all channels",
    "data",
    (AUGMENTATION, PIXELS, "    pixels = to_unit_range(images, max_value)[:, :1].expand(images.shape).clone()\n"),
    script=EDM2,
    datasets=COLOR,
)
fault("upside down", "data", (AUGMENTATION, PIXELS, "    pixels = to_unit_range(images, max_value).flip(-2)\n"))
fault("rows and columns exchanged", "data", (AUGMENTATION, PIXELS, "    pixels = to_unit_range(images, max_value).mT\n"))
fault("shifted by a pixel", "data", (AUGMENTATION, PIXELS, "    pixels = to_unit_range(images, max_value).roll(1, -1)\n"))
fault("sixteen gray levels", "data", (AUGMENTATION, PIXELS, "    pixels = to_unit_range(images // 16 * 16, max_value)\n"))
fault(
    "blurred",
    "data",
    (
        AUGMENTATION,
        PIXELS,
        "    pixels = torch.nn.functional.avg_pool2d(to_unit_range(images, max_value), 3, 1, 1, count_include_pad=False)\n",
    ),
)
fault("mirrored though not asked to", "data", (AUGMENTATION, "    if random_flip:\n", "    if True:\n"))
fault("always mirrored", "data", (AUGMENTATION, "[:, 0] < 0.5\n", "[:, 0] >= 0.0\n"), flags=FLIPPED)
fault("never mirrored", "data", (TRAINING_DATA, "random_flip=self.random_flip,", "random_flip=False,"), flags=FLIPPED)
fault("flipped the other way", "data", (AUGMENTATION, "pixels.flip(-1), pixels)", "pixels.flip(-2), pixels)"), flags=FLIPPED)
fault(
    "one flip for the whole batch",
    "data",
    (AUGMENTATION, '"flip", sample_numbers.to(', '"flip", sample_numbers[:1].to('),
    flags=FLIPPED,
)
fault(
    "the same flips in each epoch",
    "data",
    (TRAINING_DATA, "            sample_numbers,\n", "            sample_numbers % len(self.images),\n"),
    flags=FLIPPED,
    source="19: open-unmix 80, CenterNet 233",
)
fault(
    "color jitter twice as strong",
    "data",
    (AUGMENTATION, "1 + color_jitter * (2 * uniforms - 1)", "1 + 2 * color_jitter * (2 * uniforms - 1)"),
    flags={"color_jitter": 0.2},
)
fault(
    "always the same crop",
    "data",
    (DECODE, "np.floor(np.asarray(crop, np.float64) * (room + 1))", "np.asarray(crop, np.float64) * 0"),
    datasets=CROPPED,
)
fault(
    "the crop of the center",
    "data",
    (LOADER, "crop = None if fixed else", "crop = None if True else"),
    datasets=CROPPED,
)
fault(
    "squeezed in place of cropped",
    "data",
    (DECODE, "height, width = resized_size(planes[0].height, planes[0].width, self.size)", "height, width = self.size"),
    datasets=CROPPED,
)
fault("resized without a filter", "data", (DECODE, "Image.Resampling.BILINEAR", "Image.Resampling.NEAREST"), datasets=CROPPED)
fault(
    "EXIF ignored",
    "data",
    (DECODE, "if image.getexif().get(_EXIF_ORIENTATION, 1) != 1:", "if False:"),
    datasets=CROPPED,
    source="48: diffusers 3465, kohya 1316",
)
fault(
    "never shuffled",
    "data",
    (
        LOADER,
        'return randomness.permute(self.seed, "order", epochs, sample_numbers % self.length, self.length)',
        "return sample_numbers % self.length",
    ),
)
fault(
    "every epoch in the same order",
    "data",
    (LOADER, "epochs = sample_numbers // self.length", "epochs = torch.zeros_like(sample_numbers)"),
)
fault(
    "half of the images are never seen",
    "data",
    (LOADER, "sample_numbers % self.length, self.length)", "sample_numbers % (self.length // 2), self.length // 2)"),
)
fault(
    "images drawn with replacement",
    "data",
    (
        LOADER,
        'return randomness.permute(self.seed, "order", epochs, sample_numbers % self.length, self.length)',
        'return randomness.integers(self.seed, "order", sample_numbers, self.length)',
    ),
)
fault(
    "order replayed after a resume",
    ("data", "state"),
    (DDPM, "data.samples.batches(run.state.step, ", "data.samples.batches(0, "),
    source="20: ms-swift 10050, datasets 8308",
    resumed=True,
)

# ---- noise

NOISE = 'noise = randomness.normal(self.seed, "noise", sample_numbers, self.shape)'


def noise(name: str, new: str, stage: str | tuple[str, ...] = "noise", **options) -> None:
    fault(name, stage, (TRAINING_DATA, NOISE, new), **options)


noise("noise of standard deviation 0.9", f"{NOISE} * 0.9")
noise("noise of standard deviation 1.1", f"{NOISE} * 1.1", script=EDM2)
noise("noise with a mean", f"{NOISE} + 0.1")
noise(
    "offset noise",
    f"{NOISE}\n        noise = noise + 0.2 * torch.randn(*noise.shape[:2], 1, 1, device=noise.device)",
)
noise(
    "uniform noise of unit variance",
    'noise = randomness.uniform(self.seed, "noise", sample_numbers, math.prod(self.shape))\n'
    "        noise = ((noise * 2 - 1) * 3**0.5).unflatten(1, self.shape)",
)
noise(
    "noise repeats in each epoch",
    'noise = randomness.normal(self.seed, "noise", sample_numbers % len(self.images), self.shape)',
)
noise(
    "noise seeded anew in each update",
    'noise = randomness.normal(self.seed, "noise", sample_numbers - sample_numbers[0], self.shape)',
    script=EDM2,
)
noise("one noise for the whole batch", f"{NOISE}[:1].expand(len(sample_numbers), -1, -1, -1)", script=EDM2)
noise("one noise for all channels", f"{NOISE}[:, :1].expand(-1, self.images.shape[0], -1, -1)", datasets=COLOR)
noise(
    "noise of half the resolution",
    "channels, height, width = self.images.shape\n"
    '        noise = randomness.normal(self.seed, "noise", sample_numbers, (channels, height // 2, width // 2))\n'
    "        noise = torch.nn.functional.interpolate(noise, scale_factor=2.0)",
)
noise("noise of opposite pairs", f"{NOISE}\n        noise = torch.cat([noise[: len(noise) // 2], -noise[: len(noise) // 2]])")
noise("noise cut at two", f"{NOISE}.clamp(-2.0, 2.0)", script=EDM2)

# ---- timestep

DRAWN = 'randomness.integers(self.seed, "timesteps", batch.sample_numbers, self.num_ranks)'
TOLD = "network(noisy_images, timesteps, *told)"
SIGMAS = "edm2.training_noise_levels(options.seed, batch.sample_numbers, options.P_mean, options.P_std)"

fault(
    "one timestep for the whole batch",
    "timestep",
    (
        DDPM,
        DRAWN,
        'randomness.integers(self.seed, "timesteps", batch.sample_numbers[:1], self.num_ranks).repeat(len(batch.noise))',
    ),
)
fault(
    "the last tenth of the timesteps never drawn",
    "timestep",
    (DDPM, DRAWN, 'randomness.integers(self.seed, "timesteps", batch.sample_numbers, self.num_ranks * 9 // 10)'),
)
fault(
    "timesteps of the square of a uniform number",
    "timestep",
    (
        DDPM,
        DRAWN,
        '(randomness.uniform(self.seed, "timesteps", batch.sample_numbers)[:, 0].square() * self.num_ranks).long()',
    ),
)
fault(
    "timesteps seeded anew in each update",
    "timestep",
    (
        DDPM,
        DRAWN,
        'randomness.integers(self.seed, "timesteps", batch.sample_numbers - batch.sample_numbers[0], self.num_ranks)',
    ),
)
fault("network told the next timestep", "timestep", (DDPM, TOLD, "network(noisy_images, timesteps + 1, *told)"))
fault("network told timesteps in bf16", "timestep", (DDPM, TOLD, "network(noisy_images, timesteps.bfloat16(), *told)"))
fault("network told timestep 0", "timestep", (DDPM, TOLD, "network(noisy_images, torch.zeros_like(timesteps), *told)"))
fault(
    "network told reversed timesteps", "timestep", (DDPM, TOLD, "network(noisy_images, self.num_ranks - 1 - timesteps, *told)")
)
fault(
    "noise levels of another distribution",
    "timestep",
    (EDM2, SIGMAS, "edm2.training_noise_levels(options.seed, batch.sample_numbers, -1.2, 1.2)"),
    script=EDM2,
    source="40: ai-toolkit 947, musubi 1035",
    flags={"P_mean": -0.4, "P_std": 1.0},
)
fault(
    "variance in place of standard deviation of ln sigma",
    "timestep",
    (EDM2, SIGMAS, "edm2.training_noise_levels(options.seed, batch.sample_numbers, options.P_mean, options.P_std**2)"),
    script=EDM2,
)
fault(
    "one noise level for the whole batch",
    "timestep",
    (
        EDM2,
        SIGMAS,
        "edm2.training_noise_levels(options.seed, batch.sample_numbers[:1], options.P_mean, options.P_std)"
        ".repeat(len(batch.noise))",
    ),
    script=EDM2,
)
fault("c_noise without its quarter", ("timestep", "input"), (HEUN, "sigma.log() / 4.0", "sigma.log()"), script=EDM2)
fault(
    "c_noise of training is sigma",
    ("timestep", "input"),
    (EDM2_OBJECTIVE, "unet(c_in * noisy_images, c_noise, class_labels)", "unet(c_in * noisy_images, sigma, class_labels)"),
    script=EDM2,
)

# ---- input

ADDED = "noisy_images = self.noise_scheduler.add_noise(clean_images, noise, timesteps)"
KNOWN = "        self.seed, self.num_ranks = options.seed, options.ddpm_num_steps\n"


def noised(name: str, new: str, stage: str | tuple[str, ...] = "input", **options) -> None:
    fault(name, stage, (DDPM, ADDED, new), **options)


noised(
    "noised before the images are normalized",
    "noisy_images = self.noise_scheduler.add_noise((clean_images + 1) / 2, noise, timesteps) * 2 - 1",
    source="35: imagen-pytorch 160",
)
fault(
    "noise in place of the noised image",
    "input",
    (DDPM, TOLD, "network(noise, timesteps, *told)"),
    source="36: diffusers 3658",
)
noised(
    "noised in bf16",
    "noisy_images = self.noise_scheduler.add_noise(clean_images.bfloat16(), noise.bfloat16(), timesteps).float()",
    source="37: diffusers 9004",
)
noised(
    "square roots missing",
    "kept = self.noise_scheduler.alphas_cumprod.to(noise.device)[timesteps][:, None, None, None]\n"
    "        noisy_images = kept * clean_images + (1 - kept) * noise",
)
noised("image and noise exchanged", "noisy_images = self.noise_scheduler.add_noise(noise, clean_images, timesteps)")
noised(
    "noised twice",
    "noisy_images = self.noise_scheduler.add_noise(clean_images, noise, timesteps)\n"
    "        noisy_images = self.noise_scheduler.add_noise(noisy_images, noise, timesteps)",
)
noised("noised image clamped", f"{ADDED}.clamp(-1, 1)")
noised(
    "noised for the timestep before",
    "noisy_images = self.noise_scheduler.add_noise(clean_images, noise, (timesteps - 10).clamp(min=0))",
    ("input", "timestep"),
)
noised(
    "noised for the timestep of a neighbor",
    "noisy_images = self.noise_scheduler.add_noise(clean_images, noise, timesteps.roll(1))",
    ("input", "timestep"),
)
noised(
    "input perturbed once more",
    "noisy_images = self.noise_scheduler.add_noise(clean_images, noise + 0.1 * torch.randn_like(noise), timesteps)",
)
fault("network shown half of the noised image", "input", (DDPM, TOLD, "network(0.5 * noisy_images, timesteps, *told)"))
fault(
    "training schedule of the inference config",
    ("input", "export"),
    (DDPM, ADDED, "noisy_images = self.training_scheduler.add_noise(clean_images, noise, timesteps)"),
    (
        DDPM,
        KNOWN,
        KNOWN + "        config = self.noise_scheduler.config\n"
        '        self.training_scheduler = type(self.noise_scheduler).from_config(config, beta_schedule="scaled_linear")\n',
    ),
    flags=EPSILON,
    source="46: fast-stable-diffusion 815",
)
fault(
    "cosine schedule that starts at 1",
    ("input", "export"),
    (DDPM, TRAIN_MODE, "    objective.noise_scheduler.alphas_cumprod[0] = 1.0 - 1e-7\n" + TRAIN_MODE),
    flags={**V, "ddpm_num_steps": 50},
    source="33: MONAI 8427",
)
fault(
    "c_in missing",
    "input",
    (EDM2_OBJECTIVE, "unet(c_in * noisy_images,", "unet(noisy_images,"),
    script=EDM2,
)
fault("c_in of the variance", "input", (HEUN, "1.0 / variance.sqrt(),", "1.0 / variance,"), script=EDM2)
fault(
    "root of sigma",
    "input",
    (EDM2, "sigmas[:, None, None, None] * noise", "sigmas.sqrt()[:, None, None, None] * noise"),
    script=EDM2,
)
fault(
    "image scaled down as the noise grows",
    "input",
    (
        EDM2,
        "noisy_images = clean_images + sigmas[:, None, None, None] * noise",
        "noisy_images = (clean_images + sigmas[:, None, None, None] * noise) / (1 + sigmas**2).sqrt()[:, None, None, None]",
    ),
    script=EDM2,
)

# ---- condition

LABELS = "options, labels = self.options, batch.classes()"
DROPPED = "batch.sample_numbers, labels, options.label_dropout)"


def condition(name: str, *edits: tuple[str, str, str], stage: str | tuple[str, ...] = "condition", **options) -> None:
    fault(name, stage, *edits, script=EDM2, **options)


condition("labels never dropped", (EDM2, DROPPED, "batch.sample_numbers, labels, 0.0)"))
condition("labels always dropped", (EDM2, DROPPED, "batch.sample_numbers, labels, 1.0)"))
condition("labels kept at the rate of dropping", (EDM2, DROPPED, "batch.sample_numbers, labels, 1.0 - options.label_dropout)"))
condition(
    "labels dropped three times too often",
    (EDM2, DROPPED, "batch.sample_numbers, labels, 3 * options.label_dropout)"),
)
condition(
    "labels of a whole batch dropped together",
    (CLASSES, '"label dropout", sample_numbers)', '"label dropout", sample_numbers[:1])'),
)
condition("dropped labels are class 0", (CLASSES, "masked_fill(dropped, -1)", "masked_fill(dropped, 0)"))
condition("labels of the neighbor", (EDM2, LABELS, "options, labels = self.options, batch.classes().roll(1)"))
condition("labels one too high", (EDM2, LABELS, "options, labels = self.options, (batch.classes() + 1) % self.classes"))
condition("labels all the same", (EDM2, LABELS, "options, labels = self.options, torch.zeros_like(batch.classes())"))
condition(
    "labels not handed on",
    (EDM2_OBJECTIVE, "unet(c_in * noisy_images, c_noise, class_labels)", "unet(c_in * noisy_images, c_noise)"),
    stage=("condition", "network"),
)
condition(
    "labels of other rows",
    (
        DATASET,
        "None if self.labels is None else self.labels[indices]",
        "None if self.labels is None else self.labels[: len(indices)]",
    ),
    stage=("condition", "data"),
    datasets=("digits", "letters"),  # the rows of a folder are sorted by class: there it changes little
)

BY_CLASS = {"class_conditional": True}
fault("DDPM: labels never dropped", "condition", (DDPM, "batch.classes(), dropout)", "batch.classes(), 0.0)"), flags=BY_CLASS)
fault(
    "DDPM: labels of the neighbor",
    "condition",
    (DDPM, "batch.classes(), dropout)", "batch.classes().roll(1), dropout)"),
    flags=BY_CLASS,
)
fault(
    "DDPM: dropped labels told as class 0",
    "condition",
    (CLASSES, "torch.where(labels < 0, num_classes, labels)", "labels.clamp(min=0)"),
    flags=BY_CLASS,
)

# ---- network

DROPOUT = {"dropout": 0.2}
BUILT = "    optimizer = new_optimizer(objective.network)\n"
FROZEN = ("network", "gradient", "optimizer")

fault("trained in evaluation mode", "network", (DDPM, TRAIN_MODE, "    model.eval()\n"), flags=DROPOUT)
fault(
    "evaluation mode stays after a validation",
    ("network", "state"),
    (SAMPLING, "module.training = mode", "module.training = False"),
    flags=DROPOUT,
    script=EDM2,
)
fault(
    "dropout not passed on", "network", (UNET, 'config["dropout"] = options.dropout', 'config["dropout"] = 0.0'), flags=DROPOUT
)
fault(
    "autocast never switched on",
    "network",
    (DISTRIBUTED, "        mixed_precision=mixed_precision,\n", '        mixed_precision="no",\n'),
    flags={"mixed_precision": "bf16"},
)
fault(
    "autocast in place of full precision",
    "network",
    (DISTRIBUTED, "        mixed_precision=mixed_precision,\n", '        mixed_precision="bf16",\n'),
    flags={"mixed_precision": "no"},
    script=EDM2,
)
fault(
    "weights kept in bf16",
    ("network", "optimizer", "state"),
    (
        DDPM,
        STEP,
        STEP + "            for parameter in parameters:\n                parameter.data.copy_(parameter.data.bfloat16())\n",
    ),
    flags={"mixed_precision": "bf16"},
)
fault("first layer frozen", FROZEN, (DDPM, BUILT, "    objective.network.conv_in.requires_grad_(False)\n" + BUILT))
fault(
    "half of the blocks frozen",
    FROZEN,
    (DDPM, BUILT, "    objective.network.down_blocks.requires_grad_(False)\n" + BUILT),
)
fault(
    "output gain frozen",
    FROZEN,
    (EDM2, BUILT, "    objective.exported.output_gain.requires_grad_(False)\n" + BUILT),
    script=EDM2,
)
fault(
    "output not finite for much noise",
    "network",
    (
        DDPM,
        "network(noisy_images, timesteps, *told).sample",
        "network(noisy_images, timesteps, *told).sample / (timesteps < 0.98 * self.num_ranks)[:, None, None, None]",
    ),
    source="45: guided-diffusion 50",
)
fault(
    "classes forgotten by the network",
    ("network", "condition"),
    (EDM2_UNET, "classes = self.class_embedding(one_hot * math.sqrt(count))", "classes = self.class_embedding(one_hot * 0.0)"),
    script=EDM2,
)

# ---- target

VELOCITY = "return noise_scheduler.get_velocity(clean_images, noise, timesteps)"
EPSILON_TARGET = '    if prediction_type == "epsilon":\n        return noise\n'
SAMPLE_TARGET = '    if prediction_type == "sample":\n        return clean_images\n'
SQUARED = "(prediction.float() - target.float()).square()"


def target(name: str, old: str, new: str, stage: str | tuple[str, ...] = "target", **options) -> None:
    fault(name, stage, (OBJECTIVE, old, new), **options)


target("image in place of noise", EPSILON_TARGET, EPSILON_TARGET.replace("return noise", "return clean_images"), flags=EPSILON)
target(
    "flow in place of noise",
    EPSILON_TARGET,
    EPSILON_TARGET.replace("return noise", "return noise - clean_images"),
    flags=EPSILON,
)
target(
    "score in place of noise",
    EPSILON_TARGET,
    '    if prediction_type == "epsilon":\n'
    "        kept = noise_scheduler.alphas_cumprod.to(noise.device)[timesteps][:, None, None, None]\n"
    "        return -noise / (1 - kept).sqrt()\n",
    flags=EPSILON,
)
target("noise of the wrong sign", EPSILON_TARGET, EPSILON_TARGET.replace("return noise", "return -noise"), flags=EPSILON)
target("noise in place of image", SAMPLE_TARGET, SAMPLE_TARGET.replace("return clean_images", "return noise"), flags=SAMPLE)
target("image from 0 to 1", SAMPLE_TARGET, SAMPLE_TARGET.replace("clean_images\n", "(clean_images + 1) / 2\n"), flags=SAMPLE)
target(
    "velocity from the other ends",
    VELOCITY,
    "return noise_scheduler.get_velocity(noise, clean_images, timesteps)",
    flags=V,
    source="39: CellFlow 305, splitmeanflow 2",
)
target("velocity of the wrong sign", VELOCITY, VELOCITY.replace("return ", "return -"), flags=V)
target(
    "velocity of another timestep",
    VELOCITY,
    "return noise_scheduler.get_velocity(clean_images, noise, (timesteps - 20).clamp(min=0))",
    flags=V,
)
target("absolute error", SQUARED, "(prediction.float() - target.float()).abs()", ("target", "weight"))
target(
    "Huber's error",
    SQUARED,
    'torch.nn.functional.smooth_l1_loss(prediction.float(), target.float(), reduction="none", beta=0.5)',
    ("target", "weight"),
)
target(
    "root of the mean squared error",
    ".square().flatten(1).mean(1)",
    ".square().flatten(1).mean(1).sqrt()",
    ("target", "weight"),
)
target(
    "prediction clamped",
    SQUARED,
    "(prediction.float().clamp(-0.5, 0.5) - target.float()).square()",
    ("target", "weight", "network"),
)
target("target in bf16", SQUARED, "(prediction.float() - target.bfloat16().float()).square()")
fault(
    "c_skip of the root",
    "target",
    (HEUN, "return sigma_data**2 / variance,", "return sigma_data / variance.sqrt(),"),
    script=EDM2,
)
fault("c_skip missing", "target", (EDM2_OBJECTIVE, "return c_skip * noisy_images + c_out", "return c_out"), script=EDM2)
fault(
    "c_out without sigma_data",
    ("target", "weight"),
    (HEUN, "sigma * sigma_data / variance.sqrt()", "sigma / variance.sqrt()"),
    script=EDM2,
)
fault(
    "c_out of the wrong sign",
    ("target", "weight"),
    (EDM2_OBJECTIVE, "noisy_images + c_out * unet(", "noisy_images - c_out * unet("),
    script=EDM2,
)
fault(
    "denoised image compared with the noised one",
    "target",
    (EDM2, "edm2.losses_per_sample(denoised, clean_images,", "edm2.losses_per_sample(denoised, noisy_images,"),
    script=EDM2,
)
fault(
    "denoised image clamped in training",
    ("target", "weight", "network"),
    (EDM2, "edm2.losses_per_sample(denoised, clean_images,", "edm2.losses_per_sample(denoised.clamp(-1, 1), clean_images,"),
    script=EDM2,
)
fault(
    "absolute error of the denoised image",
    ("target", "weight"),
    (EDM2_OBJECTIVE, "(denoised - clean_images).square()", "(denoised - clean_images).abs()"),
    script=EDM2,
)

# ---- weight

WEIGHED = "self.weights[timesteps]"

fault(
    "min-SNR written as max",
    "weight",
    (OBJECTIVE, "clipped = snr.clamp(max=snr_gamma)", "clipped = snr.clamp(min=snr_gamma)"),
    flags={**EPSILON, **MIN_SNR},
    source="23: lucidrains recurrent-interface 11",
)
fault(
    "SNR upside down",
    "weight",
    (OBJECTIVE, "snr = alphas_cumprod / (1.0 - alphas_cumprod)", "snr = (1.0 - alphas_cumprod) / alphas_cumprod"),
    flags={**V, **MIN_SNR},
)
fault(
    "SNR of the roots",
    "weight",
    (OBJECTIVE, "snr = alphas_cumprod / (1.0 - alphas_cumprod)", "snr = (alphas_cumprod / (1.0 - alphas_cumprod)).sqrt()"),
    flags={**SAMPLE, **MIN_SNR},
)
fault(
    "min-SNR of epsilon for v",
    "weight",
    (OBJECTIVE, '"v_prediction": clipped / (snr + 1.0)', '"v_prediction": clipped / snr'),
    flags={**V, **MIN_SNR},
)
fault(
    "SNR weights of images missing",
    "weight",
    (OBJECTIVE, "weights = snr.clamp(min=1.0) if", "weights = torch.ones_like(snr) if"),
    flags=SAMPLE,
)
fault("weights of another sample", "weight", (DDPM, WEIGHED, "self.weights[timesteps.flip(0)]"), flags={**EPSILON, **MIN_SNR})
fault("weights never used", "weight", (DDPM, WEIGHED, "torch.ones_like(noise[:, 0, 0, 0])"), flags={**EPSILON, **MIN_SNR})
fault(
    "weights divided by their mean in the batch",
    "weight",
    (DDPM, WEIGHED, "self.weights[timesteps] / self.weights[timesteps].mean()"),
    flags={**SAMPLE, **MIN_SNR},
)
fault(
    "weights broadcast over the batch",
    "weight",
    (
        OBJECTIVE,
        "return weights * (prediction.float() - target.float()).square().flatten(1).mean(1)",
        "return (weights[:, None] * (prediction.float() - target.float()).square().flatten(1).mean(1)).mean(0)",
    ),
    flags={**EPSILON, **MIN_SNR},
)
fault("loss summed over the batch", "weight", (DDPM, MEAN, "losses.trained.sum()"), source="32: physicsnemo 576, 659")
fault(
    "loss summed over the pixels",
    "weight",
    (OBJECTIVE, ".square().flatten(1).mean(1)", ".square().flatten(1).sum(1)"),
    source="32: physicsnemo 576, 659",
)
fault(
    "EDM2's loss summed over the batch",
    "weight",
    (EDM2, MEAN, "losses.trained.sum()"),
    script=EDM2,
    source="32: physicsnemo 576, 659",
)
fault(
    "loss of the first channel alone",
    ("weight", "target"),
    (OBJECTIVE, SQUARED, "(prediction.float() - target.float())[:, :1].square()"),
    datasets=COLOR,
)
fault(
    "loss without the borders",
    ("weight", "target"),
    (OBJECTIVE, SQUARED, "(prediction.float() - target.float())[..., 1:-1, 1:-1].square()"),
)
fault("loss of hard samples cut off", "weight", (DDPM, MEAN, "losses.trained.clamp(max=1.0).mean()"))
fault("loss of the first half of the batch", "weight", (DDPM, MEAN, "losses.trained[: len(losses.trained) // 2].mean()"))
fault(
    "loss divided by the accumulation twice",
    ("weight", "gradient"),
    (DDPM, BACKWARD, BACKWARD.replace("(loss)", "(loss / options.gradient_accumulation_steps)")),
    flags=ACCUMULATED,
)
fault(
    "loss not divided by the accumulation",
    ("weight", "gradient"),
    (EDM2, BACKWARD, BACKWARD.replace("(loss)", "(loss * options.gradient_accumulation_steps)")),
    flags=ACCUMULATED,
    script=EDM2,
)
LAMBDA = "weight = (sigma**2 + sigma_data**2) / (sigma * sigma_data) ** 2"
UNCERTAIN = "Losses(weighted / uncertainty.exp() + uncertainty, weighted)"
for name, old, new in (
    ("lambda missing", LAMBDA, "weight = torch.ones_like(sigma)"),
    ("lambda inverted", LAMBDA, "weight = (sigma * sigma_data) ** 2 / (sigma**2 + sigma_data**2)"),
    ("lambda without its square", LAMBDA, "weight = (sigma**2 + sigma_data**2) / (sigma * sigma_data)"),
    ("lambda of sigma_data 1", LAMBDA, "weight = (sigma**2 + 1) / sigma**2"),
    ("exp(u) detached", UNCERTAIN, "Losses(weighted / uncertainty.detach().exp() + uncertainty, weighted)"),
    ("exp(u) multiplied", UNCERTAIN, "Losses(weighted * uncertainty.exp() + uncertainty, weighted)"),
    ("u missing", UNCERTAIN, "Losses(weighted / uncertainty.exp(), weighted)"),
    ("u of the wrong sign", UNCERTAIN, "Losses(weighted / uncertainty.exp() - uncertainty, weighted)"),
    ("u counted by half", UNCERTAIN, "Losses(weighted / uncertainty.exp() + 0.5 * uncertainty, weighted)"),
    ("u not used", UNCERTAIN, "Losses(weighted + 0 * uncertainty, weighted)"),
):
    fault(name, "weight", (EDM2_OBJECTIVE, old, new), script=EDM2, flags={"sigma_data": 0.6})

# ---- gradient

SCALE_DOWN = "torch._foreach_mul_(gradients, ((norm + 1e-6).reciprocal() * max_norm).clamp(max=1.0))"

fault(
    "accumulation not passed to Accelerate",
    ("gradient", "weight"),
    (DISTRIBUTED, "        gradient_accumulation_steps=gradient_accumulation_steps,\n", ""),
    flags=ACCUMULATED,
    source="10: diffusers 308",
)
fault(
    "gradients cleared in each micro step",
    "gradient",
    (DDPM, FORWARD, "                optimizer.zero_grad()\n" + FORWARD),
    flags=ACCUMULATED,
    source="10: diffusers 308",
)
fault(
    "clipped in each micro step",
    "gradient",
    (DDPM, BACKWARD, BACKWARD + "                nn.utils.clip_grad_norm_(parameters, options.max_grad_norm)\n"),
    flags={**ACCUMULATED, **CLIPPED},
    source="12: diffusers 721, accelerate 641",
)
fault(
    "clipped before unscaling",
    "gradient",
    (DDPM, BACKWARD, BACKWARD.replace("(loss)", "(1024 * loss)")),
    (DDPM, CLIP, CLIP + "        torch._foreach_div_([parameter.grad for parameter in parameters], 1024)\n"),
    source="13: waifu-diffusion 64",
)
fault(
    "clipped by value",
    "gradient",
    (CLIPPING, SCALE_DOWN, "[gradient.clamp_(-max_norm, max_norm) for gradient in gradients]"),
    flags=CLIPPED,
)
fault(
    "each layer clipped by itself",
    "gradient",
    (
        CLIPPING,
        SCALE_DOWN,
        "[gradient.mul_((max_norm / (gradient.norm() + 1e-6)).clamp(max=1.0)) for gradient in gradients]",
    ),
    flags=CLIPPED,
    script=EDM2,
)
fault("never clipped", "gradient", (RUN, "FixedLimit(options.max_grad_norm)", "FixedLimit(0.0)"), flags=CLIPPED)
fault(
    "clipped to another norm",
    "gradient",
    (RUN, "FixedLimit(options.max_grad_norm)", "FixedLimit(options.max_grad_norm / 4)"),
    flags=CLIPPED,
)
fault(
    "scaled up to the norm as well as down",
    "gradient",
    (CLIPPING, "((norm + 1e-6).reciprocal() * max_norm).clamp(max=1.0))", "((norm + 1e-6).reciprocal() * max_norm))"),
    (CLIPPING, "        clips = bool(norm + 1e-6 > max_norm)", "        clips = True"),
    flags={"max_grad_norm": 5.0},
)
fault(
    "gradient of one layer halved",
    "gradient",
    (DDPM, BUILT, "    objective.network.conv_in.weight.register_hook(lambda gradient: gradient / 2)\n" + BUILT),
)
fault(
    "gradient of one layer halved before the step",
    "gradient",
    (EDM2, CLIP, CLIP + "        objective.exported.conv_in.weight.grad.mul_(0.5)\n"),
    script=EDM2,
)
fault(
    "gradients cleared after every second update",
    "gradient",
    (DDPM, ZERO_GRAD, "        if step % 2:\n            optimizer.zero_grad()\n"),
)
fault(
    "gradients cleared before the step",
    ("gradient", "optimizer"),
    (EDM2, CLIP, CLIP + "        model.zero_grad(set_to_none=False)\n"),
    script=EDM2,
)
fault(
    "gradients rounded to bf16",
    "gradient",
    (DDPM, CLIP, CLIP + "        for parameter in parameters:\n            parameter.grad.copy_(parameter.grad.bfloat16())\n"),
)
fault(
    "gradients of the update before added",
    "gradient",
    (DDPM, ZERO_GRAD, "        torch._foreach_mul_([parameter.grad for parameter in parameters], 0.5)\n"),
)
fault(
    "checkpointing without gradients of its inputs",
    ("gradient", "network"),
    (
        EDM2_UNET,
        "return self._gradient_checkpointing_func(block, x, embedding)",
        "return torch.utils.checkpoint.checkpoint(block, x.detach(), embedding.detach(), use_reentrant=True)",
    ),
    script=EDM2,
    flags={"gradient_checkpointing": True},
    source="42: lora 26, kohya 91",
)

# ---- optimizer

ADAMW = "torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=epsilon, fused=True)"
ADAM = "torch.optim.Adam(groups, lr=learning_rate, betas=betas, eps=epsilon, fused=True)"
GROUPS = '{"params": decayed, "weight_decay": options.adam_weight_decay}, {"params": spared, "weight_decay": 0.0}'
BETAS = "betas, momentum = (options.adam_beta1, options.adam_beta2), options.momentum"


def optimizer(name: str, old: str, new: str, stage: str | tuple[str, ...] = "optimizer", **options) -> None:
    fault(name, stage, (OPTIMIZERS, old, new), **options)


optimizer("betas exchanged", BETAS, "betas, momentum = (options.adam_beta2, options.adam_beta1), options.momentum")
optimizer("betas not passed on", ADAMW, "torch.optim.AdamW(groups, lr=learning_rate, eps=epsilon, fused=True)")
optimizer("beta2 of 0.9", BETAS, "betas, momentum = (options.adam_beta1, 0.9), options.momentum", script=EDM2)
optimizer("Adam's epsilon 1e-2", ADAMW, ADAMW.replace("eps=epsilon", "eps=1e-2"))
optimizer("AMSGrad though not asked for", ADAMW, ADAMW.replace("fused=True", "fused=True, amsgrad=True"))
optimizer("AdamW in place of Adam", ADAM, ADAM.replace("Adam(", "AdamW("), script=EDM2, flags=DECAYED)
optimizer("weight decay coupled to the gradient", ADAMW, ADAMW.replace("AdamW(", "Adam("), flags=DECAYED)
optimizer(
    "weight decay of all parameters",
    GROUPS,
    GROUPS.replace('"weight_decay": 0.0', '"weight_decay": options.adam_weight_decay'),
    flags=DECAYED,
)
optimizer(
    "weight decay of the wrong group",
    GROUPS,
    GROUPS.replace("decayed", "x").replace("spared", "decayed").replace("x,", "spared,"),
    flags=DECAYED,
)
optimizer("weight decay forgotten", GROUPS, GROUPS.replace("options.adam_weight_decay", "0.0"), flags=DECAYED)
optimizer("biases in no group", ADAMW, ADAMW.replace("(groups,", "(groups[:1],"))
optimizer("plain gradient descent", ADAMW, "torch.optim.SGD(groups, lr=learning_rate)")
optimizer(
    "momentum not passed on",
    "torch.optim.RMSprop(groups, lr=learning_rate, momentum=momentum, eps=epsilon)",
    "torch.optim.RMSprop(groups, lr=learning_rate, eps=epsilon)",
    flags={"optimizer": "rmsprop", "learning_rate": 1e-4},
)
fault("optimizer steps twice", "optimizer", (DDPM, STEP, STEP + STEP))
fault(
    "optimizer steps after each micro step",
    ("optimizer", "gradient"),
    (DDPM, MICRO_STEP_ENDS, MICRO_STEP_ENDS + "            optimizer.optimizer.step()\n"),
    flags=ACCUMULATED,
)
fault(
    "optimizer forgets its state",
    ("optimizer", "state"),
    (DDPM, ZERO_GRAD, ZERO_GRAD + "        if step % 5 == 0:\n            optimizer.optimizer.state.clear()\n"),
)
fault("optimizer without u", "optimizer", (EDM2, BUILT, "    optimizer = new_optimizer(objective.exported)\n"), script=EDM2)
fault(
    "epsilon of a sum for a mean",
    "optimizer",
    (EDM2, "return options.adam_epsilon / math.prod(shape)", "return options.adam_epsilon"),
    script=EDM2,
)
fault(
    "forced weight normalization left out",
    ("optimizer", "state", "network"),
    (EDM2, AFTER_STEP, ""),
    script=EDM2,
)
fault(
    "forced weight normalization before the step",
    ("optimizer", "state", "network"),
    (EDM2, AFTER_STEP, ""),
    (EDM2, STEP, AFTER_STEP + STEP),
    script=EDM2,
)
fault(
    "forced weight normalization of the first layers alone",
    ("optimizer", "state", "network"),
    (EDM2, "force_weight_norm(self.network, finite)", "force_weight_norm(self.exported.encoder, finite)"),
    script=EDM2,
)

# ---- learning rate


def rate(name: str, new: str, script: str = DDPM, **options) -> None:
    fault(name, "learning_rate", (script, RATE, new), script=script, **options)


rate(
    "learning rate stepped by each process",
    "learning_rate_at(step * accelerator.num_processes, run.length.max_train_steps, options)",
    processes=2,
    source="14: diffusers 3954, 8384, 8312",
)
rate(
    "learning rate stepped by each micro step",
    "learning_rate_at(step * options.gradient_accumulation_steps, run.length.max_train_steps, options)",
    flags=ACCUMULATED,
    source="14: diffusers 3954, 8384, 8312",
)
rate(
    "learning rate laid out for micro steps",
    "learning_rate_at(step, run.length.max_train_steps * options.gradient_accumulation_steps, options)",
    flags=ACCUMULATED,
    source="14: diffusers 3954, 8384, 8312",
)
rate("learning rate of a run of twice the length", "learning_rate_at(step, 2 * run.length.max_train_steps, options)")
rate("learning rate of the update after", "learning_rate_at(step + 1, run.length.max_train_steps, options)")
rate("learning rate times the processes", f"{RATE} * accelerator.num_processes", processes=2)
rate("learning rate counted by epochs", "learning_rate_at(step // 10 * 10, run.length.max_train_steps, options)", script=EDM2)
fault(
    "learning rate never set",
    "learning_rate",
    (DDPM, "        set_learning_rate(optimizer, learning_rate)\n", ""),
)
fault(
    "learning rate of the second group left behind",
    "learning_rate",
    (OPTIMIZERS, "for group in optimizer.param_groups:", "for group in optimizer.param_groups[:1]:"),
)
fault(
    "warm-up left out",
    "learning_rate",
    (OPTIMIZERS, "ramp = min(step / warmup_steps, 1.0) if warmup_steps else 1.0", "ramp = 1.0"),
)
fault(
    "cosine in place of a line",
    "learning_rate",
    (OPTIMIZERS, "shape = 1.0 - progress\n", "shape = 0.5 * (1.0 + math.cos(math.pi * progress))\n"),
    flags={"lr_scheduler": "linear"},
)
fault(
    "floor of the learning rate forgotten",
    "learning_rate",
    (OPTIMIZERS, "return base * (floor + (1.0 - floor) * shape)", "return base * shape"),
    flags={"lr_floor": 0.3},
)
fault(
    "learning rate decays from the warm-up on",
    "learning_rate",
    (OPTIMIZERS, "max(options.lr_decay_steps or warmup_steps, 1)", "max(warmup_steps, 1)"),
    script=EDM2,
    flags={"lr_scheduler": "inverse_sqrt", "lr_warmup_steps": 20, "lr_decay_steps": 70},
)
fault(
    "root of the decay forgotten",
    "learning_rate",
    (OPTIMIZERS, "base * ramp / math.sqrt(", "base * ramp / float("),
    script=EDM2,
    flags={"lr_scheduler": "inverse_sqrt", "lr_decay_steps": 70},
)

# ---- EMA

MADE = "ema, ema_decay = make_ema(objective.exported, options)"
LERP = "torch._foreach_lerp_(self._moved, weights, rates * len(self._weights))"

fault(
    "EMA not updated on several processes",
    "ema",
    (DDPM, IF_EMA, "        if run.ema is not None and accelerator.num_processes == 1:\n"),
    processes=2,
    source="2: diffusers 1895, 1930",
)
fault(
    "EMA never updated",
    "ema",
    (EDM2, EMA_UPDATE, "            pass\n"),
    script=EDM2,
    source="3: diffusers 5783, 7048",
)
fault("EMA never made", "ema", (RUN, MADE, "ema, ema_decay = None, None"), source="4: ai-toolkit 524")
fault(
    "EMA updated after each micro step",
    "ema",
    (
        DDPM,
        MICRO_STEP_ENDS,
        MICRO_STEP_ENDS + "            run.ema.update(run.ema_decay(step + 1), torch.ones((), dtype=torch.bool))\n",
    ),
    (DDPM, EMA_UPDATE, "            pass\n"),
    flags=ACCUMULATED,
    source="7: F5-TTS 631",
)
fault(
    "EMA counted by micro steps",
    "ema",
    (DDPM, EMA_UPDATE, EMA_UPDATE.replace("step + 1", "(step + 1) * options.gradient_accumulation_steps")),
    flags=ACCUMULATED,
    source="7: F5-TTS 631",
)
fault(
    "EMA of the weights before the step",
    "ema",
    (DDPM, CLIP, CLIP + EMA_UPDATE.replace("            ", "        ")),
    (DDPM, EMA_UPDATE, "            pass\n"),
)
fault("EMA decay squared", "ema", (DDPM, EMA_UPDATE, EMA_UPDATE.replace("(step + 1)", "(step + 1) ** 2")))
fault("EMA updated twice", "ema", (DDPM, EMA_UPDATE, EMA_UPDATE + EMA_UPDATE))
fault("EMA every tenth update", "ema", (DDPM, IF_EMA, "        if run.ema is not None and step % 10 == 0:\n"))
fault("EMA decay of the first update for ever", "ema", (DDPM, EMA_UPDATE, EMA_UPDATE.replace("step + 1", "1")))
fault("EMA decay exchanged with its rest", "ema", (EMA, "return [1.0 - decay]", "return [decay]"))
fault("EMA decay of 0.9", "ema", (EMA, "return min(max_decay, 1.0 - (1.0 + (step - 1) / inv_gamma) ** -power)", "return 0.9"))
fault(
    "EMA rounded to bf16",
    "ema",
    (EMA, LERP, LERP + "\n                [average.copy_(average.bfloat16()) for average in self._moved]"),
)
fault(
    "EMA of kernels alone",
    "ema",
    (EMA, "if t.is_floating_point() and not n.endswith(UNIT_VECTORS)]", "if t.is_floating_point() and t.ndim > 1]"),
)
fault(
    "EMA of a copy",
    "ema",
    (RUN, MADE, 'ema, ema_decay = make_ema(__import__("copy").deepcopy(objective.exported), options)'),
    script=EDM2,
)
fault("EMA exponent one too low", "ema", (POWER_EMA, "** (exponent + 1.0)\n", "** exponent\n"), script=EDM2)
fault(
    "EMA of twice the width",
    "ema",
    (POWER_EMA, "[exponent_of_width(width) for width in widths]", "[exponent_of_width(2 * width) for width in widths]"),
    script=EDM2,
)
fault(
    "EMA of the second width like the first",
    "ema",
    (POWER_EMA, "decay ** ((exponent + 1.0) / (self.exponents[0] + 1.0))", "decay"),
    script=EDM2,
)
fault(
    "EMA of the weights before forced normalization",
    ("ema", "state"),
    (EDM2, AFTER_STEP, ""),
    (EDM2, COUNTED, AFTER_STEP.replace("            ", "        ") + COUNTED),
    script=EDM2,
)
fault(
    "EMA begins anew at a resume",
    ("ema", "state"),
    (CHECKPOINTS, "ema.load_state_dict(load_file(averaged))", "ema.restart()"),
    resumed=True,
    source="21: DiT 35, improved-diffusion 102",
)

# ---- state

SWAPPED_OUT = "            yield self.model\n        finally:\n            self._swap()\n"
COPIED_IN = "[tensor.data.copy_(run.ema.shadow[name]) for name, tensor in run.ema._tensors.items()]"

fault(
    "EMA stays in the model",
    "state",
    (EMA, SWAPPED_OUT, "            yield self.model\n        finally:\n            pass\n"),
    source="6: diffusers 2321, 2706",
)
fault(
    "EMA copied in for a save",
    "state",
    (EXPORT, "        with run.averaged():\n", f"        {COPIED_IN}\n        with run.averaged():\n"),
    source="6: diffusers 2321, 2706",
)
fault(
    "EMA copied in for a preview",
    "state",
    (
        SAMPLES,
        "        with weights(), full_precision(network):\n",
        f"        {COPIED_IN}\n        with full_precision(network):\n",
    ),
    script=EDM2,
    source="6: diffusers 2321, 2706",
)
fault(
    "preview leaves the weights in fp16",
    "state",
    (
        SAMPLES,
        "        with weights(), full_precision(network):\n",
        "        [parameter.data.copy_(parameter.data.half()) for parameter in network.parameters()]\n"
        "        with weights(), full_precision(network):\n",
    ),
)
fault(
    "weights clamped between updates",
    ("state", "optimizer"),
    (
        DDPM,
        ZERO_GRAD,
        ZERO_GRAD + "        for parameter in parameters:\n            parameter.data.clamp_(-0.1, 0.1)\n",
    ),
)
fault(
    "weights pulled to their mean between updates",
    ("state", "optimizer"),
    (
        EDM2,
        COUNTED,
        COUNTED + "        for parameter in parameters:\n            parameter.data.lerp_(parameter.data.mean(), 1e-3)\n",
    ),
    script=EDM2,
)
fault(
    "resumed without the optimizer",
    ("state", "optimizer"),
    (CHECKPOINTS, "        match_layouts(optimizer.optimizer)\n", "        optimizer.optimizer.state.clear()\n"),
    resumed=True,
    source="21: DiT 35, improved-diffusion 102",
)
fault(
    "EDM2 resumed without the optimizer",
    ("state", "optimizer"),
    (CHECKPOINTS, "        match_layouts(optimizer.optimizer)\n", "        optimizer.optimizer.state.clear()\n"),
    resumed=True,
    script=EDM2,
    source="21: DiT 35, improved-diffusion 102",
)
fault(
    "resumed without the count of updates",
    ("state", "learning_rate", "data"),
    (CHECKPOINTS, '("options", "max_train_steps"))', '("options", "max_train_steps", "step"))'),
    resumed=True,
)
fault(
    "resumed without the weights",
    "state",
    (
        CHECKPOINTS,
        "model.load_state_dict(load_file(Path(input_dir, MODEL_WEIGHTS)))",
        "weights = load_file(Path(input_dir, MODEL_WEIGHTS))\n"
        '        model.load_state_dict({f"_orig_mod.{name}": value for name, value in weights.items()}, strict=False)',
    ),
    resumed=True,
    source="44: kohya 1024",
)
fault(
    "resumed from the averaged weights",
    "state",
    (CHECKPOINTS, "load_file(Path(input_dir, MODEL_WEIGHTS))", "load_file(Path(input_dir, EMA_WEIGHTS))"),
    resumed=True,
)

# ---- ranks

fault(
    "forward pass around DDP",
    ("ranks", "gradient"),
    (DDPM, FORWARD, FORWARD.replace("(model,", "(objective.network,")),
    processes=2,
    source="17: kohya 924, 989, 1002",
)
fault(
    "gradients never averaged over ranks",
    ("ranks", "gradient"),
    (EDM2, "            with accelerator.accumulate(model):\n", "            with accelerator.no_sync(model):\n"),
    processes=2,
    script=EDM2,
    source="17: kohya 924, 989, 1002",
)
fault(
    "clipped before ranks agree",
    ("ranks", "gradient"),
    (DDPM, "            with accelerator.accumulate(model):\n", "            with accelerator.no_sync(model):\n"),
    (
        DDPM,
        CLIP,
        CLIP + "        for parameter in parameters:\n"
        '            parameter.grad.copy_(accelerator.reduce(parameter.grad, "mean"))\n',
    ),
    processes=2,
    flags=CLIPPED,
    source="12: diffusers 721, accelerate 641",
)
fault(
    "gradients summed over ranks",
    ("ranks", "gradient"),
    (DDPM, CLIP, "        torch._foreach_mul_([p.grad for p in parameters], accelerator.num_processes)\n" + CLIP),
    processes=2,
)
fault(
    "all ranks see the same images",
    ("ranks", "data"),
    (TRAINING_DATA, "process_index=accelerator.process_index,", "process_index=0,"),
    processes=2,
)
fault(
    "ranks do not share the data out",
    ("ranks", "data"),
    (TRAINING_DATA, "process_index=accelerator.process_index,", "process_index=0,"),
    (TRAINING_DATA, "num_processes=accelerator.num_processes,", "num_processes=1,"),
    processes=2,
    script=EDM2,
)
noise(
    "all ranks draw the same noise",
    "size = self.micro_batch_size\n"
    "        numbers = sample_numbers // (2 * size) * size + sample_numbers % size\n"
    '        noise = randomness.normal(self.seed, "noise", numbers, self.shape)',
    ("ranks", "noise"),
    processes=2,
)
fault(
    "ranks begin with other weights",
    "ranks",
    (
        DDPM,
        TRAIN_MODE,
        TRAIN_MODE + "    for parameter in objective.network.parameters():\n"
        "        parameter.data.mul_(1 + 0.01 * accelerator.process_index)\n",
    ),
    processes=2,
)
fault(
    "ranks with other learning rates",
    ("ranks", "learning_rate"),
    (EDM2, RATE, f"{RATE} / (1 + accelerator.process_index)"),
    processes=2,
    script=EDM2,
)
fault(
    "the first rank alone steps",
    ("ranks", "optimizer"),
    (DDPM, STEP, "            if accelerator.is_main_process:\n    " + STEP),
    processes=2,
)

# ---- export

PUBLISHED = "network, scheduler = run.objective.exported, run.objective.noise_scheduler\n"


def published(name: str, new: str, **options) -> None:
    fault(name, "export", (EXPORT, PUBLISHED, PUBLISHED + f"        {new}\n"), **options)


fault("raw weights exported", "export", (EXPORT, "with run.averaged():", "if True:"))
fault("EDM2's raw weights exported", "export", (EXPORT, "with run.averaged():", "if True:"), script=EDM2)
published(
    "exported with another prediction type",
    'scheduler = type(scheduler).from_config(scheduler.config, prediction_type="v_prediction")',
    flags=EPSILON,
)
published(
    "exported with another schedule",
    'scheduler = type(scheduler).from_config(scheduler.config, beta_schedule="scaled_linear")',
    flags=EPSILON,
    source="46: fast-stable-diffusion 815",
)
published(
    "exported with half the range of images", "scheduler = type(scheduler).from_config(scheduler.config, clip_sample_range=0.5)"
)
fault(
    "exported in fp16",
    "export",
    (EXPORT_FILE, "(value.float() if value.is_floating_point()", "(value.half().float() if value.is_floating_point()"),
)
fault(
    "exported with another sigma_data",
    "export",
    (EDM2, "EDMHeunScheduler(sigma_data=options.sigma_data)", "EDMHeunScheduler()"),
    script=EDM2,
    flags={"sigma_data": 0.7},
)
fault(
    "sampler does not clip",
    "export",
    (SAMPLING, "return denoised.clamp(-limit, limit)", "return denoised"),
    flags={**EPSILON, "sampler": "dpmsolver++"},
)
fault(
    "sampling starts with half of the noise",
    "export",
    (SAMPLING, "shape) * scheduler.init_noise_sigma", "shape) * 0.5 * scheduler.init_noise_sigma"),
)
fault(
    "sampler tells other timesteps than it steps",
    "export",
    (
        SAMPLING,
        "        told_to_network = scheduler.timesteps.to(device)\n",
        "        told_to_network = scheduler.timesteps.to(device).flip(0)\n",
    ),
)
fault(
    "Heun's correction with the wrong sign",
    "export",
    (HEUN, "(slope_at_start + slope) / 2.0", "(slope_at_start - slope) / 2.0"),
    script=EDM2,
)
fault(
    "Heun's method without the power of the noise levels",
    "export",
    (HEUN, "(first + ramp * (last - first)) ** rho", "first + ramp * (last - first)"),
    script=EDM2,
)

# ---- written later, by one who had read the training's code alone: of kinds that the others are not

TENTH = "            if step % 10 == 9:\n                "  # between the updates that are looked at
L1_NORM = "return torch.stack([p.abs().sum() for p in model.parameters() if p.requires_grad and p.ndim > 1]).sum()"
LOADED = "        match_layouts(optimizer.optimizer)\n"
ADDED_UP = "loss = losses.trained.mean() + "


def loaded(name: str, change: str, stage: str | tuple[str, ...]) -> None:
    """Of the state of each parameter, after a resume."""
    new = f"{LOADED}        for state in optimizer.optimizer.state.values():\n            {change}\n"
    fault(name, stage, (CHECKPOINTS, LOADED, new), resumed=True)


fault(
    "matrices alone are clipped",
    "gradient",
    (CLIPPING, SCALE_DOWN, SCALE_DOWN.replace("(gradients,", "([g for g in gradients if g.ndim > 1],")),
    flags=CLIPPED,
)
fault(
    "clipped by the largest norm",
    "gradient",
    (CLIPPING, "    norm = torch.linalg.vector_norm(norms)\n", "    norm = norms.max()\n"),
    flags=CLIPPED,
)
fault(
    "brightness about the middle gray",
    "data",
    (AUGMENTATION, "((pixels + 1) * brightness - 1).clamp_(-1, 1)", "(pixels * brightness).clamp_(-1, 1)"),
    flags={"color_jitter": 0.3},
)
fault(
    "one dropout mask for ever",
    ("network", "noise"),
    (DDPM, "data.samples.seed_dropout(step, micro_step)", "data.samples.seed_dropout(0, 0)"),
    flags=DROPOUT,
)
fault(
    "64 timesteps for ever",
    "timestep",
    (DDPM, DRAWN, DRAWN.replace("batch.sample_numbers", "batch.sample_numbers % 64")),
)
fault("EMA decay of the update before", "ema", (DDPM, EMA_UPDATE, EMA_UPDATE.replace("step + 1", "step")))
fault(
    "memory of gradients cleared in every tenth update",
    ("optimizer", "state"),
    (DDPM, STEP, f"{TENTH}optimizer.optimizer.state.clear()\n{STEP}"),
)
fault(
    "micro steps repeat a batch",
    "data",
    (LOADER, "for turn in turns[:count]]", "for turn in (t - t % split.gradient_accumulation_steps for t in turns[:count])]"),
    flags=ACCUMULATED,
)
fault(
    "weight decay in the loss too",
    "gradient",
    (DDPM, ADDED_UP, ADDED_UP + "1e-3 * sum(p.square().sum() for p in objective.network.parameters()) + "),
)
fault(
    "gradients centered",
    "gradient",
    (DDPM, STEP, "            for p in parameters:\n                p.grad -= p.grad.mean() if p.ndim > 1 else 0\n" + STEP),
)
fault(
    "L1 penalty of all parameters",
    "gradient",
    (OPTIMIZERS, L1_NORM, L1_NORM.replace(" and p.ndim > 1", "")),
    flags={"l1_weight": 1e-3},
)
fault("activation ignored", "network", (UNET, 'config["act_fn"] = options.activation', "pass"), flags={"activation": "gelu"})
fault(
    "spectral norm left out",
    "network",
    (UNET, "            normalize_spectra(unet)\n", "            pass\n"),
    flags={"spectral_norm": True},
)
fault(
    "weights perturbed in every tenth update",
    "state",
    (DDPM, AFTER_STEP, f"{AFTER_STEP}{TENTH}objective.exported.conv_out.weight.data += 0.02 * torch.randn(3, 1, 1, 1)\n"),
    flags={"image_channels": 3},
)
fault(
    "Nesterov's momentum",
    "optimizer",
    (
        OPTIMIZERS,
        "return torch.optim.SGD(groups, lr=learning_rate, momentum=momentum)",
        "return torch.optim.SGD(groups, lr=learning_rate, momentum=momentum, nesterov=True)",
    ),
    flags={"optimizer": "sgd", "learning_rate": 0.01},
)
fault(
    "RMSprop of centered gradients",
    "optimizer",
    (
        OPTIMIZERS,
        "return torch.optim.RMSprop(groups, lr=learning_rate, momentum=momentum, eps=epsilon)",
        "return torch.optim.RMSprop(groups, lr=learning_rate, momentum=momentum, eps=epsilon, centered=True)",
    ),
    flags={"optimizer": "rmsprop", "learning_rate": 1e-4},
)
fault(
    "adaptive limit begins anew at a resume",
    ("state", "gradient"),
    (RUN, "AdaptiveLimit(accelerator.device, state.grad_norm_mean)", "AdaptiveLimit(accelerator.device, None)"),
    flags={"adaptive_clipping": True},
    resumed=True,
)
loaded("Adam counts anew after a resume", 'state["step"].zero_()', ("optimizer", "state"))
loaded("moments rounded to bf16 at a resume", 'state["exp_avg"] = state["exp_avg"].bfloat16().float()', ("optimizer", "state"))
fault(
    "noise added to the gradients",
    "gradient",
    (
        DDPM,
        STEP,
        "            for p in parameters:\n                p.grad += 0.1 * p.grad.std(unbiased=False) * torch.randn_like(p)\n"
        + STEP,
    ),
)
fault("sigma at most 1", "timestep", (EDM2, SIGMAS, f"{SIGMAS}.clamp(max=1.0)"), script=EDM2)
fault(
    "c_noise of a rounded sigma",
    ("timestep", "input"),
    (HEUN, "1.0 / variance.sqrt(), sigma.log() / 4.0", "1.0 / variance.sqrt(), sigma.bfloat16().to(sigma.dtype).log() / 4.0"),
    script=EDM2,
)
fault(
    "classes not balanced",
    "data",
    (TRAINING_DATA, "images.labels if options.balanced_sampling else None)", "None)"),
    flags={"balanced_sampling": True},
)
fault(
    "image in place of noise at small timesteps",
    "target",
    (
        OBJECTIVE,
        EPSILON_TARGET,
        EPSILON_TARGET.replace("noise\n", "torch.where(timesteps[:, None, None, None] < 100, clean_images, noise)\n"),
    ),
    flags=EPSILON,
)
fault(
    "initial weights three times as large",
    "network",
    (
        UNET,
        "        initialized(network)\n",
        "        initialized(network)\n        [p.data.mul_(3) for p in network.parameters() if p.ndim > 1]\n",
    ),
)

# ---- written with the checks that look for them: no test of what the audit finds, but of whether they work in a run

SNAPSHOTS = "utils/runs/ema_snapshots.py"
SAVED_MODEL = "save_file(_contiguous(model.state_dict()), Path(output_dir, MODEL_WEIGHTS))"
ONCE = "        if step == 41:\n            "  # between the updates that are looked at

fault(
    "checkpoint stores the averaged weights",
    "state",
    (CHECKPOINTS, SAVED_MODEL, SAVED_MODEL.replace("model.state_dict()", "ema.state_dict()")),
)
fault(
    "checkpoint stores weights in fp16",
    "state",
    (
        CHECKPOINTS,
        SAVED_MODEL,
        SAVED_MODEL.replace("model.state_dict()", "{n: t.half().to(t.dtype) for n, t in model.state_dict().items()}"),
    ),
    script=EDM2,
)
fault(
    "snapshots of one width alone",
    "ema",
    (SNAPSHOTS, "for n, t in average.shadow.items()}", "for n, t in ema.shadow.items()}"),
    script=EDM2,
)
fault(
    "timesteps in opposite pairs",
    "timestep",
    (
        DDPM,
        f"timesteps = {DRAWN}\n",
        f"timesteps = {DRAWN}[: len(batch.noise) // 2]\n"
        "            timesteps = torch.cat([timesteps, self.num_ranks - 1 - timesteps])\n",
    ),
)
fault("noise levels sorted in each batch", "timestep", (EDM2, SIGMAS, f"{SIGMAS}.sort().values"), script=EDM2)
noise(
    "noise of the batch before with the other sign",
    "odd = sample_numbers // self.micro_batch_size % 2\n"
    '        noise = randomness.normal(self.seed, "noise", sample_numbers - odd * self.micro_batch_size, self.shape)\n'
    "        noise = noise * (1 - 2 * odd)[:, None, None, None]",
)
fault("SiLU without its scale", "network", (EDM2_UNET, "F.silu(x) / 0.596", "F.silu(x)"), script=EDM2)
fault("skips times zero", "network", (EDM2_UNET, "mp_cat(x, skips.pop(),", "mp_cat(x, 0.0 * skips.pop(),"), script=EDM2)
fault(
    "average begins anew once",
    "ema",
    (DDPM, EMA_UPDATE, EMA_UPDATE + "            if step == 41:\n                run.ema.restart()\n"),
)
fault(
    "weights shrink once",
    "state",
    (DDPM, COUNTED, f"{COUNTED}{ONCE}for p in parameters:\n                p.data.mul_(0.99)\n"),
)
fault("memory of gradients cleared once", "optimizer", (DDPM, COUNTED, f"{COUNTED}{ONCE}optimizer.optimizer.state.clear()\n"))
fault(
    "ten times the learning rate in every seventh update",
    "learning_rate",
    (DDPM, RATE, f"{RATE} * (10 if step % 7 == 5 else 1)"),
)
