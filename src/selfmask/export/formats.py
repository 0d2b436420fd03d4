"""The formats of exports: each makes files of a network, and runs these files to compare."""

from __future__ import annotations

import io
import logging
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import timm
import torch
from torch import Tensor, nn

from ..backbones.loading import unpinned
from ..errors import ExportError, MissingExtraError
from .network import IMAGES, VECTORS, Network
from .timm_folder import timm_files

Files = Mapping[str, bytes]
"""By name inside the folder; a format of one file has it under ""."""
_LIMIT = (1 << 31) - (1 << 20)  # bytes of one ONNX file; protobuf has no more
_BATCH = 2  # images of the example: a graph made with one takes one as a rule


class Format(Protocol):
    """How a network is written."""

    @property
    def title(self) -> str: ...

    @property
    def needs(self) -> tuple[str, ...]:
        """Packages of the extra `export`."""

    def files(self, network: Network, dynamic: bool) -> Files: ...

    def run(self, files: Files, network: Network, images: Tensor) -> Tensor:
        """The vectors that somebody gets who has only the files; the network tells what else he knows."""


class Onnx:
    """A graph for ONNX Runtime and its kin."""

    title = "ONNX"
    needs = ("onnx", "onnxscript", "onnxruntime")

    def files(self, network: Network, dynamic: bool) -> Files:
        size = sum(each.nbytes for each in network.graph.state_dict().values())
        if size > _LIMIT:
            raise ExportError(
                "the network is too large for one ONNX file",
                expected=f"at most {_LIMIT:,} bytes",
                found=f"{size:,} bytes",
                todo="use --half, or --format pt2",
            )
        program = _exported(network, dynamic)
        with _quiet(), _as_export_errors("to ONNX"):
            made: Any = torch.onnx.export(
                program, input_names=[IMAGES], output_names=[VECTORS], dynamo=True, verbose=False
            )
            proto = made.model_proto
        for key, value in network.about.items():
            entry = proto.metadata_props.add()
            entry.key, entry.value = key, value
        data: bytes = proto.SerializeToString()
        return {"": data}

    def run(self, files: Files, network: Network, images: Tensor) -> Tensor:
        import onnxruntime  # of an extra

        session = onnxruntime.InferenceSession(files[""], providers=["CPUExecutionProvider"])
        (batch, *_), name = session.get_inputs()[0].shape, session.get_inputs()[0].name

        def run(part: Tensor) -> Tensor:
            return torch.from_numpy(session.run(None, {name: part.numpy()})[0])

        return _in_batches(run, images, batch if isinstance(batch, int) else len(images))


class Pt2:
    """A graph for PyTorch, which needs no code of the network."""

    title = "torch.export"
    needs: tuple[str, ...] = ()

    def files(self, network: Network, dynamic: bool) -> Files:
        file = io.BytesIO()
        torch.export.save(_exported(network, dynamic), file, extra_files=dict(network.about))
        return {"": file.getvalue()}

    def run(self, files: Files, network: Network, images: Tensor) -> Tensor:
        program = torch.export.load(io.BytesIO(files[""]))
        batch = program.graph_module.graph.find_nodes(op="placeholder")[-1].meta["val"].shape[0]
        return _in_batches(program.module(), images, batch if isinstance(batch, int) else len(images))


class Safetensors:
    """The weights alone, by the names that the network gives them."""

    title = "safetensors"
    needs: tuple[str, ...] = ()

    def files(self, network: Network, dynamic: bool) -> Files:
        tensors = {name: value.contiguous().clone() for name, value in _only_network(network).state_dict().items()}
        return {"": safetensors.torch.save(tensors, {"format": "pt", **network.about})}

    def run(self, files: Files, network: Network, images: Tensor) -> Tensor:
        model = _only_network(network)
        with torch.no_grad():
            for value in model.state_dict().values():
                value.zero_()  # so that what the file lacks is seen
        model.load_state_dict(safetensors.torch.load(files[""]))
        vectors: Tensor = network.graph(images)
        return vectors


class Timm:
    """A folder that timm, and transformers through its wrapper of timm, load by its name."""

    title = "timm"
    needs: tuple[str, ...] = ()

    def files(self, network: Network, dynamic: bool) -> Files:
        return timm_files(_only_network(network), unpinned(network.backbone), network.preprocessing, network.about)

    def run(self, files: Files, network: Network, images: Tensor) -> Tensor:
        with tempfile.TemporaryDirectory() as folder:
            for name, data in files.items():
                (Path(folder) / name).write_bytes(data)
            with _as_export_errors("so that timm loads it"):
                model: nn.Module = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        if network.half:
            model = model.half()
        vectors: Tensor = model(images.half() if network.half else images).float()
        return vectors


FORMATS: Mapping[str, Format] = {"onnx": Onnx(), "pt2": Pt2(), "safetensors": Safetensors(), "timm": Timm()}


def check_needs(format: Format) -> None:
    """Before the work: that what writes the format is installed."""
    missing = [name for name in format.needs if find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"cannot write {format.title}: {', '.join(missing)} not installed", todo='pip install "selfmask[export]"'
        )


def _only_network(network: Network) -> nn.Module:
    if network.plain is None:
        raise ExportError(
            "this format holds the weights of one network, and nothing else",
            found="a cascade" if "selfmask.map" not in network.about else "a network and its map",
            todo="use --format onnx or pt2, which hold a whole graph",
        )
    return network.plain


def _exported(network: Network, dynamic: bool) -> torch.export.ExportedProgram:
    batch = torch.zeros(_BATCH if dynamic else 1, 3, *network.preprocessing.size)
    shapes = ({0: torch.export.Dim("batch", min=1)},) if dynamic else None
    with _quiet(), _as_export_errors("as a graph"), torch.no_grad():
        return torch.export.export(network.graph, (batch,), dynamic_shapes=shapes)


@contextmanager
def _as_export_errors(how: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # compilers of others raise every kind
        raise ExportError(
            f"the network cannot be exported {how}",
            found=next(iter(str(error).splitlines()), type(error).__name__)[:300],
            todo="try another format, or without --dynamic-batch; --format safetensors always has the weights",
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """What exporters say of their own future is no news to who exports."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "torch.export")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _in_batches(run: Any, images: Tensor, batch: int) -> Tensor:
    with torch.no_grad():
        return torch.cat([run(part) for part in torch.split(images, batch)])
