"""Are the digits that a class-conditional model makes the digits that were asked for?

    python benchmarks/class_agreement.py runs/digits-edm2 --guidance 1 1.5 2

samples 500 images (`--num_images`), 50 of each class, at each strength of guidance, and prints the share to which an SVM
trained on the real digits gives the class that was asked for; beside it that of held-out real digits, and the Frechet ratio of
digits_quality.py.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
from digits_quality import frechet_distance, real_digits, reduce
from sklearn.model_selection import cross_val_predict
from sklearn.svm import SVC

from utils.guidance import make_guided_prediction
from utils.pipelines import image_shape, load_network
from utils.sampling import make_sampler, sample, to_uint8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipeline")
    parser.add_argument("--guide_pipeline")
    parser.add_argument("--guidance", type=float, nargs="+", default=[1.0])
    parser.add_argument("--num_images", type=int, default=500)
    parser.add_argument("--num_inference_steps", type=int, default=32)
    args = parser.parse_args()
    torch.set_num_threads(1)
    real, labels = real_digits()
    svm = SVC().fit(real, labels)
    unseen = cross_val_predict(SVC(), real, labels, cv=5)
    print(f"held-out real digits: {(unseen == labels).mean():.3f}")
    halves, random = [], np.random.default_rng(0)
    for _ in range(11):
        order = random.permutation(len(real))
        halves.append(frechet_distance(real[order[:898]], real[order[898:]]))
    unet, config = load_network(args.pipeline)
    guide, guide_config = load_network(args.guide_pipeline) if args.guide_pipeline else (None, None)
    asked = np.arange(args.num_images) % 10
    for guidance in args.guidance:
        with torch.no_grad():
            images = sample(
                unet,
                make_sampler("heun", config),
                num_inference_steps=args.num_inference_steps,
                sample_numbers=torch.arange(args.num_images),
                seed=0,
                shape=image_shape(unet),
                device="cpu",
                batch_size=100,
                predict=make_guided_prediction(unet, config, None, guidance, guide if guidance != 1.0 else None, guide_config),
            )
        made = reduce(to_uint8(images)[:, 0].numpy())
        agrees = svm.predict(made) == asked
        by_class = " ".join(f"{agrees[asked == c].mean():.2f}" for c in range(10))
        ratio = frechet_distance(made, real) / np.median(halves)
        print(f"guidance {guidance:g}: agrees {agrees.mean():.3f} (by class {by_class}), Frechet ratio {ratio:.2f}", flush=True)


if __name__ == "__main__":
    main()
