"""The files of a pipeline of diffusers: what a run exports, and what it starts from.

They are read with safetensors and json, and the schedule is made by diffusers. No code that lies in the folder is run.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor

from steady_doctor.found import Found
from steady_doctor.stored.tensors import Stored, difference, same, unwrapped

WEIGHTS_FILES = re.compile(r"diffusion_pytorch_model(-\d+-of-\d+)?\.safetensors")
INDEX, NETWORK, SCHEDULER = "model_index.json", "unet/config.json", "scheduler/scheduler_config.json"
EMBEDDING = "class_embedding.weight"
NORMALIZED = ".parametrizations.weight."  # spectral norm: `original`, and the singular vectors `0._u` and `0._v`
# sqrt(abar) and sqrt(1 - abar) in float32: the second one is 1e-2 at t = 0, and known to 6e-8 / 2e-2.
COEFFICIENT_TOLERANCE = 1e-5
LATENT_TOLERANCE = 1e-6  # relative: figures in JSON
TOLERANCE = 1e-5  # of weights that were computed with


@dataclass(frozen=True)
class Pipeline:
    """What an exported pipeline should hold."""

    weights: Mapping[str, Tensor]  # the averaged ones, or where there are none those trained
    settings: Mapping[str, Any]  # of the scheduler: names and values of its config
    alphas_cumprod: Tensor | None = None  # [T]; None: its noise levels are among the settings
    latent_scale: tuple[Sequence[float], Sequence[float]] | None = None  # mean and standard deviation that the run takes off
    class_names: Sequence[str] = field(default_factory=tuple)  # in the order of their numbers; empty: they have none


def exported(folder: Path, declared: Pipeline, network: Any, update: int) -> Iterator[Found]:
    """The pipeline in `folder`, of `network`, a ModelMixin, unwrapped."""
    files = _weights_files(folder)
    wanted = INDEX, NETWORK, SCHEDULER, *["vae/config.json"] * bool(declared.latent_scale)
    missing = ["the weights of unet"] * (not files) + [name for name in wanted if not (folder / name).exists()]
    if missing:
        yield Found("export-files", update, {"why": f"without {', '.join(missing)}"})
        return
    weights = unwrapped(declared.weights)  # an average also has buffers that are not saved
    expected, computed = _plain({name: weights[name] for name in network.state_dict() if name in weights})
    if others := difference(expected, Stored(*files), rounded=computed):
        yield Found("export-weights", update, others.figures)
    yield from _scheduler(json.loads((folder / SCHEDULER).read_text()), declared, update)
    index = json.loads((folder / INDEX).read_text())
    yield from _latents(index, declared, update)
    yield from _classes(index, declared, update)
    yield from _network(folder, index, network, update)


def started_from(folder: Path, weights: Mapping, class_names: Sequence[str], rescales: bool = False) -> Iterator[Found]:
    """Whether a network that begins with the weights of the pipeline in `folder` has them; `class_names`: those of the data.
    `rescales`: whether each row of a weight may have another size, as EDM2's forced normalization gives it.

    Classes that the pipeline has not are new, and their rows are not looked at. Silent where the folder has no such files.
    """
    files = _weights_files(folder)
    if not files or not (folder / INDEX).exists() or not (folder / NETWORK).exists():
        return
    stored, weights = Stored(*files), unwrapped(weights)
    shared = stored.keys() & weights.keys() - {EMBEDDING}  # early pipelines have names that diffusers translates
    if rescales:
        weights |= {name: _as_large(weights[name], stored[name]) for name in shared}
    if (others := difference(stored, weights, rounded=shared if rescales else set(), only=shared)).different:
        yield Found("network-pretrained", 0, others.figures)
    elif EMBEDDING in stored and EMBEDDING in weights:
        axis = int("model_channels" in json.loads((folder / NETWORK).read_text()))  # EDM2 has its classes in columns
        tables = [part[EMBEDDING].detach().cpu().movedim(axis, 0) for part in (stored, weights)]
        own, named = _labels(json.loads((folder / INDEX).read_text())), list(class_names)
        if not (own and named):  # by number; the last row of a UNet2DModel is that of no class
            own = named = [f"class {number}" for number in range(min(map(len, tables)) - (axis == 0))]
        both = [name for name in named if name in own]
        before, now = tables[0][[own.index(name) for name in both]], tables[1][[named.index(name) for name in both]]
        now = _as_large(now.T, before.T).T if rescales else now
        if wrong := [name for name, a, b in zip(both, before, now) if not same(a, b, TOLERANCE * rescales)]:
            yield Found("network-pretrained-classes", 0, {"wrong": len(wrong), "such_as": wrong[0]})


def _as_large(weight: Tensor, other: Tensor) -> Tensor:
    """`weight` with each of its rows as large as it fits those of `other`."""
    if weight.ndim < 2 or weight.shape != other.shape:
        return weight
    a, b = (tensor.detach().cpu().double().flatten(1) for tensor in (weight, other))
    return (a * ((a * b).sum(1) / a.square().sum(1).clamp(min=1e-30)).clamp(min=0)[:, None]).view_as(weight).float()


def _weights_files(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "unet").glob("*.safetensors") if WEIGHTS_FILES.fullmatch(path.name))


def _plain(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], set[str]]:
    """The weights as the network computes with them, fp32, and the names of those under spectral norm: W / (u . W v)."""
    plain = {n: t.detach().float() if t.is_floating_point() else t for n, t in weights.items() if NORMALIZED not in n}
    normalized = [name.removesuffix(f"{NORMALIZED}original") for name in weights if name.endswith(f"{NORMALIZED}original")]
    for name in normalized:
        weight, u, v = (weights[f"{name}{NORMALIZED}{part}"].detach().cpu().double() for part in ("original", "0._u", "0._v"))
        plain[f"{name}.weight"] = (weight / torch.dot(u, weight.flatten(1) @ v)).float()
    return plain, {f"{name}.weight" for name in normalized}


def _scheduler(config: dict, declared: Pipeline, update: int) -> Iterator[Found]:
    """By diffusers' own scheduler, where it is one of a chain: betas that are written out are the same schedule."""
    config = {key: value for key, value in config.items() if key != "_use_default_values"}
    if (wanted := declared.alphas_cumprod) is not None:
        try:
            made = diffusers.DDPMScheduler.from_config(config)
        except Exception as error:
            said = (str(error).strip() or type(error).__name__).splitlines()[0]
            yield Found("export-files", update, {"why": f"with a scheduler that cannot be made: {said}"})
            return
        if not _alike(made.alphas_cumprod, wanted):
            shown = {"declared": _shown(wanted), "observed": _shown(made.alphas_cumprod)}
            yield Found("export-schedule", update, shown | {"named": str(config.get("beta_schedule"))})
        config = made.config
    if others := [key for key, value in declared.settings.items() if config.get(key) != value]:
        pairs = {"declared": declared.settings, "observed": config}
        yield Found("export-settings", update, {name: _some(values, others) for name, values in pairs.items()})


def _alike(a: Tensor, b: Tensor) -> bool:
    both = [torch.stack([table.double().sqrt(), (1.0 - table.double()).clamp(min=0.0).sqrt()]) for table in (a, b)]
    return len(a) == len(b) and bool((both[0] - both[1]).abs().max() < COEFFICIENT_TOLERANCE and (a[-1] == 0) == (b[-1] == 0))


def _shown(alphas_cumprod: Tensor) -> str:
    middle = float(alphas_cumprod[len(alphas_cumprod) // 2])
    return f"{len(alphas_cumprod)} steps, {middle:.4g} in the middle and {float(alphas_cumprod[-1]):.2g} at the end"


def _some(values: Mapping[str, Any], names: Sequence[str]) -> str:
    return ", ".join(f"{name} {values.get(name, '-')}" for name in names[:3])


def _latents(index: dict, declared: Pipeline, update: int) -> Iterator[Found]:
    """Whether what the network makes is decoded with the scale that its data was divided by."""
    found = index.get("latent_mean"), index.get("latent_std")
    for what, wanted, own in zip(("mean", "standard deviation"), declared.latent_scale or (None, None), found):
        a, b = (torch.tensor(values or [], dtype=torch.float64) for values in (wanted, own))
        if a.shape != b.shape or not torch.allclose(a, b, rtol=LATENT_TOLERANCE, atol=LATENT_TOLERANCE):
            yield Found("export-latents", update, {"what": what, "declared": wanted or "none", "observed": own or "none"})
            return


def _labels(index: dict) -> list[str]:
    """Names of classes by their numbers; empty where they have none, or another numbered them in another way."""
    names = index.get("id2label") or {}
    return [names[str(number)] for number in range(len(names))] if set(names) == set(map(str, range(len(names)))) else []


def _classes(index: dict, declared: Pipeline, update: int) -> Iterator[Found]:
    wanted, found = list(declared.class_names), _labels(index)
    if wrong := [number for number, name in enumerate(wanted) if number >= len(found) or found[number] != name]:
        own = found[wrong[0]] if wrong[0] < len(found) else "no name"
        yield Found("export-classes", update, {"number": wrong[0], "declared": wanted[wrong[0]], "observed": own})


def _network(folder: Path, index: dict, network: Any, update: int) -> Iterator[Found]:
    written = json.loads((folder / NETWORK).read_text()) | {"class": (index.get("unet") or ["-"])[-1]}
    config = json.loads(json.dumps({key: value for key, value in network.config.items() if not key.startswith("_")}))
    config["class"] = type(network).__name__
    if others := [key for key, value in config.items() if key in written and written[key] != value]:
        yield Found("export-network", update, {"declared": _some(config, others), "observed": _some(written, others)})
