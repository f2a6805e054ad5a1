"""Traffic adds up."""

from moeplan.runtime.traffic import Traffic


def test_traffic_of_layers_sums_figures_and_keeps_loads_apart() -> None:
    layers = [Traffic(1, 2, 3, 4, 5, (6,)), Traffic(10, 20, 30, 40, 50, (60,))]
    assert Traffic.total(layers) == Traffic(11, 22, 33, 44, 55, (6, 60))
