"""What crosses between host and device in runs of both scripts, told on the device of tests/rehearsal.py: what would make the
host wait for a GPU, and when."""

import importlib
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import SCRIPTS, make_tiny_flags, small_kl
from rehearsal import Device, Event, stand_ins

from utils.data.autoencoder import Autoencoder, Scale
from utils.training.between_updates import Periodic
from utils.training.monitor import Monitor

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


def reports(folder: Path) -> list[dict]:
    records = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    return [record for record in records if "train/loss" in record]


def test_a_read_in_the_loop_is_found_with_its_place(rehearse, tiny_flags, updates_alone, monkeypatch, tmp_path):
    import train_ddpm

    add = Monitor.add

    def planted(self, losses, drawn):
        if losses.shown.mean().item() < 1e9:  # the planted read
            add(self, losses, drawn)

    monkeypatch.setattr(Monitor, "add", planted)
    flags = ["--max_train_images", 64, "--max_train_steps", 3, "--logging_steps", 2, "--output_dir", tmp_path / "run"]
    device = rehearse([*tiny_flags, *flags], train_ddpm)
    lines = Path(__file__).read_text().splitlines()
    place = (
        f"tests/training/test_rehearsal.py:{1 + next(i for i, line in enumerate(lines) if line.endswith('# the planted read'))}"
    )
    found = [event for event in device.events if event.place == place]
    assert [event.step for event in found] == [0, 1, 2]
    assert all(event.kind == "read" and event.calls[:1] == ("main",) for event in found)
    with pytest.raises(AssertionError, match=place):
        check_updates(device, 3, 2, 1, 2)
    for event in found:
        device.events.remove(event)
    check_updates(device, 3, 2, 1, 2)


EVERY_OPTION = {
    "train_ddpm.py": """--random_flip --color_jitter 0.1 --dropout 0.1 --spectral_norm --l1_weight 1e-6
        --prediction_type v_prediction --snr_gamma 5 --ema_type power --optimizer adam --balanced_sampling""",
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


# What changes what is drawn, encoded or validated.
PAIRED = [
    "--class_conditional --label_dropout 0.5 --guidance 2",
    "--vae {vae} --latent_scale auto",
    "--validation_images 8 --validation_steps 2",
    "--random_flip",
    "--balanced_sampling",
    "--eval_steps 2 --eval_images 12",
    "--dropout 0.1",
]


@pytest.mark.slow
@pytest.mark.parametrize("row", range(8))
@pytest.mark.parametrize("name", SCRIPTS)
def test_pairs_of_options_on_the_device(name, row, rehearse, tmp_path):
    """An orthogonal array (8 runs, 7 columns, strength 2): of each two options every combination of on and off is rehearsed."""
    on = [options for number, options in enumerate(PAIRED, start=1) if (number & row).bit_count() % 2]
    classes = PAIRED[0] in on
    if not classes and name == "train_edm2.py":
        on.append("--no-class_conditional")
    flags, autoencoder = make_tiny_flags(tmp_path, name), None
    if PAIRED[1] in on:
        autoencoder = small_kl()
        autoencoder.save_pretrained(tmp_path / "vae")
        path = tmp_path / "config.json"
        network = json.loads(path.read_text()) | {"in_channels": 3, "out_channels": 3}
        path.write_text(json.dumps(network | ({"sample_size": 8} if "sample_size" in network else {})))
    words = " ".join(on).format(vae=tmp_path / "vae").split()
    flags += ["--max_train_images", "40", "--max_train_steps", "3", "--logging_steps", "2", *words]
    device = rehearse([*flags, "--output_dir", tmp_path / "run"], importlib.import_module(Path(name).stem))
    check_updates(device, 3, 2, 1, uploads(name, classes))
    history = [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    assert sum("validation/loss" in record for record in history) == 2 * (PAIRED[2] in on)
    assert sum("evaluation" in record for record in history) == 2 * (PAIRED[5] in on)
    if autoencoder is not None:  # it comes to the device for the one preview, and for each evaluation, once
        moved = Counter(made for event in device.events for made in moves(event))
        tensors = len(autoencoder.state_dict())
        assert moved == {"SampleGrids.make": tensors} | ({"SampleEvaluation._evaluate": 2 * tensors} if PAIRED[5] in on else {})


def moves(event: Event) -> list[str]:
    """What the autoencoder was sent to the device for, in an event between two updates."""
    if event.kind != "upload" or event.calls[-1] != "Autoencoder.on" or not event.milestone:
        return []
    return [name for name in event.calls if name in ("SampleGrids.make", "SampleEvaluation._evaluate")]


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


def test_what_the_device_tells():
    """Each way in which values cross, and none where they do not."""
    with Device() as device:
        x = torch.arange(6.0).view(2, 3).to("meta")
        assert [(event.kind, event.waits) for event in device.events] == [("upload", True)]
        pinned = device.pin(torch.ones(3))
        crossings = [
            (lambda: x.sum().item(), 15.0),
            (lambda: bool((x > 4).any()), True),
            (lambda: x[1].tolist(), [3.0, 4.0, 5.0]),
            (lambda: x.T.cpu()[2].tolist(), [2.0, 5.0]),
            (lambda: float(x[0, 1]), 1.0),
            (lambda: torch.zeros(2, 3).copy_(x).sum().item(), 15.0),
            (lambda: len(x[x > 2]), 3),
            (lambda: len(x.nonzero()), 5),
        ]
        for cross, expected in crossings:
            device.events.clear()
            assert cross() == expected
            assert [event.kind for event in device.events] == ["read"]
            assert device.events[0].place.startswith("tests/training/test_rehearsal.py:")
        uploads = [
            (lambda: pinned.to("meta", non_blocking=True), False),
            (lambda: pinned.to("meta"), True),
            (lambda: torch.ones(3).to("meta", non_blocking=True), True),
            (lambda: torch.tensor([1.0, 2.0], device="meta"), True),
            (lambda: x.new_tensor(2.0), True),
            (lambda: torch.as_tensor(2.0, device="meta"), True),
            (lambda: x[torch.tensor([0])], True),
            (lambda: torch.where(x > 2, x, torch.tensor(1.0)), True),
        ]
        for cross, waits in uploads:
            device.events.clear()
            assert cross().is_meta
            assert [(event.kind, event.waits) for event in device.events] == [("upload", waits)]
        device.events.clear()
        weight = x.clone().requires_grad_()
        (weight * torch.tensor(2.0)).square().sum().backward()  # a number of the CPU is an argument of the kernel
        view = weight.grad.T[0].mul_(2.0)
        y = torch.where(x > 2, 1.0, torch.nan) + torch.full((3,), 1.0, device="meta") + x.new_full((), 2.0)
        y[:, 1:] = 7.0
        assert not [event for event in device.events if event.kind == "read"]
        assert view.tolist() == [0.0, 48.0] and weight.grad.tolist() == [[0.0, 8.0, 16.0], [48.0, 32.0, 40.0]]
        assert y.nan_to_num(-1.0).tolist() == [[-1.0, 7.0, 7.0], [4.0, 7.0, 7.0]]
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.ones(3)
        with pytest.raises(RuntimeError, match="same device"):
            torch.cat([x, torch.ones(2, 3)])
