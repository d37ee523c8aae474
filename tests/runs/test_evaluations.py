"""What evaluate.py measured of a run, as files in its folder."""

import json
import threading

import pytest

from utils.runs.evaluations import RESULTS, read_evaluations, run_of, write_evaluation

RESULT = {"name": "runs/d", "features": "randconv", "images": 40, "seed": 0, "sampler": "ddim", "figures": {"fd": 3.0}}


def test_a_run_and_its_checkpoints_are_known_and_nothing_else(tmp_path):
    (tmp_path / "run" / "checkpoint-20").mkdir(parents=True)
    (tmp_path / "run" / "unet").mkdir()
    assert run_of(str(tmp_path / "run")) is None  # a pipeline from elsewhere
    (tmp_path / "run" / "options.json").write_text("{}")
    assert run_of(str(tmp_path / "run")) == (tmp_path / "run", "")
    assert run_of(f"{tmp_path}/run/checkpoint-20/") == (tmp_path / "run", "checkpoint-20")
    assert run_of(str(tmp_path / "run" / "unet")) is run_of("google/ddpm-cifar10-32") is None


def test_the_newer_result_takes_the_place_of_the_same_evaluation_alone(tmp_path):
    for number, changes in enumerate(({}, {"seed": 1}, {"name": "./runs/d", "figures": {"fd": 2.0}})):
        write_evaluation(tmp_path, "", 60, RESULT | changes)
        assert len(read_evaluations(tmp_path)) == (1, 2, 2)[number]
    write_evaluation(tmp_path, "checkpoint-20", 20, RESULT)
    found = [(r["seed"], r["state"], r["step"], r["figures"]["fd"]) for r in read_evaluations(tmp_path)]
    assert found == [(1, "", 60, 3.0), (0, "", 60, 2.0), (0, "checkpoint-20", 20, 3.0)]  # the oldest first


def test_evaluations_at_once_are_all_kept(tmp_path):
    writers = [threading.Thread(target=write_evaluation, args=(tmp_path, "", 60, RESULT | {"seed": n})) for n in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert {result["seed"] for result in read_evaluations(tmp_path)} == set(range(8))


@pytest.mark.parametrize("text", ["{", "[]", '{"results": []}', '{"results": [{"figures": 3, "time": 1.0}]}', "null"])
def test_damaged_files_are_left_out(tmp_path, text):
    write_evaluation(tmp_path, "", 60, RESULT)
    (tmp_path / RESULTS / "0.json").write_text(text)
    assert [result["images"] for result in read_evaluations(tmp_path)] == [40]
    [path] = (tmp_path / RESULTS).glob("[!0]*.json")
    assert json.loads(path.read_text())["results"][0]["name"] == "runs/d"  # as evaluate.py --compare reads it
