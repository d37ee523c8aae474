"""The finished product: a diffusers pipeline at the top of a run's folder."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import DDPMPipeline, FlowMatchEulerDiscreteScheduler, ModelMixin

from models.edm2_unet import EDM2UNet
from models.guided_pipeline import ClassDDPMPipeline, EDM2Pipeline, LatentDDPMPipeline
from utils.core import randomness
from utils.core.errors import UserError, one_line, out_of_memory, written
from utils.core.files import sync, whole_file
from utils.data.autoencoder import Autoencoder
from utils.diffusion.ddpm import config_for_any, is_flow, predicts_clean_images
from utils.diffusion.pipelines import image_shape, load_network, training_scheduler
from utils.diffusion.sampling import Scheduler, full_precision
from utils.diffusion.unet import plain_state_dict

PIPELINE_INDEX = "model_index.json"
DRAFT = ".tmp-export"  # in which a pipeline is written first
MODELS = Path(__file__).parents[2] / "models"
CONFIGS = ("unet/config.json", "scheduler/scheduler_config.json", "vae/config.json")
# Nothing else of a run's folder goes to the Hub: no checkpoints, no logs, no options.
PUBLISHED = (PIPELINE_INDEX, "README.md", "guided_pipeline.py", "unet/*", "scheduler/*", "vae/*", "samples/*.png")
# What diffusers does not have goes along as code, next to what it makes: its module, its class, where it stands.
CODE = {
    "unet": ("edm2_unet", "EDM2UNet", "unet"),
    "scheduler": ("edm_heun", "EDMHeunScheduler", "scheduler"),
}


def export_pipeline(
    unet: ModelMixin,
    scheduler: Scheduler,
    output_dir: Path | str,
    card_text: str,
    *,
    class_names: Sequence[str] | None = None,
    autoencoder: Autoencoder | None = None,
) -> None:
    """Writes a pipeline at the top of `output_dir`: model_index.json, unet/, scheduler/, README.md, safetensors only.

    It is a `DDPMPipeline`; for an `EDM2UNet` an `EDM2Pipeline`, and for a UNet2DModel with classes a `ClassDDPMPipeline`, with
    the code of models/, which diffusers runs when it loads the folder with trust_remote_code=True, and with `class_names`,
    where its classes have names; with flow matching its scheduler is FlowMatchEulerDiscreteScheduler, or, for a network that
    predicts the clean image, one of models/. With an `autoencoder`, whose latents the network makes, it carries that too, and
    for a UNet2DModel without classes it is a `LatentDDPMPipeline`, which carries code as well. `unet` is the
    unwrapped network with the weights to publish, on any device, compiled in place or patched by accelerate: what is saved
    is fp32 under clean names. Everything is written into a hidden folder first and then moved file by file,
    model_index.json last, so that after a kill at any moment the old or the new weights load. Where an older pipeline of
    another network or schedule is in the way, it is withdrawn first (its model_index.json goes): weights never stand
    beside a config that is not theirs. Call it on one process. Raises UserError where the disk does not take it.
    """
    output_dir = Path(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    draft = output_dir / DRAFT
    shutil.rmtree(draft, ignore_errors=True)  # what an earlier kill left
    try:
        with written(str(output_dir)):
            _save_pipeline(_clean_copy(unet), scheduler, draft, class_names, autoencoder)
            (draft / "README.md").write_bytes(card_text.encode())
            files = sorted(path.relative_to(draft) for path in draft.rglob("*") if path.is_file())
            for name in files:
                (output_dir / name).parent.mkdir(parents=True, exist_ok=True)
        if any(_settings(output_dir / name) != _settings(draft / name) for name in CONFIGS):
            (output_dir / PIPELINE_INDEX).unlink(missing_ok=True)
        for name in sorted(files, key=lambda name: str(name) == PIPELINE_INDEX):
            sync(draft / name)  # or a power cut could leave the new name with no content
            os.replace(draft / name, output_dir / name)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_card(output_dir: Path, card_text: str) -> None:
    """Writes README.md anew, complete or not at all. Raises OSError."""
    with whole_file(output_dir / "README.md", durable=True) as draft:
        draft.write_bytes(card_text.encode())


def check_export(unet: ModelMixin, scheduler: Scheduler, output_dir: Path | str) -> None:
    """Save the pipeline as `export_pipeline` will, load it as its users will, and compare. Raises UserError where that fails.

    To be called before training, so that a network that was changed in a way its config cannot say does not end without a
    pipeline, or with one that computes something else. Needs space for the weights in `output_dir`, and the time of a forward
    pass of one image twice. `unet` is as for `export_pipeline`; it and the random state are left as they were. Raises OSError
    when the disk does not take the weights.
    """
    draft = Path(output_dir) / DRAFT
    shutil.rmtree(draft, ignore_errors=True)  # what an earlier kill left
    try:
        with torch.random.fork_rng(devices=[]):
            saved = _clean_copy(unet)
            _save_pipeline(saved, scheduler, draft)
            loaded, config = load_network(str(draft))
        problem = _difference(unet, saved, loaded)
        if hasattr(scheduler, "alphas_cumprod") and not torch.equal(
            training_scheduler(config).alphas_cumprod, scheduler.alphas_cumprod.cpu()
        ):
            problem = "the noise schedule is not the one that its config names"
    except OSError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        problem = textwrap.shorten(one_line(error), 300)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    if problem:
        raise UserError(
            f"the exported pipeline cannot be loaded: {problem}\n"
            f"change the code so that {type(unet).__name__}.from_config(unet.config) makes the network that is trained"
        )


def _difference(unet: ModelMixin, saved: ModelMixin, loaded: ModelMixin) -> str | None:
    """What tells `loaded` from `unet`, whose weights are in `saved`."""
    weights = loaded.state_dict()
    for name, value in saved.state_dict().items():
        if name not in weights or not torch.equal(weights[name], value):
            return f"{name} is another one when it is loaded"
    config, device = unet.config, next(unet.parameters()).device
    numbers = torch.ones(1, dtype=torch.int64, device=device)
    images = randomness.normal(0, "export", numbers, image_shape(unet))
    inputs = (images, numbers)  # timestep 1, or ln(sigma) / 4 = 1
    if config.num_class_embeds:
        inputs += (numbers % config.num_class_embeds,)
    outputs = []
    for network in (unet, loaded.to(device)):
        # Layers that start at 0 would hide what comes before them: other weights stand in for theirs.
        zeros = {name: parameter for name, parameter in network.named_parameters() if not parameter.any()}
        others = {name: randomness.normal(0, name, numbers, zero.shape)[0].to(zero) for name, zero in zeros.items()}
        with full_precision(network):
            outputs.append(torch.func.functional_call(network, others, inputs).sample)
    trained, exported = outputs
    # TF32 keeps 10 bits of each factor, and other layouts in memory run other kernels. What was changed shows clearly.
    if not (exported - trained).norm() <= 0.02 * trained.norm():
        return "its output is another one when it is loaded, though the weights are the same"
    return None


def _save_pipeline(
    unet: ModelMixin,
    scheduler: Scheduler,
    draft: Path,
    class_names: Sequence[str] | None = None,
    autoencoder: Autoencoder | None = None,
) -> None:
    code = CODE if isinstance(unet, EDM2UNet) else {}
    if not is_flow(scheduler.config):
        scheduler = type(scheduler).from_config(config_for_any(scheduler.config))
    elif predicts_clean_images(scheduler.config):
        code = {"scheduler": ("flow_scheduler", "FlowScheduler", "scheduler")}
    else:
        scheduler = FlowMatchEulerDiscreteScheduler(scheduler.config.num_train_timesteps)
    if code or unet.config.num_class_embeds or autoencoder:
        names = dict(enumerate(class_names)) if class_names and unet.config.num_class_embeds else None
        of_ddpm = ClassDDPMPipeline if unet.config.num_class_embeds else LatentDDPMPipeline
        latents: dict[str, Any] = {}
        if autoencoder is not None and autoencoder.scale is not None:
            mean, std = autoencoder.scale
            latents = {"vae": autoencoder.network, "latent_mean": mean, "latent_std": std}
        kind = EDM2Pipeline if isinstance(unet, EDM2UNet) else of_ddpm
        pipeline = kind(unet=unet, scheduler=scheduler, id2label=names, **latents)
        code = {"_class_name": ("guided_pipeline", type(pipeline).__name__, "."), **code}
    else:
        pipeline = DDPMPipeline(unet=unet, scheduler=scheduler)
    pipeline.save_pretrained(draft, max_shard_size="1TB")  # one weights file whatever the size: a single rename replaces it
    for path in (draft / name for name in CONFIGS if (draft / name).is_file()):
        config = json.loads(path.read_text())
        if config.pop("_name_or_path", None):  # where diffusers had loaded it from, on this machine
            path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    if code:
        index = json.loads((draft / PIPELINE_INDEX).read_text())
        for name, (module, class_name, folder) in code.items():
            index[name] = [module, class_name]
            shutil.copyfile(MODELS / f"{module}.py", draft / folder / f"{module}.py")
        (draft / PIPELINE_INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _clean_copy(unet: ModelMixin) -> ModelMixin:
    """An fp32 copy on the CPU, free of patches and parametrizations.

    It starts on the meta device, so that no random number is drawn.
    """
    with torch.device("meta"):
        copy = type(unet).from_config(unet.config)
    weights = {
        name: (value.float() if value.is_floating_point() else value).cpu().contiguous()
        for name, value in plain_state_dict(unet).items()
    }
    copy.load_state_dict(weights, assign=True)
    return copy


def _settings(path: Path) -> dict | None:
    """A config file's content without diffusers' own notes (its version, the name it was loaded from)."""
    if not path.exists():
        return None
    return {key: value for key, value in json.loads(path.read_text()).items() if not key.startswith("_diffusers")}


def check_pipeline(output_dir: Path | str) -> None:
    """Loads the pipeline as its users will, in a fresh interpreter in another folder without this repository on the
    path, and makes one image on the CPU. Raises RuntimeError with the reason if it does not load or its image is not
    finite."""
    code = (
        "import sys, numpy, diffusers\n"
        "folder = sys.argv[1]\n"
        "trust = {'trust_remote_code': True} if sys.argv[2] == 'carries code' else {}\n"
        "pipeline = diffusers.DiffusionPipeline.from_pretrained(folder, use_safetensors=True, **trust)\n"
        "pipeline.set_progress_bar_config(disable=True)\n"
        "images = pipeline(num_inference_steps=2, output_type='np').images\n"
        "if not numpy.isfinite(images).all():\n"
        "    sys.exit('the image is not finite')\n"
    )
    # Only a pipeline class that is a file of the folder needs its code to be run; of those the run has just written that file.
    pipeline_class = (_settings(Path(output_dir, PIPELINE_INDEX)) or {}).get("_class_name")
    kind = "carries code" if isinstance(pipeline_class, list) else "diffusers' own"
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONSTARTUP")}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as elsewhere:
        result = subprocess.run(
            [sys.executable, "-c", code, str(Path(output_dir).resolve()), kind],
            cwd=elsewhere,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
    if result.returncode != 0:
        reason = (result.stderr.strip().splitlines() or [f"exit status {result.returncode}"])[-1]
        raise RuntimeError(f"the pipeline in {output_dir} does not work: {reason}")
