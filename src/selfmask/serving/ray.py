"""The server on a Ray cluster: replicas of it on many machines, and a mask stays on the replica that has it.

serve run selfmask.serving.ray:app backbone=resnet50 masks=/shared/masks replicas=4

Two deployments. `Replica` has an engine and the whole app, as `selfmask serve` has it. `Front` is what Ray's proxies
hand requests to: it checks keys and sizes, finds the mask's name, and asks Ray for a replica by that name (Ray calls
this multiplexing). A replica that dies while it works on a request for vectors is asked again, under another name.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from fastapi import Request, Response
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentHandle

from ..backbones import load_backbone
from ..embedding.loading import ready
from ..errors import ConfigError, FailedError, SelfmaskError
from ..settings import Where, merged, typed
from .app import create_app
from .collection import Collection
from .config import ServeConfig
from .engine import Engine
from .forwarding import Answer, Asked, Forward, answer_of, answer_to, as_starlette
from .gate import Gate
from .keys import keys_of
from .metrics import Metrics

_MASKS = 4096  # names that a replica is known to have; what it holds in memory, it decides by itself
_TRIES = 3
_PAUSE = 0.2  # seconds, in which Ray notices that a replica has died
_NAMES = ("backbone", "weights", "masks", "index", "replicas", "cpus")


@dataclasses.dataclass(frozen=True)
class Served:
    """What a cluster serves. replicas: how many; cpus: of each."""

    backbone: str
    masks: str
    weights: str | None = None
    index: str | None = None
    replicas: int = 2
    cpus: int = 1
    config: ServeConfig = dataclasses.field(default_factory=ServeConfig)

    @staticmethod
    def of(args: Mapping[str, Any]) -> Served:
        """Of what a config file, or a command line (then all is text), says: our own names, and settings of serve."""
        if not {"backbone", "masks"} <= set(args):
            raise ConfigError("nothing to serve", expected="backbone=NAME and masks=FOLDER", found=", ".join(args))
        fields = {field.name: str(field.type) for field in dataclasses.fields(ServeConfig)}
        given = {name: _value(name, fields.get(name, ""), value) for name, value in args.items() if name not in _NAMES}
        config = merged(ServeConfig(), typed(ServeConfig(), given, Where("arguments", beside=_NAMES)))
        cpus = int(args.get("cpus", 1))
        own = {name: str(args[name]) for name in ("backbone", "masks", "weights", "index") if args.get(name)}
        config = dataclasses.replace(config, workers=config.workers or min(cpus, max(1, config.max_hot // 2)))
        return Served(replicas=int(args.get("replicas", 2)), cpus=cpus, config=config, **own)


def app(args: Mapping[str, Any]) -> serve.Application:
    """What `serve run` and Ray's config files take. Settings are those of `selfmask serve`, without dashes."""
    served = Served.of(args)
    room = served.config.queue
    replica = serve.deployment(
        name="replica",
        num_replicas=served.replicas,
        max_ongoing_requests=room,
        ray_actor_options={"num_cpus": served.cpus},
        health_check_period_s=2,
    )(Replica)
    front = serve.deployment(
        name="front",
        num_replicas=served.replicas,
        max_ongoing_requests=room * served.replicas,
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=2,
    )(Front)
    application: serve.Application = front.bind(replica.bind(served), served.config)
    return application


class Replica:
    """One engine, and the app on it."""

    def __init__(self, served: Served) -> None:
        backbone = load_backbone(served.backbone, weights=None if served.weights is None else Path(served.weights))
        ready(backbone.model)
        self._engine = Engine(backbone, Path(served.masks), served.config)
        collection = None if served.index is None else Collection.open(Path(served.index))
        self._app = create_app(self._engine, collection)
        self._name = serve.get_replica_context().replica_id.unique_id.encode()
        self._engine.start()

    async def answer(self, asked: Asked) -> Answer:
        if name := serve.get_multiplexed_model_id():
            with suppress(SelfmaskError):  # there is none of that name, or none that can be used: the app says so
                await self._place(name)
        answer = await answer_to(self._app, asked)
        return answer._replace(headers=[*answer.headers, (b"x-selfmask-replica", self._name)])

    @serve.multiplexed(max_num_models_per_replica=_MASKS)  # type: ignore[untyped-decorator]
    async def _place(self, name: str) -> str:
        """Read a mask. Ray then knows that it is here; to keep it in memory is the engine's business."""
        await self._engine.model(name)
        return name

    async def check_health(self) -> None:
        """Ray calls this, and replaces a replica where it fails."""
        if not await self._engine.is_healthy():
            raise FailedError("the backbone does not run")

    def __del__(self) -> None:
        if hasattr(self, "_engine"):
            self._engine.stop()


class Front:
    """Takes requests from Ray's proxies, and has replicas answer them."""

    def __init__(self, replicas: DeploymentHandle[Any], config: ServeConfig) -> None:
        self._replicas = replicas
        user, admin = keys_of(config)
        self._gate = Gate(
            Forward(self._ask),
            metrics=Metrics(),
            routes=frozenset(),
            user=user,
            admin=admin,
            max_body=config.body,
            timeout=config.timeout,
            any_host=config.any_host,
        )

    async def __call__(self, request: Request) -> Response:
        return as_starlette(await answer_of(self._gate, request.scope, request.receive))

    async def _ask(self, asked: Asked) -> Answer:
        handle = self._replicas.options(multiplexed_model_id=asked.mask) if asked.mask else self._replicas
        for left in reversed(range(_TRIES)):
            try:
                answer: Answer = await handle.answer.remote(asked)
                return answer
            except RayActorError:
                if not left or not asked.may_be_repeated:
                    raise
                await asyncio.sleep(_PAUSE)
        raise AssertionError


def _value(name: str, kind: str, value: Any) -> Any:
    """Text of a command line, as the setting wants it."""
    if not isinstance(value, str):
        return value
    if name == "pin":
        return value.split(",")
    return value if "str" in kind else yaml.safe_load(value)
