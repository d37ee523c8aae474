"""What the doctor can find: each finding's code, its likely cause and what to try. docs/findings.md is made from this table."""

from utils.diagnostics.entry import Entry
from utils.diagnostics.options_table import ROWS

CATALOG: dict[str, Entry] = {
    "step-data": Entry(
        "the images, or latents, are not as declared",
        "an edit of the loading, the scaling or the augmentation",
        (
            "compare the declared and the observed values: the message says what the network sees",
            "look at a batch beside its files: pixel order, range, orientation",
        ),
        stage="data",
    ),
    "step-noise": Entry(
        "the noise is not independent standard normal noise",
        "a generator that is seeded again, noise that is shared, scaled, clipped or of another distribution",
        ("draw it by torch.randn_like(images), for each image and update anew",),
        stage="noise",
    ),
    "step-timestep": Entry(
        "the network is told other noise levels than the declared ones",
        "timesteps that are shifted, shuffled, rounded, scaled, or drawn from another distribution than declared",
        ("one timestep for each image, drawn once, for the noise and for the network alike",),
        stage="timestep",
    ),
    "step-input": Entry(
        "the network's input is not the declared mixture of image and noise",
        "an edit of the formula that adds the noise, or another noise schedule than declared",
        ("use the scheduler's add_noise with the noise and the timesteps of the same images",),
        stage="input",
    ),
    "step-condition": Entry(
        "the network is told other labels than declared",
        "labels that are shifted against the images, dropped at another rate, or not passed on",
        ("pass on each image's own label; drop a label at random, as often as declared",),
        stage="condition",
    ),
    "step-network": Entry(
        "the network does not compute as declared",
        "frozen parameters, evaluation mode, another precision, or another preconditioning",
        ("compare the declared and the observed values: the message says which part",),
        stage="network",
    ),
    "step-target": Entry(
        "the loss compares the output with something else than declared",
        "another prediction type, another error than the squared one, or images and targets of different samples",
        ("compute the target from the clean images, the noise and the timesteps of this batch",),
        stage="target",
    ),
    "step-weight": Entry(
        "errors do not count in the loss as declared",
        "weights that are inverted, missing or of other samples, a sum in place of a mean, or a wrong shape",
        ("weigh each sample by its own timestep, then average over pixels, batch and micro steps",),
        stage="weight",
    ),
    "step-gradient": Entry(
        "the gradient at the optimizer's step is not that of the loss",
        "gradients that are not cleared, cleared too early, clipped another way, or changed between backward pass and step",
        ("clip the joint norm once, after the last micro step; clear the gradients after the step",),
        stage="gradient",
    ),
    "step-optimizer": Entry(
        "the optimizer does not step as declared",
        "other betas, epsilon or decay, parameters that it was not given, or a state that was lost",
        ("compare the declared and the observed values; give it all parameters; restore its state on resume",),
        stage="optimizer",
    ),
    "step-learning-rate": Entry(
        "the learning rate is not the declared one",
        "a schedule of another length, stepped too often, or not applied to all groups",
        ("set it from the number of finished updates, for all groups",),
        stage="learning_rate",
    ),
    "step-ema": Entry(
        "the averaged weights do not follow the network as declared",
        "an update that is missing, too frequent, of other weights, or with another decay",
        ("update it once after each optimizer step, from the network that is trained",),
        stage="ema",
    ),
    "step-state": Entry(
        "the weights change outside of the optimizer's step",
        "averaged weights that are left in the network, a checkpoint loaded again, or a resume that restores too little",
        ("restore the weights after a validation or a sample; restore all of a checkpoint",),
        stage="state",
    ),
    "step-ranks": Entry(
        "processes do not train one network on different samples",
        "gradients that are not averaged, equal seeds, or equal data on all processes",
        ("call the prepared model; seed by sample, or by process",),
        stage="ranks",
    ),
    "step-export": Entry(
        "the exported pipeline is not what was trained",
        "other weights, another noise schedule or another prediction type in the exported files, or a sampler that is wrong",
        ("export the averaged weights, with the scheduler of the training",),
        stage="export",
    ),
    "data-range": Entry(
        "the images that the network sees are not in [-1, 1]",
        "they were scaled twice, or not at all, or some of them are damaged; the noise schedule assumes [-1, 1]",
        (
            "scale uint8 by x / 127.5 - 1, once",
            "look at one batch: its min, max and mean are in the report",
        ),
        stage="data",
    ),
    "data-alike": Entry(
        "the images are copies of a few, or nearly so",
        "duplicated rows, a broken decoder that gives one image, or a data set made by repeating a small one",
        (
            "remove the duplicates",
            "check the image column and the decoder: look at a grid of the data",
        ),
        stage="data",
    ),
    "data-blank": Entry(
        "some of the images are of one single value",
        "failed scans or downloads, empty tiles, or a decoder that gives blanks; the network learns to make them",
        (
            "remove them: the data check names rows",
            "open one of the files: is it blank, or only read as blank (transparency, 16 bits)?",
        ),
        stage="data",
    ),
    "data-damaged": Entry(
        "some of the images cannot be decoded",
        "downloads or copies that were cut short, or files that are no images",
        (
            "mend or remove the files named",
            "--on_bad_image replace trains on the next image in their places",
        ),
        stage="data",
    ),
    "data-enlarged": Entry(
        "images are smaller than the resolution, and enlarged",
        "--resolution is above that of the files: samples will look as soft as the enlarged images",
        (
            "a lower --resolution",
            "leave the small images out, where there are enough larger ones",
        ),
        stage="data",
    ),
    "data-channels": Entry(
        "color channels are empty, or equal",
        "a decoder or a conversion that lost a channel, or gray images that are stored as color",
        (
            "look at the files: are they so, or only read so?",
            "gray images: --image_channels 1",
        ),
        stage="data",
    ),
    "data-bars": Entry(
        "bars, frames or missing parts of one color",
        "images that were padded (letterbox), scans with a frame, or files that were cut short; the network learns them",
        (
            "cut the bars off; pad nothing: --resolution and cropping make images square",
            "remove the files that were cut short",
        ),
        stage="data",
    ),
    "data-pattern": Entry(
        "a fixed pattern lies over the images",
        "a watermark, a logo, a date stamp, dust or dead pixels of a camera; a form that all images share is no fault",
        ("take images without it, or cut it off; the network draws it into every sample",),
        stage="data",
    ),
    "data-mixed": Entry(
        "some of the images are of another kind than the rest",
        "files of another source or processing among the images: masks, drawings, negatives, badly exposed or undecodable ones",
        (
            "look at the picture of them in the report; remove them, or prepare them like the rest",
            "give them a class of their own, if they are meant",
        ),
        stage="data",
    ),
    "data-copies": Entry(
        "many images are changed copies of others",
        "a data set that was augmented on disk, or frames of a video: it has fewer different images than files",
        (
            "remove the copies, and let the training augment: --random_flip, --color_jitter",
            "choose --validation_images from other pictures: a copy is no held-out image",
        ),
        stage="data",
    ),
    "data-leak": Entry(
        "held-out images are copies of training images",
        "copies in the data set, which the split puts on both sides: the validation then rewards learning by heart",
        ("remove the copies",),
        stage="data",
    ),
    "data-resampled": Entry(
        "the images were enlarged before",
        "files that were enlarged on disk: they have fewer details than pixels, and samples will look so too",
        ("the original files, or a lower --resolution",),
        stage="data",
    ),
    "data-compressed": Entry(
        "the 8x8 blocks of strong JPEG compression show",
        "files that were stored at a low JPEG quality; the network learns to draw the blocks",
        (
            "files of a higher quality",
            "larger files, or a lower --resolution: shrinking hides the blocks",
        ),
        stage="data",
    ),
    "class-imbalance": Entry(
        "one class is most of the data",
        "the classes were collected unevenly; rare ones will hardly be generated",
        (
            "--balanced_sampling",
            "collect or weight the rare classes",
        ),
        stage="data",
    ),
    "class-empty": Entry(
        "classes without images",
        "folders or class names without files; the network is asked for a class that it never saw",
        ("remove the class, or add its images",),
        stage="data",
    ),
    "class-mislabeled": Entry(
        "the nearest images contradict many of the labels",
        "labels that are wrong, or shifted against the images",
        (
            "look at the picture of them in the report, and correct the labels",
            "check how labels are joined to the files",
        ),
        stage="data",
    ),
    "data-mirror": Entry(
        "mirrored images are unlike all others",
        "text, digits or other things that have a left and a right; --random_flip makes half of the samples mirrored",
        ("leave out --random_flip",),
        stage="data",
    ),
    "overfitting": Entry(
        "held-out images are much harder than training images, or become so",
        "the network memorizes: too many passes over too few images for its size",
        (
            "stop at the best checkpoint (--resume_from_checkpoint best, --early_stopping_patience 3)",
            "more images",
            "--random_flip",
            "--dropout 0.1",
            "a smaller network",
        ),
    ),
    "schedule-leaves-signal": Entry(
        "the last timestep still shows the image",
        "the betas are too small for the number of steps: sampling starts from pure noise, which the network never saw",
        (
            "--ddpm_num_steps 1000 with the linear schedule",
            "--ddpm_beta_schedule squaredcos_cap_v2",
            "--rescale_betas_zero_snr with --prediction_type v_prediction",
        ),
        stage="input",
    ),
    "schedule-destroys-early": Entry(
        "most timesteps are pure noise",
        "the betas are too large for the number of steps: the network spends its training where nothing is to be seen",
        (
            "--ddpm_beta_schedule squaredcos_cap_v2",
            "smaller betas or fewer steps",
        ),
        stage="input",
    ),
    **{row.code: row.entry for row in ROWS if row.entry is not None},
    "batch-norm": Entry(
        "the network normalizes over the batch",
        "BatchNorm in place of GroupNorm: images of a batch have other noise levels, and in sampling other figures are used",
        (
            "GroupNorm in its place",
            "LayerNorm or a norm over the channels of each pixel",
        ),
        stage="network",
    ),
    "attention-missing": Entry(
        "the network has no attention where its config asks for it",
        "blocks that were replaced, or an attention module that was taken out",
        ("compare the blocks with down_block_types and up_block_types of the config",),
        stage="network",
    ),
    "dropout-with-spectral-norm": Entry(
        "dropout and spectral norm are used together",
        "dropout scales what is kept by 1 / (1 - p): in training layers are steeper than spectral norm allows",
        ("--dropout 0 with --spectral_norm",),
        stage="network",
    ),
    "inputs-zero": Entry(
        "part of what a layer is given is always zero",
        "a skip connection that is multiplied by zero, a wrong slice, or a channel that is never filled",
        (
            "look at what is joined before the layers named: their other input must get there",
            "count the channels: a skip connection of a U-Net is a third to a half of them",
        ),
        stage="network",
    ),
    "layers-idle": Entry(
        "layers of the network change nothing",
        "they are not called, multiplied by zero, or not on the way from input to output",
        (
            "look at the forward pass of the layers named",
            "leave them out of the network if they are not needed",
        ),
        stage="network",
    ),
    "time-embedding": Entry(
        "the time embedding gets another noise level than the network is told",
        "the timestep is scaled, rounded or shifted inside the network: its features were made for 0 to 999",
        (
            "pass the timestep on as it is",
            "scale by 1000 only noise levels from 0 to 1",
        ),
        stage="network",
    ),
    "sampler-mismatch": Entry(
        "the scheduler takes the network's output for something else than it is",
        "the prediction type in the scheduler's config is not the one that was trained",
        (
            "set prediction_type in scheduler/scheduler_config.json to what was trained",
            "export the scheduler with the model",
        ),
        stage="export",
    ),
    "batch-leak": Entry(
        "an image's prediction depends on the other images of its batch",
        "a layer normalizes or averages over the batch dimension",
        (
            "GroupNorm or LayerNorm in place of what looks at the batch",
            "check the dimensions that means, softmax and reshapes run over",
        ),
        stage="network",
    ),
    "timestep-ignored": Entry(
        "the network does not see the timestep",
        "the time embedding is not connected, is scaled to nothing, or is the same for all steps",
        (
            "check that timesteps are passed on and reach every block",
            "pass integer timesteps, not fractions",
        ),
        stage="network",
    ),
    "non-finite": Entry(
        "updates were skipped because a loss or gradient was not finite",
        "a damaged image, or a learning rate at the edge of divergence",
        (
            "read nan_report/: it names the samples and the first bad module",
            "a lower --learning_rate or longer --lr_warmup_steps",
        ),
        in_fp16=("an overflow in fp16", "--mixed_precision bf16"),
        stage="network",
    ),
    "fp16-scale-collapse": Entry(
        "the GradScaler's scale has collapsed",
        "fp16 gradients overflow again and again, so the scale falls until small gradients vanish",
        (
            "--mixed_precision bf16",
            "a lower --learning_rate",
            "find the overflow: nan_report/ names the module",
        ),
        stage="gradient",
    ),
    "no-gradient": Entry(
        "part of the network gets no gradient",
        "it is detached, frozen, multiplied by zero, or not on the way from input to loss",
        (
            "look for .detach(), requires_grad_(False) or a zero gate in the layers named",
            "leave them out of the network if they are not needed",
        ),
        stage="gradient",
    ),
    "gradients-exploding": Entry(
        "gradients grow without end",
        "an unstable network or loss: no normalization on some path, a loss weight that grows, a learning rate near its limit",
        (
            "--max_grad_norm 1",
            "--adaptive_clipping",
            "learning rate / 2 to / 5",
            "look at the layers whose gradients grow first",
        ),
        stage="gradient",
    ),
    "clip-too-tight": Entry(
        "nearly all of every gradient is clipped away",
        "--max_grad_norm is far below the gradients' usual norm; with Adam, epsilon then rules the step",
        (
            "--max_grad_norm 1",
            "--adaptive_clipping",
        ),
        stage="gradient",
    ),
    "no-warmup": Entry(
        "a high learning rate starts without warm-up",
        "Adam's second moments are empty in the first updates, so each is a full-size step in every direction",
        (
            "--lr_warmup_steps 500 (5-10 k on long runs)",
            "learning rate / 2 to / 5",
        ),
        stage="learning_rate",
    ),
    "lr-too-high": Entry(
        "the learning rate is too high",
        "each update changes the weights by more than the loss surface bears",
        (
            "learning rate / 2 to / 5",
            "longer --lr_warmup_steps",
            "a larger batch",
        ),
        stage="learning_rate",
    ),
    "loss-unstable": Entry(
        "the loss jumps up or rises again",
        "the learning rate is at the edge of what the loss surface bears, or some batches are unlike the rest",
        (
            "learning rate / 2 to / 5",
            "longer --lr_warmup_steps",
            "--adaptive_clipping",
            "a larger batch",
        ),
        stage="state",
    ),
    "lr-too-low": Entry(
        "the learning rate is too low",
        "the weights hardly move: at this pace the run ends before it has learned",
        (
            "learning rate x 10",
            "check the unit: 1e-4 is usual for a U-Net with Adam, 1e-3 for a small one",
        ),
        stage="learning_rate",
    ),
    "weights-shrinking": Entry(
        "the weights shrink away",
        "the weight decay outweighs what is learned",
        ("--adam_weight_decay 0.01 or less",),
        stage="optimizer",
    ),
    "not-learning": Entry(
        "the network does no better than the same answer for every image",
        "the target is not of what the network is shown (noise drawn twice, another order), or the input is lost on the way",
        (
            "the noise that is added must be the noise that is predicted: draw it once",
            "overfit one batch first: the loss must fall to nearly nothing",
        ),
    ),
    "error-impossible": Entry(
        "the network predicts better than its input allows",
        "it gets the noise or the image another way: in a condition, through another image of the batch, or by seeded noise",
        (
            "check what the network is given beside the noisy image",
            "draw the noise anew for each image and update",
        ),
        stage="noise",
    ),
    "worse-than-none": Entry(
        "at some noise levels the network is worse than none",
        "these levels hardly count in the loss, or the preconditioning of training and sampling differ",
        (
            "--P_mean and --P_std such that these levels are trained",
            "--sigma_data of the images' standard deviation",
            "train longer",
        ),
    ),
    "uncertainty-off": Entry(
        "EDM2's uncertainty does not follow the loss",
        "u(sigma) must learn the logarithm of the weighted loss: its weights do not move, or the loss has another weight",
        (
            "check the weight lambda and the term + u of the loss",
            "check that the optimizer has the parameters of u",
        ),
        stage="weight",
    ),
    "train-eval-gap": Entry(
        "the network does something else in training than in sampling",
        "heavy dropout, a normalization with figures of the batch, or a loop that feeds it otherwise than the sampler",
        (
            "--dropout 0.1 or less",
            "GroupNorm in place of BatchNorm",
            "compare the loop with the sampler: timesteps as integers, the sign and kind of the target, the scale of the noise",
        ),
        stage="network",
    ),
    "ema-too-long": Entry(
        "the average still holds much of the run's beginning",
        "the EMA's decay is too high for a run of this length",
        (
            "--ema_max_decay 0.999 (or 1 - 10 / updates)",
            "keep the warm-up: --ema_inv_gamma 1 --ema_power 0.75",
            "train longer",
        ),
        stage="ema",
    ),
    "samples-alike": Entry(
        "all samples are alike",
        "the weights have diverged or the sampler ends in one image, whatever noise it starts from",
        (
            "go back to the last checkpoint whose samples differ (--resume_from_checkpoint)",
            "learning rate / 2 to / 5",
            "check that the sampler draws new starting noise for each image",
        ),
    ),
    "samples-copied": Entry(
        "samples are copies of training images",
        "the network has learned its training images by heart: too few of them for its size, or too many passes over them",
        (
            "more images",
            "an earlier checkpoint (--best_metric fd with held-out images in view)",
            "--random_flip, --dropout 0.1, or a smaller network",
            "look at the nearest-neighbor sheet: duplicates in the data are copied first",
        ),
    ),
    "samples-unlike-data": Entry(
        "the samples do not look like the data",
        "too little training, a sampler that does not fit the training, or images prepared in another way than the reference",
        (
            "train longer",
            "more sampling steps (--num_inference_steps)",
            "check that resolution, channels and background are those of the reference",
        ),
    ),
    "samples-saturated": Entry(
        "far more of the samples is black or white than of the images",
        "the sampler is led out of the images' range and clips: a target of the wrong sign or kind, divergence, few steps",
        (
            "look at the samples: noise at the ends of the range, or flat areas?",
            "more sampling steps; learning rate / 2 to / 5",
            "check the prediction type and the sign of the target",
        ),
        stage="export",
    ),
    "samples-lack-variety": Entry(
        "the samples vary less than the data",
        "an average over too many different weights or images: an EMA that is too long, too little training, too few steps",
        (
            "train longer",
            "--ema_max_decay 0.999 on a short run",
            "more sampling steps, or --sampler ddpm, whose noise keeps the variance",
            "--rescale_betas_zero_snr with --prediction_type v_prediction if brightness is what varies too little",
        ),
    ),
    "modes-missing": Entry(
        "whole parts of the data are never generated",
        "rare classes, or modes that the training has not reached",
        (
            "--balanced_sampling where labels exist",
            "train longer or with a larger network",
            "check that the data still holds them: look at the class counts of diagnose.py",
        ),
    ),
    "mode-dominates": Entry(
        "part of the data is generated far too often",
        "duplicates or an imbalance in the data that was trained on, or a network that falls into its easiest mode",
        (
            "remove duplicates from the data (diagnose.py --dataset_name ... counts them)",
            "--balanced_sampling where labels exist",
            "--sampler ddpm, or more sampling steps",
        ),
    ),
    "data-starved": Entry(
        "the device waits for data",
        "decoding or the disk is slower than training",
        (
            "--cache_images yes (decode once)",
            "--dataloader_num_workers 4",
            "--cache_dir on a local disk",
        ),
        stage="data",
    ),
    "rule-failed": Entry(
        "a rule of the doctor failed, so that what it looks for was not judged",
        "a record that is damaged or from another version, or a mistake in the rule",
        ("look at history.jsonl for the figures that the rule reads",),
    ),
}
