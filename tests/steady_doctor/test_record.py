"""What a recorded update costs: objects that go with it, operations that are left out, and waits of the host for a device."""

import gc

import pytest
import torch
from rehearsal import Device
from torch import nn
from watched import plain_ddpm

from steady_doctor.doctor import Doctor
from steady_doctor.identify.mixture import find_mixture
from steady_doctor.record.copies import Copies
from steady_doctor.record.ops import Op
from steady_doctor.record.samples import SAMPLED, Samples
from steady_doctor.record.session import Session
from steady_doctor.record.tape import Tape
from steady_doctor.record.wrapping import eagerly


def train(layers: int, device: str, closure: bool = False, updates: int = 3) -> None:
    """Denoises numbers with a network of so many layers."""
    torch.manual_seed(0)
    network = nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(12, 12, device=device), nn.SiLU())))
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)

    def losses() -> torch.Tensor:
        optimizer.zero_grad()
        clean, noise = (torch.randn(16, 12, device=device) for _ in range(2))
        loss = (network(0.6 * clean + 0.8 * noise) - noise).square().mean()
        loss.backward()
        return loss

    for _ in range(updates):
        if closure:
            optimizer.step(losses)
        else:
            losses()
            optimizer.step()


def recorded_names(closure: bool) -> list[str]:
    names: list[str] = []
    session = Session(lambda recorded: names.extend(op.name for op in recorded.tape.ops))
    with session.install():
        train(2, "cpu", closure)
    assert session.failure is None
    return names


def test_samples_are_those_of_each_tensor():
    square = torch.arange(300.0).reshape(15, 20)
    tensors = [square, square.T, None, torch.tensor(7.0), torch.arange(5).to(torch.bfloat16), torch.zeros(0)]
    samples = Samples(tensors)
    for row, there, count, tensor in zip(samples.rows.tolist(), samples.there.tolist(), samples.sizes.tolist(), tensors):
        flat = [] if tensor is None else tensor.flatten().tolist()
        expected = flat[:: max(1, len(flat) // SAMPLED)][:SAMPLED]
        assert row[:count] == expected and not any(row[count:]) and there == (tensor is not None)
    assert samples.flat.tolist() == [
        number for row, count in zip(samples.rows.tolist(), samples.sizes) for number in row[:count]
    ]


def test_samples_stay_as_they_were():
    weight = torch.ones(100)
    samples = Samples([weight])
    weight.zero_()
    assert samples.rows.tolist() == [[1.0] * SAMPLED]


def test_memory_that_nobody_wrote_is_no_value():
    images, network = torch.rand(4, 3, 8, 8), nn.Conv2d(3, 3, 1)
    tape = Tape(network.parameters())
    with tape:
        noise = torch.empty_like(images).normal_()
        given = torch.zeros_like(images).add_(0.6 * images + 0.8 * noise)
        loss = (network(given) - noise).square().mean()
        tape.root(loss)
    empty = next(op for op in tape.ops if op.name == "empty_like")
    assert not (empty.content or tape.op_of(noise).content == tape.op_of(images).content)
    del given  # its memory is the next that torch gives
    assert not tape.value(empty).any()
    assert find_mixture(tape, tape.roots[0]).image == tape.op_of(images).content


def test_what_was_rounded_stays_so_in_float64():
    tenths, network = torch.full((4, 1), 0.1), nn.Linear(8, 8)
    tape = Tape(network.parameters())
    with tape:
        size = (tenths * 30).ceil()  # 3 in float32, and 4 in float64
        loss = (network(torch.randn(4, 8)) / 3 - size * (tenths * 20 > 2)).square().mean()
    ceiled, loss = (next(op for op in reversed(tape.ops) if op.name == name) for name in ("ceil", "mean"))
    assert tape.value(ceiled, exact=True).tolist() == size.tolist() == [[3.0]] * 4
    torch.testing.assert_close(tape.value(loss, exact=True).float(), tape.value(loss))


def test_what_is_rounded_in_place_is_seen_by_all_that_shows_it():
    network = nn.Linear(8, 8)
    tape = Tape(network.parameters())
    with tape:
        target = torch.randn(4, 8) * 3
        before = target.view(-1)
        target[:, :4].round_()
        whole = torch.zeros(8, dtype=torch.long)
        whole[:4] = 5 * torch.ones(4).sqrt()
        loss = (network(torch.randn(4, 8)) - target - before.view(4, 8) - whole).square().mean()
    root = next(op for op in reversed(tape.ops) if op.name == "mean")
    torch.testing.assert_close(tape.value(root, exact=True).float(), loss.detach())


def test_a_tape_is_gone_without_the_garbage_collector():
    network = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8))

    def recorded() -> int:
        with Tape(network.parameters()) as tape:
            network(torch.randn(4, 8)).mean()
        return len(tape.held) and len(tape.ops)

    recorded()  # torch imports its compiler at the first operation of all, and keeps that call for a while
    gc.collect()
    gc.disable()
    try:
        assert recorded() > 5
        assert not [thing for thing in gc.get_objects() if type(thing) is Op]
    finally:
        gc.enable()


def test_the_garbage_collector_is_left_as_it_was():
    before, during = gc.get_threshold(), []
    session = Session(lambda recorded: during.append(gc.get_threshold()))
    with session.install():
        train(2, "cpu")
    assert session.failure is None and gc.get_threshold() == before and gc.isenabled()
    assert during and all(first > before[0] and tuple(others) == before[1:] for first, *others in during)


def test_a_network_that_was_given_up_is_no_copy():
    network, given_up = (nn.Linear(12, 12) for _ in range(2))
    given_up.load_state_dict(network.state_dict())
    given_up.itself = [given_up]  # a cycle, which waits for the garbage collector
    assert Copies(list(network.parameters())).all
    del given_up
    assert not Copies(list(network.parameters())).all


def test_the_step_is_recorded_where_passes_are_within_it():
    of_steps = {"addcdiv_", "_foreach_addcdiv_", "_fused_adamw_"}
    assert "mean" in recorded_names(closure=False) and not of_steps & {*recorded_names(closure=False)}
    assert "mean" in recorded_names(closure=True) and of_steps & {*recorded_names(closure=True)}


@pytest.mark.parametrize("drawn_on", ["meta", "cpu"])
def test_a_loop_is_judged_on_a_device_as_on_the_host(drawn_on, monkeypatch):
    randint = torch.randint
    monkeypatch.setattr(
        torch, "randint", lambda *asked, **options: randint(*asked, **options | {"device": drawn_on}).to("meta")
    )
    monkeypatch.setattr(plain_ddpm.sys, "argv", ["plain_ddpm.py", "6"])
    doctor = Doctor()
    with Device(), torch.device("meta"):
        with doctor.install():
            plain_ddpm.main()
        assert not doctor.findings(ended=True)
    assert doctor.session.failure is None
    passes = list(doctor.seen.mixed())
    assert len(passes) == 3 and all(one.mixture.clean is not None for _, one in passes)


def test_the_host_does_not_wait_for_each_weight():
    reads = []
    for layers in (2, 6):
        doctor = Doctor()
        with Device() as device, doctor.install():
            train(layers, "meta")
        assert doctor.session.failure is None and len(doctor.seen.steps) == 2
        assert all(one.mixture is not None for _, one in doctor.seen.passes())
        reads.append(sum(event.kind == "read" for event in device.events))
    assert reads[0] == reads[1]


def stance() -> str:
    return torch._dynamo.eval_frame._stance.stance


def test_what_a_script_asks_of_the_compiler_holds_after_a_recording():
    """Whichever of the two begins or ends first."""
    context, recording = torch.compiler.set_stance("fail_on_recompile"), eagerly()
    with recording:
        context.__exit__(None, None, None)
        assert stance() == "force_eager"
    assert stance() == "default"
    with eagerly():
        context = torch.compiler.set_stance("fail_on_recompile")
        assert stance() == "force_eager"
    assert stance() == "fail_on_recompile"
    context.__exit__(None, None, None)
    assert stance() == "default"


def test_no_recording_begins_in_compiled_code():
    refused = []

    @torch._dynamo.disable
    def record() -> None:
        with pytest.raises(RuntimeError, match="step of the optimizer is compiled"), eagerly():
            pass
        refused.append(True)

    def step(x: torch.Tensor) -> torch.Tensor:
        record()
        return x + 1

    torch.compile(step, backend="eager")(torch.ones(2))
    assert refused == [True] and stance() == "default"
