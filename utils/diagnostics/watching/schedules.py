"""To which noise schedule the images of an update belong, and whether the network is told their noise levels."""

import inspect
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from utils.diagnostics.audit.fitting import span
from utils.diagnostics.audit.noising import check_noising
from utils.diagnostics.audit.seen import Call, MicroStep
from utils.diagnostics.audit.verdict import Check
from utils.diagnostics.watching.facts import Facts
from utils.diagnostics.watching.inputs import (
    check_mixture,
    check_told,
)
from utils.diagnostics.watching.levels import (
    Levels,
    Look,
    Table,
    anywhere,
    declared_step,
    half_matching,
    is_monotone,
    matching,
    said,
    tables,
)
from utils.diagnostics.watching.looks import is_whole, whole_noise
from utils.diagnostics.watching.options import (
    declared_prediction,
    numbers_of_steps,
)
from utils.diagnostics.watching.seen import Times

MOST_LEFT = 0.1  # of the signal's variance, at the last step: 0.00004 is usual, and 0.05 with 300 of the usual steps
MOST_LOST = 0.5  # of the steps may have less than NOTHING_LEFT of it
NOTHING_LEFT = 1e-4
MOST_DRAWN = 0.9  # of the steps, at least
MOST_MOVED = 0.7  # of the timesteps that are beside those drawn; those at an end may be cut off
CHANGED = 0.02  # of a coefficient, which is no rounding
FEW = 0.5  # of the images of an update have noise levels of their own, where many steps are drawn from: too few
ENOUGH_STEPS, VARIED = 24, 0.9  # steps of earlier looks, and the share of them that differ
MANY_STEPS = 100  # so that this is no chance


class Schedules:
    """Of all looks.

    Args:
        words: gets what the script is found to do.
    """

    def __init__(self, words: dict[str, str]):
        self._words = words
        self._matched: tuple[str, int] | None = None  # the known schedule of the looks so far, and its steps
        self._steps_seen: list[float] = []  # of looks whose images had noise levels of their own

    def look(
        self, levels: Levels, looks: list[Look], facts: Facts, scheduler: Any
    ) -> tuple[list[Check], torch.Tensor | None, str | None]:
        """(checks of input and timestep, the table of the schedule, the declared prediction type)."""
        config = getattr(scheduler, "config", None) or {}
        prediction = declared_prediction(facts.options, config)
        times = [one.times for one in looks if one.times is not None]
        drawn = torch.cat([one.values.to(levels.a) for one in times]) if len(times) == len(looks) else None
        if all(one.noised_with is not None for one in looks) and (table := _own_table(scheduler)) is not None:
            used = torch.cat([one.noised_with for one in looks])  # type: ignore[misc]
            return self._steps(levels, looks, used, str(config.get("beta_schedule", "own")), table), table, prediction
        steps = (times[0].highest if times else 0) or 1000
        for places, count in product((levels.told, drawn), dict.fromkeys((steps, *numbers_of_steps(facts)))):
            if places is not None and bool((places == places.round()).all()) and len(places) == len(levels.a):
                found = matching(levels, places, count)
                if found is not None:
                    self._matched = found[0], len(found[1])
                    partly = [self._partly(times[0], count, facts)] if times and float(places.max()) < times[0].highest else []
                    return [*self._steps(levels, looks, places, *found), *partly], found[1], prediction
        if (changed := self._changed(levels, levels.told if drawn is None else drawn)) is not None:
            return [changed], None, prediction
        if drawn is not None or is_whole(levels.told):
            if (place := anywhere(levels, steps)) is not None:
                name, table, places = place
                return self._steps(levels, looks, places.double(), name, table), table, prediction
            if broken := self._broken(levels, looks, levels.told if drawn is None else drawn, steps):
                return broken, None, prediction
            for places in (levels.told, drawn):
                if places is not None and len(places) == len(levels.a) and (text := half_matching(levels, places, steps)):
                    name, observed = "coefficients of image and noise", f"a {span(levels.a)}, b {span(levels.b)}"
                    return [Check("input", name, "both of one schedule", observed, False, text)], None, prediction
        if drawn is not None and (moved := check_drawn(levels, drawn)) is not None:
            return [moved], None, prediction
        told, words = check_told(levels)
        known = "process of an unknown kind" if levels.kind == "other" else f"{levels.kind} path"
        self._words["schedule"] = known + (f", told {words}" if words else "")
        return [told, check_mixture(levels)], None, prediction

    def _changed(self, levels: Levels, places: torch.Tensor | None) -> Check | None:
        """Of timesteps [B] that had the coefficients of a known schedule in earlier looks."""
        if self._matched is None or places is None or len(places) != len(levels.a) or not is_whole(places):
            return None
        name, steps = self._matched
        values = tables(steps)[name].to(levels.a)
        if float(places.min()) < 0 or float(places.max()) >= steps:
            return None
        apart = (levels.a - values[places.long()].sqrt()).abs()
        if float(apart.max()) < CHANGED:
            return None
        text = (
            f"image and noise had the coefficients of a {said(name)} schedule, and now they have others at the same timesteps: "
        )
        text += "does a preview change the schedule's tensors?"
        found = f"{int((apart > CHANGED).sum())} of {len(apart)} images have others"
        return Check("input", "noise schedule", "one for the whole run", found, False, text)

    def _partly(self, times: Times, steps: int, facts: Facts) -> Check:
        """Whether the steps with most noise are never drawn, though no option says so."""
        declared = times.highest in facts.options.values()
        left_out = 0 < times.highest < MOST_DRAWN * steps and not declared
        text = (
            f"timesteps are drawn below {times.highest} of {steps}: what has more noise, as sampling begins, is never trained"
        )
        found = f"below {times.highest}" if times.highest else "not known"
        return Check("timestep", "highest timestep that is drawn", f"below {steps}", found, not left_out, text, "warning")

    def _steps(self, levels: Levels, looks: list[Look], places: torch.Tensor, name: str, table: torch.Tensor) -> list[Check]:
        """By the audit's own checks of DDPM."""
        self._words["schedule"] = f"{said(name)} schedule of {len(table)} steps"
        declared = declared_step(1, Table(name, len(table), False, "epsilon", None, values=table))
        steps, position = [], 0
        for one in looks:
            part = places[position : position + len(one.x)]
            position += len(one.x)
            told = one.told if one.told is not None else part
            call = Call((one.x, told), (one.output[:, : one.x.shape[1]],))
            mixture = one.mixture
            noise = mixture.noise_tensor
            if mixture.extra:
                noise = (whole_noise(mixture, one.x) if one.x.numel() <= 1 << 18 else noise).to(noise)
            batch = {"clean_images": mixture.clean_tensor, "noise": noise, "timesteps": part}
            steps.append(MicroStep({"network": call}, batch))
        checks = [c for c in check_noising(steps, declared) if c.stage in ("timestep", "input")]
        if all(one.told_to_layer for one in looks):  # which takes fractions as well
            checks = [replace(c, healthy=True) if c.observed.startswith("as fractions") else c for c in checks]
        if looks[0].x.dtype.itemsize < 4:  # image and noise are in half precision, as the script wants them
            checks = [replace(c, severity="info") if "is rounded" in c.message else c for c in checks]
        return checks

    def _broken(self, levels: Levels, looks: list[Look], places: torch.Tensor, steps: int) -> list[Check]:
        """A known mistake in the formula of a known schedule."""
        if bool(((places < 0) | (places >= steps)).any()):
            return []
        kept = dict(self._words)
        for name, table in tables(steps).items():
            checks = self._steps(levels, looks, places, name, table)
            text = next((c.message for c in checks if c.name == "coefficients of image and noise"), "")
            if text and "times those declared" not in text and "something else" not in text and " schedule" not in text:
                return checks
        self._words.clear()
        self._words.update(kept)
        return []

    def variety(self, table: torch.Tensor, looks: list[Look]) -> list[Check]:
        """Whether images still have as many steps of the schedule as in earlier looks. A few from the beginning are chosen."""
        drawn = [one.noised_with if one.noised_with is not None else one.told for one in looks]
        known = [steps for steps in drawn if steps is not None]
        steps = torch.cat([each.reshape(-1).cpu() for each in known]) if known else torch.zeros(0)
        if len(steps) < 8 or len(table) < MANY_STEPS:
            return []
        few = len(steps.unique()) <= FEW * len(steps)
        # Of a few steps that are chosen from the beginning, some come again among so many.
        fewer = few and len(self._steps_seen) >= ENOUGH_STEPS and len(set(self._steps_seen)) > VARIED * len(self._steps_seen)
        self._steps_seen += [] if few else steps.tolist()
        text = f"{len(steps)} images have {len(steps.unique())} noise levels, and in earlier updates they had more: "
        text += "are they drawn from what a preview's set_timesteps leaves?"
        name, found = "noise levels of an update", f"{len(steps.unique())} of {len(steps)} images"
        return [Check("timestep", name, "as many as before", found, not fewer, text)]


def check_drawn(levels: Levels, drawn: torch.Tensor) -> Check | None:
    """Of steps of a schedule that is not known: whether the network gets them, [B], and not others at a fixed distance. A
    script that counts from 1 may be one beside."""
    told = levels.told
    if told is None or len(drawn) != len(told) or not is_whole(told) or not is_monotone(levels.b, drawn) or len(drawn) < 4:
        return None
    apart = (told - drawn.to(told)).mode().values
    share = float((told - drawn.to(told) == apart).double().mean())
    if abs(float(apart)) < 2 or share < MOST_MOVED:
        return None
    text = f"the network gets timesteps that are {float(apart):+g} beside those that were drawn"
    return Check("timestep", "timestep that the network gets", "the one that was drawn", f"{float(apart):+g}", False, text)


def check_ends(table: torch.Tensor, images: bool) -> list[Check]:
    """Whether a schedule, alphas_cumprod [T], goes from the image to noise, and uses its steps for that. Of signals, which may
    follow from what the network is told beside them, some published schedules do not."""
    severity = "warning" if images else "info"
    left, lost = float(table[-1]), float((table < NOTHING_LEFT).double().mean())
    text = (
        f"at the last step {left**0.5:.0%} of the image are still there, and sampling starts from noise alone, which the "
        "network never sees: are the betas too small, or the steps too few?"
    )
    name, found = "image that is left at the last step", f"{left**0.5:.2g}"
    checks = [Check("input", name, f"below {MOST_LEFT**0.5:.2g}", found, left < MOST_LEFT, text, severity)]
    text = f"{lost:.0%} of the steps have noise alone, from which nothing is learned: are the betas too large?"
    name = "share of the steps that have noise alone"
    return [*checks, Check("input", name, "a small one", f"{lost:.0%}", lost < MOST_LOST, text, "warning")]


def _own_table(scheduler: Any) -> torch.Tensor | None:
    """Of a scheduler that noises by steps, as one made anew of the same config has it."""
    kind = type(scheduler)  # its `from_config` would import all schedulers of diffusers, which takes most of a second
    known = inspect.signature(kind.__init__).parameters
    fresh = kind(**{name: value for name, value in scheduler.config.items() if name in known})
    table = getattr(fresh, "alphas_cumprod", None)
    if table is None:
        return None
    ends = torch.tensor([0, len(table) - 1])
    try:
        noised = fresh.add_noise(torch.ones(2, 1), torch.zeros(2, 1), ends)
    except Exception:  # of those that noise by sigmas, before their steps are set
        return None
    return table.double().cpu() if torch.allclose(noised[:, 0], table[ends].sqrt(), atol=1e-4) else None
