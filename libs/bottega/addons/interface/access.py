"""Access control: which models, LoRAs and ControlNets a caller may name.

A caller may name the shared ones that its tenant was granted, and the tenant's own. Stores and servers list an own item
as NAME@TENANT; the tenant calls it NAME. An item that a caller may not name is refused as if it did not exist, with the
same work, so that response times do not reveal it.
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
    """The names of models, LoRAs and ControlNets that one caller may use."""

    tenant: str = ""
    """The caller's tenant; empty for operators and for callers of a gateway without keys, who may name everything."""
    grants: Grants = ALL_GRANTED
    """The shared models, LoRAs and ControlNets that the tenant may name."""

    @classmethod
    def of(cls, caller: Caller) -> Access:
        return cls(tenant=caller.tenant, grants=caller.grants)

    def has_model(self, name: str) -> bool:
        """Return whether the caller may name the model."""
        return not self.tenant or _granted(name, self.grants.models)

    def has_lora(self, full_name: str) -> bool:
        """Return whether the caller may name a LoRA of this full name. It need not exist."""
        return self._has(full_name, self.grants.loras)

    def has_controlnet(self, full_name: str) -> bool:
        """Return whether the caller may name a ControlNet of this full name. It need not exist."""
        return self._has(full_name, self.grants.controlnets)

    def own(self, name: str) -> str:
        """Return the full name of the tenant's own item of that name; empty if it can have none."""
        full_name = f"{name}{_OF}{self.tenant}"
        return full_name if self.tenant and rules.is_adapter_name(full_name) else ""

    def short_name(self, full_name: str) -> str:
        """Return the name by which the caller names an item: without @TENANT if the item is the tenant's own."""
        return full_name.removesuffix(f"{_OF}{self.tenant}") if self.tenant else full_name

    def _has(self, full_name: str, granted: Collection[str]) -> bool:
        name, of, owner = full_name.partition(_OF)
        return not self.tenant or (owner == self.tenant if of else _granted(name, granted))


ANYTHING = Access()
"""The access of a caller that may name everything."""


def _granted(name: str, granted: Collection[str]) -> bool:
    return not granted or name in granted
