"""The kinds of training of audit.py: what all runs have in common, what a seed chooses, and the healthy runs."""

from dataclasses import dataclass, field

from benchmarks.doctor.step_faults import ACCUMULATED, DDPM, DECAYED, DROPOUT, EDM2, FLIPPED, MIN_SNR

# A validation, previews, an export and a checkpoint lie inside each run, at updates of their own.
BASE = {
    "resolution": 16,
    "train_batch_size": 16,
    "max_train_steps": 200,
    "lr_warmup_steps": 20,
    "logging_steps": 10,
    "validation_images": 32,
    "validation_steps": 50,
    "eval_batch_size": 4,
    "save_images_steps": 70,
    "save_model_steps": 110,
    "checkpointing_steps": 90,
    "cpu_threads": 1,
}
BASES = {
    DDPM: BASE | {"learning_rate": 1e-3, "ddpm_num_inference_steps": 5},
    EDM2: BASE | {"learning_rate": 0.01, "lr_decay_steps": 70, "num_inference_steps": 4},
}
FIRST_HALF = {"max_train_steps": 100, "checkpointing_steps": 50}  # of a run that is resumed
RESUMED = {"lr_scheduler": "constant_with_warmup"}  # its learning rate does not depend on the length
PAIR_BATCH = 8  # of each of two processes, where the flags do not say

EPSILON_LINEAR = {"prediction_type": "epsilon", "ddpm_beta_schedule": "linear"}
V_COSINE = {"prediction_type": "v_prediction", "ddpm_beta_schedule": "squaredcos_cap_v2"}
SAMPLE_LINEAR = {"prediction_type": "sample", "ddpm_beta_schedule": "linear"}
V_ZERO_SNR = {"prediction_type": "v_prediction", "ddpm_beta_schedule": "linear", "rescale_betas_zero_snr": True}
DIFFUSIONS = {"epsilon": EPSILON_LINEAR, "v cosine": V_COSINE, "sample": SAMPLE_LINEAR, "v zero SNR": V_ZERO_SNR}

# Runs that need more than data: audit.py trains an autoencoder, or a pipeline, before.
LATENTS = {"vae": True, "latent_scale": "auto"}
FINE_TUNED = {"pretrained": True, "learning_rate": 1e-4}

# One for each seed, in turn. "network" is a name of NETWORKS.
KINDS = {
    DDPM: (
        EPSILON_LINEAR | {"network": "tiny"},
        V_COSINE | {"network": "small", "train_batch_size": 12},
        SAMPLE_LINEAR | {"network": "tiny", "train_batch_size": 24},
        V_ZERO_SNR | {"network": "small"},
    ),
    EDM2: (
        {"network": "tiny"},
        {"network": "small", "P_mean": -0.6, "P_std": 1.2, "sigma_data": 0.7, "train_batch_size": 12},
        {"network": "tiny", "label_dropout": 0.2, "lr_scheduler": "cosine", "train_batch_size": 24},
    ),
}
WIDTHS = {"tiny": [8, 16], "small": [16, 32], "large": [32, 64]}


def network_config(script: str, network: str) -> dict:
    """config.json of a network of two levels, but for the size and the channels of its images."""
    widths = WIDTHS[network]
    if script == EDM2:
        sizes = {"model_channels": widths[0], "channel_multipliers": [1, 2], "layers_per_block": 1}
        return {"_class_name": "EDM2UNet", **sizes, "attention_resolutions": [8], "attention_head_dim": 16}
    blocks = {"down_block_types": ["DownBlock2D"] * 2, "up_block_types": ["UpBlock2D"] * 2}
    return {"_class_name": "UNet2DModel", "block_out_channels": widths, "layers_per_block": 1, "norm_num_groups": 4, **blocks}


@dataclass(frozen=True)
class Healthy:
    script: str
    flags: dict = field(default_factory=dict)
    processes: int = 1
    resumed: bool = False
    dataset: str | None = None  # where it is one alone


def healthy_runs() -> dict[str, Healthy]:
    runs: dict[str, Healthy] = {}

    def ddpm(name: str, *flags: dict, **options) -> None:
        runs[name] = Healthy(DDPM, {key: value for part in flags for key, value in part.items()}, **options)

    def edm2(name: str, *flags: dict, **options) -> None:
        runs[f"EDM2, {name}"] = Healthy(EDM2, {key: value for part in flags for key, value in part.items()}, **options)

    for name, flags in DIFFUSIONS.items():
        ddpm(name, flags)
        ddpm(f"{name}, small network, batch 24", flags, {"network": "small", "train_batch_size": 24})
        ddpm(f"{name}, bf16", flags, {"mixed_precision": "bf16"})
        ddpm(f"{name}, accumulation", flags, ACCUMULATED)
        ddpm(f"{name}, resumed", flags, FLIPPED, resumed=True)
    for prediction in ("epsilon", "v_prediction", "sample"):
        ddpm(f"min-SNR weights, {prediction}", MIN_SNR, {"prediction_type": prediction})
    cosine, sigmoid = {"ddpm_beta_schedule": "squaredcos_cap_v2"}, {"ddpm_beta_schedule": "sigmoid"}
    ddpm("epsilon, cosine schedule", cosine)
    ddpm("epsilon, scaled linear schedule", {"ddpm_beta_schedule": "scaled_linear"})
    ddpm("v, sigmoid schedule", {"prediction_type": "v_prediction"}, sigmoid)
    ddpm("sample, zero SNR of the cosine schedule", cosine, {"prediction_type": "sample", "rescale_betas_zero_snr": True})
    ddpm("v, 100 noise levels", V_COSINE, {"ddpm_num_steps": 100})
    ddpm("two processes", processes=2)
    ddpm("two processes, v, accumulation", V_COSINE, {"gradient_accumulation_steps": 2, "train_batch_size": 4}, processes=2)
    ddpm("two processes, bf16", {"mixed_precision": "bf16"}, processes=2)
    ddpm("two processes, dropout and flips", DROPOUT, FLIPPED, processes=2)
    ddpm("two processes, resumed", V_COSINE, processes=2, resumed=True)
    ddpm("flips", FLIPPED)
    ddpm("color jitter", {"color_jitter": 0.3})
    ddpm("crops of the center", {"center_crop": True})
    ddpm("flips, jitter, classes balanced", FLIPPED, {"color_jitter": 0.2, "balanced_sampling": True})
    ddpm("classes", {"class_conditional": True})
    ddpm("classes, v, two processes", V_COSINE, {"class_conditional": True, "label_dropout": 0.3}, processes=2)
    ddpm("decoded by a worker", FLIPPED, {"cache_images": "no", "dataloader_num_workers": 1})
    ddpm("16 bits", {"preserve_input_precision": True})
    ddpm("not square, classes", {"resolution": "16x24", "class_conditional": True})
    ddpm("four channels", V_COSINE, {"image_channels": 4}, dataset="stickers")
    ddpm("arrays", {"image_channels": 5, "preserve_input_precision": True}, dataset="waves")
    ddpm("latents", LATENTS, dataset="digits")
    ddpm("latents, v, flips, resumed", V_COSINE, LATENTS, FLIPPED, {"image_channels": 1}, dataset="shapes", resumed=True)
    ddpm("fine-tuned", FINE_TUNED)
    ddpm("fine-tuned, one half of the layers", FINE_TUNED, {"train_only": ["up_blocks.*", "conv_*out*"]})
    ddpm("fine-tuned latents", FINE_TUNED, LATENTS, dataset="digits")
    ddpm("gray", {"image_channels": 1})
    ddpm("200 images", {"max_train_images": 232})
    ddpm("learning rate 5e-5", {"learning_rate": 5e-5})
    ddpm("learning rate 5e-3", {"learning_rate": 5e-3})
    ddpm("bf16, accumulation, min-SNR, resumed", ACCUMULATED, MIN_SNR, {"mixed_precision": "bf16"}, resumed=True)
    ddpm("adaptive clipping", {"adaptive_clipping": True})
    ddpm("no clipping", {"max_grad_norm": 0.0})
    ddpm("tight clipping", {"max_grad_norm": 0.1})
    ddpm("no EMA", {"use_ema": False})
    ddpm("EMA of two lengths", {"ema_type": "power"})
    ddpm("EMA decay 0.99 at most", {"ema_max_decay": 0.99, "ema_power": 0.9})
    ddpm("dropout", DROPOUT)
    ddpm("spectral norm", {"spectral_norm": True})
    ddpm("gradient checkpointing", {"gradient_checkpointing": True})
    ddpm("channels last", {"channels_last": True})
    ddpm("He's initialization, mish", {"initialisation": "he", "activation": "mish"})
    ddpm("output layer of zeros", {"zero_init_output": True})
    ddpm("Adam with decay", DECAYED, {"optimizer": "adam", "adam_weight_decay": 1e-3})
    ddpm("AdamW with decay, other betas", DECAYED, {"adam_beta1": 0.9, "adam_beta2": 0.99})
    ddpm("SGD", {"optimizer": "sgd", "learning_rate": 0.02})
    ddpm("RMSprop", {"optimizer": "rmsprop", "learning_rate": 3e-4})
    ddpm("L1 penalty", {"l1_weight": 1e-6})
    for scheduler in ("constant", "linear", "cosine_with_restarts", "polynomial", "cyclic", "inverse_sqrt"):
        ddpm(f"learning rate {scheduler}", {"lr_scheduler": scheduler, "lr_floor": 0.1, "lr_cycles": 2, "lr_power": 2.0})
    ddpm("still in the warm-up at the end", {"lr_warmup_steps": 500, "max_train_steps": 120})
    ddpm("8 updates", {"max_train_steps": 8, "logging_steps": 1, "lr_warmup_steps": 4})
    ddpm("sampler ddpm", {"sampler": "ddpm", "ddpm_num_inference_steps": 20})
    ddpm("sampler dpmsolver++", {"sampler": "dpmsolver++"})
    ddpm("evaluation", {"eval_steps": 100, "eval_images": 32})
    ddpm("batch 128", {"train_batch_size": 128, "max_train_steps": 72})
    ddpm("60 updates, few reports", {"max_train_steps": 60, "logging_steps": 50, "lr_warmup_steps": 500})
    ddpm("compiled", {"compile": True, "max_train_steps": 120})

    edm2("plain")
    edm2("not square", {"resolution": "24x16"})
    edm2("four channels", dataset="stickers")
    edm2("arrays", {"image_channels": 5}, dataset="waves")
    edm2("latents", LATENTS, dataset="digits")
    edm2("fine-tuned", FINE_TUNED, {"learning_rate": 1e-3})
    edm2("small network, other noise levels", KINDS[EDM2][1])
    edm2("label dropout 0.2, cosine", KINDS[EDM2][2])
    edm2("no label dropout", {"label_dropout": 0.0})
    edm2("without classes", {"class_conditional": False})
    edm2("bf16", {"mixed_precision": "bf16"})
    edm2("accumulation", ACCUMULATED)
    edm2("two processes", processes=2)
    edm2("two processes, bf16, accumulation", ACCUMULATED, {"mixed_precision": "bf16", "train_batch_size": 4}, processes=2)
    edm2("resumed", resumed=True)
    edm2("resumed, flips, dropout", FLIPPED, DROPOUT, resumed=True)
    edm2("flips and jitter", FLIPPED, {"color_jitter": 0.2})
    edm2("no clipping", {"max_grad_norm": 0.0})
    edm2("adaptive clipping", {"adaptive_clipping": True})
    edm2("no forced weight normalization", {"force_weight_norm": False})
    edm2("exponential EMA", {"ema_type": "exponential"})
    edm2("EMA of three lengths", {"ema_widths": [0.05, 0.1, 0.2]})
    edm2("gradient checkpointing", {"gradient_checkpointing": True})
    edm2("AdamW with decay", {"optimizer": "adamw", "adam_weight_decay": 0.01})
    edm2("learning rate 1e-3", {"learning_rate": 1e-3})
    edm2("learning rate 0.03", {"learning_rate": 0.03})
    edm2("sampler dpmsolver++", {"sampler": "dpmsolver++"})
    edm2("evaluation", {"eval_steps": 100, "eval_images": 32})
    return runs
