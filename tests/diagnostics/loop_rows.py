"""Rows as in ddpm_rows.py, for the other loops of tests/watched: what these loops have, and plain_ddpm.py has not."""

from ddpm_rows import PLAIN_DDPM, options, row

SIGMA = "sigma = (torch.randn(len(y)) * 1.2 - 1.2).exp()"
WEIGHT = "weight = (sigma**2 + SIGMA_DATA**2) / (sigma * SIGMA_DATA) ** 2"
EDM_LOOP = [
    row("timestep", "* noise, sigma)", "* noise, sigma.roll(1))"),
    row("timestep", *options(P_mean=1.2, P_std=1.2), updates=60),
    row("input", "y + sigma[:, None, None, None] * noise, sigma)", "y + sigma[:, None, None, None].square() * noise, sigma)"),
    row("input|network", "c_in * x", "x"),
    row(
        *("input|timestep", SIGMA, "sigma = (torch.randn(len(y)) * 1.2 - 9.2).exp()"),
        updates=22,
        missed="noise that is lost in the rounding of the images",
    ),
    row("network|target", "s * SIGMA_DATA / total.sqrt()", "s * SIGMA_DATA / total"),
    row("weight", WEIGHT, "weight = (sigma**2 + SIGMA_DATA**2) / (sigma * SIGMA_DATA)"),
    # ---- nothing is wrong
    row("", "c_noise = sigma.log() / 4", "c_noise = sigma"),
    row("", *options(P_mean=-1.2, P_std=1.2), updates=60),
    row("", "(denoised - y) ** 2", "(denoised - y).abs()"),
    row("", SIGMA, "sigma = 0.002 * 40000 ** torch.rand(len(y))", updates=22),
]

LOADER = "DataLoader(TensorDataset(images, labels), batch_size=8, shuffle=True)"
SIZES, ROUND, STEP = "ROUNDS, CLASSES = 2, 6", "for _ in range(ROUNDS):", "optimizer.step()\n"
DRAWN, TARGET, CALL = "torch.sigmoid(torch.randn(len(x0)))", "velocity = noise - x0", "model(x, s * 1000, label)"
ERROR, BACKWARD = "error = (model(x, s * 1000, label) - velocity).square()", "(error.mean() / ROUNDS).backward()"
MADE = "model = Network(classes=CLASSES)"
ZERO_LAST = (MADE, MADE + "\nfor p in model.last.parameters(): torch.nn.init.zeros_(p)")
CIRCLE = (
    *("share = s[:, None, None, None]", "angle = s[:, None, None, None] * 1.5707963"),
    *("(1 - share) * x0 + share * noise", "angle.cos() * x0 + angle.sin() * noise"),
)
RESEEDED = (
    *(LOADER, LOADER.replace("shuffle=True", "shuffle=True, generator=generator")),
    *("endless(loader):\n    while True:", "endless(loader):\n    while True:\n        generator.manual_seed(0)"),
    *(SIZES, SIZES + "\ngenerator = torch.Generator()"),
)
SUMMED = (
    *(BACKWARD, "losses.append(error.mean() / ROUNDS)", ROUND, "losses = []\n" + ROUND),
    *(STEP, "sum(losses).backward()\noptimizer.step()\n"),
)
FLOW_LOOP = [
    row("data", LOADER, LOADER.replace("shuffle=True", "sampler=torch.utils.data.SequentialSampler(range(64))"), updates=30),
    row("data", *RESEEDED, updates=30),
    row("timestep", DRAWN, "torch.rand(len(x0)) * 1.8 - 0.5"),
    row("input", "(1 - share) * x0", "(1 - share).sqrt() * x0"),
    row("target", TARGET, "velocity = x0 - noise", missed="the sign is chosen together with the sampler's"),
    row("target", *ZERO_LAST, TARGET, "velocity = 2 * noise - x0"),
    row("target", *CIRCLE, TARGET, "velocity = angle.sin() * x0 - angle.cos() * noise"),
    row("weight|target", ERROR, "error = (model(x, s * 1000, label) - x0).square() / (1 - share) ** 2"),
    row("gradient|weight", BACKWARD, "error.mean().backward()", missed="a factor of the whole loss may be meant"),
    # ---- nothing is wrong
    row("", DRAWN, "torch.rand(len(x0))"),
    row("", DRAWN, "torch.randint(0, 4, (len(x0),)) / 4", updates=8),
    row("", TARGET, "velocity = x0 - noise", CALL, "model(x, (1 - s) * 1000, label)"),
    row("", TARGET, "velocity = noise"),
    row("", ERROR, "error = (model(x, s * 1000, label) - x0).square() / share ** 2"),
    row("", "share * noise", "(share * 0.95 + 0.05) * noise", TARGET, "velocity = 0.95 * noise - x0"),
    row("", *CIRCLE, TARGET, "velocity = 1.5707963 * (angle.cos() * noise - angle.sin() * x0)"),
    row("", *SUMMED),
]

CLOSURE_LOOP = [
    row("condition", "torch.cat([small, noised], dim=1)", "torch.cat([x0, noised], dim=1)"),
    row("ema", "decay * self.shadow[name]", "(1 - decay) * self.shadow[name]"),
]

ADAPTER_LOOP = [
    row("weight", "clamp(max=5)", "clamp(min=5)"),
    row("optimizer", "AdamW(adapters.parameters()", "AdamW(adapters[:2].parameters()"),
    row("optimizer", "AdamW(adapters.parameters()", "AdamW(model.parameters()"),
    row("", "clamp(max=5)", "clamp(max=2)"),
]

SYNCED, EMA_STEP = "if accelerator.sync_gradients:\n    accelerator.clip_grad_norm_", "ema.step(model.parameters())"
ACCELERATED = [
    row("target", "get_velocity(clean, noise,", "get_velocity(noise, clean,"),
    row("gradient", "with accelerator.accumulate(model):", "if True:", updates=22),
    row("gradient", SYNCED, SYNCED.replace("accelerator.sync_gradients", "True")),
    row("learning_rate", "num_training_steps=args.steps", "num_training_steps=args.steps * 20", updates=30),
    row("ema", "accelerator.backward(loss)", "accelerator.backward(loss); " + EMA_STEP),
    row("ema", "EMAModel(model.parameters(),", "EMAModel(iter(list(model.parameters())[:0]),", updates=22),
    row("state", EMA_STEP, EMA_STEP + "\nif step == 2: ema.copy_to(model.parameters())", updates=9),
    # ---- nothing is wrong
    row("", '"squaredcos_cap_v2"', '"scaled_linear", rescale_betas_zero_snr=True'),
    row("", EMA_STEP, EMA_STEP + "; ema.store(model.parameters()); ema.restore(model.parameters())", updates=9),
]

ROWS = {
    "plain_ddpm.py": PLAIN_DDPM,
    "accelerated.py": ACCELERATED,
    "edm_loop.py": EDM_LOOP,
    "flow_loop.py": FLOW_LOOP,
    "closure_loop.py": CLOSURE_LOOP,
    "adapter_loop.py": ADAPTER_LOOP,
}
