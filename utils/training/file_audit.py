"""The doctor's looks at what a run stores, starts from and samples with, and at the network as it is built."""

from collections.abc import Callable, Iterable
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from steady_doctor.built import network as built
from steady_doctor.built.equations import equations
from steady_doctor.built.sampler import Process, sampler
from steady_doctor.declare.processes import DDPM, EDM2
from steady_doctor.found import Found
from steady_doctor.stored import checkpoint as stored
from steady_doctor.stored.pipeline import Pipeline, exported, started_from
from utils.core.errors import UserError
from utils.diffusion.objective import Objective
from utils.diffusion.sampling import SamplePlan, make_sampler, sample, sampling_steps, set_timesteps
from utils.optim.power_ema import PowerEMA
from utils.options.flags import DDPMOptions
from utils.training.declared import sampling_settings
from utils.training.run import Run

EDM_LEVELS = {"sigma_min": 0.002, "sigma_max": 80.0, "rho": 7.0}  # of the sampler, Karras et al. 2022, table 1
MOST_STEPS = 25  # of the sampler that is asked: what a step does does not depend on their number
FEWEST_LEVELS = 10  # to step along


class FileAudit:
    """Each method gives what it finds; all are to be called on the main process."""

    def __init__(self, run: Run, process: DDPM | EDM2):
        self._run, self._process = run, process
        self._channels = run.facts["vae.latent_shape"][0] if run.options.vae else run.options.image_channels
        self._saved = self._snapped = 0  # checkpoints and snapshots that were looked at
        self._zero_snr = isinstance(process, DDPM) and float(process.alphas_cumprod[-1]) == 0.0

    def started(self) -> Iterable[Found]:
        """Beside what the run goes on from, or starts from."""
        run = self._run
        if run.resumed_from is not None:
            optimizer = None if "optimizer" in run.options.allow_option_change else run.accelerator._optimizers[0]
            return stored.kept(run.resumed_from, self._state(optimizer), None)
        pretrained = getattr(run.options, "pretrained", None)
        if not pretrained or not Path(pretrained, "unet").is_dir():
            return []
        rescales = bool(getattr(run.options, "force_weight_norm", False))
        names = run.data.images.class_names or ()
        return started_from(Path(pretrained), run.objective.exported.state_dict(), names, rescales)

    def network(self) -> Iterable[Found]:
        """As it is built; before the first update also its first weights."""
        network, options, step = self._run.objective.exported, self._run.options, self._run.state.step
        path = getattr(options, "model_config_name_or_path", None)
        flags: dict[str, Any] = dict.fromkeys(("in_channels", "out_channels"), self._channels)
        flags |= {name: getattr(options, of, None) for name, of in (("dropout", "dropout"), ("act_fn", "activation"))}
        if path is not None:
            yield from built.config(network, Path(path), flags, step)
        if isinstance(options, DDPMOptions) and not options.pretrained:
            wanted = (options.activation, options.initialisation, options.zero_init_output, options.spectral_norm)
            fresh = step == 0 and self._run.resumed_from is None
            yield from built.built(network, built.Built(*wanted), fresh, step)
        elif type(network).__name__ == "EDM2UNet":
            yield from equations(network, step)

    def sampler(self) -> Iterable[Found]:
        """Asks the sampler of the run's pictures what it makes of a network that knows the answer."""
        options, objective, process = self._run.options, self._run.objective, self._process
        if isinstance(process, DDPM) and process.possible < FEWEST_LEVELS:
            return []
        most = min(sampling_steps(options.sampler, options.sampling_steps, objective.noise_scheduler), MOST_STEPS)
        steps = next(filter(self._is_possible, range(most, 0, -1)))
        settings = self._settings()
        clips = settings.get("clip_sample", False) and not settings["thresholding"] and settings["clip_sample_range"] == 1.0
        return sampler(
            sampler_call(objective, options.sampler, steps),
            self._levels(),
            (self._channels, 8, 8),
            self._run.state.step,
            adds_noise=options.sampler == "ddpm",
            clips=clips and not (self._zero_snr and options.sampler == "ddpm"),
        )

    def _is_possible(self, count: int) -> bool:
        try:
            set_timesteps(make_sampler(self._run.options.sampler, self._run.objective.noise_scheduler), count)
        except UserError:
            return False
        # diffusers spaces trailing timesteps unevenly where their number does not divide that of the levels.
        return not self._zero_snr or self._process.possible % count == 0

    def _levels(self) -> Process:
        if isinstance(self._process, DDPM):
            return Process(self._process.alphas_cumprod, self._process.prediction_type)
        return Process(sigma_data=self._process.sigma_data)

    def _settings(self) -> dict[str, Any]:
        if isinstance(self._process, DDPM):
            return sampling_settings(self._run.options, self._run.facts)
        return EDM_LEVELS | {"sigma_data": self._process.sigma_data}

    def exported(self) -> Iterable[Found]:
        """The pipeline that was just exported."""
        run, network, table = self._run, self._run.objective.exported, getattr(self._process, "alphas_cumprod", None)
        weights = network.state_dict()
        if run.ema is not None:
            weights |= {name: tensor for name, tensor in run.ema.shadow.items() if name in weights}
        scale = (run.facts["vae.latent_mean"], run.facts["vae.latent_std"]) if run.options.vae else None
        names = (run.data.images.class_names or ()) if run.objective.classes else ()
        pipeline = Pipeline(weights, self._settings(), table, scale, names)
        return exported(run.output_dir, pipeline, network, run.state.step)

    def saved(self) -> Iterable[Found]:
        """The checkpoint that was just saved; later ones by a few tensors."""
        run = self._run
        checkpoint, only = run.output_dir / f"checkpoint-{run.state.step}", self._saved or None
        self._saved += 1
        return stored.kept(checkpoint, self._state(run.accelerator._optimizers[0]), only)

    def snapshots(self) -> Iterable[Found]:
        """Those of averages that were just saved; later ones by a few tensors."""
        run, several = self._run, self._run.ema
        if not isinstance(several, PowerEMA):
            return []
        averages = {width: average.shadow for width, average in several.averages.items()}
        only, self._snapped = self._snapped or None, self._snapped + 1
        return stored.snapshots(run.output_dir / "ema_snapshots", run.state.step, averages, only)

    def _state(self, optimizer: Any) -> stored.State:
        run = self._run
        return stored.State(
            run.state.step,
            run.objective.network.state_dict(),
            optimizer,
            None if run.ema is None else run.ema.state_dict(),
            run.accelerator.scaler,
            run.clipping.mean,
            run.options.adaptive_clipping,
        )


def sampler_call(objective: Objective, name: str, steps: int, seed: int = 0) -> Callable[[nn.Module, int], torch.Tensor]:
    """Training's way to sample with another network: a function of (network with an `image`, number of images)."""

    def call(oracle: Any, count: int) -> torch.Tensor:
        stand_in = copy(objective)  # so that its `predict` asks the oracle
        stand_in.exported = oracle
        scheduler = make_sampler(name, objective.noise_scheduler)
        image = oracle.image
        plan = SamplePlan(scheduler, steps, tuple(image.shape), seed, count, image.device)
        return sample(oracle, plan, torch.arange(count), predict=stand_in.predict)

    return call
