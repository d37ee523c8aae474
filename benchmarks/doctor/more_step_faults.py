"""More faults of a training step, of kinds that step_faults.py lacks: of some samples, layers, updates or ranks alone, late in
the run, slight.

Like those they were written down, with the stage expected of each, without a look at the doctor. Importing this module adds
them to `STEP_FAULTS`.
"""

from benchmarks.doctor.step_faults import (
    ACCUMULATED,
    AFTER_STEP,
    AUGMENTATION,
    CHECKPOINTS,
    CLASSES,
    CLIP,
    CLIPPED,
    COUNTED,
    DDPM,
    EDM2,
    EDM2_OBJECTIVE,
    EDM2_UNET,
    EMA,
    HEUN,
    IF_EMA,
    LOADER,
    MEAN,
    MIN_SNR,
    OPTIMIZERS,
    PIXELS,
    POWER_EMA,
    STEP_FAULTS,
    TRAINING_DATA,
    fault,
)

__all__ = ["STEP_FAULTS"]

NOISE = '        noise = randomness.normal(self.seed, "noise", sample_numbers, self.shape)\n'
NOISED = "        noisy_images = self.noise_scheduler.add_noise(clean_images, noise, timesteps)\n"
TIMESTEPS = '            timesteps = randomness.integers(self.seed, "timesteps", batch.sample_numbers, self.num_ranks)\n'
TARGET = "        target = training_target(self.noise_scheduler, clean_images, noise, timesteps)\n"
BEGIN = "        monitor.begin(step)\n"
SET_RATE = "        set_learning_rate(optimizer, learning_rate)\n"
ACCUMULATE = "            with accelerator.accumulate(model):\n"
CONDITIONED = "    c_skip, c_out, c_in, c_noise = preconditioning(sigma, sigma_data)\n"

# ---- data, noise, timestep

fault(
    "the first eighth of each pass again and again",
    "data",
    (LOADER, "epochs, sample_numbers % self.length, self.length)", "epochs, sample_numbers % (self.length // 8), self.length)"),
)
fault(
    "every sixteenth image black",
    "data",
    (AUGMENTATION, PIXELS, PIXELS + "    pixels[sample_numbers % 16 == 5] = -1.0\n"),
)
fault(
    "noise of each image standardized",
    "noise",
    (
        TRAINING_DATA,
        NOISE,
        NOISE + "        noise = (noise - noise.mean((1, 2, 3), keepdim=True)) / noise.std((1, 2, 3), keepdim=True)\n",
    ),
)
fault(
    "no noise in the first row",
    "noise",
    (TRAINING_DATA, NOISE, NOISE + "        noise[:, :, 0] = 0.0\n"),
    script=EDM2,
)
fault("every tenth timestep alone", "timestep", (DDPM, TIMESTEPS, TIMESTEPS + "            timesteps = timesteps // 10 * 10\n"))
fault(
    "timesteps grow in the first hundred updates",
    "timestep",
    (
        DDPM,
        TIMESTEPS,
        TIMESTEPS + "            timesteps = (timesteps * (batch.sample_numbers / 1600).clamp(0.1, 1.0)).long()\n",
    ),
)
fault(
    "noise levels uniform in their logarithm",
    "timestep",
    (
        EDM2_OBJECTIVE,
        '    return (mean + std * randomness.normal(seed, "sigma", sample_numbers, (1,))[:, 0]).exp()\n',
        '    return (mean + std * 12**0.5 * (randomness.uniform(seed, "sigma", sample_numbers)[:, 0] - 0.5)).exp()\n',
    ),
    script=EDM2,
)

# ---- input, condition, network

fault(
    "noised image rounded to sixteenths",
    "input",
    (DDPM, NOISED, NOISED + "        noisy_images = (noisy_images * 16).round() / 16\n"),
)
fault(
    "images mixed with a tenth of their neighbor",
    ("input", "data"),
    (DDPM, NOISED, "        clean_images = torch.lerp(clean_images, clean_images.roll(1, 0), 0.1)\n" + NOISED),
)
fault(
    "schedule rounded to fp16",
    "input",
    (
        DDPM,
        "        self.weights = loss_weights(",
        "        self.noise_scheduler.alphas_cumprod = self.noise_scheduler.alphas_cumprod.half().float()\n"
        "        self.weights = loss_weights(",
    ),
)
fault(
    "c_in of the mean noise level",
    "input",
    (EDM2_OBJECTIVE, CONDITIONED, CONDITIONED + "    c_in = c_in.mean().expand_as(c_in)\n"),
    script=EDM2,
)
fault(
    "labels of the first class never dropped",
    "condition",
    (CLASSES, "    return labels.masked_fill(dropped, -1)\n", "    return labels.masked_fill(dropped & (labels > 0), -1)\n"),
    script=EDM2,
)
fault(
    "attention normalized along the pixels",
    "network",
    (EDM2_UNET, "normalize(heads, dim=-1)", "normalize(heads, dim=-2)"),
    script=EDM2,
)
fault(
    "encoder frozen from the sixtieth update on",
    ("network", "gradient", "optimizer"),
    (
        DDPM,
        BEGIN,
        "        if step == 60:\n            objective.network.down_blocks.requires_grad_(False)\n" + BEGIN,
    ),
)

# ---- target, weight

fault(
    "target without its mean",
    "target",
    (DDPM, TARGET, TARGET + "        target = target - target.mean((1, 2, 3), keepdim=True)\n"),
)
fault(
    "c_skip never below 0.05",
    ("target", "network"),
    (EDM2_OBJECTIVE, CONDITIONED, CONDITIONED + "    c_skip = c_skip.clamp(min=0.05)\n"),
    script=EDM2,
)
fault(
    "twice the gamma of min-SNR",
    "weight",
    (DDPM, "options.snr_gamma)", "options.snr_gamma and 2 * options.snr_gamma)"),
    flags=MIN_SNR,
)
fault(
    "micro steps weigh by their number",
    ("weight", "gradient"),
    (DDPM, MEAN, MEAN + " * (2 * (micro_step + 1) / (options.gradient_accumulation_steps + 1))"),
    flags=ACCUMULATED,
)
fault(
    "lambda at most 20",
    "weight",
    (EDM2_OBJECTIVE, "(sigma * sigma_data) ** 2\n", "(sigma * sigma_data) ** 2\n    weight = weight.clamp(max=20.0)\n"),
    script=EDM2,
)
fault(
    "u of another sample",
    "weight",
    (EDM2_OBJECTIVE, "class_labels), self.uncertainty(sigma)\n", "class_labels), self.uncertainty(sigma).roll(1)\n"),
    script=EDM2,
)

# ---- gradient, optimizer, learning rate

fault(
    "clipped by the sum of the layers' norms",
    "gradient",
    ("utils/optim/clipping.py", "    norm = torch.linalg.vector_norm(norms)\n", "    norm = norms.sum()\n"),
    flags=CLIPPED,
)
fault(
    "gradients of biases emptied",
    ("gradient", "optimizer"),
    (
        DDPM,
        CLIP,
        "        for p in parameters:\n            if p.ndim == 1 and p.grad is not None:\n                p.grad.zero_()\n"
        + CLIP,
    ),
)
fault(
    "betas of biases alone are others",
    "optimizer",
    (
        OPTIMIZERS,
        '"weight_decay": 0.0}]\n',
        '"weight_decay": 0.0}]\n    if name in ("adam", "adamw"):\n        groups[1]["betas"] = (0.5, 0.9)\n',
    ),
)
fault(
    "every fifth update half taken back",
    ("state", "optimizer"),
    (
        DDPM,
        COUNTED,
        "        if step % 5 == 0:\n            slow = [p.detach().clone() for p in parameters]\n"
        "        elif step % 5 == 4:\n            with torch.no_grad():\n"
        "                for p, old in zip(parameters, slow):\n                    p.lerp_(old, 0.5)\n" + COUNTED,
    ),
)
fault(
    "gains kept within a tenth",
    ("state", "optimizer"),
    (
        EDM2,
        AFTER_STEP,
        AFTER_STEP
        + "            for p in parameters:\n                if p.ndim == 0:\n                    p.data.clamp_(-0.1, 0.1)\n",
    ),
    script=EDM2,
)
fault(
    "learning rate falls by a tenth after each validation",
    "learning_rate",
    (DDPM, SET_RATE, "        set_learning_rate(optimizer, learning_rate * 0.9 ** (step // options.validation_steps))\n"),
)
fault(
    "decay of the learning rate counted in images",
    "learning_rate",
    (
        OPTIMIZERS,
        "math.sqrt(max(step / max(options.lr_decay_steps or warmup_steps, 1), 1.0))",
        "math.sqrt(max(step * options.train_batch_size / max(options.lr_decay_steps or warmup_steps, 1), 1.0))",
    ),
    script=EDM2,
)

# ---- EMA, state, ranks, export

fault(
    "EMA of the last layer copied",
    "ema",
    (EMA, "if t.is_floating_point() and not n", 'if t.is_floating_point() and not n.startswith("conv_out") and not n'),
)
fault(
    "EMA begins at the thirtieth update",
    "ema",
    (EDM2, IF_EMA, "        if run.ema is not None and step >= 30:\n"),
    script=EDM2,
)
fault(
    "average mixed in at each fiftieth update",
    "state",
    (
        DDPM,
        COUNTED,
        COUNTED + "        if run.ema is not None and step % 50 == 49:\n"
        "            for name, p in objective.exported.named_parameters():\n"
        "                p.data.lerp_(run.ema.shadow[name], 0.5)\n",
    ),
)
fault(
    "resumed an update too late",
    ("state", "data", "optimizer"),
    (
        CHECKPOINTS,
        "            setattr(state, name, getattr(loaded, name))\n",
        "            setattr(state, name, getattr(loaded, name))\n        state.step += 1\n",
    ),
    resumed=True,
)
fault(
    "the second average begins anew at a resume",
    ("ema", "state"),
    (
        POWER_EMA,
        "            average.load_state_dict({n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)})\n",
        "            average.restart()\n",
    ),
    script=EDM2,
    resumed=True,
)
fault(
    "batches of the ranks overlap by half",
    ("ranks", "data"),
    (
        LOADER,
        "            yield [range(number * size, (number + 1) * size) for number in numbers]\n",
        "            firsts = [n * size - split.process_index * size // 2 for n in numbers]\n"
        "            yield [range(first, first + size) for first in firsts]\n",
    ),
    processes=2,
)
fault(
    "gradients of every fourth update not averaged over ranks",
    ("ranks", "gradient"),
    (DDPM, ACCUMULATE, "            with accelerator.accumulate(model) if step % 4 != 3 else accelerator.no_sync(model):\n"),
    processes=2,
)
fault(
    "forced weight normalization on the first rank alone",
    "ranks",
    (EDM2, AFTER_STEP, "            if accelerator.is_main_process:\n    " + AFTER_STEP),
    script=EDM2,
    processes=2,
)
fault(
    "sampling starts at sigma 5",
    "export",
    (HEUN, "        sigma_max: float = 80.0,\n", "        sigma_max: float = 5.0,\n"),
    script=EDM2,
)
