"""Columns of labels, as people have them: the classes are the values that occur."""

import re
from decimal import Decimal

import datasets
import numpy as np
import pytest

from utils.core.errors import UserError
from utils.data.columns import find_labels

INTEGERS, FLOATS = datasets.Value("int64"), datasets.Value("float32")


def found(values, feature, requested=None):
    made = datasets.Dataset.from_dict({"label": values}, features=datasets.Features({"label": feature}))
    labels, names, notes = find_labels(made, requested)
    return None if labels is None else labels.tolist(), names, notes


@pytest.mark.parametrize(
    ("values", "feature", "labels", "names"),
    [
        ([0, 2, 1, 1], INTEGERS, [0, 2, 1, 1], None),
        ([3, 1, 2, 1], INTEGERS, [2, 0, 1, 0], ["1", "2", "3"]),
        ([20000, 7, 7], INTEGERS, [1, 0, 0], ["7", "20000"]),
        ([-2, 5, -2], INTEGERS, [0, 1, 0], ["-2", "5"]),
        ([-1, 1, 0], INTEGERS, [-1, 1, 0], None),
        ([None, 4, 9], INTEGERS, [-1, 0, 1], ["4", "9"]),
        ([0.0, 1.0, 1.0], FLOATS, [0, 1, 1], None),
        ([float("nan"), 2.0, 5.0], FLOATS, [-1, 0, 1], ["2", "5"]),
        ([[1], [0], []], datasets.List(INTEGERS), [1, 0, -1], None),
        ([[3.0], [4.0], [3.0]], datasets.List(FLOATS), [0, 1, 0], ["3", "4"]),
        ([[0, 1, 0], [1, 0, 0], [0, 0, 1]], datasets.List(INTEGERS), [1, 0, 2], None),
        ([[0.0, 1.0], [0.0, 0.0], [1.0, 0.0]], datasets.List(FLOATS), [1, -1, 0], None),
        ([[0, 1], [1, 0]], datasets.List(INTEGERS, length=2), [1, 0], None),
        ([[float("nan")], [0.0], [1.0]], datasets.List(FLOATS), [-1, 0, 1], None),
        (["b", "a", None, "b", "a"], datasets.Value("string"), [1, 0, -1, 1, 0], ["a", "b"]),
        (["b ", "a", " ", "b", "a"], datasets.Value("string"), [1, 0, -1, 1, 0], ["a", "b"]),
        ([["b"], ["a"], [], ["b"]], datasets.List(datasets.Value("string")), [1, 0, -1, 1], ["a", "b"]),
        ([[False, True], [True, False]], datasets.List(datasets.Value("bool")), [1, 0], None),
        ([Decimal(3), Decimal(1), None], datasets.Value("decimal128(5, 0)"), [1, 0, -1], ["1", "3"]),
        ([True, False, None], datasets.Value("bool"), [1, 0, -1], ["False", "True"]),
        ([1, -1, 0], datasets.ClassLabel(names=["x", "y", "z"]), [1, -1, 0], ["x", "y", "z"]),
    ],
)
def test_the_classes_are_the_values_that_occur(values, feature, labels, names):
    given, named, notes = found(values, feature)
    assert (given, named) == (labels, names)
    without = labels.count(-1)
    assert any(note.startswith(f"{without} of {len(labels)} images have no label") for note in notes) == bool(without)
    is_declared = isinstance(feature, datasets.ClassLabel)
    assert any("become classes" in note for note in notes) == (names is not None and not is_declared)


@pytest.mark.parametrize(
    ("values", "feature", "why"),
    [
        ([0.5, 1.0], FLOATS, "0.5 is no class"),
        ([float("inf"), 1.0], FLOATS, "inf is no class"),
        ([1e20, 1.0], FLOATS, "1e\\+20 is no class"),
        ([{"id": 1}, {"id": 2}], {"id": INTEGERS}, "struct of id values cannot be labels"),
        ([[0.2], [1.9]], datasets.List(FLOATS), "0.2 is no class"),
        ([[1, 1, 0], [0, 0, 1]], datasets.List(INTEGERS), "not one-hot"),
        ([[0, 2], [1, 0]], datasets.List(INTEGERS), "not one-hot"),
        ([[0, 1], [1]], datasets.List(INTEGERS), "different lengths"),
        ([-1, -1], INTEGERS, "no row has a label"),
        ([None, None], FLOATS, "no row has a label"),
        ([[], []], datasets.List(INTEGERS), "no row has a label"),
    ],
)
def test_what_is_no_label_is_said(values, feature, why):
    labels, _, notes = found(values, feature)
    assert labels is None and re.search(why, notes[0])
    with pytest.raises(UserError, match=f"--label_column label: .*{why}"):
        found(values, feature, "label")


@pytest.mark.parametrize(
    ("columns", "features", "used"),
    [
        ({"label": [0.3, 0.5, 0.1], "class_id": [0, 1, 0]}, (FLOATS, INTEGERS), "class_id"),
        ({"label": [[1, 1], [0, 1], [1, 0]], "class_id": [0.0, 1.0, 0.0]}, (datasets.List(INTEGERS), FLOATS), "class_id"),
        ({"target": [1.0, 2.0, 3.0, 1.0], "class": ["a", "b", "a", "b"]}, (FLOATS, datasets.Value("string")), "class"),
        ({"label": [-1, -1], "target": [0, 1]}, (INTEGERS, INTEGERS), "target"),
        ({"Target": [0, 1], "LABEL": [1, 0]}, (INTEGERS, INTEGERS), "LABEL"),
        ({"class": [True, False], "target": [3.0, 1.0]}, (datasets.Value("bool"), FLOATS), "target"),
    ],
)
def test_a_column_without_classes_hides_no_other(columns, features, used):
    made = datasets.Dataset.from_dict(columns, features=datasets.Features(dict(zip(columns, features))))
    labels, _, _ = find_labels(made)
    assert labels.tolist() == find_labels(made, used)[0].tolist()


def test_many_classes_of_few_images_are_said():
    assert "warning: 12 classes for 12 images" in found(list(range(12)), INTEGERS)[2][0]
    assert not found(np.repeat(range(12), 5), INTEGERS)[2] and not found(list(range(9)), INTEGERS)[2]


def test_what_is_left_out_without_a_request_is_said():
    labels, _, notes = found(["a", "b", "c"], datasets.Value("string"))
    assert labels is None and notes == ["label column 'label' is not used: its words hardly repeat (--label_column uses it)"]
    assert "8 of the 10 classes of 'label' have no image" in found([1, 7], datasets.ClassLabel(num_classes=10))[2]
