"""Screen and page of an exflow plan: savings by coherence and by placement, the search, the cost of re-planning."""

from collections.abc import Iterator

from ....runtime.plan import Part, Plan
from ...document import Section, Text
from ...evaluate.metrics import COPIES, NODE_COPIES
from ...figures import find, megabytes, value
from ...options import PlacementOptions

__all__ = ["remarks", "sections", "stays_in_force"]


def remarks(plan: Plan, part: Part) -> Iterator[str]:
    """Whether to replace the plan in force, what saves how much, and what would save more."""
    yield from _replanned(plan, part)
    ours = part.contenders[0]
    if ours.dispatch_model == "coherent":
        yield _split_gain(plan, part)
        yield from _even_kv(plan, part)
    elif plan.cluster.num_nodes > 1:
        yield _node_copies(plan, part)
    search = PlacementOptions.of(plan).search
    if search is not None and search.objective == "hops" and plan.model.top_k > 1 and ours.dispatch_model == "coherent":
        yield f"only the first choice of each token was considered; --objective copies considers all {plan.model.top_k}"


def sections(plan: Plan, width: int) -> Iterator[Section]:
    """The hops after each stage of the search, why a bound is not thorough, and what a cap costs."""
    if (search := PlacementOptions.of(plan).search) is None:
        return
    lines = [f"no thorough bound of what stays on a {level}: {reason}" for level, reason in search.simple.items()]
    what = "pairs apart" if search.objective == "copies" else "hops"
    lines += [
        f"{stage.name:<9} {stage.inter_hops:.1%} {what} between nodes, {stage.intra_hops:.1%} inside them"
        for stage in search.stages
    ]
    if (cap := search.cap) is not None:
        lines.append(
            f"capped    at {cap.max_load:g} of a layer's mean load per device; without, in less time,"
            f" {cap.objective_without:.4g} with up to {cap.highest_without:.3g}"
        )
    if lines:
        yield Section("Search", (Text(tuple(lines)),), verbose=True)


def _split_gain(plan: Plan, part: Part) -> str:
    """Split of a coherent plan's savings in copies: by coherence, and by the placement."""
    assert plan.verdict is not None
    ours, home = part.contenders[0], find(part, plan.verdict.against)
    stays = next(one for one in part.contenders[1:] if one.dispatch_model == "coherent")
    coherence = value(home, COPIES) - value(stays, COPIES)
    placement = value(stays, COPIES) - value(ours, COPIES)
    words = (
        f"of {coherence + placement:.3f} copies saved, {coherence:.3f} come from coherence alone and {placement:.3f}"
        " from the placement"
    )
    return words if placement > 0 else f"{words}: contiguous experts with coherence save as much"


def _even_kv(plan: Plan, part: Part) -> Iterator[str]:
    """The size of K and V up to which coherence moves fewer bytes than tokens that return home.

    Notes
    -----
    Per token and layer, in hidden vectors, c_standard copies move when tokens return home, and c_coherent + (D-1) kv/d
    when K and V are gathered; equal at kv/d = (c_standard - c_coherent) / (D - 1).
    """
    assert plan.verdict is not None
    ours, base = part.contenders[0], find(part, plan.verdict.against)
    kv_size, hidden = plan.model.attention.kv_size, plan.model.hidden_size
    even = (value(base, COPIES) - value(ours, COPIES)) / (plan.cluster.num_devices - 1)
    limit = f"while kv/d is below {even:.2f}" if even > 0 else "never: there are no fewer copies"
    if kv_size and hidden:
        ratio = f"{kv_size / hidden:.2f}"
        yield f"coherence moves fewer bytes {limit}; this model's kv/d (K and V over the hidden vector) is {ratio}"
    else:
        yield (
            f"coherence moves fewer bytes {limit}; this model's kv/d is not in the trace (2 for MHA, 0.5 for Mixtral's"
            " GQA, 0.08 for DeepSeek's MLA): import it with --hidden-size and --kv-size"
        )


def _node_copies(plan: Plan, part: Part) -> str:
    """Savings by kind of engine, where tokens return home over several nodes."""
    assert plan.verdict is not None
    ours, base = part.contenders[0], find(part, plan.verdict.against)
    if plan.verdict.metric == NODE_COPIES:
        each = f"{value(ours, COPIES):.2f} per token and layer (today {value(base, COPIES):.2f})"
        return (
            f"engines that send a token once per node (DeepEP) save this; moeplan.runtime sends one per device: {each}"
        )
    each = f"{value(ours, NODE_COPIES):.2f} copies to nodes (today {value(base, NODE_COPIES):.2f})"
    return f"an engine that sends a token once per node (DeepEP) makes {each} per token and layer"


def _replanned(plan: Plan, part: Part) -> Iterator[str]:
    """Say what replacing the plan in force takes, and whether that is worth it."""
    if (options := PlacementOptions.of(plan).replanned) is None:
        return
    size = "" if options.bytes_moved is None else f" ({megabytes(options.bytes_moved)} MB)"
    weighed = "" if options.horizon_tokens is None else f", weighed over {options.horizon_tokens:,.0f} tokens"
    moved = f"{options.experts_moved:,} of {options.experts_held:,} experts move{size}{weighed}"
    if not options.experts_moved:
        yield "keep the plan in force: no move is worth its price"
    elif options.verdict.value == "none":
        yield f"keep the plan in force: no benefit over it; {moved}"
    else:
        paid = options.paid_back_tokens
        back = "" if paid is None else f", paid back after {paid:,.0f} tokens"
        yield f"worth replacing the plan in force: {moved}{back}"


def stays_in_force(plan: Plan) -> bool:
    """Whether the plan in force is better kept than replaced by this one."""
    options = PlacementOptions.of(plan).replanned
    return options is not None and (not options.experts_moved or options.verdict.value == "none")
