"""What the documentation names exists: files, headings, flags and modules. Its commands are understood."""

import importlib
import json
import re
import shlex
import subprocess
from pathlib import Path
from unittest.mock import patch

import pytest
from command_lines import RECORDED
from conftest import ROOT

from utils.options.parser import REMOVED

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/**/*.md")])
SCRIPTS = json.loads(RECORDED.read_text())
FLAGS = {flag: about for script in SCRIPTS.values() for flag, about in script["flags"].items()}
OTHERS = """
    --max_restarts --nnodes --rdzv_backend --rdzv_endpoint --config_file --num_processes --machine_rank --main_process_ip
    --cpu --multi_gpu --standalone --nproc_per_node --help --local_rank --logdir --nodes --signal --time --check --wait
    --ntasks-per-node --gpus-per-node --cpus-per-task --cpus --my_flags --its_flags --train-batch-size
"""  # of launchers and tools, of a script that is not ours, and how a flag may also be written
RECIPES = sorted(ROOT.glob("recipes/*.sh"))
of_pages_and_recipes = pytest.mark.parametrize("page", [*PAGES, *RECIPES], ids=lambda page: str(page.relative_to(ROOT)))
of_pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@of_pages
def test_a_page_has_a_title_and_text(page):
    """A page that a merge has emptied would pass all other checks."""
    assert page.read_text().startswith("# ")
    prose = re.sub(r"^```.*?^```|^#.*?$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(prose.split()) > 100


def test_the_pages_are_there():
    names = {str(page.relative_to(ROOT)) for page in PAGES}
    linked = set(re.findall(r"\]\((docs/\w[\w-]*\.md)", (ROOT / "README.md").read_text()))
    assert len(linked) > 8 and {"README.md", "CHANGELOG.md", "CONTRIBUTING.md"} <= names
    assert {name for name in names if name.startswith("docs/")} == linked


def test_the_architecture_names_each_file_of_the_rooms():
    text = (ROOT / "docs/architecture.md").read_text()
    for room in [path for path in (ROOT / "utils").iterdir() if (path / "__init__.py").exists()]:
        row = next(line for line in text.splitlines() if line.startswith(f"| `{room.name}/` |"))
        assert [path.stem for path in room.glob("[!_]*.py") if f"`{path.stem}`" not in row] == [], room.name


def test_recipes_say_what_they_need_and_what_to_expect():
    assert len(RECIPES) >= 7
    for recipe in RECIPES:
        comment = "".join(line for line in recipe.read_text().splitlines(True) if line.startswith("#"))
        assert f"bash recipes/{recipe.name} " in comment, recipe
        assert all(f"{word}: " in comment for word in ("Hardware", "Time", "Expected")), recipe
        assert subprocess.run(["bash", "-n", recipe]).returncode == 0
        _, _, *others = re.split(r"^(?:accelerate|python) ", recipe.read_text(), flags=re.MULTILINE)
        assert "--resume_from_checkpoint latest" in recipe.read_text(), "a run that was killed goes on by the same command"
        assert not others or "\nset -e\n" in recipe.read_text()  # what follows needs a training that has finished
        assert not any(":?" in other for other in others), "what is missing is said before the training"


@of_pages
def test_links_lead_somewhere(page):
    text = page.read_text()
    labels = dict(re.findall(r"^\[([^]]+)\]: (\S+)$", text, re.MULTILINE))
    assert set(re.findall(r"\]\[([^]]+)\]", text)) <= labels.keys()
    for target in [*re.findall(r"\]\(([^)\s]+)\)", text), *labels.values()]:
        path, _, anchor = target.partition("#")
        if not target.startswith("http"):
            file = page.parent / path if path else page
            assert file.exists(), target
            assert not anchor or anchor in anchors(file), target


@of_pages_and_recipes
def test_flags_exist(page):
    of_benchmarks = {flag for file in ROOT.glob("benchmarks/**/*.py") for flag in re.findall(r'"(--[\w-]+)"', file.read_text())}
    negated = {"--no-" + flag[2:] for script in SCRIPTS.values() for flag, it in script["flags"].items() if it["negated"]}
    named = set(re.findall(r"(?<![\w-])--[a-zA-Z][\w-]*", page.read_text()))
    removed = {f"--{name}" for name in REMOVED} if page.name == "CHANGELOG.md" else set()
    assert named - FLAGS.keys() - negated - {*OTHERS.split()} - of_benchmarks - removed == set()


@of_pages_and_recipes
def test_files_exist(page):
    folders = "utils|tests|benchmarks|accelerate_configs|models|docs|recipes"
    named = re.findall(rf"(?<![\w/.])(?:{folders})/[\w/]*\w\.\w+", page.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


@of_pages_and_recipes
def test_commands_are_understood(page, tmp_path, monkeypatch):
    text = page.read_text().replace("\\\n", " ")
    monkeypatch.chdir(tmp_path)
    for name, content in re.findall(r"^```yaml\n# (\S+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        Path(name).write_text(content)
    for line in re.findall(r"(?:accelerate launch|python) [^\n|`<]*\.py[^\n|`<]*", text):
        words = [word for word in shlex.split(line.split(" > ")[0], comments=True) if word not in ("...", "--print_config")]
        script = next(word for word in words if word.endswith(".py"))
        if Path(script).stem in SCRIPTS and "--help" not in words:
            with patch("sys.argv", [script]):
                options = importlib.import_module(Path(script).stem).parse_args(words[words.index(script) + 1 :])
            assert options.without_effect() == []


@of_pages
def test_no_command_makes_images_in_the_folder_of_another(page):
    """Who runs a page from its first line to its last is not refused."""
    text = page.read_text().replace("\\\n", " ")
    folders = re.findall(r"(?:generate|reconstruct_ema)\.py [^\n`]*--output_dir (\S+)", text)
    assert len(folders) == len({*folders})
