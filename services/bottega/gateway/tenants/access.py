"""What a caller may name in a request: models, and LoRAs and ControlNets that are its tenant's own or for all.

NAME@TENANT is a tenant's own, as stores and servers know it; the tenant calls it NAME. What a caller may not name is
refused as what does not exist, and is looked for no further than that would be.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from bottega import rules
from bottega.rpc.security.caller import Caller
from bottega.rpc.security.grants import ALL_GRANTED, Grants

_OF = "@"


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """tenant: of the caller; empty is an operator, or whoever calls where nobody is asked, who may name all there is.

    grants: of that tenant.
    """

    tenant: str = ""
    grants: Grants = ALL_GRANTED

    @classmethod
    def of(cls, caller: Caller) -> Access:
        """What whoever makes a call may name."""
        return cls(tenant=caller.tenant, grants=caller.grants)

    def has_model(self, name: str) -> bool:
        """Whether it may name the model."""
        return not self.tenant or _granted(name, self.grants.models)

    def has_lora(self, full_name: str) -> bool:
        """Whether it may name the LoRA, if there is one."""
        return self._has(full_name, self.grants.loras)

    def has_controlnet(self, full_name: str) -> bool:
        """Whether it may name the ControlNet, if there is one."""
        return self._has(full_name, self.grants.controlnets)

    def own(self, name: str) -> str:
        """The full name of what it calls so if that is its tenant's own; empty where nothing of its own can be."""
        full_name = f"{name}{_OF}{self.tenant}"
        return full_name if self.tenant and rules.is_adapter_name(full_name) else ""

    def short_name(self, full_name: str) -> str:
        """Return what the caller calls something that it may name: a tenant's own goes without its owner."""
        return full_name.removesuffix(f"{_OF}{self.tenant}") if self.tenant else full_name

    def _has(self, full_name: str, granted: Collection[str]) -> bool:
        name, of, owner = full_name.partition(_OF)
        return not self.tenant or (owner == self.tenant if of else _granted(name, granted))


ANYTHING = Access()
"""Of a caller who may name all there is."""


def _granted(name: str, granted: Collection[str]) -> bool:
    return not granted or name in granted
