import io
import json
import math
import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from conftest import same_bytes
from PIL import Image
from synthetic_run import synthetic_run

from utils.diagnostics.finding import Finding
from utils.diagnostics.report.page import number
from utils.diagnostics.report.plots import Axis, Curve, plot, smooth, thin, value_axis
from utils.diagnostics.report.report import run_state, seconds_spent, write_report
from utils.runs.record import RunRecord

VOID = {"meta", "link", "img", "br", "hr", "input", "wbr", "path"}


def finding(text: str = "") -> Finding:
    """One with all texts; each of them `text` where that is given."""
    words = ("lr-too-high", "critical", "The norm rose from 0.2 to 4.8.", "The rate is high", "Updates overshoot.")
    code, severity, evidence, title, cause = (text or word for word in words)
    return Finding(code, severity, evidence, 100, title=title, cause=cause, fixes=[text or "--learning_rate 5e-4"])


class Page(HTMLParser):
    """Parses a page, insisting that every tag is closed where it should be; keeps its titles, its text and its addresses."""

    def __init__(self, html: str):
        super().__init__()
        self.open, self.ids, self.titles, self.words, self.addresses, self.tags = [], [], [], [], [], []
        self.feed(html)
        self.close()
        assert not self.open, self.open
        assert len(set(self.ids)) == len(self.ids)
        self.text = " ".join(self.words)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append(tag)
        self.addresses += [attributes[name] for name in ("src", "href", "action", "data") if attributes.get(name)]
        if "id" in attributes:
            self.ids.append(attributes["id"])
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag in VOID:
            return
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        if not self.open or self.open[-1] in ("style", "script"):
            return
        self.words.append(data)
        if self.open[-1] in ("h1", "h2", "h3"):
            self.titles.append(data)


def report_of(folder: Path, findings=()) -> tuple[str, Page]:
    write_report(RunRecord.read(folder), list(findings), folder / "report.html")
    html = (folder / "report.html").read_text()
    return html, Page(html)


def rewrite(folder: Path, change) -> None:
    """`change` gets each line of the history and gives what takes its place, None for nothing."""
    path = folder / "history.jsonl"
    lines = [change(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines if line is not None))


@pytest.fixture
def run(tmp_path) -> Path:
    return synthetic_run(tmp_path / "run", reports=60)


ALL_TITLES = """Findings, Loss, Training and validation loss, Loss by timestep, Gradient norm, Learning rate, Activations,
Weights, Gradients, Updates, Distance from raw to EMA weights, EMA decay, Speed, Images per second, Waiting for data, After
3000 updates, Over time, From noise to image, Figures of the samples after 3000 updates, Error by timestep,
Checks on a real batch, Check of the data at the start, Pixels that the network is trained on, Set for this run, What
followed from them"""


def test_a_full_run_has_every_section_in_order(run):
    html, page = report_of(run, [finding()])
    titles = [title.replace(",", "") for title in page.titles]
    positions = [titles.index(title) for title in " ".join(ALL_TITLES.split()).split(", ")]
    assert positions == sorted(positions)
    for words in ("run", "3,000 of 3,000 updates", "Finished", "720k parameters", "bf16", "cuda:0", "1.25 GiB", "4:00"):
        assert words in page.text
    for words in ("The rate is high", "rose from 0.2", "Updates overshoot.", "--learning_rate", "critical"):
        assert words in page.text
    assert html.count('class="mark"') == 1  # the finding's update in the plot of the loss
    assert "train_ddpm.py --learning_rate 2e-3 --dataset_name digits" in page.text
    assert re.search(r"<th>training data</th>.*?mean</td>(<td[^>]*>-0.42</td>){2}<td[^>]*>0.31</td>", html, re.S)
    # what was set by whom, and the rest in the fold
    assert re.search(r"--learning_rate</code></td><td[^>]*>0.002</td><td[^>]*>command line", html)
    assert re.search(r"--resolution</code></td><td[^>]*>16</td><td[^>]*>preset digits16", html)
    assert html.index("All other flags") < html.index("--seed</code>")
    # every plot says what healthy is, names its unit and its horizontal axis
    assert html.count('class="frame"') == 14
    for figure in re.findall(r'<figure class="plot">.*?</figure>', html, re.S):
        if 'class="frame"' in figure:
            assert "Healthy:" in figure and 'class="y-label"' in figure and 'class="x-label"' in figure


SERIES = {
    "Loss by timestep": "train/loss_timestep_quartile",
    "Gradient norm": "train/grad_norm",
    "Learning rate": "train/lr",
    "EMA decay": "train/ema_decay",
    "Distance from raw to EMA weights": "train/ema_distance",
    "Waiting for data": "perf/data_wait",
    "Pixels that the network is trained on": "data/",
    "Activations": "layers",
    "Error by timestep": "probe",
    "Check of the data at the start": "data",
}


def test_what_was_not_recorded_is_left_out(run):
    prefixes = tuple(SERIES.values())
    rewrite(run, lambda line: {key: value for key, value in line.items() if not key.startswith(prefixes)})
    shutil.rmtree(run / "samples")
    html, page = report_of(run)
    assert not set(SERIES) & set(page.titles)
    assert {"Layers", "EMA", "Data", "Checks of the network", "From noise to image"}.isdisjoint(page.titles)
    assert html.count('class="frame"') == 2  # loss and speed


def test_each_series_alone_makes_its_plot(run):
    recorded = (run / "history.jsonl").read_text()
    for title, prefix in SERIES.items():
        (run / "history.jsonl").write_text(recorded)
        rewrite(run, lambda line, kept=("step", "time", prefix): {k: v for k, v in line.items() if k.startswith(kept)})
        assert title in report_of(run)[1].titles, title


@pytest.mark.parametrize("reports", [0, 1, 2])
def test_very_short_runs(reports, tmp_path):
    folder = synthetic_run(tmp_path / "run", reports=reports, samples=min(reports, 1))
    html, page = report_of(folder)
    assert ("Loss" in page.titles) == (reports > 0)
    assert "nan%" not in html
    if reports == 0:
        assert "Nothing was recorded" in page.text and "Not finished" in page.text and "<svg" not in html
    else:
        assert "Nothing found." in page.text


def test_text_is_escaped(tmp_path):
    evil = "<script>alert('1')</script>"
    folder = synthetic_run(tmp_path / "<script>", reports=3, layers=1)
    options = json.loads((folder / "options.json").read_text())
    options |= {"command": f"train_ddpm.py --dataset_name {evil}", "git_commit": evil, "versions": {evil: evil}}
    options["options"]["dataset_name"] = options["options"][evil] = options["resolved"]["device"] = evil
    (folder / "options.json").write_text(json.dumps(options))

    def spoil(line):
        for key in ("layers", "probe", "data", "samples"):
            if key in line:
                line[key] = {evil: next(iter(line[key].values()))} if key == "layers" else {evil: evil, "raw": {evil: evil}}
        return line

    rewrite(folder, spoil)
    html, page = report_of(folder, [finding(evil)])
    assert page.tags.count("script") == 1
    assert evil not in html and page.text.count(evil) > 10


def test_what_is_not_finite_is_marked(run):
    def spoil(line):
        if "train/loss" in line and 1000 <= line["step"] <= 1200:
            line |= {"train/loss": "nan", "train/grad_norm": "inf", "train/loss_timestep_quartile_2": "-inf"}
        if "layers" in line and line["step"] > 2000:
            names = list(line["layers"])
            line["layers"][names[3]]["activation"] = "nan"
        if "probe" in line:
            line["probe"]["error"]["300"] = "nan"
        return line

    rewrite(run, spoil)
    html, page = report_of(run)
    loss = re.search(r"<h3>Training and validation loss</h3>.*?</figure>", html, re.S)[0]
    assert "not finite</b><span>at 5 points" in loss
    assert 'class="bad"' in loss
    smoothed = re.search(r'class="line s1" data-label="smoothed" d="([^"]*)"', loss)[1]
    assert smoothed.count("M") == 2  # the line breaks where there is no value
    assert "1 of 60 layers are not finite in the newest record: conv_in.resnets.3.conv1" in page.text
    drawn = "".join(re.findall(r' d="([^"]*)"', html))
    assert "nan" not in drawn and "inf" not in drawn


@pytest.mark.parametrize(("resumed", "words"), [(1, "once"), (2, "2 times")])
def test_how_often_a_run_was_resumed(run, resumed, words):
    options = json.loads((run / "options.json").read_text())
    options["earlier_starts"] = [{"started": "2026-11-20T08:00:00+00:00"}] * resumed
    (run / "options.json").write_text(json.dumps(options))
    assert re.search(rf"Resumed</dt><dd>{words}</dd>", report_of(run)[0])


def test_no_clipping_draws_no_line(run):
    assert "clipped to" in report_of(run)[1].text
    rewrite(run, lambda line: line | {"train/clip_value": 0.0} if "train/loss" in line else line)
    assert "clipped to" not in report_of(run)[1].text


def test_the_largest_floats_do_not_overflow(run):
    def spoil(line):
        return line | {"train/loss": math.copysign(1.7e308, line["step"] - 1500), "train/lr": 5e-324}

    rewrite(run, lambda line: spoil(line) if "train/loss" in line else line)
    drawn = "".join(re.findall(r' d="([^"]*)"', report_of(run)[0]))
    assert "nan" not in drawn and "inf" not in drawn


def test_large_pictures_become_small_ones(run):
    noise = io.BytesIO()
    Image.effect_noise((2400, 1500), 60).convert("RGB").save(noise, "PNG", compress_level=1)
    for path in (run / "samples").glob("*.png"):
        path.write_bytes(noise.getvalue())
    (run / "samples" / "0009999.png").write_bytes(b"\x89PNG broken")
    assert (run / "samples" / "0003000.png").stat().st_size > 2_000_000
    html, page = report_of(run)
    assert 500_000 < len(html) < 5_000_000
    assert any(address.startswith("data:image/jpeg") for address in page.addresses)


def test_nothing_is_loaded_from_elsewhere(run):
    html, page = report_of(run, [finding()])
    assert page.addresses and all(address.startswith(("#", "data:")) for address in page.addresses)
    assert "http://" not in html and "https://" not in html and "@import" not in html and "url(" not in html
    assert {address[1:] for address in page.addresses if address.startswith("#")} == set(page.ids)
    assert "default-src 'none'" in html


def test_the_page_is_complete_or_absent(run, monkeypatch):
    report_of(run)
    before = (run / "report.html").read_bytes()

    def full_disk(draft, target):
        assert Path(draft).parent == run and Path(target) == run / "report.html"
        Page(Path(draft).read_text())  # whole before it takes its name
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(OSError, match="no space"):
        write_report(RunRecord.read(run), [finding()], run / "report.html")
    assert same_bytes(run / "report.html", before)
    assert not list(run.glob(".report*"))


# ---- facts of the run


def test_time_spent_leaves_out_the_pauses():
    day = 86_400.0
    starts = ["2026-03-01T00:00:00+00:00", "2026-03-03T00:00:00+00:00"]
    first = 1_772_323_200.0
    times = [first + 100, first + 200, first + 2 * day + 50, first + 2 * day + 80]
    record = RunRecord(Path("."), starts=starts, history=[{"step": i, "time": time} for i, time in enumerate(times)])
    assert seconds_spent(record) == 280
    assert seconds_spent(RunRecord(Path("."))) is None


@pytest.mark.parametrize(
    ("exit_status", "done", "words"),
    [
        (None, 50, "Not finished"),
        (None, 100, "Finished"),
        (0, 50, "Finished early"),
        (75, 50, "Stopped, can be resumed"),
        (3, 50, "Stopped: gradients not finite"),
        (1, 50, "Ended with exit status 1"),
    ],
)
def test_state(exit_status, done, words):
    assert run_state(RunRecord(Path("."), exit_status=exit_status), done, 100)[0] == words


# ---- plots


def test_thinning_keeps_extremes_ends_and_gaps():
    values = np.random.default_rng(0).normal(size=10_000)
    values[[1234, 5678, 7777]] = 50.0, -50.0, math.nan
    steps, kept = thin(range(10_000), values, buckets=100)
    assert len(kept) <= 302
    assert (steps[0], steps[-1]) == (0, 9999) and np.all(np.diff(steps) > 0)
    assert kept[steps == 1234] == 50 and kept[steps == 5678] == -50 and np.isnan(kept[steps == 7777]).all()
    assert kept[steps == 1234].size == kept[steps == 7777].size == 1
    assert np.nanmax(values[2000:2100]) in kept  # of every bucket
    assert np.array_equal(thin(range(5), [1, 2, 3, 2, 1])[1], [1, 2, 3, 2, 1])


def test_smoothing_neither_lags_nor_spreads_a_spike():
    line = np.linspace(5, 1, 400)
    smoothed = smooth(line, 20)
    assert np.allclose(smoothed[30:-30], line[30:-30])
    spoiled = line.copy()
    spoiled[200], spoiled[100] = 1e30, math.nan
    smoothed = smooth(spoiled, 20)
    assert smoothed[200] == pytest.approx(line[200], abs=0.02) and math.isnan(smoothed[100])
    assert len(smooth([], 3)) == 0 and smooth([2.0], 3) == [2.0]


def test_axes():
    assert [label for _, label in Axis(0, 0.002).ticks()] == ["0", "0.0005", "0.0010", "0.0015", "0.0020"]
    assert [label for _, label in Axis(0.01, 1000, log=True).ticks()] == ["0.01", "0.1", "1", "10", "100", "1k"]
    assert Axis(1, 100, log=True).position([1, 10, 100]).tolist() == [0, 0.5, 1]
    assert np.isnan(Axis(1, 100, log=True).position([0, -1])).all()
    rng = np.random.default_rng(0)
    for _ in range(500):  # whatever the data, an axis has a few distinct, increasing ticks within it
        values = rng.normal(size=4) * 10.0 ** rng.integers(-30, 30) + rng.integers(-1, 2)
        axis = value_axis(values, str(rng.choice(["linear", "zero", "log", "auto"])))
        ticks = axis.ticks()
        places = axis.position([value for value, _ in ticks])
        assert 2 <= len(ticks) <= 12 and np.all(np.diff(places) > 0), (axis, ticks)
        assert places.min() > -0.01 and places.max() < 1.01
    for constant in (0.0, 3.0, -2e-9, 1e200):
        assert len(value_axis(np.array([constant]), "auto").ticks()) >= 2


def test_a_rare_spike_does_not_flatten_the_rest():
    values = [1.0 + 0.1 * math.sin(i) for i in range(200)]
    values[50] = 1e30
    html = plot("T", [Curve("c", range(200), values)], unit="u", reading="Healthy: flat.")
    assert "beyond this axis, up to</b><span>1e30" in html and 'class="high"' in html
    assert float(re.search(r'data-y="([^"]*)"', html)[1].split()[1]) < 100
    heights = [float(y) for _, y in re.findall(r"([\d.]+) ([\d.]+)", re.search(r' d="(M[^"]*L[^"]*)"', html)[1])]
    assert min(heights) == 0  # drawn to the edge, not out of the plot


def test_numbers():
    texts = {0.0208: "0.0208", 2e-5: "2e-5", 1.25e-12: "1.25e-12", 0: "0", -0.5: "-0.5", 999.9: "1k", 1500: "1.5k"}
    texts |= {35_700_000: "35.7M", 1e30: "1e30", math.inf: "inf"}
    assert {value: number(value) for value in texts} == texts


def test_plots_without_points_are_no_plots():
    assert plot("T", [Curve("c", [], [])], unit="u", reading="r") == ""
    assert plot("T", [Curve("limit", [1, 2], [1.0, 1.0], "limit")], unit="u", reading="r") == ""
