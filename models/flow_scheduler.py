"""Flow matching on straight lines: x = (1 - sigma) y + sigma n, and its samplers as diffusers schedulers.

After Lipman et al. 2023 (arXiv 2210.02747) and Liu et al. 2023 (arXiv 2209.03003). diffusers' own
FlowMatchEulerDiscreteScheduler takes a network that predicts the velocity; these take one that predicts the clean image, too,
as in Li & He 2025 (arXiv 2511.13720). One file that imports torch and diffusers alone, because an exported pipeline carries it.
"""

from typing import Any

import torch
from diffusers import ConfigMixin, SchedulerMixin
from diffusers.configuration_utils import register_to_config
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteSchedulerOutput


class FlowScheduler(SchedulerMixin, ConfigMixin):
    """Euler's method on dx / dsigma = n - y. The network is told the timestep sigma x num_train_timesteps.

    `prediction_type`: "v_prediction" (the velocity n - y) or "sample" (y). Noise levels of the velocity lie as those of
    diffusers' scheduler: evenly from 1 to 1 / num_train_timesteps, then 0. Those of n steps of a clean image end with 1 / n and
    0, for its last prediction becomes the image, and a network learns little where there is hardly any noise. `shift` is
    of diffusers' config, too; nothing but 1, for none, is possible.
    """

    order = 1
    init_noise_sigma = 1.0

    @register_to_config
    def __init__(self, num_train_timesteps: int = 1000, prediction_type: str = "v_prediction", shift: float = 1.0):
        self.set_timesteps(min(50, num_train_timesteps))

    def add_noise(self, clean_images: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        """x, [B, C, H, W], of y and n, each [B, C, H, W], at `timesteps` [B] from 0 to num_train_timesteps."""
        sigma = (timesteps / self.config.num_train_timesteps).to(clean_images.dtype)[:, None, None, None]
        return (1 - sigma) * clean_images + sigma * noise

    def get_velocity(self, clean_images: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        """n - y, the same at all timesteps."""
        return noise - clean_images

    def set_timesteps(self, num_inference_steps: int, device: torch.device | str | None = None) -> None:
        """Starts a chain. The noise levels stay on the CPU, so that reading them never waits for a device."""
        count = num_inference_steps if self.config.prediction_type == "sample" else self.config.num_train_timesteps
        levels = torch.linspace(1.0, 1.0 / count, num_inference_steps, dtype=torch.float64)
        self.sigmas = torch.cat([levels, levels.new_zeros(1)])
        # Of second order: sigma_0, sigma_1 twice, ...: where the first half of a step ends, its second half looks.
        self._evaluated = levels.repeat_interleave(self.order)[self.order - 1 :]
        self.timesteps = (self._evaluated * self.config.num_train_timesteps).float().to(device)
        self._done = 0
        self._start: Any = None  # (x, its slope) at the beginning of a step that is half done

    def scale_model_input(self, sample: torch.Tensor, timestep: torch.Tensor | float) -> torch.Tensor:
        return sample

    def step(
        self,
        model_output: torch.Tensor,
        timestep: torch.Tensor | float,
        sample: torch.Tensor,
        generator: torch.Generator | None = None,
        return_dict: bool = True,
    ) -> FlowMatchEulerDiscreteSchedulerOutput | tuple[torch.Tensor]:
        """Takes what the network gave and x, [B, C, H, W]; gives x of the next evaluation. `timestep` and `generator` are not
        needed: the evaluations come in order, and nothing is random."""
        sigma = self._evaluated[self._done].item()
        slope = (sample - model_output) / sigma if self.config.prediction_type == "sample" else model_output
        step, second_half = divmod(self._done, self.order)
        change = (self.sigmas[step + 1] - self.sigmas[step]).item()
        if second_half:
            start, slope_at_start = self._start
            x = start + change * (slope_at_start + slope) / 2.0
        else:
            self._start = sample, slope
            x = sample + change * slope
        self._done += 1
        return FlowMatchEulerDiscreteSchedulerOutput(x) if return_dict else (x,)

    def __len__(self) -> int:
        return self.config.num_train_timesteps


class FlowHeunScheduler(FlowScheduler):
    """Heun's method: n steps ask the network 2 n - 1 times, as the last step, to sigma = 0, is one of Euler."""

    order = 2
