"""What a script draws at random: its noise, and its noise levels."""

from dataclasses import replace

import torch

from utils.diagnostics.audit.pooled import Pool
from utils.diagnostics.audit.verdict import Check, not_observed
from utils.diagnostics.watching.levels import Look, Table, declared_step

MOST_OFFSET = 0.5  # of the noise; 0.05 to 0.15 is usual


class Drawing:
    """Of all looks.

    Args:
        words: gets what the script is found to do.
    """

    def __init__(self, words: dict[str, str]):
        self._words = words
        self._noise_pool = Pool(declared_step(1))
        self._level_pool: Pool | None = None
        self.num_steps = 0  # of the noise schedule

    def add_levels(self, table: torch.Tensor, looks: list[Look]) -> None:
        """Of steps that were drawn as whole numbers: those that the images have."""
        drawn = [one.noised_with if one.noised_with is not None else one.times.values for one in looks if one.times]
        if self._level_pool is None or self.num_steps != len(table):
            self.num_steps = len(table)
            self._level_pool = Pool(declared_step(1, Table("", len(table), False, "epsilon", None, values=table)))
        if len(drawn) == len(looks):
            for levels in drawn:
                self._level_pool.add_levels(levels)

    def look(self, looks: list[Look]) -> list[Check]:
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
        steps = self.num_steps
        used = [one.noised_with if one.noised_with is not None else one.told for one in looks]
        chosen = times is not None and any(float(one.max()) >= times.highest for one in used if one is not None)
        known = times is not None and times.highest and not chosen  # else it is the place in a list of steps that is drawn
        of_all = times is not None and (times.lowest, times.highest) == (0, steps)
        if check.healthy is False and (not known or of_all):
            return replace(check, severity="info")  # drawn in another way on purpose
        return replace(check, severity="warning") if check.healthy is False else check


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
