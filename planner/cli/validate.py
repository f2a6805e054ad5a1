"""`moeplan validate`: check a file that places experts by the rules of the engine that reads it."""

from pathlib import Path
from typing import Annotated

import typer

from ...errors import InputError, printable
from .flags import Json, optional
from .screen import print_json


def validate(
    file: Annotated[Path, typer.Argument(help="The file, or a directory that moeplan apply --engine wrote.")],
    engine: Annotated[str, typer.Option(help="Whose: sglang, vllm, vllm-ascend, tensorrt-llm, tutel.")],
    hf_config: Annotated[Path, typer.Option(help="The config.json of the model that is served.")],
    ep_size: Annotated[int | None, optional("Expert-parallel devices.", min=1, max=65_536)] = None,
    redundant: Annotated[int | None, optional("Slots a layer beyond its experts.", min=0, max=2**31 - 1)] = None,
    as_json: Json = False,
) -> None:
    """Check anybody's placement file before an engine meets it; stricter than the engines are.

    One line for each finding: lengths, missing layers, ids, experts left out or twice on a device, what does not
    divide. Exits with 3 when there is one. Without --ep-size what needs the devices is not checked, without --redundant
    the first row says how many slots there are.

    \b
    Examples:
      moeplan validate placement --engine sglang --hf-config config.json --ep-size 32 --redundant 32
    """
    from ...runtime.exports import Expected
    from ...runtime.exports import validate as findings_of
    from ...traces.huggingface.config import read_config, spec_of_config

    expected = Expected(
        model=spec_of_config(hf_config),
        model_type=read_config(hf_config)["model_type"],
        num_devices=ep_size,
        redundant=redundant,
    )
    findings = [printable(finding) for finding in findings_of(file, engine, expected)]
    if as_json:
        print_json({"file": str(file), "engine": engine, "findings": findings})
    elif findings:
        print("\n".join(findings))
    else:
        unchecked = "" if ep_size else "; without --ep-size nothing that depends on the devices"
        print(f"{file} is sound for {engine}: {expected.model.num_layers} MoE layers{unchecked}")
    if findings:
        raise InputError(
            f"{file}: {len(findings)} finding{'s' * (len(findings) > 1)} for {engine}, above; mend the file, or write"
            " it anew with moeplan apply"
        )
