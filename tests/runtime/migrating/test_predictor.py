"""The predictor: what it predicts, that its file is exact, and that no file can hurt."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from moeplan.errors import InputError
from moeplan.runtime.migrating.predictor import Predictor

SHAPES = st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(1, 4))


def test_copies_are_predicted_layer_by_layer_and_never_negative() -> None:
    predictor = Predictor(np.array([[[1.0, -2.0], [0.5, 0.0]]], np.float32))
    predicted = predictor.copies(0, np.array([[2, 4], [0, 1]]))
    assert predicted is not None
    assert predicted.tolist() == [[4, 0], [0.5, 0]]
    assert predictor.copies(1, np.array([[2, 4]])) is None


@settings(max_examples=30)
@given(st.data(), SHAPES)
def test_its_file_gives_it_back(data: st.DataObject, shape: tuple[int, int, int]) -> None:
    values = data.draw(hnp.arrays(np.float32, shape, elements=st.floats(-1e6, 1e6, width=32)))
    contents = Predictor(values).to_bytes()
    np.testing.assert_array_equal(Predictor.from_bytes(contents, shape).per_pair, values)
    assert contents == Predictor(values).to_bytes()


@settings(max_examples=60)
@given(st.data())
def test_a_damaged_file_is_refused_or_a_predictor_of_the_shape(data: st.DataObject) -> None:
    contents = bytearray(Predictor(np.ones((1, 2, 3), np.float32)).to_bytes())
    if data.draw(st.booleans()):
        del contents[data.draw(st.integers(0, len(contents) - 1)) :]
    else:
        contents[data.draw(st.integers(0, len(contents) - 1))] = data.draw(st.integers(0, 255))
    try:
        predictor = Predictor.from_bytes(bytes(contents), (1, 2, 3))
    except InputError:
        return
    assert predictor.per_pair.shape == (1, 2, 3)
    assert np.isfinite(predictor.per_pair).all()


def test_numbers_that_are_not_finite_are_refused() -> None:
    contents = Predictor(np.full((1, 1, 2), np.nan, np.float32)).to_bytes()
    with pytest.raises(InputError, match="not finite"):
        Predictor.from_bytes(contents, (1, 1, 2))
    with pytest.raises(InputError, match="expected copies_per_pair float32"):
        Predictor.from_bytes(contents, (1, 2, 2))


def test_copies_are_the_same_sums_in_any_order_and_of_any_part() -> None:
    rng = np.random.default_rng(0)
    per_pair, pairs = rng.normal(size=(1, 64, 8)).astype(np.float32), rng.integers(0, 2**20, (40, 64))
    order = rng.permutation(64)
    predicted = Predictor(per_pair).copies(0, pairs)
    assert predicted is not None
    np.testing.assert_array_equal(predicted, Predictor(per_pair[:, order]).copies(0, pairs[:, order]))
    np.testing.assert_array_equal(predicted[7:9], Predictor(per_pair).copies(0, pairs[7:9]))
    np.testing.assert_allclose(predicted, np.maximum(pairs @ per_pair[0].astype(float), 0), rtol=1e-5, atol=2)
