"""The loss on held-out images: the same images, noise and noise levels every time, in fp32, sharded over the processes."""

import torch

from utils.core import randomness
from utils.core.distributed import together, waited_for
from utils.core.waiting import Meeting
from utils.training.run import Run

DRAWS = 4  # noisings of each image


class Validation:
    """Every `validation_steps` updates and after the last, where there are held-out images."""

    def __init__(self, run: Run):
        self._run = run

    def due(self) -> bool:
        run, step = self._run, self._run.state.step
        last = step == run.length.max_train_steps
        return (last or step % run.options.validation_steps == 0) and len(run.data.validation) > 0

    def make(self) -> None:
        """Logs the loss and notes it in the state. Call it on all processes, with the weights to judge in full precision. What
        fails on any fails on all of them."""
        run, loss = self._run, self.mean_loss()
        with waited_for(run.accelerator, "logging the validation"):
            run.trackers.log({"validation/loss": loss}, step=run.state.step)
            run.doctor.record(run.state.step, {"validation/loss": loss})
        run.state.record("validation loss", loss, decides=run.options.best_metric == "loss")

    @torch.no_grad()
    def mean_loss(self) -> float:
        """Returns the mean over DRAWS noisings of each held-out image, equal on all processes. The noise levels lie in the
        middles of equal slices of the training's, so that the figure moves with the weights and not with the luck of the
        draw."""
        run, size = self._run, self._run.options.micro_batch_size
        objective, accelerator, total = run.objective, run.accelerator, len(run.data.validation) * DRAWS
        loss_sum = torch.zeros((), dtype=torch.float64, device="cpu")

        def summed(first: int) -> torch.Tensor:
            numbers = torch.arange(first, min(first + size, total))
            # A fixed shuffle decides which image gets which slice.
            slices = randomness.permute(run.options.seed, "validation timesteps", torch.zeros_like(numbers), numbers, total)
            drawn = objective.draw(run.data.validation_batch(numbers), (slices.double() + 0.5) / total)
            losses = objective.losses(objective.network, **drawn).shown
            return losses.sum().cpu().double()  # in this order: not every device has float64

        with together(accelerator, "the validation", "set a smaller --train_batch_size, by which it is shared out"):
            batches = list(range(0, total, size))[accelerator.process_index :: accelerator.num_processes]
            with run.progress.part("validating", len(batches), "batches") as bar:
                for first in batches:
                    loss_sum += summed(first)
                    bar.update()
        with Meeting():
            return accelerator.reduce(loss_sum.float().to(accelerator.device), "sum").item() / total
