"""The ledger: what it says of two runs, of a checkpoint that is not the one that was saved, and of ranks that differ."""

import hashlib
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from rehearsal import Device
from safetensors.torch import load_file, save_file

import diagnose
from utils.core.errors import UserError
from utils.diffusion.objective import Losses
from utils.runs.checkpoint_files import list_checkpoints
from utils.runs.compare import DIFFERENT, NOT_COMPARABLE, SAME, compare
from utils.runs.ledger import HASHES, LEDGER, VERSION, read_ledger
from utils.training.ledger import Ledger, hash_of

INJECT = "tests/faults/inject.py"


def recorded_run(folder: Path, lines: list[dict] | None, **options) -> Path:
    """A run as its folder records it."""
    folder.mkdir()
    record = {"options": {"seed": 0, "dropout": 0.0} | options, "resolved": {"parameters": 10, "num_processes": 1}}
    (folder / "options.json").write_text(json.dumps(record))
    if lines is not None:
        (folder / LEDGER).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def line(step: int, **changes: str) -> dict:
    return {"step": step, "version": VERSION, **dict.fromkeys(HASHES, "0" * 16), **changes}


def test_the_first_difference_is_named_in_the_order_in_which_one_follows_from_the_other(tmp_path):
    a = recorded_run(tmp_path / "a", [line(0), line(1), line(2), line(3)])
    expected = {
        "samples": "the sample numbers", "batch": "the images", "loss": "the loss", "optimizer": "the optimizer",
        "weights": "the weights", "ema": "the EMA",
    }  # fmt: skip
    for place, name in enumerate(HASHES):  # and all that follows
        later = {other: "1" * 16 for other in list(HASHES)[place:]}
        b = recorded_run(tmp_path / name, [line(0), line(1), line(2, **later), line(3, **later)], dropout=0.1)
        found = compare(a, b)
        assert (found.status, found.last_same, found.first_different, found.what) == (DIFFERENT, 1, 2, name)
        assert expected[name] in found.verdict and found.options == {"dropout": [0.0, 0.1]}
    b = recorded_run(tmp_path / "rare", [line(0), line(3, weights="1" * 16)])
    assert "--ledger_steps 1" in compare(a, b).verdict
    assert compare(a, recorded_run(tmp_path / "first", [line(0, weights="1" * 16)])).verdict.startswith("different before")


def test_runs_that_cannot_be_compared(tmp_path, capsys):
    a = recorded_run(tmp_path / "a", [line(0), line(10)])
    assert compare(a, recorded_run(tmp_path / "none", None)).status == NOT_COMPARABLE
    assert compare(a, recorded_run(tmp_path / "other steps", [line(7)])).status == NOT_COMPARABLE
    assert compare(a, recorded_run(tmp_path / "shorter", [line(0)])).status == SAME
    older = [{name: value for name, value in line(0).items() if name != "version"}, line(10)]
    assert compare(a, recorded_run(tmp_path / "older", older[:1])).status == NOT_COMPARABLE
    assert compare(a, recorded_run(tmp_path / "continued", older)).last_same == 10
    other = recorded_run(tmp_path / "larger", [line(0)])
    (other / "options.json").write_text(json.dumps({"resolved": {"parameters": 11}}))
    assert "10 parameters, the other 11" in compare(a, other).verdict
    damaged = recorded_run(tmp_path / "damaged", [line(0)])
    with open(damaged / LEDGER, "a") as file:
        file.write('{"step": 10, "wei')  # killed while it wrote
    assert compare(a, damaged).last_same == 0
    with pytest.raises(UserError, match="not the folder of a run"):
        compare(a, tmp_path / "absent")
    for words in (["--compare", "a"], ["--compare", "a", "b", "c"], ["a", "--compare", "a", "b"]):
        with pytest.raises(UserError, match="--compare needs two runs"):
            diagnose.parse_args(words)
    assert diagnose.main(diagnose.parse_args(["--compare", str(a), str(damaged), "--json"])) == 0
    assert json.loads(capsys.readouterr().out)["last_same"] == 0


def test_a_resumed_run_has_the_ledger_of_an_uninterrupted_one_and_a_changed_checkpoint_is_said(
    train, tiny_flags, tmp_path, capsys
):
    whole = tmp_path / "whole"
    flags = [*tiny_flags, "--logging_steps", 2, "--checkpointing_steps", 3, "--save_images_epochs", 999, "--logger", "none"]
    assert train([*flags, "--max_train_steps", 6, "--output_dir", whole]) == 0
    assert list(read_ledger(whole)) == [0, 2, 3, 4, 6]
    assert all(set(each) == set(HASHES) for step, each in read_ledger(whole).items() if step)
    # As after a kill: a checkpoint of update 3, and the ledger already beyond it.
    again = [*flags, "--max_train_steps", 6, "--output_dir", whole, "--resume_from_checkpoint"]
    before = read_ledger(whole)
    assert train([*again, "checkpoint-3"]) == 0
    assert read_ledger(whole) == before and len((whole / LEDGER).read_text().splitlines()) == len(before)
    assert "ledger" not in capsys.readouterr().out
    # A checkpoint whose file and hash were both replaced.
    weights = load_file(whole / "checkpoint-3/model.safetensors")
    name = next(iter(weights))
    weights[name].view(-1)[0] = torch.nextafter(weights[name].view(-1)[0], torch.tensor(torch.inf))
    save_file(weights, whole / "checkpoint-3/model.safetensors")
    manifest = json.loads((whole / "checkpoint-3/MANIFEST.json").read_text())
    content = (whole / "checkpoint-3/model.safetensors").read_bytes()
    manifest["files"]["model.safetensors"] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (whole / "checkpoint-3/MANIFEST.json").write_text(json.dumps(manifest))
    assert train([*again, str(whole / "checkpoint-3")]) == 0
    assert "is not what the ledger has of update 3; other bits: the weights." in capsys.readouterr().out
    assert read_ledger(whole)[6]["weights"] != before[6]["weights"]


@pytest.mark.parametrize(
    ("version", "said"), [(VERSION, "other bits: the weights"), (None, "another version"), (VERSION - 1, "another version")]
)
def test_hashes_of_another_version_accuse_no_checkpoint(tmp_path, version, said):
    """A checkpoint beside a line that has other hashes of it."""
    network, lines = torch.nn.Linear(2, 2), []
    (tmp_path / LEDGER).write_text(json.dumps(line(3) | {"version": version}) + "\n")
    run = SimpleNamespace(
        accelerator=Accelerator(cpu=True), objective=SimpleNamespace(network=network), ema=None, output_dir=tmp_path / "new",
        state=SimpleNamespace(step=3), resumed_from=tmp_path / "checkpoint-3", print_line=lines.append,
        options=SimpleNamespace(allow_option_change=[]),
    )  # fmt: skip
    run.output_dir.mkdir()
    Ledger(run)
    assert len(lines) == 1 and said in lines[0]


def test_a_hash_does_not_depend_on_where_the_small_tensors_lie():
    """Counters of optimizers and the widths of EDM2's averages stay on the host, where the others are on a GPU."""
    cpu = torch.device("cpu")
    torch.manual_seed(0)
    on_device = [torch.randn(100, 100), torch.randn(10, 10)]
    on_host = [torch.tensor([0.05, 0.1], dtype=torch.float64), torch.tensor([3, -(2**62)]), -torch.ones(()), torch.randn(3)]
    on_host[-1] = on_host[-1].bfloat16()
    alone = hash_of([*on_device, *on_host], cpu).item()
    assert alone != hash_of(on_device, cpu).item()
    with Device() as device:
        apart = hash_of([*(tensor.to("meta") for tensor in on_device), *on_host], torch.device("meta"))
        assert not [event for event in device.events if event.kind == "read"]
        assert apart.device.type == "meta" and apart.item() == alone


def test_weights_that_differ_between_ranks_end_the_run(server, tiny_flags, tmp_path):
    """One element of one rank, by the smallest step that fp32 has."""
    fault = ["nudge", "--rank", 1, "--step", 4, "--value", "conv_in.weight"]
    flags = ["--train_batch_size", 4, "--checkpointing_steps", 2, "--logger", "none", "--output_dir", tmp_path]
    runs = server.start([INJECT, "train_ddpm.py", *fault, "--", *tiny_flags, *flags], 2)
    assert [run.wait() for run in runs] == [3, 3], runs[0].text()
    said = re.search(r"stopped: after update 4, rank 1 differs from the other ranks in the (.*)\. No ch", runs[0].text())
    assert said is not None and said[1] == "weights: conv_in.weight"
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-2"]
    assert (tmp_path / "exit_status").read_text() == "3\n" and max(read_ledger(tmp_path)) == 3


@pytest.mark.parametrize("parts", [[1] * 6, [3, 3], [1, 5]])
def test_a_batch_has_the_same_hash_however_micro_steps_share_it(parts):
    drawn = {"clean_images": torch.randn(6, 1, 3, 3), "sigmas": torch.rand(6), "timesteps": torch.randint(9, (6,))}
    losses = torch.rand(6)

    def seen(sizes: list[int]) -> dict[str, int]:
        ledger = Ledger.__new__(Ledger)
        ledger.due, ledger._seen = True, {}
        for micro in zip(losses.split(sizes), *(tensor.split(sizes) for tensor in drawn.values())):
            ledger.add(Losses(micro[0], micro[0]), dict(zip(drawn, micro[1:])))
        return {name: int(value) for name, value in ledger._seen.items()}

    assert seen(parts) == seen([6]) and len(set(seen([6]).values())) == 2
