"""What the doctor can find: each finding's code, its likely cause and what to try. docs/findings.md is made from this table."""

from utils.diagnostics.entry import Entry
from utils.diagnostics.options_table import ROWS

CATALOG: dict[str, Entry] = {
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
        "images are copies of others, or nearly so",
        "duplicate rows, a broken decoder that returns the same image, or a small data set that was repeated",
        (
            "remove the duplicates",
            "check --image_column, and look at some of the images",
        ),
        stage="data",
    ),
    "data-blank": Entry(
        "some of the images are of one single value",
        "failed scans or downloads, empty tiles, or a decoder that returns blank images; the network learns to make them",
        (
            "remove the blank images: `diagnose.py --dataset_name ...` prints their rows",
            "open one of the files: is it blank, or only read as blank (transparency, 16 bits)?",
        ),
        stage="data",
    ),
    "data-damaged": Entry(
        "some of the images cannot be decoded",
        "incomplete downloads or copies, or files that are not images",
        (
            "repair or remove the files in the message",
            "--on_bad_image replace: use the next image instead",
        ),
        stage="data",
    ),
    "data-enlarged": Entry(
        "images are smaller than the resolution, and enlarged",
        "--resolution is higher than that of the files: samples will look as soft as the enlarged images",
        (
            "a lower --resolution",
            "remove the small images, if there are enough large ones",
        ),
        stage="data",
    ),
    "data-channels": Entry(
        "color channels are empty, or equal",
        "a decoder or a conversion lost a channel, or gray images are stored as color",
        (
            "look at the files with another program: do they look the same there?",
            "gray images: --image_channels 1",
        ),
        stage="data",
    ),
    "data-bars": Entry(
        "bars, frames or missing parts of one color",
        "padded images (letterbox), scans with a frame, or incomplete files; the network learns the bars",
        (
            "cut off the bars; do not pad images: --resolution and cropping bring them to one size",
            "remove the incomplete files",
        ),
        stage="data",
    ),
    "data-pattern": Entry(
        "a fixed pattern lies over the images",
        "a watermark, a logo, a date stamp, dust or dead pixels of a camera; the same shape in all images is not a fault",
        ("use images without the pattern, or cut it off; otherwise all samples will have it",),
        stage="data",
    ),
    "data-mixed": Entry(
        "some of the images are of another kind than the rest",
        "files of another source or processing among the images: masks, drawings, negatives, badly exposed or undecodable ones",
        (
            "look at these images in the report; remove them, or process them like the others",
            "if you want to keep them, give them their own class",
        ),
        stage="data",
    ),
    "data-copies": Entry(
        "images are changed copies of others",
        "the data was augmented on disk, or consists of video frames: there are fewer different images than files",
        (
            "remove the copies, and augment during the training: --random_flip, --color_jitter",
            "use validation images that are not copies of training images",
        ),
        stage="data",
    ),
    "data-leak": Entry(
        "held-out images are copies of training images",
        "the data has copies, and some are in both parts: the validation loss then looks too good when the network memorizes",
        ("remove the copies",),
        stage="data",
    ),
    "data-resampled": Entry(
        "the images were enlarged before",
        "the files were enlarged on disk and show few details; samples will look the same",
        ("use the original files, or a lower --resolution",),
        stage="data",
    ),
    "data-compressed": Entry(
        "the 8x8 blocks of strong JPEG compression show",
        "the files have a low JPEG quality; the network learns to draw the blocks",
        (
            "use files of a higher quality",
            "use larger files, or a lower --resolution: shrinking hides the blocks",
        ),
        stage="data",
    ),
    "class-imbalance": Entry(
        "one class is far larger than the others",
        "the classes have very different sizes; rare classes will rarely be generated",
        (
            "--balanced_sampling",
            "collect more images of the rare classes",
        ),
        stage="data",
    ),
    "class-empty": Entry(
        "classes without images",
        "folders or class names without files; the network cannot learn these classes",
        ("remove the class, or add its images",),
        stage="data",
    ),
    "class-mislabeled": Entry(
        "labels are contradicted by the nearest images",
        "labels are wrong, or belong to other images",
        (
            "look at these images in the report, and correct their labels",
            "check --label_column, and how the labels were assigned to the files",
        ),
        stage="data",
    ),
    "data-mirror": Entry(
        "mirrored images are unlike all others",
        "text, digits or other things that must not be mirrored; with --random_flip, half of the samples are mirrored",
        ("leave out --random_flip",),
        stage="data",
    ),
    "overfitting": Entry(
        "held-out images are much harder than training images, or become so",
        "the network memorizes: too few images for its size, or too many passes",
        (
            "stop at the best checkpoint (--resume_from_checkpoint best, --early_stopping_patience 3)",
            "use more images",
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
        "too many timesteps are pure noise",
        "the betas are too large for the number of steps: at these timesteps, there is nothing to learn",
        (
            "--ddpm_beta_schedule squaredcos_cap_v2",
            "smaller betas or fewer steps",
        ),
        stage="input",
    ),
    **{row.code: row.entry for row in ROWS if row.entry is not None},
    "batch-norm": Entry(
        "the network normalizes over the batch",
        "the network has BatchNorm: the images of a batch have different noise levels, and sampling uses other statistics",
        (
            "use GroupNorm instead",
            "or use LayerNorm, or a norm over the channels of each pixel",
        ),
        stage="network",
    ),
    "attention-missing": Entry(
        "the network has no attention where its config asks for it",
        "blocks were replaced, or an attention module was removed",
        ("compare the blocks with down_block_types and up_block_types of the config",),
        stage="network",
    ),
    "dropout-with-spectral-norm": Entry(
        "dropout and spectral norm are used together",
        "dropout scales the values that it keeps by 1 / (1 - p): in training, this breaks the limit of spectral norm",
        ("--dropout 0 with --spectral_norm",),
        stage="network",
    ),
    "inputs-zero": Entry(
        "part of what a layer is given is always zero",
        "a skip connection is multiplied by zero, a slice is wrong, or a channel is never filled",
        (
            "look at the code before the layers in the message: are all their inputs connected?",
            "count the channels: in a U-Net, a skip connection has a third to a half of them",
        ),
        stage="network",
    ),
    "layers-idle": Entry(
        "layers of the network change nothing",
        "they are not called, are multiplied by zero, or are not connected to the output",
        (
            "look at the forward pass of the layers in the message",
            "leave them out of the network if they are not needed",
        ),
        stage="network",
    ),
    "time-embedding": Entry(
        "the time embedding gets another noise level than the network",
        "the network scales, rounds or shifts the timestep; the embedding is made for 0 to 999",
        (
            "do not change the timestep inside the network",
            "multiply by 1000 only if the noise levels are from 0 to 1",
        ),
        stage="network",
    ),
    "sampler-mismatch": Entry(
        "the scheduler expects another kind of output than the network predicts",
        "the config of the scheduler has another prediction type than the training",
        (
            "set prediction_type in scheduler/scheduler_config.json to that of the training",
            "export the scheduler with the model",
        ),
        stage="export",
    ),
    "batch-leak": Entry(
        "an image's prediction depends on the other images of its batch",
        "a layer normalizes or averages over the batch dimension",
        (
            "use GroupNorm or LayerNorm instead of this layer",
            "check the dimensions of means, softmax and reshapes",
        ),
        stage="network",
    ),
    "timestep-ignored": Entry(
        "the network does not see the timestep",
        "the time embedding is not connected, is multiplied by zero, or is the same for all steps",
        (
            "check that the timesteps reach every block",
            "pass integer timesteps, not fractions",
        ),
        stage="network",
    ),
    "non-finite": Entry(
        "updates were skipped because a loss or gradient was not finite",
        "a damaged image, or a learning rate that is nearly too high",
        (
            "read nan_report/: it has the samples and the first bad module",
            "a lower --learning_rate or longer --lr_warmup_steps",
        ),
        in_fp16=("an overflow in fp16", "--mixed_precision bf16"),
        stage="network",
    ),
    "fp16-scale-collapse": Entry(
        "the GradScaler's scale has collapsed",
        "fp16 gradients overflow again and again; the scale falls until small gradients become zero",
        (
            "--mixed_precision bf16",
            "a lower --learning_rate",
            "find the overflow: nan_report/ has the name of the module",
        ),
        stage="gradient",
    ),
    "no-gradient": Entry(
        "part of the network gets no gradient",
        "it is detached, frozen, multiplied by zero, or not connected to the loss",
        (
            "look for .detach(), requires_grad_(False) or a factor of zero in the layers in the message",
            "leave them out of the network if they are not needed",
        ),
        stage="gradient",
    ),
    "gradients-exploding": Entry(
        "gradients grow without end",
        "the learning rate is nearly too high, a part of the network has no normalization, or a loss weight grows",
        (
            "--max_grad_norm 1",
            "--adaptive_clipping",
            "learning rate / 2 to / 5",
            "look in the report which layers have the largest gradients",
        ),
        stage="gradient",
    ),
    "clip-too-tight": Entry(
        "nearly all of every gradient is clipped away",
        "--max_grad_norm is far below the usual norm of the gradients; with Adam, epsilon then decides the size of the step",
        (
            "--max_grad_norm 1",
            "--adaptive_clipping",
        ),
        stage="gradient",
    ),
    "no-warmup": Entry(
        "a high learning rate starts without warm-up",
        "in the first updates, Adam has few gradients to average, so each step is as large as possible",
        (
            "--lr_warmup_steps 500 (5,000 to 10,000 for long runs)",
            "learning rate / 2 to / 5",
        ),
        stage="learning_rate",
    ),
    "lr-too-high": Entry(
        "the learning rate is too high",
        "each update changes the weights too much",
        (
            "learning rate / 2 to / 5",
            "longer --lr_warmup_steps",
            "a larger batch",
        ),
        stage="learning_rate",
    ),
    "loss-unstable": Entry(
        "the loss jumps up or rises again",
        "the learning rate is nearly too high, or some batches are very different from the others",
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
        "the weights change too slowly: the run ends before the network has learned",
        (
            "learning rate x 10",
            "usual with Adam: 1e-4 for a U-Net, 1e-3 for a small one",
        ),
        stage="learning_rate",
    ),
    "weights-shrinking": Entry(
        "the weights shrink away",
        "the weight decay is stronger than the learning",
        ("--adam_weight_decay 0.01 or less",),
        stage="optimizer",
    ),
    "not-learning": Entry(
        "the network does no better than the same answer for every image",
        "the target does not belong to the input (noise drawn twice, another order), or the input does not reach the output",
        (
            "in your own code: draw the noise once, add it, and predict the same noise",
            "train on one batch first (--max_train_images): the loss must become very small",
        ),
    ),
    "error-impossible": Entry(
        "the network predicts better than its input allows",
        "it gets the noise or the image in another way: a condition, another image of the batch, or a fixed seed",
        (
            "check all inputs of the network except the noisy image",
            "in your own code: draw new noise for each image and update",
        ),
        stage="noise",
    ),
    "worse-than-none": Entry(
        "at some noise levels the network is worse than no network",
        "these levels have a very small weight in the loss, or training and sampling have different preconditioning",
        (
            "set --P_mean and --P_std so that these levels are trained",
            "set --sigma_data to the standard deviation of the images",
            "train longer",
        ),
    ),
    "uncertainty-off": Entry(
        "EDM2's uncertainty does not follow the loss",
        "u(sigma) must learn the logarithm of the weighted loss, but its weights do not change, or the loss has another weight",
        (
            "check the weight lambda and the term + u of the loss",
            "check that the optimizer has the parameters of u",
        ),
        stage="weight",
    ),
    "train-eval-gap": Entry(
        "the network does something else in training than in sampling",
        "high dropout, a normalization over the batch, or training inputs that differ from those of the sampler",
        (
            "--dropout 0.1 or less",
            "use GroupNorm instead of BatchNorm",
            "compare the loop with the sampler: timesteps as integers, the sign and kind of the target, the scale of the noise",
        ),
        stage="network",
    ),
    "ema-too-long": Entry(
        "the average still holds the weights of the run's beginning",
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
        "the weights have diverged, or the sampler makes the same image from any noise",
        (
            "resume from the last checkpoint with different samples (--resume_from_checkpoint checkpoint-N)",
            "learning rate / 2 to / 5",
            "check that the sampler draws new starting noise for each image",
        ),
    ),
    "samples-copied": Entry(
        "samples are copies of training images",
        "the network has memorized its training images: too few images for its size, or too many passes",
        (
            "use more images",
            "use an earlier checkpoint (--validation_images and --resume_from_checkpoint best)",
            "--random_flip, --dropout 0.1, or a smaller network",
            "look at nearest.png, and remove duplicates from the data: they are copied first",
        ),
    ),
    "samples-unlike-data": Entry(
        "the samples do not look like the data",
        "too little training, a wrong sampler, or a reference whose images were processed in another way",
        (
            "train longer",
            "more sampling steps (--num_inference_steps)",
            "use the --resolution, --image_channels and --background of the reference",
        ),
    ),
    "samples-saturated": Entry(
        "far more of the samples is black or white than of the images",
        "the sampler leaves the range of the images and clips: too few steps, a diverged network, or a wrong target",
        (
            "look at the samples: do they show noise or flat areas?",
            "more sampling steps; learning rate / 2 to / 5",
            "check the prediction type and the sign of the target",
        ),
        stage="export",
    ),
    "samples-lack-variety": Entry(
        "the samples vary less than the data",
        "too little training, an EMA that is too long, or too few sampling steps",
        (
            "train longer",
            "--ema_max_decay 0.999 on a short run",
            "more sampling steps, or --sampler ddpm",
            "if the brightness varies too little: --rescale_betas_zero_snr with --prediction_type v_prediction",
        ),
    ),
    "modes-missing": Entry(
        "whole parts of the data are never generated",
        "rare classes, or too little training",
        (
            "--balanced_sampling, if there are labels",
            "train longer or with a larger network",
            "check that the data has them: diagnose.py --dataset_name ... counts the classes",
        ),
    ),
    "mode-dominates": Entry(
        "part of the data is generated far too often",
        "duplicates or an imbalance in the training data, or a network that prefers the easiest part of the data",
        (
            "remove duplicates from the data (diagnose.py --dataset_name ... counts them)",
            "--balanced_sampling, if there are labels",
            "--sampler ddpm, or more sampling steps",
        ),
    ),
    "data-starved": Entry(
        "the device waits for data",
        "decoding the images or reading the disk is slower than the training",
        (
            "--cache_images yes (decode once)",
            "--dataloader_num_workers 4",
            "--cache_dir on a local disk",
        ),
        stage="data",
    ),
    "slow-rank": Entry(
        "one process is slower than the others, which wait for it",
        "a device that is shared, hot or throttled; a slow disk or few CPU cores; other work on that machine",
        (
            "look at the device and the other processes of that rank's machine (nvidia-smi, top)",
            "in data: --dataloader_num_workers 4, or --cache_dir on a local disk",
        ),
    ),
    "device-errs": Entry(
        "an update gave another result when it was made again",
        "memory or an arithmetic unit of that device makes mistakes: heat, overclocking, a defect",
        (
            "test the memory of that device, and train on another one",
            "continue from a checkpoint that was saved before this update",
        ),
    ),
    "update-not-repeatable": Entry(
        "the same update gives other bits each time, so --rerun_steps sees only large errors",
        "kernels that add up in no fixed order, as some do on GPUs",
        ("nothing, if this is accepted; --deterministic takes kernels that repeat",),
    ),
    "rule-failed": Entry(
        "a rule of the doctor failed, so it could not check for its finding",
        "a damaged record, a record of another version, or a mistake in the rule",
        ("look at the figures in history.jsonl",),
    ),
}
