"""Sends planned requests to a gateway, as a backend that uses the SDK does, and says what became of each."""

from __future__ import annotations

from collections.abc import Callable

from bottega.client import AsyncClient, ControlNet, Picture
from bottega.client.types.options import FidelityName, GenerationOptions
from bottega.errors import BottegaError, Code
from load.replay.pictures import Pictures
from load.replay.requests import PlannedRequest
from load.replay.results import Outcome, Result

_OUTCOMES = {Code.RESOURCE_EXHAUSTED: Outcome.REFUSED, Code.DEADLINE_EXCEEDED: Outcome.LATE}


class GatewaySender:
    """client: of the gateway. deadline_s: that requests tell it, after which nobody wants their pictures.

    model: absent is the only one. fidelity: of all requests. options: of all of them, beside what is
    planned. seen: is given every picture that comes. request_id: of a request; empty is none. A plan gives each of them
    a seed, with which they would be exact, as no cache and no recording may make them.
    """

    def __init__(
        self,
        client: AsyncClient,
        pictures: Pictures,
        *,
        deadline_s: float,
        model: str | None = None,
        fidelity: FidelityName = "balanced",
        options: GenerationOptions | None = None,
        seen: Callable[[PlannedRequest, Picture], None] = lambda *_: None,
        request_id: Callable[[PlannedRequest], str] = lambda _: "",
    ) -> None:
        self._client = client
        self._pictures = pictures
        self._deadline_s = deadline_s
        self._model = model
        self._fidelity: FidelityName = fidelity
        self._common: GenerationOptions = options or {}
        self._seen = seen
        self._request_id = request_id

    async def send(self, request: PlannedRequest) -> Result:
        """Waits for the picture. What the suite refuses, or fails to do, is a result; nothing else is caught."""
        try:
            picture = await self._client.generate(
                request.prompt,
                timeout_s=self._deadline_s,
                deadline_s=self._deadline_s,
                request_id=self._request_id(request) or None,
                **self._options(request),
            )
        except BottegaError as error:
            outcome = _OUTCOMES.get(error.code, Outcome.FAILED)
            return Result(outcome=outcome, reason=type(error).__name__)
        self._seen(request, picture)
        return Result()

    def _options(self, request: PlannedRequest) -> GenerationOptions:
        options: GenerationOptions = {
            **self._common,
            "model": self._model,
            "seed": request.seed,
            "num_inference_steps": request.steps,
            "fidelity": self._fidelity,
            "lora": request.loras,
        }
        if request.controlnets:
            image = self._pictures.control_image(request)
            options["controlnets"] = [ControlNet(name, image) for name in request.controlnets]
        if request.template is not None:
            options["image"] = self._pictures.template(request.template)
            options["mask_image"] = self._pictures.mask(request)
        return options
