"""Where reconstruct_ema.py writes."""

import pytest

from utils.core.errors import UserError
from utils.evaluation.ema_reconstruction import check_output


@pytest.mark.parametrize("left", ["unet", ".tmp-export/unet"])
def test_what_a_full_disk_or_a_kill_left_of_an_export_is_no_obstacle(tmp_path, left):
    (tmp_path / "out" / left).mkdir(parents=True)
    if left.startswith("."):  # killed
        (tmp_path / "out" / left / "config.json").write_text("{")
        (tmp_path / "out" / "README.md").write_text("# EMA")
    check_output(tmp_path / "out", tmp_path / "run")


@pytest.mark.parametrize("name", ["README.md", "unet/config.json"])
def test_files_of_others_stay(tmp_path, name):
    path = tmp_path / "out" / name
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    with pytest.raises(UserError, match="has other files"):
        check_output(tmp_path / "out", tmp_path / "run")
    assert path.read_text() == "mine"
