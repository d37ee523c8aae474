"""What real runs export and resume passes the audit, and each change to it is named."""

import importlib
from types import SimpleNamespace

import pytest
import torch
from conftest import SCRIPTS, make_tiny_flags
from safetensors.torch import load_file

from utils.diagnostics.audit.export import DeclaredExport, check_exported
from utils.diagnostics.audit.resume import check_resumed

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
        first = next(data.samples.batches(run.state.step, 6))
        seen.network, seen.exported = objective.network, objective.exported
        seen.resumed = {
            "network_state": objective.network.state_dict(),
            "optimizer": optimizer,
            "ema_state": run.ema.state_dict(),
            "step": run.state.step,
            "sample_numbers": first["sample_numbers"],
            "global_batch_size": run.length.global_batch_size,
        }
        raise Stop

    with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(Stop):
        monkeypatch.setattr(script, "begin_run", stop_after_resume)
        train([*flags, "--resume_from_checkpoint", "checkpoint-4"], script=script)
    last = seen.folder / "checkpoint-6"
    seen.averaged = {n: t for n, t in load_file(last / "ema.safetensors").items() if "/" not in n}
    raw = load_file(last / "model.safetensors")
    seen.raw = {n.removeprefix("unet."): t for n, t in raw.items() if not n.startswith("uncertainty.")}
    seen.declared = DeclaredExport(sigma_data=0.5) if seen.is_edm2 else DeclaredExport()
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
    checks = exported(finished) + check_resumed(finished.folder / "checkpoint-4", **finished.resumed)
    assert all(check.healthy for check in checks), [check for check in checks if not check.healthy]
    assert {check.stage for check in checks} == {"export", "state", "optimizer", "ema", "data"}
    assert torch.equal(torch.get_rng_state(), state) and finished.exported.training == training
