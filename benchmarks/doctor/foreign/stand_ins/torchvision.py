"""Stands in for torchvision, which does not import beside a CPU build of torch: the transforms that the public script uses."""

import random

import numpy as np
import torch
from PIL import Image


class Compose:
    def __init__(self, steps):
        self.steps = steps

    def __call__(self, image):
        for step in self.steps:
            image = step(image)
        return image


class Lambda:
    def __init__(self, function):
        self.function = function

    def __call__(self, image):
        return self.function(image)


class Resize:
    def __init__(self, size, interpolation=Image.Resampling.BILINEAR):
        self.size, self.interpolation = size, interpolation

    def __call__(self, image):
        scale = self.size / min(image.size)
        return image.resize([round(side * scale) for side in image.size], self.interpolation)


class CenterCrop:
    def __init__(self, size):
        self.size = size

    def place(self, room):
        return room // 2

    def __call__(self, image):
        left, top = (self.place(side - self.size) for side in image.size)
        return image.crop((left, top, left + self.size, top + self.size))


class RandomCrop(CenterCrop):
    def place(self, room):
        return random.randint(0, room)


class RandomHorizontalFlip:
    def __call__(self, image):
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if random.random() < 0.5 else image


class PILToTensor:
    def __call__(self, image):
        pixels = np.asarray(image)
        return torch.from_numpy(pixels.reshape(*pixels.shape[:2], -1).copy()).permute(2, 0, 1)


class ToTensor(PILToTensor):
    def __call__(self, image):
        return super().__call__(image).float() / 255


class ConvertImageDtype:
    def __init__(self, dtype):
        self.dtype = dtype

    def __call__(self, image):
        return image.to(self.dtype) / 255


class Normalize:
    def __init__(self, mean, std):
        self.mean, self.std = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))

    def __call__(self, image):
        return (image - self.mean) / self.std


class transforms:  # a module, in the real one
    InterpolationMode = Image.Resampling
    Compose, Lambda, Resize, CenterCrop, RandomCrop = Compose, Lambda, Resize, CenterCrop, RandomCrop
    RandomHorizontalFlip, PILToTensor, ToTensor = RandomHorizontalFlip, PILToTensor, ToTensor
    ConvertImageDtype, Normalize = ConvertImageDtype, Normalize
