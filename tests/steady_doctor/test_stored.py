"""What real runs export, save, resume and start from is as declared; each change to the files, or to the run, has its code."""

import importlib
import json
import shutil
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import SCRIPTS, TINY_NETWORK, make_tiny_flags
from diffusers import DDPMScheduler, UNet2DModel
from safetensors.torch import load_file, save_file

from steady_doctor.stored.checkpoint import State, kept, snapshots
from steady_doctor.stored.pipeline import Pipeline, exported, started_from
from steady_doctor.stored.tensors import FEW, few
from steady_doctor.words import finding
from utils.diffusion.ddpm import BETA_SCHEDULES, config_for_any, make_noise_scheduler
from utils.diffusion.export import export_pipeline
from utils.diffusion.unet import normalize_spectra

WEIGHTS, SCHEDULER = "unet/diffusion_pytorch_model.safetensors", "scheduler/scheduler_config.json"
INDEX, NETWORK = "model_index.json", "unet/config.json"
DDPM = {"clip_sample": True, "thresholding": False, "clip_sample_range": 1.0, "prediction_type": "epsilon"}
EDM = {"sigma_data": 0.5, "sigma_min": 0.002, "sigma_max": 80.0, "rho": 7.0}


class Stop(Exception):
    pass


@pytest.fixture(scope="module", params=SCRIPTS)
def finished(request, train, tmp_path_factory):
    """The folder of a run of 6 updates, what it should export, and what a resume at update 4 brings."""
    folder, script = tmp_path_factory.mktemp("stored"), importlib.import_module(request.param.removesuffix(".py"))
    flags = [*make_tiny_flags(folder, request.param), "--checkpointing_steps", 2, "--output_dir", folder / "run"]
    flags += ["--max_train_steps", 6]
    assert train(flags, script=script) == 0
    begin, seen = script.begin_run, SimpleNamespace(folder=folder / "run", is_edm2=request.param == "train_edm2.py")

    def stop_after_resume(options, accelerator, folder, data, objective, optimizer):
        run = begin(options, accelerator, folder, data, objective, optimizer)
        seen.network, seen.names = objective.exported, data.images.class_names if objective.classes else ()
        averages = run.ema.state_dict()
        seen.resumed = {"step": run.state.step, "weights": objective.network.state_dict(), "averages": averages}
        seen.resumed["optimizer"] = optimizer
        raise Stop

    with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(Stop):
        monkeypatch.setattr(script, "begin_run", stop_after_resume)
        train([*flags, "--resume_from_checkpoint", "checkpoint-4"], script=script)
    last = seen.folder / "checkpoint-6"
    averaged = {n: t for n, t in load_file(last / "ema.safetensors").items() if "/" not in n}
    raw = load_file(last / "model.safetensors")
    seen.raw = {n.removeprefix("unet."): t for n, t in raw.items() if not n.startswith("uncertainty.")}
    table = None if seen.is_edm2 else DDPMScheduler().alphas_cumprod
    seen.declared = {"weights": averaged, "settings": EDM if seen.is_edm2 else DDPM, "alphas_cumprod": table}
    seen.declared["class_names"] = seen.names
    return seen


def codes(found) -> list[str]:
    return [finding(one).code for one in found]  # each sentence has its figures


def of_export(finished, folder=None, **changes):
    return codes(exported(folder or finished.folder, Pipeline(**(finished.declared | changes)), finished.network, 6))


def of_resume(finished, folder=None, only=None, **changes):
    return codes(kept(folder or finished.folder / "checkpoint-4", State(**(finished.resumed | changes)), only))


def test_what_a_run_leaves_and_resumes_is_as_declared(finished):
    assert of_export(finished) == of_resume(finished) == []
    assert all(of_resume(finished, only=turn) == [] for turn in range(1, 9))
    wrapped = {f"module.{name}": tensor for name, tensor in finished.resumed["weights"].items()}  # the caller's, no mistake
    assert of_resume(finished, weights=wrapped) == []


@pytest.fixture
def copied(finished, tmp_path):
    """The exported pipeline, to be changed: its folder, and a function that edits a JSON file or the tensors in it."""
    for name in ("model_index.json", "unet", "scheduler"):
        source = finished.folder / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)

    def edit(name, change):
        if name == WEIGHTS:
            save_file({n: t.contiguous() for n, t in change(load_file(tmp_path / name)).items()}, tmp_path / name)
        else:
            (tmp_path / name).write_text(json.dumps(json.loads((tmp_path / name).read_text()) | change))

    return tmp_path, edit


def test_other_weights_are_found(finished, copied):
    folder, edit = copied
    for change in (
        lambda t: {f"_orig_mod.{n}": v for n, v in t.items()},
        lambda t: {n: v for n, v in t.items() if n != min(t)},
        lambda t: {n: v.half() for n, v in t.items()},
        lambda t: {n: v.bfloat16().float() for n, v in t.items()},
        lambda t: {n: v * (1 + 2e-7) for n, v in t.items()},
        lambda t: t | {max(t): t[max(t)] + 1e-6},
        lambda _: finished.raw,
    ):
        shutil.copy(finished.folder / WEIGHTS, folder / WEIGHTS)
        edit(WEIGHTS, change)
        assert of_export(finished, folder) == ["export-weights"]
    assert of_export(finished, folder, weights=finished.raw) == []


@pytest.mark.parametrize(
    ("file", "settings", "code"),
    [
        *((SCHEDULER, {"beta_schedule": name}, "export-schedule") for name in ("scaled_linear", "squaredcos_cap_v2")),
        *((SCHEDULER, {name: value}, "export-schedule") for name, value in (("beta_end", 0.021), ("num_train_timesteps", 500))),
        (SCHEDULER, {"rescale_betas_zero_snr": True}, "export-schedule"),
        (SCHEDULER, {"beta_schedule": "unheard_of"}, "export-files"),
        *((SCHEDULER, {name: False}, "export-settings") for name in ("prediction_type", "clip_sample", "clip_sample_range")),
        *((SCHEDULER, {name: 0.25}, "export-settings") for name in ("sigma_data", "sigma_max")),
        *((NETWORK, {name: 32}, "export-network") for name in ("norm_eps", "sample_size")),
        (INDEX, {"unet": ["diffusers", "UNet1DModel"]}, "export-network"),
        (INDEX, {"latent_mean": [0.0], "latent_std": [1.0]}, "export-latents"),
        (SCHEDULER, {"trained_betas": DDPMScheduler().betas.tolist(), "timestep_spacing": "trailing"}, None),  # the same
        *((file, None, "export-files") for file in (WEIGHTS, SCHEDULER, INDEX, NETWORK)),  # none
    ],
)
def test_another_config_is_found(finished, copied, file, settings, code):
    folder, edit = copied
    if settings is None:
        (folder / file).unlink()
    else:
        (first, *_), of_edm2 = settings, {"sigma_data", "sigma_max"}
        if (file == SCHEDULER and (first in of_edm2) != finished.is_edm2) or (first == "norm_eps" and finished.is_edm2):
            return
        edit(file, settings)
    assert of_export(finished, folder) == [code] * (code is not None)


@pytest.mark.parametrize(
    ("index", "scale", "names", "code"),
    [
        ({"latent_mean": [0.1, -0.2], "latent_std": [2.0, 3.0]}, ([0.1, -0.2], [2.0, 3.0]), (), None),
        ({"latent_mean": [0.1, -0.2], "latent_std": [2.0, 3.1]}, ([0.1, -0.2], [2.0, 3.0]), (), "export-latents"),
        ({"latent_mean": [0.0], "latent_std": [2.0]}, ([0.0, 0.0], [2.0, 2.0]), (), "export-latents"),
        ({}, ([0.0, 0.0], [2.0, 2.0]), (), "export-latents"),
        ({"id2label": {"0": "cat", "1": "dog"}}, None, ["cat", "dog"], None),
        ({"id2label": {"0": "cat", "1": "dog"}}, None, (), None),  # without classes, or without names
        ({"id2label": {"0": "dog", "1": "cat"}}, None, ["cat", "dog"], "export-classes"),
        ({"id2label": {"0": "cat"}}, None, ["cat", "dog"], "export-classes"),
        ({"id2label": None}, None, ["cat", "dog"], "export-classes"),
    ],
)
def test_the_scale_of_latents_and_the_names_of_classes_go_along(finished, copied, index, scale, names, code):
    folder, edit = copied
    edit(INDEX, index)
    (folder / "vae").mkdir()
    (folder / "vae" / "config.json").write_text("{}")
    assert of_export(finished, folder, latent_scale=scale, class_names=names) == [code] * (code is not None)
    if scale:
        shutil.rmtree(folder / "vae")
        assert of_export(finished, folder, latent_scale=scale) == ["export-files"]


def test_every_schedule_passes_as_it_is_exported(finished, copied):
    folder, _ = copied
    for schedule, zero, steps in product([] if finished.is_edm2 else BETA_SCHEDULES, (False, True), (10, 1000)):
        named = {"beta_schedule": schedule, "num_train_timesteps": steps, "rescale_betas_zero_snr": zero}
        made = make_noise_scheduler(**named, prediction_type="v_prediction")
        type(made).from_config(config_for_any(made.config)).save_pretrained(folder / "scheduler")
        settings, table = DDPM | {"prediction_type": "v_prediction"}, DDPMScheduler(**named).alphas_cumprod.double()
        assert of_export(finished, folder, settings=settings, alphas_cumprod=table) == []


def test_spectral_norm_is_exported_as_the_network_computes(tmp_path):
    unet = UNet2DModel.from_config(TINY_NETWORK)
    normalize_spectra(unet)
    export_pipeline(unet, make_noise_scheduler(), tmp_path, "")
    declared = {"settings": DDPM, "alphas_cumprod": DDPMScheduler().alphas_cumprod}
    assert codes(exported(tmp_path, Pipeline(unet.state_dict(), **declared), unet, 1)) == []
    other = {name: tensor * 1.1 if name.endswith("_u") else tensor for name, tensor in unet.state_dict().items()}
    assert codes(exported(tmp_path, Pipeline(other, **declared), unet, 1)) == ["export-weights"]


def test_a_network_that_starts_from_a_pipeline_has_its_weights(finished, copied):
    folder, edit = copied
    loaded = load_file(folder / WEIGHTS)
    names = finished.names
    largest = max(loaded, key=lambda name: loaded[name].numel())
    for weights, expected in [
        (loaded, []),
        ({f"_orig_mod.{n}": t for n, t in loaded.items()}, []),
        (finished.raw, ["network-pretrained"]),
        (loaded | {largest: loaded[largest] * 1.001}, ["network-pretrained"]),
        ({n: t for n, t in loaded.items() if n != largest}, ["network-pretrained"]),
    ]:
        assert codes(started_from(folder, weights, names)) == expected
    assert codes(started_from(folder / "unet", finished.raw, names)) == []  # no pipeline
    rows = torch.randn(3, 8)  # two classes, and none
    for table, before, now, expected in [
        (rows, ["cat", "dog"], ["cat", "dog"], []),
        (rows[[1, 0, 2]], ["cat", "dog"], ["dog", "cat"], []),
        (rows[[1, 2, 2]], ["cat", "dog"], ["dog", "new"], []),
        (rows, ["cat", "dog"], ["dog", "cat"], ["network-pretrained-classes"]),
        (rows, None, [], []),
        (rows[[1, 0, 2]], None, [], ["network-pretrained-classes"]),
    ]:
        edit(INDEX, {"id2label": before and dict(enumerate(before))})
        tables = (rows.T, table.T) if finished.is_edm2 else (rows, table)
        edit(WEIGHTS, lambda t, stored=tables[0]: t | {"class_embedding.weight": stored})
        assert codes(started_from(folder, loaded | {"class_embedding.weight": tables[1]}, now)) == expected


@pytest.fixture
def resumable(finished, tmp_path):
    """A checkpoint, to be changed."""
    return Path(shutil.copytree(finished.folder / "checkpoint-4", tmp_path / "checkpoint-4"))


def changed(optimizer, change):
    """A copy of the optimizer with other state; the parameters are shared."""
    other = torch.optim.AdamW([p for group in optimizer.param_groups for p in group["params"]])
    for parameter, state in optimizer.state.items():
        other.state[parameter] = change({key: value.clone() for key, value in state.items()})
    return other


def test_other_moments_are_found_also_by_a_few_tensors(finished):
    for change in (
        lambda state: {},
        lambda state: {k: torch.zeros_like(v) for k, v in state.items()},
        lambda state: state | {"exp_avg_sq": state["exp_avg_sq"] * 1.01},
        lambda state: state | {"step": state["step"] + 1},
    ):
        optimizer = changed(finished.resumed["optimizer"], change)
        for only in (None, 1):
            assert of_resume(finished, optimizer=optimizer, only=only) == ["state-moments"]


def test_moments_that_a_checkpoint_lacks_are_found(finished, resumable):
    """The run has none either: what is stored and what goes on agree."""
    stored = torch.load(resumable / "optimizer.bin", weights_only=True)
    moments = stored["state"]
    index = max(moments, key=lambda index: moments[index]["exp_avg"].abs().max())  # which moves from the start
    zeros = {name: torch.zeros_like(value) for name, value in moments[index].items()}
    for left in ({}, {k: v for k, v in moments.items() if k != index}, moments | {index: zeros}):
        torch.save(stored | {"state": left}, resumable / "optimizer.bin")
        other = changed(finished.resumed["optimizer"], lambda state: {})
        for number, parameter in enumerate(other.param_groups[0]["params"]):
            other.state[parameter] = dict(left.get(number, {}))
        assert of_resume(finished, resumable, optimizer=other) == ["state-moments-lost"]


def test_another_state_after_a_resume_is_found(finished):
    weights, averages = finished.resumed["weights"], finished.resumed["averages"]
    name = max(weights, key=lambda name: weights[name].numel())
    plain = {n.removeprefix("unet."): t for n, t in weights.items()}
    for changes, code in [
        ({"weights": weights | {name: weights[name] * 2}}, "state-weights"),
        ({"weights": weights | {n: averages.get(n.removeprefix("unet."), t) for n, t in weights.items()}}, "state-weights"),
        ({"weights": weights | {"head": torch.ones(1)}}, "state-weights"),
        ({"weights": {n: t for n, t in weights.items() if n != name}}, "state-weights"),
        ({"averages": {n: plain.get(n.rpartition("/")[2], t) for n, t in averages.items()}}, "state-weights"),
        ({"averages": {n: t * 0.9 for n, t in averages.items()}}, "state-weights"),
        ({"step": 0}, "state-step"),
        ({"keeps_norm_mean": True, "norm_mean": 0.5}, "state-norm-mean"),
    ]:
        assert of_resume(finished, **changes) == [code]
    older = {n: t * 0.9 for n, t in weights.items()}, {n: t * 0.9 for n, t in averages.items()}
    assert of_resume(finished, only=3, weights=older[0]) == of_resume(finished, only=3, averages=older[1]) == ["state-weights"]


def test_another_loss_scale_and_other_files_are_found(finished, resumable):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for growth, expected in ((0, []), (7, ["state-loss-scale"])):
        torch.save(scaler.state_dict() | {"_growth_tracker": growth}, resumable / "scaler.pt")
        assert of_resume(finished, resumable, scaler=scaler) == expected
    (resumable / "ema.safetensors").unlink()  # of a run that had no average, which begins at the weights
    weights = {n.removeprefix("unet."): t.clone() for n, t in finished.resumed["weights"].items()}
    assert of_resume(finished, resumable, averages=weights) == []
    assert of_resume(finished, resumable) == ["state-weights"]
    tensors = load_file(resumable / "model.safetensors")
    save_file({n: t.bfloat16().float() for n, t in tensors.items()}, resumable / "model.safetensors")
    assert of_resume(finished, resumable, averages=None) == ["state-weights"]


def test_snapshots_are_those_of_their_averages(tmp_path):
    averages = {0.05: {"a": torch.randn(3)}, 0.1: {"a": torch.randn(3)}}
    for width, average in averages.items():
        save_file({"a": average["a"].half()}, tmp_path / f"00000007-{width}.safetensors")
    assert codes(snapshots(tmp_path, 7, averages)) == codes(snapshots(tmp_path, 7, averages, only=2)) == []
    averages[0.1]["a"] = averages[0.05]["a"]
    assert codes(snapshots(tmp_path, 7, averages)) == codes(snapshots(tmp_path, 7, averages, only=2)) == ["ema-snapshot"]
    assert codes(snapshots(tmp_path, 8, averages)) == ["ema-snapshot"] * 2  # there are none


def test_a_few_tensors_are_in_turn_all():
    for count in (1, 3, 10, 101):
        turns = [few(map(str, range(count)), turn) for turn in range(count)]
        assert all(0 < len(turn) <= FEW for turn in turns) and len(set().union(*turns)) == count
