"""The dynamic loss scale follows DeepSpeed's rules; expected scales were worked out by hand from its loss_scaler.py."""

import pytest

from hybrid_engine.optim.optimizer import DynamicLossScaler, StaticLossScaler

pytestmark = pytest.mark.quick

OVERFLOW, FINE = True, False


def _scales(scaler, events):
    scales = []
    for overflow in events:
        scaler.update(overflow)
        scales.append(scaler.scale)
    return scales


def test_the_scale_doubles_after_each_window_without_overflow():
    # DeepSpeed counts from the step after the first one, or after an overflow.
    assert _scales(DynamicLossScaler(8, window=3), [FINE] * 8) == [8, 8, 8, 16, 16, 16, 32, 32]
    assert _scales(DynamicLossScaler(8, window=1), [FINE] * 3) == [8, 16, 32]
    events = [FINE, OVERFLOW, FINE, FINE, FINE, FINE, FINE, FINE, FINE]
    assert _scales(DynamicLossScaler(8, window=3, hysteresis=1), events) == [8, 4, 4, 4, 4, 8, 8, 8, 16]


def test_hysteresis_forgives_overflows_before_the_first_halving():
    scaler = DynamicLossScaler(8, window=100, hysteresis=3)
    assert _scales(scaler, [OVERFLOW, FINE, OVERFLOW, OVERFLOW, OVERFLOW]) == [8, 8, 8, 4, 2]


def test_an_overflow_restarts_the_window_and_growth_refills_the_hysteresis():
    scaler = DynamicLossScaler(8, window=2, hysteresis=2)
    events = [OVERFLOW, FINE, FINE, FINE, OVERFLOW, OVERFLOW]
    assert _scales(scaler, events) == [8, 8, 8, 16, 16, 8]


def test_consecutive_hysteresis_is_refilled_by_every_good_step():
    scaler = DynamicLossScaler(8, window=100, hysteresis=2, consecutive_hysteresis=True)
    assert _scales(scaler, [OVERFLOW, FINE, OVERFLOW, FINE, OVERFLOW, OVERFLOW]) == [8, 8, 8, 8, 8, 4]


def test_an_overflow_at_the_smallest_scale_is_an_error_that_says_what_to_do():
    scaler = DynamicLossScaler(2, hysteresis=1, min_scale=1)
    scaler.update(OVERFLOW)
    assert scaler.scale == 1
    with pytest.raises(ValueError, match=r"min_loss_scale=1.*bf16"):
        scaler.update(OVERFLOW)


def test_a_static_scale_never_changes():
    assert _scales(StaticLossScaler(128), [OVERFLOW, FINE, OVERFLOW]) == [128, 128, 128]


def test_a_restored_scaler_goes_on_like_the_one_it_came_from():
    events = [FINE, OVERFLOW, FINE, FINE, OVERFLOW, OVERFLOW, FINE, FINE, FINE, OVERFLOW]
    for cut in range(len(events)):
        whole, first, second = (DynamicLossScaler(64, window=2, hysteresis=2) for _ in range(3))
        expected = _scales(whole, events)
        _scales(first, events[:cut])
        second.load_state_dict(first.state_dict())
        assert _scales(second, events[cut:]) == expected[cut:]
