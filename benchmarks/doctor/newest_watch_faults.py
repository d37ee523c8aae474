"""Faults of three more scripts, in styles that foreign/ did not have: a notebook's global functions, an interpolant transformer
on stored latents, and a policy of actions given observations.

They were written down, with the stages expected of each, by someone who had not seen the watcher. The comment says the harm.
"""

from benchmarks.doctor.watch_faults import fault

NOTEBOOK, SIT, POLICY = "annotated_ddpm.py", "train_sit.py", "diffusion_policy.py"


# ---- annotated_ddpm.py

# All images keep most of their signal: the last steps of sampling start from inputs that were never trained on.
fault(
    "the noise's factor is not cumulated",
    NOTEBOOK,
    "noise",
    ("torch.sqrt(1.0 - alphas_cumprod).float()", "torch.sqrt(1.0 - alphas).float()"),
)
# The sampler begins from noise around 0, and clamps to -1.
fault(
    "images from 0 to 1",
    NOTEBOOK,
    "data",
    ("return (image * 2) - 1", "return image"),
)
# The sampler takes the output for noise. Nothing that is called says so.
fault(
    "the clean image as target of a network of noise",
    NOTEBOOK,
    "target",
    ("        target = noise\n", "        target = x_start\n"),
)
# Sinusoids of numbers below 1: the network hardly knows the noise level.
fault(
    "the time divided by the number of steps",
    NOTEBOOK,
    "timestep",
    ("denoise_model(x_noisy, t)\n", "denoise_model(x_noisy, t / timesteps)\n"),
)
# Each update repeats all before it.
fault(
    "gradients never cleared",
    NOTEBOOK,
    "gradient",
    ("    optimizer.zero_grad()\n", ""),
)
# There is no average.
fault(
    "the average is the network itself",
    NOTEBOOK,
    "ema",
    ("ema_model = copy.deepcopy(model)", "ema_model = model"),
)
# Its layers stay as they were drawn.
fault(
    "the time embedding detached",
    NOTEBOOK,
    "network, gradient",
    ("t = self.time_mlp(time)", "t = self.time_mlp(time).detach()"),
)
# Adam destroys the network in the first updates.
fault(
    "learning rate of 0.1",
    NOTEBOOK,
    "learning_rate",
    ('"--train_lr", type=float, default=1e-3', '"--train_lr", type=float, default=1e-1'),
)
# Beside Adam's epsilon, hardly anything is left of a step.
fault(
    "clipped to a norm of one millionth",
    NOTEBOOK,
    "gradient",
    ('"--max_grad_norm", type=float, default=1.0', '"--max_grad_norm", type=float, default=1e-6'),
)
# [B, 1, 1, 1] over [B]: all samples get the sum of all weights.
fault(
    "weights of the loss broadcast",
    NOTEBOOK,
    "weight",
    ("extract(loss_weight, t, loss.shape)", "extract(loss_weight, t, x_start.shape)"),
)
# Each column of pixels has the noise level of another sample.
fault(
    "the noise's factor broadcast over columns",
    NOTEBOOK,
    "noise",
    (
        "sqrt_one_minus_alphas_cumprod_t = extract(sqrt_one_minus_alphas_cumprod, t, x_start.shape)",
        "sqrt_one_minus_alphas_cumprod_t = sqrt_one_minus_alphas_cumprod.to(t.device)[t]",
    ),
)
# Neither mean nor variance are those of the sampler's.
fault(
    "uniform noise from 0 to 1",
    NOTEBOOK,
    "noise",
    ("        noise = torch.randn_like(x_start)\n", "        noise = torch.rand_like(x_start)\n"),
)

# ---- train_sit.py

# A standard deviation of 5.5: the noise hides them too late.
fault(
    "latents not scaled",
    SIT,
    "data",
    ("sample_posterior(moments).mul_(0.18215)", "sample_posterior(moments)"),
)
# The comparison is turned round: 90 % instead of 10 %.
fault(
    "nearly all labels dropped",
    SIT,
    "condition",
    ("device=labels.device) < self.dropout_prob", "device=labels.device) > self.dropout_prob"),
)
# Only the mean error of a sample counts.
fault(
    "mean before the square",
    SIT,
    "target, weight",
    ("loss = mean_flat((model_output.float() - ut) ** 2)", "loss = mean_flat(model_output.float() - ut) ** 2"),
)
# The sampler goes elsewhere.
fault(
    "sign of the noise in the velocity",
    SIT,
    "target",
    ("ut = d_alpha_t * x1 + d_sigma_t * x0", "ut = d_alpha_t * x1 - d_sigma_t * x0"),
)
# There is nothing to denoise.
fault(
    "the network gets the clean latent",
    SIT,
    "input",
    ("model_output = model(xt, t, **model_kwargs)", "model_output = model(x1, t, **model_kwargs)"),
)
# Half of them lie outside of the path.
fault(
    "times from a normal distribution",
    SIT,
    "timestep",
    ("t = torch.rand(x1.shape[0]", "t = torch.randn(x1.shape[0]"),
)
# Each column has the noise level of another sample.
fault(
    "times along the wrong axis",
    SIT,
    "noise, timestep",
    ("return t.view(t.size(0), *[1] * (x.dim() - 1))", "return t.view(*[1] * (x.dim() - 1), t.size(0))"),
)
# Small steps are rounded away.
fault(
    "the average in bfloat16",
    SIT,
    "ema",
    ("ema = deepcopy(model).to(device)", "ema = deepcopy(model).to(device, torch.bfloat16)"),
)
# The weights lose 1 % in each update.
fault(
    "weight decay of 10",
    SIT,
    "optimizer",
    ("weight_decay=0)", "weight_decay=10)"),
)
# The learning rate never comes near its peak.
fault(
    "warm-up longer than the training",
    SIT,
    "learning_rate",
    ('"--warmup-steps", type=int, default=10)', '"--warmup-steps", type=int, default=10000)'),
)
# With a gate of 0, nothing passes the first block.
fault(
    "a branch without its residual",
    SIT,
    "network",
    ("x = x + gate_msa.unsqueeze(1)", "x = gate_msa.unsqueeze(1)"),
)
# No label is ever dropped: guidance has no unconditional half.
fault(
    "trained in evaluation mode",
    SIT,
    "state, condition",
    ("    model.train()\n", "    model.eval()\n"),
)

# ---- diffusion_policy.py

# Noise of 1 beside values of hundreds.
fault(
    "actions not normalized",
    POLICY,
    "data",
    ('self.action = normalize_data(actions, self.stats["action"])', "self.action = actions"),
)
# The action fades in where the noise should.
fault(
    "image and noise exchanged",
    POLICY,
    "noise, input",
    ("add_noise(naction, noise, timesteps)", "add_noise(noise, naction, timesteps)"),
)
# Actions are learned for situations of others.
fault(
    "the first observation for all samples",
    POLICY,
    "condition",
    (
        "obs_cond = nobs[:, : cfg.obs_horizon, :].flatten(start_dim=1)",
        "obs_cond = nobs[0, : cfg.obs_horizon, :].flatten().expand(B, -1)",
    ),
)
# The sampler takes it for noise.
fault(
    "a flow's target on a schedule of variances",
    POLICY,
    "target",
    ("                    target = noise\n", "                    target = noise - naction\n"),
)
# The mask of the loss is upside down.
fault(
    "padding counts, and nothing else",
    POLICY,
    "weight",
    ('~nbatch["action_is_pad"]', 'nbatch["action_is_pad"]'),
)
# The optimizer has no gradient.
fault(
    "cleared between backward and step",
    POLICY,
    "gradient",
    (
        "                accelerator.backward(loss)\n",
        "                accelerator.backward(loss)\n                optimizer.zero_grad()\n",
    ),
)
# All other layers stay as they were drawn.
fault(
    "the optimizer has the middle alone",
    POLICY,
    "optimizer, network",
    ("params = noise_pred_net.parameters()", "params = noise_pred_net.mid_modules.parameters()"),
)
# With a warm-up, the learning rate stays at 0.
fault(
    "schedule never stepped",
    POLICY,
    "learning_rate",
    ("                lr_scheduler.step()\n", ""),
)
# The training follows its own average.
fault(
    "the average copied into the network after each step",
    POLICY,
    "ema, state",
    (
        "                ema.step(noise_pred_net.parameters())\n",
        "                ema.step(noise_pred_net.parameters())\n                ema.copy_to(noise_pred_net.parameters())\n",
    ),
)
# A sign: neighboring times have embeddings that have nothing in common.
fault(
    "frequencies of the time embedding grow",
    POLICY,
    "timestep, network",
    ("device=x.device) * -emb)", "device=x.device) * emb)"),
)
# The same noise and timesteps in each.
fault(
    "seeded anew in each update",
    POLICY,
    "noise, timestep",
    (
        "                noise = torch.randn(naction.shape",
        "                set_seed(cfg.seed)\n                noise = torch.randn(naction.shape",
    ),
)
# Values of different times are mixed.
fault(
    "channels moved by a reshape",
    POLICY,
    "input, network",
    ("sample = sample.moveaxis(-1, -2)", "sample = sample.reshape(sample.shape[0], sample.shape[2], sample.shape[1])"),
)
