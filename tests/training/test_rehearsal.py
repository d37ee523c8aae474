"""What crosses between host and device in runs of both scripts, told on the device of tests/rehearsal.py: what would make the
host wait for a GPU, and when."""

import importlib
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import small_kl
from rehearsal import Device, stand_ins

from utils.data.autoencoder import Autoencoder, Scale
from utils.training.between_updates import Periodic

STEPS, REPORT_EVERY, MICRO_STEPS = 3, 2, 2  # the last update is reported as well
WHOLE = f"""--max_train_images 40 --max_train_steps {STEPS} --logging_steps {REPORT_EVERY} --adaptive_clipping
    --gradient_accumulation_steps {MICRO_STEPS} --validation_images 8 --validation_steps {STEPS}
    --checkpointing_steps {STEPS} --eval_steps {STEPS} --eval_images 12 --save_images_steps 9 --save_model_steps 9"""
OWN = {"train_ddpm.py": ["--class_conditional"], "train_edm2.py": []}
# What a run makes between two updates and at its end: (reads, uploads that the host waits for) today. Lower them.
MADE = {
    "train_ddpm.py": {
        # 4 chunks: the loss is read; images, numbers, timesteps and labels are sent. And the sum
        "Validation.mean_loss": (5, 17),
        "SampleEvaluation._prepare": (8, 12),  # once in a run: the features of 32 + 8 images, and their hashes
        "SampleEvaluation._sample": (0, 2),  # the numbers of the images, and the timesteps
        "SampleGrids._sample": (2, 4),  # raw and EMA: the same, and whether any process was told to stop
        "SampleGrids._write": (54, 0),  # each picture of the grids is read by itself, and each statistic
        "DDPM.probe": (37, 33),  # the doctor's probe, figure by figure, in pieces of a micro batch
        "save_checkpoint": (231, 1),  # the tensors of the network and of its EMA
        "Export.make": (115, 0),
    },
    "train_edm2.py": {
        "Validation.mean_loss": (5, 17),  # the noise levels at given places, too
        "SampleEvaluation._prepare": (8, 12),
        "SampleEvaluation._sample": (0, 2),
        "SampleGrids._sample": (2, 4),
        "SampleGrids._write": (54, 0),
        "EDM2.probe": (16, 3),
        "save_snapshots": (108, 0),
        "save_checkpoint": (166, 1),
        "Export.make": (54, 0),
    },
}


@pytest.fixture(scope="module")
def whole_run(script, script_flags, rehearse, tmp_path_factory) -> tuple[Device, Path]:
    """(the device, the folder) of a run of `script` that makes everything once."""
    output_dir = tmp_path_factory.mktemp("rehearsal") / "run"
    flags = [*script_flags, *WHOLE.split(), *OWN[script], "--output_dir", output_dir]
    return rehearse(flags, importlib.import_module(Path(script).stem)), output_dir


@pytest.fixture
def updates_alone(monkeypatch):
    """Runs make nothing between their updates, nor at their end."""

    def after_update(self, learning_rate):
        self._monitor.show_first(learning_rate)
        if self._monitor.due:
            self._monitor.report(learning_rate)

    monkeypatch.setattr(Periodic, "after_update", after_update)
    monkeypatch.setattr(Periodic, "finish", lambda self: self._monitor.close() or 0)


def uploads(script: str, classes: bool) -> int:
    """Of a micro step: sample numbers, images and labels, which an EDM2 network is told in any case."""
    return 3 if classes or script == "train_edm2.py" else 2


def check_updates(device: Device, steps: int, report_every: int, micro_steps: int, sent_each: int) -> None:
    """Fails with the events that should not be."""
    for number in range(1, steps + 1):
        events = device.of_update(number)
        reads = [event for event in events if event.kind == "read"]
        due = number % report_every == 0 or number == steps
        reader = "Monitor.report" if due else "Monitor.show_first"
        assert len(reads) == (due or number == 1) and all(reader in event.calls for event in reads), reads
        sent = [event for event in events if event.kind == "upload"]
        if number == 1:  # diffusers moves its table of the noise schedule when it is used first
            sent = [event for event in sent if event.calls[-1] != "DDPM.losses"]
        assert not [event for event in sent if event.waits]
        assert len(sent) == sent_each * micro_steps, sent


def test_the_host_waits_for_the_device_at_reports_alone(whole_run, script):
    """One read at a report and after the first update, none in between; the batch goes to the device from pinned memory, and
    nothing else does."""
    device, _ = whole_run
    check_updates(device, STEPS, REPORT_EVERY, MICRO_STEPS, uploads(script, classes=True))


def test_what_is_made_between_updates(whole_run, script):
    device, _ = whole_run
    for name, stated in MADE[script].items():
        events = [event for event in device.events if name in event.calls and event.waits]
        counts = Counter(event.kind for event in events)
        assert events and (counts["read"] <= stated[0] and counts["upload"] <= stated[1]), (name, counts, events)


def test_a_rehearsed_run_learns_what_a_run_on_a_cpu_learns(
    whole_run, script, script_flags, train_script, updates_alone, tmp_path
):
    """The device computes, or the ways that the code takes on a GPU would be rehearsed with numbers that mean nothing."""
    flags = [*script_flags, *WHOLE.split(), *OWN[script], "--doctor", "off"]  # whose looks end after an update
    assert train_script([*flags, "--output_dir", tmp_path / "run"]) == 0
    rehearsed, expected = (reports(folder) for folder in (whole_run[1], tmp_path / "run"))
    assert len(rehearsed) == 2
    for name in ("train/loss", "train/grad_norm", "train/ema_distance", "train/clip_value", "gradients/largest_rms"):
        assert [report[name] for report in rehearsed] == pytest.approx([report[name] for report in expected], rel=1e-3), name


def lines_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]


def reports(folder: Path) -> list[dict]:
    return [line for line in lines_of(folder) if "train/loss" in line]


EVERY_OPTION = {
    "train_ddpm.py": """--random_flip --color_jitter 0.1 --augment_probability 0.2 --dropout 0.1 --spectral_norm
        --l1_weight 1e-6 --prediction_type v_prediction --snr_gamma 5 --ema_type power --optimizer adam --balanced_sampling""",
    "train_edm2.py": """--random_flip --dropout 0.1 --ema_type exponential --gradient_checkpointing
        --max_grad_norm 0 --no-class_conditional""",
}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_no_option_makes_the_host_wait(script, script_flags, precision, rehearse, updates_alone, tmp_path):
    flags = [*script_flags, *EVERY_OPTION[script].split(), "--mixed_precision", precision, "--max_train_images", 64]
    flags += ["--max_train_steps", 3, "--logging_steps", 2]
    device = rehearse([*flags, "--output_dir", tmp_path / "run"], importlib.import_module(Path(script).stem))
    check_updates(device, 3, 2, 1, uploads(script, classes=False))


@pytest.mark.slow
def test_the_doctor_waits_where_it_looks_and_in_the_next_update(script, script_flags, rehearse, tmp_path):
    """There, to see whether weights are as it left them."""
    kinds = ("validation", "checkpointing", "save_images", "save_model")
    flags = [*script_flags, *(f"--{kind}_steps=99" for kind in kinds), "--max_train_images", 96]
    flags += ["--max_train_steps", 10, "--logging_steps", 10, "--output_dir", tmp_path]
    device = rehearse(flags, importlib.import_module(Path(script).stem), doctor="on")
    looked_at = [1, 2, 3, 5, 8]
    assert set(looked_at) <= {line["step"] for line in lines_of(tmp_path) if line.get("audit", {}).get("measured")}
    for number in (4, 6, 7, 9):
        waits = [event for event in device.events if event.step == number - 1 and event.waits]
        assert bool(waits) is (number - 1 in looked_at), waits
        assert all("Driven._compare" in event.calls for event in waits), waits


# What changes what is drawn, encoded or validated.


@pytest.fixture
def autoencoder():
    made = Autoencoder(small_kl(), (1, 16, 16), 2, 3)
    made.scale = Scale([0.5, 0.0, -0.5], [1.0, 2.0, 3.0])
    return made


def test_an_autoencoder_moves_once_and_its_scale_is_sent_once(autoencoder, monkeypatch):
    tensors = len(autoencoder.network.state_dict())
    latents = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    expected = autoencoder.decode(latents)
    with Device() as device:
        stand_ins(device, monkeypatch)
        sent = latents.to("meta")
        for uploads in (1 + 2, 0):  # sent; mean and spread
            assert torch.equal(autoencoder.normalized(sent).cpu(), autoencoder.normalized(latents))
            assert [event.kind for event in device.events] == uploads * ["upload"] + ["read"]
            device.events.clear()
        with autoencoder.on("meta"):
            for _ in range(3):
                torch.testing.assert_close(autoencoder.decode(sent).cpu(), expected, rtol=0, atol=1e-5)
        kinds = Counter(event.kind for event in device.events)
        assert kinds == {"upload": tensors, "read": tensors + 3}
    assert autoencoder.network.device.type == "cpu"
    autoencoder.scale = Scale([0.0] * 3, [1.0] * 3)
    assert torch.equal(autoencoder.normalized(latents), latents)  # the new one
