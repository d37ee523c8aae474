"""benchmarks/doctor/ask.py: its edits apply to the sources as they are, answers are judged right, and a run is asked."""

import json

import pytest

from benchmarks.doctor import ask, cases, engine, runs
from benchmarks.doctor.edits import Edit, edited
from benchmarks.doctor.runs import Result
from steady_doctor.words import table

SOURCE = """
def f(x):
    a = g(x,  # why
          1)
    if x:
        a = "a = 1"
    return a
"""


def test_every_edit_applies_to_the_sources_as_they_are(monkeypatch, capsys):
    """Where this fails a line has changed: write the edit anew, so that it is the same fault."""
    monkeypatch.setattr("sys.argv", ["ask.py", "--check"])
    assert ask.main(ask.parse_args()) == 0, capsys.readouterr().out
    assert set(cases.STAGES) == {entry["stage"] for entry in table().values()}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("a = g(x, 1)", "a = 2", '    a = 2\n    if x:\n        a = "a = 1"'),
        ("a = g(\n x,1 )\nif x :", "if not x:", '    if not x:\n        a = "a = 1"'),
        ('a = "a = 1"', "a = 2\nif a:\n    a = 3", "        a = 2\n        if a:\n            a = 3\n"),
        ("x, 1", "x", "    a = g(x)\n"),
    ],
)
def test_an_edit_matches_code_without_its_white_space_and_comments(old, new, expected):
    assert expected in edited(SOURCE, [Edit("f", old, new)])


REFUSED = [
    ([(old, "c")], "not once") for old in ("a", "a = 1", "b", "", "# why")
]  # a part of a string or of a name is no match
REFUSED += [([('a = "a = 1"\nreturn a', 'a = "a = 1"\na = 2\nreturn a')], "further up")]  # it would stand inside the `if`
REFUSED += [([("g(x, 1)", "c"), ("1) if x", "c")], "two edits")]


@pytest.mark.parametrize(("edits", "why"), REFUSED)
def test_an_edit_that_cannot_be_told_is_refused(edits, why):
    with pytest.raises(ValueError, match=why):
        edited(SOURCE, [Edit("f", *edit) for edit in edits])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('stage = ["ema"]', "x: stage"),
        ('stages = ["emma"]', "x: stage emma"),
        ('stages = ["ema"]\n[[fault]]\nname = "x"\nstages = ["ema"]', "two faults of the name x"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(tmp_path, text, problem):
    (tmp_path / "a.toml").write_text(f'script = "a.py"\nflags = {{}}\n[[fault]]\nname = "x"\n{text}')
    with pytest.raises(ValueError, match=problem):
        cases.read(tmp_path / "a.toml")


def test_answers_are_judged(tmp_path):
    """By the stages and codes of the first two findings above info; a healthy run has none, and the same losses."""
    found = [{"code": "a", "severity": "info"}, {"code": "b", "severity": "warning", "stage": "ema"}]
    found += [{"code": "c", "severity": "critical", "stage": "state"}, {"code": "d", "severity": "warning", "stage": "data"}]
    (tmp_path / "diagnosis.json").write_text(json.dumps(found))
    findings = engine.findings(tmp_path)

    def right(stages=(), codes=(), findings=findings, same=None) -> bool:
        return Result("x", "edm.py", list(stages), list(codes), False, False, "", findings, 0, same=same).right

    assert right(["ema"]) and right(["weight", "state"]) and right(codes=["c"])
    assert not (right(["data"]) or right(codes=["a"]) or right(codes=["d"]) or right())
    assert right(findings=[]) and right(findings=[], same=True) and not right(findings=[], same=False)
    assert engine.findings(tmp_path / "nowhere") is None and not right(findings=None)


def test_a_doctor_that_gave_up_is_not_silent(tmp_path):
    (tmp_path / "diagnosis.json").write_text('[{"code": "overfitting", "severity": "info"}]')
    assert not engine.gave_up(tmp_path, "step 1 loss 0.5") and not engine.gave_up(tmp_path / "nowhere", "")
    assert engine.gave_up(tmp_path, "note: the doctor stopped, the script goes on: KeyError: 1")
    (tmp_path / "diagnosis.json").write_text('[{"code": "rule-failed", "severity": "info"}]')
    assert engine.gave_up(tmp_path, "")


@pytest.mark.slow
def test_a_doctor_that_fails_makes_no_healthy_run(tmp_path, monkeypatch, capsys):
    """Its first law is broken in the copy that is asked."""
    real = runs.copy_repository

    def broken(folder):
        real(folder)
        law = folder / "steady_doctor" / "laws" / "inputs.py"
        law.write_text(
            law.read_text().replace("def spread(seen: Seen) -> Iterator[Found]:", "def spread(seen: Seen):\n    raise KeyError")
        )

    monkeypatch.setattr(runs, "copy_repository", broken)
    monkeypatch.setattr("sys.argv", ["ask.py", "edm: healthy: as usual", "--jobs", "1"])
    assert ask.main(ask.parse_args()) == 0
    assert "the doctor left nothing" in capsys.readouterr().out


@pytest.mark.slow
def test_a_fault_is_found_a_healthy_run_is_not_and_what_is_known_is_not_asked_again(tmp_path, monkeypatch, capsys):
    words = ["ask.py", "edm: c_in", "edm: healthy: as usual", "--jobs", "2", "--json", str(tmp_path / "asked.json")]
    for known in (0, 2):
        monkeypatch.setattr("sys.argv", words)
        assert ask.main(ask.parse_args()) == 0
        said = capsys.readouterr().out
        assert f"{known} known before" in said
        assert "| input | 1 of 1 (100.0%) |" in said and "with a finding above info: 0" in said
        assert "With other losses than without the doctor: 0 of 1." in said
