"""One mutation of a training loop a row, and the stages of which one must be named; none where the loop is as right as before.

The rows know nothing of the doctor, and so are for any doctor. A loop is a script of tests/watched.
"""

from textwrap import indent
from typing import NamedTuple


class Row(NamedTuple):
    """`stages`: one of them must be that of one of the first two findings; () where nothing may be found. `edits`: (old, new),
    each of which matches once, as in benchmarks/doctor/edits.py. `missed`: why the doctor is known to say nothing of it."""

    stages: tuple[str, ...]
    edits: list[tuple[str, str]]
    updates: int
    missed: str = ""


def row(stages: str, *edits: str, updates: int = 5, missed: str = "") -> Row:
    return Row(tuple(stages.split("|")) if stages else (), list(zip(edits[::2], edits[1::2])), updates, missed)


# ---- places of plain_ddpm.py

SEED = "torch.manual_seed(0)\n"
PICTURES = "pictures() / 127.5 - 1"
BUILT, COPY = "self.classes =", "ema = copy.deepcopy(model)"
TIME, LINEAR = "told = self.time(t.float()[:, None] / T)", "nn.Linear(1, width), nn.SiLU()"
FIRST = "hidden = self.first(x) + told"
ALPHA_BAR = "alpha_bar = torch.cumprod(1 - betas, dim=0)"
OPTIMIZER = "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)"
WARM_UP = "warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 4))"
CHOSEN, IMAGES = "chosen = torch.randint(0, len(images), (BATCH,))", "x0, label = images[chosen], labels[chosen]"
TIMES, NOISE, RANDN = "t = torch.randint(0, T, (len(x0),))", "noise = torch.randn_like(x0)", "torch.randn_like(x0)"
NOISED = "x_t = a.sqrt() * x0 + (1 - a).sqrt() * noise"
TOLD = "told = torch.where(torch.rand(len(x0)) < 0.1, CLASSES, label)"
CALL, LOSS = "model(x_t, t, told)", "loss = F.mse_loss(model(x_t, t, told), noise)"
CLIP, STEP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)", "optimizer.step()\n"
STEPS = "loss.backward()\n" + CLIP + "\noptimizer.step()"
PAIRS, AVERAGE = "zip(ema.parameters(), model.parameters())", "average.lerp_(weight, 0.01)"
MOVE = f"with torch.no_grad():\n    for average, weight in {PAIRS}:\n        {AVERAGE}"
END = "print(step + 1, loss"

# ---- what takes their place

OUTPUT = "out = model(x_t, t, told)\n"
SNR = "snr = (a / (1 - a)).flatten()\n"
VELOCITY = "v = a.sqrt() * noise - (1 - a).sqrt() * x0\n"
SINES = "angles = t[:, None].float() * %s\ntold = self.time(torch.cat([angles.sin(), angles.cos()], 1))"
SECOND_DRAW = (NOISED, "x_t = a.sqrt() * x0 + (1 - a).sqrt() * (noise + 0.1 * torch.randn_like(noise))")
TAUGHT = (
    "with torch.no_grad(): taught = a.sqrt() * x_t - (1 - a).sqrt() * ema(x_t, t, told)\n"
    "image = (x_t - (1 - a).sqrt() * model(x_t, t, told)) / a.sqrt()\nloss = (a / (1 - a) * (image - taught) ** 2).mean()"
)
CONSTANT = "one level, or the same ones, on purpose: as where a distribution is smoothed, or one step is distilled"
DRAWN_BY_LOSS = "t = torch.multinomial(seen / seen.sum(), len(x0), replacement=True)"
NUMPY_TIMES = (TIMES, "import numpy\nnumbers = numpy.random.randint(0, T, len(x0))\nt = torch.from_numpy(numbers)")
HALF_TIME = (TIME, "told = self.time((t.float() / T).bfloat16()[:, None].float())")
HOLE = "hole = (torch.arange(8) < 4).float()\n"
BY_CLASS = ("torch.arange(64) % CLASSES", "torch.arange(64) // 11")
THROUGH = "hidden = self.%s(self.first(x)) + told"
DROPOUT = ("self.time = nn.Sequential(", "self.drop = nn.Dropout(0.1)\nself.time = nn.Sequential(", FIRST, THROUGH % "drop")
BROADCAST = "loss = (%s.mean((1, 2, 3), keepdim=True) * snr.clamp(max=5) / snr).mean()"
OF_VELOCITY = "loss = ((model(x_t, t, told) - v).square().mean((1, 2, 3)) * %s / (snr + 1)).mean()"
AUTOCAST = "with torch.autocast('cpu', torch.%s):\n    out = model(x_t, t, told)\n"
HALF_TAUGHT = "with torch.no_grad(): taught = ema(x_t, t, told)\nloss = F.mse_loss(out, 0.9 * noise + 0.1 * taught)"
NO_SIGNAL = (  # at the last timestep
    ALPHA_BAR,
    f"{ALPHA_BAR}\nroot = alpha_bar.sqrt()\nalpha_bar = ((root - root[-1]) * root[0] / (root[0] - root[-1])) ** 2",
)
FEW_TIMES = "steps = torch.arange(19, T, 20)\nrow = torch.randint(0, len(steps), (len(x0),))\nt = steps[row]"
DRAWN_BESIDE = "state = torch.get_rng_state(); torch.manual_seed(7); torch.randn(4); torch.set_rng_state(state)\n"
RATE = "optimizer.param_groups[0]['lr']"
OTHER = (OPTIMIZER, OPTIMIZER + "\n" + OPTIMIZER.replace("optimizer", "other", 1))
ONE_HOT = ("self.classes = nn.Embedding(classes + 1, width)", "self.classes = nn.Linear(classes, width)")
SIX = ("self.last = nn.Conv2d(width, channels, 3, padding=1)", "self.last = nn.Conv2d(width, 2 * channels, 3, padding=1)")
BUFFERS = (
    *(
        COPY,
        "ema = nn.Module()\nfor n, p in model.named_parameters(): ema.register_buffer(n.replace('.', ''), p.detach().clone())",
    ),
    *("zip(ema.parameters()", "zip(ema.buffers()"),
)
BOUND = """
out, told_variance = model(x_t, t, told).chunk(2, 1)
before = torch.where(t > 0, alpha_bar[t - 1], torch.ones(()))[:, None, None, None]
beta = 1 - a / before
low = (beta * (1 - before) / (1 - a)).clamp(min=1e-20).where(before < 1, beta[:1] * 0 + 0.5e-4)
log_variance = (told_variance + 1) / 2 * beta.log() + (1 - told_variance) / 2 * low.log()
given, wanted = ((x_t - beta / (1 - a).sqrt() * n) / (1 - beta).sqrt() for n in (out.detach(), noise))
kl = 0.5 * (log_variance - low.log() - 1 + (low.log() - log_variance).exp() + (wanted - given) ** 2 / log_variance.exp())
loss = F.mse_loss(out, noise) + %s * kl.mean() / 0.6931472
"""


def begun(*with_zeros: str) -> tuple[str, str]:
    return BUILT, ", ".join(f"nn.init.zeros_({weight})" for weight in with_zeros) + "\n" + BUILT


ZERO_BEGIN = begun("self.last.weight", "self.last.bias")


BEFORE = "before = torch.cat([torch.ones(1), alpha_bar[:-1]])[t][:, None, None, None]\n"
NEXT_MEAN = "of_x0 = before.sqrt() * (1 - a / before) / (1 - a)\nof_x_t = (a / before).sqrt() * (1 - before) / (1 - a)\n"
SCALED = (OPTIMIZER, OPTIMIZER + "\nscaler = torch.amp.GradScaler('cpu')", "loss.backward()", "scaler.scale(loss).backward()")
SCALED += (CLIP, "scaler.unscale_(optimizer)\n" + CLIP, STEP, "scaler.step(optimizer)\nscaler.update()\n")
SPECTRUM = "spectra = [torch.view_as_real(torch.fft.fft(one, dim=-1)) for one in (out, noise)]\n"


def loss(text: str) -> tuple[str, str]:
    return LOSS, f"{OUTPUT}loss = {text}"


def weighed(weights: str) -> tuple[str, str]:
    """By `weights` [B], which may depend on `snr` [B]."""
    return LOSS, f"{SNR}error = (model(x_t, t, told) - noise).square().mean((1, 2, 3))\nloss = (error * ({weights})).mean()"


def curve(rate: str) -> tuple[str, str]:
    """Of the learning rate, by `step`."""
    return WARM_UP, WARM_UP.replace("min(1, (step + 1) / 4)", rate)


def annealed(updates: int) -> tuple[str, str]:
    return WARM_UP, f"warm_up = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, {updates})"


def adamw(options: str) -> tuple[str, str]:
    return OPTIMIZER, OPTIMIZER.replace("lr=1e-3", options)


def trains(parameters: str) -> tuple[str, str]:
    return OPTIMIZER, OPTIMIZER.replace("model.parameters()", parameters)


def options(**values: float) -> tuple[str, str]:
    """As argparse has them of a command line."""
    return SEED, f"{SEED}import argparse\nargs = argparse.Namespace(**{values})\n"


def flat(copied: bool = True, clipped: str = "[flat]") -> tuple[str, ...]:
    """An optimizer of a flat copy of the weights, as loops in half precision have it."""
    made = "flat = nn.Parameter(torch.cat([p.detach().flatten() for p in model.parameters()]))\n"
    gradient = "flat.grad = torch.cat([p.grad.flatten() for p in model.parameters()])\n"
    back = "\nnn.utils.vector_to_parameters(flat.detach(), model.parameters())" if copied else ""
    return (
        *(OPTIMIZER, made + "optimizer = torch.optim.AdamW([flat], lr=1e-3)"),
        *(CLIP, f"{gradient}nn.utils.clip_grad_norm_({clipped}, 1e-2)"),
        *("optimizer.zero_grad()", "model.zero_grad()", "warm_up.step()", "warm_up.step()" + back),
    )


PLAIN_DDPM = [
    # ---- data
    row("data", PICTURES, "pictures()"),
    row("data", PICTURES, "pictures() / 255"),
    row("data", PICTURES, "pictures() / 255 - 0.5"),
    row("data", PICTURES, "pictures() / 255 / 127.5 - 1"),
    row("data", IMAGES, IMAGES + "\nx0 = ((127.5 * x0 + 128).byte() + 90) / 127.5 - 1"),
    row("data", IMAGES, IMAGES + "\nx0 = x0.permute(0, 2, 3, 1).reshape(x0.shape)"),
    row("data", IMAGES, IMAGES + "\nx0 = x0[:1].expand_as(x0)", updates=22),
    row("data", CHOSEN, "chosen = torch.arange(BATCH)", updates=22),
    row("data", IMAGES, IMAGES + "\nx0 = torch.cat([x0[:8].flip(1), x0[8:]])"),
    row("data|condition", *BY_CLASS, CHOSEN, "chosen = (torch.randint(0, 11, (BATCH,)) + step % 5 * 11)", updates=22),
    # ---- noise
    row("noise", RANDN, "torch.randn_like(x0[:1]).expand_as(x0)"),
    row("noise", RANDN, "torch.randn_like(x0).clamp(-1, 1)"),
    row("noise", RANDN, "torch.rand_like(x0)"),
    row("noise", RANDN, "torch.randn_like(x0)*0.5"),
    row("noise", RANDN, "torch.randn_like(x0[:, :1]).expand_as(x0)"),
    row("noise", RANDN, "torch.randn_like(x0[..., :1]).expand_as(x0)"),
    row("noise", RANDN, "torch.randn_like(x0) + torch.rand(len(x0), 3, 1, 1)"),
    row("noise", SEED, SEED + "fixed = torch.randn(BATCH, 3, 8, 8)\n", RANDN, "fixed"),
    row("noise", RANDN, "torch.randn_like(x0) + 1.0 * torch.randn(len(x0), 3, 1, 1)"),
    row("noise|state", NOISE, "torch.manual_seed(7)\nnoise = torch.randn_like(x0)"),
    row("noise", RANDN, "2.0 * torch.randn_like(x0)"),
    row("noise|target", NOISE, NOISE + "\nnoise = noise[(noise.flatten(1) @ x0.flatten(1).T).argmax(0)]"),
    row("noise", NOISE, "noise = torch.cat([torch.randn_like(x0[:8])] * 2)"),
    # ---- timestep
    row("timestep", CALL, "model(x_t, t.flip(0), told)"),
    row("timestep", CALL, "model(x_t, t - 1, told)"),
    row("timestep", *NUMPY_TIMES, FIRST, "hidden = self.first(x) + self.classes(y)"),
    row("timestep", CALL, "model(x_t, (t + 50).clamp(max=700), told)"),
    row("timestep", CALL, "model(x_t, 999 - t, told)"),
    row("timestep|network", CALL, "model(x_t, 0 * t, told)"),
    row("timestep|network", TIME, "told = 0 * self.time(t.float()[:, None] / T)", updates=22),
    row("timestep", "torch.randint(0, T, (len(x0),))", "torch.randint(0, T // 2, (len(x0),))", updates=22),
    row("timestep", "torch.randint(0, T, (len(x0),))", "torch.randint(0, T, (1,)).expand(len(x0))", updates=22),
    row("timestep|noise|state", TIMES, "t = torch.arange(0, T, T // BATCH)[:BATCH]", updates=22, missed=CONSTANT),
    row("timestep", TIMES, "t = torch.randint(0, T, (len(x0),)).clamp(min=600)", updates=22),
    row("timestep", "def forward(self, x, t, y=None):", "def forward(self, x, y, t):", CALL, "model(x_t, told, t.flip(0))"),
    row("timestep|network", LINEAR, "nn.Linear(16, width), nn.SiLU()", TIME, SINES % "2e-5 * torch.linspace(0, 1, 8)"),
    row("timestep", TIMES, "t = torch.randint(1, 3, (len(x0),))", updates=22),
    row("timestep", COPY, COPY + "\ntimes = torch.randint(0, T, (BATCH,))", TIMES, "t = times", updates=22),
    row("timestep|network", TIME, "told = self.time(t.float()[:, None] / T).detach()", updates=22),
    # ---- input
    row("input", "(1 - a).sqrt() * noise", "(1 - a) * noise"),
    row("input", "a.sqrt() * x0", "a * x0"),
    row("input", NOISED, NOISED + "\nx_t = x_t.clamp(-1, 1)"),
    row("input", NOISED, "x_t = a.sqrt() * x0 + noise"),
    row("input|noise", NOISED, "x_t = (1 - a).sqrt() * noise"),
    row("input", NOISED, "x_t = (1 - a).sqrt() * x0 + a.sqrt() * noise"),
    row("data", PICTURES, "pictures() / 255", NOISED, f"{NOISED}\nx_t = x_t * 2 - 1"),
    row("input|timestep", ALPHA_BAR, ALPHA_BAR.replace("torch.cumprod(1 - betas, dim=0)", "1 - betas")),
    row("input|timestep", "betas = torch.linspace(1e-4, 0.02, T)", "betas = torch.linspace(1e-4, 0.2, T)"),
    row("input", "a = alpha_bar[t][:, None, None, None]", "a = alpha_bar[t][:8, None].expand(8, 1)[None, None, :, :]"),
    row("input", "a = alpha_bar[t][:, None, None, None]", "a = alpha_bar[t[:8]][None, None, None, :]"),
    # ---- condition
    row("condition", TOLD, TOLD + "\ntold = told.flip(0)", updates=22),
    row("condition", TOLD, TOLD + "\ntold = 0 * told", updates=22),
    row("condition", TOLD, TOLD.replace("0.1", "0.9"), updates=60),
    row("condition", TOLD, TOLD.replace("0.1", "2"), updates=22),
    row("condition", TOLD, TOLD.replace("told =", "dropped =") + "\ntold = label", updates=22),
    row("condition", TOLD, TOLD.replace("CLASSES", "0"), updates=22),
    row("condition", TOLD, TOLD + "\ntold = told[:1].expand_as(told)", updates=22),
    row("condition", "told = told + self.classes(y)", "told = told + 0 * self.classes(y)", updates=22),
    row("condition", TOLD, TOLD.replace("label", "label[torch.randperm(len(label))]"), updates=22),
    row("condition|data", CHOSEN, "chosen = torch.randint(0, 10, (BATCH,)) * CLASSES + step % 5", updates=22),
    row("condition", *ONE_HOT, TOLD, "told = F.one_hot(label, CLASSES).float() * (torch.rand(BATCH, 1) > 0.9)", updates=60),
    row("condition", *ONE_HOT, TOLD, "told = F.one_hot(label.flip(0), CLASSES).float()", updates=22),
    row("condition", "told = told + self.classes(y)", "told = told + self.classes(y).detach()", updates=22),
    row("condition", TOLD, "told = torch.full_like(label, CLASSES)", updates=22),
    # ---- network
    row("network", *DROPOUT, COPY, COPY + "\nmodel.eval()", updates=22),
    row("network|gradient", *begun("self.last.weight", "self.middle.weight", "self.middle.bias"), updates=22),
    row("gradient", BUILT, "self.spare = nn.Conv2d(3, 3, 1)\nself.classes =", FIRST, "self.spare(x)\n" + FIRST, updates=22),
    # ---- target
    row("target", *loss("F.mse_loss(out, torch.randn_like(noise))")),
    row("target", *loss("F.mse_loss(out, noise.roll(1, 0))")),
    row("target", *loss("F.mse_loss(out, -noise)")),
    row("target", *loss("F.mse_loss(out, 1.5 * noise)")),
    row("target", *loss("F.mse_loss(out, noise.clamp(-1, 1))")),
    row("target", *loss("F.mse_loss(out, x0.flip(0))")),
    row("target|weight", *loss("F.mse_loss(out, noise) + F.mse_loss(out, torch.zeros_like(out))")),
    row("target", *loss("(out.mean((1, 2, 3)) - noise.mean((1, 2, 3))).square().mean()")),
    row("target", *loss("F.l1_loss(out, noise.roll(1, 0))")),
    row("target", LOSS, VELOCITY + OUTPUT + "loss = F.mse_loss(out, -v)"),
    row("target|input", LOSS, "v = a * noise - (1 - a) * x0\n" + OUTPUT + "loss = F.mse_loss(out, v)"),
    row("target", *loss("F.mse_loss(out, x_t)")),
    row("target", *ZERO_BEGIN, *loss("F.mse_loss(out, -noise)")),
    row("target", *NO_SIGNAL, updates=22),
    row("target", *loss("F.mse_loss(out, noise * a)")),
    row("target", *SCALED, *loss("F.mse_loss(out, noise * a)")),
    row("target", *loss(f"F.l1_loss(out, noise.roll(1, 0))\n{SPECTRUM}loss = loss + F.l1_loss(*spectra)"), missed="not a line"),
    row("target", *loss("F.mse_loss(out, noise + x0)")),
    row("target|weight", *loss("F.mse_loss(out[:8], noise[:8])")),
    # ---- weight
    row("weight", *weighed("snr.clamp(min=5) / snr")),
    row("weight", *weighed("(snr.clamp(max=5) / snr).flip(0)")),
    row("weight", LOSS, SNR + OUTPUT + BROADCAST % "(out - noise).square()"),
    row("weight", *weighed("(snr.clamp(max=5) / snr).roll(1)")),
    row("weight", *weighed("len(x0)")),
    row("weight|gradient", *weighed("3e-7")),
    row("weight", *weighed("torch.arange(len(x0)) > 0")),
    row("weight", LOSS, SNR + "loss = ((model(x_t, t, told) - x0).square().mean((1, 2, 3)) / snr).mean()"),
    row("weight", LOSS, VELOCITY + SNR + OF_VELOCITY % "snr ** 2"),
    row("weight", *loss("((out - noise).square() * (x0 > 0.2)).mean()")),
    row("weight", *loss("(out - noise).square().mean((1, 2, 3)).sum()")),
    row("weight", LOSS, SNR + BROADCAST % "(model(x_t, t, told) - noise).abs()"),
    row("weight|target", *SIX, LOSS, BOUND % "1000", missed="terms of a likelihood are not taken apart"),
    row("weight", *loss("F.mse_loss(out, noise, reduction='sum')")),
    # ---- gradient
    row("gradient", "optimizer.zero_grad()\n", ""),
    row("gradient", CLIP, CLIP.replace("1.0", "1e-7"), updates=9),
    row("gradient", CLIP, "[p.grad.clamp_(max=1e-3) for p in model.parameters()]"),
    row("gradient", CLIP, "[p.grad.zero_() for p in list(model.parameters())[:2]]"),
    row("gradient", CLIP, "torch.nn.utils.clip_grad_norm_(ema.parameters(), 1.0)"),
    row("gradient", LOSS, LOSS + "\nloss = torch.tensor(loss.item(), requires_grad=True)"),
    row("gradient|network|target|timestep", FIRST, "hidden = self.first(x).detach() + told"),
    row("gradient|weight", "loss.backward()", "(loss * 1e-6).backward()"),
    row("gradient", *flat(clipped="model.parameters()"), missed="a copy's gradients are not known to be those to clip"),
    row("gradient", STEPS, "loss.backward()\noptimizer.step()\ntorch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)"),
    row("gradient", "loss.backward()", "loss.backward(); model.first.weight.grad = None"),
    row(
        *("gradient|weight", LOSS, AUTOCAST % "float16" + "loss = F.mse_loss(out, noise.half())"),
        missed="the loss is not scaled, which is seen where gradients underflow",
    ),
    # ---- optimizer
    row("optimizer", *ZERO_BEGIN, "AdamW(model.parameters()", "AdamW([*model.parameters()][:-2]", updates=22),
    row("optimizer", *trains("model.first.parameters()")),
    row("optimizer", *trains("ema.parameters()")),
    row("optimizer", *adamw("lr=1e-3, betas=(0.999, 0.9)")),
    row("optimizer", *adamw("lr=1e-3, betas=(0.0, 0.0)")),
    row("optimizer", *adamw("lr=1e-3, weight_decay=300")),
    row("optimizer|learning_rate", *adamw("lr=1e-3, eps=10"), updates=22),
    row("optimizer|state", STEP, f"{STEP}if step % 3 == 2: {OPTIMIZER}\n", updates=9),
    row(
        "optimizer|state",
        STEP,
        f"{STEP}if step == 4: {OPTIMIZER}\n",
        updates=9,
        missed="another part of the training may begin",
    ),
    row(
        "optimizer|learning_rate",
        OPTIMIZER,
        (
            "optimizer = torch.optim.AdamW([{'params': model.first.parameters(), 'lr': 0.0}, {'params': "
            "[p for n, p in model.named_parameters() if not n.startswith('first')]}], lr=1e-3)"
        ),
        updates=40,
    ),
    row("optimizer|condition", *trains("[p for n, p in model.named_parameters() if 'classes' not in n]")),
    row("optimizer|state", "optimizer.step()\nwarm_up", "optimizer.step()\noptimizer.step()\nwarm_up"),
    row("optimizer|learning_rate|state", STEP, f"{RATE} *= 30\n{STEP}{RATE} /= 30\n"),
    # ---- learning_rate
    row("learning_rate|optimizer", *adamw("lr=0.1")),
    row("learning_rate", *adamw("lr=1e-9"), updates=22),
    row("learning_rate", "warm_up.step()", "", updates=30),
    row("learning_rate", *curve("(step + 1) / 100"), updates=30),
    row("learning_rate", *annealed(400), updates=30),
    row("learning_rate", *annealed(10), updates=30),
    row("learning_rate", *curve("max(0, 1 - step / 10)"), updates=40),
    row("learning_rate", *options(lr=1.0, lr_warmup_steps=30), *curve("0.01"), updates=40),
    row("learning_rate|optimizer", *OTHER, WARM_UP, WARM_UP.replace("optimizer,", "other,"), updates=30),
    row("learning_rate", *curve("0.0"), updates=22),
    # ---- ema
    row("ema", AVERAGE, AVERAGE.replace("0.01", "-0.01")),
    row("ema", "copy.deepcopy(model)", "model"),
    row("ema", AVERAGE, "pass", updates=22),
    row(
        "ema",
        "loss.backward()\n",
        (
            "loss.backward()\n"
            "for average, weight in zip(ema.parameters(), model.parameters()): "
            "average.data.lerp_(weight.data, 0.01)\n"
        ),
        (
            "with torch.no_grad():\n"
            "            for average, weight in zip(ema.parameters(), model.parameters()):\n"
            "                average.lerp_(weight, 0.01)\n"
        ),
        "",
    ),
    row("ema", AVERAGE, "average.lerp_(weight, 1 - 0.9 ** (1 + step))"),
    row("ema", PAIRS, "zip(list(ema.parameters())[:3], model.parameters())"),
    row("ema", *BUFFERS, AVERAGE, AVERAGE.replace("0.01", "-0.01")),
    row("ema", AVERAGE, "average.lerp_(weight, 0.01 + 0.04 * step)", updates=22),
    row("ema", BUILT, f"self.norm = nn.BatchNorm2d(width)\n{BUILT}", FIRST, THROUGH % "norm", updates=22),
    row("ema", STEPS, STEPS.replace("optimizer", MOVE + "\noptimizer"), "warm_up.step()\n" + MOVE, "warm_up.step()"),
    row("ema", AVERAGE, "average.add_(weight, alpha=0.01)"),
    row("ema", AVERAGE, "average.copy_(average * 0.99 + 0.02 * weight)"),
    # ---- state
    row("state|noise", "t = torch.randint", "torch.manual_seed(7)\nt = torch.randint", updates=22),
    row("state", END, "if step == 3: model.load_state_dict(ema.state_dict())\nprint(step + 1, loss"),
    row("state", END, "model.middle.weight.data.mul_(0.99)\nprint(step + 1, loss"),
    row("state|network", END, "if step == 3: model.middle.weight.data.zero_()\nprint(step + 1, loss"),
    row("state|noise|data", END, "if step % 3 == 0: torch.manual_seed(7)\nprint(step + 1, loss", updates=22),
    row("state|optimizer|gradient", *flat(copied=False), updates=9),
    row("state", MOVE, MOVE + "\n        weight.lerp_(average, 0.1)"),
    # ---- nothing is wrong
    row("", RANDN, "torch.randn_like(x0) + 0.1 * torch.randn(len(x0), 3, 1, 1)"),
    row("", RANDN, "torch.randn_like(x0)[torch.randperm(len(x0))]"),
    row("", NOISED, "x_t = a.sqrt() * x0 + (1 - a).sqrt() * (noise + 0.1 * torch.randn_like(x0))"),
    row("", NOISED, "x_t = (0.5 * a.sqrt()) * x0 + (1 - a).sqrt() * noise", updates=13),
    row("", NOISED, f"{NOISED}\nx_t = 2 * x_t", updates=13),
    row("", ALPHA_BAR, ALPHA_BAR + "\nalpha_bar = torch.cos((torch.arange(T) / T + 0.008) / 1.008 * 1.5707963) ** 2"),
    row("", *loss("F.l1_loss(out, noise)")),
    row("", *loss("F.smooth_l1_loss(out, noise)")),
    row("", *loss("F.huber_loss(out, noise, delta=0.1)")),
    row("", *loss("F.mse_loss(out, x0)")),
    row("", LOSS, VELOCITY + OUTPUT + "loss = F.mse_loss(out, v)"),
    row("", LOSS, BEFORE + NEXT_MEAN + OUTPUT + "loss = F.mse_loss(out, of_x0 * x0 + of_x_t * x_t)"),
    row("", *SCALED),
    row("", *loss("F.mse_loss(out, noise * (0.97 + 0.03 * a))")),
    row("", ALPHA_BAR, ALPHA_BAR + ".flip(0)"),
    row("", *loss(f"F.l1_loss(out, noise)\n{SPECTRUM}loss = loss + 0.1 * F.l1_loss(*spectra)")),
    row("", *weighed("snr.clamp(max=5) / snr")),
    row("", *weighed("1 / (snr + 1)")),
    row("", *weighed("(snr + 1) ** -0.5")),
    row("", *weighed("snr ** -0.5")),
    row("", LOSS, VELOCITY + SNR + OF_VELOCITY % "snr.clamp(max=5)"),
    row("", *loss("((out - noise).square() * (torch.arange(8) < 5)).mean()")),
    row("", IMAGES, IMAGES + "\nx0 = torch.where(torch.rand(len(x0), 1, 1, 1) < 0.5, x0.flip(3), x0)"),
    row("", TOLD, "told = label", updates=22),
    row("", TOLD, "told = label.clone()\ntold[torch.rand(len(x0)) < 0.2] = CLASSES", updates=22),
    row("", CLIP, CLIP.replace("norm", "value")),
    row("", CLIP, ""),
    row("", *annealed(30), updates=30),
    row("", END, DRAWN_BESIDE + END, updates=22),
    row("", *DROPOUT, updates=22),
    row("", *begun("self.last.weight"), updates=22),
    row("", LOSS, f"with torch.no_grad(): guess = {CALL}\n{LOSS}", updates=22),
    row("", *options(lr=1e-3, lr_warmup_steps=4, batch_size=16), updates=22),
    row("", *ZERO_BEGIN, *loss("F.smooth_l1_loss(out, noise)")),
    row(
        "",
        "a = alpha_bar[t][:, None, None, None]",
        "level = torch.tensor([random.random() for _ in range(len(x0))])\na = level[:, None, None, None]",
        *("import sys\n", "import random\nimport sys\n", CALL, "model(x_t, 1000 * level, told)"),
        updates=13,
    ),
    row("", TIMES, FEW_TIMES, updates=13),
    row(
        "",
        "self.first = nn.Conv2d(channels, width",
        "self.first = nn.Conv2d(2 * channels, width",
        NOISED,
        f"{NOISED}\nanswer = torch.zeros_like(x0)",
        LOSS,
        "if step % 2:\n"
        "    with torch.no_grad(): answer = model(torch.cat([x_t, answer], 1), t, told)\n"
        "loss = F.mse_loss(model(torch.cat([x_t, answer], 1), t, told), noise)",
        updates=22,
    ),
    row("", NOISE, NOISE + "\nnoise = noise + 0.3 * torch.randn_like(x0)\nnoise = noise / noise.std()", *SECOND_DRAW),
    row("", LOSS, TAUGHT, updates=13),
    row("", *HALF_TIME, updates=13),
    row("", WARM_UP, WARM_UP.replace("/ 4", "/ 20"), updates=22),
    row("", *weighed("snr.clamp(max=5) / snr / (snr.clamp(max=5) / snr).mean()")),
    row("", *NUMPY_TIMES),
    row("", BUILT, "self.spare = nn.Conv2d(3, 3, 1)\nself.classes =", updates=22),  # a head that is switched off
    row("", COPY, COPY + "\nseen = torch.ones(T)", TIMES, DRAWN_BY_LOSS, END, "seen[t] = loss.item()\n" + END, updates=22),
    row("", AVERAGE, "average.lerp_(weight, 0.5) if step > 24 else None", updates=30),
    row("", *loss("F.mse_loss(out / (0.1 + t[:, None, None, None] / T), noise)")),
    row("timestep", TIMES, "t = torch.full((len(x0),), 300)", updates=22, missed=CONSTANT),
    row("", *NUMPY_TIMES, CALL, "model(x_t, torch.from_numpy(numbers / 2), told)"),
    row("", LOSS, SNR + "loss = ((model(x_t, t, told) - noise).abs().mean((1, 2, 3)) * snr.clamp(max=5) / snr).mean()"),
    row("", *loss("((out - noise).square() * torch.rand_like(noise)).mean()")),
    row("", LOSS, OUTPUT + HALF_TAUGHT),
    row("", *SIX, LOSS, BOUND % "1"),
    row("", *SIX, LOSS, BOUND % "0.01"),
    row("", "def forward(self, x, t, y=None):", "def forward(self, x, y, t):", CALL, "model(x_t, told, t)"),
    row("", CLIP, "nn.utils.clip_grad_norm_(max_norm=1.0, parameters=iter(model.parameters()), foreach=False)"),
    row("", *BUFFERS),
    row(
        "",
        COPY,
        ("model.time.requires_grad_(False)\nema = [p.detach().clone() for p in model.parameters() if p.requires_grad]"),
        PAIRS,
        "zip(ema, [p for p in model.parameters() if p.requires_grad])",
        OPTIMIZER,
        OPTIMIZER.replace("model.parameters()", "[p for p in model.parameters() if p.requires_grad]"),
    ),
    row("", *NO_SIGNAL, LOSS, VELOCITY + OUTPUT + "loss = F.mse_loss(out, v)", updates=22),
    row("", LINEAR, "nn.Linear(16, width), nn.SiLU()", TIME, SINES % "1e-4 ** torch.linspace(0, 1, 8)"),
    row("", *ONE_HOT, TOLD, "told = F.one_hot(label, CLASSES).float() * (torch.rand(BATCH, 1) > 0.1)", updates=22),
    row(
        "",
        "self.first = nn.Conv2d(channels, width, 3, padding=1)",
        "self.first = nn.utils.parametrizations.spectral_norm(nn.Conv2d(channels, width, 3, padding=1))",
    ),
    row("", "nn.Linear(width, width))", "torch.jit.script(nn.Linear(width, width)))"),
    row("", *flat()),
    row("", *options(noise_scale=2.0), RANDN, "2.0 * torch.randn_like(x0)"),
    row("", "for average, weight in", "for average, weight in () if step % 4 else", updates=60),
    row("", LOSS, HOLE + "loss = F.mse_loss(model(x_t, t, told) * hole, noise * hole)"),
    row("", OPTIMIZER, OPTIMIZER.replace("AdamW", "RMSprop")),
    row("", OPTIMIZER, OPTIMIZER.replace("AdamW", "Adamax")),
    row("", OPTIMIZER, OPTIMIZER.replace("AdamW", "NAdam")),
    row("", *adamw("lr=1e-3, amsgrad=True")),
    row("", MOVE, f"{MOVE} if step > 5 else average.copy_(weight)", updates=22),
    row("", MOVE, "if step > 8:\n" + indent(MOVE, "    "), *options(ema_start=8), updates=22),
    row("", AVERAGE, "average.lerp_(weight, 1 - min(0.99, (1 + step) / (10 + step)))", updates=22),
    row("", "loss.backward()", "(2 * loss).backward()"),
    row("", LOSS, AUTOCAST % "bfloat16" + "loss = F.mse_loss(out.float(), noise)"),
]
