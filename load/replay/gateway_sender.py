"""A sender of planned requests to a gateway, as a backend that uses the SDK sends them."""

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
    """Sends requests. A plan gives each of them a seed, with which they would be exact, without cache and recordings.

    Args:
        client: Of the gateway.
        pictures: Images that requests bring along.
        deadline_s: Deadline of each request.
        model: By default the only one.
        fidelity: Of all requests.
        options: Options of all requests, beside what is planned.
        seen: Is called with every picture that comes.
        request_id: Returns the id of a request; "" is none.
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
        """Wait for the picture. An error of the suite is a result; nothing else is caught."""
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
