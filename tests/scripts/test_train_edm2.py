"""train_edm2.py as its users run it, as far as it differs from train_ddpm.py; what both promise is tested in tests/faults."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY_EDM2_NETWORK, logged_scalars, make_tiny_flags, slow_turns
from safetensors.torch import load_file

import reconstruct_ema
import train_edm2
import utils.diffusion.edm2
import utils.optim.optimizers
from models.edm2_unet import EDM2Block, EDM2UNet, MPConv2d, MPLinear
from utils.core.errors import UserError
from utils.data.augmentation import to_unit_range
from utils.data.dataset import load_images
from utils.diffusion.edm2 import EDM2Denoiser, denoise, training_noise_levels
from utils.diffusion.pipelines import load_network
from utils.options.flags import DataOptions
from utils.runs.ema_snapshots import list_snapshots, reconstruct

WEIGHTS = "unet/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    return make_tiny_flags(tmp_path_factory.mktemp("tiny"), "train_edm2.py")


@pytest.fixture
def train_edm(train):
    return lambda flags: train(flags, script=train_edm2)


@pytest.fixture(scope="module")
def long_run(flags, tmp_path_factory) -> Path:
    """500 updates."""
    folder = tmp_path_factory.mktemp("long")
    train = ["--max_train_steps", "500", "--logging_steps", "50", "--checkpointing_steps", "250", "--learning_rate", "0.01"]
    train += ["--ema_widths", "0.05", "0.1", "0.15", "--ema_snapshot_steps", "12", "--ema_snapshot_dtype", "fp32"]
    train += ["--validation_images", "16", "--validation_steps", "250", "--sigma_data", "0.7"]
    assert train_edm2.main(train_edm2.parse_args([str(flag) for flag in (*flags, *train, "--output_dir", folder)])) == 0
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    return folder


@pytest.mark.slow
def test_magnitudes_do_not_drift(long_run, flags):
    """Every weight vector has unit variance. Of the blocks' outputs the median, and each in the encoder, is from 0.5 to 1.5.

    Decoder blocks, which have no norm, go beyond: branches that have learned to agree add up to more than independent ones, to
    1.8 here and to 1.90 in a run of the digits preset (benchmarks/quality/RESULTS.md). They get there early, and grow no more.
    """
    cache_dir = flags[flags.index("--cache_dir") + 1]
    images = load_images(DataOptions(dataset_name="digits", resolution=16, image_channels=1, cache_dir=cache_dir))
    clean_images = to_unit_range(torch.from_numpy(images.fetch(np.arange(64))), images.max_value)
    sigmas = training_noise_levels(0, torch.arange(64), -0.8, 1.6)
    torch.manual_seed(0)
    noisy_images = clean_images + sigmas[:, None, None, None] * torch.randn_like(clean_images)
    unet, _ = load_network(str(long_run))
    layers = [name for name, module in unet.named_modules() if isinstance(module, (MPConv2d, MPLinear))]

    def magnitudes(step: int) -> dict[str, float]:
        """Of the outputs of the blocks, by their names, after `step` updates."""
        weights, seen = load_file(long_run / f"checkpoint-{step}/model.safetensors"), {}
        for name in (*(f"unet.{layer}.weight" for layer in layers), "uncertainty.linear.weight"):
            rms = weights[name].flatten(1).square().mean(1).sqrt()
            assert (rms - 1).abs().max() < 1e-3, name
        unet.load_state_dict({name.removeprefix("unet."): w for name, w in weights.items() if name.startswith("unet.")})
        hooks = [
            module.register_forward_hook(lambda m, i, out, name=name: seen.update({name: out.square().mean().sqrt().item()}))
            for name, module in unet.named_modules()
            if isinstance(module, EDM2Block)
        ]
        with torch.no_grad():
            denoise(unet, noisy_images, sigmas, 0.7, torch.from_numpy(images.labels[:64]))
        for hook in hooks:
            hook.remove()
        return seen

    halfway, seen = magnitudes(250), magnitudes(500)
    assert len(seen) == len(unet.encoder) + len(unet.decoder)
    assert 0.5 < np.median(list(seen.values())) < 1.5, seen
    assert all(0.5 < value < (1.5 if name.startswith("encoder") else 2.2) for name, value in seen.items()), seen
    assert all(seen[name] < 1.1 * halfway[name] for name in seen), (halfway, seen)


@pytest.mark.slow
def test_it_learns(long_run):
    losses = logged_scalars(long_run, "train/loss")
    assert losses[500] < 0.5 * losses[50]
    validation = logged_scalars(long_run, "validation/loss")
    assert 0.5 * losses[500] < validation[500] < 2 * losses[500] and validation[500] < validation[250]


@pytest.mark.slow
def test_the_exported_network_is_the_first_average(long_run):
    averaged, exported = load_file(long_run / "checkpoint-500/ema.safetensors"), load_file(long_run / WEIGHTS)
    assert exported.keys() == {name for name in averaged if "/" not in name}
    assert all(torch.equal(tensor, averaged[name]) for name, tensor in exported.items())
    assert {name.split("/")[0] for name in averaged if "/" in name} == {"0.1", "0.15", "power"}
    card = (long_run / "README.md").read_text()
    assert "| EMA width (relative) | 0.05 |" in card and "| Classes | 10 |" in card and "trust_remote_code" in card


@pytest.mark.slow
def test_reconstruction_is_the_average_that_was_tracked(long_run, tmp_path):
    snapshots = [snapshot for snapshot in list_snapshots(long_run) if snapshot.width != 0.15]
    made = reconstruct(snapshots, 0.15)
    tracked = load_file(long_run / "checkpoint-500/ema.safetensors")
    difference = sum((made[name] - tracked[f"0.15/{name}"]).square().sum() for name in made).sqrt()
    assert difference < 0.001 * sum(tensor.square().sum() for tensor in made.values()).sqrt()
    # The script, with the average of 0.15 among the snapshots, into a folder of its own.
    reconstruct_ema.main(reconstruct_ema.parse_args([str(long_run), "--width", "0.15", "--output_dir", str(tmp_path / "out")]))
    unet, config = load_network(str(tmp_path / "out"))
    difference = sum((unet.state_dict()[name] - tracked[f"0.15/{name}"]).square().sum() for name in made).sqrt()
    assert difference < 1e-4 * sum(tensor.square().sum() for tensor in made.values()).sqrt()
    assert config["sigma_data"] == 0.7
    assert "| EMA width (relative) | 0.15 |" in (tmp_path / "out/README.md").read_text()


@pytest.mark.slow
def test_reconstruction_at_an_earlier_update_and_what_it_refuses(long_run, tmp_path, capsys):
    def run(*words) -> None:
        reconstruct_ema.main(reconstruct_ema.parse_args([str(word) for word in words]))

    run(long_run, "--width", "0.1", "--step", "252", "--output_dir", tmp_path / "out")
    assert "from 63 snapshots, profile 0.0% off:" in capsys.readouterr().out
    saved = load_file(tmp_path / "out" / WEIGHTS)
    [snapshot] = [s for s in list_snapshots(long_run) if (s.step, s.width) == (252, 0.1)]
    expected = load_file(snapshot.path)
    assert (saved["conv_in.weight"] - expected["conv_in.weight"]).norm() < 1e-4 * expected["conv_in.weight"].norm()
    for words, message in (
        ((long_run, "--width", "0.5", "--output_dir", tmp_path / "out"), "--width must be a number above 0 and below 0.2886"),
        ((long_run, "--width", "0.1", "--step", "600", "--output_dir", tmp_path / "out"), "set a step from 12 to 500"),
        (
            (long_run, "--width", "0.1", "--step", "250", "--output_dir", tmp_path / "out"),
            "between the snapshots at 240 and 252",
        ),
        ((long_run, "--width", "0.1", "--output_dir", long_run), "choose another --output_dir"),
        ((long_run, "--width", "0.1", "--output_dir", tmp_path / "out" / "model_index.json"), "cannot write to --output_dir"),
        ((tmp_path / "out", "--width", "0.1", "--output_dir", tmp_path / "other"), "no EMA snapshots"),
    ):
        with pytest.raises(UserError, match=message):
            run(*words)


@pytest.mark.slow
def test_reconstruction_works_for_the_other_script_s_runs(train, tiny_flags, tmp_path):
    from diffusers import DDPMPipeline

    run = ["--ema_type", "power", "--spectral_norm", "--max_train_steps", "12", "--ema_snapshot_dtype", "fp32"]
    assert train([*tiny_flags, *run, "--output_dir", tmp_path / "run"]) == 0
    words = [str(tmp_path / "run"), "--width", "0.05", "--output_dir", str(tmp_path / "out")]
    reconstruct_ema.main(reconstruct_ema.parse_args(words))
    made, exported = (DDPMPipeline.from_pretrained(tmp_path / name).unet.state_dict() for name in ("out", "run"))
    assert all((made[name] - exported[name]).norm() <= 1e-3 * exported[name].norm() + 1e-6 for name in exported)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--dropout", "0.2", "--label_dropout", "0.5", "--augment_probability", "0.3"], id="dropout"),
        *slow_turns(
            ["--mixed_precision", "bf16", "--gradient_checkpointing", "--ema_type", "exponential", "--no-class_conditional"],
            ["--no-force_weight_norm", "--no-use_ema", "--dataloader_num_workers", "1", "--adaptive_clipping"],
            ids=["bf16-unconditional", "unforced"],
        ),
    ],
)
def test_killed_and_resumed_equals_uninterrupted_bit_for_bit(resumed_alike, flags, tmp_path, options):
    resumed_alike([*flags, *options], tmp_path, train_edm2)


def test_what_a_run_shows_of_itself_is_computed_in_full_precision(train_edm, flags, tmp_path, monkeypatch):
    """Samples, validation, and the look at how well each noise level is denoised; training itself is in bf16."""
    forward, seen = EDM2UNet.forward, {True: set(), False: set()}

    def spy(self, *arguments, **options):
        seen[self.training].add(torch.is_autocast_enabled("cpu"))
        return forward(self, *arguments, **options)

    monkeypatch.setattr(EDM2UNet, "forward", spy)
    shown = ["--mixed_precision", "bf16", "--max_train_steps", "2", "--validation_images", "16", "--validation_steps", "2"]
    assert train_edm([*flags, *shown, "--output_dir", tmp_path]) == 0
    assert seen == {True: {True}, False: {False}}


def test_a_chain_that_is_not_possible_is_refused_before_the_first_update(train_edm, flags, tmp_path):
    with pytest.raises(UserError, match="5000 sampling steps are not possible"):
        train_edm([*flags, "--output_dir", tmp_path / "run", "--num_inference_steps", "5000"])


def test_another_network_s_config_is_refused(train_edm, flags, tiny_flags, tmp_path):
    named = flags.index("--model_config_name_or_path") + 1
    other = [*flags[:named], tiny_flags[tiny_flags.index("--model_config_name_or_path") + 1], *flags[named + 1 :]]
    with pytest.raises(UserError, match="is the config of a UNet2DModel"):
        train_edm([*other, "--output_dir", tmp_path / "run"])


@pytest.mark.slow
def test_sweep_finds_the_best_width(long_run, tmp_path, capsys, monkeypatch):
    """With the true distance, and with one that is known to have its minimum at 0.1."""
    import utils.evaluation.ema_reconstruction

    words = [str(long_run), "--widths", "0.05:0.15:0.05", "--num_images", "32", "--output_dir", str(tmp_path / "out")]
    reconstruct_ema.main(reconstruct_ema.parse_args([*words, "--cpu_threads", "1"]))
    found = json.loads((tmp_path / "out/sweep.json").read_text())
    assert list(found["widths"]) == ["0.05", "0.1", "0.15"] and all(value > 0 for value in found["widths"].values())
    assert found["widths"][str(found["best_width"])] == min(found["widths"].values())
    assert "fd_randconv by EMA width" in (tmp_path / "out/sweep.html").read_text()
    averaged = load_file(long_run / "checkpoint-500/ema.safetensors")["0.1/conv_in.weight"]
    monkeypatch.setattr(
        utils.evaluation.ema_reconstruction,
        "make_judge",
        lambda *a, **k: lambda unet: (unet.conv_in.weight - averaged).norm().item(),
    )
    reconstruct_ema.main(reconstruct_ema.parse_args([*words, "--cpu_threads", "1"]))
    assert json.loads((tmp_path / "out/sweep.json").read_text())["best_width"] == 0.1
    assert "| EMA width (relative) | 0.1 |" in (tmp_path / "out/README.md").read_text()


def trained_by_hand(calls: list[dict], weights: dict[str, torch.Tensor], epsilon: float) -> dict[str, torch.Tensor]:
    """`weights` of the tiny denoiser after one update by each of `calls`: torch's own Adam on the loss as the reference has it,
    the sum over channels and pixels of lambda / exp(u) (D - y)^2 + u, divided by the batch."""
    unet = EDM2UNet.from_config(TINY_EDM2_NETWORK | {"sample_size": 16, "num_class_embeds": 10})
    denoiser = EDM2Denoiser(unet, sigma_data=0.5)
    denoiser.load_state_dict(weights)
    optimizer = torch.optim.Adam(denoiser.parameters(), lr=0.01, betas=(0.9, 0.99), eps=epsilon)
    for call in calls:
        denoised, u = denoiser(call["noisy_images"], call["sigma"], call["labels"])
        factor, u = ((call["sigma"] ** 2 + 0.25) / (call["sigma"] * 0.5) ** 2)[:, None, None, None], u[:, None, None, None]
        loss = (factor / u.exp() * (denoised - call["clean_images"]) ** 2 + u).sum() / len(denoised)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for module in denoiser.modules():
                if isinstance(module, (MPConv2d, MPLinear)):
                    rows = module.weight.flatten(1).double()
                    module.weight.copy_((rows / rows.square().mean(1, keepdim=True).sqrt()).view_as(module.weight))
    return denoiser.state_dict()


def test_adam_s_epsilon_is_that_of_a_loss_summed_over_channels_and_pixels(train_edm, flags, tmp_path, monkeypatch):
    calls: list[dict] = []
    first_weights: dict[str, torch.Tensor] = {}
    forward, losses_per_sample = EDM2Denoiser.forward, utils.diffusion.edm2.losses_per_sample

    def see_inputs(self, noisy_images, sigma, labels):
        if self.training:
            first_weights.update({} if first_weights else {n: t.clone() for n, t in self.state_dict().items()})
            calls.append({"noisy_images": noisy_images, "sigma": sigma, "labels": labels})
        return forward(self, noisy_images, sigma, labels)

    def see_images(denoised, clean_images, *rest):
        if denoised.requires_grad:
            calls[-1]["clean_images"] = clean_images
        return losses_per_sample(denoised, clean_images, *rest)

    monkeypatch.setattr(EDM2Denoiser, "forward", see_inputs)
    monkeypatch.setattr(utils.diffusion.edm2, "losses_per_sample", see_images)
    run = ["--learning_rate", "0.01", "--lr_scheduler", "constant", "--max_grad_norm", "0", "--adam_epsilon", "1e-6"]
    run += ["--checkpointing_steps", "4", "--max_train_steps", "8"]
    assert train_edm([*flags, *run, "--output_dir", tmp_path]) == 0
    monkeypatch.undo()
    trained = load_file(tmp_path / "checkpoint-8/model.safetensors")
    assert len(calls) == 8

    def distance(epsilon: float) -> float:
        """From weights trained by hand, relative to the way from the first weights."""
        by_hand = trained_by_hand(calls, first_weights, epsilon)
        way = sum((trained[name] - first_weights[name]).square().sum() for name in trained).sqrt()
        return float(sum((trained[name] - by_hand[name]).square().sum() for name in trained).sqrt() / way)

    assert distance(1e-6) < 1e-3  # rounding is 1e-7 in a gradient; Adam's step has that relative to each weight's own
    assert distance(256 * 1e-6) > 0.05 and distance(1e-6 / 256) > 5e-3  # one that were not divided, or twice: it is felt here
    recorded = json.loads((tmp_path / "options.json").read_text())
    assert (recorded["options"]["adam_epsilon"], recorded["resolved"]["optimizer_epsilon"]) == (1e-6, 1e-6 / 256)


@pytest.mark.slow
def test_a_run_begun_before_epsilon_was_divided_goes_on_as_it_was(train_edm, flags, tmp_path, monkeypatch, capsys):
    run = [*flags, "--max_train_steps", "2", "--checkpointing_steps", "1", "--output_dir", tmp_path]

    def recorded() -> float | None:
        return json.loads((tmp_path / "options.json").read_text())["resolved"]["optimizer_epsilon"]

    with monkeypatch.context() as patch:
        patch.setattr("train_edm2.epsilon_of_means", lambda options, shape: options.adam_epsilon)
        assert train_edm(run) == 0
    capsys.readouterr()
    assert train_edm([*run, "--resume_from_checkpoint", "checkpoint-1"]) == 0
    keeps = "the optimizer keeps the checkpoint's epsilon, 1e-08; a new run would use 3.91e-11"
    assert keeps in capsys.readouterr().out and recorded() == 1e-8
    assert train_edm([*run, "--overwrite_output_dir"]) == 0
    assert recorded() == 1e-8 / 256
