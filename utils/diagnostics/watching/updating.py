"""What an update does: its gradients, the optimizer's step, the averages, and what else changes the weights."""

import re
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from utils.diagnostics.audit.fitting import SMALL, slope
from utils.diagnostics.audit.gradients import check_gradients
from utils.diagnostics.audit.seen import Update
from utils.diagnostics.audit.state import check_state
from utils.diagnostics.audit.verdict import Check
from utils.diagnostics.watching.averages import STILL, First, check_average
from utils.diagnostics.watching.facts import Average, Facts, says_average
from utils.diagnostics.watching.levels import declared_step
from utils.diagnostics.watching.observing import ForeignObserver
from utils.diagnostics.watching.optimizing import betas_of, check_step, is_normalized, rates_of
from utils.diagnostics.watching.options import check_options
from utils.diagnostics.watching.ranks import Everyone
from utils.diagnostics.watching.seen import Seen

LONG = 10  # updates; averages that move in every tenth are usual
FEWEST_LOOKS = 3  # before a parameter is said to get no gradient
FAR_CLIPPED = 0.01  # of the gradient
FEWEST_CUT, CUT = 16, 1e-3  # gradients that have the very value of the largest, in all and as a share
LOW = 0.01  # limit of a gradient's size


@dataclass(frozen=True)
class Clip:
    """A call that clips gradients."""

    kind: str  # "norm" or "value"
    limit: float
    micro_step: int  # after which it came, from 1
    too_late: bool  # it came after the optimizer's step
    whole: bool  # it clips the network's gradients, and no others
    elsewhere: bool = False  # of parameters that no optimizer has
    without: bool = False  # which have no gradients


@dataclass
class LastLook:
    """One update as it was seen."""

    update: Update
    observer: ForeignObserver
    facts: Facts
    clips: list[Clip]
    moved: bool  # whether the weights changed between updates since the look before
    reached: set[str]  # names of the parameters that got a gradient other than 0
    rows: dict[str, torch.Tensor]  # of embeddings, which rows of theirs did, bool [rows]
    known_optimizer: bool  # torch's own, and no other one of its name
    loss_scale: float = 1.0
    everyone: Everyone = field(default_factory=Everyone)  # what all processes saw


class UpdateJudge:
    """Of all looks.

    Args:
        words: gets what the script is found to do.
    """

    def __init__(self, words: dict[str, str]):
        self._words = words
        self._firsts: dict[str, First] = {}
        self._reached: set[str] = set()  # parameters that ever got a gradient
        self._looks = 0
        self._clipped: list[float] = []  # norm of the gradient at the step over that before it was clipped
        self._moving: set[str] = set()  # what holds an average that moves; beside it weights may be kept, to come back
        self._averaged: set[str] = set()  # averages that move
        # Of each average: looks in which it moved, -1 once it has not; what it was then, and at which update.
        self._moves: dict[str, tuple[int, torch.Tensor | None, int]] = {}
        self._buffers: dict[str, dict[str, tuple[torch.Tensor, torch.Tensor]]] = {}  # at first: the network's, the average's
        self._passes: list[int] = []  # backward passes of each look, where Accelerate was told how many
        self._standing: dict[str, Check] = {}  # averages that have not moved, as far as was seen

    def look(self, look: LastLook) -> list[Check]:
        update, observer = look.update, look.observer
        passes = sum(step.finished for step in update.micro_steps)
        micro_steps = max(1, min(look.facts.micro_steps or passes, passes))  # the end of the data cuts an accumulation short
        limit = next((c.limit for c in reversed(look.clips) if c.kind == "norm" and c.whole and not c.too_late), 0.0)
        declared = declared_step(micro_steps, limit=limit)
        checks = []
        if not any(clip.kind == "value" for clip in look.clips) and (look.everyone.alone or look.everyone.mean is not None):
            found = check_gradients(update, declared, look.loss_scale, look.everyone.mean)
            found = _by_function(found, update)
            together = any(c.kind == "norm" and not (c.whole or c.too_late or c.elsewhere) for c in look.clips)
            checks += found if limit else [_clipped_by_hand(check, _of_each_layer(look), together) for check in found]
        checks += [*_clipping(look.clips, passes), *(self._far_clipped(look) if look.clips else ())]
        if look.clips and all(clip.elsewhere and clip.without for clip in look.clips):
            text = "clipping gets parameters that no optimizer has, such as those of an average: the gradients stay as they are"
            checks.append(Check("gradient", "parameters that are clipped", "the optimizer's", "others", False, text))
        checks += [*_of_copies(look), *_of_one_sign(update)]
        checks += self._without_gradient(look)
        checks += check_step(update, observer, look.known_optimizer)
        checks += _weights_left_alone(look, check_state(update, declared, observer))
        if look.facts.empty:
            text = "an EMAModel holds no tensors and averages nothing: was it given a generator of parameters that was used up?"
            checks.append(Check("ema", "tensors of EMAModel", "as many as parameters", "none", False, text))
        for average in look.facts.averages:
            old, new = update.averages_before.get(average.name), update.averages.get(average.name)
            if old is not None and new is not None:
                first = self._firsts.setdefault(average.name, First(old, update.step + 1, average.updates))
                found = check_average(average, old, new, first, update, observer)
                checks += found
                self._standing.pop(average.name, None)
                self._standing |= {check.name: check for check in found if check.observed == STILL}
                checks += self._stopped(average, old, new, update.step + 1)
                checks += self._buffers_left(average, observer.trained)
                if any(check.healthy for check in found):
                    self._moving.add(average.name.rpartition(".")[0])
                    self._averaged.add(average.name)
                    self._words["ema"] = f"{average.name}, {found[0].observed.split(',')[0]}"
        norm = float(update.optimizer_step.gradient_norm) if update.optimizer_step is not None and not look.clips else 0.0
        checks += check_options(look.facts, passes, norm, update.step > 1)
        checks += self._accumulated(look.facts.micro_steps, passes)
        self._say(look, micro_steps, limit)
        return checks

    def _accumulated(self, wanted: int | None, passes: int) -> list[Check]:
        """What Accelerate was told; where the data end, it steps sooner."""
        if wanted is None:
            return []
        self._passes.append(passes)
        never = len(self._passes) >= FEWEST_LOOKS and max(self._passes) == 1
        text = f"Accelerate was told {wanted} micro steps per update, and the optimizer steps after each backward pass: "
        text += "is `with accelerator.accumulate(model)` missing, or is an epoch one batch long?"
        found = f"{max(self._passes)} or fewer"
        return [Check("gradient", "backward passes of an update, for Accelerate", str(wanted), found, not never, text)]

    def _stopped(self, average: Average, old: torch.Tensor, new: torch.Tensor, update: int) -> list[Check]:
        """Of an average that moved in each look so far. `old`, `new`: before and after the update, sampled.

        Some begin with copies in each update and are then updated in each tenth; diffusers' own has one rhythm.
        """
        name = average.name
        moves, left, before = self._moves.get(name, (0, None, 0))
        still = torch.equal(old, new)
        for_long = left is not None and torch.equal(left, new) and update - before > LONG
        stopped = still and moves >= FEWEST_LOOKS and (for_long or average.settings is not None)
        self._moves[name] = (moves + 1 if moves >= 0 and not still else -1), new, update
        text = f"{name} moved in each of the first {moves} updates that were looked at, and not in update {update}: "
        text += "was another one made in its place, or is it no longer updated?"
        return [Check("ema", name, "one for the whole run", STILL, False, text, "warning")] if stopped else []

    def _buffers_left(self, average: Average, network: nn.Module) -> list[Check]:
        """Statistics that a network gathers while it trains, as batch normalization does, and its average does not get."""
        if not isinstance(average.owner, nn.Module) or average.name not in self._averaged:
            return []
        own = {name: buffer for name, buffer in network.named_buffers() if ".running_" in f".{name}"}
        theirs = dict(average.owner.named_buffers())
        pairs = {n: (own[n].detach().cpu(), theirs[n].detach().cpu()) for n in own if n in theirs}
        pairs = {name: pair for name, pair in pairs.items() if pair[0].shape == pair[1].shape}
        first = self._buffers.setdefault(average.name, {name: (a.clone(), b.clone()) for name, (a, b) in pairs.items()})
        moved = [name for name, (now, _) in pairs.items() if name in first and not torch.equal(now, first[name][0])]
        left = [name for name in moved if torch.equal(pairs[name][1], first[name][1])]
        if not moved:
            return []
        text = f"{len(left)} buffers of the network change, such as {(left or moved)[0]}, and those of {average.name} do not: "
        text += "statistics of batches are no parameters, and have to be copied"
        name, found = f"buffers of {average.name}", f"{len(left)} left behind"
        return [Check("ema", name, "those of the network, or their averages", found, not left, text, "warning")]

    def end(self) -> list[Check]:
        """When the script has come to its own end, so that nothing begins later."""
        text = "{} has not moved in the whole run"
        still = [check for name, check in self._standing.items() if not self.is_beside(name)]
        return [replace(c, severity="critical", message=text.format(c.name)) for c in still]

    def another_moves(self, name: str) -> bool:
        """Whether there is an average besides the one of that name."""
        return bool(self._averaged - {name})

    def is_beside(self, name: str) -> bool:
        """Whether these are weights that an object keeps beside its average, by another name."""
        holder, _, last = name.rpartition(".")
        return holder in self._moving and not last.isdigit() and not says_average(last)

    def _far_clipped(self, look: LastLook) -> list[Check]:
        """Of gradients of which every look shows almost nothing left."""
        step, whole = look.update.optimizer_step, look.update.micro_steps[-1].gradient_after
        if step is None or whole is None or not whole.any():
            return []
        self._clipped.append(look.loss_scale * float(step.gradient.norm() / whole.norm()))
        most = max(self._clipped)
        if len(self._clipped) <= FEWEST_LOOKS:
            return []
        text = f"in all looks clipping has left at most {most:.1g} of the gradient: is its limit far too low?"
        name, wanted = "what clipping leaves of the gradient", f"{FAR_CLIPPED:g} or more"
        severity = "warning" if min(clip.limit for clip in look.clips) < LOW else "info"  # a summed loss has large gradients
        return [Check("gradient", name, wanted, f"up to {most:.2g}", most >= FAR_CLIPPED, text, severity)]

    def _without_gradient(self, look: LastLook) -> list[Check]:
        """Parameters that the optimizer was given, and that never got a gradient in any look."""
        step, sample = look.update.optimizer_step, look.observer.sample
        if step is None:
            return []
        self._looks += 1
        self._reached |= look.reached
        owned = [name for name, groups in zip(sample.names, step.group_of.split(sample.counts)) if int(groups[0]) >= 0]
        missing = [name for name in owned if name not in self._reached]
        if self._looks < FEWEST_LOOKS or not self._reached:
            return []
        if 2 * len(missing) > len(owned) and (zero := _zeros(missing, look.observer)):
            text = (
                f"{len(missing)} of {len(owned)} parameters never get a gradient: {', '.join(zero[:2])} are zero and stay so, "
            )
            text += "and what is multiplied by zero twice has none"
            return [Check("network", "layers that are zero", "trained", f"{len(zero)} are not", False, text)]
        kinds = {name: _kind_of(name, look.observer.trained) for name in missing}
        if {"timestep", "condition"} <= {*kinds.values()}:  # of both at once: they are cut off together
            kinds = dict.fromkeys(kinds, "")
        checks = [_of_embedding(kind, [name for name in missing if kinds[name] == kind]) for kind in _SAID]
        missing = [name for name in missing if not kinds[name]]
        text = f"{len(missing)} of {len(owned)} parameters never get a gradient"
        text += f", such as {missing[0]}" if missing else ""
        found = str(len(missing)) if missing else "none"
        name = "parameters without a gradient"
        checks.append(Check("gradient", name, "none", found, not missing, text, "warning", "no-gradient"))
        return [check for check in checks if check is not None]

    def _say(self, look: LastLook, micro_steps: int, limit: float) -> None:
        step = look.update.optimizer_step
        if step is not None:
            group = step.groups[0]
            words = step.optimizer + "".join(f", learning rate {rate:.3g}" for rate in rates_of([group]))
            if (betas := betas_of(group)) is not None:
                words += f", betas {betas[0]:g} and {betas[1]:g}"
            if group.get("weight_decay"):
                words += f", weight decay {group['weight_decay']:g}"
            self._words["optimizer"] = words
        if micro_steps > 1:
            self._words["accumulation"] = f"{micro_steps} micro steps per update"
        if limit:
            self._words["clipping"] = f"gradients clipped to {limit:g}"
        for average in look.facts.averages:
            if average.is_average:
                self._words.setdefault("ema", average.name)


_SAID = {"timestep": "the noise level", "condition": "labels or texts", "network": "the noise level or of labels"}
_WORDS = {
    "timestep": r"t|temb|times?|timesteps?|time\w*|sigmas?|logsnr|level",
    "condition": r"y|cond|class\w*|labels?|captions?|prompts?|text\w*|context\w*|condition\w*",
}


def _kind_of(name: str, network: nn.Module) -> str:
    """The stage to which a parameter belongs by its name or its layer: of an embedding of the noise level, or of labels."""
    for kind, words in _WORDS.items():
        if any(re.fullmatch(words, part) for part in re.split(r"[._]", name.lower())):
            return kind
    if isinstance(dict(network.named_modules()).get(name.rpartition(".")[0]), nn.Embedding):
        return "condition"
    return "network" if any(part.startswith("emb") for part in re.split(r"[._]", name.lower())) else ""


def _of_embedding(kind: str, missing: list[str]) -> Check | None:
    if not missing:
        return None
    text = (
        f"{len(missing)} parameters of the network's embedding of {_SAID[kind]} never get a gradient, such as {missing[0]}: "
        f"is the network never given {_SAID[kind]}, or does it not use them?"
    )
    name = f"parameters of the embedding of {_SAID[kind]} without a gradient"
    return Check(kind, name, "none", str(len(missing)), False, text, "warning")


def _zeros(names: list[str], observer: ForeignObserver) -> list[str]:
    """Weights of these that are all zero."""
    return [
        name
        for name in names
        if observer.parameters[name].ndim and name.endswith("weight") and not observer.parameters[name].any()
    ]


def _of_one_sign(update: Update) -> list[Check]:
    """Whether gradients are cut off on one side alone: many have the very value of the largest, or of the smallest."""
    step = update.optimizer_step
    if step is None or not torch.isfinite(step.gradient).all():
        return []
    ends = step.gradient.max(), step.gradient.min()
    many = [bool(end) and int((step.gradient == end).sum()) >= max(FEWEST_CUT, CUT * step.gradient.numel()) for end in ends]
    above, at, other = ("above", ends[0], ends[1]) if many[0] else ("below", ends[1], ends[0])
    one = many[0] != many[1] and float(other.abs()) > 1.01 * float(at.abs())  # else few happen to reach the other limit
    text = f"gradients {above} {float(at):.2g} are cut off, and those of the other sign are not: weights drift to one side"
    found = "on one side" if one else "on both" if all(many) else "on none"
    return [Check("gradient", "gradients that are cut off", "on both sides, or on none", found, not one, text)]


def _clipping(clips: list[Clip], passes: int) -> list[Check]:
    checks = []
    clips = [clip for clip in clips if not clip.elsewhere]
    if any(clip.too_late for clip in clips):
        text = "gradients are clipped after the optimizer's step, where it has no effect"
        checks.append(Check("gradient", "clipping", "before the step", "after the step", False, text))
    if passes > 1 and clips:
        early = [clip.micro_step for clip in clips if clip.micro_step < passes]
        text = f"gradients are clipped after micro step {min(early, default=0)} of {passes}, before they are complete"
        found = ", ".join(str(clip.micro_step) for clip in clips)
        checks.append(Check("gradient", "clipped after micro step", str(passes), found, not early, text))
    return checks


def _of_copies(look: LastLook) -> list[Check]:
    """Of an optimizer that has copies of the network's weights, such as float32 ones of a network in half precision."""
    checks: list[Check] = []
    step = look.update.optimizer_step
    if step is None or not look.observer.trains_copies:
        return checks
    limits = [clip.limit for clip in look.clips if clip.kind == "norm" and clip.elsewhere]
    if limits:
        norm = float(step.gradient_norm)
        text = (
            f"gradients are clipped to {min(limits):g}, and those that the optimizer uses have the norm {norm:.3g}: "
            "they are copies, made before?"
        )
        fine = norm <= 1.01 * min(limits)
        checks.append(Check("gradient", "norm at the step", f"{min(limits):g} or less", f"{norm:.3g}", fine, text, "warning"))
    if (follows := look.observer.network_follows) is not None:
        text = "the optimizer trains copies of the network's weights, and those of the network never change: not copied back?"
        name, wanted = "weights of the network", "those that the optimizer trains"
        checks.append(Check("state", name, wanted, "they change" if follows else "always the same", follows, text))
    return checks


def _by_function(checks: list[Check], update: Update) -> list[Check]:
    """Gradients that no backward pass left may be put there by hand, as those of torch.func are, or of flat copies of all
    weights: those of the update before are then replaced."""
    step = update.optimizer_step
    if step is None or not step.gradient.any() or all(check.observed != "none" for check in checks):
        return checks
    words = "put there without a backward pass"
    return [replace(check, healthy=None, observed=words) if check.healthy is False else check for check in checks]


def _clipped_by_hand(check: Check, of_each_layer: bool, together: bool) -> Check:
    """A factor between backward pass and step is no fault where nobody declares a clipping. `together`: other parameters were
    clipped with those of the network, so that the norm is not known."""
    if check.healthy is not False or not check.name.startswith("gradient at the step over"):
        return check
    if together and "times what" in check.message:
        return replace(check, healthy=None, observed="clipped together with parameters beside the network")
    if "times what" in check.message:
        return replace(check, severity="info", message=f"{check.message}: clipped by hand, or with another network?")
    if of_each_layer:
        return replace(check, severity="info", message="the gradients of the layers are scaled, each by a factor of its own")
    return check


def _of_each_layer(look: LastLook) -> bool:
    """Whether the gradient at the step is that of the backward passes, of each parameter times a number from 0 to 1."""
    step, update = look.update.optimizer_step, look.update
    left = look.everyone.mean if look.everyone.mean is not None else update.micro_steps[-1].gradient_after
    if step is None or left is None:
        return False
    pairs = [(a.double(), g.double()) for a, g in zip(*(v.split(look.observer.sample.counts) for v in (left, step.gradient)))]
    found = [slope(a, g) for a, g in pairs if a.any() and g.any()]
    whole = all(bool(g.any()) for a, g in pairs if a.any())
    return whole and all(0 < factor < 1 + SMALL and residual < SMALL for factor, residual in found)


def _weights_left_alone(look: LastLook, checks: list[Check]) -> list[Check]:
    """Whether nothing but the optimizer's step changes the weights."""
    text = (
        "the weights were changed between two updates, by something other than the optimizer: "
        "averaged weights that were copied in and not restored?"
    )
    wanted, found = "those that the step left", "others" if look.moved else "the same"
    checks = [*checks, Check("state", "weights at the next update", wanted, found, not look.moved, text)]
    if look.observer.embeds_alone:  # of a text encoder, whose words that are not trained are put back
        checks = [replace(check, severity="info") for check in checks]
    if is_normalized(look.update):
        why = "rows of weights have the size 1: each update normalizes them"
        checks = [replace(c, healthy=None, observed=why) if c.healthy is False else c for c in checks]
    if look.facts.shared:
        seen = [step.batch.get("seen") or Seen() for step in look.update.micro_steps]
        own = {p.data_ptr() for p in look.observer.parameters.values()}
        updated = any(own & one.changed for one in seen) or any(check.healthy is False for check in checks)
        text = f"{look.facts.shared} holds the network's own weights, not copies of them: it moves as they do"
        severity = "critical" if updated else "info"  # a second name alone, perhaps, of a loop without averages
        found = "the weights themselves"
        checks.append(Check("ema", look.facts.shared, "copies of the weights", found, False, text, severity))
    return checks
