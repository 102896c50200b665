import csv

import pytest

from tests.training import run


def numbers(run_dir, tag):
    with (run_dir / "metrics.csv").open(newline="") as file:
        return [float(row[tag]) for row in csv.DictReader(file) if row.get(tag)]


def test_resident_set_on_a_cpu(tmp_path):
    run_dir = run(tmp_path, "run.name=a")
    values = numbers(run_dir, "mem/resident")
    assert len(values) == 6
    assert all(50 < value < 100_000 for value in values)  # MiB of a process that has loaded PyTorch
    assert not numbers(run_dir, "mem/peak_allocated")


@pytest.mark.gpu
def test_peaks_on_a_gpu(tmp_path):
    run_dir = run(tmp_path, "run.name=a", "trainer.accelerator=gpu")
    allocated, reserved = numbers(run_dir, "mem/peak_allocated"), numbers(run_dir, "mem/peak_reserved")
    assert len(allocated) == 6
    assert all(0 < a <= r for a, r in zip(allocated, reserved, strict=True))
    assert all(retries >= 0 for retries in numbers(run_dir, "mem/alloc_retries"))
