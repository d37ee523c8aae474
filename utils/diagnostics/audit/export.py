"""The files of an exported pipeline, against what was trained.

They are read with safetensors and json, the network is loaded as its users will load it, and the declared schedule is made by
diffusers: nothing here calls what training exports with.
"""

import inspect
import json
import re
from collections.abc import Mapping
from pathlib import Path

import diffusers
import torch
from diffusers import ModelMixin
from torch import nn

from utils.diagnostics.audit.declared import DeclaredDenoising, DeclaredNoising, DeclaredProcess
from utils.diagnostics.audit.tensors import Difference, Stored, clean, difference, unwrapped
from utils.diagnostics.audit.verdict import Check, not_observed

WEIGHTS_FILES = re.compile(r"diffusion_pytorch_model(-\d+-of-\d+)?\.safetensors")
NORMALIZED = ".parametrizations.weight."  # spectral norm: `original`, and the singular vectors `0._u` and `0._v`
# sqrt(abar) and sqrt(1 - abar) in float32: the second one is 1e-2 at t = 0, and known to 6e-8 / 2e-2.
COEFFICIENT_TOLERANCE = 1e-5


def check_exported(
    folder: Path,
    weights: Mapping[str, torch.Tensor],
    declared: DeclaredProcess,
    raw_weights: Mapping[str, torch.Tensor] | None = None,
    network: nn.Module | None = None,
) -> list[Check]:
    """The pipeline in `folder` against the tensors that it should hold, the averaged ones or where there are none the raw ones.

    `raw_weights` lets a message say that these were exported in their place. With `network`, the one under test, unwrapped,
    its output with `weights` is compared with that of the exported one. No code that lies in the folder is run. The random
    state is left as it was.
    """
    folder = Path(folder)
    files = [path for path in (folder / "unet").glob("*.safetensors") if WEIGHTS_FILES.fullmatch(path.name)]
    configs = [folder / name for name in ("model_index.json", "unet/config.json", "scheduler/scheduler_config.json")]
    missing = [str(path.relative_to(folder)) for path in configs if not path.exists()]
    missing += [] if files else ["unet/diffusion_pytorch_model.safetensors"]
    if missing:
        message = f"the exported pipeline cannot be loaded: {', '.join(missing)} is missing"
        return [Check("export", "files", "a complete pipeline", f"without {missing[0]}", False, message)]
    weights = unwrapped(weights)
    if network is not None:  # an average also has buffers that are not saved
        weights = {name: weights[name] for name in network.state_dict() if name in weights}
    checks = _weights(Stored(*sorted(files)), weights, unwrapped(raw_weights) if raw_weights else None)
    config = json.loads(configs[2].read_text())
    checks += _schedule(config, declared) if isinstance(declared, DeclaredNoising) else [_edm_schedule(config, declared)]
    if network is not None:
        same_weights = all(check.healthy for check in checks[:2])
        checks += _network(folder, weights if same_weights else None, network)
    return checks


def _weights(stored: Stored, weights: dict[str, torch.Tensor], raw: dict[str, torch.Tensor] | None) -> list[Check]:
    expected, computed = _plain(weights)
    found = difference(expected, stored, computed)
    where, names = "unet/diffusion_pytorch_model.safetensors", found.names()
    message = ""
    if names:
        message = f"{where} does not have the names of the network's tensors: {names}"
        if any(clean(name) != name for name in found.unexpected):
            message += "; they are those of a wrapped network, and other programs will not load them"
    checks = [Check("export", "names of the weights", "the network's", names or "the same", not names, message)]
    if not found.compared:
        return [*checks, not_observed("export", "weights", "those trained", "no name is the same")]
    observed, message = "the same", ""
    if found.different:
        observed = f"{len(found.different)} of {found.compared} tensors differ, by {found.distance:.2g} of their size"
        message = _name_the_weights(expected, stored, raw, found, computed)
    kind = "the averaged ones" if raw else "those trained"
    return [*checks, Check("export", "weights", kind, observed, not message, message)]


def _name_the_weights(expected: Mapping, stored: Stored, raw: dict | None, found: Difference, computed: set[str]) -> str:
    common = [name for name in expected if name in stored]
    raw = _plain(raw)[0] if raw else {}
    if raw.keys() >= set(common) and not difference({n: raw[n] for n in common}, stored, computed).different:
        return "the exported weights are the raw ones, not the averaged ones"
    for dtype in (torch.float16, torch.bfloat16):
        rounded = {name: _rounded(expected[name], dtype) for name in common}
        if not difference(rounded, {name: _rounded(stored[name], dtype) for name in common}, computed).different:
            return f"the exported weights were rounded to {str(dtype).removeprefix('torch.')}"
    if 2 * len(found.different) < found.compared:
        return f"some exported weights are not those of the network: {', '.join(found.different[:3])}"
    if found.distance < 0.5:
        return f"the exported weights are from another time of the training: they differ by {found.distance:.2g} of their size"
    return f"the exported weights differ by {found.distance:.2g} of their size"


def _rounded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype).float() if tensor.is_floating_point() else tensor


def _plain(weights: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], set[str]]:
    """The weights as the network computes with them, fp32, and the names of those under spectral norm: W / (u . W v)."""
    plain = {n: t.detach().float() if t.is_floating_point() else t for n, t in weights.items() if NORMALIZED not in n}
    normalized = [name.removesuffix(f"{NORMALIZED}original") for name in weights if name.endswith(f"{NORMALIZED}original")]
    for name in normalized:
        weight, u, v = (weights[f"{name}{NORMALIZED}{part}"].detach().double() for part in ("original", "0._u", "0._v"))
        plain[f"{name}.weight"] = (weight / torch.dot(u, weight.flatten(1) @ v)).float()
    return plain, {f"{name}.weight" for name in normalized}


def _coefficients(alphas_cumprod: torch.Tensor) -> torch.Tensor:
    alphas_cumprod = alphas_cumprod.double()
    return torch.stack([alphas_cumprod.sqrt(), (1.0 - alphas_cumprod).clamp(min=0.0).sqrt()])


def _schedule(config: dict, declared: DeclaredNoising) -> list[Check]:
    settings = {key: value for key, value in config.items() if key != "_use_default_values"}
    try:
        made = diffusers.DDPMScheduler.from_config(settings)
    except Exception as error:
        why = f"diffusers cannot make a scheduler from the exported config: {str(error).splitlines()[0]}"
        return [Check("export", "noise schedule", _called(declared), "none", False, why)]
    observed, message = _called(declared), ""
    if not _alike(made.alphas_cumprod, declared.alphas_cumprod):
        others = f"{config.get('beta_schedule')}, {len(made.alphas_cumprod)} timesteps, other numbers"
        alike = (other.called for other in declared.others() if _alike(other.alphas_cumprod, made.alphas_cumprod))
        observed = next(alike, others)
        message = f"the exported scheduler's noise schedule is {observed}; the training uses {_called(declared)}"
    checks = [Check("export", "noise schedule", _called(declared), observed, not message, message)]
    observed, wanted = made.config.prediction_type, declared.prediction_type
    message = f"the exported scheduler takes the network's output for {observed}; it was trained as {wanted}" * (
        observed != wanted
    )
    checks.append(Check("export", "prediction type", wanted, observed, not message, message))
    expected = declared.sampling
    others = {key: made.config[key] for key, value in expected.items() if made.config[key] != value}
    wanted, observed = (", ".join(f"{key} {value}" for key, value in part.items()) for part in (expected, expected | others))
    message = "the exported scheduler samples in another way: " + ", ".join(f"{key} is {others[key]}" for key in others)
    return [*checks, Check("export", "sampling settings", wanted, observed, not others, message)]


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    close = len(a) == len(b) and (_coefficients(a) - _coefficients(b)).abs().max() < COEFFICIENT_TOLERANCE
    return bool(close) and bool(a[-1] == 0) == bool(b[-1] == 0)


def _called(declared: DeclaredNoising) -> str:
    return f"{declared.schedule}, {declared.steps} timesteps" + ", zero SNR" * declared.zero_snr


def _edm_schedule(config: dict, declared: DeclaredDenoising) -> Check:
    expected = {"sigma_data": declared.sigma_data, "sigma_min": 0.002, "sigma_max": 80.0, "rho": 7.0}
    found = {key: config.get(key, value if key != "sigma_data" else None) for key, value in expected.items()}
    wanted, observed = (", ".join(f"{key} {value}" for key, value in part.items()) for part in (expected, found))
    others = [key for key in expected if found[key] != expected[key]]
    said = ", ".join(f"{key} is {found[key]}, not {expected[key]}" for key in others)
    message = f"the exported scheduler is for other noise levels: {said}"
    return Check("export", "noise levels", wanted, observed, not others, message)


def _network(folder: Path, weights: dict[str, torch.Tensor] | None, network: ModelMixin) -> list[Check]:
    """`weights` None: others were exported, and the outputs are not compared."""
    written = json.loads((folder / "unet/config.json").read_text())
    written = {key: value for key, value in written.items() if not key.startswith("_")}
    config = json.loads(json.dumps({key: value for key, value in network.config.items() if not key.startswith("_")}))
    others = [key for key, value in config.items() if key in written and written[key] != value]
    wanted, found = (", ".join(f"{key} {part[key]}" for key in others[:3]) or "the network's" for part in (config, written))
    message = "the config of the exported network differs: " + ", ".join(f"{key} is {written[key]}" for key in others[:3])
    checks = [Check("export", "network config", wanted, found, not others, message)]
    name, close = "output on a fixed input", "that of the network"
    if weights is None:
        return [*checks, not_observed("export", name, close, "the weights are others")]
    try:
        with torch.random.fork_rng(devices=[]):
            exported = _load(folder, network).to(next(network.parameters()).device).eval()
    except Exception as error:  # each library raises its own kind
        why = f"the exported network cannot be loaded: {str(error).strip().splitlines()[0]}"
        return [*checks, Check("export", name, close, "none", False, why)]
    inputs = _fixed_input(network)
    output = _answer(exported, inputs, exported.state_dict())
    expected = _answer(network, inputs, weights)
    if not torch.isfinite(expected).all():
        return [*checks, not_observed("export", name, close, "the network's output is not finite")]
    distance = float((output - expected).norm() / expected.norm().clamp(min=1e-30))
    # Some fifty layers in fp32, other kernels for other layouts in memory; TF32 keeps 10 bits of each factor.
    tolerance = 1e-3 if expected.device.type == "cpu" else 2e-2
    why = f"the exported network and the trained network give different outputs: they differ by {distance:.2g} of its size"
    return [*checks, Check("export", name, f"within {tolerance:g}", f"{distance:.1g}", distance <= tolerance, why)]


def _load(folder: Path, network: ModelMixin) -> nn.Module:
    """The exported network. Code that the folder carries is compared with the trained network's own, and never run."""
    module, class_name = json.loads((folder / "model_index.json").read_text())["unet"]
    kind = type(network)
    if (code := folder / "unet" / f"{module}.py").exists():
        if class_name != kind.__name__ or code.read_text() != Path(inspect.getfile(kind)).read_text():
            raise ValueError(f"unet/{code.name} is not the code of the network that was trained")
    else:
        kind = getattr(diffusers, class_name)
    return kind.from_pretrained(folder / "unet", use_safetensors=True).float()


def _fixed_input(network: ModelMixin) -> tuple[torch.Tensor, ...]:
    config, device = network.config, next(network.parameters()).device
    size = config.sample_size
    height, width = (size, size) if isinstance(size, int) else size
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, config.in_channels, height, width, generator=generator).to(device)
    is_edm = "model_channels" in config
    levels = torch.tensor([-0.5, 0.7]) if is_edm else torch.tensor([3, 700])  # ln(sigma) / 4, or timesteps
    labels = (torch.arange(2, device=device) % config.num_class_embeds,) if config.num_class_embeds else ()
    return images, levels.to(device), *labels


def _answer(network: nn.Module, inputs: tuple, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The output in fp32, eagerly, in eval mode, with `weights` in the place of the network's own."""
    modules = [(module, module.training, module._compiled_call_impl) for module in network.modules()]
    wrapped = network.__dict__.pop("forward", None) if hasattr(network, "_original_forward") else None
    try:
        for module, _, _ in modules:
            module._compiled_call_impl = None
        network.eval()
        with torch.no_grad(), torch.autocast(inputs[0].device.type, enabled=False):
            return torch.func.functional_call(network, dict(weights), inputs).sample.float()
    finally:
        for module, training, compiled in modules:
            module.training, module._compiled_call_impl = training, compiled
        if wrapped is not None:
            network.forward = wrapped
