"""Whatever a script does, the doctor raises nothing into it, and its numbers stay the same to the last bit."""

import os

import pytest
import torch
from test_identify import ALPHA_BAR, Network
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from steady_doctor.doctor import Doctor

B, UPDATES = 4, 6
IMAGES = torch.linspace(-1, 1, 64 * 48).reshape(64, 3, 4, 4)


@torch.library.custom_op("steady_doctor_tests::drawn", mutates_args=())
def drawn(like: torch.Tensor) -> torch.Tensor:
    return torch.randn_like(like)


def loss_of(network, noise=None, images=None):
    images = IMAGES[torch.randint(0, len(IMAGES), (B,))] if images is None else images
    noise = torch.randn_like(images) if noise is None else noise
    t = torch.randint(0, 1000, (len(images),))
    a = ALPHA_BAR[t][:, None, None, None]
    return mse_loss(network(a.sqrt() * images + (1 - a).sqrt() * noise, t), noise)


def plain(loss_of_update, backward=torch.Tensor.backward):
    """The losses of a plain loop, each of which is `loss_of_update(network)`."""
    network = Network()
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    for _ in range(UPDATES):
        loss = loss_of_update(network)
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()
        yield float(loss.detach())


def losses_from_a_generator():
    return plain(loss_of, lambda loss: torch.autograd.backward(part for part in (loss, 2 * loss)))


def steps_within_the_backward_pass():
    network = Network()
    optimizers = {parameter: torch.optim.Adam([parameter], 1e-2) for parameter in network.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in network.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(UPDATES):
        loss = loss_of(network)
        loss.backward()
        yield float(loss.detach())


def an_operation_that_draws_and_is_not_torchs():
    return plain(lambda network: loss_of(network, drawn(IMAGES[:B])))


def tensors_of_no_shape():
    def loss(network):
        ragged = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(1, 3)], layout=torch.jagged)
        return loss_of(network) + 0 * (2 * ragged).values().sum()

    return plain(loss)


def workers_that_begin_in_a_recorded_update():
    loader = DataLoader(TensorDataset(IMAGES[: 2 * B]), B, num_workers=1)
    return plain(lambda network: [loss_of(network, images=images) for (images,) in loader][-1])


SCRIPTS = (
    losses_from_a_generator,
    steps_within_the_backward_pass,
    an_operation_that_draws_and_is_not_torchs,
    tensors_of_no_shape,
    workers_that_begin_in_a_recorded_update,
)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_a_script_computes_what_it_computes_without_the_doctor(script):
    torch.manual_seed(0)
    plain = [loss.hex() for loss in script()]
    torch.manual_seed(0)
    with Doctor().install():
        watched = [loss.hex() for loss in script()]
    assert len(plain) == UPDATES and watched == plain


def test_a_forked_process_records_nothing():
    doctor = Doctor()
    with doctor.install():
        losses = losses_from_a_generator()
        next(losses)  # the second update is recorded
        assert doctor.session.tape is not None
        before = len(doctor.session.tape.ops)
        reads, writes = os.pipe()
        if (child := os.fork()) == 0:
            torch.ones(2) + 1
            os.write(writes, bytes([len(doctor.session.tape.ops) == before]))
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(reads, 1) == b"\1"
