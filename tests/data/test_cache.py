"""The packed cache: reused when nothing changed, made again when something did, whole or absent, and small in memory."""

import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock, Timeout
from PIL import Image

from utils.core.errors import UserError
from utils.core.size import Size
from utils.data import cache as packing
from utils.data.cache import PackedFile, PackedImages, pack_once
from utils.data.decode import ImageFile, ImagePreparation

REPOSITORY = Path(__file__).resolve().parents[2]
PREPARE = ImagePreparation(Size(4, 4), 3, False, "white", 255)


def write_images(folder: Path, count=5, height=6) -> Path:
    folder.mkdir(exist_ok=True)
    generator = np.random.default_rng(0)
    for number in range(count):
        pixels = generator.integers(0, 256, (height, 4 + number, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


def reader(folder: Path):
    paths = sorted(map(str, folder.iterdir()))
    return lambda start, stop: [ImageFile(None, path, path) for path in paths[start:stop]]


@pytest.fixture
def load(opened, tmp_path):
    folder = write_images(tmp_path / "images")
    return lambda **options: opened(**{"train_data_dir": str(folder), "resolution": 4} | options)


def caches(tmp_path) -> set[str]:
    return {path.parent.name for path in (tmp_path / "cache" / "steady_diffusion").glob("*/images.bin")}


LOAD_CODE = """
import json, sys
from utils.data import cache as packing
from utils.data.dataset import load_images
from utils.options.flags import DataOptions
packed = []
write = packing._write
packing._write = lambda *arguments: packed.append(1) or write(*arguments)
images = load_images(DataOptions(train_data_dir=sys.argv[1], cache_dir=sys.argv[2], resolution=4))
print(json.dumps([images.fingerprint, len(packed), images.fetch(range(len(images))).tolist()]))
"""


def start_loading(tmp_path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", LOAD_CODE, tmp_path / "images", tmp_path / "cache"],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def result(process: subprocess.Popen):
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return json.loads(output.splitlines()[-1])


@pytest.mark.slow
def test_processes_that_start_together_pack_once_and_later_ones_reuse_it(load, tmp_path, monkeypatch):
    together = [result(process) for process in [start_loading(tmp_path) for _ in range(2)]]
    assert sum(packed for _, packed, _ in together) == 1
    assert len({fingerprint for fingerprint, _, _ in together}) == 1
    monkeypatch.setattr(packing, "_write", lambda *arguments: pytest.fail("packed again"))
    images = load()
    assert images.fingerprint == together[0][0] and caches(tmp_path) == {images.fingerprint}
    for _, _, pixels in together:
        assert np.array_equal(pixels, images.fetch(range(5)))


def test_options_and_files_that_matter_give_another_cache(load, tmp_path):
    names = [load(**options).fingerprint for options in OPTIONS]
    assert len(set(names)) == len(OPTIONS) and caches(tmp_path) == set(names)
    changed = tmp_path / "images" / "2.png"
    status = changed.stat()
    pixels = np.zeros((6, 4, 3), np.uint8)
    Image.fromarray(pixels).save(changed)
    os.utime(changed, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))
    after = load(resolution=4)
    assert after.fingerprint not in names and not after.fetch([2]).any()
    (tmp_path / "images" / "7.png").write_bytes((tmp_path / "images" / "0.png").read_bytes())
    assert len(load()) == 6
    (tmp_path / "images" / "7.png").unlink()
    assert load().fingerprint == after.fingerprint


OPTIONS = [
    {},
    {"resolution": 5},
    {"image_channels": 1},
    {"center_crop": True},
    {"background": "black"},
    {"preserve_input_precision": True},
    {"max_train_images": 3},
]


def test_a_cache_moved_in_time_only_is_reused(load, monkeypatch):
    first = load(background="white")
    monkeypatch.setattr(packing, "_write", lambda *arguments: pytest.fail("packed again"))
    assert load(background="#ffffff").fingerprint == first.fingerprint


@pytest.mark.parametrize("damage", ["truncated", "missing", "zeros"])
def test_a_damaged_cache_is_made_again(damage, load, tmp_path):
    first = load()
    pixels = first.fetch(range(5)).copy()
    file = tmp_path / "cache" / "steady_diffusion" / first.fingerprint / "images.bin"
    content = file.read_bytes()
    file.unlink()
    if damage != "missing":
        file.write_bytes(content[:-1] if damage == "truncated" else bytes(len(content)))  # not in place: it is mapped
    assert np.array_equal(load().fetch(range(5)), pixels)


def test_a_cache_remembers_its_bad_images_and_serves_those_who_allow_them(load, tmp_path, monkeypatch):
    (tmp_path / "images" / "2.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"(?s)2\.png \(row 2.*--on_bad_image replace"):
        load()
    assert not caches(tmp_path)
    images = load(on_bad_image="replace")
    (bad,) = PackedFile(tmp_path / "cache" / "steady_diffusion" / images.fingerprint / "images.bin").bad.values()
    assert bad.row == 2 and bad.file == str(tmp_path / "images" / "2.png") and bad.reason.startswith("not an image")
    monkeypatch.setattr(packing, "_write", lambda *arguments: pytest.fail("packed again"))
    assert np.array_equal(load(on_bad_image="replace", max_bad_images=1).fetch([2]), images.fetch([3]))
    with pytest.raises(UserError, match=r"(?s)2\.png \(row 2.*--on_bad_image replace"):
        load()
    assert caches(tmp_path) == {images.fingerprint}  # whoever allows them still finds it


def test_a_cache_without_bad_images_serves_everyone(load, tmp_path, monkeypatch):
    images = load(on_bad_image="replace")
    monkeypatch.setattr(packing, "_write", lambda *arguments: pytest.fail("packed again"))
    assert load().fingerprint == images.fingerprint
    assert np.array_equal(load(on_bad_image="replace").fetch(range(5)), images.fetch(range(5)))


def test_no_room_and_no_permission_are_one_clear_line(tmp_path, monkeypatch):
    images = write_images(tmp_path / "images")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--cache_dir"):
        pack_once(tmp_path / "file" / "abc", 5, reader(images), PREPARE)
    with monkeypatch.context() as patch:
        patch.setattr(packing.shutil, "disk_usage", lambda folder: packing.shutil._ntuple_diskusage(9, 9, 0))
        with pytest.raises(UserError, match=r"(?s)0\.0 kB free.*--cache_images no"):
            pack_once(tmp_path / "abc", 5, reader(images), PREPARE)
    assert not (tmp_path / "abc").exists()


def test_the_lock_is_held_while_packing_and_free_afterwards(tmp_path):
    held = []

    def progress(done, count):
        with pytest.raises(Timeout):
            FileLock(tmp_path / "abc.lock").acquire(timeout=0)
        held.append((done, count))

    pack_once(tmp_path / "abc", 20, reader(write_images(tmp_path / "images", count=20)), PREPARE, progress)
    assert held == [(16, 20), (20, 20)]  # chunk by chunk
    FileLock(tmp_path / "abc.lock").acquire(timeout=0).lock.release()


def in_processes(monkeypatch) -> list[int]:
    """Has the next images decoded by processes, whatever their number; the processes' ids come into the list."""
    monkeypatch.setattr(packing, "_WORTH_PROCESSES", 0)
    ids, forked = [], os.fork
    monkeypatch.setattr(os, "fork", lambda: [child := forked(), ids.append(child)][0])
    return ids


def test_processes_give_the_same_files_as_threads(tmp_path, monkeypatch):
    images = write_images(tmp_path / "images", count=40)  # of different sizes, one of them bad, and some remarked on
    (images / "17.png").write_bytes(b"no image")
    Image.new("RGBA", (9, 5), (255, 0, 0, 100)).save(images / "18.png")
    pack_once(tmp_path / "threads", 40, reader(images), PREPARE, max_bad_images=1)
    ids = in_processes(monkeypatch)
    packed = pack_once(tmp_path / "processes", 40, reader(images), PREPARE, max_bad_images=1)
    assert ids and packed.packed.remarks == {"transparent": 1} and len(packed.bad_images) == 1
    for path in (tmp_path / "threads").iterdir():
        assert path.read_bytes() == (tmp_path / "processes" / path.name).read_bytes()


def test_a_process_names_the_image_that_cannot_be_decoded_and_all_end(tmp_path, monkeypatch):
    images = write_images(tmp_path / "images", count=40)
    (images / "7.png").write_bytes(b"no image")
    ids = in_processes(monkeypatch)
    with pytest.raises(UserError, match=r"7\.png: not an image"):
        pack_once(tmp_path / "abc", 40, reader(images), PREPARE)
    for child in ids:
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)


def test_a_process_that_the_system_ends_is_a_clear_line(tmp_path, monkeypatch):
    in_processes(monkeypatch)
    monkeypatch.setattr(packing, "prepared", _end)
    with pytest.raises(UserError, match="the system ended a process that decodes images"):
        pack_once(tmp_path / "abc", 40, reader(write_images(tmp_path / "images", count=40)), PREPARE)


def _end(*arguments) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("platform", "cores", "count", "started"), [("linux", 8, 40, 3), ("linux", 2, 40, 2), ("darwin", 8, 40, 0)]
)
def test_few_images_need_few_processes(tmp_path, monkeypatch, platform, cores, count, started):
    """And none elsewhere than on Linux, where libraries abort after a fork."""
    ids = in_processes(monkeypatch)
    monkeypatch.setattr(packing.sys, "platform", platform)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(cores), raising=False)
    pack_once(tmp_path / "abc", count, reader(write_images(tmp_path / "images", count=count)), PREPARE)
    assert len(ids) == started


KILLED_CODE = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = ["tests", "tests/data"]
from test_cache import PREPARE, reader
from utils.data import cache as packing
packing._WORTH_PROCESSES = 0
fork = os.fork
def told():
    child = fork()
    if child:
        print(child, flush=True)
    return child
os.fork = told
packing.pack_once(Path(sys.argv[2]), 40, reader(Path(sys.argv[1])), PREPARE, lambda *done: os.kill(os.getpid(), signal.SIGKILL))
"""


def test_a_killed_packer_leaves_no_process_no_lock_and_nothing_that_is_taken_for_a_cache(tmp_path):
    images, folder = write_images(tmp_path / "images", count=40), tmp_path / "cache" / "abc"
    command = [sys.executable, "-c", KILLED_CODE, images, folder]
    killed = subprocess.run(command, cwd=REPOSITORY, timeout=120, stdout=subprocess.PIPE)
    # Its processes hold the other end of the pipe, so `run` has returned after the last of them, and their lock is free.
    assert killed.returncode == -signal.SIGKILL and killed.stdout.split()
    FileLock(folder.with_name("abc.lock")).acquire(timeout=0).lock.release()
    assert [path.name for path in folder.iterdir()] == [".images.bin.tmp"]
    assert pack_once(folder, 40, reader(images), PREPARE).fetch(np.arange(40), None).shape == (40, 3, 4, 4)
    assert [path.name for path in folder.iterdir()] == ["images.bin"]
    assert sorted(path.name for path in folder.parent.iterdir()) in (["abc"], ["abc", "abc.lock"])


def test_a_cache_says_what_it_holds_and_when_it_was_used(load, tmp_path, monkeypatch):
    folder = tmp_path / "cache" / "steady_diffusion" / load().fingerprint
    about = json.loads((folder / "about.json").read_text())
    assert about == {"data": str(tmp_path / "images"), "images": "5 images", "options": "3x4x4, background white"}
    os.utime(folder, (0, 0))
    load()
    assert time.time() - folder.stat().st_mtime < 3600
    monkeypatch.setattr(os, "utime", lambda *arguments: (_ for _ in ()).throw(PermissionError()))
    assert len(load().fetch([0])) == 1  # a cache that cannot be marked still serves


def test_order_is_kept_over_many_chunks(tmp_path):
    import io

    def read_files(start, stop):
        files = []
        for value in range(start, stop):
            file = io.BytesIO()
            Image.new("L", (4, 4), value % 251).save(file, "PNG")
            files.append(ImageFile(file.getvalue(), None, str(value)))
        return files

    packed = pack_once(tmp_path / "abc", 1000, read_files, PREPARE)
    rows = np.random.default_rng(0).permutation(1000)
    assert np.array_equal(packed.fetch(rows, None)[:, 0, 0, 0], rows % 251)


def make_cache(folder: Path, count: int) -> PackedImages:
    """A cache of `count` black 32x32 images, sparse on disk."""
    folder.mkdir()
    about = {"images": count, "channels": 3, "dtype": "uint8", "values": count * 3072, "shape": [3, 32, 32]}
    text = json.dumps(about | {"remarks": {}, "bad_images": []}).encode()
    with open(folder / "images.bin", "wb") as file:
        file.seek(count * (3072 + 16))
        file.write(text + len(text).to_bytes(8, "little"))
    return PackedImages(folder, Size(32, 32))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_fetching_from_a_large_cache_keeps_memory_small(tmp_path):
    count = 300_000  # 0.9 GB
    packed = make_cache(tmp_path / "large", count)
    assert len(pickle.dumps(packed)) < 2000
    packed.fetch(np.arange(128), None)
    assert len(pickle.dumps(packed)) < 2000  # still, with the file mapped
    before = resident_bytes()
    for start in range(0, count, 128 * 4):  # touches every fourth image, hence almost every page
        packed.fetch(np.arange(start, min(start + 512, count), 4), None)
    assert resident_bytes() - before < 64 * 2**20


@pytest.mark.slow
def test_packing_memory_does_not_grow_with_the_number_of_images(tmp_path, monkeypatch):
    import io

    file = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(file, "PNG")
    prepare = ImagePreparation(Size(64, 64), 3, False, "white", 255)
    monkeypatch.setattr(packing, "_WORTH_PROCESSES", 6001)  # what processes hold is not seen here
    peaks = []
    for count in (2000, 6000):
        tracemalloc.start()
        packed = pack_once(
            tmp_path / str(count),
            count,
            lambda start, stop: [ImageFile(file.getvalue(), None, "x")] * (stop - start),
            prepare,
        )
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(packed) == count
    assert peaks[1] < 1.5 * peaks[0] and peaks[1] < 6000 * 64 * 64 * 3 / 2


def test_files_that_grow_are_read_few_at_a_time():
    """From 1 KB to 4 MB each, and back."""
    small, large = (ImageFile(bytes(size), None, "x") for size in (2**10, 2**22))
    files = 500 * [small] + 100 * [large] + 400 * [small]
    read = lambda start, stop: files[start:stop]  # noqa: E731
    chunks = list(packing._chunks(1000, read, PREPARE, read(0, 16)))
    sizes = [len(chunk) for chunk in chunks]
    assert [file for chunk in chunks for file in chunk] == files and sizes[:4] == [16, 32, 64, 64]
    assert all(after <= 2 * before for before, after in itertools.pairwise(sizes))
    with_large = [len(chunk) for chunk in chunks if large in chunk]
    assert with_large[0] <= 64 and set(with_large[1:-1]) == {1} and with_large[-1] <= 2
