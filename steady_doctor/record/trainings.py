"""Which of a script's trainings is watched."""

from collections.abc import Callable
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn
from torch.optim import Optimizer

from steady_doctor.record.by_hand import ByHand, Weights, leaves_of
from steady_doctor.record.copies import Copies
from steady_doctor.record.recorded import parameters_of

LATER = 8  # steps of another optimizer, without one of that which is watched, from which on it is what trains now


class Trainings:
    """Each is known by its optimizer. `main` is the one that is watched: the one that is told, else that with most parameters.
    `begin` is called before another one is `main`, with what is known of copies of its weights."""

    def __init__(self, optimizer: Optimizer | None, begin: Callable[[Copies | None], None]):
        self.main: Optimizer | ByHand | None = optimizer
        self.made: WeakKeyDictionary[Optimizer | ByHand, int] = WeakKeyDictionary()  # updates of each
        self.went_on = False  # whether an optimizer goes on that another one had taken over from
        self._begin = begin
        self._is_known = optimizer is not None
        self._may_end = optimizer is None  # whether another training may come after that of the one that is watched
        self._others: WeakKeyDictionary[Optimizer, Copies] = WeakKeyDictionary()  # before their first step
        self._alone: tuple[int, int] = 0, 0  # the id of the optimizer that made the latest steps, and how many
        self._before: WeakSet[Optimizer | ByHand | None] = WeakSet()  # that another one took over from, the last one
        self._turned_from: WeakSet[Optimizer | ByHand] = WeakSet()
        self._leaves: list[Tensor] = []  # what the newest backward pass asked a gradient of, where no optimizer is known
        self._weights = Weights([])  # these as they were then, or those that are written to

    @property
    def updates(self) -> int:
        """Of the one that is watched."""
        return 0 if self.main is None else self.made.get(self.main, 0)

    def turn(self) -> bool:
        """Goes on with another optimizer, from the largest to the smallest, as this one does not train a denoiser: it may be
        a discriminator's. Returns whether there is one; else the largest one stays."""
        if self._is_known or self.main is None:
            return False
        self._turned_from.add(self.main)
        left = [optimizer for optimizer in self.made if optimizer not in self._turned_from]
        main, self._is_known = max(left or self.made, key=_size), not left
        self._watch(main)
        return bool(left)

    def before_backward(self, roots: list[Tensor], weights: list[Tensor] | None) -> bool:
        """Returns whether the script itself has written to its weights since the last one, where no optimizer of torch makes
        steps: that is an update. `weights`: what the gradients are of; None: the leaves of the graph."""
        if isinstance(self.main, Optimizer):
            return False
        self._leaves = leaves_of(roots) if weights is None else weights
        made = (self.main is not None or self._weights.are(self._leaves)) and self._weights.changed()
        if made:
            self.main = self.main or ByHand(self._leaves)
            self.made[self.main] = self.updates + 1
        return made

    def after_backward(self) -> Weights | None:
        """Returns the weights as they are now, where the script itself writes to them."""
        if not isinstance(self.main, Optimizer):
            self._weights = Weights(self._leaves if self.main is None else parameters_of(self.main))
        return self._weights if isinstance(self.main, ByHand) else None

    def before_step(self, optimizer: Optimizer) -> bool:
        """Returns whether it is the watched one that was made anew: it has the same parameters."""
        if optimizer in self._before:  # it goes on: the later one was for something beside it
            self._is_known, self._may_end, self.went_on = True, False, True
            self._watch(optimizer)
        if optimizer in self.made:
            return False
        self.made[optimizer], parameters = 0, parameters_of(optimizer)
        if isinstance(self.main, ByHand):  # what wrote to the weights was no step, but a network that normalizes its own
            del self.made[self.main]
            self._watch(optimizer)
        elif self.main is None or optimizer is self.main:  # the only one so far, or the one that was told
            self.main = optimizer
        elif list(map(id, parameters)) == list(map(id, parameters_of(self.main))):
            self.made[optimizer], self.main = self.updates, optimizer
            return True
        elif self.main in self._turned_from and not self._before and all(isinstance(one, nn.Parameter) for one in parameters):
            self._take_over(optimizer)  # it may train a denoiser after one that did not: an autoencoder's, which comes first
        elif not self._is_known and _size(optimizer) > _size(self.main):
            self._watch(optimizer)
        elif self._may_end:
            self._others[optimizer] = Copies(parameters)
        return False

    def after_step(self, optimizer: Optimizer) -> None:
        self.made[optimizer] = self.made.get(optimizer, 0) + 1
        self._alone = id(optimizer), self._alone[1] + 1 if self._alone[0] == id(optimizer) else 1
        if optimizer is not self.main and self._may_end and self._alone[1] == LATER:
            self._take_over(optimizer)  # what was watched is over, and this is another training

    def _take_over(self, optimizer: Optimizer) -> None:
        self._before, self._is_known = WeakSet([self.main]), False
        self._watch(optimizer)

    def _watch(self, optimizer: Optimizer | ByHand) -> None:
        if optimizer is not self.main:
            self._begin(self._others.pop(optimizer, None))  # type: ignore[arg-type]
            self.main = optimizer


def _size(optimizer: Optimizer | ByHand) -> int:
    return sum(parameter.numel() for parameter in parameters_of(optimizer))
