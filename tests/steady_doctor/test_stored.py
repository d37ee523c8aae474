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


@pytest.fixture(scope="module", params=SCRIPTS)
def finished(request, train, tmp_path_factory):
    """The folder of a run of 6 updates, what it should export, and what a resume at update 4 brings."""
    folder, script = tmp_path_factory.mktemp("stored"), importlib.import_module(request.param.removesuffix(".py"))
    flags = ["--checkpointing_steps", 2, "--output_dir", folder / "run", "--max_train_steps", 6]
    flags = [*make_tiny_flags(folder, request.param), *flags]
    assert train(flags, script=script) == 0
    begin, seen = script.begin_run, SimpleNamespace(folder=folder / "run", is_edm2=request.param == "train_edm2.py")

    def stop_after_resume(options, accelerator, folder, data, objective, optimizer):
        run = begin(options, accelerator, folder, data, objective, optimizer)
        seen.network, seen.names = objective.exported, data.images.class_names if objective.classes else ()
        tensors = {"weights": objective.network.state_dict(), "averages": run.ema.state_dict()}
        seen.resumed = {"step": run.state.step, "optimizer": optimizer, **tensors}
        raise LookupError("stopped here")

    with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(LookupError, match="stopped here"):
        monkeypatch.setattr(script, "begin_run", stop_after_resume)
        train([*flags, "--resume_from_checkpoint", "checkpoint-4"], script=script)
    last = seen.folder / "checkpoint-6"
    averaged = {n: t for n, t in load_file(last / "ema.safetensors").items() if "/" not in n}
    raw = load_file(last / "model.safetensors")
    seen.raw = {n.removeprefix("unet."): t for n, t in raw.items() if not n.startswith("uncertainty.")}
    process = {"settings": EDM} if seen.is_edm2 else {"settings": DDPM, "alphas_cumprod": DDPMScheduler().alphas_cumprod}
    seen.declared = {"weights": averaged, "class_names": seen.names, **process}
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
        *(lambda t: {f"_orig_mod.{n}": v for n, v in t.items()}, lambda t: {n: v for n, v in t.items() if n != min(t)}),
        *(lambda t: {n: v.half() for n, v in t.items()}, lambda t: {n: v.bfloat16().float() for n, v in t.items()}),
        *(lambda t: {n: v * (1 + 2e-7) for n, v in t.items()}, lambda t: t | {max(t): t[max(t)] + 1e-6}),
        lambda _: finished.raw,
    ):
        shutil.copy(finished.folder / WEIGHTS, folder / WEIGHTS)
        edit(WEIGHTS, change)
        assert of_export(finished, folder) == ["export-weights"]
    assert of_export(finished, folder, weights=finished.raw) == []


BETAS = {"trained_betas": DDPMScheduler().betas.tolist(), "timestep_spacing": "trailing"}
CONFIGS = [
    *((SCHEDULER, change, "export-schedule") for change in ({"beta_schedule": "scaled_linear"}, {"beta_end": 0.021})),
    *((SCHEDULER, change, "export-schedule") for change in ({"num_train_timesteps": 500}, {"rescale_betas_zero_snr": True})),
    (SCHEDULER, {"beta_schedule": "unheard_of"}, "export-files"),
    *((SCHEDULER, {name: False}, "export-settings") for name in ("prediction_type", "clip_sample", "clip_sample_range")),
    *((SCHEDULER, {name: 0.25}, "export-settings") for name in ("sigma_data", "sigma_max")),
    *((NETWORK, {name: 32}, "export-network") for name in ("norm_eps", "sample_size")),
    (INDEX, {"unet": ["diffusers", "UNet1DModel"]}, "export-network"),
    (INDEX, {"latent_mean": [0.0], "latent_std": [1.0]}, "export-latents"),
    (SCHEDULER, BETAS, ""),  # the same
]


def test_another_config_is_found(finished, copied):
    folder, edit = copied
    for file, change, code in CONFIGS:
        of_edm2, first = ("sigma_data", "sigma_max", "sample_size"), next(iter(change))
        if file == INDEX or (first in of_edm2) == finished.is_edm2:
            edit(file, change)
            assert "".join(of_export(finished, folder)) == code
            shutil.copy(finished.folder / file, folder / file)
    for file in (WEIGHTS, SCHEDULER, INDEX, NETWORK):
        (folder / file).unlink()
        assert of_export(finished, folder) == ["export-files"]
        shutil.copy(finished.folder / file, folder / file)


def test_the_scale_of_latents_and_the_names_of_classes_go_along(finished, copied):
    folder, edit = copied
    (folder / "vae").mkdir()
    (folder / "vae" / "config.json").write_text("{}")
    for mean, std, code in [([0.1, -0.2], [2.0, 3.0], []), ([0.1, -0.2], [2.0, 3.1], ["export-latents"])]:
        edit(INDEX, {"latent_mean": mean, "latent_std": std})
        assert of_export(finished, folder, latent_scale=([0.1, -0.2], [2.0, 3.0])) == code
        assert of_export(finished, folder, latent_scale=(mean * 2, std * 2)) == ["export-latents"]
    edit(INDEX, {"latent_mean": None, "latent_std": None})
    assert of_export(finished, folder, latent_scale=([0.0], [2.0])) == ["export-latents"]
    shutil.rmtree(folder / "vae")
    assert of_export(finished, folder, latent_scale=([0.0], [2.0])) == ["export-files"]
    for exported_names, code in [(["cat", "dog"], []), (["dog", "cat"], ["export-classes"]), (["cat"], ["export-classes"])]:
        edit(INDEX, {"id2label": dict(enumerate(exported_names))})
        assert of_export(finished, folder, class_names=["cat", "dog"]) == code
        assert of_export(finished, folder, class_names=()) == []  # without classes, or without names
    edit(INDEX, {"id2label": None})
    assert of_export(finished, folder, class_names=["cat", "dog"]) == ["export-classes"]


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
    loaded, names, other = load_file(folder / WEIGHTS), finished.names, ["network-pretrained"]
    name = max(loaded, key=lambda name: loaded[name].numel())
    assert codes(started_from(folder, {f"_orig_mod.{n}": t for n, t in loaded.items()}, names)) == []
    assert codes(started_from(folder, {n: t for n, t in loaded.items() if n != name}, names)) == []  # translated
    for weights in (finished.raw, loaded | {name: loaded[name] * 1.001}):
        assert codes(started_from(folder, weights, names)) == other
    rows, cats = torch.randn(3, 8), ["cat", "dog"]  # two classes, and none
    for table, before, now, expected in [
        *((rows, cats, cats, []), (rows[[1, 0, 2]], cats, cats[::-1], []), (rows[[1, 2, 2]], cats, ["dog", "new"], [])),
        *((rows, cats, cats[::-1], ["network-pretrained-classes"]), (rows, [], [], [])),
        (rows[[1, 0, 2]], [], [], ["network-pretrained-classes"]),
    ]:
        edit(INDEX, {"id2label": dict(enumerate(before))})
        tables = (rows.T, table.T) if finished.is_edm2 else (rows, table)
        edit(WEIGHTS, lambda t, stored=tables[0]: t | {"class_embedding.weight": stored})
        weights = loaded | {"class_embedding.weight": tables[1]}
        assert codes(started_from(folder, weights, now)) == expected
        if finished.is_edm2:  # whose rows are normalized
            sizes = {n: t.flatten(1).norm(dim=1).view(-1, *[1] * (t.ndim - 1)) for n, t in weights.items() if t.ndim > 1}
            scaled = {n: t / sizes.get(n, 1) for n, t in weights.items()}
            assert codes(started_from(folder, scaled, now, rescales=True)) == expected
            assert codes(started_from(folder, scaled, now)) == codes(started_from(folder, finished.raw, now, True)) == other


def changed(optimizer, change):
    """A copy of the optimizer with other state; the parameters are shared."""
    other = torch.optim.AdamW([p for group in optimizer.param_groups for p in group["params"]])
    for parameter, state in optimizer.state.items():
        other.state[parameter] = change({key: value.clone() for key, value in state.items()})
    return other


def test_other_moments_are_found_also_by_a_few_tensors(finished):
    for name, factor, only in product(("exp_avg", "exp_avg_sq", "step"), (0, 1.01), (None, 1)):
        optimizer = changed(finished.resumed["optimizer"], lambda state: state | {name: state[name] * factor})  # noqa: B023
        assert of_resume(finished, optimizer=optimizer, only=only) == ["state-moments"]
    optimizer = changed(finished.resumed["optimizer"], lambda state: {})
    assert of_resume(finished, optimizer=optimizer) == of_resume(finished, optimizer=optimizer, only=2) == ["state-moments"]


def test_what_a_checkpoint_lacks_or_has_otherwise_is_found(finished, tmp_path):
    resumable = Path(shutil.copytree(finished.folder / "checkpoint-4", tmp_path / "checkpoint-4"))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for growth, expected in ((0, []), (7, ["state-loss-scale"])):
        torch.save(scaler.state_dict() | {"_growth_tracker": growth}, resumable / "scaler.pt")
        assert of_resume(finished, resumable, scaler=scaler) == expected
    # Moments that the run has not either: what is stored and what goes on agree.
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
    (resumable / "ema.safetensors").unlink()  # of a run that had no average, which begins at the weights
    weights = {n.removeprefix("unet."): t.clone() for n, t in finished.resumed["weights"].items()}
    assert of_resume(finished, resumable, averages=weights, optimizer=None) == []
    assert of_resume(finished, resumable, optimizer=None) == ["state-weights"]


def test_another_state_after_a_resume_is_found(finished):
    weights, averages = finished.resumed["weights"], finished.resumed["averages"]
    name = max(weights, key=lambda name: weights[name].numel())
    plain = {n.removeprefix("unet."): t for n, t in weights.items()}
    averaged = {n: averages.get(n.removeprefix("unet."), t) for n, t in weights.items()}
    for others in (averaged, weights | {name: weights[name] * 2}, weights | {"head": torch.ones(1)}, {name: weights[name]}):
        assert of_resume(finished, weights=others) == ["state-weights"]
    restarted = {n: plain.get(n.rpartition("/")[2], t) for n, t in averages.items()}
    assert of_resume(finished, averages=restarted) == ["state-weights"]
    for kind, only in product(("weights", "averages"), (None, 1, 3)):
        older = {n: t * 0.9 for n, t in finished.resumed[kind].items()}
        assert of_resume(finished, only=only, **{kind: older}) == ["state-weights"]
    assert of_resume(finished, step=0) == ["state-step"]
    assert of_resume(finished, keeps_norm_mean=True, norm_mean=0.5) == ["state-norm-mean"]


def test_snapshots_are_those_of_their_averages(tmp_path):
    averages = {0.05: {"a": torch.randn(3)}, 0.1: {"a": torch.randn(3)}}
    for width, average in averages.items():
        save_file({"a": average["a"].half()}, tmp_path / f"00000007-{width}.safetensors")
    assert codes(snapshots(tmp_path, 7, averages)) == codes(snapshots(tmp_path, 7, averages, only=2)) == []
    averages[0.1]["a"] = averages[0.05]["a"]
    assert codes(snapshots(tmp_path, 7, averages)) == codes(snapshots(tmp_path, 7, averages, only=2)) == ["ema-snapshot"]
    assert codes(snapshots(tmp_path, 8, averages)) == ["ema-snapshot"] * 2  # there are none
    assert max(len(few("abcdefghij", turn)) for turn in range(9)) == FEW  # of all in turn
    assert set().union(*(few("abcdefghij", turn) for turn in range(9))) == set("abcdefghij")
