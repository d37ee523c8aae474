"""What real runs export and resume passes the audit, and each change to it is named."""

import importlib
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from conftest import SCRIPTS, TINY_NETWORK, make_tiny_flags
from diffusers import DDPMScheduler, UNet2DModel
from safetensors.torch import load_file, save_file

from utils.diagnostics.audit.declared import DeclaredDenoising, DeclaredNoising
from utils.diagnostics.audit.export import check_exported
from utils.diagnostics.audit.resume import check_resumed, check_saved, check_snapshots
from utils.diffusion.ddpm import BETA_SCHEDULES, config_for_any, make_noise_scheduler
from utils.diffusion.export import export_pipeline
from utils.diffusion.unet import normalize_spectra

LINEAR = DeclaredNoising("linear", 1000, False, "epsilon", None)
WEIGHTS, SCHEDULER = "unet/diffusion_pytorch_model.safetensors", "scheduler/scheduler_config.json"


class Stop(Exception):
    pass


@pytest.fixture(scope="module", params=SCRIPTS)
def finished(request, train, tmp_path_factory):
    """The folder of a run of 6 updates, what it exports, and what a resume at update 4 brings."""
    folder, script = tmp_path_factory.mktemp("audited"), importlib.import_module(request.param.removesuffix(".py"))
    flags = [*make_tiny_flags(folder, request.param), "--checkpointing_steps", 2, "--output_dir", folder / "run"]
    flags += ["--max_train_steps", 6]
    assert train(flags, script=script) == 0
    begin, seen = script.begin_run, SimpleNamespace(folder=folder / "run", is_edm2=request.param == "train_edm2.py")

    def stop_after_resume(options, accelerator, folder, data, objective, optimizer):
        run = begin(options, accelerator, folder, data, objective, optimizer)
        seen.network, seen.exported = objective.network, objective.exported
        seen.resumed = {
            "network_state": objective.network.state_dict(),
            "optimizer": optimizer,
            "ema_state": run.ema.state_dict(),
            "step": run.state.step,
        }
        raise Stop

    with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(Stop):
        monkeypatch.setattr(script, "begin_run", stop_after_resume)
        train([*flags, "--resume_from_checkpoint", "checkpoint-4"], script=script)
    last = seen.folder / "checkpoint-6"
    seen.averaged = {n: t for n, t in load_file(last / "ema.safetensors").items() if "/" not in n}
    raw = load_file(last / "model.safetensors")
    seen.raw = {n.removeprefix("unet."): t for n, t in raw.items() if not n.startswith("uncertainty.")}
    seen.declared = DeclaredDenoising(0.5, -0.4, 1.0, False) if seen.is_edm2 else LINEAR
    return seen


def exported(finished, folder=None, **changes):
    given = {"raw_weights": finished.raw, "network": finished.exported, "declared": finished.declared} | changes
    return check_exported(folder or finished.folder, given.pop("weights", finished.averaged), **given)


def deviations(checks, *stages):
    wrong = [check for check in checks if check.healthy is False]
    assert {check.stage for check in wrong} <= set(stages), wrong
    return " | ".join(check.message for check in wrong)


def test_what_a_run_leaves_and_resumes_is_healthy(finished):
    state = torch.get_rng_state()
    training = finished.exported.training
    checks = exported(finished) + exported(finished, network=None)
    checks += check_resumed(finished.folder / "checkpoint-4", **finished.resumed)
    assert all(check.healthy for check in checks), [check for check in checks if not check.healthy]
    assert {check.stage for check in checks} == {"export", "state", "optimizer", "ema"}
    assert torch.equal(torch.get_rng_state(), state) and finished.exported.training == training


@pytest.fixture
def copied(finished, tmp_path):
    """The exported pipeline, to be changed: its folder, and a function that edits a JSON file or the tensors in it."""
    for name in ("model_index.json", "unet", "scheduler"):
        source = finished.folder / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)

    def edit(name, change):
        if name == WEIGHTS:
            tensors = load_file(tmp_path / name)
            save_file({n: t.contiguous() for n, t in (change(tensors) or tensors).items()}, tmp_path / name)
        else:
            (tmp_path / name).write_text(json.dumps(json.loads((tmp_path / name).read_text()) | change))

    return tmp_path, edit


def swap_two(tensors):
    """The values of two tensors of one shape change places."""
    shapes = {}
    for name, tensor in tensors.items():
        if (other := shapes.setdefault((tensor.ndim > 1, tensor.shape), name)) != name and not torch.equal(
            tensor, tensors[other]
        ):
            tensors[name], tensors[other] = tensors[other], tensor
            return


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {f"_orig_mod.{n}": v for n, v in t.items()}, "those of a wrapped network"),
        (lambda t: {f"module.{n}": v for n, v in t.items()}, "those of a wrapped network"),
        (lambda t: {n: v for n, v in t.items() if n != min(t)}, "does not have the names of the network's tensors: 1 missing"),
        (lambda t: {n: v.half() for n, v in t.items()}, "rounded to float16"),
        (lambda t: {n: v.bfloat16().float() for n, v in t.items()}, "rounded to bfloat16"),
        (lambda t: {n: v * 1.001 for n, v in t.items()}, "from another time of the training: they differ by 0.001"),
        (lambda t: {n: -v for n, v in t.items()}, "weights differ by 2"),
        (swap_two, "some exported weights are not those of the network"),
    ],
)
def test_other_weights_are_named(finished, copied, change, message):
    folder, edit = copied
    edit(WEIGHTS, change)
    checks = exported(finished, folder)
    assert message in deviations(checks, "export") and checks[-1].healthy is None


def test_raw_weights_in_place_of_averaged_ones_are_named(finished, copied):
    folder, edit = copied
    edit(WEIGHTS, lambda _: finished.raw)
    assert "the raw ones, not the averaged ones" in deviations(exported(finished, folder), "export")
    assert not deviations(exported(finished, folder, weights=finished.raw, raw_weights=None))


def test_missing_files_are_named(finished, copied):
    folder, _ = copied
    (folder / WEIGHTS).unlink()
    assert "safetensors is missing" in deviations(exported(finished, folder), "export")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta_schedule": "scaled_linear"}, "noise schedule is scaled_linear; the training uses linear, 1000 timesteps"),
        ({"beta_end": 0.03}, "noise schedule is linear, 1000 timesteps, other numbers"),
        ({"num_train_timesteps": 500}, "500 timesteps"),
        ({"rescale_betas_zero_snr": True}, "noise schedule is linear, zero SNR"),
        ({"prediction_type": "v_prediction"}, "takes the network's output for v_prediction; it was trained as epsilon"),
        ({"clip_sample": False}, "clip_sample is False"),
        ({"thresholding": True}, "thresholding is True"),
        ({"beta_schedule": "unheard_of"}, "cannot make a scheduler"),
    ],
)
def test_another_scheduler_is_named(finished, copied, settings, message):
    if finished.is_edm2:
        settings, message = {"sigma_data": 0.25}, "sigma_data is 0.25, not 0.5"
    folder, edit = copied
    edit(SCHEDULER, settings)
    assert message in deviations(exported(finished, folder), "export")


def test_another_class_and_written_out_betas_are_the_same_schedule(finished, copied):
    if finished.is_edm2:
        return
    folder, edit = copied
    betas = DDPMScheduler().betas.tolist()
    edit(SCHEDULER, {"_class_name": "DDIMScheduler", "trained_betas": betas, "timestep_spacing": "trailing"})
    assert not deviations(exported(finished, folder))


@pytest.mark.parametrize("schedule", BETA_SCHEDULES)
@pytest.mark.parametrize("zero", [False, True])
def test_every_schedule_passes_as_it_is_exported(finished, copied, schedule, zero):
    if finished.is_edm2:
        return
    folder, _ = copied
    named = {"beta_schedule": schedule, "rescale_betas_zero_snr": zero, "prediction_type": "v_prediction"}
    for steps in (10, 1000):
        made = make_noise_scheduler(**named, num_train_timesteps=steps)
        type(made).from_config(config_for_any(made.config)).save_pretrained(folder / "scheduler")
        declared = DeclaredNoising(schedule, steps, zero, "v_prediction", None)
        assert not deviations(exported(finished, folder, declared=declared, network=None))


def test_spectral_norm_passes_and_autocast_is_left_out(tmp_path):
    unet = UNet2DModel.from_config(TINY_NETWORK)
    normalize_spectra(unet)
    export_pipeline(unet, make_noise_scheduler(), tmp_path, "")
    unet._original_forward, forward = unet.forward, unet.forward
    unet.forward = torch.autocast("cpu", dtype=torch.bfloat16)(forward)  # as accelerate does it
    patched = unet.forward
    checks = check_exported(tmp_path, unet.state_dict(), LINEAR, network=unet)
    assert all(check.healthy for check in checks) and len(checks) == 7, checks
    assert unet.forward is patched and unet.training
    other = {name: tensor * 1.1 if name.endswith("_u") else tensor for name, tensor in unet.state_dict().items()}
    text = deviations(check_exported(tmp_path, other, LINEAR), "export")
    assert "some exported weights are not those of the network" in text


def test_another_network_under_the_same_weights_is_named(finished, copied):
    folder, edit = copied
    changes = {"sample_size": 32} if finished.is_edm2 else {"norm_eps": 0.1}
    edit("unet/config.json", changes)
    text = deviations(exported(finished, folder), "export")
    assert f"{next(iter(changes))} is" in text and ("different outputs" in text) != finished.is_edm2


def resumed(finished, checkpoint="checkpoint-4", **changes):
    return check_resumed(finished.folder / checkpoint, **(finished.resumed | changes))


def changed(optimizer, change):
    """A copy of the optimizer with other state; the parameters are shared."""
    other = torch.optim.AdamW([p for group in optimizer.param_groups for p in group["params"]])
    for parameter, state in optimizer.state.items():
        other.state[parameter] = change({key: value.clone() for key, value in state.items()})
    return other


def test_lost_moments_are_named(finished):
    optimizer = finished.resumed["optimizer"]
    for change, message in [
        (lambda state: {}, "moments were not loaded"),
        (lambda state: {k: torch.zeros_like(v) for k, v in state.items()}, "moments are zero: it starts anew"),
        (lambda state: state | {"exp_avg_sq": state["exp_avg_sq"] * 1.01}, "moments are not those of the checkpoint"),
        (lambda state: state | {"step": torch.zeros(())}, "counts of updates are zero: it starts anew"),
        (lambda state: state | {"step": state["step"] + 1}, "counts of updates are not those of the checkpoint"),
    ]:
        assert message in deviations(resumed(finished, optimizer=changed(optimizer, change)), "optimizer")


@pytest.mark.parametrize("lost", ["of all", "of one", "zeros of one"])
def test_moments_that_a_checkpoint_lacks_are_named(finished, tmp_path, lost):
    """The run has none either: what is stored and what goes on agree."""
    checkpoint = tmp_path / "checkpoint-4"
    shutil.copytree(finished.folder / checkpoint.name, checkpoint)
    stored = torch.load(checkpoint / "optimizer.bin", weights_only=True)
    index = max(
        stored["state"], key=lambda index: stored["state"][index]["exp_avg"].abs().max()
    )  # which moves from the start on
    if lost == "zeros of one":
        stored["state"][index] |= {name: torch.zeros_like(value) for name, value in stored["state"][index].items()}
    else:
        stored["state"] = {} if lost == "of all" else {k: v for k, v in stored["state"].items() if k != index}
    torch.save(stored, checkpoint / "optimizer.bin")
    optimizer = finished.resumed["optimizer"]
    other = torch.optim.AdamW([p for group in optimizer.param_groups for p in group["params"]])
    for number, parameter in enumerate(other.param_groups[0]["params"]):
        other.state[parameter] = dict(stored["state"].get(number, {}))
    text = deviations(check_resumed(checkpoint, **(finished.resumed | {"optimizer": other})), "optimizer")
    said = {"of all": "moments are not in checkpoint-4", "of one": "no moments of 1 of", "zeros of one": "no moments of 1 of"}
    assert said[lost] in text


def test_other_weights_after_a_resume_are_named(finished):
    state, average = finished.resumed["network_state"], finished.resumed["ema_state"]
    name = max(state, key=lambda name: state[name].numel())
    for tensors, message in [
        ({n: t + 0.01 for n, t in state.items()}, "the weights are not those of the checkpoint: they differ by"),
        (state | {name: state[name] * 2}, f"some weights are not those of the checkpoint: {name}"),
        (state | {n: average.get(n.removeprefix("unet."), t) for n, t in state.items()}, "goes on from the averaged weights"),
        (state | {"head": torch.ones(1)}, "names of tensors in the checkpoint are not those of the network: 1 unexpected"),
        ({n: t for n, t in state.items() if n != name}, "names of tensors in the checkpoint are not those of the network"),
    ]:
        assert message in deviations(resumed(finished, network_state=tensors), "state")
    wrapped = {f"module.{n}": t for n, t in state.items()}  # the caller's wrapper, not a mistake
    assert not deviations(resumed(finished, network_state=wrapped))


def test_an_average_that_was_not_restored_is_named(finished):
    state, average = finished.resumed["network_state"], finished.resumed["ema_state"]
    weights = {n.removeprefix("unet."): t for n, t in state.items()}
    started_anew = {n: weights.get(n.rpartition("/")[2], t) for n, t in average.items()}
    assert "was not restored: it begins again at the raw weights" in deviations(
        resumed(finished, ema_state=started_anew), "ema"
    )
    older = {n: t * 0.9 for n, t in average.items()}
    assert "not that of the checkpoint: it differs by 0.1" in deviations(resumed(finished, ema_state=older), "ema")
    assert "names of the stored average" in deviations(resumed(finished, ema_state={"a": torch.ones(1)}), "ema")


def test_another_step_is_named(finished):
    text = deviations(resumed(finished, step=0), "state")
    assert "goes on from update 0, but checkpoint-4 was made after update 4" in text


def test_the_scaler_and_changed_files_are_named(finished, tmp_path):
    checkpoint = tmp_path / "checkpoint-4"
    shutil.copytree(finished.folder / checkpoint.name, checkpoint)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    torch.save(scaler.state_dict(), checkpoint / "scaler.pt")
    assert not deviations(check_resumed(checkpoint, **finished.resumed, scaler=scaler))
    torch.save(scaler.state_dict() | {"_growth_tracker": 7}, checkpoint / "scaler.pt")
    text = deviations(check_resumed(checkpoint, **finished.resumed, scaler=scaler), "optimizer")
    assert "are 1024, 0; the checkpoint has 1024, 7" in text
    tensors = load_file(checkpoint / "model.safetensors")
    save_file({f"_orig_mod.{n}": t for n, t in tensors.items()}, checkpoint / "model.safetensors")
    assert "has the names of a wrapped network" in deviations(check_resumed(checkpoint, **finished.resumed), "state")


def test_an_average_begins_at_the_weights_of_a_run_that_had_none(finished, tmp_path):
    checkpoint = tmp_path / "checkpoint-4"
    shutil.copytree(finished.folder / checkpoint.name, checkpoint)
    (checkpoint / "ema.safetensors").unlink()
    weights = {n.removeprefix("unet."): t.clone() for n, t in finished.resumed["network_state"].items()}
    given = finished.resumed | {"ema_state": weights}
    assert not deviations(check_resumed(checkpoint, **given))
    assert "not that of the checkpoint" in deviations(check_resumed(checkpoint, **finished.resumed), "ema")


def test_code_in_the_exported_folder_is_compared_and_never_run(finished, copied, tmp_path):
    folder, _ = copied
    carried = list((folder / "unet").glob("*.py"))
    assert len(carried) == finished.is_edm2
    if not carried:
        return
    (code,) = carried
    code.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n" + code.read_text())
    wrong = deviations(exported(finished, folder), "export")
    assert "is not the code of the network that was trained" in wrong
    assert not (tmp_path / "ran").exists()


def test_a_checkpoint_that_does_not_hold_what_the_run_has_is_named(finished, tmp_path):
    checkpoint = finished.folder / "checkpoint-4"
    assert not deviations(check_saved(checkpoint, **finished.resumed))
    copy = tmp_path / checkpoint.name
    shutil.copytree(checkpoint, copy)
    weights = load_file(copy / "model.safetensors")
    save_file({n: t.bfloat16().float() for n, t in weights.items()}, copy / "model.safetensors")
    text = deviations(check_saved(copy, **finished.resumed), "state")
    assert "checkpoint-4 does not hold what the run has" in text and "weights as saved" in text


def test_snapshots_are_those_of_their_averages(tmp_path):
    averages = {0.05: {"a": torch.randn(3)}, 0.1: {"a": torch.randn(3)}}
    for width, average in averages.items():
        save_file({"a": average["a"].half()}, tmp_path / f"00000007-{width}.safetensors")
    assert not deviations(check_snapshots(tmp_path, 7, averages))
    averages[0.1]["a"] = averages[0.05]["a"]
    assert "does not hold the average of width 0.1" in deviations(check_snapshots(tmp_path, 7, averages), "ema")
    assert "was not saved" in deviations(check_snapshots(tmp_path, 8, averages), "ema")
