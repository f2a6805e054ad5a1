"""How many redundant experts were weighed: the choice follows, and its figures are those of the plan."""

from ...errors import CertificationError
from ...runtime.plan import Evaluation, Plan
from ..balance_options import Redundancy
from .certificate import Certificate
from .structure import placement_options, slot_widths

__all__ = ["check_redundancy"]

MATRICES = 3  # of an expert: gate, up and down


def check_redundancy(plan: Plan, certificate: Certificate) -> None:
    """Refuse slots that are not those of the candidate that is chosen, and figures of it that the plan has not."""
    options = placement_options(plan)
    redundancy = options.redundancy
    if redundancy is None:
        return
    widths = [width for rank, width in enumerate(slot_widths(plan)) if rank not in options.dead]
    if {*widths} != {redundancy.chosen.slots}:
        raise CertificationError(
            f"{sorted({*widths})} slots a device; the redundancy that was weighed says {redundancy.chosen.slots}"
        )
    for one in redundancy.candidates:
        certificate.agree("redundant experts", one.redundant, one.slots * len(widths) - plan.model.num_experts)
        certificate.agree("bytes of experts on a device", one.memory_bytes, _bytes(plan, one.slots))
    if plan.evaluation is not None and plan.strategies[-1] == options.strategy:  # else it was judged anew
        _check_figures(plan.evaluation, redundancy, certificate)
    certificate.unchecked.append("what other numbers of redundant experts give")


def _check_figures(evaluation: Evaluation, redundancy: Redundancy, certificate: Certificate) -> None:
    """Those of the choice are those of the plan, on the part that judges."""
    if redundancy.held_out != (evaluation.held_out is not None):
        raise CertificationError(f"redundancy weighed on held-out units: {redundancy.held_out}; the plan was not so")
    metrics, chosen = evaluation.judging.contenders[0].metrics, redundancy.chosen
    claimed: dict[str, float | None] = {"balance": chosen.balance, "balance_p95": chosen.balance_p95}
    if redundancy.metric != "balance" or chosen.seconds is not None:
        claimed[redundancy.metric] = chosen.seconds
    for name, figure in claimed.items():
        certificate.agree(f"redundancy: {name}", figure, metrics[name].value if name in metrics else None)


def _bytes(plan: Plan, slots: int) -> int | None:
    """Of the experts in so many slots, over all layers; None where the sizes of the model are not known."""
    model = plan.model
    if not (model.ffn_size and model.hidden_size and model.dtype_bytes):
        return None
    return slots * model.num_layers * MATRICES * model.ffn_size * model.hidden_size * model.dtype_bytes
