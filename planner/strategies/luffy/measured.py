"""Cost of condensing, measured on the model: its loss and the error of its MoE layers, sample by sample.

Legend: I samples of a part; B samples of a step; S positions; T tokens; K experts per token; L MoE layers; M hidden
size; E experts; V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ....errors import MismatchError, UsageError
from ....files import read_text
from ....solvers.arrays import Floats, Ints
from ....traces.reader import Trace
from ....traces.recording.layers import MoELayer, moe_layers
from ...evaluate.choosers import choosers
from ...evaluate.cohort import Located
from ...evaluate.journey import Journey
from ...evaluate.scene import Scene
from .folding import Counted, Gains, Seats, Way, as_int64, sent

EMBEDDED = "embedded"
MAX_TEXT_BYTES = 64 * 2**20
ALIKE = 0.99  # of the choices of a model on its own text: those of other batches round otherwise
CHECKED = 8  # samples
NEAR = 256  # tokens of an expert whose gain is taken
APART = 0.1  # least distance of two of them: nearer ones are rounding
DRAWS = 1000


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """Figures of a way to send rows on a part."""

    counted: Counted
    bits: Floats  #: Of the predicted tokens of each sample, `[I]`
    predicted: Floats  #: How many these are, `[I]`
    #: errors, outputs: squares of what MoE layers give otherwise, and of what they give, `[I, L]`
    errors: Floats
    outputs: Floats
    vocabulary: int

    @property
    def loss(self) -> float:
        """Bits per predicted token."""
        return float(self.bits.sum() / self.predicted.sum())

    def rise(self, exact: "Judged", seed: int) -> tuple[float, float, float]:
        """Bits per token above exact rows, with their 95 % interval over samples."""
        return _interval(self.bits - exact.bits, self.predicted, seed, lambda sums, of: sums / of)

    def error(self, seed: int) -> tuple[float, float, float]:
        """|y - y'| / |y| of the outputs of MoE layers, mean over layers, with its interval over samples."""
        return _interval(self.errors, self.outputs, seed, lambda sums, of: np.sqrt(sums / of).mean(axis=-1))


def _interval(
    of_I: Floats, over_I: Floats, seed: int, figure: Callable[[Floats, Floats], Floats]
) -> tuple[float, float, float]:
    """A figure of sums over samples, and the ends of the middle 95 % of its bootstrap draws."""
    size = len(of_I)
    times_RI = np.random.default_rng(seed).multinomial(size, np.full(size, 1 / size), DRAWS)
    low, high = np.quantile(figure(times_RI @ of_I, times_RI @ over_I), (0.025, 0.975))
    return float(figure(of_I.sum(0), over_I.sum(0))), float(low), float(high)


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """Samples that run at once."""

    tokens: Tensor  #: int64 `[B, S]`
    place: Ints  #: Of each in its part, `[B]`
    seats: Seats


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of a call of a layer's experts."""

    x: Tensor  #: `[T, M]`
    ids: Tensor  #: int64 `[T, K]`
    weights: Tensor  #: `[T, K]`


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """A model on one part of the text that a trace was recorded on."""

    model: nn.Module
    layers: Sequence[MoELayer]
    steps: Sequence[Step]

    def count(self, way: Way) -> Counted:
        """The rows of a way."""
        return self.judge(way).counted

    @torch.inference_mode()
    def judge(self, way: Way) -> Judged:
        """Run the model with rows sent a way."""
        size, vocabulary = sum(len(step.place) for step in self.steps), 0
        counted, bits, predicted = Counted(), np.zeros(size), np.zeros(size)
        errors, outputs = np.zeros((2, size, len(self.layers)))
        for step in self.steps:

            def replaced(layer: int, module: Callable[..., Any], called: Call, y: Tensor, step: Step = step) -> Tensor:
                """Outputs of a layer's experts on the rows that are sent, whose errors are added up."""
                way_TM, counts = sent(way, layer, module, called.x, called.ids, called.weights, step.seats)
                counted.add(layer, counts)
                for table, of_TM in ((errors, way_TM - y), (outputs, y)):
                    squares_BS = of_TM.double().square().sum(1).view(len(step.place), -1)
                    table[step.place, layer] = squares_BS.sum(1).numpy()
                return way_TM

            with _replacing(self.layers, replaced):
                logits_BSV = _logits(self.model, step.tokens)
            vocabulary = logits_BSV.shape[-1]
            loss_BS = functional.cross_entropy(
                logits_BSV[:, :-1].flatten(0, 1).float(), step.tokens[:, 1:].flatten(), reduction="none"
            ).view(len(step.tokens), -1)
            bits[step.place] = loss_BS.double().sum(1).numpy() / np.log(2)
            predicted[step.place] = loss_BS.shape[1]
        return Judged(counted, bits, predicted, errors, outputs, vocabulary)

    @torch.inference_mode()
    def gains(self, num_experts: int) -> Gains:
        """Change of an expert's output per distance of its inputs' directions, over the norm of the residual stream.

        The median over pairs of the first step's tokens; an expert without pairs has the layer's median.
        """
        gain_LE, norm_L = np.full((len(self.layers), num_experts), np.nan), np.ones(len(self.layers))

        def look(layer: int, module: Callable[..., Any], called: Call, y: Tensor) -> Tensor:
            """Outputs of a layer's experts, unchanged, once the gain of each is taken on its first inputs."""
            for expert in range(num_experts):
                x_nM = called.x[(called.ids == expert).any(1)][:NEAR]
                if len(x_nM) > 1:
                    weight_nK = called.weights.new_zeros(len(x_nM), called.ids.shape[1])
                    weight_nK[:, 0] = 1
                    y_nM = module(x_nM, called.ids.new_full(weight_nK.shape, expert), weight_nK)
                    u_nM = functional.normalize(x_nM.float(), dim=1)
                    far_nn, change_nn = torch.cdist(u_nM, u_nM), torch.cdist(y_nM.float(), y_nM.float())
                    if (apart_nn := far_nn > APART).any():
                        gain_LE[layer, expert] = float((change_nn / far_nn)[apart_nn].median())
            return y

        def stream(layer: int) -> Callable[..., None]:
            """Hook on the block around a layer's experts."""

            def seen(_module: nn.Module, _args: Any, output: Any) -> None:
                """Take the norm of the residual stream after the block."""
                h: Tensor = output[0] if isinstance(output, tuple) else output
                norm_L[layer] = float(h.float().norm(dim=-1).mean())

            return seen

        with ExitStack() as hooks:
            for layer, experts in enumerate(self.layers):
                around = self.model.get_submodule(experts.name.rpartition(".")[0].rpartition(".")[0])
                hooks.callback(around.register_forward_hook(stream(layer)).remove)
            hooks.enter_context(_replacing(self.layers, look))
            _logits(self.model, self.steps[0].tokens)
        gain_LE = np.where(np.isnan(gain_LE), np.nanmedian(gain_LE, axis=1, keepdims=True), gain_LE)
        return tuple(tuple(float(f"{gain:.4g}") for gain in row) for row in gain_LE / norm_L[:, None])


def measured(scene: Scene, journey: Journey, named: str, text: Path) -> list[Measured]:
    """The model on the parts of a scene.

    Raises
    ------
    UsageError
        The trace's samples are not pieces of one length, in steps that can be run again, or the model's experts are not
        called with ids.
    MismatchError
        It is of another model or text.
    """
    trace, length = scene.source, _length(scene)
    assert isinstance(trace, Trace)
    model, samples_IS = _loaded(named, text, length)
    layers = moe_layers(model)
    if any(not layer.at_input for layer in layers) or len(layers) != trace.model.num_layers:
        raise UsageError(
            f"--model {named}: {len(layers)} MoE layers; expected the {trace.model.num_layers} of the trace, whose"
            " experts are called with hidden states, ids and gate weights"
        )
    last = max(int(cohort.unit_ids.max(initial=0)) for cohort in scene.cohorts)
    if last >= len(samples_IS):
        raise MismatchError(
            f"{text}: {len(samples_IS):,} samples of {length:,} tokens, the trace has number {last:,}; give the text"
            " that it was recorded on"
        )
    shape, parts = (scene.cluster.num_devices, scene.cluster.devices_per_node), list[Measured]()
    for cohort, ((choose, _),) in zip(scene.cohorts, choosers(scene, [journey]), strict=True):
        assert cohort.step is not None
        assert cohort.home is not None
        row_U = np.where(cohort.step >= 0, cohort.step_of_row[cohort.step], -1)
        place_U, steps = np.cumsum(row_U >= 0) - 1, list[Step]()
        for number in range(cohort.num_steps):
            (unit_B,) = np.nonzero(row_U == number)
            sample_B = cohort.unit_ids[unit_B]
            position_T, unit_T = np.tile(np.arange(length), len(unit_B)), unit_B.repeat(length)
            home_T, sample_T = cohort.home[unit_T], sample_B.repeat(length)
            at = Located(np.arange(len(unit_T)), unit_T, home_T, cohort.step[unit_T], position_T, sample_T + position_T)
            seats = Seats(as_int64(home_T), torch.zeros(len(home_T), dtype=torch.int64), shape, _choosing(choose, at))
            steps.append(Step(samples_IS[sample_B], place_U[unit_B], seats))
        parts.append(Measured(model, layers, steps))
    _check_routing(scene, model, layers, samples_IS, named)
    return parts


def _choosing(choose: Any, at: Located) -> Callable[[int, Tensor], Tensor]:
    return lambda layer, ids_TK: as_int64(choose(layer, ids_TK.numpy().astype(np.uint16), at.home, at))


def _length(scene: Scene) -> int:
    """The tokens of every sample; UsageError where they differ, or their steps cannot be run again."""
    tokens = np.unique(np.concatenate([cohort.unit_tokens for cohort in scene.cohorts]))
    whole = all(cohort.step is not None and cohort.home is not None for cohort in scene.cohorts)
    if scene.index.kind != "sample" or len(tokens) != 1 or not whole or tokens[0] < 2:
        raise UsageError(
            "--model needs a trace of whole samples of one length, in steps that were not recorded: moeplan trace"
            " record MODEL --text FILE; leave --model out, and the hidden states beside the trace tell the rows"
        )
    return int(tokens[0])


def _loaded(named: str, text: Path, length: int) -> tuple[nn.Module, Tensor]:
    """The model and the samples of a text, int64 `[I, S]`."""
    content = read_text(text, what="a text", max_bytes=MAX_TEXT_BYTES)
    if named == EMBEDDED:
        from ...demo.model import load_embedded
        from ...demo.text import samples

        return load_embedded(), torch.from_numpy(samples(content, length))
    from ....traces.huggingface.checkpoint import load_model, load_tokenizer
    from ....traces.huggingface.prompts import text_prompts

    if not (directory := Path(named)).is_dir():
        raise UsageError(f"--model {named!r}; expected {EMBEDDED}, or the directory of a Hugging Face model")
    prompts = text_prompts(content, load_tokenizer(directory), length)
    return load_model(directory, device="cpu").train(mode=False), torch.tensor(prompts)


def _check_routing(scene: Scene, model: nn.Module, layers: Sequence[MoELayer], samples_IS: Tensor, named: str) -> None:
    """Refuse a model or text other than the trace's: its tokens go to other experts."""
    sample_B = scene.cohorts[-1].unit_ids[:CHECKED]
    chosen = list[Ints]()

    def look(_layer: int, _module: Any, called: Call, y: Tensor) -> Tensor:
        """Outputs of a layer's experts, unchanged, once its choices are kept."""
        chosen.append(called.ids.sort(1).values.numpy())
        return y

    with torch.inference_mode(), _replacing(layers, look):
        _logits(model, samples_IS[sample_B])
    ids, order = list[Ints](), list[Ints]()
    for batch, unit_T in scene.index.batches(scene.source, scene.phases or None):  # type: ignore[arg-type]
        of_T = np.isin(unit_T, sample_B)
        ids.append(np.sort(batch.ids[of_T], axis=2).astype(np.int64))
        order.append(np.stack([unit_T[of_T], batch.position[of_T]]))
    unit_T, position_T = np.concatenate(order, axis=1)
    ids_TLK = np.concatenate(ids)[np.lexsort((position_T, unit_T))]
    ours_TLK = np.stack(chosen, axis=1)
    alike = float((ours_TLK == ids_TLK).mean()) if ours_TLK.shape == ids_TLK.shape else 0.0
    if alike < ALIKE:
        raise MismatchError(
            f"--model {named}: {100 * alike:.0f} % of its choices of experts are the trace's; give the model and the"
            " text that it was recorded on"
        )


@contextmanager
def _replacing(
    layers: Sequence[MoELayer], replace: Callable[[int, Callable[..., Any], Call, Tensor], Tensor]
) -> Iterator[None]:
    """Let a function give what the experts of every layer return; it may call them itself."""
    busy = [False]

    def hooked(layer: int) -> Callable[..., Any]:
        """Hook on a layer's experts."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            """Outputs by the function; None, so that they stay, where it is the function that calls the experts."""
            if busy[0]:
                return None
            busy[0] = True
            x, ids, weights = (*args, *kwargs.values())[:3]
            call = Call(x.flatten(0, -2), ids.flatten(0, -2).long(), weights.flatten(0, -2))
            try:
                return replace(layer, module, call, output.flatten(0, -2)).view_as(output)
            finally:
                busy[0] = False

        return hook

    with ExitStack() as hooks:
        for number, layer in enumerate(layers):
            hooks.callback(layer.module.register_forward_hook(hooked(number), with_kwargs=True).remove)
        yield


def _logits(model: nn.Module, tokens_BS: Tensor) -> Tensor:
    output = model(tokens_BS)
    logits_BSV: Tensor = getattr(output, "logits", output)
    return logits_BSV
