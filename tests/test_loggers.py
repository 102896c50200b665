import contextlib
import csv
import json
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from src.loggers import CsvLogger, TensorBoard, flatten


def table(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_one_row_a_step_and_new_columns_at_any_time(tmp_path):
    log = CsvLogger(tmp_path)
    log.log_metrics({"a": 1.0}, 1)
    log.log_metrics({"b": 2.0}, 1)
    log.log_metrics({"a": 3.0}, 2)
    log.log_metrics({"c": 4.0}, 3)
    log.finalize("success")
    assert table(tmp_path) == [
        {"step": "1", "a": "1.0", "b": "2.0", "c": ""},
        {"step": "2", "a": "3.0", "b": "", "c": ""},
        {"step": "3", "a": "", "b": "", "c": "4.0"},
    ]


def test_continued_file_drops_what_came_after_the_checkpoint(tmp_path):
    log = CsvLogger(tmp_path)
    for step in (1, 2, 3, 4):
        log.log_metrics({"a": step}, step)
    log.finalize("failed")
    log = CsvLogger(tmp_path, start_step=2)
    log.log_metrics({"b": 9}, 2)
    log.log_metrics({"a": 30}, 3)
    log.finalize("success")
    assert [(row["step"], row["a"], row["b"]) for row in table(tmp_path)] == [
        ("1", "1.0", ""),
        ("2", "2.0", "9.0"),
        ("3", "30.0", ""),
    ]


def test_numbers_survive_exactly(tmp_path):
    log = CsvLogger(tmp_path)
    log.log_metrics({"a": 0.1 + 0.2, "b": float("nan")}, 1)
    log.finalize("success")
    row = table(tmp_path)[0]
    assert float(row["a"]) == 0.1 + 0.2
    assert row["b"] == "nan"


def test_tensorboard_hides_steps_after_the_checkpoint(tmp_path):
    for start, values in ((0, {1: 1.0, 2: 2.0, 3: 3.0}), (2, {3: 30.0})):
        if start:  # files of one second and process are not read in the order in which they were written
            time.sleep(1 - time.time() % 1 + 0.01)
        log = TensorBoard(tmp_path / "run", start)
        log.start({"a": {"b": 1}})
        for step, value in values.items():
            log.log_metrics({"x": value}, step)
        log.finalize("success")
    points = EventAccumulator(str(tmp_path / "run")).Reload().Scalars("x")
    assert [(p.step, p.value) for p in points] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert not list(tmp_path.rglob("hparams.yaml"))


@pytest.mark.slow
def test_hparams_tab_lists_runs_with_their_own_options(tmp_path):
    """Asks a running TensorBoard what its page asks."""
    mixers = {"one": {"name": "a", "x": 1}, "two": {"name": "b"}}
    for name, value in (("one", 5.0), ("two", 6.0)):
        log = TensorBoard(tmp_path / name)
        log.start({"mixer": mixers[name]})
        log.log_metrics({"val/loss": 9.0}, 0)
        log.log_metrics({"val/loss": value}, 3)
        log.finalize("success")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", f"--logdir={tmp_path}", f"--port={port}", "--host=127.0.0.1"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def ask(path, data=None):
        body = None if data is None else json.dumps(data).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    try:
        deadline = time.monotonic() + 90
        found = {}
        while set(found) < {"one", "two"} and time.monotonic() < deadline:
            time.sleep(0.5)
            with contextlib.suppress(OSError):
                found = ask("/data/plugin/scalars/tags")
        assert set(found) == {"one", "two"}
        page = ask("/data/plugin/hparams/experiment", {"experimentName": ""})
        assert {info["name"] for info in page["hparamInfos"]} == {"mixer.name", "mixer.x"}
        columns = [{"hparam": info["name"]} for info in page["hparamInfos"]]
        columns += [{"metric": info["name"]} for info in page["metricInfos"]]
        query = {"experimentName": "", "colParams": columns, "startIndex": 0, "sliceSize": 10}
        query["allowedStatuses"] = ["STATUS_SUCCESS"]
        groups = ask("/data/plugin/hparams/session_groups", query)["sessionGroups"]
    finally:
        server.terminate()
        server.wait()
    table = {g["hparams"]["mixer.name"]: {m["name"]["tag"]: m["value"] for m in g["metricValues"]} for g in groups}
    assert table == {"a": {"val/loss": 5.0}, "b": {"val/loss": 6.0}}


def test_flatten():
    assert flatten({"a": {"b": 1, "c": {}}, "d": [2]}) == {"a.b": 1, "d": [2]}


def test_a_saved_row_is_in_the_file_and_still_takes_numbers(tmp_path):
    """A checkpoint saves the loggers first: a kill right after it loses nothing."""
    logger = CsvLogger(tmp_path)
    logger.log_metrics({"train/loss": 3.0}, 1)
    logger.log_metrics({"train/loss": 2.0}, 2)
    logger.save()
    logger.save()
    read = lambda: list(csv.DictReader((tmp_path / "metrics.csv").open()))  # noqa: E731
    assert [row["train/loss"] for row in read()] == ["3.0", "2.0"]
    logger.log_metrics({"val/loss": 5.0}, 2)
    logger.log_metrics({"train/loss": 1.0}, 3)
    logger.finalize("success")
    rows = read()
    assert [(row["step"], row["train/loss"], row["val/loss"]) for row in rows] == [
        ("1", "3.0", ""), ("2", "2.0", "5.0"), ("3", "1.0", ""),
    ]  # fmt: skip
