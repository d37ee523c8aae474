"""Is what the network is shown an image with independent standard normal noise, as much of it as the timestep says?

Told from the clean images x_0 and the noisy ones alone: x_t = a x_0 + b eps with a^2 + b^2 = 1 (Ho et al. 2020, eq. 4). The
least squares gain <x_t, x_0> / <x_0, x_0> is an estimate of a, and what it leaves of x_t is b eps, whatever the schedule.
"""

import torch

# Below this |x_0|^2 the gain, whose standard error is b / |x_0|, is off by more than a tenth of b: gray and empty images.
MIN_POWER = 100.0
FIGURES = ("variance", "kurtosis", "between_images", "within_images", "repeated", "timestep_order", "timestep_mean")


@torch.no_grad()
def noise_figures(
    clean_images: torch.Tensor, noisy_images: torch.Tensor, timesteps: torch.Tensor, earlier: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the FIGURES, float32 on the device; the noise of the first image, for the next call's `earlier`).

    Both images are [B, C, H, W]; `timesteps`, [B], are those that the network is told.

        variance: of eps; 1. Over the images that are more noise than image: in others an error of the gain is mistaken for
            noise. NaN where there are none, or none with an |x_0|^2 of MIN_POWER
        kurtosis: its fourth moment over the square of the second; 3 for a Gaussian, 1.8 for a uniform distribution
        between_images: mean correlation of two images' noise; 0, or 1 where a batch shares it. NaN for a single image
        within_images: the largest correlation, in size, of neighbors along height, width or channels; 0
        repeated: correlation of the first image's noise with `earlier`; 0, or 1 where the same is drawn again. NaN without it
        timestep_order: rank correlation of the timestep with the share of noise; nearly 1. NaN below four images
            of MIN_POWER, or where all are told the same
        timestep_mean: of the timesteps told
    """
    clean, noisy = clean_images.detach().float().flatten(1), noisy_images.detach().float().flatten(1)
    brightness = clean.square().sum(1)
    gains = (noisy * clean).sum(1) / brightness.clamp(min=1e-12)
    rest = noisy - gains[:, None] * clean
    power = rest.square().mean(1)
    noise = rest / power.sqrt().clamp(min=1e-12)[:, None]  # of mean square 1, image by image
    unknown = noise.new_full((), torch.nan)  # new_tensor would copy it to the device, and wait
    count = len(noise)
    squares = gains.square() - power / brightness.clamp(min=1e-12)  # of a; that of an estimate has its variance
    known = brightness >= MIN_POWER
    mostly_noise = known & (squares < 0.5)  # each adds more than a half below: no ratio to next to nothing
    variance = (power * mostly_noise).sum() / ((1 - squares) * mostly_noise).sum()  # 0 / 0 is NaN
    kurtosis = noise.pow(4).mean()
    between = (count * noise.mean(0).square().mean() - 1) / (count - 1) if count > 1 else unknown
    shaped = noise.view(clean_images.shape)
    pairs = [(shaped.narrow(d, 0, n - 1), shaped.narrow(d, 1, n - 1)) for d, n in enumerate(shaped.shape) if d and n > 1]
    within = torch.stack([(one * other).mean() for one, other in pairs]).abs().max()
    repeated = unknown if earlier is None or earlier.shape != noise[0].shape else (noise[0] * earlier).mean()
    order = _rank_correlation(timesteps.flatten().float(), -gains, known).where(known.sum() >= 4, torch.nan)
    return torch.stack([variance, kurtosis, between, within, repeated, order, timesteps.float().mean()]), noise[0]


def _rank_correlation(first: torch.Tensor, second: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Spearman's over the `known`; equal values take ranks in any order, but where all of `first` are equal it is NaN."""
    first, second = (values.where(known, torch.inf) for values in (first, second))  # the others come last in both
    ranks = torch.stack([values.argsort().argsort().float() for values in (first, second)])
    ranks = (ranks - (ranks * known).sum(1, keepdim=True) / known.sum()) * known
    correlation = (ranks[0] * ranks[1]).sum() / ranks.square().sum(1).prod().sqrt()
    return correlation.where(first.min() < first.where(known, -torch.inf).max(), torch.nan)
