"""evaluate.py as its users run it: pipelines and folders, stored references, two processes, bad input."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import same_bytes
from diffusers import DDPMScheduler
from PIL import Image
from safetensors.torch import save_file
from test_edm2_unet import tiny as tiny_edm2
from test_sampling import tiny_unet

import diagnose
import evaluate
from models.edm_heun import EDMHeunScheduler
from utils.core.errors import UserError
from utils.core.images import save_png, to_pil
from utils.data.dataset import content_fingerprint, load_images
from utils.diffusion.export import export_pipeline
from utils.evaluation.evaluator import Evaluation, metric_name
from utils.evaluation.extractors import INCEPTION_SHA256
from utils.evaluation.quality import MIN_IMAGES
from utils.evaluation.results import read_results
from utils.evaluation.sources import FinishedImages
from utils.options.flags import FEWEST_IMAGES, DataOptions
from utils.runs.evaluations import read_evaluations

SAMPLING = ["--num_images", "37", "--batch_size", "8", "--num_inference_steps", "3"]


def write_options(run, *flags):
    """As train_ddpm.py would have written them, with a split of its own."""
    import train_ddpm

    data = "--dataset_name digits --resolution 8 --image_channels 1 --validation_images 50 --seed 3"
    options = vars(train_ddpm.parse_args([*data.split(), "--output_dir", str(run), *map(str, flags)]))
    (run / "options.json").write_text(json.dumps({"options": options}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A pipeline, a checkpoint of it, and two folders of real digits."""
    folder = tmp_path_factory.mktemp("evaluate")
    run = folder / "run"
    export_pipeline(tiny_unet(), DDPMScheduler(num_train_timesteps=20), run, "")
    (run / "checkpoint-5").mkdir()
    (run / "checkpoint-5" / "state.json").write_text("{}")
    save_file(dict(tiny_unet(seed=1).state_dict()), run / "checkpoint-5" / "model.safetensors")
    save_file(dict(tiny_unet(seed=0).state_dict()), run / "checkpoint-5" / "ema.safetensors")
    write_options(run)
    digits = load_images(DataOptions(dataset_name="digits", resolution=8, image_channels=1, cache_dir=str(folder / "cache")))
    order = np.random.default_rng(0).permutation(len(digits))
    for name, rows in (("first", order[:300]), ("second", order[300:700])):
        for number, pixels in enumerate(digits.fetch(rows)):
            save_png(to_pil(torch.from_numpy(pixels)), folder / name / f"{number}.png")
    return folder


@pytest.fixture
def call(folder, monkeypatch, capsys):
    """evaluate.py in this process; what it printed."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    threads = torch.get_num_threads()

    def run(*flags) -> str:
        capsys.readouterr()
        evaluate.main(evaluate.parse_args([*map(str, flags), "--cache_dir", str(folder / "cache")]))
        return capsys.readouterr().out

    yield run
    torch.set_num_threads(threads)


def results(output: str) -> list[dict]:
    return json.loads(output)["results"]


@pytest.mark.slow
def test_two_processes_with_an_uneven_split_give_the_figures_of_one(server, folder, call, tmp_path):
    flags = ["--pipeline", folder / "run", "--dataset_name", "digits", *SAMPLING, "--no_classes", "--json"]
    (alone,) = results(call(*flags))
    server.run(["evaluate.py", *flags, "--cache_dir", tmp_path / "cache", "--output_dir", tmp_path / "out"], 2)
    # To the last bit, reference features included: its cache was empty.
    assert results((tmp_path / "out" / "evaluation.json").read_text()) == [alone]
    with Image.open(tmp_path / "out" / "nearest.png") as sheet:
        assert sheet.width > 600
    # What is said of how it was made.
    assert (alone["images"], alone["reference_images"], alone["seed"], alone["sampler"]) == (37, 1797, 0, "ddim")
    assert (alone["features"], alone["num_inference_steps"], alone["image_shape"]) == ("randconv", 3, [1, 8, 8])
    assert len(alone["extractor_sha256"]) == 64 and alone["resize"]
    assert alone["figures"]["memorisation"]["compared_with"] == "held-out images"  # as the run's options.json split them
    assert alone["figures"]["memorisation"]["training_images"] == 1747
    assert (folder / "run" / "evaluation" / "evaluation.json").exists()


def test_a_pipeline_a_checkpoint_and_generated_files_are_the_same_images(folder, call, monkeypatch, tmp_path):
    import generate

    generate.main(generate.parse_args(["--pipeline", str(folder / "run"), "--output_dir", str(tmp_path / "out"), *SAMPLING]))
    flags = ["--pipeline", folder / "run", folder / "run" / "checkpoint-5", "--images", tmp_path / "out", *SAMPLING]
    output = call(*flags, "--dataset_name", "digits", "--no_classes", "--json", "--output_dir", tmp_path / "figures")
    files, pipeline, checkpoint = (result["figures"] for result in results(output))
    assert files == pipeline == checkpoint  # the checkpoint's averaged weights are those that were exported
    table = call("--images", tmp_path / "out", "--dataset_name", "digits", "--no_classes")
    assert "fd_randconv = " in table and "(real/real floor " in table and "N 37 against 1797)" in table
    assert f"note: {tmp_path / 'out'}: the figures are not saved; set --output_dir to save them" in table
    assert "37 images for 120 feature dimensions: the covariance is singular" in table
    assert "FAIL  samples-unlike-data" in table and "likely cause:" in table and "try:" in table
    assert "fid" not in table


def test_the_split_is_the_run_s_own_or_unknown(folder, call, tmp_path):
    runs = {"plain": (), "first": ("--max_train_images", 900), "cropped": ("--center_crop",), "seeded": ("--seed", 4)}
    runs |= {"elsewhere": ("--dataset_name", "another/path"), "others": ("--dataset_name", "another/path")}
    for name, flags in runs.items():
        shutil.copytree(folder / "run", tmp_path / name)
        write_options(tmp_path / name, *flags)
    digits = DataOptions(dataset_name="digits", resolution=8, image_channels=1, cache_dir=str(folder / "cache"))
    for name, content in (("elsewhere", content_fingerprint(load_images(digits))), ("others", "0")):
        state = {"options": {"data_fingerprint": content}, "max_train_steps": 5}
        (tmp_path / name / "checkpoint-5" / "state.json").write_text(json.dumps(state))
    pipelines = [tmp_path / name for name in runs]
    flags = ["--pipeline", *pipelines, "--dataset_name", "digits", *SAMPLING, "--no_classes", "--output_dir", tmp_path / "out"]
    output = call(*flags)
    found = {Path(result["name"]).name: result for result in read_results(tmp_path / "out" / "evaluation.json")}
    splits = {name: result["validation_split"] for name, result in found.items()}
    assert splits == {"plain": [50, 3], "first": "unknown", "cropped": "unknown", "seeded": [50, 4]} | {
        "elsewhere": [50, 3],  # by the content, which a checkpoint tells
        "others": "unknown",
    }
    copies = {name: result["figures"]["memorisation"] for name, result in found.items()}
    assert [copies[name]["training_images"] for name in runs] == [1747, 1797, 1797, 1747, 1747, 1797]
    assert copies["first"]["compared_with"] == "other training images"
    assert copies["plain"]["pixel_distance_real"] != copies["seeded"]["pixel_distance_real"]  # of other held-out images
    assert output.count(": unknown split") == 3


@pytest.mark.slow
def test_edm2_with_classes_and_guidance_is_evaluated_as_it_is_generated(folder, call, tmp_path):
    import generate

    export_pipeline(tiny_edm2(), EDMHeunScheduler(sigma_data=0.5), tmp_path / "edm2", "", class_names=["1", "2", "3"])
    sampling = [*SAMPLING, "--class_labels", 3, "#0", "--guidance", 1.5]
    flags = ["--pipeline", tmp_path / "edm2", "--output_dir", tmp_path / "out", *sampling]
    generate.main(generate.parse_args([str(flag) for flag in flags]))
    flags = ["--pipeline", tmp_path / "edm2", "--images", tmp_path / "out", *sampling, "--output_dir", tmp_path / "figures"]
    files, made = results(call(*flags, "--dataset_name", "digits", "--no_classes", "--json"))
    assert (made["sampler"], made["guidance"], made["class_labels"]) == ("heun", 1.5, [2, 0])
    assert made["figures"] == files["figures"]


@pytest.mark.slow
def test_several_seeds_are_all_shown_with_mean_and_minimum(folder, call):
    flags = ["--pipeline", folder / "run", "--dataset_name", "digits", *SAMPLING, "--no_classes", "--seeds", 0, 1]
    first, second = (result["figures"]["fd"] for result in results(call(*flags, "--json")))
    assert first != second
    sheets = {name: (folder / "run" / "evaluation" / name).read_bytes() for name in ("nearest.png", "nearest-1.png")}
    call(*[*flags[:-2], 0])
    assert same_bytes(folder / "run" / "evaluation" / "nearest.png", sheets["nearest.png"])
    assert not same_bytes(folder / "run" / "evaluation" / "nearest.png", sheets["nearest-1.png"])
    output = call(*flags)
    assert "not saved" not in output
    assert f"fd_randconv over 2 seeds: mean {(first + second) / 2:.4g}, minimum {min(first, second):.4g}" in output
    assert re.findall(r"^.* (seed \d):", output.rpartition("over 2 seeds")[2], re.MULTILINE) == ["seed 0", "seed 1"]


def test_real_images_against_real_images_find_nothing(folder, call, monkeypatch):
    monkeypatch.setattr("utils.evaluation.extractors._STEPS", 150)
    output = call("--images", folder / "first", "--dataset_name", "digits", "--json")
    (result,) = results(output)
    figures = result["figures"]
    assert figures["classes"]["number"] == 10 and figures["classes"]["hit"] == 1
    assert figures["memorisation"]["near_duplicates"] == 1  # they are in the data set
    assert [finding["code"] for finding in figures["findings"]] == ["samples-copied"]
    output = call("--images", folder / "first", "--reference", folder / "second")
    assert "the Frechet distance is within 5 times its floor" in output
    assert "nothing found that looks like a collapse\n" in output and "classes hit" not in output


def test_of_few_images_the_variety_is_said_not_to_be_judged(folder, call, tmp_path):
    for number in range(60):
        save_png(Image.open(folder / "first" / f"{number}.png"), tmp_path / "few" / f"{number}.png")
    output = call("--images", tmp_path / "few", "--reference", folder / "second")
    assert "nothing found that looks like a collapse (with fewer than 100 images, variety is not judged)" in output


def test_stored_reference_statistics_serve_like_the_images(folder, call, tmp_path):
    path = tmp_path / "digits.npz"  # whatever its name
    common = ["--dataset_name", "digits", "--resolution", 8, "--image_channels", 1]
    said = call("make-reference", *common, "--output", path)
    assert "1,797 images, randconv, SHA-256 " in said
    (direct,) = results(call("--images", folder / "first", "--dataset_name", "digits", "--no_classes", "--json"))
    (stored,) = results(call("--images", folder / "first", "--reference", path, "--json"))
    for key in ("fd", "kd", "recall", "coverage", "modes", "floor"):
        assert stored["figures"][key] == direct["figures"][key]
    assert stored["reference_fingerprint"] == direct["reference_fingerprint"]
    with pytest.raises(UserError, match=r"its image size is \[1, 8, 8\], not \[1, 16, 16\]"):
        make_images(tmp_path / "large", [16] * 20)
        call("--images", tmp_path / "large", "--reference", path)
    with pytest.raises(UserError, match="needs the reference images"):
        call("--images", folder / "first", "--reference", path, "--features", "classifier")


@pytest.mark.parametrize(("suffix", "flag"), [(".npy", "--reference"), (".npz", "--dataset_name")])
def test_arrays_are_the_real_images_that_they_hold(folder, call, tmp_path, suffix, flag):
    files = sorted((folder / "first").glob("*.png"))
    levels = np.stack([np.asarray(Image.open(path)) for path in files])
    values, path = (levels / 255 * 5 - 2).astype(np.float32), tmp_path / f"first{suffix}"
    np.save(path, values) if suffix == ".npy" else np.savez(path, images=values)
    asked = ["--images", folder / "second", "--no_classes", "--json"]
    expected, found = (
        results(call(*asked, *real))[0]["figures"]
        for real in (["--reference", folder / "first"], [flag, path, "--data_range", "-2", "3"])
    )
    for name in ("fd", "kd", "precision", "coverage"):
        assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    if flag == "--reference":
        with pytest.raises(UserError, match=r"holds float32, whose range is not known .*\nset --data_range LOW HIGH"):
            call(*asked, flag, path)


@pytest.mark.slow
def test_only_what_was_made_alike_is_compared(folder, call, tmp_path, monkeypatch):
    flags = ["--images", folder / "first", "--dataset_name", "digits", "--no_classes"]
    call(*flags, "--output_dir", tmp_path / "a")
    output = call(*flags, "--compare", tmp_path / "a" / "evaluation.json", "--json")
    assert len(results(output)) == 2
    call(*flags, "--features", "classifier", "--output_dir", tmp_path / "other")
    with pytest.raises(UserError, match=r"cannot be compared: another extractor \(randconv, classifier\)"):
        call(*flags, "--compare", tmp_path / "other" / "evaluation.json")
    measured = []
    monkeypatch.setattr(Evaluation, "measure", lambda *args, **options: measured.append(args))
    with pytest.raises(UserError, match=r"another number of images \(300, 400\)"):
        call("--images", folder / "first", folder / "second", "--dataset_name", "digits", "--no_classes")
    with pytest.raises(UserError, match=r"another reference images|another number of reference images"):
        call(*flags, "--max_train_images", 1000, "--compare", tmp_path / "a" / "evaluation.json")
    assert measured == []  # told before anything was made
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(UserError, match=r"is not a results file of evaluate\.py"):
        call(*flags, "--compare", tmp_path / "other.json")


def test_only_inception_s_own_weights_make_a_fid():
    known = {"features": "inception", "extractor_sha256": INCEPTION_SHA256, "images": 50_000}
    assert (metric_name("fd", known), metric_name("kd", known)) == ("fid", "kid")
    assert metric_name("fd", known | {"images": 10_000}) == "fid_10k"
    other = known | {"extractor_sha256": INCEPTION_SHA256[:8] + 56 * "0"}  # --feature_weights_sha256 of another file
    assert (metric_name("fd", other), metric_name("kd", other)) == ("fd_inception", "kd_inception")
    assert metric_name("fd", known | {"features": "randconv"}) == "fd_randconv"


def test_a_result_is_kept_as_soon_as_it_is_made(folder, call, tmp_path, monkeypatch):
    measure, calls = Evaluation.measure, []

    def second_fails(self, *args, **options):
        calls.append(args)
        if len(calls) > 1:
            raise UserError("the disk is gone")
        return measure(self, *args, **options)

    monkeypatch.setattr(Evaluation, "measure", second_fails)
    flags = ["--pipeline", folder / "run", "--dataset_name", "digits", *SAMPLING, "--no_classes", "--seeds", 0, 1]
    with pytest.raises(UserError, match="the disk is gone"):
        call(*flags, "--output_dir", tmp_path / "out")
    assert [result["seed"] for result in read_results(tmp_path / "out" / "evaluation.json")] == [0]
    assert (tmp_path / "out" / "nearest.png").exists()


def test_what_was_found_stands_in_the_record_of_the_run(folder, call, tmp_path, capsys):
    run = shutil.copytree(folder / "run", tmp_path / "run", ignore=shutil.ignore_patterns("evaluation"))
    common = ["--dataset_name", "digits", *SAMPLING, "--no_classes"]
    output = call("--pipeline", run / "checkpoint-5", run, *common)
    assert "are not saved" not in output
    (found,) = json.loads((run / "diagnosis.json").read_text())
    assert (found["code"], found["severity"], found["source"]) == ("samples-unlike-data", "critical", "evaluate.py")
    page = (run / "report.html").read_text()
    assert ">1 critical, 0 warnings</b>" in page and 'class="good"' not in page and "samples-unlike-data" in page
    # diagnose.py judges the run anew, and does not lose it.
    (run / "history.jsonl").write_text('{"step": 5, "train/loss": 1.0}\n')
    assert diagnose.main(diagnose.parse_args([str(run), "--fail_on", "critical"])) == 1
    assert "samples-unlike-data" in (run / "diagnosis.json").read_text()
    # Also where the figures go elsewhere; and again, in the place of the first.
    call("--pipeline", run, *common, "--output_dir", tmp_path / "out")
    assert len(read_evaluations(run)) == 2 and (tmp_path / "out" / "evaluation.json").exists()
    # A pipeline that is no run has no record.
    shutil.copytree(run, tmp_path / "elsewhere", ignore=lambda folder, names: {"options.json", "evaluation", "diagnosis.json"})
    call("--pipeline", tmp_path / "elsewhere", *common)
    assert not (tmp_path / "elsewhere" / "evaluation").exists() and not (tmp_path / "elsewhere" / "diagnosis.json").exists()


@pytest.mark.parametrize("elsewhere", [[], ["--output_dir", "out"]])
def test_figures_that_cannot_be_written_are_printed(folder, tmp_path, monkeypatch, capsys, elsewhere):
    run = shutil.copytree(folder / "run", tmp_path / "run", ignore=shutil.ignore_patterns("evaluation"))
    (run / "evaluation").write_text("")  # in the place of a full disk, and of a read-only folder, which stops no root
    monkeypatch.chdir(tmp_path)
    Path("out", "evaluation.json").mkdir(parents=True)
    flags = ["--pipeline", run, "--dataset_name", "digits", *SAMPLING, "--no_classes", "--json", *elsewhere]
    evaluate.main(evaluate.parse_args([*map(str, flags), "--cache_dir", str(folder / "cache")]))
    said = capsys.readouterr()
    assert results(said.out)[0]["figures"]["findings"][0]["code"] == "samples-unlike-data"
    notes = [line for line in said.err.splitlines() if line.startswith("note: ")]
    assert len(notes) == 2 and "the figures are not saved" in notes[0] and f"not in the record of {run}" in notes[1]


@pytest.mark.parametrize("flag", ["--output_dir", "--output"])
def test_what_cannot_be_written_is_said_before_the_work(tmp_path, call, flag):
    (tmp_path / "file").write_text("")
    work = ["make-reference"] if flag == "--output" else ["--pipeline", "nowhere"]
    with pytest.raises(UserError, match=f"cannot write to {flag} .*file/x: Not a directory"):
        call(*work, "--dataset_name", "digits", flag, tmp_path / "file" / "x" / ("r" * (flag == "--output")))


def make_images(folder, sides):
    for number, side in enumerate(sides):
        pixels = np.random.default_rng(number).integers(0, 256, (side, side), dtype=np.uint8)
        folder.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{number}.png")


def test_bad_input_is_one_line(folder, call, tmp_path):
    (tmp_path / "nothing").mkdir()
    make_images(tmp_path / "mixed", [8, 8, 9])
    make_images(tmp_path / "few", [8] * 5)
    make_images(tmp_path / "large", [16] * 20)
    shutil.copytree(tmp_path / "few", tmp_path / "broken")
    (tmp_path / "broken" / "9.png").write_bytes(b"no image")
    (tmp_path / "noise").mkdir()
    for number in range(20):
        (tmp_path / "noise" / f"{number}.png").write_bytes(b"no image")
    digits = ["--dataset_name", "digits"]
    cases = [
        (["--images", tmp_path / "nothing", *digits], "has no images"),
        (["--images", tmp_path / "mixed", *digits], r"different sizes: 0.png 8x8, 2.png 9x9"),
        (["--images", tmp_path / "broken", *digits], "9.png cannot be decoded"),
        (["--images", tmp_path / "noise", *digits], r"0\.png cannot be decoded"),
        (["--images", tmp_path / "few", *digits, "--no_classes"], "5 samples and 1797 reference images"),
        (["--images", folder / "first", tmp_path / "large", *digits], "the images have different sizes"),
        (["--images", folder / "first", "--reference", folder / "second", "--features", "classifier"], "--label_column"),
        (
            ["--images", folder / "first", *digits, "--features", "inception"],
            "needs weights\nset --feature_weights to w",
        ),
        (["--images", folder / "first", *digits, "--feature_weights", "w"], "--feature_weights is not for --features randconv"),
        (["--images", folder / "first", *digits, "--output", "w"], "--output is for make-reference"),
        (["--pipeline", folder / "run", *digits, "--num_images", 9], "--num_images must be a whole number of at least 10"),
        (["--pipeline", tmp_path, *digits], "cannot load a pipeline"),
        ([*digits], "nothing to evaluate"),
        (["--images", folder / "first"], "no real images"),
        (["--images", folder / "first", *digits, "--reference", folder], "the real images are given twice"),
        (["make-reference", *digits], "needs --output"),
    ]
    for flags, message in cases:
        with pytest.raises(UserError, match=message) as error:
            call(*flags)
        assert str(error.value).count("\n") <= 1, message


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--sampler", "heun"], "--sampler heun does not work"),
        (["--num_inference_steps", 21], "from 1 to 20"),
        (["--class_labels", 3], "--class_labels 3: the pipeline has no classes"),
        (["--guidance", 2], "--guidance: the pipeline has no classes"),
    ],
)
def test_flags_of_the_samples_are_checked_before_the_real_images_are_read(folder, call, monkeypatch, flags, message):
    monkeypatch.setattr("utils.evaluation.reference.load_images", lambda *_: pytest.fail("the real images are read"))
    with pytest.raises(UserError, match=message):
        call("--pipeline", folder / "run", "--dataset_name", "digits", *flags)


def test_arrays_of_other_channels_are_named(folder, call, tmp_path):
    np.save(tmp_path / "rgb.npy", np.zeros((30, 8, 8, 3), np.uint8))
    said = r"the images of .*rgb.npy are \[8, 8, 3\], .* 3 channels .*, and the images that are evaluated have 1 channels\n"
    with pytest.raises(UserError, match=said + "compare images"):
        call("--images", folder / "first", "--reference", tmp_path / "rgb.npy")


def test_flags_of_samples_need_a_pipeline():
    for flag in ("--num_images 20", "--sampler ddim", "--guidance 2", "--class_labels 1", "--seeds 1"):
        with pytest.raises(UserError, match=f"^{flag.split()[0]} is for --pipeline, and only --images is set\nleave"):
            evaluate.parse_args(["--images", "a", "--reference", "b", *flag.split()])


def test_paths_are_checked_before_the_libraries_load(call, monkeypatch):
    monkeypatch.setattr("evaluate.loading_libraries", lambda _: pytest.fail("the libraries load"))
    for flag in ("--images", "--compare", "--reference", "--train_data_dir"):
        named = [flag, "absent"] + (["--dataset_name", "digits"] if flag in ("--images", "--compare") else [])
        with pytest.raises(UserError, match=f"{flag} absent: no such file or folder"):
            call("--pipeline", "run", *named)


def test_the_fewest_images_that_flags_allow_are_those_that_figures_need():
    assert FEWEST_IMAGES == MIN_IMAGES


def test_one_color_image_makes_a_folder_of_color(tmp_path):
    make_images(tmp_path / "mixed", [8] * 3)
    assert FinishedImages(tmp_path / "mixed").shape == (1, 8, 8)
    Image.new("RGB", (8, 8), "red").save(tmp_path / "mixed" / "9.png")
    for name in ("._000.png", "__MACOSX/000.png", ".trash/000.png"):  # as in training, what is hidden does not count
        (tmp_path / "mixed" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "mixed" / name).write_bytes(b"of a Mac")
    folder = FinishedImages(tmp_path / "mixed")
    assert folder.shape == (3, 8, 8)
    assert folder.source("cpu")(torch.tensor([3]))[0, :, 0, 0].tolist() == [255, 0, 0]
