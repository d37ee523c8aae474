"""Where Hugging Face's libraries keep what they download, if the user's home has no place for it."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from utils.core.cache_home import use_a_cache_that_can_be_written


@pytest.fixture
def environment(monkeypatch):
    for name in ("HF_HOME", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "RANK"):
        monkeypatch.setenv(name, "")  # so that what the function sets is taken back
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize("home", ["a file", "nobody's"])
def test_a_cache_beside_the_run_or_where_it_is_asked_for(home, environment, tmp_path, capsys):
    (tmp_path / "file").touch()
    if home == "a file":
        environment.setenv("HOME", str(tmp_path / "file"))
    else:  # what is found of a number without a name
        environment.setattr(os.path, "expanduser", lambda path: path)
    use_a_cache_that_can_be_written(SimpleNamespace(output_dir=str(tmp_path / "runs" / "one"), cache_dir=None))
    assert Path(os.environ["HF_HOME"]) == tmp_path / "runs" / ".cache" / "huggingface"
    assert f"the cache is {tmp_path / 'runs' / '.cache'} " in capsys.readouterr().err
    use_a_cache_that_can_be_written(SimpleNamespace(output_dir="elsewhere"))
    assert "elsewhere" not in os.environ["HF_HOME"] and not capsys.readouterr().err
    environment.delenv("HF_HOME")
    use_a_cache_that_can_be_written(SimpleNamespace(cache_dir=str(tmp_path / "asked")))
    assert Path(os.environ["HF_HOME"]) == tmp_path / "asked" / "huggingface"


def test_what_a_home_holds_is_still_read_where_it_cannot_be_written(environment, tmp_path, capsys):
    environment.setenv("HF_DATASETS_CACHE", "")
    environment.delenv("HF_DATASETS_CACHE")
    environment.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    environment.setattr(os, "access", lambda path, mode: False)
    use_a_cache_that_can_be_written(SimpleNamespace(output_dir=str(tmp_path / "runs" / "one")))
    assert "HF_HOME" not in os.environ
    assert Path(os.environ["HF_DATASETS_CACHE"]) == tmp_path / "runs" / ".cache" / "huggingface" / "datasets"
    assert "home/huggingface cannot be written" in capsys.readouterr().err


def test_a_home_that_can_be_written_stays(environment, tmp_path, capsys):
    environment.setenv("HOME", str(tmp_path))
    use_a_cache_that_can_be_written(SimpleNamespace())
    assert "HF_HOME" not in os.environ and not capsys.readouterr().err


def test_a_temporary_folder_where_the_run_has_no_place_either(environment, tmp_path, capsys):
    (tmp_path / "file").touch()
    environment.setenv("HOME", str(tmp_path / "file"))
    environment.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    use_a_cache_that_can_be_written(SimpleNamespace(output_dir=str(tmp_path / "file" / "one")))
    folder = tmp_path / "temporary" / f"steady-diffusion-{os.getuid()}"
    assert Path(os.environ["HF_HOME"]) == folder / "huggingface" and f"the cache is {folder} " in capsys.readouterr().err
