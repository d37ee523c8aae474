"""One recorded update as data: its passes and what it does around them. No batch is kept, and nothing of the tape."""

import itertools
from dataclasses import dataclass, field

import torch
from torch import Tensor

from steady_doctor.identify.batch import Batch, identify_batch
from steady_doctor.identify.called import Called, find_called
from steady_doctor.identify.conditions import Conditions, find_conditions
from steady_doctor.identify.figures import Figures
from steady_doctor.identify.mixed import Mixture, Nothing, given_to_network, numel
from steady_doctor.identify.mixture import find_mixture
from steady_doctor.identify.network import Network, identify_network
from steady_doctor.identify.noise import NORMAL
from steady_doctor.identify.rows import FORMS
from steady_doctor.identify.target import COMPARES, Target, beyond, find_target
from steady_doctor.identify.told import Drawn, drawn_of, layers_of, learned_of, penalty_of, products_of, told_mixture
from steady_doctor.identify.update import Update, identify_update
from steady_doctor.identify.weighed import by_image, by_network, by_others
from steady_doctor.record.ops import Op
from steady_doctor.record.recorded import Recorded
from steady_doctor.record.replay import NotRecorded
from steady_doctor.record.tape import Tape

SHAPES = FORMS | {"t", "detach", "expand", "slice", "select", "split", "cat", "stack", "unbind", "copy_"}
SHAPES |= {"contiguous", "lift_fresh"}
EVEN = 0.5  # the smallest slope within a sample over its largest, below which something else than the level counts
ELEMENTWISE = {"mul", "div", "add", "sub", "rsub", "mul_", "div_"}
LINEAR = {"mul", "div", "add", "sub", "rsub", "neg", "mul_", "div_", "add_", "sub_", "index", "constant_pad_nd"}


@dataclass
class Mixed:
    """What the network got: a clean + b noise. Tensors are [B], in float64."""

    size: int  # B
    drawn_by: tuple[str, ...]  # what drew the noise: the operations' names, or "outside" where torch did not
    noise: Figures  # before it was spread over the input's shape
    input: Figures
    b: Tensor
    a: Tensor | None = None
    offset: Tensor | None = None
    clean: Figures | None = None
    index_range: tuple[int, int] | None = None  # of which it is drawn: the first, and the first beyond
    has_source: bool = True  # it is known what decides the noise levels, and whether the network is told
    told: tuple[Tensor, ...] = ()  # numbers on the way from the noise level to the network, the last first
    told_rounded: bool = False  # they were in half precision
    index: Tensor | None = None  # the row of a table that the shares come from
    table: Tensor | None = None  # [3, rows]: row, a, b
    embedding: Figures | None = None  # of the noise level, as it meets the network's parameters
    only_noise: bool = False  # nothing is left of the input without the noise
    growth: Tensor | None = None  # of the logarithm of (a / b)^2 with the level that is drawn
    told_otherwise: bool = False  # a layer gets rows made of nothing, or of a draw that decides nothing of the mixture
    behind_frozen: bool = False  # a frozen layer stands between the mixture and the first trained one
    changed_by: tuple[str, ...] = ()  # operations other than a change of shape or scale, between the mixture and the network
    is_difference: bool = False  # the clean image is made of several of its size, so that its own strength is not known


@dataclass
class Asked:
    """What the network is trained to give: p clean + q noise. Tensors are [B], in float64."""

    # "squared": of the error; "operand": of another function of it; "flat": of nothing; "none": of something else; "unknown":
    # the tape cannot compute the loss again
    kind: str
    p: Tensor | None = None
    q: Tensor | None = None
    rest: Tensor | None = None  # the share of the target that is neither
    seen: Tensor | None = None  # whether enough numbers of this sample count
    slope: Tensor | None = None  # how much an error of each sample counts: the largest second derivative of the loss
    even: float | None = None  # the smallest slope within a sample, over the largest
    masked: bool = False  # of a sample that counts, some numbers do not
    chosen: bool = False  # those that do not count are multiplied by a 0 that the script has for each sample
    each: int = 1  # numbers of one sample of the output
    skips: bool = False  # an image is added to the output before it is compared
    by_image: bool = False  # the image itself decides which of its errors count
    by_others: bool = False  # the level of another sample decides how much an error counts, or a draw of its own
    by_network: bool = False  # another network's output is in it
    noised: bool = True  # any of what counts has noise in the input
    beyond: tuple[str, float] = "", 0.0  # the network's last operation, and the share of the target that it can never give


@dataclass
class Pass:
    """One backward pass. Each is None where the tape does not tell."""

    mixture: Mixed | None = None
    target: Asked | None = None
    why_not: str = ""  # a code: why there is no mixture
    not_recorded: bool = False  # what is missing here could not be computed again, and may be right
    noise_in_loss: bool = False  # a normal draw of the size of what the network gets is in the loss
    misplaced: tuple[str, ...] = ()  # what was multiplied along another axis by a number of each sample: "noise", "image"
    squares: tuple[tuple[int, ...], ...] = ()  # shapes in the loss that have the batch along two axes
    conditions: Conditions = field(default_factory=Conditions)
    batch: Batch | None = None
    drawn: Drawn | None = None  # of a loop that tells
    called: Called | None = None  # of one that does not

    @property
    def levels(self) -> Tensor | None:
        """What decides the noise levels, [B], to the last bit."""
        if self.drawn is not None:
            return self.drawn.levels
        return self.mixture.told[-1] if self.mixture is not None and self.mixture.told else None


@dataclass
class Step:
    update: Update
    passes: list[Pass]
    network: Network = field(default_factory=Network)
    matrices: tuple[bool, ...] = ()  # of each parameter of the optimizer: two dimensions or more, and averaged
    loss_scale: float = 1.0  # that the gradients of the passes have in them
    turned_down: int = 0  # updates so far, without a step

    @property
    def micro_steps(self) -> list[Pass]:
        """Its passes; where the weights were moved between these, as optimizers do that try another place, the last one."""
        return self.passes if self.update.gradient.at_one_place else self.passes[-1:]


def identify(recorded: Recorded) -> Step:
    roots = [root for root in recorded.tape.roots if root is not None]
    own = [root for root in roots if root.trained] or roots  # the others are those of another optimizer
    passes = [_told(recorded, root, place) if recorded.told else _pass(recorded, root) for place, root in enumerate(own)]
    step = Step(identify_update(recorded), passes, identify_network(recorded))
    if recorded.told:
        step.matrices = tuple(p.ndim > 1 and of_network for p, of_network in zip(recorded.parameters, recorded.averaged))
        step.loss_scale, step.turned_down = recorded.told.loss_scale, recorded.told.turned_down
    return step


def _pass(recorded: Recorded, root: Op) -> Pass:
    tape = recorded.tape
    try:
        mixture = find_mixture(tape, root)
        target = find_target(tape, root, mixture)
        asked = None if target is None else _asked(tape, root, mixture, target)
        return Pass(
            _mixed(tape, mixture),
            asked,
            noise_in_loss=_noise_in_loss(tape, root),
            squares=_squares(tape, root, target, mixture.size),
            misplaced=_misplaced(tape, root),
            conditions=find_conditions(tape, root, mixture, None if target is None else target.output, recorded.no_gradient),
            batch=identify_batch(recorded, mixture),
            called=None if target is None else find_called(tape, mixture, target, recorded.calls),
        )
    except (Nothing, NotRecorded) as error:
        return Pass(why_not=str(error), misplaced=_misplaced(tape, root), noise_in_loss=_noise_in_loss(tape, root))


def _told(recorded: Recorded, root: Op, place: int) -> Pass:
    """Of a loop that tells what a pass is of: nothing is searched for."""
    tape, found = recorded.tape, Pass()
    if place >= len(recorded.told.clean):
        return Pass(why_not="told-not-used")
    found.drawn = drawn_of(recorded.told, place)
    forward = [op for op in tape.upstream(root) if op.kind == "op"]
    found.drawn.layers, found.drawn.products = layers_of(forward), products_of(forward)
    try:
        mixture, found.drawn.rest = told_mixture(recorded, forward, place)
        found.mixture = _mixed(tape, mixture)
        if (target := find_target(tape, root, mixture)) is not None:
            found.target = _asked(tape, root, mixture, target)
            found.drawn.learned = learned_of(tape, root, mixture, target)
            found.drawn.penalty = penalty_of(recorded, root, target)
        output = None if target is None else target.output
        found.conditions = find_conditions(tape, root, mixture, output, recorded.no_gradient)
    except (Nothing, NotRecorded) as error:
        found.why_not, found.not_recorded = str(error), isinstance(error, NotRecorded)
    return found


def _mixed(tape: Tape, mixture: Mixture) -> Mixed:
    return Mixed(
        mixture.size,
        tuple(source.name for source in mixture.draws),
        Figures.of(tape.value(mixture.noise)),
        Figures.of(mixture.value),
        mixture.b.cpu(),
        _on_host(mixture.a),
        _on_host(mixture.offset),
        None if mixture.clean_value is None else Figures.of(mixture.clean_value),
        mixture.index_range,
        bool(mixture.levels) and not mixture.told_within,
        tuple(one.cpu() for one in mixture.told),
        mixture.told_rounded,
        _on_host(mixture.index),
        _on_host(mixture.table),
        None if mixture.embedding is None else Figures.of(mixture.embedding),
        mixture.only_noise,
        _on_host(mixture.growth),
        mixture.told_otherwise,
        mixture.behind_frozen,
        _changed_by(tape, mixture),
        sum(one.kind != "drawn" and numel(one) >= mixture.value.numel() for one in tape.sources(mixture.image)) > 1,
    )


def _changed_by(tape: Tape, mixture: Mixture) -> tuple[str, ...]:
    if mixture.given is None or mixture.given is mixture.input:
        return ()
    after = {mixture.input}
    for op in tape.upstream(mixture.given, [mixture.input]):
        if any(need in after for need in op.needs):
            after.add(op)
    whole = (op for op in after - {mixture.input} if numel(op) >= numel(mixture.input))  # a spread, say, is not the image's way
    names = (op.name for op in sorted(whole, key=lambda op: op.index))
    return tuple(dict.fromkeys(name for name in names if name not in SHAPES | LINEAR))


def _on_host(figures: Tensor | None) -> Tensor | None:
    return None if figures is None else figures.cpu()


def _asked(tape: Tape, root: Op, mixture: Mixture, target: Target) -> Asked:
    asked = Asked(target.kind, _on_host(target.p), _on_host(target.q), _on_host(target.rest), _on_host(target.seen))
    asked.skips, asked.noised = target.skips, target.noised
    asked.beyond = beyond(tape, root, target.output)
    asked.by_network = by_network(tape, root, target)
    if target.slope is not None and not target.by_variance and target.slope.shape[0] == mixture.size:
        slope = target.slope.abs().flatten(1)
        slope = slope.cpu()
        asked.slope, asked.each = slope.amax(1), slope.shape[1]
        asked.even = float((slope.amin(1) / asked.slope.clamp(min=1e-30)).min())
        asked.by_others = by_others(tape, root, mixture, target)
        asked.masked = bool(((slope.amin(1) == 0) & (asked.slope > 0)).any())
        asked.chosen = _are_chosen(tape, root, target, asked.slope > 0)
        asked.by_image = asked.even < EVEN and by_image(tape, root, mixture, target)
    return asked


def _are_chosen(tape: Tape, root: Op, target: Target, counts: Tensor) -> bool:
    """Whether a mask of the samples, drawn or made of data, with 0 and one other number leaves out those that do not count."""
    for op in tape.upstream(root, [target.output]) if not bool(counts.all()) else ():
        for _, last in op.reads if op.name in ("mul", "mul_") else ():
            is_row = last.shape[:1] == counts.shape and numel(last) == len(counts)
            if is_row and last.made_of and not last.trained:
                factors = tape.value(last).flatten().cpu()
                if torch.equal(factors != 0, counts) and len(factors[counts].unique()) == 1:
                    return True
    return False


def _squares(tape: Tape, root: Op, target: Target | None, size: int) -> tuple[tuple[int, ...], ...]:
    """Two values that are each spread along the samples of the other: errors of all beside targets or weights of all."""
    if target is None or size < 2:
        return ()
    found = []
    for op in tape.upstream(root, [target.output]):
        if op.name in ELEMENTWISE | COMPARES and op.index > target.output.index:
            shape = max((op.shape, *(last.shape for _, last in op.reads)), key=len)
            spread = [_spread_along(last, shape, size) for _, last in op.reads if last.content or last.trained]
            if any(one - other and other - one for one, other in itertools.combinations(spread, 2)):
                found.append(shape)
    return tuple(found)


def _spread_along(value: Op, shape: tuple[int, ...], size: int) -> set[int]:
    """The axes of `shape`, as long as the batch, along which the value is one and the same."""
    own = value.reads[0][1].shape if value.name == "expand" else value.shape
    own = (1,) * (len(shape) - len(own)) + own
    return {axis for axis, length in enumerate(shape) if length == size and own[axis] == 1}


def _noise_in_loss(tape: Tape, root: Op) -> bool:
    """What is drawn for the target alone; what the network gets has nothing of it."""
    given = given_to_network(tape, [op for op in tape.upstream(root) if op.kind == "op"])
    sizes = {numel(each.value) for each in given if each.value.floating}
    inside = 0
    for each in given:
        inside |= each.value.content
    drawn = (source for source in tape.sources(root.content & ~inside) if source.kind == "drawn" and source.name in NORMAL)
    return any(numel(source) in sizes for source in drawn)


def _misplaced(tape: Tape, root: Op) -> tuple[str, ...]:
    """Numbers that were drawn for each sample, along another axis of what the network gets."""
    found = []
    for op in tape.upstream(root):
        if op.trained or op.name not in ELEMENTWISE or len(op.shape) < 3 or op.shape[0] < 2:
            continue
        size = op.shape[0]
        for (_, one), (_, other) in itertools.permutations(op.reads, 2):
            is_along = len(one.shape) == len(op.shape) and one.shape[0] == size
            of_each = [source for source in tape.sources(one.content | one.choice) if numel(source) == size]
            many = numel(one) > 1 and one.floating
            if many and not is_along and any(source.kind == "drawn" for source in of_each):
                only_drawn = all(source.kind == "drawn" for source in tape.sources(other.content))
                found.append("noise" if only_drawn else "image")
    return tuple(dict.fromkeys(found))
