"""Importer of SGLang's `expert_distribution_recorder_*.pt`, of the modes stat, stat_approx, per_pass and per_token.

===============  =====================================================================================================
stat             `logical_count` [steps, layers, experts], of rank 0 only: counts by step, of `sglang_stat`
per_pass         `records` of every rank with `global_physical_count`: counts by step, of `sglang_passes`
per_token        `records` of every rank with `topk_ids_of_layer`: tokens, of `sglang_tokens`
===============  =====================================================================================================

All name every hidden layer; those without experts are left out.
"""

from ...errors import InputError
from .sglang_passes import PassesSource
from .sglang_records import records_of
from .sglang_stat import StatSource
from .sglang_tokens import TokensSource
from .source import Given, naming
from .torch_file import integers, load, recognises

__all__ = ["open_source", "recognises"]


def open_source(given: Given) -> StatSource | PassesSource | TokensSource:
    """The recording in files of one mode: of stat one file, else one or more of every rank.

    Raises
    ------
    InputError
        Damaged, of another layout, of several modes, or not of all ranks.
    """
    dumps = {}
    for path in given.files:
        with naming(path):
            dumps[path] = load(path)
            if not (isinstance(dumps[path], dict) and {"logical_count", "records"} & dumps[path].keys()):
                raise InputError("neither logical_count nor records; expected what SGLang's recorder dumps")
    if any("logical_count" in dump for dump in dumps.values()):
        dump = dumps[given.file]
        return StatSource(integers(dump["logical_count"], "logical_count", 3), given.model)
    records = records_of(dumps)
    return TokensSource(records, given.model) if records.of_tokens else PassesSource(records, given.model)
