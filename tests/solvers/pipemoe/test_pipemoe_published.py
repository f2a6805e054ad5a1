from collections import Counter

from moeplan.solvers.pipemoe.presets import PRESETS, table_iv


def test_table_iv_has_288_configurations_all_different() -> None:
    layers = list(table_iv())
    assert len(layers) == len(set(layers)) == 288
    assert Counter(layer.ffn for layer in layers) == dict.fromkeys((1024, 2048, 4096, 8192), 72)
    assert Counter(layer.batch for layer in layers) == dict.fromkeys((2, 4, 8), 96)


def test_work_counts_bytes_and_multiply_adds_and_local_experts_change_neither() -> None:
    one, two = list(table_iv())[:2]
    assert (one.local_experts, two.local_experts) == (1, 2)
    assert one.dispatched_bytes() == two.dispatched_bytes() == 4 * 2 * 512 * 1024
    assert one.dispatched_bytes(top_k=2, capacity_factor=1.5, element_bytes=2) == 6 * 2 * 512 * 1024
    assert one.multiply_adds(top_k=2, capacity_factor=1.5) == 3 * 2 * 512 * 1024 * 1024


def test_the_presets_are_those_of_the_paper_in_our_units() -> None:
    assert {preset.num_devices: (preset.a_a, preset.b_a) for preset in PRESETS.values()} == {
        16: (1.72e-5, 2.96e-10),
        32: (2.09e-4, 3.54e-10),
        64: (7.83e-4, 3.84e-10),
    }
    for preset in PRESETS.values():
        assert preset.a_e == 2 * 6.19e-5
        per_byte_s, n_e = 2 * 4.1e-14, 4.0 * 4096 * 1024 * 1024  # the paper's n_e counts bytes of fp32
        assert preset.b_e * n_e / 4 == per_byte_s * n_e
    assert "slip" in PRESETS["rtx2080ti-16"].note
