"""What a run and `reconstruct_ema.py` write for readers elsewhere: the same card, in which no name of the data is markup."""

import re
from html.parser import HTMLParser

import numpy as np
from conftest import ROOT
from PIL import Image

import reconstruct_ema

CLASSES = ["<img src=x onerror=alert(1)>", "a|b", "line\nbreak"]


class Tags(HTMLParser):
    def __init__(self, page: str):
        super().__init__()
        self.found = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))


def test_cards_of_a_run_and_of_an_average_made_after_it(train, tiny_flags, tmp_path, monkeypatch):
    photos, generator = tmp_path / "some where" / "my <b>photos", np.random.default_rng(0)
    for name in CLASSES:
        (photos / name).mkdir(parents=True)
        for number in range(8):
            Image.fromarray(generator.integers(0, 255, (16, 16), np.uint8)).save(photos / name / f"{number}.png")
    run, out = tmp_path / "run", tmp_path / "out"
    flags = [*tiny_flags[2:], "--train_data_dir", photos, "--validation_images", 6, "--class_conditional"]
    flags += ["--ema_type", "power", "--max_train_steps", 2, "--hub_token", "hf_secret", "--output_dir", run]
    assert train(flags) == 0
    photos.rename(tmp_path / "moved")  # the card of the average is made of what the run recorded
    monkeypatch.chdir("/")
    reconstruct_ema.main(reconstruct_ema.parse_args([str(run), "--width", "0.1", "--output_dir", str(out)]))
    cards = [(folder / "README.md").read_text() for folder in (run, out)]
    for card in cards:
        assert str(tmp_path) not in card and str(ROOT) not in card and tiny_flags[3] not in card
        assert "some where" not in card and "hf_secret" not in card and "output_dir" not in card
        assert "<img" not in card.replace('class_labels=["<img', "") and "<b>" not in card.replace("'my <b>photos'", "")
        assert "my &lt;b&gt;photos: 24 images, 6 of them held out for validation, 16x16, 1 channel |\n" in card
        assert r"| Class names | &lt;img src=x onerror=alert(1)&gt;, a\|b, line break |" in card
    # Rows and commands are the same, but for what is of one of the two alone.
    rows = [dict(re.findall(r"^\| (.*?) \| (.*) \|$", card, re.MULTILINE)) for card in cards]
    assert rows[0].keys() - rows[1].keys() == {"EMA decay", "training loss", "validation loss"}
    assert {name for name in rows[1] if rows[1][name] != rows[0].get(name)} == {"EMA width (relative)"}
    commands = [re.search(r"```bash\n(.*)\n```", card)[1] for card in cards]
    assert commands[0] == commands[1] and "--train_data_dir 'my <b>photos'" in commands[0]
    assert 'from_pretrained("run", ' in cards[0] and 'from_pretrained("out", ' in cards[1]
    tags = Tags((run / "report.html").read_text()).found
    assert not [tag for tag, about in tags if "onerror" in about or about.get("src") == "x"]
    assert "onerror=alert(1)" in (run / "report.html").read_text()
