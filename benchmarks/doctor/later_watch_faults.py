"""Faults of four more scripts, in styles that foreign/ has not: a loop with flat master weights and learned variances, a module
with hooks and a closure for the optimizer, score matching with a dictionary of the state, and flow matching on short films.

They were written down, with the stages expected of each, by someone who had not seen the watcher. The comment says the harm.
"""

from benchmarks.doctor.watch_faults import fault

GUIDED, INPAINT, SCORE, FILMS = "guided_loop.py", "lightning_inpaint.py", "score_sde.py", "video_flow.py"
HALF = {"use_bf16": True}
VP = {"sde": "vp"}

# ---- guided_loop.py

# Whatever is brighter than 127 wraps around: bright shapes turn dark, and nothing is below 0.
fault(
    "uint8 arithmetic wraps around",
    GUIDED,
    "data",
    ("pictures[chosen].astype(np.float32) / 127.5 - 1", "(pictures[chosen] * 2 - 255).astype(np.float32) / 255"),
)
# The network learns one tensor by heart: its noise estimate is worth nothing for other noise.
fault(
    "the same noise in each update, from a seeded numpy generator",
    GUIDED,
    "noise",
    (
        "noise = th.randn_like(x_start)",
        "noise = th.from_numpy(np.random.default_rng(0).standard_normal(x_start.shape)).float()",
    ),
)
# One noise level in each update: the gradients are far noisier, and biased to a level at a time.
fault(
    "one timestep for each micro-batch",
    GUIDED,
    "timestep",
    ("np.random.choice(len(p), size=(batch_size,), p=p)", "np.random.choice(len(p), size=(1,), p=p).repeat(batch_size)"),
)
# "=" in place of "+=": the network no longer knows how much noise there is.
fault(
    "labels overwrite the time embedding",
    GUIDED,
    "timestep, network",
    ("emb = emb + self.label_emb(y)", "emb = self.label_emb(y)"),
)
# Noise above 1 is cut off: the network never sees what it gets in sampling, nor the whole noise that it has to tell.
fault(
    "noised images clamped to the range of images",
    GUIDED,
    "input",
    ("x_t = self.q_sample(x_start, t, noise=noise)", "x_t = self.q_sample(x_start, t, noise=noise).clamp(-1, 1)"),
)
# The image never fades while the noise grows: sampling starts from inputs that training never had.
fault(
    "the factor of the image is not cumulated",
    GUIDED,
    "input",
    ("self.sqrt_alphas_cumprod = np.sqrt(alphas_cumprod)", "self.sqrt_alphas_cumprod = np.sqrt(alphas)"),
)
# The second micro-batch is trained with classes of other images.
fault(
    "labels of the first micro-batch for all",
    GUIDED,
    "condition",
    ("{k: v[i : i + self.microbatch] for", "{k: v[: self.microbatch] for"),
    flags={"microbatch": 8},
)
# The output is read as noise by the sampler and by the bound, and learns the mean of the step before.
fault(
    "the posterior mean as target of a network of noise",
    GUIDED,
    "target",
    ("mean_flat((noise - model_output) ** 2)", "mean_flat((self.q_posterior_mean(x_start, x_t, t) - model_output) ** 2)"),
)
# The variances' part of the loss is a thousand times too heavy: the noise is hardly learned.
fault(
    "the bound is not divided by 1000",
    GUIDED,
    "weight",
    ('terms["vb"] *= self.num_timesteps / 1000.0', 'terms["vb"] *= self.num_timesteps'),
)
# The copies that the optimizer uses were made before: nothing is clipped.
fault(
    "the 16-bit gradients clipped, not those of the master weights",
    GUIDED,
    "gradient",
    ("clip_grad_norm_(self.master_params, self.args.clip)", "clip_grad_norm_(self.model_params, self.args.clip)"),
    flags=HALF | {"clip": 0.1},
)
# All gradients since the start are summed.
fault("gradients detached, not zeroed", GUIDED, "gradient", ("                param.grad.zero_()\n", ""))
# What the optimizer does to the 16-bit weights is overwritten by the master weights, which nobody trains.
fault(
    "the optimizer has the 16-bit weights",
    GUIDED,
    "optimizer, state",
    ("th.optim.AdamW(self.master_params,", "th.optim.AdamW(self.model_params,"),
    flags=HALF,
)
# Each update shrinks the rate that was already shrunk: it is near nothing after half of the run.
fault(
    "annealed from the annealed rate",
    GUIDED,
    "learning_rate",
    (
        '        for param_group in self.opt.param_groups:\n            param_group["lr"] = lr\n',
        '        for param_group in self.opt.param_groups:\n            param_group["lr"] *= lr / self.args.lr\n',
    ),
    flags={"lr_anneal_steps": 48},
)
# The slower average, which is the one to sample from, stays at the first weights.
fault(
    "the second average never updated",
    GUIDED,
    "ema",
    ("zip(self.ema_rate, self.ema_params)", "zip(self.ema_rate[:1], self.ema_params)"),
)
# A name is bound anew, nothing is copied: the network that gives the gradients stays as it was.
fault(
    "master weights not copied into the network",
    GUIDED,
    "state, optimizer",
    ("param.detach().copy_(value)", "param = value"),
    flags=HALF,
)

# ---- lightning_inpaint.py

# Height by width by channels is read as channels first: the pixels are scrambled.
fault(
    "channels moved by a reshape",
    INPAINT,
    "data",
    ("batch[k].permute(0, 3, 1, 2).contiguous().float()", "batch[k].reshape(len(batch[k]), -1, 16, 16).float()"),
)
# Noise of twice the variance, half of it the same in a whole channel.
fault(
    "offset noise without its strength",
    INPAINT,
    "noise",
    ("self.offset_noise_strength * torch.randn(*x_start", "torch.randn(*x_start"),
    flags={"offset_noise": 0.1},
)
# Sixteen of a thousand timesteps are all that is ever learned.
fault(
    "timesteps drawn once and kept",
    INPAINT,
    "timestep",
    ("t = torch.randint(", 't = self.t = self.t if hasattr(self, "t") else torch.randint('),
)
# The network gets the noised image without the hole's content, and has to tell what is not in it.
fault(
    "the image with the hole is noised",
    INPAINT,
    "input, target",
    ("self.q_sample(x_start=x_start,", "self.q_sample(x_start=c_concat[1],"),
)
# The answer is in the input: the network copies it, and in use there is none.
fault(
    "the hole is not cut out of the condition",
    INPAINT,
    "condition, input",
    ('"masked_image": image * (1 - mask)', '"masked_image": image'),
)
# The mask is from 0 to 0.004: the network cannot see where the hole is.
fault(
    "mask of 0 and 1 divided by 255",
    INPAINT,
    "condition, input",
    ('mask = self.get_input(batch, "mask")', 'mask = self.get_input(batch, "mask") / 255'),
)
# Not the v of any sampler: image and noise come back in wrong parts.
fault(
    "tables exchanged in v",
    INPAINT,
    "target",
    (
        "self.extract(self.sqrt_alphas_cumprod, t) * noise - self.extract(self.sqrt_one_minus_alphas_cumprod, t) * x",
        "self.extract(self.sqrt_one_minus_alphas_cumprod, t) * noise - self.extract(self.sqrt_alphas_cumprod, t) * x",
    ),
)
# At the last timestep the input is the target: nothing about the image is learned there, and sampling divides by zero.
fault(
    "noise as target though the last step has no signal",
    INPAINT,
    "target, input",
    ("target = self.get_v(x_start, noise, t)", "target = noise"),
)
# What is known counts ten times as much as what has to be painted.
fault(
    "divided by the mask of the loss",
    INPAINT,
    "weight",
    ("loss = loss * hole / hole.mean(", "loss = loss / hole * hole.mean("),
    flags={"masked_loss": True},
)
# All micro-batches but the last are computed for nothing.
fault(
    "the closure clears each micro-batch's gradients",
    INPAINT,
    "gradient",
    (
        "        if batch_idx % self.accumulate == 0:\n            self.optimizer",
        "        if True:\n            self.optimizer",
    ),
    flags={"accumulate_grad_batches": 2},
)
# A random layer that stays random stands before the whole network.
fault(
    "input layer replaced after the optimizer was made",
    INPAINT,
    "optimizer",
    (
        "        module.train()\n        while True:",
        "        module.model.diffusion_model.conv_in = nn.Conv2d(7, 24, 3, padding=1)\n"
        "        module.train()\n        while True:",
    ),
)
# Lightning's default interval: the warm-up is not over when the run is.
fault(
    "schedule stepped after each epoch",
    INPAINT,
    "learning_rate",
    (
        '                scheduler["scheduler"].step()\n',
        '                if batch_idx + 1 == len(train):\n                    scheduler["scheduler"].step()\n',
    ),
)
# LambdaLR takes a factor: the rate is a thousandth of what it should be.
fault(
    "the lambda gives rates, not factors",
    INPAINT,
    "learning_rate",
    (
        "return (n + 1) / warm if n < warm else 0.1 + 0.45 * (1 + np.cos(np.pi * (n - warm) / (end - warm)))",
        "factor = (n + 1) / warm if n < warm else 0.1 + 0.45 * (1 + np.cos(np.pi * (n - warm) / (end - warm)))\n"
        "            return self.learning_rate * factor",
    ),
)
# The hook runs after each batch, not after each update: the average forgets twice as fast.
fault(
    "averaged after each micro-batch",
    INPAINT,
    "ema",
    ("                    closure()\n", "                    closure()\n                    module.on_train_batch_end()\n"),
    flags={"accumulate_grad_batches": 2},
)
# Away from the weights in place of towards them.
fault(
    "sign of the average's step",
    INPAINT,
    "ema",
    ("(shadow_params[sname] - param)", "(param - shadow_params[sname])"),
)
# What is kept is already the average: training goes on from it after each validation.
fault(
    "weights stored after the average was copied in",
    INPAINT,
    "state",
    (
        "        self.model_ema.store(self.model.parameters())\n        self.model_ema.copy_to(self.model)\n",
        "        self.model_ema.copy_to(self.model)\n        self.model_ema.store(self.model.parameters())\n",
    ),
)

# ---- score_sde.py

# The process is centered and ends at variance 1, the images are from 0 to 1: gray samples of half the contrast.
fault(
    "the scaler of the other process",
    SCORE,
    "data",
    ("if sde.centered else (lambda x: x)", "if not sde.centered else (lambda x: x)"),
    flags=VP,
)
# The largest noise is a twenty-fifth of the images' range: sampling cannot start from it.
fault(
    "pixels from 0 to 255",
    SCORE,
    "data",
    ("next(train_iter).astype(np.float32) / 255.0)", "next(train_iter).astype(np.float32))"),
)
# "rand" for "randn": mean a half, and a third of the spread.
fault("uniform noise", SCORE, "noise", ("z = torch.randn_like(batch)", "z = torch.rand_like(batch)"))
# "randn" for "rand": half of the times are below 0, at noise too small to see, and some far beyond the largest.
fault(
    "times from a normal distribution",
    SCORE,
    "timestep",
    ("torch.rand(batch.shape[0], device=batch.device)", "torch.randn(batch.shape[0], device=batch.device)"),
)
# The frequencies are made for 0 to 999: for the network all times look the same.
fault("time not scaled for the embedding", SCORE, "timestep, network", ("return t * 999", "return t"), flags=VP)
# The network is told another level than the input has.
fault(
    "variance in place of deviation",
    SCORE,
    "input",
    ("perturbed_data = mean + std[:, None, None, None] * z", "perturbed_data = mean + std[:, None, None, None] ** 2 * z"),
)
# Image and noise no longer make variance 1: too little noise at small times.
fault(
    "square root of the deviation missing",
    SCORE,
    "input",
    ("torch.sqrt(1.0 - torch.exp(2.0 * log_mean_coeff))", "1.0 - torch.exp(2.0 * log_mean_coeff)"),
    flags=VP,
)
# The score points away from the images.
fault(
    "score of the wrong sign",
    SCORE,
    "target",
    ("torch.square(score * std[:, None, None, None] + z)", "torch.square(score * std[:, None, None, None] - z)"),
)
# The score becomes minus the noise, at all levels: wrong by a factor of sigma in sampling.
fault(
    "deviation missing in the loss",
    SCORE,
    "target, weight",
    ("torch.square(score * std[:, None, None, None] + z)", "torch.square(score + z)"),
)
# The weights do not cancel the square of sigma: the smallest noise counts a thousand times as much as the largest.
fault(
    "weighted by the diffusion, not its square",
    SCORE,
    "weight",
    ("g2 = sde.diffusion(t) ** 2", "g2 = sde.diffusion(t)"),
    flags={"likelihood_weighting": True},
)
# 0 was meant to switch clipping off, and makes all gradients zero.
fault(
    "clipped to a norm of zero",
    SCORE,
    "gradient",
    ('"--grad_clip", type=float, default=1.0', '"--grad_clip", type=float, default=0.0'),
)
# The gradients are gone when the optimizer comes: nothing is learned.
fault(
    "cleared between backward and step",
    SCORE,
    "gradient, optimizer",
    ("            optimizer.zero_grad()\n", ""),
    ("                loss.backward()\n", "                loss.backward()\n            optimizer.zero_grad()\n"),
)
# The optimizer and the first average belong to another network: nothing is learned.
fault(
    "network built anew after the optimizer",
    SCORE,
    "optimizer, gradient",
    ("dict(optimizer=optimizer, model=score_model,", "dict(optimizer=optimizer, model=NCSNpp(sde.centered, 0.3),"),
)
# Each update multiplies what the last one left: the rate ends below a thousandth of what was asked for.
fault("warm-up of the warmed-up rate", SCORE, "learning_rate", ('g["lr"] = lr * np', 'g["lr"] = g["lr"] * np'))
# The warm-up reads a counter that stays at 0: a tenth of the rate to the end.
fault("steps not counted", SCORE, "learning_rate", ('            state["step"] += 1\n', ""))
# Two updates of the average in the whole run.
fault(
    "averaged in evaluation alone",
    SCORE,
    "ema",
    ('            state["ema"].update(model.parameters())\n', ""),
    (
        "                ema.restore(model.parameters())\n",
        "                ema.restore(model.parameters())\n                ema.update(model.parameters())\n",
    ),
)
# No weight can leave a small box: the network stays nearly what it was.
fault(
    "weights clamped after each step",
    SCORE,
    "state, optimizer",
    (
        "        optimizer.step()\n\n",
        "        optimizer.step()\n        for param in params:\n            param.data.clamp_(-0.05, 0.05)\n\n",
    ),
)

# ---- video_flow.py

# All films are black to half a percent.
fault("divided by 255 twice", FILMS, "data", ('batch["video"].mul(2.0)', 'batch["video"].div(255.0).mul(2.0)'))
# The network may average the noise away over frames, and in sampling each frame has its own.
fault(
    "one noise for all frames",
    FILMS,
    "noise",
    ("torch.randn_like(x) * self", "torch.randn_like(x[:, :, :1]).expand_as(x) * self"),
)
# 0 for all: the network does not know how much noise there is.
fault(
    "time told as an integer",
    FILMS,
    "timestep",
    ("sample=z, time=t, label=labels_dropped", "sample=z, time=t.long(), label=labels_dropped"),
)
# Four of five films are pure noise, and hardly any time above a half is left.
fault(
    "clamped in place of the sigmoid",
    FILMS,
    "timestep",
    ("torch.sigmoid(torch.randn(n) * self.P_std + self.P_mean)", "(torch.randn(n) * self.P_std + self.P_mean).clamp(0, 1)"),
)
# The noise never fades: there is no time at which the film is clean, and the velocities do not lead to it.
fault("noise at full strength at all times", FILMS, "input", ("z = s * x + (1 - s) * e", "z = s * x + e"))
# The path ends in noise where the velocity's divisor says film.
fault("path in the other direction", FILMS, "input, target", ("z = s * x + (1 - s) * e", "z = (1 - s) * x + s * e"))
# 90 % of the labels are dropped: the classes are hardly learned.
fault("labels kept where they should be dropped", FILMS, "condition", (" < self.label_drop_prob", " > self.label_drop_prob"))
# The film has to come out backwards.
fault("films reversed in the target", FILMS, "target", ("v = (x - z) /", "v = (x.flip(2) - z) /"))
# The velocity leads from the film to the noise, while the network's output is read as film.
fault("velocity of the wrong sign", FILMS, "target", ("v = (x - z) /", "v = (z - x) /"))
# Loss and gradients grow with the batch: always clipped, and another rate for each batch size.
fault("summed over the batch", FILMS, "weight", ("mean(dim=(1, 2, 3, 4)).mean()", "mean(dim=(1, 2, 3, 4)).sum()"))
# The gradients of twenty updates are summed.
fault(
    "cleared when samples are made",
    FILMS,
    "gradient",
    ("            optimizer.zero_grad(set_to_none=True)\n", ""),
    ("                model.eval()\n", "                optimizer.zero_grad(set_to_none=True)\n                model.eval()\n"),
)
# Neither the time's nor the label's embedding ever learns.
fault(
    "embeddings without gradients",
    FILMS,
    "gradient, network",
    (
        "        c = self.t_embedder(sinusoidal(1000 * time, self.width)) + self.y_embedder(label)\n",
        "        with torch.no_grad():\n"
        "            c = self.t_embedder(sinusoidal(1000 * time, self.width)) + self.y_embedder(label)\n",
    ),
)
# Adam's averages start from nothing after each 16 updates: steps of full size in any direction.
fault(
    "the optimizer made anew in each epoch",
    FILMS,
    "optimizer",
    (
        "    while update < args.steps:\n",
        "    while update < args.steps:\n"
        "        optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)\n",
    ),
)
# Biases and norms have neither warm-up nor decay.
fault(
    "the rate of the first group alone",
    FILMS,
    "learning_rate",
    ("for group in optimizer.param_groups:", "for group in optimizer.param_groups[:1]:"),
)
# Sixteen times too slow: still in the warm-up when the run ends.
fault("batches counted as films", FILMS, "learning_rate", ("seen += len(x)", "seen += 1"))
# The parts make 1.9, not 1: the average grows to nineteen times the weights.
fault("parts of the average do not add up", FILMS, "ema", ("alpha=1 - self.ema_decay", "alpha=self.ema_decay"))
# What is kept is the same memory: training goes on from the average after each sampling.
fault(
    "weights kept without a copy",
    FILMS,
    "state",
    ("kept = [p.clone() for p in", "kept = [p.data for p in"),
)
