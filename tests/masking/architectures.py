"""Small random networks of many kinds, and plain oracles that know nothing of how selfmask computes."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from selfmask import MaskedModel


@dataclasses.dataclass(frozen=True)
class Architecture:
    """How to build a small network, what it takes, and what of it is masked."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...] = (3, 32, 32)
    select: str = "auto"


def timm_model(name: str, **settings: object) -> nn.Module:
    timm = pytest.importorskip("timm")
    return timm.create_model(name, num_classes=5, **settings)


def efficientnet_lite() -> nn.Module:
    """tf_efficientnet_lite0 with a quarter of its channels and half of its depth, which timm has no name for."""
    efficientnet = pytest.importorskip("timm.models.efficientnet")
    how = {"channel_multiplier": 0.25, "depth_multiplier": 0.5, "bn_eps": 1e-3, "pad_type": "same"}
    return efficientnet._gen_efficientnet_lite("tf_efficientnet_lite0", num_classes=5, **how)


def open_clip_tower() -> nn.Module:
    transformer = pytest.importorskip("open_clip.transformer")
    return transformer.VisionTransformer(
        image_size=32, patch_size=8, width=32, layers=2, heads=2, mlp_ratio=2, output_dim=16
    )


def transformers_tower() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8
    )
    return transformers.CLIPVisionModel(config)


class Attention(nn.Module):
    """A transformer of PyTorch's own layers: packed and separate projections, and a learned token."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, nhead=2, dim_feedforward=24, dropout=0.0, batch_first=True)
        self.inner = nn.Linear(6, 16)
        self.cls_token = nn.Parameter(torch.randn(1, 1, 16))
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.cross = nn.MultiheadAttention(16, 2, kdim=6, vdim=6, batch_first=True, add_bias_kv=True)
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.cat([self.cls_token.expand(len(x), -1, -1), self.inner(x)], dim=1)
        tokens = self.encoder(tokens)
        tokens = tokens + self.cross(tokens, x, x, need_weights=False)[0]
        return self.fc(tokens.mean(1))


class Convolutional(nn.Module):
    """A plain network of convolutions of any dimension, with batch norm."""

    def __init__(self, dimensions: int, channels: int = 2) -> None:
        super().__init__()
        conv = getattr(nn, f"Conv{dimensions}d")
        norm = getattr(nn, f"BatchNorm{dimensions}d")
        self.body = nn.Sequential(
            conv(channels, 6, 3, padding=1), norm(6), nn.ReLU(), conv(6, 8, 3, stride=2, groups=2, bias=False), norm(8)
        )
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.body(x).relu().flatten(2).mean(2))


ARCHITECTURES = {
    "resnet18": Architecture(lambda: timm_model("resnet18", channels=(16, 24, 32, 48))),
    "resnet50": Architecture(
        lambda: timm_model("resnet50", layers=(2, 1, 2, 1), channels=(16, 24, 32, 48)), select="paper-resnet"
    ),
    "resnext": Architecture(lambda: timm_model("resnext50_32x4d", layers=(1, 1, 1, 1), channels=(32, 32, 64, 64))),
    "convnext": Architecture(
        lambda: timm_model("convnext_atto", depths=(1, 1, 2, 1), dims=(16, 24, 32, 48), ls_init_value=None),
    ),
    "efficientnet_lite0": Architecture(efficientnet_lite),
    "mobilenetv3": Architecture(lambda: timm_model("mobilenetv3_small_050")),
    "regnet": Architecture(lambda: timm_model("regnetx_002", w0=8, wa=16.0, wm=1.8, group_size=8, depth=6)),
    "vit": Architecture(
        lambda: timm_model("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=48, depth=2),
    ),
    "swin": Architecture(
        lambda: timm_model(
            "swin_tiny_patch4_window7_224",
            img_size=32,
            window_size=4,
            embed_dim=24,
            depths=(1, 1, 2),
            num_heads=(1, 2, 4),
            drop_path_rate=0.0,
        ),
    ),
    "attention": Architecture(Attention, shape=(5, 6)),
    "conv1d": Architecture(lambda: Convolutional(1), shape=(2, 16)),
    "conv3d": Architecture(lambda: Convolutional(3), shape=(2, 6, 6, 6)),
    "open_clip": Architecture(open_clip_tower, select="paper-vit"),
    "transformers_clip": Architecture(transformers_tower),
}


@functools.cache
def _built(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = ARCHITECTURES[name].build()
    with torch.no_grad():
        # Fresh networks start biases at 0, and norms at 1 or 0: no mask on or before them would show.
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.normal_(0, 0.1)
        for module in model.modules():
            if isinstance(getattr(module, "running_mean", None), Tensor):
                module.running_mean.normal_(0, 0.1)
                module.running_var.uniform_(0.5, 1.5)
            if isinstance(module, nn.LayerNorm | nn.modules.batchnorm._BatchNorm):
                module.weight.uniform_(0.5, 1.5)
                module.bias.normal_(0, 0.1)
    return model


def base_of(name: str) -> nn.Module:
    """A fresh copy of an architecture's base: the same weights every time."""
    return copy.deepcopy(_built(name))


def inputs_of(name: str, batch: int = 4) -> Tensor:
    return torch.randn(batch, *ARCHITECTURES[name].shape, generator=torch.Generator().manual_seed(1))


def as_tensor(output: object) -> Tensor:
    """What a network says, whatever it wraps it in."""
    return output if isinstance(output, Tensor) else output.pooler_output


def loss_of(output: object) -> Tensor:
    """A scalar to which every output contributes differently."""
    out = as_tensor(output)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    return (out * direction).sum() + out.square().mean()


def digits_base(seed: int = 0) -> nn.Module:
    """A small convolutional network with batch norm for 8 x 8 grey images."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


def named_scores(masked: MaskedModel) -> dict[str, nn.Parameter]:
    """Scores by the name of the parameter they belong to; a mask lists its tensors in the order of the scores."""
    return dict(zip(masked.pack().sizes, masked.scores.values(), strict=True))


def perturb_scores(masked: MaskedModel, spread: float = 1.0, seed: int = 3) -> None:
    """Scores as after some training: part of the weights on, part off, no ties."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for score in masked.scores.parameters():
            score.add_(torch.randn(score.shape, generator=generator), alpha=spread)


def naive_mask(masked: MaskedModel, score: Tensor) -> Tensor:
    """The mask of one tensor by sorting in numpy: 1 on, 0 off."""
    config = masked.config
    flat = score.detach().double().numpy().ravel()
    if config.rule == "threshold":
        on = flat > config.mu
    else:
        share = config.active_share
        if config.rule == "progressive_topk":
            share = 1 - masked.progress * (1 - share)
        on = np.zeros(flat.size, bool)
        on[np.argsort(-flat, kind="stable")[: round(share * flat.size)]] = True
    return torch.from_numpy(on.reshape(score.shape))


def oracle(masked: MaskedModel, base: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and score gradients by nothing but autograd: M is the hard mask, with the slope of the score.

    alpha is computed from that M, so that its share of the derivative comes from autograd as well.
    """
    base = copy.deepcopy(base)
    weights = dict(base.named_parameters())
    scores = {name: score.detach().clone().requires_grad_() for name, score in named_scores(masked).items()}
    effective = {}
    for name, score in scores.items():
        weight = weights[name].detach()
        mask = naive_mask(masked, score).to(weight.dtype) + (score - score.detach()).to(weight.dtype)
        effective[name] = weight * mask / mask.mean().sqrt()
    output = functional_call(base, effective, (x,))
    loss_of(output).backward()
    return as_tensor(output).detach(), {name: score.grad for name, score in scores.items()}


def score_gradients(masked: MaskedModel) -> dict[str, Tensor]:
    return {name: score.grad.clone() for name, score in named_scores(masked).items()}


def assert_gradients_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Close by tensor, with a floor for gradients that are zero but for rounding (those of key biases)."""
    assert found.keys() == expected.keys()
    typical = float(np.mean([g.norm() / g.numel() ** 0.5 for g in expected.values()]))
    assert typical > 0
    for name, gradient in expected.items():
        scale = gradient.norm() + typical * gradient.numel() ** 0.5 * 1e-3
        assert (found[name] - gradient).norm() <= tolerance * scale, name


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same_state(model: nn.Module, before: dict[str, Tensor]) -> None:
    """Bit for bit, buffers included."""
    now = model.state_dict()
    assert now.keys() == before.keys()
    changed = [name for name, value in before.items() if not torch.equal(now[name], value)]
    assert not changed
