"""The model card: what it says of a run, that no text of the data is markup in it, and the command of the training."""

import ast
import json
import shlex
from html.parser import HTMLParser

import markdown
import pytest
import yaml

from utils.data.sources import hub_name
from utils.diffusion.model_card import (
    NOT_OF_TRAINING,
    loaded_from,
    local_name,
    model_card,
    options_of_record,
    shown_data,
    training_command,
)
from utils.options.flags import DDPMOptions, EDM2Options
from utils.options.parser import parse_options

HOSTILE = ["<img src=x onerror=alert(1)>", "a|b", ": - #", "line\nbreak\n\nand more", "`tick` *b* __c__", "[l](javascript:x)"]
HOSTILE += ["![i](x.png)", "a\\|b", "back\\", "&lt;b&gt;", "<!--", "</td></tr></table>", "red_fox", "# x #", "```", '"', "'"]
HOSTILE += ["Tür 🦊", "---"]


class Page(HTMLParser):
    """The elements of a page in their order, [tag, text]."""

    def __init__(self, card: str):
        super().__init__()
        self.elements, self._open = [], []
        self.feed(markdown.markdown(card.split("---\n", 2)[2], extensions=["tables", "fenced_code"]))

    def handle_starttag(self, tag, attributes):
        self.elements.append([tag, ""])
        self._open.append(self.elements[-1])

    def handle_endtag(self, tag):
        self._open.pop()

    def handle_data(self, text):
        if self._open:
            self._open[-1][1] += text

    def texts(self, tag: str) -> list[str]:
        return [text for found, text in self.elements if found == tag]


def literals_of(code: str) -> list:
    return [node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)]


def test_model_card():
    card = model_card(
        {
            "title": "cats",
            "data": "a folder | of cats",
            "hub_dataset": "someone/cats: 2",
            "command": "train_ddpm.py --hub_token=abc123 --seed 3 --hub_token abc123 --x hf_abcdefghijklmnopqrstuvwx",
            "updates": 3000,
            "samples_seen": 192000,
            "ema_decay": 0.9999,
            "sampler": "ddim",
            "sampler_steps": 50,
            "metrics": {"validation loss": 0.0123456789},
            "grid": "samples/0003000.png",
            "pipeline": "someone/cats",
        }
    )
    _, header, body = card.split("---\n", 2)
    header = yaml.safe_load(header)
    assert header == {
        "library_name": "diffusers",
        "tags": ["diffusers", "unconditional-image-generation", "ddpm"],
        "datasets": ["someone/cats: 2"],
    }
    for row in ("| Updates | 3,000 |", "| Samples seen | 192,000 |", "| EMA decay | 0.9999 |", "| Sampler | ddim |"):
        assert row in body
    assert "| validation loss | 0.0123457 |" in body and "a folder \\| of cats" in body
    assert "![Samples](samples/0003000.png)" in body and 'from_pretrained("someone/cats")' in body
    assert "abc123" not in card and "hf_abc" not in card and "--seed 3" in card

    bare = model_card({})
    assert "datasets" not in bare and "license" not in bare and "Metric" not in bare and "command" not in bare
    assert yaml.safe_load(model_card({"license": "mit"}).split("---\n")[1])["license"] == "mit"
    with pytest.raises(ValueError, match="unknown facts for the model card: updatez"):
        model_card({"updatez": 3})


@pytest.mark.parametrize("text", HOSTILE)
def test_a_text_of_the_data_is_shown_letter_by_letter(text):
    facts = {"title": text, "data": text, "class_names": [text], "classes": 1, "carries_code": True, "pipeline": text}
    facts |= {"metrics": {text: 0.5}, "hub_dataset": text, "license": text, "command": shlex.join(["python", text])}
    card = model_card(facts)
    header = yaml.safe_load(card.split("---\n")[1])
    assert header["datasets"] == [text] and header["license"] == text
    page, shown = Page(card), " ".join(text.split())
    assert {tag for tag, _ in page.elements} <= {"h1", "h2", "p", "pre", "code", "table", "thead", "tbody", "tr", "th", "td"}
    assert page.texts("h1") == [shown]
    cells = page.texts("td")
    assert [cells[cells.index(name) + 1] for name in ("Data", "Class names")] == [shown] * 2
    assert cells[cells.index("0.5") - 1] == shown
    command, code = page.texts("code")
    assert shlex.split(command) == ["python", text]
    literals = literals_of(code)
    assert literals.count(text) == 2  # the pipeline, and the class that is asked for
    _, code = Page(loaded_from(card, "me/it")).texts("code")
    assert (found := literals_of(code)).count(text) == 1 and found.count("me/it") == 1


def test_a_name_that_is_no_text_does_not_stop_the_export():
    card = model_card({"class_names": ["\udcff"], "classes": 1, "carries_code": True, "title": "a\udcff"})
    assert r'class_labels=["\udcff"]' in card and "# a?\n" in card and card.encode()


COMMANDS = [
    (DDPMOptions, "--dataset_name digits"),
    (DDPMOptions, "--dataset_name digits --num_epochs 100 --no-use_ema --no-tf32"),
    (DDPMOptions, "--train_data_dir 'a b' --model_preset small64 --resolution 32x48 --random_flip --save_images_epochs 3"),
    (DDPMOptions, "--dataset_name me/waves --data_range -1 1 --image_channels 5 --background '#fff' --lr_floor 0.1"),
    (DDPMOptions, "--dataset_name x --dataset_split 'train[:10%]' --global_batch_size 64 --train_batch_size auto"),
    (DDPMOptions, "--pretrained me/p --dataset_name x --train_only 'up_blocks.*' 'conv_out.*' --learning_rate 1e-5"),
    (DDPMOptions, "--dataset_name digits --class_conditional --label_dropout 0.2 --guidance 2 --rescale_betas_zero_snr"),
    (EDM2Options, "--dataset_name digits --ema_widths 0.05 0.2 --P_mean -0.4 --no-class_conditional"),
    (EDM2Options, "--dataset_name x --vae stabilityai/sd-vae-ft-mse --image_channels 3 --mixed_precision bf16"),
]


@pytest.mark.parametrize(("kind", "given"), COMMANDS)
def test_the_command_trains_the_same(kind, given):
    """A shell takes it, the parser understands it, and every option is the one of the run; also of one that was recorded."""
    options = parse_options(kind, "", shlex.split(given))
    launch, script, flags = (words := shlex.split(training_command(options)))[:2], words[2], words[3:]
    assert launch == ["accelerate", "launch"] and script == f"{kind.script}.py"
    again = vars(parse_options(kind, "", flags))
    assert {name: again[name] for name in again if name not in NOT_OF_TRAINING} == {
        name: value for name, value in vars(options).items() if name not in NOT_OF_TRAINING
    }
    record = options_of_record(json.loads(json.dumps(options.recorded())))
    assert type(record) is kind and training_command(record) == training_command(options)


def test_the_command_has_no_path_of_this_machine_no_secret_and_no_default(tmp_path):
    (tmp_path / "my photos").mkdir()
    flags = ["--train_data_dir", str(tmp_path / "my photos"), "--output_dir", str(tmp_path), "--cache_dir", str(tmp_path)]
    flags += ["--hub_token", "hf_abcdefghijklmnopqrstuvwxyz", "--push_to_hub", "--hub_model_id", "me/x", "--seed", "0"]
    flags += ["--resume_from_checkpoint", "latest", "--vae", "/nowhere/any more/vae", "--model_config_name_or_path", "~/config"]
    command = training_command(parse_options(DDPMOptions, "", flags))
    expected = "--train_data_dir 'my photos' --vae vae --model_config_name_or_path config"
    assert sorted(shlex.split(command)[3:]) == sorted(shlex.split(expected))


def test_global_batch_and_accumulation_that_followed_from_it():
    options = parse_options(DDPMOptions, "", ["--dataset_name", "x", "--global_batch_size", "64"])
    options.train_batch_size, options.gradient_accumulation_steps = 16, 4  # what a run makes of it
    assert "--global_batch_size 64" in (command := training_command(options)) and "accumulation" not in command


def test_the_data_is_named_with_what_is_held_out():
    def shown(words: str, training: int, validation: int) -> str:
        resolved = {"training_images": training, "validation_images": validation}
        return shown_data(parse_options(DDPMOptions, "", shlex.split(words)), resolved)

    digits = "--dataset_name digits --validation_images 8"
    assert shown(digits, 52, 8) == "digits: 60 images, 8 of them held out for validation, 16x16, 1 channel"
    folder = "--train_data_dir /home/me/photos --resolution 32x48"
    assert shown(folder, 1234, 0) == "photos: 1,234 images, 32x48, 3 channels"
    hub = "--dataset_name me/cats --dataset_config_name big --dataset_revision v1"
    assert shown(hub, 9, 0) == "me/cats (config big, split train, revision v1): 9 images, 64x64, 3 channels"


def test_addresses_lose_what_is_secret_and_local_data_has_no_name_on_the_hub():
    secret = "https://me:password@data.example/cats/{000..399}.tar?signature=abc#x"
    assert local_name(secret) == "https://data.example/cats/{000..399}.tar"
    assert local_name("hf://datasets/me/cats@v1/a.parquet") == "hf://datasets/me/cats@v1/a.parquet"
    assert local_name("file:///home/me/cats") == "cats" and local_name("gone/with/them") == "them"
    assert [local_name(name) for name in ("~/data", "../x/", "1e-4", "./", "me/cats")] == ["data", "x", "1e-4", ".", "me/cats"]
    names = ("/home/me/gone", secret, "data/more/train", "gone.parquet", "digits", None)
    assert [hub_name(name) for name in names] == [None] * len(names) and hub_name("me/cats") == "me/cats"
