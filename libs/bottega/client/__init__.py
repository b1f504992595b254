"""The SDK: draws pictures with a Bottega suite from Python.

    from bottega.client import Box, Client

    with Client() as client:
        client.generate("a big red star on a blue background", seed=7).save("star.png")
        client.edit("star.png", Box(4, 12, 34, 40), "a big green star on a blue background").save("green.png")
        job = client.submit("a small green circle")  # outlives this process: client.job(job.id) finds it again
        job.result()[0].save("circle.png")

AsyncClient is the same for asyncio. Errors are classes of bottega.errors.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bottega.client import exports
    from bottega.client.exports import *  # noqa: F403

    __all__: list[str] = []
    __all__ += exports.__all__
else:

    def __getattr__(name: str) -> object:
        """Import the SDK when one of its names is first used, because commands that do not use it start faster."""
        if name == "exports" or (name.startswith("__") and name != "__all__"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module("bottega.client.exports"), name)
