"""Faults of three more scripts in foreign/, in styles that watch_faults.py has not: a control network beside a frozen one,
signals without a channel that are told the noise level itself, and a loss on the noise of a network that gives v.

They were written down, with the stages expected of each, after the watcher's code was read and before it was asked.
"""

from benchmarks.doctor.watch_faults import fault

CONTROL, WAVE, LOGSNR = "control_net.py", "wave_grad.py", "log_snr.py"
TWICE = {"gradient_accumulation_steps": 2}

# ---- control_net.py

fault("pixels from 0 to 255", CONTROL, "data", (".float() / 127.5 - 1.0\n", ".float()\n"))
fault(
    "brightened as uint8",
    CONTROL,
    "data",
    (
        "noise = torch.randn_like(pixel_values)",
        "pixel_values = ((pixel_values + 1) * 127.5).byte() + 90\n"
        "                pixel_values = pixel_values.float() / 127.5 - 1.0\n"
        "                noise = torch.randn_like(pixel_values)",
    ),
)
fault("uniform noise", CONTROL, "noise", ("torch.randn_like(pixel_values)", "torch.rand_like(pixel_values) * 2 - 1"))
fault(
    "the frozen network gets other timesteps",
    CONTROL,
    "timestep",
    (
        "unet(\n                    noisy,\n                    timesteps,",
        "unet(\n                    noisy,\n                    timesteps.flip(0),",
    ),
)
fault(
    "the control network gets other timesteps",
    CONTROL,
    "timestep, network, condition",
    (
        "controlnet(\n                    noisy, timesteps,",
        "controlnet(\n                    noisy, torch.zeros_like(timesteps),",
    ),
)
fault(
    "noised twice",
    CONTROL,
    "input",
    (
        "noisy = noise_scheduler.add_noise(pixel_values, noise, timesteps)",
        "noisy = noise_scheduler.add_noise(noise_scheduler.add_noise(pixel_values, noise, timesteps), noise, timesteps)",
    ),
)
fault(
    "one hint for all",
    CONTROL,
    "condition",
    ("controlnet_cond=controlnet_image", "controlnet_cond=controlnet_image[:1].expand_as(controlnet_image)"),
)
fault("no hint", CONTROL, "condition", ("controlnet_cond=controlnet_image", "controlnet_cond=controlnet_image * 0"))
fault(
    "labels always dropped",
    CONTROL,
    "condition",
    ("label = torch.where(empty, NO_LABEL, label)", "label = torch.full_like(label, NO_LABEL)"),
)
fault(
    "the loss asks for the image",
    CONTROL,
    "target",
    (
        'F.mse_loss(model_pred.float(), noise.float(), reduction="mean")',
        'F.mse_loss(model_pred.float(), pixel_values.float(), reduction="mean")',
    ),
)
fault(
    "noise of another image",
    CONTROL,
    "target",
    (
        'F.mse_loss(model_pred.float(), noise.float(), reduction="mean")',
        'F.mse_loss(model_pred.float(), noise.float().roll(1, 0), reduction="mean")',
    ),
)
fault(
    "min-SNR as a maximum",
    CONTROL,
    "weight",
    ("snr.clamp(max=args.snr_gamma) / snr", "snr.clamp(min=args.snr_gamma) / snr"),
    flags={"snr_gamma": 5.0},
)
fault(
    "min-SNR of other timesteps",
    CONTROL,
    "weight",
    ("noise_scheduler.alphas_cumprod[timesteps]", "noise_scheduler.alphas_cumprod[timesteps.flip(0)]"),
    flags={"snr_gamma": 5.0},
)
fault(
    "zero convolutions not in the optimizer",
    CONTROL,
    "optimizer",
    (
        "controlnet.parameters()\n    optimizer",
        '[p for n, p in controlnet.named_parameters() if "zero" not in n]\n    optimizer',
    ),
)
fault(
    "the optimizer has the frozen network",
    CONTROL,
    "optimizer",
    ("params_to_optimize = controlnet.parameters()", "params_to_optimize = unet.parameters()"),
)
fault("residuals of the encoder detached", CONTROL, "gradient", ("[sample for sample in", "[sample.detach() for sample in"))
fault("gradients never cleared", CONTROL, "gradient", ("                optimizer.zero_grad()\n", ""))
fault(
    "clipped in each micro step",
    CONTROL,
    "gradient",
    (
        "                if accelerator.sync_gradients:\n                    accelerator.clip_grad",
        "                if True:\n                    accelerator.clip_grad",
    ),
    flags=TWICE,
)
fault(
    "cosine of half the run",
    CONTROL,
    "learning_rate",
    ("num_training_steps=args.max_train_steps", "num_training_steps=args.max_train_steps // 2"),
)
fault(
    "the weights go back in every tenth update",
    CONTROL,
    "state",
    (
        "                global_step += 1\n",
        "                global_step += 1\n                if global_step % 10 == 1:\n"
        "                    controlnet.load_state_dict({k: v * 0.9 for k, v in controlnet.state_dict().items()})\n",
    ),
)

# ---- wave_grad.py

fault("int16 not divided", WAVE, "data", ("self.audio[i] / 32767.5", "self.audio[i]"))
fault("divided twice", WAVE, "data", ("self.audio[i] / 32767.5", "self.audio[i] / 32767.5 / 32767.5"))
fault(
    "noise clamped to the range of the signal",
    WAVE,
    "noise",
    ("torch.randn_like(audio)", "torch.randn_like(audio).clamp(-1, 1)"),
)
fault(
    "the same noise in each update",
    WAVE,
    "noise",
    ("torch.randn_like(audio)", "torch.randn(audio.shape, generator=torch.Generator().manual_seed(0))"),
)
fault(
    "one noise for the whole batch", WAVE, "noise", ("torch.randn_like(audio)", "torch.randn_like(audio[:1]).expand_as(audio)")
)
fault(
    "level of another signal told",
    WAVE,
    "timestep",
    ("spectrogram, noise_scale.squeeze(1))", "spectrogram, noise_scale.squeeze(1).roll(1))"),
)
fault(
    "level not used",
    WAVE,
    "timestep, network",
    (
        "return torch.cat([torch.sin(angles), torch.cos(angles)], dim=-1)",
        "return torch.cat([torch.sin(angles), torch.cos(angles)], dim=-1) * 0",
    ),
)
fault(
    "one level for the whole batch",
    WAVE,
    "timestep, input",
    ("noise_scale = noise_scale.unsqueeze(1)", "noise_scale = noise_scale[:1].expand(N).unsqueeze(1)"),
)
fault("alphas not multiplied up", WAVE, "input, timestep", ("np.cumprod(1 - beta) ** 0.5", "(1 - beta) ** 0.5"))
fault("square missing", WAVE, "input", ("(1.0 - noise_scale**2) ** 0.5", "(1.0 - noise_scale) ** 0.5"))
fault("the loss asks for the noisy signal", WAVE, "target", ("self.loss_fn(noise,", "self.loss_fn(noisy_audio,"))
fault("noise of another signal", WAVE, "target", ("self.loss_fn(noise,", "self.loss_fn(noise.roll(1, 0),"))
fault("noise drawn anew for the loss", WAVE, "target", ("self.loss_fn(noise,", "self.loss_fn(torch.randn_like(noise),"))
fault(
    "one spectrogram for all",
    WAVE,
    "condition",
    ("self.model(noisy_audio, spectrogram,", "self.model(noisy_audio, spectrogram[:1].expand_as(spectrogram),"),
)
fault("gradients never cleared", WAVE, "gradient", ("            param.grad = None\n", "            pass\n"))
fault(
    "clipped after the step",
    WAVE,
    "gradient",
    (
        '        self.grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), PARAMS["max_grad_norm"])\n'
        "        self.optimizer.step()\n",
        "        self.optimizer.step()\n"
        '        self.grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), PARAMS["max_grad_norm"])\n',
    ),
)
fault(
    "residual layers not in the optimizer",
    WAVE,
    "optimizer, network",
    (
        "torch.optim.Adam(model.parameters(),",
        'torch.optim.Adam([p for n, p in model.named_parameters() if "residual" not in n],',
    ),
)
fault(
    "schedule of ten times the run",
    WAVE,
    "learning_rate",
    ("CosineAnnealingLR(optimizer, args.steps)", "CosineAnnealingLR(optimizer, 10 * args.steps)"),
)
fault(
    "decay exchanged",
    WAVE,
    "ema",
    ('mul_(PARAMS["ema"]).add_(param, alpha=1 - PARAMS["ema"])', 'mul_(1 - PARAMS["ema"]).add_(param, alpha=PARAMS["ema"])'),
)
fault(
    "average of the weights before training",
    WAVE,
    "ema",
    (
        "            for name, param in self.model.named_parameters():\n                self.shadow",
        "            for name, param in ():\n                self.shadow",
    ),
)

# ---- log_snr.py

fault("pixels from 0 to 1", LOGSNR, "data", (" / 255.0 * 2 - 1\n", " / 255.0\n"))
fault("divided by 255 twice", LOGSNR, "data", (" / 255.0 * 2 - 1\n", " / 255.0 / 255.0 * 2 - 1\n"))
fault("one noise for all channels", LOGSNR, "noise", ("torch.randn_like(x)", "torch.randn_like(x[:, :1]).expand_as(x)"))
fault(
    "log SNR of another image told",
    LOGSNR,
    "timestep",
    ("self.model(z, logsnr=logsnr, y=y)", "self.model(z, logsnr=logsnr.flip(0), y=y)"),
)
fault(
    "time embedding not used",
    LOGSNR,
    "timestep, network",
    ("self.time(torch.cat([angles.sin(), angles.cos()], dim=-1)) + self.classes(y)", "self.classes(y)"),
)
fault(
    "one time for the whole batch",
    LOGSNR,
    "timestep, input",
    ("(torch.rand(1) + torch.arange(n) / n) % 1.0", "torch.rand(1).repeat(n)"),
)
fault(
    "square roots missing",
    LOGSNR,
    "input",
    (
        "torch.sigmoid(logsnr).sqrt()[:, None, None, None]\n        sigma = torch.sigmoid(-logsnr).sqrt()[",
        "torch.sigmoid(logsnr)[:, None, None, None]\n        sigma = torch.sigmoid(-logsnr)[",
    ),
)
fault(
    "square root of the signal missing",
    LOGSNR,
    "input",
    (
        "alpha = torch.sigmoid(logsnr).sqrt()[:, None, None, None]\n        sigma",
        "alpha = torch.sigmoid(logsnr)[:, None, None, None]\n        sigma",
    ),
)
fault(
    "labels never given",
    LOGSNR,
    "condition",
    ("self.classes(y)\n        outer", "self.classes(y * 0 + CLASSES)\n        outer"),
)
fault(
    "labels always dropped",
    LOGSNR,
    "condition",
    ("torch.rand(len(y)) < self.cond_drop", "torch.rand(len(y)) < 1 + self.cond_drop"),
)
fault("classes not used", LOGSNR, "condition", (" + self.classes(y)\n        outer", "\n        outer"))
fault(
    "v of the wrong sign",
    LOGSNR,
    "target",
    ("sigma * z + alpha * v\n        return ((", "sigma * z - alpha * v\n        return (("),
)
fault("compared with the image", LOGSNR, "target", ("((eps_hat - eps) ** 2)", "((eps_hat - x) ** 2)"))
fault(
    "weighed by the SNR",
    LOGSNR,
    "weight",
    ("((eps_hat - eps) ** 2)", "(logsnr.exp()[:, None, None, None] * (eps_hat - eps) ** 2)"),
)
fault(
    "not divided by the micro steps",
    LOGSNR,
    "weight, gradient",
    ("diffusion.loss(x_part, y_part) / args.micro", "diffusion.loss(x_part, y_part)"),
    flags={"micro": 2},
)
fault(
    "cleared in each micro step",
    LOGSNR,
    "gradient",
    ("                loss = diffusion", "                optimizer.zero_grad()\n                loss = diffusion"),
    flags={"micro": 2},
)
fault(
    "matrices alone in the optimizer",
    LOGSNR,
    "optimizer",
    ('{"params": vectors, "weight_decay": 0.0}', '{"params": vectors[:1], "weight_decay": 0.0}'),
)
fault("warm-up never stepped", LOGSNR, "learning_rate", ("            warmup.step()\n", ""))
fault(
    "average before the step",
    LOGSNR,
    "ema",
    ("            ema.update()\n", ""),
    ("            optimizer.step()\n", "            ema.update()\n            optimizer.step()\n"),
)
fault(
    "average of its own copy",
    LOGSNR,
    "ema",
    (
        "zip(self.ema_model.parameters(), self.online.parameters())",
        "zip(self.ema_model.parameters(), copy.deepcopy(self.ema_model).parameters())",
    ),
)
fault("the average is the network", LOGSNR, "ema", ("copy.deepcopy(model).eval().requires_grad_(False)", "model"))
fault(
    "averaged weights stay after sampling",
    LOGSNR,
    "state",
    (
        "            if step == args.steps:\n",
        "            if step % args.sample_every == 0:\n"
        "                model.load_state_dict(ema.ema_model.state_dict())\n            if step == args.steps:\n",
    ),
)
