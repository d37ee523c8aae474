"""--objective flow as its users run it: continued bit for bit, loaded by diffusers alone, sampled, and refused."""

import json

import pytest
import torch
from conftest import slow_turns, step_seen
from diffusers import DDPMPipeline
from safetensors.torch import load_file

import generate
import train_ddpm
from utils.core import randomness
from utils.core.errors import UserError
from utils.diffusion.export import check_pipeline
from utils.diffusion.pipelines import load_network, load_unconditional, training_scheduler
from utils.diffusion.sampling import SamplePlan, make_sampler, sample
from utils.evaluation.ema_reconstruction import load_run

FLOW = ["--objective", "flow", "--validation_images", "16", "--validation_steps", "4", "--random_flip"]
KINDS = {
    "velocity": [],
    "velocity by class": ["--class_conditional", "--P_mean", "0", "--sampler", "heun"],
    "clean images": ["--prediction_type", "sample", "--P_mean", "0.8", "--P_std", "0.8"],
}


@pytest.fixture(scope="module", params=["velocity", *slow_turns(*list(KINDS)[1:])])
def run(request, resumed_alike, tiny_flags, tmp_path_factory):
    """(folder of a run and of its continuation, which is the same bit for bit; flags)"""
    folder, flags = tmp_path_factory.mktemp("flow"), [*tiny_flags, *FLOW, *KINDS[request.param]]
    resumed_alike(flags, folder)
    return folder, flags


def prediction_of(run) -> str:
    return "sample" if "sample" in run[1] else "v_prediction"


def test_the_doctor_measured_all_and_found_nothing(run):
    stages, found = step_seen(run[0] / "whole")
    assert {"timestep", "input", "target", "weight"} <= stages and found == {}


@pytest.mark.slow
def test_diffusers_loads_it_in_a_process_without_this_repository(run):
    check_pipeline(run[0] / "whole")


@pytest.mark.parametrize("run", ["velocity"], indirect=True)
def test_diffusers_makes_the_images_that_the_run_makes(run):
    pipeline = run[0] / "whole"
    unet, config = load_network(str(pipeline))
    plan = SamplePlan(make_sampler("euler", config), 6, (1, 16, 16), 0, 2, "cpu")
    ours = sample(unet.eval(), plan, torch.arange(2))
    x, theirs = randomness.normal(0, "sample", torch.arange(2), (1, 16, 16)), DDPMPipeline.from_pretrained(pipeline)
    theirs.scheduler.set_timesteps(6)
    with torch.no_grad():
        for timestep in theirs.scheduler.timesteps:
            x = theirs.scheduler.step(theirs.unet.eval()(x, timestep).sample, timestep, x).prev_sample
    assert (ours - x.clamp(-1, 1)).abs().max() < 1e-4


@pytest.mark.parametrize("of", ["", "checkpoint-4"])
def test_a_run_and_its_checkpoints_are_sampled_averaged_and_examined_as_they_were_trained(run, tmp_path, of):
    folder = str(run[0] / "whole" / of)
    asked = ["--num_images", "3", "--num_inference_steps", "2", "--output_dir", str(tmp_path / "made")]
    generate.main(generate.parse_args(["--pipeline", folder, *asked]))
    assert len(list((tmp_path / "made").glob("0*.png"))) == 3
    assert load_run(run[0] / "whole", folder)[1].config.prediction_type == prediction_of(run)
    if "--class_conditional" not in run[1]:
        assert training_scheduler(load_unconditional(folder)[1]).config.prediction_type == prediction_of(run)


def test_a_checkpoint_knows_its_network_without_an_export(run, tmp_path):
    """Of a run that was stopped before its first export."""
    checkpoint = tmp_path / "run" / "checkpoint-4"
    checkpoint.parent.mkdir()
    checkpoint.symlink_to(run[0] / "whole" / "checkpoint-4")
    unet, config = load_network(str(checkpoint))
    assert config["prediction_type"] == prediction_of(run)
    weights = load_file(checkpoint / "ema.safetensors")
    assert torch.equal(unet.conv_in.weight, weights["conv_in.weight"])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--snr_gamma", "5"], "--snr_gamma does not go with --objective flow"),
        (["--ddpm_beta_schedule", "sigmoid"], "--ddpm_beta_schedule does not go"),
        (["--P_std", "0.5"], "--P_std needs --P_mean"),
        (["--prediction_type", "epsilon"], "no --prediction_type epsilon"),
        (["--sampler", "ddim"], "--sampler ddim does not go with --objective flow"),
        (["--pretrained", "somewhere"], "--pretrained cannot be continued by --objective flow"),
    ],
)
def test_flags_of_the_other_objective_are_refused(flags, said):
    with pytest.raises(UserError, match=said):
        train_ddpm.parse_args(["--objective", "flow", "--dataset_name", "digits", *flags])


def test_its_options_given_back_mean_the_same(run):
    options = json.loads((run[0] / "whole" / "options.json").read_text())["options"]
    again = train_ddpm.parse_args(["--config", str(run[0] / "whole" / "options.json")])
    assert {name: value for name, value in vars(again).items() if value != options[name]} == {}


def test_the_preset_of_the_digits_goes_with_it(tmp_path, capsys):
    with pytest.raises(SystemExit):
        train_ddpm.parse_args(["--objective", "flow", "--print_config"])
    (tmp_path / "flow.yaml").write_text(capsys.readouterr().out)
    again = train_ddpm.parse_args(["--config", str(tmp_path / "flow.yaml")])
    assert vars(again) == vars(train_ddpm.parse_args(["--objective", "flow"]))


def test_a_run_of_ddpm_does_not_start_from_it(run, train, tiny_flags, tmp_path):
    flags = tiny_flags[: tiny_flags.index("--model_config_name_or_path")] + tiny_flags[tiny_flags.index("--cache_dir") :]
    with pytest.raises(UserError, match="of flow matching"):
        train([*flags, "--pretrained", run[0] / "whole", "--output_dir", tmp_path / "next"])
