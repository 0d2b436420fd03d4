"""`selfmask/tiny`: a small residual network for 32-pixel images, whose weights come with this package."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor, nn

from ..preprocessing import Preprocessing

WEIGHTS = Path(__file__).with_name("tiny.safetensors")
"""Half-precision weights, to keep the package small; they are computed with in single precision."""
PREPROCESSING = Preprocessing((32, 32), (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), "bilinear")
_STEM, _STAGES = 32, (64, 128, 256)


class TinyResNet(nn.Module):
    """Images of any size -> 256 features: a 3 x 3 stem, then one residual block at each half of the resolution.

    No block runs at full resolution: there a convolution costs the most time per weight.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            OrderedDict(conv=_conv3x3(3, _STEM), bn=nn.BatchNorm2d(_STEM), relu=nn.ReLU(inplace=True))
        )
        self.layer1 = nn.Sequential(BasicBlock(_STEM, _STAGES[0]))
        self.layer2 = nn.Sequential(BasicBlock(_STAGES[0], _STAGES[1]))
        self.layer3 = nn.Sequential(BasicBlock(_STAGES[1], _STAGES[2]))
        self.num_features = _STAGES[-1]
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward_features(self, images: Tensor) -> Tensor:
        maps: Tensor = self.layer3(self.layer2(self.layer1(self.stem(images))))
        return maps

    def forward(self, images: Tensor) -> Tensor:
        return self.forward_features(images).mean((2, 3))


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions that halve the resolution, around a 1 x 1 shortcut."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = _conv3x3(inputs, outputs, stride=2)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = _conv3x3(outputs, outputs)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=2, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(y)) + self.downsample(x), inplace=True)


def _conv3x3(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
