"""The model card of a pipeline, for readers elsewhere: what is known of its training, without paths of this machine.

Names of classes, files and datasets may be any text, and the card shows them as they are: none of them is markup in it.
"""

import html
import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from utils.core.hub import is_only_a_path
from utils.core.size import Size
from utils.data.sources import hub_name
from utils.diffusion.sampling import Scheduler, sampling_steps
from utils.options.flags import PIPELINE_DECIDES, DDPMOptions, EDM2Options, OutputOptions, RunOptions
from utils.options.parser import words_of

# Flags that say where things are on a machine, and how a run is resumed and published: not what is trained.
NOT_OF_TRAINING = {each.name for each in fields(OutputOptions)} | {"logging_dir", "cache_dir"}

FACTS = {
    "data": "Data",
    "resolution": "Resolution",
    "pretrained": "Fine-tuned from",
    "autoencoder": "Autoencoder",
    "objective": "Objective",
    "prediction_type": "Prediction type",
    "updates": "Updates",
    "samples_seen": "Samples seen",
    "noise_levels": "ln sigma in training",
    "classes": "Classes",
    "class_names": "Class names",
    "label_dropout": "Label dropout",
    "ema_decay": "EMA decay",
    "ema_width": "EMA width (relative)",
    "sampler": "Sampler",
    "sampler_steps": "Sampling steps",
}
_NAMED = 100  # classes whose names the card lists
OTHER_FACTS = ("title", "license", "hub_dataset", "command", "metrics", "grid", "pipeline", "carries_code", "channels")


def facts_of_run(options: RunOptions, resolved: Mapping, scheduler: Scheduler, class_names: Sequence[str] | None) -> dict:
    """Returns what the card says of any run, while it goes on or from its options.json: `resolved` is what followed from the
    `options`, as that file has it, and `scheduler` the one of the training."""
    return {
        "data": shown_data(options, resolved),
        "hub_dataset": hub_name(options.dataset_name),
        "command": training_command(options),
        "objective": "flow matching" if getattr(options, "objective", None) == "flow" else None,
        "pretrained": options.pretrained and local_name(options.pretrained),
        "autoencoder": options.vae and local_name(options.vae),
        "resolution": options.resolution,
        "channels": options.image_channels,
        "sampler": options.sampler,
        "sampler_steps": sampling_steps(options.sampler, options.sampling_steps, scheduler),
        "class_names": list(class_names) if class_names and resolved.get("classes") else None,
    }


def options_of_record(recorded: Mapping[str, Any]) -> RunOptions:
    """Returns the options of a run as its options.json has them. Flags that it lacks have their defaults."""
    kind = EDM2Options if "sigma_data" in recorded else DDPMOptions
    return kind(**{each.name: recorded[each.name] for each in fields(kind) if each.name in recorded})


def shown_data(options: RunOptions, resolved: Mapping) -> str:
    """Returns the name of the data, how many images it has, how many of them are held out, and their shape."""
    name, split = options.dataset_name or options.train_data_dir or "", options.dataset_split
    details = {
        "config": options.dataset_config_name,
        "split": split if hub_name(options.dataset_name) or split != "train" else None,
        "revision": options.dataset_revision,
    }
    words = ", ".join(f"{key} {value}" for key, value in details.items() if value is not None)
    parts = []
    if "training_images" in resolved:
        held_out = resolved.get("validation_images", 0)
        parts.append(f"{resolved['training_images'] + held_out:,} images")
        parts += [f"{held_out:,} of them held out for validation"] if held_out else []
    height, width = Size.of(options.resolution)
    parts += [f"{height}x{width}", f"{options.image_channels} channel{'s'[: options.image_channels - 1]}"]
    return f"{local_name(name)}{f' ({words})' if words else ''}: {', '.join(parts)}"


def training_command(options: RunOptions) -> str:
    """Returns a command for a shell that trains with these options: the flags that differ from their defaults, or from those of
    the model preset. Of local paths it has the last name; `NOT_OF_TRAINING` and secrets are left out."""
    values, usual = vars(options), vars(type(options)()) | options.presets.get(options.model_preset or "", {})
    shown = {name for name in values if values[name] != usual[name]}
    for flag, others in options.excludes.items():  # what a preset sets and the run does not have, another flag takes away
        if values.get(flag) and any(values[name] is None for name in shown.intersection(others)):
            shown.add(flag)
    if options.global_batch_size is not None:
        shown.discard("gradient_accumulation_steps")  # it followed
    if options.pretrained is not None:
        shown -= set(PIPELINE_DECIDES)
    shown -= NOT_OF_TRAINING | {each.name for each in fields(options) if each.metadata.keys() & {"secret", "once"}}
    chosen = {name: local_name(value) if isinstance(value, str) else value for name, value in values.items() if name in shown}
    return shlex.join(["accelerate", "launch", f"{options.script}.py", *words_of(chosen)])


def local_name(word: str) -> str:
    """Returns the last name of a path of this machine, a web address without user, password and query, and any other word, such
    as a name on the Hub, as it is."""
    if address := re.match(r"(?!file:)(\w[\w+.-]*://)([^/@]*@)?([^?#]*)", word):
        return address[1] + address[3]
    return Path(word).name or "." if is_only_a_path(word) or ("/" in word and os.path.exists(word)) else word


def model_card(facts: Mapping) -> str:
    """Returns a Hugging Face model card in Markdown, with its YAML header, from what is known of a run; nothing else is stated.

    Keys, all optional: those of `FACTS` (a table row each), "title", "license", "hub_dataset" (its Hub name),
    "command", "metrics" (a mapping of names to values), "grid" (path of a picture, relative to the card),
    "pipeline" (the name or path to load from) and "carries_code" (whether loading runs code in it: EDM2), "channels" (of the
    images). Tokens in the command are masked. Raises ValueError for an unknown key.
    """
    unknown = set(facts) - set(FACTS) - set(OTHER_FACTS)
    if unknown:
        raise ValueError(f"unknown facts for the model card: {', '.join(sorted(unknown))}")
    carries_code = bool(facts.get("carries_code"))
    kind = "class-conditional" if facts.get("classes") else "unconditional"
    header = ["library_name: diffusers", "tags:", "- diffusers", f"- {kind}-image-generation"]
    is_edm2 = carries_code and not facts.get("prediction_type")
    header.append("- edm2" if is_edm2 else "- flow-matching" if facts.get("objective") else "- ddpm")
    if facts.get("license"):
        header.insert(0, f"license: {quoted(facts['license'])}")
    if facts.get("hub_dataset"):
        header += ["datasets:", f"- {quoted(facts['hub_dataset'])}"]
    sections = ["\n".join(["---", *header, "---"]), f"# {escaped(facts.get('title', 'Denoising diffusion model'))}"]
    if facts.get("grid"):
        sections.append(f"![Samples]({facts['grid']})")
    sections.append(_table("Training", {label: facts[key] for key, label in FACTS.items() if facts.get(key) is not None}))
    if facts.get("metrics"):
        sections.append("## Metrics\n\n" + _table("Metric", facts["metrics"]))
    if facts.get("command"):
        command = re.sub(r"(--hub_token[= ]+)\S+|hf_\w{20,}", lambda match: f"{match[1] or ''}***", facts["command"])
        sections.append("## Training command\n\n" + _code("bash", command))
    name, trust = ("DiffusionPipeline", ", trust_remote_code=True") if carries_code else ("DDPMPipeline", "")
    place = quoted(str(facts.get("pipeline", ".")))
    load = f"pipeline = {name}.from_pretrained({place}{trust})"
    first = quoted(facts["class_names"][0]) if facts.get("class_names") else "0"
    given = f"class_labels=[{first}], guidance_scale=1.5" if facts.get("classes") else ""
    if facts.get("channels", 1) > 4:
        given += ", " * bool(given) + 'output_type="np"'
    call = f"pipeline({given})"
    lines = [f"from diffusers import {name}", "", load, f"image = {call}.images[0]"]
    warning = "Loading it runs the Python files of this repository: read them first.\n\n" if carries_code else ""
    sections.append(f"## Use\n\n{warning}" + _code("python", "\n".join(lines)))
    card = "\n\n".join(section for section in sections if section) + "\n"
    return card.encode(errors="replace").decode()  # names of files may hold bytes that are no text


def loaded_from(card: str, repository: str) -> str:
    """Returns a card whose code loads the pipeline from this repository of the Hub."""
    return re.sub(r'(from_pretrained\()"(\\.|[^"\\])*"', lambda match: match[1] + quoted(repository), card)


def escaped(text: str) -> str:
    """Returns one line of Markdown, also for a cell of a table, that shows `text` letter by letter."""
    line = " ".join(text.split())
    return re.sub(r"[\\`*_\[\]|#~$]|:(?=//)|(?<=www)\.", r"\\\g<0>", html.escape(line, quote=False))


def quoted(text: str) -> str:
    """Returns `text` as a literal of Python and of YAML."""
    return json.dumps(text, ensure_ascii=False).encode(errors="backslashreplace").decode()


def _code(language: str, text: str) -> str:
    """Returns a block of code that ends at its own end, whatever `text` holds."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"


def _table(heading: str, rows: Mapping) -> str:
    if not rows:
        return ""
    return "\n".join(
        [f"| {heading} | |", "|---|---|", *(f"| {escaped(name)} | {escaped(_shown(value))} |" for name, value in rows.items())]
    )


def _shown(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, list):
        value = ", ".join(value[:_NAMED]) + (f" and {len(value) - _NAMED:,} more" if len(value) > _NAMED else "")
    return f"{value:.6g}" if isinstance(value, float) else str(value)
