"""Traffic adds up."""

from moeplan.runtime.engine.traffic import Traffic


def test_traffic_of_layers_sums_figures_and_keeps_loads_apart() -> None:
    layers = [Traffic(1, 2, 3, 4, 5, (6,)), Traffic(10, 20, 30, 40, 50, (60,))]
    assert Traffic.total(layers) == Traffic(11, 22, 33, 44, 55, (6, 60))


def test_a_later_forward_adds_its_loads_layer_by_layer() -> None:
    earlier, later = Traffic(copies=2, kv_bytes=5, loads=(1, 2)), Traffic(copies=1, loads=(10, 20, 30))
    assert earlier.then(later) == Traffic(copies=3, kv_bytes=5, loads=(11, 22, 30))
    assert earlier.then(Traffic(return_bytes=7)) == Traffic(copies=2, kv_bytes=5, return_bytes=7, loads=(1, 2))
