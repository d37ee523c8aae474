import json
import re
from pathlib import Path

import pytest
import torch
from PIL import Image
from synthetic_run import synthetic_run

from utils.diagnostics.report.figures import evaluation_rows
from utils.diagnostics.report.report import write_report
from utils.evaluation.feature_sets import FeatureSet
from utils.evaluation.quality import class_figures, compare, real_floor
from utils.runs.evaluations import write_evaluation
from utils.runs.record import RunRecord


@pytest.fixture(scope="module")
def figures() -> dict:
    generator = torch.Generator().manual_seed(0)
    real = FeatureSet.of(torch.randn(400, 5, generator=generator))
    found = compare(FeatureSet.of(torch.randn(300, 5, generator=generator)), real, standardized=True, seed=0)
    found["floor"] = real_floor(real, 300, standardized=True, seed=0)
    seen = torch.nn.functional.one_hot(torch.tensor([0] * 225 + [1] * 75)).float()
    found["classes"] = class_figures(seen, torch.tensor([0, 1] * 200).numpy(), ["cats & dogs", "horses"], 0.97)
    found["memorisation"] = {"near_duplicates": 0.02, "near_duplicates_real": 0.01}
    return found


def page(run: Path) -> str:
    write_report(RunRecord.read(run), [], run / "report.html")
    return (run / "report.html").read_text()


def add(run: Path, figures: dict) -> None:
    """What evaluate.py leaves in the folder of a run."""
    result = {"images": 300, "features": "pixels", "sampler": "ddim", "num_inference_steps": 50, "figures": figures}
    write_evaluation(run, "", 200, result)


def plots(run: Path, figures: dict) -> str:
    add(run, figures)
    return re.search(r'<section id="evaluation">.*?</section>', page(run), re.S)[0].split("<h3>Figures")[0]


def test_the_report_shows_evaluations_of_the_training(figures, tmp_path):
    run = synthetic_run(tmp_path / "run", reports=4)
    assert "Evaluation" not in page(run)
    with open(run / "history.jsonl", "a") as file:
        for step, fd in ((100, 30.0), (200, 12.5)):
            entry = {"step": step, "eval/fd_randconv": fd, "eval/kd_randconv": fd / 100, "eval/precision": 0.9}
            file.write(json.dumps(entry | {"eval/recall": 0.8, "eval/coverage": 0.7, "evaluation": figures}) + "\n")
    html = page(run)
    assert "Fréchet distance of the samples" in html and "fd_randconv" in html and "real/real floor" in html
    assert "Figures (update 200: 300 samples)" in html
    assert "Closest pairs" not in html
    (run / "evaluation").mkdir()
    Image.new("RGB", (40, 20)).save(run / "evaluation" / "nearest.png")
    assert 'alt="samples beside their nearest training images"' in page(run)


def test_the_newest_evaluation_is_shown_and_the_curves_keep_their_own_floor(figures, tmp_path):
    run = synthetic_run(tmp_path / "run", reports=4)
    other = figures | {"floor": figures["floor"] | {"fd": 8765.0, "kd": 4321.0}}
    add(run, other)
    (newest,) = RunRecord.read(run).evaluations
    older = ("evaluate.py: 300 samples, pixels, ddim 50 steps", 200, newest["time"] - 5)
    for title, step, time in (older, ("update 250: 300 samples", 250, newest["time"] + 5)):
        entry = {"step": step, "time": time, "eval/fd_randconv": 30.0, "eval/kd_randconv": 0.3, "evaluation": figures}
        with open(run / "history.jsonl", "a") as file:
            file.write(json.dumps(entry) + "\n")
        html = page(run)
        assert f"Figures ({title}" in html
        curve = re.search(r"<h3>Fréchet.*?</figure>", html, re.S)[0]
        assert "real/real floor" in curve and "8.77k" not in curve


def test_bars_are_shares_in_per_cent_of_the_real_shares(figures, tmp_path):
    html = plots(synthetic_run(tmp_path / "run", reports=1), figures)
    assert "Coverage per class" in html and "Coverage per cluster" in html
    assert "cats &amp; dogs</span>" in html and ">150.0<" in html and ">50.0<" in html  # 75 % and 25 % against 50 % each
    assert "Fréchet distance of the samples" not in html  # nothing was evaluated in training


def test_of_very_many_classes_the_least_covered_are_shown(figures, tmp_path):
    many = {"number": 90, "generated": [10] * 89 + [0], "real": [10] * 90, "names": [f"c{i}" for i in range(90)]}
    html = plots(synthetic_run(tmp_path / "run", reports=1), figures | {"classes": many})
    assert "50 more are not shown" in html and ">c89<" in html


def test_rows_stand_beside_real_images(figures):
    rows = {row[0]: row[1:] for row in evaluation_rows(figures)}
    assert rows["near-duplicates of training images"] == ["2 %", "1 %"]
    assert rows["precision"][0] == f"{figures['precision']:.3g}"
