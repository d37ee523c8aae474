"""Records updates that the loop itself names, and knows what the loop tells of them."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steady_doctor.record.followed import Followed
from steady_doctor.record.recorded import Recorded
from steady_doctor.record.samples import Samples
from steady_doctor.record.session import Session

SMALL = 1 << 18  # numbers of a network's weights, of which the gradient is computed once more
EVERY = 3  # recorded updates, in which that is done
MOST_PASSES = 4  # micro steps of an update that are recorded
MOST_LEVELS = 1 << 16  # noise levels that are kept


@dataclass
class Told:
    """What a loop tells of an update. Tensors have a row for each sample."""

    clean: list[Tensor] = field(default_factory=list)  # of each micro step
    noise: list[Tensor] = field(default_factory=list)
    levels: list[Tensor] = field(default_factory=list)
    labels: list[Tensor] = field(default_factory=list)
    numbers: list[Tensor] = field(default_factory=list)  # [B, N], see `Declaration.numbers`
    generators: list[int] = field(default_factory=list)  # states of the random generator as each pass begins
    loss_scale: float = 1.0  # that the loss is multiplied by before it is differentiated
    limit: float | None = None  # that the gradient's norm is to be clipped to; 0: none
    limit_taken: float | None = None  # the one that the loop takes; None: not told
    is_full: bool = False  # there are more micro steps than are recorded
    turned_down: int = 0  # updates so far, without a step
    norm: float | None = None  # of the gradient before it is clipped, as the loop has it


class Driven(Session):
    """`begin` and `end` are called around each update, whether it is recorded or not.

    Args:
        network: what is trained, unwrapped.
        averaged: the part of it that averages are of.
        averages: name -> {name of a parameter of `averaged`: averaged tensor}.
        decays: name -> the decay of the n-th update of that average.
    """

    _looks_for_copies = False  # its averages are told
    _reads_samplers = False  # its sampler is asked by itself
    _forces_eager = False  # the loop records in no compiled update

    def __init__(
        self,
        judge: Callable[[Recorded], None],
        stopped: Callable[[BaseException], None],
        optimizer: Optimizer,
        network: nn.Module,
        averaged: nn.Module,
        averages: Mapping[str, Mapping[str, Tensor]],
        decays: Mapping[str, Callable[[int], float]],
    ):
        super().__init__(judge, stopped, optimizer)
        self._optimizers.add(optimizer)
        self._optimizer = optimizer
        self.history.probes = False  # they are followed
        self._network, self._averages = network, averages
        self._own = {id(parameter): name for name, parameter in averaged.named_parameters()}
        trained = {self._own[id(p)]: p for p in network.parameters() if p.requires_grad and id(p) in self._own}
        self.followed = Followed(trained, averages, decays)
        self.levels: list[Tensor] = []  # of each micro step
        self._kept = self._records = 0
        self._told = Told()
        self._standing: dict[str, Samples] = {}  # some numbers of the weights and averages before something that was made

    def install(self) -> ExitStack:
        hooks = ExitStack()
        hooks.callback(self._stop)
        self._watch_steps(hooks)
        return hooks

    def begin(self, update: int, recorded: bool, loss_scale: float = 1.0) -> None:
        """Before the update of this number."""
        self.trainings.made[self._optimizer] = update - 1
        self.compare()
        if recorded:
            self._safely(self._start, loss_scale)

    def leave(self) -> None:
        """Before something is made between two updates, which is to leave weights and averages as they are."""
        self._safely(self._leave)

    def _leave(self) -> None:
        self._standing = self._everything()

    def _everything(self) -> dict[str, Samples]:
        averages = {name: Samples(list(average.values())) for name, average in self._averages.items()}
        return averages | {"": Samples(list(self._network.parameters()))}

    def compare(self) -> None:
        """After something was made between two updates."""
        self._safely(self._compare)

    def _compare(self) -> None:
        for name, samples in self._everything().items() if self._standing else ():
            now, before = samples.flat, self._standing[name].flat
            if not torch.equal(now, before):
                self.followed.note(name, float((now - before).norm() / now.norm().clamp(min=1e-30)))
        self._standing = {}
        self.followed.begin()

    def _start(self, loss_scale: float) -> None:
        self._record(self.trainings.updates + 1)
        assert self._recorded is not None  # noqa: S101
        self._told = self._recorded.told = Told(loss_scale=loss_scale)
        with self._pause():
            self._describe(self._recorded)
        self._seeing.callback(self._network.register_forward_pre_hook(lambda *_: self._safely(self._see_generator)).remove)

    def _see_generator(self) -> None:
        """As the network's pass begins: the loop may seed it for its dropout after it has told what the pass is of."""
        if self._told.generators and not self._told.is_full:
            self._told.generators[-1] = _generator(self._told.clean[-1].device)

    def _describe(self, recorded: Recorded) -> None:
        recorded.all_parameters = dict(self._network.named_parameters())
        if self._records % EVERY == 1 and sum(parameter.numel() for parameter in recorded.parameters) <= SMALL:
            recorded.kept = [parameter.detach().clone() for parameter in recorded.parameters]
        self._records += 1
        names = [self._own.get(id(parameter), "") for parameter in recorded.parameters]
        recorded.names, recorded.averaged = names, [name != "" for name in names]
        recorded.averages = {name: [self._sampled(average, names)] for name, average in self._averages.items()}
        rates = (m.p if isinstance(m, nn.Dropout) else vars(m).get("dropout") for m in self._network.modules())
        recorded.dropout = max((float(rate) for rate in rates if isinstance(rate, (int, float))), default=0.0)

    def _sampled(self, average: Mapping[str, Tensor], names: list[str]) -> Samples:
        return Samples([average.get(name) for name in names])

    def tell(self, clean: Tensor, noise: Tensor, levels: Tensor, labels: Tensor | None, numbers: Tensor | None = None) -> None:
        """Of a micro step, before the network's pass."""
        self._safely(self._tell, clean, noise, levels, labels, numbers)

    def _tell(self, clean: Tensor, noise: Tensor, levels: Tensor, labels: Tensor | None, numbers: Tensor | None) -> None:
        if self._kept < MOST_LEVELS:
            self._kept += levels.numel()
            self.levels.append(levels.detach().reshape(-1))
        if self.tape is None or self._recorded is None:
            return
        told = self._told
        if len(told.clean) == MOST_PASSES:
            self.tape.paused += not told.is_full  # for good: of many micro steps these are enough
            told.is_full = True
            return
        told.generators.append(_generator(clean.device))
        self._recorded.training &= self._network.training
        for tensor, kind, into in ((clean, "data", told.clean), (noise, "drawn", told.noise), (levels, "drawn", told.levels)):
            into.append(tensor.detach())
            self.tape.known([tensor], kind)
        for tensor, into in ((labels, told.labels), (numbers, told.numbers)):
            if tensor is not None:
                into.append(tensor.detach())
                self.tape.known([tensor], "data")

    def stepped(
        self,
        limit: float | None = None,
        norm: Tensor | None = None,
        turned_down: int = 0,
        limit_taken: Tensor | float | None = None,
    ) -> None:
        """When the weights are those of the next update; see `Told`."""
        self._safely(self.followed.stepped)
        self._told.limit, self._told.norm = limit, None if norm is None else float(norm)
        self._told.turned_down = turned_down
        self._told.limit_taken = None if limit_taken is None else float(limit_taken)

    def end(self, update: int, finite: Tensor) -> None:
        """When the averages were updated, too; `finite`: whether a step was made, 0-dim."""
        self._safely(self._end, update, finite)

    def _end(self, update: int, finite: Tensor) -> None:
        self.followed.end(update, finite)
        if self._recorded is None:
            return
        if not bool(finite) or len(self._recorded.weights) < 2 or self._recorded.events[-1][1] != "stepped":  # turned down
            self._stop()
            return
        recorded = self._recorded
        recorded.at_end = Samples(recorded.parameters)
        for name, samples in recorded.averages.items():
            samples.append(self._sampled(self._averages[name], recorded.names))
        self.followed.look()
        self._judge_recorded()

    def close(self) -> None:
        """When no update follows."""
        self.resting = False
        self.compare()
        self._safely(self.followed.look)

    def forget(self) -> None:
        """The newest update is no longer what it was when it was seen."""
        self._standing = {}
        self.followed.forget()

    def _between(self) -> None:
        """The loop says when the update is over: what it does after the step is recorded, too."""
        if self._rests_in_step and self.tape is not None:
            self.tape.paused -= 1


def _generator(device: torch.device) -> int:
    """A number that stands for the state of torch's own generator there."""
    state = torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
    return hash(state.numpy().tobytes())
