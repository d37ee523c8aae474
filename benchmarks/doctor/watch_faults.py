"""Faults of training scripts that are not ours, each an edit of a script in foreign/, and the stage that it changes.

`python diagnose.py --watch` is asked about them by watch.py. They were written down, with the stages expected of each, before
the watcher stood and without a look at it. The number before `source` is that of our list of public threads in which people
reported the fault. Several stages: each of them would be right.

Of that list these cannot be seen in a loop from outside, and are not in the table:

- 19, 20, 48 (the same augmentation in each epoch, the order of the data after a resume, rotated images): of the data a watcher
  knows the range and the moments, not the files.
- 21 (optimizer or EMA not restored): the second run is like a first one that starts from given weights.
- 26-30 in part (a wrong decode), 35 in part (conditioning in sampling), 44, 46 (keys not loaded, another scheduler in the
  export): they are faults of sampling and of what is exported, not of the loop.

Two can be seen only by who knows what the command line was meant to do. They are in the table as `unfair`, and watch.py counts
them apart: 4 (no EMA made), 10 (accumulation silently off).

`train_unconditional.py` is diffusers' example. It is not shipped here: watch.py gets its path from `--unconditional`.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.doctor.trials import Edit

HAND, UNCONDITIONAL, EDM, FLOW = "ddpm_by_hand.py", "unconditional.py", "edm.py", "rectified_flow.py"
LATENTS, MODULE, AMP, NETWORKS = "text_to_latents.py", "diffusion_module.py", "mixed_precision.py", "networks.py"
PUBLIC = "train_unconditional.py"  # as of diffusers 0.40 to 0.42
SCRIPTS = (HAND, UNCONDITIONAL, EDM, FLOW, LATENTS, MODULE, AMP, PUBLIC)
OURS = "ours"


@dataclass(frozen=True)
class WatchFault:
    script: str
    stages: tuple[str, ...]
    edits: tuple[Edit, ...]
    source: str = OURS
    flags: dict = field(default_factory=dict)  # over those of the script's usual run
    processes: int = 1
    unfair: bool = False


WATCH_FAULTS: dict[str, WatchFault] = {}


def fault(name: str, script: str, stages: str, *edits: tuple[str, ...], **options) -> None:
    """Notes a fault; `stages` with commas; an edit is (old, new) of the script, or (file, old, new)."""
    key = f"{script.removesuffix('.py')}: {name}"
    if key in WATCH_FAULTS:
        raise ValueError(f"two faults of the name {key!r}")
    made = tuple(Edit(*edit) if len(edit) == 3 else Edit(script, *edit) for edit in edits)
    WATCH_FAULTS[key] = WatchFault(script, tuple(stages.split(", ")), made, **options)


def read_faults(file: Path) -> None:
    """Notes those of a JSON list, of which each has a name, script, stages, edits, and perhaps flags, processes, unfair."""
    for one in json.loads(file.read_text()):
        more = {key: one[key] for key in ("flags", "processes", "unfair") if key in one}
        fault(one["name"], one["script"], ", ".join(one["stages"]), *map(tuple, one["edits"]), **more)


TWICE = {"gradient_accumulation_steps": 2}
HAND_TWICE = {"accumulate": 2}
V_BY_HAND = {"prediction": "v"}
HALF = {"dtype": "fp16", "steps": 16}  # slow on a CPU

# ---- data

VAE = "26-30: diffusers 8887, 5166; MONAI 212; Open-Sora 493"
SCALED = "                latents = (latents - vae.config.shift_factor) * vae.config.scaling_factor\n"

RANGE = "34: lucidrains 20"
fault("pixels from 0 to 255", HAND, "data", (".float() / 127.5 - 1", ".float()"), source=RANGE)
fault(
    "pixels from 0 to 255",
    UNCONDITIONAL,
    "data",
    (".float() / 255\n", ".float()\n"),
    ("    images = (images - 0.5) / 0.5\n", ""),
    source=RANGE,
)
fault("pixels from 0 to 255", FLOW, "data", (".div(255).sub(0.5).mul(2)", ".float()"), source=RANGE)
fault(
    "pixels from 0 to 255",
    PUBLIC,
    "data",
    (
        "            transforms.ToTensor(),\n            transforms.Normalize([0.5], [0.5]),\n",
        "            transforms.PILToTensor(),\n            transforms.Lambda(lambda x: x.float()),\n",
    ),
    source=RANGE,
)
fault("pixels from 0 to 1", EDM, "data", (".to(torch.float32) / 127.5 - 1", ".to(torch.float32) / 255"))
fault("pixels from 0 to 1", MODULE, "data", ("        img = img * 2 - 1\n", ""))
fault("pixels from 0 to 1", AMP, "data", ("(pictures - 127.5) / 127.5", "pictures / 255"))
fault("latents not scaled", LATENTS, "data", (SCALED, ""), source=VAE)
fault("latents scaled twice", LATENTS, "data", (SCALED, SCALED + SCALED), source=VAE)
fault(
    "latents divided by the scale",
    LATENTS,
    "data",
    (") * vae.config.scaling_factor", ") / vae.config.scaling_factor"),
    source=VAE,
)
fault("shift of the latents forgotten", LATENTS, "data", ("(latents - vae.config.shift_factor)", "latents"), source=VAE)

# ---- noise

fault("uniform noise", HAND, "noise", ("torch.randn_like(x0)", "torch.rand_like(x0)"))
fault("uniform noise", MODULE, "noise", ("torch.randn_like(x_start)", "torch.rand_like(x_start)"))
fault("noise of half the strength", LATENTS, "noise", ("torch.randn_like(latents)", "0.5 * torch.randn_like(latents)"))
fault("noise of half the strength", AMP, "noise", ("torch.randn_like(images)", "0.5 * torch.randn_like(images)"))
fault(
    "one noise for the whole batch",
    UNCONDITIONAL,
    "noise",
    ("torch.randn(clean_images.shape)", "torch.randn(clean_images.shape[1:]).expand(clean_images.shape)"),
)
fault(
    "one noise for the whole batch", EDM, "noise", ("torch.randn_like(images) * sigma", "torch.randn_like(images[:1]) * sigma")
)
fault(
    "the same noise in each update",
    PUBLIC,
    "noise",
    (
        "torch.randn(clean_images.shape, dtype=weight_dtype, device=clean_images.device)",
        "torch.randn(clean_images.shape, dtype=weight_dtype, generator=torch.Generator().manual_seed(0))",
    ),
)
fault(
    "the same noise in each update",
    HAND,
    "noise",
    ("torch.randn_like(x0)", "torch.randn(x0.shape, generator=torch.Generator().manual_seed(0))"),
)
fault("one noise for all channels", FLOW, "noise", ("torch.randn_like(x0)", "torch.randn_like(x0[:, :1]).expand_as(x0)"))
fault(
    "one noise for all channels",
    MODULE,
    "noise",
    ("torch.randn_like(x_start)", "torch.randn_like(x_start[:, :1]).expand_as(x_start)"),
)

# ---- timestep

LATE = "40: ai-toolkit 947, musubi 1035"
fault("late timesteps alone", HAND, "timestep", ("torch.randint(0, T,", "torch.randint(T // 2, T,"), source=LATE)
fault(
    "late timesteps alone",
    PUBLIC,
    "timestep",
    (
        "                0, noise_scheduler.config.num_train_timesteps, (bsz,)",
        "                noise_scheduler.config.num_train_timesteps // 2, noise_scheduler.config.num_train_timesteps, (bsz,)",
    ),
    source=LATE,
)
fault(
    "the first tenth of the timesteps alone",
    LATENTS,
    "timestep",
    ("num_train_timesteps, (bsz,)", "num_train_timesteps // 10, (bsz,)"),
)
fault(
    "one timestep for the whole batch",
    UNCONDITIONAL,
    "timestep",
    ("(len(clean_images),)).long()", "(1,)).long().repeat(len(clean_images))"),
)
fault("one timestep for the whole batch", AMP, "timestep", ("torch.rand(len(images))", "torch.rand(1).repeat(len(images))"))
fault(
    "one noise level for the whole batch",
    EDM,
    "timestep",
    ("torch.randn([images.shape[0], 1, 1, 1]", "torch.randn([1, 1, 1, 1]"),
)
fault(
    "the network is told other timesteps",
    MODULE,
    "timestep, input",
    ("output = self.model(x, t, classes)", "output = self.model(x, torch.randint_like(t, self.num_timesteps), classes)"),
    source=LATE,
)
fault(
    "the network is told other timesteps",
    FLOW,
    "timestep, input",
    ("net(x_t, t, y)", "net(x_t, sample_times(len(x0), args.times), y)"),
    source=LATE,
)
fault(
    "timesteps of the next image",
    PUBLIC,
    "timestep, input",
    ("model(noisy_images, timesteps)", "model(noisy_images, timesteps.roll(1))"),
)
fault(
    "timesteps always zero for the network",
    UNCONDITIONAL,
    "timestep, input",
    ("model(noisy_images, timesteps)", "model(noisy_images, torch.zeros_like(timesteps))"),
)
fault("timesteps counted from the other end", HAND, "timestep, input", ("model(x_t, t)", "model(x_t, T - 1 - t)"))
ROUNDED = "37: diffusers 9004"
fault(
    "timesteps rounded to bfloat16",
    PUBLIC,
    "timestep, input",
    ("model(noisy_images, timesteps)", "model(noisy_images, timesteps.to(torch.bfloat16))"),
    source=ROUNDED,
)
fault(
    "timesteps rounded to bfloat16",
    LATENTS,
    "timestep, input",
    ("unet(noisy_latents, timesteps,", "unet(noisy_latents, timesteps.to(torch.bfloat16),"),
    source=ROUNDED,
)

# ---- input

Q_SAMPLE = "extract(sqrt_ab, t) * x0 + extract(sqrt_one_minus_ab, t) * noise\n\n\ndef target_of"
ADD_NOISE = "noise_scheduler.add_noise(clean_images, noise, timesteps)"
MODULE_MIX = "self.at(self.sqrt_alphas_cumprod, t) * x_start + self.at(self.sqrt_one_minus_alphas_cumprod, t) * noise"

fault(
    "square roots missing",
    HAND,
    "input, target",
    (Q_SAMPLE, "extract(sqrt_ab, t) ** 2 * x0 + extract(sqrt_one_minus_ab, t) ** 2 * noise\n\n\ndef target_of"),
    flags=V_BY_HAND,
)
fault(
    "square roots missing",
    UNCONDITIONAL,
    "input",
    (
        f"noisy_images = {ADD_NOISE}\n",
        "share = noise_scheduler.alphas_cumprod[timesteps].view(-1, 1, 1, 1)\n"
        "            noisy_images = share * clean_images + (1 - share) * noise\n",
    ),
)
for script in (PUBLIC, UNCONDITIONAL):
    fault(
        "noise added twice",
        script,
        "input",
        (ADD_NOISE, f"{ADD_NOISE[:-1].replace('clean_images', ADD_NOISE)})"),
    )
WHOLE = "36: diffusers 3658"
for script in (PUBLIC, UNCONDITIONAL):
    fault(
        "the network sees the noise, not the noised image",
        script,
        "input",
        ("model(noisy_images, timesteps)", "model(noise, timesteps)"),
        source=WHOLE,
    )
fault("the network sees the noise, not the noised image", HAND, "input", ("model(x_t, t)", "model(noise, t)"), source=WHOLE)
fault("the network sees the clean image", AMP, "input", ("model(noisy, t * 1000)", "model(images, t * 1000)"))
fault(
    "the network sees the clean latents",
    LATENTS,
    "input",
    ("unet(noisy_latents, timesteps,", "unet(latents, timesteps,"),
)
for script in (PUBLIC, UNCONDITIONAL):
    fault(
        "noise added in bfloat16",
        script,
        "input",
        (ADD_NOISE, "noise_scheduler.add_noise(clean_images.bfloat16(), noise.bfloat16(), timesteps).float()"),
        source=ROUNDED,
    )
fault(
    "noise added in bfloat16",
    AMP,
    "input",
    (
        "noisy = alpha * images + sigma * noise\n",
        "noisy = ((alpha * images).bfloat16() + (sigma * noise).bfloat16()).float()\n",
    ),
    source=ROUNDED,
)
BEFORE = "35: imagen-pytorch 160"
fault(
    "noise added before the images are normalized",
    MODULE,
    "input, data",
    ("        img = img * 2 - 1\n", ""),
    ("x = self.q_sample(x_start, t, noise)\n", "x = self.q_sample(x_start, t, noise) * 2 - 1\n"),
    source=BEFORE,
)
fault(
    "noise added before the images are normalized",
    HAND,
    "input, data",
    (".float() / 127.5 - 1", ".float() / 255"),
    ("        x_t = q_sample(x0, t, noise)\n", "        x_t = q_sample(x0, t, noise) * 2 - 1\n"),
    source=BEFORE,
)
FIRST = "33: MONAI 8427"
fault(
    "no noise at the first timestep",
    HAND,
    "input, timestep, noise",
    (
        "alphas_cumprod = torch.cumprod(1 - betas, dim=0)\n",
        "alphas_cumprod = torch.cumprod(1 - betas, dim=0)\n"
        "alphas_cumprod = torch.cat([torch.ones(1, dtype=torch.float64), alphas_cumprod[:-1]])\n",
    ),
    flags={"schedule": "cosine", "timesteps": 50, "sample_every": 0},
    source=FIRST,
)
fault(
    "no noise at the first timestep",
    UNCONDITIONAL,
    "input, timestep, noise",
    ("    optimizer = torch.optim.AdamW(", "    noise_scheduler.alphas_cumprod[0] = 1.0\n    optimizer = torch.optim.AdamW("),
    flags={"num_train_timesteps": 50},
    source=FIRST,
)
fault(
    "noised latents scaled once more",
    LATENTS,
    "input",
    ("noise_scheduler.add_noise(latents, noise, timesteps)", "noise_scheduler.add_noise(latents, noise, timesteps) * 0.7"),
)
fault("c_in missing", EDM, "input", ("self.model(c_in * x,", "self.model(x,"))
fault(
    "a path with square roots, the target of the straight one",
    FLOW,
    "target, input",
    ("x_t = (1 - s) * x0 + s * noise", "x_t = (1 - s).sqrt() * x0 + s.sqrt() * noise"),
    source="39: CellFlow 305, splitmeanflow 2",
)

# ---- target

ENDS = "39: CellFlow 305, splitmeanflow 2"
fault("the target has other noise", FLOW, "target", ("(noise - x0)) ** 2", "(torch.randn_like(x0) - x0)) ** 2"), source=ENDS)
fault("the target has other images", FLOW, "target", ("(noise - x0)) ** 2", "(noise - x0.flip(0))) ** 2"), source=ENDS)
fault("the target has other noise", HAND, "target", ("target_of(x0, t, noise))", "target_of(x0, t, torch.randn_like(noise)))"))
fault("the target has other noise", PUBLIC, "target", ("noise.float())  # this", "torch.randn_like(noise))  # this"))
fault(
    "v with the wrong sign",
    HAND,
    "target",
    ("* noise - extract(sqrt_one_minus_ab, t) * x0", "* noise + extract(sqrt_one_minus_ab, t) * x0"),
    flags=V_BY_HAND,
)
fault(
    "v with the wrong sign",
    MODULE,
    "target",
    (
        "* noise - self.at(self.sqrt_one_minus_alphas_cumprod, t) * x_start",
        "* noise + self.at(self.sqrt_one_minus_alphas_cumprod, t) * x_start",
    ),
)
fault("the image in place of the noise", UNCONDITIONAL, "target", ("target = noise\n", "target = clean_images\n"))
fault("the image in place of the noise", PUBLIC, "target", ("noise.float())  # this", "clean_images.float())  # this"))
fault("the image in place of the noise", LATENTS, "target", ("target = noise\n", "target = latents\n"))
fault(
    "velocity of exchanged arguments",
    LATENTS,
    "target",
    ("get_velocity(latents, noise, timesteps)", "get_velocity(noise, latents, timesteps)"),
    flags={"prediction_type": "v_prediction"},
)
fault(
    "velocity of exchanged arguments",
    UNCONDITIONAL,
    "target",
    ("get_velocity(clean_images, noise, timesteps)", "get_velocity(noise, clean_images, timesteps)"),
    flags={"prediction_type": "v_prediction"},
)
fault("the noised image as target", AMP, "target", ("output.float(), noise)", "output.float(), noisy)"))
fault("c_skip and c_out exchanged", EDM, "target, network, input", ("c_skip * x + c_out * F_x", "c_out * x + c_skip * F_x"))
fault("the noise in place of the image", EDM, "target", ("(D_yn - images) ** 2", "(D_yn - n) ** 2"))

# ---- weight

SUMMED = "32: physicsnemo 576, 659"
fault(
    "losses summed",
    HAND,
    "weight",
    ("F.mse_loss(output, target)", 'F.mse_loss(output, target, reduction="sum")'),
    source=SUMMED,
)
fault("losses summed", FLOW, "weight", ("- x0)) ** 2).mean()", "- x0)) ** 2).sum()"), source=SUMMED)
fault("losses summed", MODULE, "weight", (".flatten(1).mean(dim=1)", ".flatten(1).sum(dim=1)"), source=SUMMED)
fault("losses summed", PUBLIC, "weight", ("noise.float())  # this", 'noise.float(), reduction="sum")  # this'), source=SUMMED)
AS_MAX = "23: lucidrains recurrent-interface 11"
GAMMA = {"snr_gamma": 5.0}
fault("min-SNR as a maximum", UNCONDITIONAL, "weight", ("torch.minimum(snr,", "torch.maximum(snr,"), flags=GAMMA, source=AS_MAX)
fault("min-SNR as a maximum", LATENTS, "weight", (".min(dim=1)[0]", ".max(dim=1)[0]"), flags=GAMMA, source=AS_MAX)
fault(
    "min-SNR as a maximum",
    MODULE,
    "weight",
    ("snr.clamp(max=gamma)", "snr.clamp(min=gamma)"),
    flags={"min_snr": True},
    source=AS_MAX,
)
fault(
    "SNR weights upside down",
    PUBLIC,
    "weight",
    ("snr_weights = alpha_t / (1 - alpha_t)", "snr_weights = (1 - alpha_t) / alpha_t"),
    flags={"prediction_type": "sample"},
)
fault(
    "weights times losses make a square",
    UNCONDITIONAL,
    "weight",
    ("(loss.mean(dim=[1, 2, 3]) * weights)", "(loss.mean(dim=[1, 2, 3]) * weights[:, None])"),
    flags=GAMMA,
)
fault(
    "weights times losses make a square",
    MODULE,
    "weight",
    ("loss * self.loss_weight[t])", "loss * self.loss_weight[t][:, None])"),
    flags={"min_snr": True},
)
fault(
    "weights of the next image",
    UNCONDITIONAL,
    "weight",
    ("compute_snr(noise_scheduler, timesteps)", "compute_snr(noise_scheduler, timesteps.roll(1))"),
    flags=GAMMA,
)
fault(
    "weights of the next image",
    LATENTS,
    "weight",
    ("compute_snr(noise_scheduler, timesteps)", "compute_snr(noise_scheduler, timesteps.roll(1))"),
    flags=GAMMA,
)
fault(
    "weights of noise for velocity",
    LATENTS,
    "weight",
    ("mse_loss_weights / (snr + 1)", "mse_loss_weights / snr"),
    flags={"prediction_type": "v_prediction", **GAMMA},
    source="ours, after diffusers 5106",
)
fault("weight without the square", EDM, "weight", ("(sigma * self.sigma_data) ** 2", "(sigma * self.sigma_data)"))
fault("no weight at all", EDM, "weight", ("return weight * ((D_yn", "return ((D_yn"))
fault(
    "divided by the micro steps twice",
    UNCONDITIONAL,
    "weight, gradient",
    ("accelerator.backward(loss)", "accelerator.backward(loss / args.gradient_accumulation_steps)"),
    flags=TWICE,
)
fault(
    "not divided by the micro steps",
    HAND,
    "weight, gradient",
    ("(loss / args.accumulate).backward()", "loss.backward()"),
    flags={"accumulate": 4},
)

# ---- gradient

EVERY_MICRO_STEP = "12: diffusers 721, accelerate 641"
for script, old in (
    (UNCONDITIONAL, "                if accelerator.sync_gradients:\n                    accelerator.clip_grad_norm_("),
    (PUBLIC, "                if accelerator.sync_gradients:\n                    accelerator.clip_grad_norm_("),
):
    fault(
        "clipped at every micro step",
        script,
        "gradient",
        (old, old.replace("accelerator.sync_gradients", "True")),
        flags=TWICE,
        source=EVERY_MICRO_STEP,
    )
HAND_CLIP = "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
HAND_BACKWARD = "        (loss / args.accumulate).backward()\n"
fault(
    "clipped at every micro step",
    HAND,
    "gradient",
    (HAND_CLIP, ""),
    (HAND_BACKWARD, f"{HAND_BACKWARD}        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n"),
    flags={"accumulate": 3},
    source=EVERY_MICRO_STEP,
)
SCALED_CLIP = "13: waifu-diffusion 64"
fault(
    "scaled gradients clipped",
    AMP,
    "gradient",
    ("            scaler.unscale_(optimizer)\n", ""),
    flags=HALF,
    source=SCALED_CLIP,
)
fault(
    "scaled gradients clipped",
    MODULE,
    "gradient",
    ("            self.scaler.unscale_(self.opt)\n", ""),
    flags={"amp": "fp16", "steps": 16},
    source=SCALED_CLIP,
)
fault("gradients never cleared", HAND, "gradient", ("    optimizer.zero_grad()\n", ""))
fault("gradients never cleared", FLOW, "gradient", ("        opt.zero_grad()\n", ""))
fault("gradients never cleared", PUBLIC, "gradient", ("                optimizer.zero_grad()\n", ""))
fault(
    "gradients cleared at every micro step",
    HAND,
    "gradient",
    (HAND_BACKWARD, f"        optimizer.zero_grad()\n{HAND_BACKWARD}"),
    flags=HAND_TWICE,
)
fault(
    "gradients cleared at every micro step",
    MODULE,
    "gradient",
    (
        "                self.scaler.scale(loss).backward()\n",
        "                self.opt.zero_grad()\n                self.scaler.scale(loss).backward()\n",
    ),
    flags=HAND_TWICE,
)
FLOW_CLIP = "        torch.nn.utils.clip_grad_norm_(net.parameters(), args.clip)\n        opt.step()\n"
fault("clipped after the step", FLOW, "gradient", (FLOW_CLIP, "".join(reversed(FLOW_CLIP.splitlines(keepends=True)))))
UNCONDITIONAL_CLIP = (
    "                    accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)\n"
    "                optimizer.step()\n"
)
fault(
    "clipped after the step",
    UNCONDITIONAL,
    "gradient",
    (
        UNCONDITIONAL_CLIP,
        "                    optimizer.step()\n"
        "                    accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)\n",
    ),
)
DETACHED = (NETWORKS, "torch.cat([h, h1], dim=1)", "torch.cat([h.detach(), h1], dim=1)")
fault("half of the network gets no gradient", HAND, "gradient, network", DETACHED)
fault("half of the network gets no gradient", AMP, "gradient, network", DETACHED)
fault(
    "checkpoints cut the gradient off",
    FLOW,
    "gradient, network, optimizer",
    (NETWORKS, "use_reentrant=False", "use_reentrant=True"),
    (
        "    net.checkpointing = args.checkpointing\n",
        "    net.checkpointing = args.checkpointing\n"
        "    net.places.requires_grad_(False)\n"
        "    for part in (net.embed, net.time, net.labels):\n"
        "        part.requires_grad_(False)\n",
    ),
    flags={"checkpointing": True},
    source="42: lora 26, kohya 91",
)
fault(
    "checkpoints cut the gradient off",
    UNCONDITIONAL,
    "gradient, network, optimizer",
    (
        "model(noisy_images, timesteps).sample",
        "torch.utils.checkpoint.checkpoint(lambda *x: model(*x).sample, noisy_images, timesteps, use_reentrant=True)",
    ),
    ("accelerator.backward(loss)", "accelerator.backward(loss.requires_grad_())"),
    ("import torch\n", "import torch\nimport torch.utils.checkpoint\n"),
    source="42: lora 26, kohya 91",
)
fault(
    "backward of a detached output",
    LATENTS,
    "gradient, network",
    (
        'F.mse_loss(model_pred.float(), target.float(), reduction="mean")',
        'F.mse_loss(model_pred.detach().float(), target.float(), reduction="mean") + 0 * model_pred.sum()',
    ),
)

# ---- optimizer

fault(
    "half of the parameters in the optimizer",
    HAND,
    "optimizer",
    ("Adam(model.parameters()", "Adam(list(model.parameters())[::2]"),
)
fault(
    "half of the parameters in the optimizer",
    UNCONDITIONAL,
    "optimizer",
    ("AdamW(model.parameters()", "AdamW(list(model.parameters())[::2]"),
)
fault("no biases in the optimizer", FLOW, "optimizer", (', {"params": others, "weight_decay": 0.0}]', "]"))
fault(
    "the optimizer has the parameters of a copy",
    HAND,
    "optimizer, gradient",
    ("Adam(model.parameters()", "Adam(copy.deepcopy(model).parameters()"),
)
fault(
    "the optimizer has the parameters of a copy",
    AMP,
    "optimizer, gradient",
    ("AdamW(raw_model.parameters()", "AdamW(ema.module.parameters()"),
)
fault(
    "the optimizer's state cleared at each update",
    EDM,
    "optimizer",
    (
        "        optimizer.zero_grad(set_to_none=True)\n",
        "        optimizer.zero_grad(set_to_none=True)\n        optimizer.state.clear()\n",
    ),
)
fault(
    "the optimizer's state cleared at each update",
    FLOW,
    "optimizer",
    ("        opt.zero_grad()\n", "        opt.zero_grad()\n        opt.state.clear()\n"),
)
fault("stepped twice", HAND, "optimizer", ("    optimizer.step()\n", "    optimizer.step()\n    optimizer.step()\n"))
fault("stepped twice", FLOW, "optimizer", ("        opt.step()\n", "        opt.step()\n        opt.step()\n"))

# ---- learning rate

MICRO_RATE = "14: diffusers 3954, 8384, 8312"
fault(
    "schedule stepped at every micro step",
    AMP,
    "learning_rate",
    ("            lr_scheduler.step()\n", ""),
    ("            micro += 1\n", "            micro += 1\n            lr_scheduler.step()\n"),
    flags=HAND_TWICE,
    source=MICRO_RATE,
)
fault(
    "length of the schedule not times the processes",
    UNCONDITIONAL,
    "learning_rate",
    ("num_training_steps=args.steps * accelerator.num_processes", "num_training_steps=args.steps"),
    processes=2,
    source=MICRO_RATE,
)
fault("schedule far too long", AMP, "learning_rate", ("T_max=args.steps,", "T_max=args.steps * 8,"), source=MICRO_RATE)
fault(
    "schedule far too long",
    PUBLIC,
    "learning_rate",
    ("(len(train_dataloader) * args.num_epochs)", "(len(dataset) * args.num_epochs)"),
    source=MICRO_RATE,
)
fault("schedule never stepped", UNCONDITIONAL, "learning_rate", ("                lr_scheduler.step()\n", ""))
fault("schedule never stepped", FLOW, "learning_rate", ("        sched.step()\n", ""))
fault("schedule never stepped", AMP, "learning_rate", ("            lr_scheduler.step()\n", ""))
fault(
    "warm-up without an end",
    UNCONDITIONAL,
    "learning_rate",
    ("num_warmup_steps=args.lr_warmup_steps *", "num_warmup_steps=100 * args.lr_warmup_steps *"),
)
fault(
    "warm-up without an end", EDM, "learning_rate", ("min((step + 1) / rampup_steps, 1)", "max((step + 1) / rampup_steps, 0)")
)

# ---- ema

NEVER = "3: diffusers 5783, 7048"
fault("average never updated", HAND, "ema", ("    update_ema(ema_model, model, args.ema_decay)\n", ""), source=NEVER)
fault(
    "average never updated",
    UNCONDITIONAL,
    "ema",
    ("                    ema_model.step(model.parameters())\n", "                    pass\n"),
    source=NEVER,
)
fault("average never updated", EDM, "ema", ("        ema.update(net.parameters(), step)\n", ""), source=NEVER)
fault("average never updated", MODULE, "ema", ("            self.ema.update()\n", ""), source=NEVER)
fault("average never updated", AMP, "ema", ("            ema.update_parameters(raw_model)\n", ""), source=NEVER)
fault(
    "average never updated",
    PUBLIC,
    "ema",
    ("                    ema_model.step(model.parameters())\n", "                    pass\n"),
    source=NEVER,
)
fault("decay and rest exchanged", HAND, "ema", ("mul_(decay).add_(p, alpha=1 - decay)", "mul_(1 - decay).add_(p, alpha=decay)"))
fault("decay and rest exchanged", EDM, "ema", ("s.copy_(p.detach().lerp(s, beta))", "s.copy_(s.lerp(p.detach(), beta))"))
fault("decay and rest exchanged", FLOW, "ema", ("lerp_(value, 1 - args.ema)", "lerp_(value, args.ema)"))
MICRO_EMA = "7: F5-TTS 631"
fault(
    "average updated at every micro step",
    UNCONDITIONAL,
    "ema",
    (
        "            if accelerator.sync_gradients:\n"
        "                if args.use_ema:\n"
        "                    ema_model.step(model.parameters())\n",
        "            if args.use_ema:\n"
        "                ema_model.step(model.parameters())\n"
        "            if accelerator.sync_gradients:\n",
    ),
    flags=TWICE,
    source=MICRO_EMA,
)
fault(
    "average updated at every micro step",
    PUBLIC,
    "ema",
    (
        "            if accelerator.sync_gradients:\n"
        "                if args.use_ema:\n"
        "                    ema_model.step(model.parameters())\n",
        "            if args.use_ema:\n"
        "                ema_model.step(model.parameters())\n"
        "            if accelerator.sync_gradients:\n",
    ),
    flags=TWICE,
    source=MICRO_EMA,
)
fault(
    "average updated at every micro step",
    HAND,
    "ema",
    ("    update_ema(ema_model, model, args.ema_decay)\n", ""),
    (HAND_BACKWARD, f"{HAND_BACKWARD}        update_ema(ema_model, model, args.ema_decay)\n"),
    flags=HAND_TWICE,
    source=MICRO_EMA,
)
fault(
    "average updated at every micro step",
    AMP,
    "ema",
    ("            ema.update_parameters(raw_model)\n", ""),
    ("            micro += 1\n", "            micro += 1\n            ema.update_parameters(raw_model)\n"),
    flags=HAND_TWICE,
    source=MICRO_EMA,
)
ALONE = "2: diffusers 1895, 1930"
fault(
    "average not updated on several processes",
    UNCONDITIONAL,
    "ema",
    (
        "            if accelerator.sync_gradients:\n                if args.use_ema:\n",
        "            if accelerator.sync_gradients:\n                if args.use_ema and accelerator.num_processes == 1:\n",
    ),
    processes=2,
    source=ALONE,
)
fault(
    "average not updated on several processes",
    AMP,
    "ema",
    (
        "            ema.update_parameters(raw_model)\n",
        "            if world == 1:\n                ema.update_parameters(raw_model)\n",
    ),
    processes=2,
    source=ALONE,
)
fault(
    "average of the weights before training",
    HAND,
    "ema",
    ("ema_model = copy.deepcopy(model)", "start = copy.deepcopy(model)\nema_model = copy.deepcopy(model)"),
    ("    update_ema(ema_model, model, args.ema_decay)\n", "    update_ema(ema_model, start, args.ema_decay)\n"),
)
fault(
    "average begins anew at each update",
    UNCONDITIONAL,
    "ema",
    (
        "                    ema_model.step(model.parameters())\n",
        "                    ema_model.optimization_step = 0\n                    ema_model.step(model.parameters())\n",
    ),
)
fault("average shares its memory with the weights", FLOW, "ema", ("{name: value.clone() for", "{name: value for"))
fault(
    "average shares its memory with the weights",
    EDM,
    "ema",
    (
        "[p.detach().clone() for p in parameters]\n        self.halflife",
        "[p.detach() for p in parameters]\n        self.halflife",
    ),
)
fault(
    "average of a part of the network",
    HAND,
    "ema",
    ("zip(ema_model.parameters(), model.parameters())", "list(zip(ema_model.parameters(), model.parameters()))[:12]"),
)
fault(
    "average of a part of the network",
    MODULE,
    "ema",
    (
        "zip(self.ema_model.parameters(), self.online[0].parameters())",
        "list(zip(self.ema_model.parameters(), self.online[0].parameters()))[:12]",
    ),
)
fault("always copied, never averaged", MODULE, "ema", ("update_after_step=10):", "update_after_step=10**9):"))
fault(
    "no average though it was asked for",
    UNCONDITIONAL,
    "ema",
    ("    args = parse_args()\n", "    args = parse_args()\n    args.use_ema = False\n"),
    unfair=True,
    source="4: ai-toolkit 524",
)
for script in (UNCONDITIONAL, PUBLIC):
    text = "        gradient_accumulation_steps=args.gradient_accumulation_steps,"
    if script == UNCONDITIONAL:
        text += " mixed_precision"
    fault(
        "accumulation silently off",
        script,
        "gradient, learning_rate",
        (text, text.replace("gradient_accumulation_steps=args.gradient_accumulation_steps,", "")),
        flags=TWICE,
        unfair=True,
        source="10: diffusers 308",
    )

# ---- state

LEFT = "6: diffusers 2321, 2706"
RESTORE = "ema_model.restore(unet.parameters())"
fault("average left in the network after a preview", UNCONDITIONAL, "state", (RESTORE, "pass"), source=LEFT)
fault(
    "average left in the network after a preview",
    PUBLIC,
    "state",
    (f"{RESTORE}\n\n                # denormalize", "pass\n\n                # denormalize"),
    source=LEFT,
)
fault(
    "average left in the network after a preview",
    LATENTS,
    "state",
    ("ema_unet.restore(unet.parameters())", "pass"),
    source=LEFT,
)
fault(
    "average left in the network after a preview",
    EDM,
    "state",
    ("                p.data.copy_(k)\n", "                pass\n"),
    source=LEFT,
)
fault(
    "weights shrunk after each update",
    HAND,
    "state, optimizer",
    (
        "    update_ema(ema_model, model, args.ema_decay)\n",
        "    update_ema(ema_model, model, args.ema_decay)\n    for p in model.parameters():\n        p.data.mul_(0.995)\n",
    ),
)
fault(
    "weights shrunk after each update",
    MODULE,
    "state, optimizer",
    (
        "            self.ema.update()\n",
        "            self.ema.update()\n"
        "            for p in self.diffusion.parameters():\n"
        "                p.data.clamp_(-0.1, 0.1)\n",
    ),
)
fault(
    "average copied into the network",
    AMP,
    "state",
    (
        "            step += 1\n",
        "            step += 1\n"
        "            if step % 5 == 0:\n"
        "                raw_model.load_state_dict(ema.module.state_dict())\n",
    ),
)
fault(
    "first weights loaded again",
    FLOW,
    "state",
    (
        "    batches = endless(loader)\n",
        "    batches = endless(loader)\n    first = {name: value.clone() for name, value in net.state_dict().items()}\n",
    ),
    (
        "        x0, y = next(batches)\n",
        "        x0, y = next(batches)\n        if step % 8 == 0:\n            net.load_state_dict(first)\n",
    ),
)

# ---- network

fault(
    "network left in evaluation mode",
    EDM,
    "network",
    ("            net.train()\n            print", "            print"),
    flags={"dropout": 0.1},
)
fault(
    "network in evaluation mode",
    AMP,
    "network",
    ("            model.train()\n", "            model.eval()\n"),
    flags={"dropout": 0.1},
)
fault("network in evaluation mode", MODULE, "network", ("        self.diffusion.train()\n", "        self.diffusion.eval()\n"))
NAN = (NETWORKS, "        h = self.middle(h2, emb)\n", '        h = self.middle(h2, emb) * float("inf")\n')
fault("NaN in each forward pass", AMP, "network, gradient", NAN, flags=HALF, source="45: guided-diffusion 50")
fault("NaN in each forward pass", EDM, "network, gradient", NAN, source="45: guided-diffusion 50")
NO_TIME = (NETWORKS, "        h = h + self.embed(F.silu(emb))[:, :, None, None]\n", "")
fault("time is not used", HAND, "network, timestep, gradient", NO_TIME)
fault("time is not used", AMP, "network, timestep, gradient", NO_TIME)
fault(
    "weights in bfloat16",
    UNCONDITIONAL,
    "network, optimizer",
    (
        "    if args.use_ema:\n        ema_model = EMAModel",
        "    model.to(torch.bfloat16)\n    if args.use_ema:\n        ema_model = EMAModel",
    ),
    ("model(noisy_images, timesteps).sample", "model(noisy_images.bfloat16(), timesteps).sample"),
    flags={"preview_steps": 1000},
)
fault(
    "down blocks frozen",
    UNCONDITIONAL,
    "network, gradient, optimizer",
    (
        "    if args.use_ema:\n        ema_model = EMAModel",
        "    model.down_blocks.requires_grad_(False)\n    if args.use_ema:\n        ema_model = EMAModel",
    ),
)

# ---- condition

fault("labels always dropped", MODULE, "condition", ("torch.rand(len(x)) >= self.cond_drop_prob", "torch.rand(len(x)) < 0"))
fault("labels always dropped", FLOW, "condition", ("torch.rand(len(y)) < args.label_dropout", "torch.rand(len(y)) < 2"))
fault("prompts always empty", LATENTS, "condition", ("torch.rand(bsz) < args.proportion_empty_prompts", "torch.rand(bsz) < 2"))
fault(
    "one prompt for the whole batch",
    LATENTS,
    "condition",
    ("text_encoder(input_ids)\n", "text_encoder(input_ids[:1]).repeat(bsz, 1, 1)\n"),
)
fault(
    "label without an effect",
    EDM,
    "condition, network, gradient",
    (NETWORKS, "emb = emb + self.classes(labels)", "emb = emb + 0 * self.classes(labels)"),
)
fault(
    "label without an effect",
    MODULE,
    "condition, network, gradient",
    (NETWORKS, "emb = emb + self.classes(labels)", "emb = emb + 0 * self.classes(labels)"),
)

# ---- ranks

APART = "17: kohya 924, 989, 1002"
fault(
    "forward pass around DDP",
    UNCONDITIONAL,
    "ranks",
    ("model(noisy_images, timesteps)", "accelerator.unwrap_model(model)(noisy_images, timesteps)"),
    processes=2,
    source=APART,
)
fault(
    "forward pass around DDP", AMP, "ranks", ("model(noisy, t * 1000)", "raw_model(noisy, t * 1000)"), processes=2, source=APART
)
fault(
    "network not prepared",
    UNCONDITIONAL,
    "ranks",
    (
        "    model, optimizer, dataloader, lr_scheduler = accelerator.prepare(model, optimizer, dataloader, lr_scheduler)\n",
        "    optimizer, dataloader, lr_scheduler = accelerator.prepare(optimizer, dataloader, lr_scheduler)\n",
    ),
    processes=2,
    source=APART,
)
fault(
    "all ranks draw the same noise",
    UNCONDITIONAL,
    "ranks, noise",
    ("device_specific=True", "device_specific=False"),
    processes=2,
)
fault("all ranks draw the same noise", AMP, "ranks, noise", ("args.seed + 1000 * rank", "args.seed"), processes=2)
fault(
    "all ranks see the same images",
    AMP,
    "ranks, data",
    ("DistributedSampler(dataset, world, rank,", "DistributedSampler(dataset, world, 0,"),
    processes=2,
)
