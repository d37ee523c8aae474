"""EDM: preconditioning, and the deterministic sampler of second order as a diffusers scheduler.

After Karras et al. 2022, "Elucidating the design space of diffusion-based generative models" (arXiv 2206.00364). diffusers'
own EDM schedulers (Euler, DPM-Solver++) take the same network and the same config, and can stand in its place.
One file that imports torch and diffusers alone, because an exported pipeline carries it.
"""

from typing import Any

import torch
from diffusers import ConfigMixin, SchedulerMixin
from diffusers.configuration_utils import register_to_config
from diffusers.schedulers.scheduling_edm_euler import EDMEulerSchedulerOutput


def preconditioning(sigma: torch.Tensor, sigma_data: float) -> tuple[torch.Tensor, ...]:
    """(c_skip, c_out, c_in, c_noise) of D(x; sigma) = c_skip x + c_out F(c_in x; c_noise), in the shape of `sigma` (eq. 7,
    table 1)."""
    variance = sigma**2 + sigma_data**2
    return sigma_data**2 / variance, sigma * sigma_data / variance.sqrt(), 1.0 / variance.sqrt(), sigma.log() / 4.0


def noise_levels(count: int, sigma_min: float, sigma_max: float, rho: float) -> torch.Tensor:
    """float64 [count + 1], from `sigma_max` down to `sigma_min`, then 0; a larger `rho` puts more near the end (eq. 5)."""
    ramp = torch.linspace(0.0, 1.0, count, dtype=torch.float64)
    first, last = sigma_max ** (1.0 / rho), sigma_min ** (1.0 / rho)
    levels = (first + ramp * (last - first)) ** rho
    return torch.cat([levels, levels.new_zeros(1)])


class EDMHeunScheduler(SchedulerMixin, ConfigMixin):
    """Heun's method on dx / dsigma = (x - D(x; sigma)) / sigma (algorithm 1, without churn), in float64.

    n steps ask the network 2 n - 1 times: the last step, to sigma = 0, is one of Euler. `timesteps` holds c_noise of each of
    these evaluations, to be made in order. The settings mean what they mean in diffusers' EDMEulerScheduler.
    """

    order = 2

    @register_to_config
    def __init__(
        self,
        sigma_min: float = 0.002,
        sigma_max: float = 80.0,
        sigma_data: float = 0.5,
        num_train_timesteps: int = 1000,
        rho: float = 7.0,
    ):
        self.set_timesteps(32)

    @property
    def init_noise_sigma(self) -> float:
        """Standard deviation of the noise that the sampling starts from."""
        return self.config.sigma_max

    def set_timesteps(self, num_inference_steps: int, device: torch.device | str | None = None) -> None:
        """Starts a chain. The noise levels stay on the CPU, so that reading them never waits for a device."""
        config = self.config
        self.num_inference_steps = num_inference_steps
        self.sigmas = noise_levels(num_inference_steps, config.sigma_min, config.sigma_max, config.rho)
        # sigma_0, sigma_1 twice, sigma_2 twice ...: where the first half of a step ends, its second half looks.
        self._evaluated = self.sigmas[:-1].repeat_interleave(2)[1:]
        self.timesteps = preconditioning(self._evaluated, config.sigma_data)[3].float().to(device)
        self._done = 0
        self._start: Any = None  # (x, its slope) at the beginning of a step that is half done

    def scale_model_input(self, sample: torch.Tensor, timestep: torch.Tensor | float) -> torch.Tensor:
        """c_in x: what the network is to see."""
        return sample * preconditioning(self._evaluated[self._done], self.config.sigma_data)[2].item()

    def step(
        self,
        model_output: torch.Tensor,
        timestep: torch.Tensor | float,
        sample: torch.Tensor,
        generator: torch.Generator | None = None,
        return_dict: bool = True,
    ) -> EDMEulerSchedulerOutput | tuple[torch.Tensor, torch.Tensor]:
        """Takes F of the next evaluation and x, [B, C, H, W]; gives x of the one after it, and D(x; sigma). `timestep` and
        `generator` are not needed: the evaluations come in order, and nothing is random."""
        sigma = self._evaluated[self._done]
        c_skip, c_out, _, _ = (c.item() for c in preconditioning(sigma, self.config.sigma_data))
        wide = torch.float32 if sample.device.type == "mps" else torch.float64
        x = sample.to(wide)
        denoised = c_skip * x + c_out * model_output.to(wide)
        slope = (x - denoised) / sigma.item()
        step, second_half = divmod(self._done, 2)
        change = (self.sigmas[step + 1] - self.sigmas[step]).item()
        if second_half:
            start, slope_at_start = self._start
            x = start + change * (slope_at_start + slope) / 2.0
        else:
            self._start = x, slope
            x = x + change * slope
        self._done += 1
        x, denoised = x.to(sample.dtype), denoised.to(sample.dtype)
        return EDMEulerSchedulerOutput(x, denoised) if return_dict else (x, denoised)

    def __len__(self) -> int:
        return self.config.num_train_timesteps
