"""Rows as in ddpm_rows.py, for the other loops of tests/watched."""

from ddpm_rows import PICTURES, PLAIN_DDPM, options, row

# ---- places of edm_loop.py

SIGMA = "sigma = (torch.randn(len(y)) * 1.2 - 1.2).exp()"
WEIGHT = "weight = (sigma**2 + SIGMA_DATA**2) / (sigma * SIGMA_DATA) ** 2"
MIXED = "average.mul_(0.95).add_(weight, alpha=0.05)"

# ---- places of flow_loop.py

LOADER = "DataLoader(TensorDataset(images, labels), batch_size=8, shuffle=True)"
FAINT = "noise that is lost in the rounding of the images"
FACTOR = "a factor of the whole loss may be meant"
SIZES, ROUND, BATCH = "ROUNDS, CLASSES = 2, 6", "for _ in range(ROUNDS):", "x0, label = next(batches)"
NOISE, RANDN = "noise = torch.randn_like(x0)", "torch.randn_like(x0)"
DRAWN, TARGET = "torch.sigmoid(torch.randn(len(x0)))", "velocity = noise - x0"
FLOW_CALL, ERROR = "model(x, s * 1000, label)", "error = (model(x, s * 1000, label) - velocity).square()"
BACKWARD, STEP = "(error.mean() / ROUNDS).backward()", "optimizer.step()\n"
MADE = "model = Network(classes=CLASSES)"
ZERO_LAST = (MADE, MADE + "\nfor p in model.last.parameters(): torch.nn.init.zeros_(p)")
CIRCLE = (
    *("share = s[:, None, None, None]", "angle = s[:, None, None, None] * 1.5707963"),
    *("(1 - share) * x0 + share * noise", "angle.cos() * x0 + angle.sin() * noise"),
)

EDM_LOOP = [
    # ---- data
    row("data", PICTURES, "pictures()"),
    # ---- noise
    row("noise", "* noise, sigma)", "* noise / 2, sigma)"),
    row("noise", "torch.randn_like(y)", "torch.rand_like(y)"),
    # ---- timestep
    row("timestep", "* noise, sigma)", "* noise, sigma.roll(1))"),
    row("timestep|input|noise", "* noise, sigma)", "* noise, sigma / 0.8)"),
    row("timestep", *options(P_mean=1.2, P_std=1.2), updates=60),
    row("timestep", SIGMA, "sigma = (torch.randn(1) * 1.2 - 1.2).exp().expand(len(y))", updates=22),
    # ---- input
    row("input", "y + sigma[:, None, None, None] * noise, sigma)", "y + sigma[:, None, None, None].square() * noise, sigma)"),
    row("input|network", "c_in * x", "x"),
    row("input|timestep", SIGMA, "sigma = (torch.randn(len(y)) * 1.2 - 9.2).exp()", updates=22, missed=FAINT),
    # ---- network
    row("network|input|target", "SIGMA_DATA**2 / total, s *", "SIGMA_DATA / total, s *"),
    row("network|target", "s * SIGMA_DATA / total.sqrt()", "s * SIGMA_DATA / total"),
    row("network|target", "c_skip * x +", ""),
    row("network|target|input", "c_out *", ""),
    # ---- target
    row("target", "(denoised - y)", "(denoised - y.roll(1, 0))"),
    row("target", "(denoised - y)", "(denoised - (y + sigma[:, None, None, None] * noise))"),
    row("target", "(denoised - y) ** 2", "(denoised + y) ** 2"),
    # ---- weight
    row("weight", WEIGHT, "weight = (sigma**2 + SIGMA_DATA**2) / (sigma * SIGMA_DATA)"),
    row("weight", WEIGHT, "weight = (sigma * SIGMA_DATA) ** 2 / (sigma**2 + SIGMA_DATA**2)"),
    # ---- gradient
    row("gradient", "optimizer.zero_grad(set_to_none=True)", ""),
    row("gradient", "loss.backward()", "loss.backward(); loss.detach()\n[p.grad.neg_() for p in model.parameters()]"),
    # ---- ema
    row("ema", MIXED, "average.mul_(0.95).add_(weight, alpha=0.5)"),
    row("ema", MIXED, "average.mul_(0.95).add_(weight, alpha=0.04)"),
    row("ema", MIXED, "average.mul_(0.95).add_(weight.sign(), alpha=0.05)"),
    # ---- nothing is wrong
    row("", "c_noise = sigma.log() / 4", "c_noise = sigma"),
    row("", *options(P_mean=-1.2, P_std=1.2), updates=60),
    row("", "(denoised - y) ** 2", "(denoised - y).abs()"),
    row("", "/ len(y)", "/ y.numel()"),
    row("", SIGMA, "sigma = 0.002 * 40000 ** torch.rand(len(y))", updates=22),
]

FLOW_LOOP = [
    # ---- data
    row("data", LOADER, LOADER.replace("True", "False"), updates=30),
    row("data", LOADER, LOADER.replace("shuffle=True", "sampler=torch.utils.data.SequentialSampler(range(64))"), updates=30),
    row(
        "data",
        LOADER,
        LOADER.replace("shuffle=True", "shuffle=True, generator=generator"),
        "endless(loader):\n    while True:",
        "endless(loader):\n    while True:\n        generator.manual_seed(0)",
        SIZES,
        SIZES + "\ngenerator = torch.Generator()",
        updates=30,
    ),
    row(
        "data", "batches = endless(", "batches = (one for one in [next(iter(", LOADER + ")", LOADER + "))] * 10000)", updates=22
    ),
    row("data|state", BATCH, BATCH + "\nimages *= 0.99", updates=22),
    row("data", LOADER, "DataLoader(TensorDataset(images, labels), batch_size=8)", updates=30),
    # ---- noise
    row("noise", RANDN, "3 * torch.randn_like(x0)"),
    # ---- timestep
    row("timestep", FLOW_CALL, "model(x, (1 - s) * 1000, label)"),
    row("timestep", DRAWN, "torch.rand(len(x0)) * 1.8 - 0.5"),
    row("timestep", DRAWN, "torch.sigmoid(torch.rand(len(x0)))", updates=22),
    row("timestep", DRAWN, "torch.rand(1).expand(len(x0))", updates=22),
    row("timestep", FLOW_CALL, "model(x, s.flip(0) * 1000, label)"),
    row("timestep", FLOW_CALL, "model(x, torch.rand_like(s), label)"),
    # ---- input
    row("input", "(1 - share) * x0", "(1 - share).sqrt() * x0"),
    row("input", "share * noise", "share.sqrt() * noise"),
    row("input", "x = (1 - share) * x0", "x = x0"),
    # ---- condition
    row("condition|data", BATCH, BATCH + "\nlabel = label.sort().values", updates=22),
    row("condition", BATCH, BATCH + "\nlabel = label.flip(0)", updates=22),
    row("condition|data", BATCH, BATCH + "\nlabel = label.roll(1)", updates=22),
    row("condition|optimizer|gradient|network", FLOW_CALL, "model(x, s * 1000, label * 0 + CLASSES)", updates=22),
    # ---- target
    row("target", TARGET, "velocity = x0 - noise"),
    row("target", TARGET, "velocity = noise - 0.5 * x0"),
    row("target", *ZERO_LAST, TARGET, "velocity = x0 - noise"),
    row("target", *CIRCLE, TARGET, "velocity = angle.sin() * x0 - angle.cos() * noise"),
    row("target", ERROR, "error = (model(x, s * 1000, label) - x).square()"),
    row("target", TARGET, "velocity = noise + x0"),
    # ---- weight
    row("weight|target", ERROR, "error = (model(x, s * 1000, label) - x0).square() / (1 - share) ** 2"),
    row("weight", "error.mean() / ROUNDS", "error.mean() / ROUNDS * 8", missed=FACTOR),
    # ---- gradient
    row("gradient", BACKWARD, "optimizer.zero_grad(); (error.mean() / ROUNDS).backward()"),
    row("gradient|weight", BACKWARD, "error.mean().backward()", missed=FACTOR),
    row(
        "gradient|learning_rate|optimizer|weight",
        BACKWARD,
        "(error.mean() / ROUNDS).backward(); torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)",
    ),
    row(
        "gradient|optimizer",
        "optimizer = torch.optim.SGD(model.parameters()",
        "optimizer = torch.optim.SGD(list(model.parameters())[2:]",
    ),
    row("gradient", "    optimizer.zero_grad()\n", "    if step % 2: optimizer.zero_grad()\n"),
    # ---- optimizer
    row("optimizer|learning_rate", "lr=1e-2", "lr=30.0"),
    # ---- ema
    row("ema", STEP, "average.update_parameters(model); optimizer.step()\n", " average.update_parameters(model)\n", " pass\n"),
    row("ema", " average.update_parameters(model)\n", " pass\n", updates=22),
    row("ema", "get_ema_multi_avg_fn(0.98)", "get_ema_multi_avg_fn(1.0)", updates=22),
    # ---- nothing is wrong
    row("", DRAWN, "torch.rand(len(x0))"),
    row("", TARGET, "velocity = x0 - noise", FLOW_CALL, "model(x, (1 - s) * 1000, label)"),
    row("", TARGET, "velocity = noise"),
    row("", ERROR, "error = (model(x, s * 1000, label) - x0).square() / share ** 2"),
    row("", BATCH, BATCH + "\norder = torch.randperm(len(x0))\nx0, label = x0[order], label[order]", updates=22),
    row("", BATCH, BATCH + "\nx0 = x0 * 0.9", updates=22),
    row("", LOADER, LOADER.replace("labels", "labels % 1"), updates=22),
    row("", "share * noise", "(share * 0.95 + 0.05) * noise", TARGET, "velocity = 0.95 * noise - x0"),
    row("", *CIRCLE, TARGET, "velocity = angle.cos() * noise - angle.sin() * x0"),
    row("", *CIRCLE, TARGET, "velocity = 1.5707963 * (angle.cos() * noise - angle.sin() * x0)"),
    row("", SIZES, "ROUNDS, CLASSES = 1, 6", updates=22),
    row(
        "",
        BACKWARD,
        "losses.append(error.mean() / ROUNDS)",
        ROUND,
        "losses = []\n" + ROUND,
        STEP,
        "sum(losses).backward()\noptimizer.step()\n",
    ),
    row("", ERROR, "error = (model(x, s * 1000, label) - velocity).abs()"),
    row("", FLOW_CALL, "model(x, s, label)"),
]

CONTROL_LOOP = [
    row("target", "hint)) - noise", "hint)) - noise.roll(1, 0)"),
    # ---- condition
    row("condition", "hint)) - noise", "hint[:1].expand_as(hint))) - noise", updates=22),
    row("condition", "control(t, label, hint)", "control(t, label * 0, hint)", updates=22),
    row("condition|data", "hint = x0.amin(1, keepdim=True)", "hint = x0.amin(1, keepdim=True).roll(1, 0)", updates=22),
    # ---- nothing is wrong
    row("", "hint = x0.amin(1, keepdim=True)", "hint = x0.amax(1, keepdim=True)", updates=22),
]

CLOSURE_LOOP = [
    row("noise", "torch.randn_like(x0)", "0.5 * torch.randn_like(x0)"),
    # ---- input
    row("input|timestep", "(1 - a).sqrt()", "(1 - a)"),
    # ---- condition
    row("condition", "torch.cat([small, noised], dim=1)", "torch.cat([x0, noised], dim=1)"),
    # ---- gradient
    row("gradient", "optimizer.zero_grad()\n    loss", "loss"),
    # ---- ema
    row("ema", "decay * self.shadow[name]", "(1 - decay) * self.shadow[name]"),
]

ADAPTER_LOOP = [
    # ---- timestep
    row("timestep", "noise, t)", "noise, t.flip(0))"),
    # ---- weight
    row("weight", "clamp(max=5)", "clamp(min=5)"),
    # ---- gradient
    row("gradient", "optimizer.zero_grad()\n", ""),
    # ---- optimizer
    row("optimizer", "AdamW(adapters.parameters()", "AdamW(adapters[:2].parameters()"),
    row("optimizer", "AdamW(adapters.parameters()", "AdamW(model.parameters()"),
    # ---- ema
    row("ema", "lerp_(p, 0.01)", "lerp_(p, -0.01)"),
    # ---- nothing is wrong
    row("", "clamp(max=5)", "clamp(max=2)"),
]


SCHEDULE = '"squaredcos_cap_v2"'
EMA_STEP = "ema.step(model.parameters())"
ACCELERATED = [
    row("input", "scheduler.add_noise(clean, noise, timesteps)", "scheduler.add_noise(noise, clean, timesteps)"),
    row("timestep", "model(noisy, timesteps)", "model(noisy, timesteps.roll(1))"),
    row("target", "get_velocity(clean, noise,", "get_velocity(noise, clean,"),
    row("gradient", "with accelerator.accumulate(model):", "if True:", updates=22),
    row(
        "gradient",
        "if accelerator.sync_gradients:\n    accelerator.clip_grad_norm_",
        "if True:\n    accelerator.clip_grad_norm_",
    ),
    row("learning_rate", "num_training_steps=args.steps", "num_training_steps=args.steps * 20", updates=30),
    row("learning_rate", "num_training_steps=args.steps", "num_training_steps=args.steps // 2", updates=30),
    row("ema", "accelerator.backward(loss)", "accelerator.backward(loss); " + EMA_STEP),
    row("ema", "EMAModel(model.parameters(),", "EMAModel(iter(list(model.parameters())[:0]),", updates=22),
    row("ema", "use_ema_warmup=True", "use_ema_warmup=True, min_decay=1.0", updates=22),
    row("state", EMA_STEP, EMA_STEP + "\nif step == 2: ema.copy_to(model.parameters())", updates=9),
    # ---- nothing is wrong
    row("", SCHEDULE, '"linear"'),
    row("", SCHEDULE, '"sigmoid"'),
    row("", SCHEDULE, '"scaled_linear", rescale_betas_zero_snr=True'),
    row("", EMA_STEP, EMA_STEP + "; ema.store(model.parameters()); ema.restore(model.parameters())", updates=9),
]

ROWS = {
    "plain_ddpm.py": PLAIN_DDPM,
    "accelerated.py": ACCELERATED,
    "edm_loop.py": EDM_LOOP,
    "flow_loop.py": FLOW_LOOP,
    "control_loop.py": CONTROL_LOOP,
    "closure_loop.py": CLOSURE_LOOP,
    "adapter_loop.py": ADAPTER_LOOP,
}
