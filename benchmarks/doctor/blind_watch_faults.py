"""Faults of two more scripts, a plain loop and one with Accelerate on latents, and of diffusers' train_unconditional.py.

They were written down, with the stages expected of each, by someone who had not seen the watcher. The comment says the harm.
"""

from benchmarks.doctor.watch_faults import PUBLIC, fault

MINIMAL, ACCELERATED = "minimal_ddpm.py", "flow_latents.py"

# ---- minimal_ddpm.py

# The cumulative product is forgotten: alpha_bar[t] is 1 - beta[t], so even the last step keeps 98 % of the image; the
# network never sees much noise and sampling from pure noise fails.
fault(
    "no cumprod",
    MINIMAL,
    "input",
    ("alpha_bar = torch.cumprod(1.0 - betas, dim=0)", "alpha_bar = 1.0 - betas"),
)
# HWC image brought to CHW by reshape and not permute: pixels and channels are scrambled; the model learns (and
# samples) scrambled images, and the flip mirrors nonsense.
fault(
    "reshape not permute",
    MINIMAL,
    "data",
    (
        "torch.from_numpy(self.images[i]).permute(2, 0, 1).float()",
        "torch.from_numpy(self.images[i]).reshape(3, *self.images[i].shape[:2]).float()",
    ),
)
# The training step hands t/T (0..1) to a sinusoidal embedding made for 0..999: the embeddings are nearly all the
# same, noise levels can hardly be told apart, and sampling (which passes integers) is off the training range.
fault(
    "time normalized",
    MINIMAL,
    "input, timestep, network",
    ("pred = model(xt, t, y)", "pred = model(xt, t / diffusion.T, y)"),
)
# BatchNorm instead of GroupNorm in the blocks: the normalization mixes samples of different noise levels, and the
# average copies parameters only, so its running statistics stay at 0 and 1 and the averaged model is broken.
fault(
    "batchnorm in blocks",
    MINIMAL,
    "network, ema",
    ("self.norm2 = nn.GroupNorm(4, cout)", "self.norm2 = nn.BatchNorm2d(cout)"),
)
# The time embedding is computed under no_grad (copied from a frozen encoder): the time MLP never gets a gradient and
# stays at its random start.
fault(
    "time mlp no grad",
    MINIMAL,
    "network, gradient",
    (
        "        emb = self.time_mlp(timestep_embedding(t, self.ch))\n",
        "        with torch.no_grad():\n            emb = self.time_mlp(timestep_embedding(t, self.ch))\n",
    ),
)
# v target with the two coefficients exchanged (s*eps - a*x0 instead of a*eps - s*x0): sampling by the v formula
# rebuilds neither x0 nor eps.
fault(
    "v coefficients swapped",
    MINIMAL,
    "target",
    ("return a * noise - s * x0", "return s * noise - a * x0"),
    flags={"prediction": "v"},
)
# min-SNR weight of the eps loss not divided by the SNR: min(snr, gamma) itself multiplies the eps loss, so the noisy
# half of the steps counts almost nothing (weights down to 4e-5) and is never learnt.
fault(
    "min snr not divided",
    MINIMAL,
    "weight",
    ("            return clipped / snr\n", "            return clipped\n"),
    flags={"min_snr_gamma": 5},
)
# Clipping after the step: the gradients used for the update are never clipped, spikes go through (at the default
# limit of 1 the norms of this tiny network hardly ever get there, hence the flags: they are 0.5 .. 1).
fault(
    "clip after step",
    MINIMAL,
    "gradient",
    (
        ("            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)\n            optimizer.step()\n"),
        ("            optimizer.step()\n            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)\n"),
    ),
    flags={"clip": 0.25, "lr": 0.004},
)
# Gradients zeroed before every micro batch: of 4 accumulated micro batches only the last counts, and it is divided by
# 4; three quarters of the data are thrown away.
fault(
    "zero grad per micro",
    MINIMAL,
    "gradient",
    (
        "            (loss / args.accum).backward()\n",
        "            optimizer.zero_grad(set_to_none=True)\n            (loss / args.accum).backward()\n",
    ),
    flags={"accum": 4},
)
# Arguments of torch.where exchanged: 90 % of the labels become the null label and 10 % stay; the condition is hardly
# learnt and guidance does little.
fault(
    "label drop inverted",
    MINIMAL,
    "condition, input, data",
    ("y = torch.where(drop, torch.full_like(y, NUM_CLASSES), y)", "y = torch.where(drop, y, torch.full_like(y, NUM_CLASSES))"),
    flags={"class_cond": True},
)
# torch.manual_seed returns the GLOBAL generator: each validation reseeds it, so the training after each validation
# repeats the very same noise, timesteps and flips; the model fits few noise draws.
fault(
    "validation reseeds",
    MINIMAL,
    "noise, timestep, state",
    ("gen = torch.Generator(device=device).manual_seed(1234)", "gen = torch.manual_seed(1234)"),
    flags={"val_every": 4},
)
# Decay and 1 - decay exchanged: the average is nearly the newest weights, no averaging at all late in training.
fault(
    "ema decay swapped",
    MINIMAL,
    "ema",
    ("p_ema.mul_(d).add_(p, alpha=1 - d)", "p_ema.mul_(1 - d).add_(p, alpha=d)"),
)

# ---- flow_latents.py

# Latents divided by the scaling factor on the way in (the decode formula): their spread is far from 1 against unit
# noise, and the decoding undoes the wrong thing.
fault(
    "latents divided by scale",
    ACCELERATED,
    "data, input",
    (
        "return (z - self.latents_mean) * self.vae.config.scaling_factor",
        "return (z - self.latents_mean) / self.vae.config.scaling_factor",
    ),
)
# No shuffling while the data set is sorted by class: each batch holds one class only, for long stretches; the network
# forgets one class while it sees the next.
fault(
    "no shuffle sorted data",
    ACCELERATED,
    "data",
    ("batch_size=args.batch_size, shuffle=True, drop_last=True", "batch_size=args.batch_size, drop_last=True"),
    flags={"class_cond": True},
)
# rand for randn in the logit-normal draw: t lies in 0.50 .. 0.73 only, the rest of the path is never trained.
fault(
    "logit normal rand",
    ACCELERATED,
    "timestep",
    ("u = torch.randn(n, device=self.device)", "u = torch.rand(n, device=self.device)"),
)
# t[:, None] against (B, C, H, W): with B = H = 8 it broadcasts silently over the rows, so each row of the image has
# its own noise level and none agrees with the time that the network is told.
fault(
    "time broadcast rows",
    ACCELERATED,
    "input, noise, timestep",
    ("tt = t.view(-1, 1, 1, 1)", "tt = t[:, None]"),
    flags={"batch_size": 8},
)
# Wrong variable: noise - x_t instead of noise - x_0, i.e. the velocity times (1 - t); integration falls short.
fault(
    "target from noisy",
    ACCELERATED,
    "target",
    ("target = noise - latents", "target = noise - noisy"),
)
# The weighting gets the network's time (0..1000) and not the 0..1 one: weights go like 1/t^2 * 1e-6, so the sample
# with the least t of each batch decides the loss.
fault(
    "weighting of scaled time",
    ACCELERATED,
    "weight",
    ("return (self.weighting(t) * loss).mean()", "return (self.weighting(t * 1000) * loss).mean()"),
    flags={"weighting": "cosmap"},
)
# accumulate() left out: accelerate still divides the loss by 4, but each micro batch is an update of its own: the
# effective batch is 8 and not 32, and the schedule runs out on a quarter of the data.
fault(
    "accumulate missing",
    ACCELERATED,
    "gradient, optimizer",
    ("with self.accelerator.accumulate(self.model):", "with self.accelerator.autocast():"),
    flags={"gradient_accumulation_steps": 4},
)
# Scheduler stepped once per epoch though its warm-up is counted in updates: the rate is exactly 0 for the whole first
# epoch and crawls afterwards.
fault(
    "lr stepped per epoch",
    ACCELERATED,
    "learning_rate",
    ("                    self.lr_scheduler.step()\n", ""),
    (
        "                        break\n        if args.output_dir:\n",
        "                        break\n            self.lr_scheduler.step()\n        if args.output_dir:\n",
    ),
)
# The decayed group takes only 4-d weights: the weights of all Linear layers (attention, time embedding) are in no
# group and are never trained.
fault(
    "linear weights in no group",
    ACCELERATED,
    "optimizer",
    ("[p for n, p in named if p.ndim > 1]", "[p for n, p in named if p.ndim == 4]"),
)
# The training weights are not put back after a preview: training goes on from the averaged weights with the
# optimizer's moments of the others.
fault(
    "ema not restored",
    ACCELERATED,
    "ema, state",
    ("        self.ema.restore(unet.parameters())\n", ""),
    flags={"sample_every": 8},
)

# ---- train_unconditional.py

# ImageNet mean and std (from a classifier's code): images lie in -2.1 .. 2.6 and each channel is shifted, whereas the
# sampler clips to -1 .. 1 and the pipeline un-normalizes by 0.5, 0.5.
fault(
    "imagenet normalize",
    PUBLIC,
    "data",
    (
        "            transforms.ToTensor(),\n            transforms.Normalize([0.5], [0.5]),\n",
        (
            "            transforms.ToTensor(),\n"
            "            transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),\n"
        ),
    ),
)
# One noise image for the whole batch: samples of a batch are fully correlated, the noise diversity falls by the batch
# size.
fault(
    "noise shared in batch",
    PUBLIC,
    "noise",
    (
        "noise = torch.randn(clean_images.shape, dtype=weight_dtype, device=clean_images.device)",
        ("noise = torch.randn(clean_images.shape[1:], dtype=weight_dtype, device=clean_images.device).expand_as(clean_images)"),
    ),
)
# Other noise is added than the network has to predict: the target is independent of the input, the loss stays 1.
fault(
    "other noise added",
    PUBLIC,
    "noise, target, input",
    (
        "noisy_images = noise_scheduler.add_noise(clean_images, noise, timesteps)",
        "noisy_images = noise_scheduler.add_noise(clean_images, torch.randn_like(clean_images), timesteps)",
    ),
)
# Wrong variable: times drawn below the number of INFERENCE steps: only the 50 least noisy of 1000 are trained.
fault(
    "times of inference",
    PUBLIC,
    "timestep",
    (
        "0, noise_scheduler.config.num_train_timesteps, (bsz,), device=clean_images.device",
        "0, args.ddpm_num_inference_steps, (bsz,), device=clean_images.device",
    ),
    flags={"ddpm_num_inference_steps": 50},
)
# Noisy images clamped "to stay in range": the noise is cut, eps cannot be told where it is cut, and the sampler feeds
# unclamped images.
fault(
    "noisy clamped",
    PUBLIC,
    "input",
    (
        "model_output = model(noisy_images, timesteps).sample",
        "model_output = model(noisy_images.clamp(-1, 1), timesteps).sample",
    ),
)
# Only the first sample's time reaches the network (and is broadcast by UNet2DModel): all others carry a wrong time.
fault(
    "first time for all",
    PUBLIC,
    "input, timestep",
    ("model_output = model(noisy_images, timesteps).sample", "model_output = model(noisy_images, timesteps[0]).sample"),
)
# With prediction of the sample, the loss compares with the noisy images: the network learns the identity.
fault(
    "sample target noisy",
    PUBLIC,
    "target",
    (
        'F.mse_loss(model_output.float(), clean_images.float(), reduction="none")',
        'F.mse_loss(model_output.float(), noisy_images.float(), reduction="none")',
    ),
    flags={"prediction_type": "sample"},
)
# SNR weight upside down: 1/SNR, up to 2.5e4 at the noisiest steps and 1e-4 at the cleanest ones.
fault(
    "snr weight inverted",
    PUBLIC,
    "weight",
    ("snr_weights = alpha_t / (1 - alpha_t)", "snr_weights = (1 - alpha_t) / alpha_t"),
    flags={"prediction_type": "sample"},
)
# zero_grad lost in a refactoring: each update uses the sum of all (clipped) gradients since the start.
fault(
    "zero grad missing",
    PUBLIC,
    "gradient, optimizer",
    ("                lr_scheduler.step()\n                optimizer.zero_grad()\n", "                lr_scheduler.step()\n"),
)
# "element 0 does not require grad" mended by a new tensor: the graph is cut, no parameter gets any gradient and
# nothing is trained, while the loss is logged as ever.
fault(
    "loss rewrapped",
    PUBLIC,
    "gradient",
    (
        "                accelerator.backward(loss)\n",
        (
            "                loss = torch.tensor(loss.item(), requires_grad=True, device=clean_images.device)\n"
            "                accelerator.backward(loss)\n"
        ),
    ),
)
# Length of the schedule in epochs, not in updates: the cosine reaches 0 after a few updates, and from there on it
# swings or stays at 0 (the cosine: comes back and falls, period 2 * num_epochs; linear: stays at 0).
fault(
    "lr total in epochs",
    PUBLIC,
    "learning_rate",
    ("num_training_steps=(len(train_dataloader) * args.num_epochs),", "num_training_steps=args.num_epochs,"),
    flags={"lr_scheduler": "linear", "lr_warmup_steps": 2},
)
# Betas exchanged: momentum 0.999 over a second moment of 20 updates: sluggish, overshooting, unstable.
fault(
    "betas swapped",
    PUBLIC,
    "optimizer",
    ("betas=(args.adam_beta1, args.adam_beta2),", "betas=(args.adam_beta2, args.adam_beta1),"),
    flags={"lr_warmup_steps": 2},
)
# The average is stepped per micro batch: with 4 micro batches its window shrinks to a quarter (unchanged weights are
# averaged in again and again) and its warm-up runs 4 times too fast.
fault(
    "ema per micro",
    PUBLIC,
    "ema",
    (
        (
            "            if accelerator.sync_gradients:\n"
            "                if args.use_ema:\n"
            "                    ema_model.step(model.parameters())\n"
            "                progress_bar.update(1)\n"
        ),
        (
            "            if args.use_ema:\n"
            "                ema_model.step(model.parameters())\n"
            "            if accelerator.sync_gradients:\n"
            "                progress_bar.update(1)\n"
        ),
    ),
    flags={"use_ema": True, "gradient_accumulation_steps": 4},
)
# The EMA object is made anew at the start of each epoch (it was moved next to model.train()): all of the average's
# history and its warm-up count are lost each epoch; the saved weights are an average over one epoch at most.
fault(
    "ema remade per epoch",
    PUBLIC,
    "ema, state",
    (
        "        model.train()\n",
        (
            "        model.train()\n"
            "        if args.use_ema:\n"
            "            ema_model = EMAModel(accelerator.unwrap_model(model).parameters(), decay=args.ema_max_decay,\n"
            "                                 use_ema_warmup=True, inv_gamma=args.ema_inv_gamma, power=args.ema_power,\n"
            "                                 model_cls=UNet2DModel, model_config=accelerator.unwrap_model(model).config)\n"
        ),
    ),
    flags={"use_ema": True},
)
# The trained weights themselves cast to bf16 (as one does with frozen parts): updates of lr 1e-4 are below the
# rounding of bf16 weights and most of them are lost.
fault(
    "weights in bf16",
    PUBLIC,
    "network, optimizer",
    (
        "    if args.enable_xformers_memory_efficient_attention:\n        if is_xformers_available():\n",
        (
            "    model.to(dtype=weight_dtype)\n"
            "\n"
            "    if args.enable_xformers_memory_efficient_attention:\n"
            "        if is_xformers_available():\n"
        ),
    ),
    flags={"mixed_precision": "bf16"},
)
# A zero too many in beta_end: alpha_bar ends at 0.35, the last step still shows the image plainly, and sampling from
# pure noise starts outside of what was trained.
fault(
    "beta end typo",
    PUBLIC,
    "input",
    (
        ("            beta_schedule=args.ddpm_beta_schedule,\n            prediction_type=args.prediction_type,\n"),
        (
            "            beta_end=0.002,\n"
            "            beta_schedule=args.ddpm_beta_schedule,\n"
            "            prediction_type=args.prediction_type,\n"
        ),
    ),
)
