"""`selfmask serve`: one backbone and all masks of a folder behind one address."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError, MissingExtraError
from ..serving.config import ServeConfig
from ..settings import Where, merged, typed
from . import options
from .console import Console
from .options import Given, Verb


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeNames:
    """What is served."""

    backbone: Annotated[str | None, typer.Option(help="Name of the backbone that the masks are for.")] = None
    weights: Annotated[Path | None, typer.Option(help="File with the backbone's weights.")] = None
    masks: Annotated[
        Path | None, typer.Option(help="Folder with mask and cascade files (NAME.smn) and run folders (NAME/).")
    ] = None
    index: Annotated[Path | None, typer.Option(help="Collection to search, made by `selfmask index`.")] = None


VERB = Verb(
    name="serve",
    names=ServeNames,
    config=ServeConfig,
    start=lambda *_: ServeConfig(),
    everyday=tuple(field.name for field in dataclasses.fields(ServeConfig)),
)


def command() -> Callable[..., None]:
    return options.command(VERB, serve)


def serve(*, given: Given) -> None:
    """Serve one backbone under any number of masks: embeddings, classes and search over HTTP.

    A mask is named by its file or run folder. Files may be added, replaced and removed while the server runs.

    Example:  selfmask serve --backbone resnet50 --masks masks/
    """
    config: ServeConfig = merged(ServeConfig(), typed(ServeConfig(), given.tree, Where("", given.marks)))
    names = ServeNames(**given.names)
    if names.backbone is None or names.masks is None:
        raise ConfigError("nothing to serve", expected="--backbone NAME and --masks FOLDER")
    config.check_host()
    if not names.masks.is_dir():
        raise ConfigError(f"{names.masks} is not a folder", todo="create it; it may be empty")
    try:
        from ..serving.app import create_app
        from ..serving.server import run
    except ImportError as error:
        raise MissingExtraError(
            "serving needs packages that are not installed", found=error.name, todo='pip install "selfmask[serve]"'
        ) from error
    from ..backbones import load_backbone
    from ..embedding.loading import ready
    from ..serving.collection import Collection
    from ..serving.engine import Engine

    collection = None if names.index is None else Collection.open(names.index)
    backbone = load_backbone(names.backbone, weights=names.weights)
    ready(backbone.model)
    engine = Engine(backbone, names.masks, config)
    app = create_app(engine, collection)
    count = len(engine.shelf.names())
    masks = "1 mask" if count == 1 else f"{count:,} masks"
    Console(stderr=True).say(f"{backbone.name} and {masks} of {names.masks}: http://{config.host}:{config.port}")
    run(app, config)
