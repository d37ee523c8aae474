"""Each code of the laws has its sentences in findings.toml, and each place in a sentence a figure of the law."""

import ast
from pathlib import Path

import pytest

import steady_doctor
from steady_doctor.found import Found
from steady_doctor.words import SENTENCES, SEVERITIES, count_line, finding, not_identified, places, shown, table

HOME = Path(steady_doctor.__file__).parent
STAGES = ("data", "noise", "timestep", "input", "condition", "network", "target", "weight")
STAGES += ("gradient", "optimizer", "learning_rate", "ema", "state", "ranks", "export")


def calls(name: str) -> list[ast.Call]:
    nodes = [node for path in HOME.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    return [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name]


GIVEN: dict[
    str, list[set[str] | None]
] = {}  # code -> the names of the figures, of each place that gives it; None: not written there
for _call in calls("Found"):
    _figures = _call.args[2] if len(_call.args) > 2 else ast.Dict([], [])
    _literal = isinstance(_figures, ast.Dict) and all(isinstance(key, ast.Constant) for key in _figures.keys)
    for _node in ast.walk(_call.args[0]):
        if isinstance(_node, ast.Constant) and isinstance(_node.value, str):
            GIVEN.setdefault(_node.value, []).append({key.value for key in _figures.keys} if _literal else None)


def test_each_code_has_a_table_and_each_table_a_code():
    assert len(GIVEN) > 20
    assert table().keys() == GIVEN.keys()


@pytest.mark.parametrize("code", table())
def test_a_table_is_complete_and_its_places_are_figures_of_the_law(code):
    entry = table()[code]
    assert {"stage", *SENTENCES, "fixes"} <= entry.keys() <= {"stage", "severity", *SENTENCES, "fixes"}
    assert entry["stage"] in STAGES and entry.get("severity", "warning") in SEVERITIES
    assert code.split("-")[0] in (entry["stage"], entry["stage"].split("_")[-1])
    assert all(entry[name] for name in SENTENCES) and entry["fixes"] and all(entry["fixes"])
    wanted = {place for text in (*(entry[name] for name in SENTENCES), *entry["fixes"]) for place in places(text)}
    for given in GIVEN[code]:
        assert given is None or wanted <= given, f"[{code}] names {wanted - given}, which a law does not give"


def test_each_reason_why_there_is_no_mixture_has_a_sentence():
    codes = {call.args[0].value for call in calls("Nothing") if isinstance(call.args[0], ast.Constant)}
    codes |= {part.value for call in calls("Nothing") for part in ast.walk(call) if isinstance(part, ast.Constant)}
    assert codes and all(" " in not_identified(code) for code in codes)


def test_a_finding_has_the_figures_of_the_law_in_its_sentences():
    one = finding(Found("noise-shared", 5, {"axis": 0, "shape": (8, 3, 16, 16)}))
    assert (one.stage, one.severity, one.update) == ("noise", "critical", 5)
    assert one.observed == "the same noise along axis 0 of 8x3x16x16"
    assert one.to_json()["step"] == 5 and "update" not in one.to_json()
    assert count_line([one]) == "1 critical, 0 warnings" and count_line([]) == "0 critical, 0 warnings: nothing found"


def test_a_figure_that_a_law_does_not_give_is_named():
    with pytest.raises(KeyError, match=r"\[noise-shared\] names axis, which its law does not give"):
        finding(Found("noise-shared", 5, {"shape": (8, 3)}))


@pytest.mark.parametrize(
    ("figure", "words"),
    [
        (0.123456, 0.123456),  # a sentence formats it
        ("clamp", "clamp"),
        ((8, 3, 4), "8x3x4"),
        (("clamp", "round"), "clamp and round"),
        ((-0.51234, 1.0), "-0.512 and 1"),
        ([(0.1, 0.9), (0.25, 0.75)], "0.1 and 0.9; 0.25 and 0.75"),
        (("normal_",), "normal_"),
    ],
)
def test_sequences_are_shown_as_words(figure, words):
    assert shown(figure) == words
