"""Which weights lie in a local folder that is meant as a pipeline: averaged ones beside others, variants, networks alone."""

import contextlib
import json
from pathlib import Path

_STEM, _ENDINGS = "diffusion_pytorch_model", (".safetensors", ".bin")
_OF_TRAINERS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt")


def only_variant(pipeline: str) -> str | None:
    """Returns the variant of the U-Net's weights, such as fp16 or non_ema, where there is one alone and no usual weights."""
    variants = _variants(_place_of_unet(Path(pipeline)))
    return variants[0] if len(variants) == 1 and variants[0] else None


def about_weights(pipeline: str) -> list[str]:
    """Returns a note where a local pipeline has other weights, too, than those that are loaded."""
    place = _place_of_unet(Path(pipeline))
    variants = _variants(place)
    if not variants:
        return []
    used = only_variant(pipeline)
    others = [f"{name} ({_STEM}.{name})" for name in variants if name and name != used]
    others += [folder.name for folder in _networks(Path(pipeline)) if folder != place]
    notes = [f"{pipeline}: the variant {used} of the weights is used, because there are no others"] if used else []
    if others:
        notes.append(f"{pipeline}: the weights in {place.name} are used; there are others in {', '.join(others)}")
    return notes


def advice(pipeline: str) -> str | None:
    """Returns what a local folder has that is no pipeline, and what to do; None where it has no weights, or is a pipeline."""
    folder = Path(pipeline)
    if folder.is_file():
        return "it is a file\nuse the folder of a pipeline, with its model_index.json"
    networks = _networks(folder)
    if (folder / "config.json").is_file() and (folder.parent / "model_index.json").is_file():
        return f"it is one part of a pipeline\nuse the folder above: {folder.parent}"
    has_index = (folder / "model_index.json").is_file()
    if has_index and _place_of_unet(folder) in networks:  # what is wrong with it is something else
        return None
    if networks:
        chosen = next((network for network in networks if network.name == "unet_ema"), networks[0])
        names = ", ".join("config.json" if network == folder else network.name for network in networks)
        places = (folder / "scheduler", folder, folder.parent / "scheduler")
        place = next((place for place in places if (place / "scheduler_config.json").is_file()), None)
        scheduler = "DDPMScheduler()" if place is None else f'DDPMScheduler.from_pretrained("{place}")'
        return (
            f"it is no whole pipeline; it has a network: {names}\nmake a pipeline of it: "
            f'DDPMPipeline(UNet2DModel.from_pretrained("{chosen}"), {scheduler}).save_pretrained("pipeline")'
        )
    files = sorted(file.name for pattern in _OF_TRAINERS for file in folder.glob(pattern))
    if files and not has_index:
        return (
            f"it has weights without a config: {', '.join(files[:3])}\n"
            "load them into the UNet2DModel that they are of, and save a DDPMPipeline of it"
        )
    return None


def _place_of_unet(folder: Path) -> Path:
    return folder / "unet" if (folder / "unet").is_dir() else folder


def _networks(folder: Path) -> list[Path]:
    """The folder itself and those in it that have a UNet2DModel."""
    found = []
    for place in [folder, *sorted(path for path in folder.glob("*") if path.is_dir())]:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if json.loads((place / "config.json").read_text()).get("_class_name") == "UNet2DModel" and _variants(place):
                found.append(place)
    return found


def _variants(place: Path) -> list[str]:
    """The variants of the weights there, sorted; "" means the usual ones. Parts of sharded weights count once."""
    names = [path.name for path in place.glob(f"{_STEM}*") if path.name.endswith(_ENDINGS)]
    return sorted({name.removeprefix(_STEM).rpartition(".")[0].partition("-0")[0].strip(".") for name in names})
