"""A pipeline and how images are made with it: what generate.py and evaluate.py share."""

from collections.abc import Iterator
from contextlib import contextmanager

from accelerate import Accelerator
from diffusers import UNet2DModel

from models.edm2_unet import EDM2UNet
from utils.core.distributed import main_process_first
from utils.diffusion.guidance import asked_classes, make_guided_prediction
from utils.diffusion.pipelines import image_shape, load_decoder, load_network, names_of_classes
from utils.diffusion.sampling import SamplePlan, full_precision, make_sampler, sampling_steps, usual_sampler
from utils.options.flags import EvaluateOptions, GenerateOptions


class SampledPipeline:
    """A pipeline, or a checkpoint of a run, with the sampler, classes and guidance that flags ask for. Made and used on all
    processes alike.

    Attributes:
        image_shape: (C, H, W) of its images.
        num_inference_steps: of the sampler.
        class_labels: numbers of the classes that were asked for; None: all.
        predict: as `sampling.sample` takes it.

    Raises UserError for what cannot be loaded, and for flags that do not go with it.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        name: str,
        args: GenerateOptions | EvaluateOptions,
        guide: tuple[UNet2DModel | EDM2UNet, dict] | None = None,  # of `load_guide`
    ):
        self.accelerator, self.name, self.batch_size = accelerator, name, args.batch_size
        with main_process_first(accelerator, "loading the pipeline"):  # one download, not one per process
            self.unet, self.scheduler_config = load_network(name)
            self.autoencoder = load_decoder(name, self.unet)
        self.networks = [self.unet, *(guide or ())[:1]]
        self.image_shape = self.autoencoder.image_shape if self.autoencoder else image_shape(self.unet)
        self.sampler = args.sampler or usual_sampler(self.scheduler_config)
        self.scheduler = make_sampler(self.sampler, self.scheduler_config)
        self.num_inference_steps = sampling_steps(self.sampler, args.num_inference_steps, self.scheduler)
        self.class_labels = asked_classes(args.class_labels, names_of_classes(name), self.unet)
        self.predict = make_guided_prediction(
            self.unet, self.scheduler_config, self.class_labels, args.guidance, *(guide or (None, None))
        )

    def plan(self, seed: int) -> SamplePlan:
        """Returns how its images are made of their numbers. Raises UserError where the size of its images is not known."""
        made_by = (seed, self.batch_size, self.accelerator.device, self.autoencoder)
        return SamplePlan(self.scheduler, self.num_inference_steps, image_shape(self.unet), *made_by)

    @contextmanager
    def sampling(self, plan: SamplePlan, *, compiled: bool = False) -> Iterator[None]:
        """Around what makes images: the networks are on the device, the autoencoder is at hand. They leave it afterwards."""
        for network in self.networks:
            network.to(self.accelerator.device)
        with plan.decoding(self.accelerator), full_precision(self.unet, compiled=compiled):
            yield
        self.unet.cpu()  # the guide is that of other pipelines, too


def load_guide(accelerator: Accelerator, pipeline: str | None) -> tuple[UNet2DModel | EDM2UNet, dict] | None:
    """Returns the network and the scheduler's config of --guide_pipeline, where it is set. Raises UserError."""
    if not pipeline:
        return None
    with main_process_first(accelerator, "loading the guide"):
        return load_network(pipeline)
