"""Where Hugging Face's libraries keep what they download, if the user's home has no place for it."""

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from utils.core.entrypoint import use_a_cache_that_can_be_written
from utils.core.errors import UserError


@pytest.fixture
def environment(monkeypatch):
    for name in ("HF_HOME", "HF_DATASETS_CACHE", "XDG_CACHE_HOME", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "RANK"):
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
    environment.delenv("HF_DATASETS_CACHE")
    use_a_cache_that_can_be_written(SimpleNamespace(cache_dir=str(tmp_path / "asked")))
    assert Path(os.environ["HF_HOME"]) == tmp_path / "asked" / "huggingface"


def test_what_a_home_holds_is_still_read_where_it_cannot_be_written(environment, tmp_path, capsys):
    (tmp_path / "home" / "huggingface" / "hub").mkdir(parents=True)
    environment.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    environment.setattr(os, "access", lambda path, mode: "/home/" not in str(path))
    use_a_cache_that_can_be_written(SimpleNamespace(output_dir=str(tmp_path / "runs" / "one")))
    assert "HF_HOME" not in os.environ
    assert Path(os.environ["HF_DATASETS_CACHE"]) == tmp_path / "runs" / ".cache" / "huggingface" / "datasets"
    assert "home/huggingface/datasets cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["HF_HOME", "HF_DATASETS_CACHE"])
def test_a_place_that_was_set_and_cannot_be_written_is_left(name, environment, tmp_path, capsys):
    (tmp_path / "file").touch()
    environment.setenv("HF_HOME", str(tmp_path / "home"))
    environment.setenv(name, str(tmp_path / "file" / "set"))
    use_a_cache_that_can_be_written(SimpleNamespace(output_dir=str(tmp_path / "runs" / "one")))
    assert Path(os.environ["HF_DATASETS_CACHE"]) == tmp_path / "runs" / ".cache" / "huggingface" / "datasets"
    assert f"note: {tmp_path / 'file' / 'set'}" in capsys.readouterr().err


def test_a_cache_dir_that_cannot_be_made_is_named(environment, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=f"^cannot write to --cache_dir {tmp_path / 'file'}: File exists"):
        use_a_cache_that_can_be_written(SimpleNamespace(cache_dir=str(tmp_path / "file")))


def test_temporary_files_beside_the_run_where_the_machine_has_no_place_for_them(environment, tmp_path):
    def nowhere():
        raise FileNotFoundError("No usable temporary directory")

    environment.setattr("tempfile._get_default_tempdir", nowhere)
    environment.setattr("tempfile.tempdir", None)
    environment.setenv("HOME", str(tmp_path))
    use_a_cache_that_can_be_written(SimpleNamespace(output_dir=str(tmp_path / "runs" / "one")))
    assert os.environ["TMPDIR"] == tempfile.gettempdir() == str(tmp_path / "runs" / ".cache")


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
