"""What the numbers of steps lead to: skipping, stopping, going back."""

import math

import pytest
import torch

from mamba3.progress import progress_bar
from mamba3.train.config import StepRecipe
from mamba3.train.log import MetricsLog
from mamba3.train.readings import HALVINGS, NotFinite, Readings, Spike
from mamba3.train.spikes import SpikeDetector
from mamba3.train.step import StepOutput


def readings_of(how, **options):
    bar = progress_bar(False, total=100)
    return Readings(MetricsLog(None, last_step=0), bar, StepRecipe(**how), **options)


def add(readings, step, loss=1.0, norm=1.0):
    output = StepOutput(torch.tensor(loss), torch.tensor(norm))
    readings.add(step, output, lr=0.1, tokens=3, data_wait_s=0.0)


def test_gradients_of_float16_may_overflow_as_often_as_the_scale_can_be_halved():
    readings = readings_of({"precision": "fp16"})
    for step in range(1, HALVINGS + 1):
        add(readings, step, norm=math.inf)
    add(readings, 25)  # a good one in between
    for step in range(26, 26 + HALVINGS):
        add(readings, step, norm=math.nan)
    assert readings.left_out == 2 * HALVINGS
    with pytest.raises(NotFinite, match=r"gradient norm is inf at step 50 \(batch 49\)"):
        add(readings, 50, norm=math.inf)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "float32"])
def test_a_loss_that_is_not_finite_stops_the_run_in_any_precision(precision):
    with pytest.raises(NotFinite, match=r"loss is nan at step 1 \(batch 5\)"):
        add(readings_of({"precision": precision}, skipped=5), 1, loss=math.nan)
    readings = readings_of({"precision": precision, "nonfinite": "skip"})
    for step in range(40):
        add(readings, step, loss=math.nan)
    assert readings.left_out == 40


def test_gradients_of_other_precisions_may_not_overflow():
    with pytest.raises(NotFinite, match="gradient norm is inf"):
        add(readings_of({"precision": "bf16"}), 1, norm=math.inf)


def test_a_spike_is_raised_with_the_last_step_whose_loss_is_known():
    readings = readings_of({}, spikes=SpikeDetector(window=4))
    for step, loss in enumerate([2.0, 2.1, 2.0, 2.1, 5.0, 6.0], start=1):
        add(readings, step, loss=loss)
    with pytest.raises(Spike, match="jumped at step 5, and is 7 at step 7") as spike:
        add(readings, 7, loss=7.0)
    assert spike.value.step == 7
