"""`selfmask/vit`: a small plain vision transformer for 32-pixel images, trained as `selfmask/tiny` was."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WEIGHTS = Path(__file__).with_name("vit.safetensors")
"""Half-precision weights, to keep the package small; they are computed with in single precision."""
_PATCH, _SIDE, _WIDTH, _DEPTH, _HEADS = 4, 32, 192, 4, 3


class SmallViT(nn.Module):
    """Images whose sides are multiples of 4 -> 192 features: the mean of the tokens of all patches.

    Patches and positions are embedded, then come blocks of attention and two-layer perceptrons, with a layer norm
    before each; there is no class token. At another size than 32 pixels, the positions are interpolated.
    """

    def __init__(self) -> None:
        super().__init__()
        side = _SIDE // _PATCH
        self.patch_embed = nn.Conv2d(3, _WIDTH, _PATCH, stride=_PATCH)
        self.pos_embed = nn.Parameter(torch.empty(1, _WIDTH, side, side))
        self.blocks = nn.Sequential(*(Block() for _ in range(_DEPTH)))
        self.norm = nn.LayerNorm(_WIDTH)
        self.num_features = _WIDTH
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.trunc_normal_(module.weight, std=module.weight[0].numel() ** -0.5)
                assert module.bias is not None
                nn.init.zeros_(module.bias)

    def forward_features(self, images: Tensor) -> Tensor:
        patches: Tensor = self.patch_embed(images)
        positions: Tensor = self.pos_embed
        if patches.shape[2:] != positions.shape[2:]:
            positions = F.interpolate(positions, patches.shape[2:], mode="bicubic", antialias=True)
        tokens = (patches + positions).flatten(2).mT
        features: Tensor = self.norm(self.blocks(tokens))
        return features

    def forward(self, images: Tensor) -> Tensor:
        return self.forward_features(images).mean(1)


class Block(nn.Module):
    """Attention, then a perceptron for each token, each added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.qkv, self.proj = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.fc1, self.fc2 = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.proj(self.attend(self.qkv(self.norm1(tokens))))
        perceived: Tensor = self.fc2(F.gelu(self.fc1(self.norm2(tokens))))
        return tokens + perceived

    @staticmethod
    def attend(qkv: Tensor) -> Tensor:
        """Tokens [B, N, 3 C] -> [B, N, C]: what each takes from all others, in every head."""
        q, k, v = qkv.view(*qkv.shape[:2], 3, _HEADS, -1).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
