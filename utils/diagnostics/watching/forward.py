"""What a forward pass and its loss show: image and noise, the noise level, the target, what errors count."""

import inspect
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from utils.diagnostics.audit.declared import Declared, DeclaredOptimizer
from utils.diagnostics.audit.fitting import SMALL, constant, flat, span
from utils.diagnostics.audit.noising import check_noising
from utils.diagnostics.audit.pooled import Pool
from utils.diagnostics.audit.seen import Call, MicroStep, Update
from utils.diagnostics.audit.verdict import Check, not_observed
from utils.diagnostics.watching.bound import check_bound
from utils.diagnostics.watching.facts import Facts
from utils.diagnostics.watching.images import check_encoded, check_latents, check_range, check_spread, is_signed, rounding_of
from utils.diagnostics.watching.inputs import (
    check_embedded,
    check_exchanged,
    check_mixture,
    check_noised_once,
    check_told,
    check_unexplained,
    images_in,
    told_as_edm,
)
from utils.diagnostics.watching.levels import Levels, Look, Table, anywhere, half_matching, is_monotone, matching, said, tables
from utils.diagnostics.watching.mixture import Mixture, find, strength
from utils.diagnostics.watching.options import (
    check_declared_schedule,
    check_log_normal,
    declared_prediction,
    declared_strength,
    numbers_of_steps,
)
from utils.diagnostics.watching.places import begins_alike, number_told
from utils.diagnostics.watching.preconditioning import check_preconditioning
from utils.diagnostics.watching.seen import Seen, Times
from utils.diagnostics.watching.targets import check_target, has_wrong_velocity, identify_target
from utils.diagnostics.watching.weights import Weighting, check_holes, check_masked, check_weights, identify_weights

MOST_OFFSET = 0.5  # of the noise; 0.05 to 0.15 is usual
MOST_ALIKE = 0.4  # of the images of an update may have the first or last noise level, where all others differ
MOST_BELOW = 0.15  # of the images have less noise than their rounding: as uniform log-SNRs may have, or levels drawn as cubes
MOST_BELOW_DRAWN = 0.06  # of those whose times are drawn from a normal distribution, as far as EDM's have it
MANY_LEVELS = 64  # images before that is judged
MOST_OTHERS = 24  # tensors of an update that the loss may be made of
MANY_SHARES, SHORT_SPAN = 40, 0.4  # images before it is judged which part of a path they have; normal times have twice that
MOST_LEFT = 0.1  # of the signal's variance, at the last step: 0.00004 is usual, and 0.05 with 300 of the usual steps
MOST_LOST = 0.5  # of the steps may have less than NOTHING_LEFT of it
NOTHING_LEFT = 1e-4
NO_SIGNAL = 1e-12  # alpha_cumprod of zero terminal SNR; the cosine schedule, which is none, ends at 2e-9 or 2e-10
SURE = 6.0  # standard deviations of chance
FEWEST, MANY_IMAGES = 8, 64  # images of a batch that can be known again, and of all looks
BATCHES = 3  # looks whose images are compared
MOST_DRAWN = 0.9  # of the steps, at least
MOST_MOVED = 0.7  # of the timesteps that are beside those drawn; those at an end may be cut off
CHANGED = 0.02  # of a coefficient, which is no rounding
FEW = 0.5  # of the images of an update have noise levels of their own, where many steps are drawn from: too few
MANY_STEPS = 100  # so that this is no chance


class ForwardJudge:
    """Of all looks; what is drawn is judged over all of them together.

    Args:
        words: gets what the script is found to do.
    """

    def __init__(self, words: dict[str, str]):
        self.mixed = False  # the network was seen to get a mixture of image and noise
        self._words = words
        self._noise_pool = Pool(declared_step(1))
        self._level_pool: Pool | None = None
        self._num_steps = 0  # of the noise schedule
        self._below, self._of_bytes = 0, 0  # images of 8 bits with less noise than their own rounding, and all of them
        self._ended: list[bool] = []  # looks of which more than that have it
        self._shares: list[torch.Tensor] = []  # of noise, on a path from image to noise
        self._batches: list[tuple[torch.Tensor, ...]] = []  # images and noise levels of the first looks
        self._matched: tuple[str, int] | None = None  # the known schedule of the looks so far, and its steps
        self._ranked: list[tuple[float, int]] = []  # rank correlations of brightness and noise, and of how many images
        self._logs: list[float] = []  # ln(sigma)
        self._seen_batches: set[tuple] = set()
        self._marks: Counter[tuple[float, float]] = Counter()  # of the images seen
        self._unused: list[int] = []  # of each look, batches without a gradient
        self._varied = False  # most images of a look had noise levels of their own

    def look(self, update: Update, facts: Facts, loss_scale: float, encoded: tuple[float, float] | None = None) -> list[Check]:
        """`encoded`: the range of the images from which an autoencoder made the clean ones; None: it made none."""
        looks = _looks(update, loss_scale)
        if not looks:
            return [check_unexplained(update), *_told_beside(update)]
        self.mixed = True
        levels = Levels(looks)
        checks: list[Check] = []
        drawn = looks
        if (c := strength(levels.a, levels.b)) != 1:  # the noise is judged as it is used
            looks = [replace(one, mixture=one.mixture.of_strength(c)) for one in looks]
            levels = Levels(looks)
        if (twice := check_noised_once(update)) is not None:
            return [twice, *self._noise(looks)]
        if (exchanged := check_exchanged(update)) is not None:
            return [exchanged]
        if levels.noise_alone:
            silent = any(one.silent for one in looks) and constant(levels.b) is None
            alone = [] if silent else [check_mixture(levels)]
            return [*alone, *self._noise(looks)]
        micro_steps = facts.micro_steps or max(1, sum(step.finished for step in update.micro_steps))
        shown = _without_silence(looks) or looks
        heard = Levels(shown)
        checks, table, prediction = self._levels(heard, shown, facts, _scheduler(update, facts))
        if any(
            "dream" in name and value is True for name, value in facts.options.items()
        ):  # its input has its own prediction in it
            checks = [replace(c, severity="info") if "is not made of image" in c.message else c for c in checks]
        if table is not None:
            self._add_levels(table, looks)
            checks += [*_ends(table, looks[0].x.ndim > 3), *self._variety(table, looks)]
        wrapped, kind = _raw_network(update, levels)
        return [
            *checks,
            *_told_beside(update),
            *_embedded(update),
            *_wrapped_around(update),
            *self._loss(heard, table, prediction, micro_steps, kind, loss_scale),
            *wrapped,
            *self._noise(drawn if declared_strength(facts, c) else looks),
            *(
                []
                if levels.constant
                else [
                    _data(
                        looks[0],
                        update,
                        facts,
                        encoded,
                        levels.kind == "variance-exploding" and not kind,
                        _unit(looks[0], levels, kind),
                    )
                ]
            ),
            *self._below_rounding(looks),
            *self._span(levels),
            *self._log_normal(levels, facts),
            *self._again(looks),
            *self._brightness(looks),
            *check_declared_schedule(facts, _scheduler(update, facts)),
            *_repeated([one.mixture.clean for one in looks]),
            *self._left_out(looks),
            *_channels_reversed(update, looks),
            *self._one_batch(looks[0].mixture.clean, looks[0].mixture.of_noise),
        ]

    def _left_out(self, looks: list[Look]) -> list[Check]:
        """Whether the errors of other images are computed in each update and never reach the gradient."""
        without = [one for one in looks if one.gradient is None or not one.gradient.any()]
        used = [one for one in looks if one.gradient is not None and one.gradient.any()]
        others = [a for a in without if used and all(not _same(a.mixture.clean, b.mixture.clean) for b in used)]
        self._unused.append(len(others))
        always = len(self._unused) >= BATCHES and all(self._unused)
        text = (
            f"{len(others)} of {len(looks)} batches of an update have no part in the gradient: does backward() leave them out?"
        )
        name, found = "batches of an update without a gradient", str(len(others))
        return [Check("gradient", name, "none", found, not always, text)] if len(looks) > 1 else []

    def _variety(self, table: torch.Tensor, looks: list[Look]) -> list[Check]:
        """Whether images still have as many steps of the schedule as in earlier looks. A few from the beginning are chosen."""
        drawn = [one.noised_with if one.noised_with is not None else one.told for one in looks]
        known = [steps for steps in drawn if steps is not None]
        steps = torch.cat([each.reshape(-1).cpu() for each in known]) if known else torch.zeros(0)
        if len(steps) < 8 or len(table) < MANY_STEPS:
            return []
        few = len(steps.unique()) <= FEW * len(steps)
        fewer, self._varied = few and self._varied, self._varied or not few
        text = f"{len(steps)} images have {len(steps.unique())} noise levels, and in earlier updates they had more: "
        text += "are they drawn from what a preview's set_timesteps leaves?"
        name, found = "noise levels of an update", f"{len(steps.unique())} of {len(steps)} images"
        return [Check("timestep", name, "as many as before", found, not fewer, text)]

    def _below_rounding(self, looks: list[Look]) -> list[Check]:
        """Of images that were bytes: noise that is smaller than the rounding to bytes."""
        timed = False
        for one in looks:
            sigma, rounding = Levels([one]).sigma, rounding_of(one.mixture.clean)
            if rounding:
                self._below += int((sigma < rounding).sum())
                self._of_bytes += len(sigma)
                timed |= any(float(drawn.min()) < 0 and is_monotone(sigma, drawn) for drawn in one.moments)
        if self._of_bytes < MANY_LEVELS:
            return []
        share = self._below / self._of_bytes
        most = MOST_BELOW_DRAWN if timed else MOST_BELOW
        fine = share < most + 3 * (most * (1 - most) / self._of_bytes) ** 0.5
        text = f"{share:.0%} of the images have less noise than they were rounded by, as bytes: nothing is learned from them"
        text += " (their times are drawn from a normal distribution; should they be from 0 to 1?)" if timed else ""
        name, found = "share of images with less noise than their rounding", f"{share:.0%}"
        return [Check("timestep" if timed else "input", name, "a small one", found, fine, text, "warning")]

    def _log_normal(self, levels: Levels, facts: Facts) -> list[Check]:
        if levels.kind in ("flow", "variance-preserving"):
            return []
        self._logs += levels.sigma.log().tolist()
        return check_log_normal(facts, self._logs)

    def _again(self, looks: list[Look]) -> list[Check]:
        """Whether a batch of an earlier look comes again, in its order: of batches that are kept, or of an order that is."""
        batches = [tuple(_marks(one.mixture.clean)) for one in looks if len(one.x) >= FEWEST]
        several = [batch for batch in batches if len(set(batch)) > len(batch) / 2]
        again = any(batch in self._seen_batches for batch in several)
        self._seen_batches |= set(several)
        self._marks.update(mark for batch in batches for mark in batch)
        text = "a batch has the images of an earlier update, in the same order: are batches kept, or is their order?"
        name, found = "batches that come again", "one" if again else "none"
        return [Check("data", name, "none", found, not again, text, "warning")] if several else []

    def _brightness(self, looks: list[Look]) -> list[Check]:
        """Whether darker or brighter images have more noise: noise levels are drawn for each image, whatever it shows."""
        for one in looks:
            if len(one.x) >= FEWEST and constant(one.mixture.of_noise, 1e-5) is None:
                means, levels = one.mixture.clean.mean(1), one.mixture.of_noise / one.mixture.of_clean.clamp(min=1e-12)
                ranks = [values.argsort().argsort().double() - (len(means) - 1) / 2 for values in (means, levels)]
                self._ranked.append((float((ranks[0] * ranks[1]).sum() / ranks[0].square().sum()), len(means)))
        if sum(count for _, count in self._ranked) < MANY_IMAGES:
            return []
        # A rank correlation of n has the variance 1 / (n - 1) by chance.
        sure = sum(share * (count - 1) ** 0.5 for share, count in self._ranked) / len(self._ranked) ** 0.5
        share = sum(share for share, _ in self._ranked) / len(self._ranked)
        text = f"the noise of the images goes with their brightness (rank correlation {share:.2g}): were both sorted?"
        name, found = "noise beside brightness", f"rank correlation {share:.2g}"
        return [Check("timestep", name, "independent", found, abs(sure) < SURE, text, "warning")]

    def end(self, images: int) -> list[Check]:
        """`images`: of the dataset; 0: not known."""
        count, different = self._marks.total(), len(self._marks)
        if count < MANY_IMAGES or not images:
            return []
        few = different <= FEW * min(count, images) / 2
        text = f"{count} images that were looked at are {different} different ones, and the dataset has {images}: "
        text += "which does the sampler leave out?"
        return [Check("data", "different images", "most of them", f"{different} of {count}", not few, text, "warning")]

    def _span(self, levels: Levels) -> list[Check]:
        """Of a path from image to noise."""
        if levels.kind != "flow":
            return []
        self._shares.append(levels.b.cpu())
        shares = torch.cat(self._shares)
        if len(shares) < MANY_SHARES or (len(levels.b) > 1 and constant(levels.b) is not None):
            return []
        low, high = (float(end) for end in shares.aminmax())
        text = (
            f"{len(shares)} images had shares of noise from {low:.2g} to {high:.2g} alone: the rest of the path is not trained"
        )
        name, found = "shares of noise on the path", f"{low:.2g} to {high:.2g}"
        return [Check("timestep", name, "from near 0 to near 1", found, high - low > SHORT_SPAN, text, "warning")]

    def _one_batch(self, *parts: torch.Tensor) -> list[Check]:
        """Of the first three looks, at updates 2, 3 and 5: a shuffled set of one batch has another order each time."""
        checks = []
        if len(parts[0]) > 1:
            one = bool((parts[0] == parts[0][:1]).all()) and bool(parts[0].any())
            name, text = "images of a batch", "all images of the batch are one and the same"
            checks = [Check("data", name, "different ones", "the same" if one else "others", not one, text, "warning")]
        levels = parts[1]
        if len(levels) >= 8 and constant(levels, 1e-5) is None:
            share = _share_at_an_end(levels)
            self._ended.append(share > MOST_ALIKE)
            cut = self._ended[-1] and len(self._ended) >= BATCHES and sum(self._ended) > len(self._ended) / 2
            text = f"{share:.0%} of the images have the same noise level, the others differ: are the levels cut off at an end?"
            name, found = "share of images of the first or last noise level", f"{share:.0%}"
            checks.append(Check("timestep", name, "a small one", found, not cut, text, "warning"))
        if len(self._batches) == BATCHES:
            return checks
        self._batches.append(tuple(part.detach().to("cpu", copy=True) for part in parts))
        if len(self._batches) < BATCHES:
            return checks
        same_images, same_levels = (
            all(one.shape == of[0].shape and torch.allclose(one, of[0], 0, 1e-6) for one in of) for of in zip(*self._batches)
        )
        several = len(levels) > 1 and constant(levels, 1e-5) is None  # a denoiser may have one level
        same_levels &= several
        sets = [of_noise.sort().values for _, of_noise in self._batches]
        whole = len(levels) == self._num_steps  # each step once
        alike = all(one.shape == sets[0].shape and torch.allclose(one, sets[0], 0, 1e-6) for one in sets)
        same_set = several and not whole and alike
        text = f"{BATCHES} updates had the same images in the same order: is one batch used again and again?"
        name, found = "batches of different updates", "the same" if same_images else "others"
        checks.append(Check("data", name, "different images", found, not same_images, text, "warning"))
        text = f"{BATCHES} updates had the same noise levels in the same order: are they drawn once, or with one seed?"
        if same_set and not same_levels:
            text = f"{BATCHES} updates had the same {len(levels)} noise levels in another order: all others are never trained"
        name, found = "noise levels of different updates", "the same" if same_set else "others"
        return [*checks, Check("timestep", name, "others", found, not same_set, text, "warning")]

    def _loss(
        self, levels: Levels, table: torch.Tensor | None, prediction: str | None, micro_steps: int, kind: str, loss_scale: float
    ) -> list[Check]:
        """`kind`: of the preconditioning, where there is one."""
        coefficients = None
        if table is not None and all(look.noised_with is not None for look in levels.looks):
            known = torch.cat([look.noised_with for look in levels.looks]).long()  # type: ignore[misc]
            values = table.to(levels.a)[known.clamp(0, len(table) - 1)]
            coefficients = values.sqrt(), (1 - values).sqrt()
        target = identify_target(levels, _order(prediction, levels), coefficients)
        if target is None:
            return [not_observed("target", "target of the loss", "not declared", "no finite gradient reached the output")]
        checks = [check_target(target, prediction, levels)]
        if target.name == "epsilon" and table is not None and float(table[-1]) <= NO_SIGNAL:
            text = "the last step of the schedule has no signal, and the loss asks for the noise, which is the input there"
            wanted = "v or the image, for a schedule of zero terminal SNR"
            checks.append(Check("target", "target of the last step", wanted, "the noise", False, text, "warning"))
        by = "" if target.loss.startswith("squared error") or not target.name else f" by its {target.loss}"
        self._words["target"] = target.name + by
        if target.name and (masked := check_masked(levels)) is not None:
            checks.append(masked)
        if target.of_pixels is not None and (of_holes := check_holes(levels, target.of_pixels)) is not None:
            checks.append(of_holes)
        if target.scale is None:
            return checks
        weights = target.scale * levels.pixels * levels.sizes.to(target.scale) * micro_steps / 2
        weighting = identify_weights(weights, levels, target.name, micro_steps)
        if not weighting.name and weighting.healthy and len(levels.looks) > 1:  # [B, 1] times [B] is the same in each of them
            weighting = self._of_each(weights, levels, target.name, micro_steps) or weighting
        squared = target.loss.startswith("squared error")
        if squared and weighting.healthy and weighting.name == "1" and target.name == "sample" and kind.startswith("EDM"):
            weighting.healthy, weighting.severity = False, "warning"
            weighting.message = (
                f"weight 1 on the denoised image: the network is preconditioned as {kind}, so that errors of the raw network "
                "count c_out^2, almost nothing at low noise; EDM's weight is 1 / c_out^2"
            )
        if loss_scale == 1 and abs(weighting.factor - 1) < SMALL and levels.looks[0].output.dtype is torch.float16:
            text = "the loss of an fp16 network is not scaled: gradients below 6e-8 become 0 (torch has a GradScaler for it)"
            checks.append(Check("gradient", "scale of the loss", "above 1, in fp16", "1", False, text, "warning"))
        gamma = f" with gamma {weighting.gamma:g}" if weighting.gamma else ""
        if gamma or "gamma" not in self._words.get("weight", ""):  # a batch without high SNRs shows none
            self._words["weight"] = (weighting.name or "a function of their own") + gamma
        if not weighting.healthy and weighting.name.startswith("1 / (1 - s)^2") and has_wrong_velocity(levels):
            text = "the loss compares velocities that are not the path's: x_0 - x is divided by 1 - s, and s is that of noise"
            name, wanted, found = "velocity of the path", "(x_0 - x) / s", "(x_0 - x) / (1 - s)"
            return [*checks, Check("target", name, wanted, found, False, f"{text}; is the path the other way round?")]
        of_noise = squared and table is not None and target.name == "epsilon"
        bound = check_bound(levels, table, weights / micro_steps) if of_noise else None
        return [*checks, check_weights(weighting, weights), *([] if bound is None else [bound])]

    def _of_each(self, weights: torch.Tensor, levels: Levels, target: str, micro_steps: int) -> Weighting | None:
        """What is wrong with the weights in each micro step alone."""
        parts = weights.split([len(look.x) for look in levels.looks])
        found = [identify_weights(part, Levels([look]), target, micro_steps) for part, look in zip(parts, levels.looks)]
        return found[0] if all(each.name == "1" and not each.healthy for each in found) else None

    # ---- the noise level

    def _levels(
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
                    partly = [self._partly(times[0], count, facts)] if times else []
                    return [*self._steps(levels, looks, places, *found), *partly], found[1], prediction
        if (changed := self._changed(levels, levels.told if drawn is None else drawn)) is not None:
            return [changed], None, prediction
        if drawn is not None or _whole(levels.told):
            if (place := anywhere(levels, steps)) is not None:
                name, table, places = place
                return self._steps(levels, looks, places.double(), name, table), table, prediction
            if broken := self._broken(levels, looks, levels.told if drawn is None else drawn, steps):
                return broken, None, prediction
            for places in (levels.told, drawn):
                if places is not None and len(places) == len(levels.a) and (text := half_matching(levels, places, steps)):
                    name, observed = "coefficients of image and noise", f"a {span(levels.a)}, b {span(levels.b)}"
                    return [Check("input", name, "both of one schedule", observed, False, text)], None, prediction
        if drawn is not None and (moved := _told_beside_drawn(levels, drawn)) is not None:
            return [moved], None, prediction
        told, words = check_told(levels)
        known = "process of an unknown kind" if levels.kind == "other" else f"{levels.kind} path"
        self._words["schedule"] = known + (f", told {words}" if words else "")
        return [told, check_mixture(levels)], None, prediction

    def _changed(self, levels: Levels, places: torch.Tensor | None) -> Check | None:
        """Of timesteps [B] that had the coefficients of a known schedule in earlier looks."""
        if self._matched is None or places is None or len(places) != len(levels.a) or not _whole(places):
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
                noise = (_whole_noise(mixture, one.x) if one.x.numel() <= 1 << 18 else noise).to(noise)
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

    def _add_levels(self, table: torch.Tensor, looks: list[Look]) -> None:
        """Of steps that were drawn as whole numbers: those that the images have."""
        drawn = [one.noised_with if one.noised_with is not None else one.times.values for one in looks if one.times]
        if self._level_pool is None or self._num_steps != len(table):
            self._num_steps = len(table)
            self._level_pool = Pool(declared_step(1, Table("", len(table), False, "epsilon", None, values=table)))
        if len(drawn) == len(looks):
            for levels in drawn:
                self._level_pool.add_levels(levels)

    def _noise(self, looks: list[Look]) -> list[Check]:
        for one in looks:
            noise = _without_pairs(one.mixture.noise_tensor, one.mixture.clean_tensor)
            if one.mixture.offset:
                noise = noise - noise.flatten(2).mean(2)[:, :, None, None]
            if noise.ndim < 4:  # signals: [B, T], [B, C, T]
                noise = noise.reshape(len(noise), -1, 1, noise.shape[-1])
            if noise.ndim > 4:  # films: [B, C, F, H, W]
                noise = noise.flatten(1, -3)
            self._noise_pool.add_noise(noise)
        checks = self._noise_pool.checks()
        if checks and any(one.mixture.offset for one in looks):
            text = f"one number for each channel is added to the noise (offset noise of {looks[0].mixture.offset:.3g})"
            fine = replace(checks[0], healthy=None, observed=f"{checks[0].observed}; offset noise")
            severity = "info" if looks[0].mixture.offset < MOST_OFFSET else "warning"
            checks = [fine, Check("noise", "offset noise", "none", f"{looks[0].mixture.offset:.3g}", False, text, severity)]
            self._words["noise"] = f"offset noise of {looks[0].mixture.offset:.3g}"
        if any(one.mixture.moved for one in looks):
            text = "one number for each channel is added to the noise, and these are not drawn from a normal distribution"
            checks.append(Check("noise", "offset of the noise", "none, or normal", "of another kind", False, text, "warning"))
        if looks[0].mixture.extra:
            text = f"the network's input has {looks[0].mixture.extra:.3g} times more noise than its target (input perturbation)"
            observed = f"{looks[0].mixture.extra:.3g}"
            checks.append(Check("noise", "input perturbation", "none", observed, False, text, "info"))
            self._words["perturbation"] = f"input perturbation of {looks[0].mixture.extra:.3g}"
        if not looks[0].mixture.drawn:
            checks.append(not_observed("noise", "where it is drawn", "by torch, in this update", "it was not drawn by torch"))
        if self._level_pool is not None:
            checks += [self._distribution(check, looks) for check in self._level_pool.checks()]
        return checks

    def _distribution(self, check: Check, looks: list[Look]) -> Check:
        times = looks[0].times
        steps = self._num_steps
        if check.healthy is False and (times is None or not times.highest or (times.lowest, times.highest) == (0, steps)):
            return replace(check, severity="info")  # drawn in another way on purpose
        return replace(check, severity="warning") if check.healthy is False else check


def _told_beside_drawn(levels: Levels, drawn: torch.Tensor) -> Check | None:
    """Of steps of a schedule that is not known: whether the network gets them, [B], and not others at a fixed distance. A
    script that counts from 1 may be one beside."""
    told = levels.told
    if told is None or len(drawn) != len(told) or not _whole(told) or not is_monotone(levels.b, drawn) or len(drawn) < 4:
        return None
    apart = (told - drawn.to(told)).mode().values
    share = float((told - drawn.to(told) == apart).double().mean())
    if abs(float(apart)) < 2 or share < MOST_MOVED:
        return None
    text = f"the network gets timesteps that are {float(apart):+g} beside those that were drawn"
    return Check("timestep", "timestep that the network gets", "the one that was drawn", f"{float(apart):+g}", False, text)


def _ends(table: torch.Tensor, images: bool) -> list[Check]:
    """Whether a schedule, alphas_cumprod [T], goes from the image to noise, and uses its steps for that. Of signals, which may
    follow from what the network is told beside them, some published schedules do not."""
    severity = "warning" if images else "info"
    left, lost = float(table[-1]), float((table < NOTHING_LEFT).double().mean())
    text = (
        f"at the last step {left**0.5:.0%} of the image are still there, and sampling starts from noise alone, which the "
        "network never sees: are the betas too small, or the steps too few?"
    )
    name, found = "image that is left at the last step", f"{left**0.5:.2g}"
    checks = [Check("input", name, "hardly any", found, left < MOST_LEFT, text, severity)]
    text = f"{lost:.0%} of the steps have noise alone, from which nothing is learned: are the betas too large?"
    name = "share of the steps that have noise alone"
    return [*checks, Check("input", name, "a small one", f"{lost:.0%}", lost < MOST_LOST, text, "warning")]


def _share_at_an_end(levels: torch.Tensor) -> float:
    """The share of `levels` [B] that are the smallest, or the largest, of all; 0 where others are alike, too: of few levels, or
    of one for several images, that says nothing."""
    at_ends = [(levels - end).abs() < 1e-6 for end in levels.aminmax()]
    alike = max(at_ends, key=lambda those: int(those.sum()))
    others = levels[~alike].sort().values
    return float(alike.double().mean()) if len(others) > 1 and bool((others.diff() >= 1e-6).all()) else 0.0


def _looks(update: Update, loss_scale: float) -> list[Look]:
    found = []
    for step in update.micro_steps:
        call = step.calls.get("network")
        if call is None or not call.outputs or not call.inputs or not isinstance(call.inputs[0], torch.Tensor):
            continue
        seen, noisings = step.batch.get("seen") or Seen(), step.batch.get("noising") or []
        mixture = None
        for x in images_in(call.inputs[0], call.outputs[0].shape[1]):
            noising = next((n for n in reversed(noisings) if n.clean.shape == x.shape), None)
            if (mixture := find(x, seen, noising)) is not None:
                break
        if mixture is None:
            continue
        levels = mixture.of_noise / mixture.of_clean.clamp(min=1e-12)
        step.batch |= {"noise": mixture.noise_tensor, "sample_numbers": mixture.clean_tensor, "noise_levels": levels}
        gradient, told = call.gradients.get(0), number_told(call.inputs, step)
        gradient = gradient / loss_scale if gradient is not None else None
        used = noising.timesteps.reshape(-1).to(x.device).double().expand(len(x)) if noising is not None else None
        moments = [t.double().reshape(-1) for t in (*seen.moments, *(d.tensor for d in seen.draws)) if t.numel() == len(x)]
        silent = any(tensor.shape == x.shape and not tensor.any() for tensor in seen.tensors.values())
        times = _times(seen, told, len(x))
        others = [t for t in list(seen.tensors.values())[:MOST_OTHERS] if t.shape == x.shape and t.device == x.device]
        beside = [
            t for t in tree_leaves(call.inputs) if isinstance(t, torch.Tensor) and t.shape[2:] == x.shape[2:] and t.ndim > 2
        ]
        joined = any(t.shape[1] > x.shape[1] or bool(((t == 0) | (t == 1)).all()) for t in beside)  # or a mask of its own
        to_layer = told is not None and any(v.shape == (len(x), 1) and _are(v, told) for v in step.batch.get("vectors") or [])
        about = (times, used, moments, len(x), silent, others, to_layer, joined)
        found.append(Look(x, told, call.outputs[0], gradient, mixture, *about))
    return found


def _marks(images: torch.Tensor) -> list[tuple[float, float]]:
    """What tells images, float64 [B, N], from each other, and mirrored ones not from themselves."""
    rows = torch.stack([images.mean(1), images.square().mean(1)], 1).cpu()
    return [(round(mean, 6), round(square, 6)) for mean, square in rows.tolist()]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _are(vector: torch.Tensor, told: torch.Tensor) -> bool:
    """Whether a layer's input [B, 1] is what the network is told, [B], to rounding."""
    return torch.allclose(vector[:, 0].double().to(told.device), told, 1e-2, 1e-6)


def _without_silence(looks: list[Look]) -> list[Look]:
    """Without the images that are 0 everywhere: how much of them an input holds cannot be known."""
    found = []
    for one in looks:
        kept, mixture = one.mixture.clean.norm(dim=1) > 0, one.mixture
        if bool(kept.all()):
            found.append(one)
        if bool(kept.all()) or not bool(kept.any()):
            continue
        names = ("clean", "noise", "of_clean", "of_noise", "residual", "clean_tensor", "noise_tensor")
        mixture = replace(mixture, **{name: getattr(mixture, name)[kept] for name in names})
        whole = {name: getattr(one, name) for name in ("x", "told", "output", "gradient", "noised_with")}
        parts: dict[str, Any] = {name: None if value is None else value[kept.to(value.device)] for name, value in whole.items()}
        times = one.times and replace(one.times, values=one.times.values.reshape(-1)[kept.to(one.times.values.device)])
        parts |= {name: [value[kept.to(value.device)] for value in getattr(one, name)] for name in ("moments", "others")}
        found.append(replace(one, mixture=mixture, times=times, **parts))
    return found


def _repeated(images: list[torch.Tensor]) -> list[Check]:
    """`images`: of each micro step."""
    if len(images) < 2:
        return []
    same = any(a.shape == b.shape and torch.equal(a, b) for a, b in pairwise(images))
    text = "micro steps of an update see the same images: its batch is smaller than it should be"
    found = "the same" if same else "others"
    return [Check("data", "images of the micro steps", "other ones in each", found, not same, text, "warning")]


def _wrapped_around(update: Update) -> list[Check]:
    """Of images that are kept in bytes."""
    overflowed = any((step.batch.get("seen") or Seen()).overflowed for step in update.micro_steps)
    text = "arithmetic of uint8 images leaves 0 to 255 and begins anew at the other end: dark pixels become bright ones"
    found = "beyond it" if overflowed else "within it"
    known = any((step.batch.get("seen") or Seen()).bytes_seen for step in update.micro_steps)
    name, wanted = "arithmetic of uint8 images", "within 0 to 255"
    return [Check("data", name, wanted, found, not overflowed, text, "warning")] if known else []


def _channels_reversed(update: Update, looks: list[Look]) -> list[Check]:
    """Whether some images were flipped along their channels; all of them are where BGR becomes RGB."""
    count = sum((step.batch.get("seen") or Seen()).reversed for step in update.micro_steps)
    if not count:
        return []
    images = sum(len(one.x) for one in looks)
    text = f"{count} images of a batch were flipped along their channels, which exchanges red and blue: is it the wrong axis?"
    found = f"in {count} of {images}"
    return [Check("data", "channels in reverse order", "in none or in all", found, count >= images, text, "warning")]


def _scheduler(update: Update, facts: Facts) -> Any:
    """The noise scheduler that the script calls, or has told."""
    for step in update.micro_steps:
        for noising in step.batch.get("noising") or []:
            return noising.scheduler
    return facts.noise_schedulers[0] if len(facts.noise_schedulers) == 1 else None


def _unit(look: Look, levels: Levels, kind: str) -> float:
    """The spread that the process asks images for. `kind`: of the preconditioning, where there is one."""
    told = re.search(r"sigma_data ([\d.e+-]+)", kind)
    sigma_data = float(told[1]) if told else levels.sigma_data if levels.kind == "preconditioned" else None
    return float(look.mixture.noise_tensor.detach().float().std()) * (sigma_data or 1.0) or 1.0


def _data(
    look: Look,
    update: Update,
    facts: Facts,
    encoded: tuple[float, float] | None = None,
    any_range: bool = False,
    unit: float = 1.0,
) -> Check:
    """`any_range`: no process asks for images around 0; `unit`: see `check_range`."""
    images = look.mixture.clean_tensor
    config = getattr(facts.autoencoder, "config", None)
    config = config if isinstance(config, Mapping) else {}  # else the network is one of the script's own
    if encoded is not None and facts.autoencoder is not None and not is_signed(*encoded):
        return check_encoded(*encoded)
    if encoded is not None and facts.autoencoder is not None:
        return check_latents(images, update.micro_steps[0].batch.get("seen") or Seen(), config)
    if facts.autoencoder is not None:
        return check_spread(images, config)
    check = check_range(images, unit)
    return replace(check, severity="info") if any_range and check.severity == "warning" else check


def _raw_network(update: Update, levels: Levels) -> tuple[list[Check], str]:
    """Where the denoiser is made around a network of its own: (the checks, what kind of preconditioning it is)."""
    calls = update.micro_steps[0].calls if update.micro_steps else {}
    outer, inner = calls.get("network"), calls.get("raw")
    if outer is None or inner is None or not outer.outputs or not inner.outputs:
        return [], ""
    if not isinstance(inner.inputs[0], torch.Tensor):
        return [], ""
    return check_preconditioning(levels, outer.inputs[0], outer.outputs[0], inner.inputs[0], inner.outputs[0])


def _without_pairs(noise: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    """`noise` [B, ...] without that of pairs that come again in the batch, as those of an optimal transport do, which are drawn
    from all; and without the negative of another one, which is noise that is drawn in opposites."""
    parts = [tensor.detach().double().reshape(len(tensor), -1) for tensor in (noise, images)]
    sums, squares = ([part.pow(power).sum(1).tolist() for part in parts] for power in (1, 2))
    firsts: dict[tuple, int] = {}
    for place, (total, image, square, other) in enumerate(zip(*sums, *squares)):
        opposite = next((n for n in firsts.values() if sums[0][n] == -total and squares[0][n] == square and total), None)
        if opposite is None or not torch.equal(noise[opposite], -noise[place]):
            firsts.setdefault((total, image, square, other), place)
    kept = list(firsts.values())
    return noise if len(kept) == len(noise) else noise[kept]


def _whole_noise(mixture: Mixture, x: torch.Tensor) -> torch.Tensor:
    """The noise that the input has, where it has more than one."""
    values = flat(x) - mixture.of_clean[:, None] * mixture.clean
    return (values / mixture.of_noise.clamp(min=1e-12)[:, None]).reshape(x.shape)


def _whole(told: torch.Tensor | None) -> bool:
    return told is not None and bool((told == told.round()).all()) and float(told.max()) > 1


def _told_beside(update: Update) -> list[Check]:
    """Whether a network that is trained beside another gets the noise level that the other gets."""
    checks = []
    for step in update.micro_steps:
        call, beside = step.calls.get("network"), step.batch.get("beside") or ()
        if call is None or not beside or not begins_alike(beside, call.inputs):
            continue
        image, given = call.inputs[0], beside[0]  # a reference network gets another image
        if not torch.equal(image, given.to(image)):
            continue
        told, other = number_told(call.inputs, step), number_told(beside, step)
        if told is not None and other is not None:
            same = torch.equal(told, other)
            text = "the network that is trained gets other noise levels than the one that it is beside"
            name, wanted = "noise level that the network beside gets", "that of the network"
            checks.append(Check("timestep", name, wanted, "the same" if same else "others", same, text))
    return checks[:1]


def _embedded(update: Update) -> list[Check]:
    """Of the first micro step whose embedding of the noise level is known."""
    for step in update.micro_steps:
        told = number_told(step.calls["network"].inputs, step) if "network" in step.calls else None
        if told is not None and (check := check_embedded(told, step.batch.get("vectors") or [])) is not None:
            return [check]
    return []


def _times(seen: Seen, told: torch.Tensor | None, batch: int) -> Times | None:
    """Of the whole numbers drawn for the batch: those that the network gets, else those of the widest range."""
    drawn = [times for times in seen.times if times.values.numel() == batch]
    for times in drawn:
        if told is not None and torch.equal(times.values.double().cpu(), told.cpu()):
            return times
    return max(drawn, key=lambda times: times.highest, default=None)


def _order(declared: str | None, levels: Levels) -> list[str]:
    names = ["epsilon", "v_prediction", "sample", "velocity", "backward", "raw", "score"]
    if levels.kind == "flow":
        names = ["velocity", "backward", *names[:3]]
    if levels.kind == "preconditioned":
        names = ["raw", *names]
    if levels.kind == "variance-preserving" and not told_as_edm(levels):
        names.remove("raw")  # with a sigma_data of 1 it is v of the other sign
    return list(dict.fromkeys([declared, *names] if declared else names))


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


def declared_step(micro_steps: int, noising: Any = None, limit: float | None = 0.0) -> Declared:
    """For the audit's checks, of what they are to be told. `limit`: of the gradient's norm."""
    optimizer = DeclaredOptimizer("", 0.0, 0.0, 0.0, 0.0, 0.0, lambda step: 0.0, limit)
    return Declared(noising, None, optimizer, micro_steps, None)
