"""Captioned drawings, and the frozen text encoder and autoencoder of `train_text_to_latent.py`."""
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch.utils.data import Dataset

COLORS = {"red": (220, 40, 40), "green": (40, 180, 70), "blue": (50, 80, 220), "yellow": (230, 210, 50)}
SHAPES = ["circle", "square", "triangle"]
BACKGROUNDS = {"white": (245, 245, 245), "black": (15, 15, 15), "gray": (128, 128, 128)}


class CaptionedShapes(Dataset):
    """Pairs of a drawing (uint8) and a caption such as "a red circle on white"."""

    def __init__(self, size, resolution, seed, random_flip=False):
        self.resolution = resolution
        self.random_flip = random_flip
        rng = np.random.default_rng(seed)
        self.images, self.captions = [], []
        for _ in range(size):
            color, shape, background = (rng.choice(list(names)) for names in (COLORS, SHAPES, BACKGROUNDS))
            self.images.append(self.draw(rng, color, shape, background))
            self.captions.append(f"a {color} {shape} on {background}")

    def draw(self, rng, color, shape, background):
        r = self.resolution
        image = Image.new("RGB", (r, r), BACKGROUNDS[background])
        radius = rng.uniform(0.2, 0.38) * r
        cx, cy = rng.uniform(radius, r - radius, size=2)
        box = [cx - radius, cy - radius, cx + radius, cy + radius]
        pen = ImageDraw.Draw(image)
        if shape == "circle":
            pen.ellipse(box, fill=COLORS[color])
        elif shape == "square":
            pen.rectangle(box, fill=COLORS[color])
        else:
            pen.polygon([(cx, box[1]), (box[2], box[3]), (box[0], box[3])], fill=COLORS[color])
        return np.array(image)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        image = self.images[i]
        if self.random_flip and torch.rand(()) < 0.5:
            image = image[:, ::-1].copy()
        return {"image": torch.from_numpy(image).permute(2, 0, 1), "caption": self.captions[i]}


class WordTokenizer:
    model_max_length = 8

    def __init__(self):
        words = ["<pad>", "<unk>", "<s>", "</s>", "a", "on", *COLORS, *SHAPES, *BACKGROUNDS]
        self.vocab = {word: i for i, word in enumerate(words)}

    def __len__(self):
        return len(self.vocab)

    def __call__(self, captions):
        rows = []
        for caption in captions:
            ids = [self.vocab.get(word, self.vocab["<unk>"]) for word in caption.split()]
            ids = [self.vocab["<s>"], *ids[: self.model_max_length - 2], self.vocab["</s>"]]
            rows.append(ids + [self.vocab["<pad>"]] * (self.model_max_length - len(ids)))
        return torch.tensor(rows)


class TinyTextEncoder(nn.Module):
    """One transformer layer with fixed random weights, as a stand-in for CLIP's text model."""

    def __init__(self, vocab_size, max_length, dim):
        super().__init__()
        self.token_embedding = nn.Embedding(vocab_size, dim)
        self.position_embedding = nn.Parameter(torch.randn(max_length, dim) * 0.3)
        self.layer = nn.TransformerEncoderLayer(dim, nhead=4, dim_feedforward=2 * dim, dropout=0.0, batch_first=True)

    def forward(self, input_ids):
        return self.layer(self.token_embedding(input_ids) + self.position_embedding)


class LinearAutoencoder(nn.Module):
    """Principal components of 4x4 patches: pixels in -1 .. 1 become four channels at a quarter of the resolution."""

    def __init__(self, dataset, latent_channels=4, patch=4):
        super().__init__()
        self.patch = patch
        pixels = torch.stack([example["image"] for example in dataset]) / 127.5 - 1.0
        patches = F.unfold(pixels, patch, stride=patch).transpose(1, 2).flatten(0, 1)
        mean = patches.mean(0)
        basis = torch.linalg.eigh(torch.cov(patches.T))[1][:, -latent_channels:]
        signs = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2  # equal variances
        self.register_buffer("basis", (basis @ signs).T.reshape(latent_channels, 3, patch, patch))
        self.register_buffer("mean", mean)
        self.scaling_factor = 1.0 / ((patches - mean) @ basis).std().item()

    def encode(self, pixel_values):
        mean = self.mean.reshape(1, 3, self.patch, self.patch)
        bias = (self.basis * mean).sum(dim=(1, 2, 3))
        return F.conv2d(pixel_values, self.basis, stride=self.patch) - bias[:, None, None]

    def decode(self, latents):
        h, w = latents.shape[-2:]
        mean = self.mean.reshape(1, 3, self.patch, self.patch).repeat(1, 1, h, w)
        return F.conv_transpose2d(latents, self.basis, stride=self.patch) + mean
