"""Two small CLIPs with random weights and the real tokenizer: one of open_clip, one of transformers."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import torch
from open_clip.tokenizer import SimpleTokenizer, default_bpe
from PIL import Image
from safetensors.torch import save_file

from selfmask.data import open_images
from selfmask.preprocessing import Preprocessing

SIDE, WIDTH, LAYERS = 32, 24, 2
ARCHITECTURE = "selfmask-small"
_MERGES = 49152 - 256 - 2


def small_open_clip(folder: Path) -> tuple[str, Path]:
    """The name of the backbone, and a file with the weights of both towers."""
    model = open_clip_model(folder)
    file = folder / "small_open_clip.safetensors"
    save_file(model.state_dict(), file)
    return f"open_clip/{ARCHITECTURE}", file


def small_transformers(folder: Path) -> str:
    """The name of the backbone, a folder inside this one."""
    place = folder / "small_transformers"
    transformers_model().save_pretrained(place)
    save_tokenizer(place)
    from transformers import CLIPImageProcessor

    CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=SIDE).save_pretrained(place)
    return f"transformers/{place}"


def open_clip_model(folder: Path) -> Any:
    """open_clip's own model, whose architecture is made known to open_clip by a file in the folder."""
    config: dict[str, Any] = {
        "embed_dim": WIDTH,
        "vision_cfg": {"image_size": SIDE, "patch_size": 8, "width": 32, "head_width": 16, "layers": LAYERS},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": LAYERS},
    }
    (folder / f"{ARCHITECTURE}.json").write_text(json.dumps(config))
    open_clip.add_model_config(folder / f"{ARCHITECTURE}.json")
    torch.manual_seed(0)
    return _as_if_trained(open_clip.CLIP(**config))


def transformers_model() -> Any:
    from transformers import CLIPConfig, CLIPModel

    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
    # What towers say of the width is not heeded: the whole model says it.
    config = CLIPConfig(
        vision_config=tower | {"image_size": SIDE, "patch_size": 8, "projection_dim": 7},
        text_config=dict(tower),
        projection_dim=WIDTH,
    )
    torch.manual_seed(0)
    return _as_if_trained(CLIPModel(config))


def _as_if_trained(model: Any) -> Any:
    """With biases that are not zero, norms that are not one, and another scale than at the start."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
        model.logit_scale.fill_(3.0)
    return model.eval()


def save_tokenizer(folder: Path) -> None:
    """CLIP's real vocabulary, as transformers keeps it."""
    vocabulary = {token: number for number, token in SimpleTokenizer().decoder.items() if number < 49406}
    vocabulary |= {"<|startoftext|>": 49406, "<|endoftext|>": 49407}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    lines = gzip.decompress(Path(default_bpe()).read_bytes()).decode().splitlines()
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *lines[1 : _MERGES + 1]]) + "\n")
    settings = {"tokenizer_class": "CLIPTokenizer", "model_max_length": 77}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def clothes(count: int, preprocessing: Preprocessing) -> torch.Tensor:
    """Bundled images of clothes as a backbone wants them, normalised [count, 3, H, W]."""
    images = open_images("selfmask/fashion", split="test")
    pictures = [
        Image.fromarray(images[i].permute(1, 2, 0).numpy()).resize(preprocessing.size[::-1]) for i in range(count)
    ]
    pixels = torch.from_numpy(np.stack([np.array(picture) for picture in pictures])).permute(0, 3, 1, 2) / 255
    return (pixels - torch.tensor(preprocessing.mean)[:, None, None]) / torch.tensor(preprocessing.std)[:, None, None]
