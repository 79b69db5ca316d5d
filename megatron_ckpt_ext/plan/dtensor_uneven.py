"""Placing the uneven shards of a state dict for torch's own planners, to load it, with one exchange for all of them."""

from collections.abc import Mapping
from typing import Any

from megatron_ckpt_ext.compat.dtensor import DTensor, flattened, hang_chunk
from megatron_ckpt_ext.plan.dtensor_exchange import agree_on_offsets
from megatron_ckpt_ext.plan.dtensor_holdings import DtensorHoldings, Entry

__all__ = ["place_uneven_shards"]


def place_uneven_shards(state_dict: Mapping[str, Any], wrapper: Any) -> None:
    """Do what Megatron-FSDP's ``preprocess_state_dict_for_uneven_dtensor`` does with a gather a tensor.

    Called on all ranks: one gather_object and one scatter_object_list. Ranks may have different keys. A save by
    ``FsdpDtensorSaver`` does not need it; ``dcp.load`` into uneven shards does.

    Args:
        state_dict: flat or nested; its DTensors are changed in place.
        wrapper: torch's ``_DistWrapper`` of all ranks.

    Raises:
        ExchangeError: on every rank: the shards of a tensor do not make up the tensor, with its key; or the state dict
            of a rank cannot be read.
    """
    flat: dict[str, Any] = {}

    def sharded() -> list[Entry]:  # in the exchange: what goes wrong in it is heard by the peers
        flat.update(flattened(state_dict)[0])
        return [entry for entry in DtensorHoldings.of(flat).entries if entry.is_sharded]

    offsets = agree_on_offsets(sharded, wrapper)
    for key, offset in offsets.items():
        value = flat[key]
        if isinstance(value, DTensor):
            hang_chunk(value, offset)
