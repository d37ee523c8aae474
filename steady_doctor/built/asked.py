"""How a run's sampler is asked: by its own settings, in so many steps as tell everything and take no time."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from steady_doctor.built.sampler import Process, sampler
from steady_doctor.declare.processes import DDPM, EDM2, Flow
from steady_doctor.found import Found

MOST_STEPS = 25  # what a step does does not depend on their number
FEWEST_LEVELS = 10  # to step along
SIDE = 8  # pixels of the known image

Call = Callable[[nn.Module, int], Tensor]  # see `sampler`


@dataclass(frozen=True)
class Sampling:
    """`settings`: of the scheduler's config; `adds_noise`: whether its steps do; `steps`: in which the run samples."""

    process: DDPM | EDM2 | Flow
    settings: Mapping[str, Any]
    channels: int
    adds_noise: bool
    steps: int


def asked(run: Sampling, calls: Callable[[int], Call | None], update: int) -> Iterable[Found]:
    """What the sampler makes of a network that knows the answer. `calls`: the sampler with that number of steps; None where it
    cannot make so many."""
    process, settings = run.process, run.settings
    if isinstance(process, EDM2):
        known, zero_snr = Process(sigma_data=process.sigma_data), False
    elif isinstance(process, Flow):
        known, zero_snr = Process(prediction_type=process.prediction_type, flow=True), False
    elif process.possible < FEWEST_LEVELS:
        return []
    else:
        known = Process(process.alphas_cumprod, process.prediction_type)
        zero_snr = float(process.alphas_cumprod[-1]) == 0.0
    # diffusers spaces trailing timesteps unevenly where their number does not divide that of the levels.
    counts = [n for n in range(min(run.steps, MOST_STEPS), 0, -1) if not zero_snr or process.possible % n == 0]
    call = next(call for call in map(calls, counts) if call is not None)
    clips = settings.get("clip_sample", False) and not settings["thresholding"] and settings["clip_sample_range"] == 1.0
    clips = clips and not (zero_snr and run.adds_noise)
    return sampler(call, known, (run.channels, SIDE, SIDE), update, adds_noise=run.adds_noise, clips=clips)
