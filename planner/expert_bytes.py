"""What an expert weighs."""

from ..traces.model import ModelSpec

__all__ = ["MATRICES", "expert_bytes"]

MATRICES = 3  # of an expert, each hidden x ffn: gate, up and down


def expert_bytes(model: ModelSpec) -> int | None:
    """Bytes of an expert's weights, in elements of the model's dtype; None where a size is not known."""
    if model.ffn_size is None or model.copy_bytes is None:
        return None
    return MATRICES * model.ffn_size * model.copy_bytes
