"""Multi-crop views: ours against the classic way, one image and one crop at a time with PIL. Both on one thread."""

from __future__ import annotations

import torch
from PIL import Image, ImageFilter
from sklearn.datasets import load_sample_images
from torch import Tensor
from torchvision import transforms as T

from selfmask.data.views import MultiCrop, ViewsConfig
from selfmask.preprocessing import Preprocessing

from .common import BATCH, Row, timed

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def rows() -> list[Row]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [
            compare("32 px images", pictures(32, 32), ViewsConfig(size=64, small_size=32, small=4)),
            compare("300 x 400 px photos", pictures(300, 400), ViewsConfig(size=160, small_size=72, small=4)),
        ]
    finally:
        torch.set_num_threads(threads)


def compare(what: str, images: list[Image.Image], config: ViewsConfig) -> Row:
    crops = MultiCrop(config, Preprocessing((config.size, config.size), MEAN, STD, "bilinear"))
    tensors = [as_tensor(image) for image in images]
    generator = torch.Generator().manual_seed(0)
    classic = [
        pil_pipeline(config, size, scale) for part, size, scale in config.groups for _ in range(part.stop - part.start)
    ]

    def ours() -> list[Tensor]:
        return crops(tensors, crops.draw(len(tensors), generator))

    def other() -> list[Tensor]:
        return [torch.stack([transform(image) for image in images]) for transform in classic]

    sizes = f"{config.large} x {config.size} + {config.small} x {config.small_size}"
    return timed(f"views {sizes} of {len(images)} {what}: batched / PIL one by one", ours, other, None, repeats=9)


def pil_pipeline(config: ViewsConfig, size: int, scale: tuple[float, float]) -> T.Compose:
    """As SwAV's authors wrote it, PIL's own blur included, which is faster than torchvision's on PIL images."""
    low, high = (sigma * config.size / 224 for sigma in config.blur_sigma)

    def blur(image: Image.Image) -> Image.Image:
        return image.filter(ImageFilter.GaussianBlur(float(torch.empty(()).uniform_(low, high))))

    return T.Compose(
        [
            T.RandomResizedCrop(size, scale=scale),
            T.RandomHorizontalFlip(config.flip_p),
            T.RandomApply([T.ColorJitter(*config.jitter)], config.jitter_p),
            T.RandomGrayscale(config.grey_p),
            T.RandomApply([T.Lambda(blur)], config.blur_p),
            T.ToTensor(),
            T.Normalize(MEAN, STD),
        ]
    )


def pictures(height: int, width: int) -> list[Image.Image]:
    """Different cuts of two real photographs."""
    both = [Image.fromarray(image) for image in load_sample_images().images]
    cuts = [(10 * (index % 8), 10 * (index // 8)) for index in range(BATCH)]
    return [
        both[index % 2].crop((left, top, left + 400, top + 300)).resize((width, height))
        for index, (left, top) in enumerate(cuts)
    ]


def as_tensor(image: Image.Image) -> Tensor:
    data = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return data.view(image.height, image.width, 3).permute(2, 0, 1)
