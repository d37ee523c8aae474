import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from utils.core.errors import UserError
from utils.evaluation.extractors import Classifier, RandomConvolutions
from utils.evaluation.feature_sets import evenly, extract, load_features, save_features, sharded

ALONE = SimpleNamespace(process_index=0, num_processes=1, device=torch.device("cpu"), is_main_process=True)


class Process:
    """One of several processes that run as threads: `gather` is the accelerator's; `waiting` is itself."""

    device, patience = torch.device("cpu"), 30.0

    def __init__(self, rank: int, group: list, barrier: threading.Barrier):
        self.process_index, self.num_processes = rank, barrier.parties
        self.is_main_process = rank == 0
        self._group, self._barrier, self.waiting = group, barrier, self

    def _exchanged(self, own) -> list:
        self._group[self.process_index] = own
        self._barrier.wait(timeout=30)
        together = list(self._group)
        self._barrier.wait(timeout=30)
        return together

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchanged(tensor))

    def meet(self, what: str, words: str, longest: float) -> list[str]:
        return self._exchanged(words)


def on_processes(count: int, work) -> list:
    """What `work(process)` gives on each of `count` processes."""
    group, results, barrier = [None] * count, [None] * count, threading.Barrier(count)
    threads = [
        threading.Thread(target=lambda rank=rank: results.__setitem__(rank, work(Process(rank, group, barrier))))
        for rank in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return results


def make_images(numbers: torch.Tensor) -> torch.Tensor:
    return torch.stack(
        [torch.randint(0, 256, (1, 16, 16), generator=torch.Generator().manual_seed(int(n))) for n in numbers]
    ).byte()


@pytest.mark.parametrize("count", [1, 8, 37, 41])
def test_any_number_of_processes_sees_every_number_once_and_in_order(count):
    def work(process):
        seen, made = [], []
        for numbers, (values, squares) in sharded(process, count, 8, lambda n: [n.float(), n[:, None] ** 2]):
            assert torch.equal(values.long(), numbers) and torch.equal(squares[:, 0], numbers**2)
            seen += numbers.tolist()
            made.append(len(numbers))
        return seen

    for processes in (1, 2, 3):
        assert on_processes(processes, work) == [list(range(count))] * processes


def test_an_uneven_split_gives_the_bits_of_one_process():
    def work(process):
        return extract(process, [RandomConvolutions(1)], 37, 8, make_images, kept_rows=20, kept_images=5)

    (((alone,), images),) = on_processes(1, work)
    for (features,), shown in on_processes(3, work):
        assert torch.equal(features.moments.mean, alone.moments.mean)
        assert torch.equal(features.moments.scatter, alone.moments.scatter)
        assert torch.equal(features.rows, alone.rows) and torch.equal(shown, images)
    everything = RandomConvolutions(1)(make_images(torch.arange(37)))
    assert len(alone) == 37 and alone.indices.tolist() == evenly(37, 20).tolist()
    # 37 images at once are another batch than 8, so the features, of three convolutions, agree to float rounding.
    np.testing.assert_allclose(
        alone.moments.covariance, np.cov(everything.double().numpy(), rowvar=False), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(alone.rows, everything[alone.indices], rtol=1e-4, atol=1e-5)
    assert torch.equal(images, make_images(evenly(37, 5)))


def test_what_is_kept_does_not_grow_with_the_number_of_images():
    blank = lambda numbers: torch.zeros(len(numbers), 1, 8, 8, dtype=torch.uint8)  # noqa: E731
    (features,), images = extract(ALONE, [RandomConvolutions(1)], 5000, 500, blank, kept_rows=100, kept_images=10)
    assert features.rows.shape == (100, 120) and images.shape == (10, 1, 8, 8) and len(features) == 5000
    assert features.rows.untyped_storage().nbytes() == 100 * 120 * 4  # no view of all


def test_the_hash_is_of_every_pixel_and_of_nothing_else():
    pixels = make_images(torch.arange(200))

    def found(process, batch_size=8, images=pixels):
        make = lambda numbers: images[numbers]  # noqa: E731
        (features,), _ = extract(process, [RandomConvolutions(1)], len(images), batch_size, make, hash_pixels=True)
        return features.pixels_sha256

    ((alone,), *others) = (on_processes(count, found) for count in (1, 2, 3))
    assert others == [[alone] * 2, [alone] * 3] and len(alone) == 64
    (process,) = on_processes(1, lambda process: process)
    assert found(process, batch_size=31) == alone
    for number in (0, 3, 199):  # 64 looked at, spread over the set, would miss the second
        changed = pixels.clone()
        changed[number, 0, 7, 9] ^= 1
        assert found(process, images=changed) != alone
    assert found(process, images=pixels.flip(0)) != alone and found(process, images=pixels.view(200, 1, 8, 32)) != alone


def test_no_graph_is_kept_of_an_extractor_that_was_trained():
    """Whatever makes the images: a graph for each chunk would keep all of its activations."""
    trained, saved = Classifier(1, 3), []
    assert all(weight.requires_grad for weight in trained.parameters())
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda tensor: tensor):
        (features,), _ = extract(ALONE, [trained], 37, 8, make_images)
    assert saved == [] and not features.rows.requires_grad


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_on_one_process_is_told_on_all(failing):
    def work(process):
        def make(numbers):
            if process.process_index == failing and numbers[0] >= 16:  # in its second turn
                raise UserError("cannot decode the image x.png") if failing else MemoryError("no memory\nleft")
            return make_images(numbers)

        with pytest.raises(UserError) as error:
            extract(process, [RandomConvolutions(1)], 64, 8, make)
        return str(error.value)

    told = {0: "out of memory (no memory)", 1: "cannot decode the image x.png"}[failing]
    assert on_processes(2, work) == [told] * 2


def test_kept_numbers_are_spread_evenly():
    assert evenly(10, 4).tolist() == [0, 2, 5, 7]
    assert evenly(3, 9).tolist() == [0, 1, 2]
    assert evenly(0, 9).tolist() == []
    assert len(set(evenly(100_003, 9_999).tolist())) == 9_999


def test_stored_statistics_come_back_or_are_refused(tmp_path):
    (features,), _ = extract(ALONE, [RandomConvolutions(1)], 30, 8, make_images)
    path = tmp_path / "reference.safetensors"
    digest = save_features(path, features, {"reference": "thirty"})
    found, facts, again = load_features(path)
    assert (facts, again, len(found)) == ({"reference": "thirty"}, digest, 30)
    for loaded, saved in (
        (found.rows, features.rows),
        (found.moments.mean, features.moments.mean),
        (found.moments.scatter, features.moments.scatter),
    ):  # and in fresh memory, not at any place in the mapped file, where some CPUs' kernels would round otherwise
        assert torch.equal(loaded, saved) and (loaded.data_ptr() - saved.data_ptr()) % 64 == 0
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="is damaged"):
        load_features(path)
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(UserError, match="is not a file of statistics"):
        load_features(path)
    with pytest.raises(UserError, match="make-reference"):
        load_features(tmp_path / "missing")
