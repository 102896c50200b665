"""Many runs side by side: `python -m tools.sweep file=commands.txt per_device=2`.

The file has one shell command a line (`a && b` for steps that need each other; # starts a comment). Each is given one
GPU by CUDA_VISIBLE_DEVICES as soon as a place on one is free, so runs of the file never share a process. What a command
prints goes to `<logs>/<line number>.log`. Without a GPU, `devices=[cpu]` takes `per_device` places of the machine.
"""

import os
import queue
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from src import config
from src.errors import UserError


@dataclass(kw_only=True)
class SweepConfig:
    """Run the commands of a file, several at a time."""

    file: str
    """Text file with one shell command a line."""
    devices: list[str] = field(default_factory=list)
    """GPUs by number; empty: all of the machine; cpu: none."""
    per_device: int = 1
    """Commands at a time on each device."""
    logs: str = "runs/sweep"
    """Folder of the logs."""

    def __post_init__(self) -> None:
        if self.per_device < 1:
            raise UserError(f"per_device={self.per_device}: must be at least 1")


def main(options: SweepConfig) -> None:
    failed = sweep(options)
    if failed:
        print(f"{len(failed)} failed: lines {', '.join(map(str, failed))}")
        raise SystemExit(1)


def sweep(options: SweepConfig) -> list[int]:
    """Runs every line; the numbers of those that failed, whose logs say why."""
    lines = commands(Path(options.file))
    devices = options.devices or [str(i) for i in range(torch.cuda.device_count())]
    if not devices:
        raise UserError("devices: there is no CUDA device here; devices=[cpu] runs without")
    logs = Path(options.logs)
    logs.mkdir(parents=True, exist_ok=True)
    waiting: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    for item in lines:
        waiting.put(item)
    failed: list[int] = []

    def work(device: str) -> None:
        while True:
            try:
                number, command = waiting.get_nowait()
            except queue.Empty:
                return
            log, begin = logs / f"{number}.log", time.monotonic()
            print(f"line {number} on {device}: {command[:90]}", flush=True)
            visible = "" if device == "cpu" else device
            with log.open("w") as out:
                status = subprocess.run(
                    ["bash", "-c", command],
                    env={**os.environ, "CUDA_VISIBLE_DEVICES": visible},
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    check=False,
                ).returncode
            if status:
                failed.append(number)
            end = "done" if status == 0 else f"FAILED with status {status}, see {log}"
            print(f"line {number} {end} ({time.monotonic() - begin:.0f} s)", flush=True)

    places = [threading.Thread(target=work, args=(d,)) for _ in range(options.per_device) for d in devices]
    for place in places:
        place.start()
    for place in places:
        place.join()
    return sorted(failed)


def commands(file: Path) -> list[tuple[int, str]]:
    """The commands of the file with their line numbers. Raises UserError where there is none."""
    try:
        text = file.read_text()
    except OSError as error:
        raise UserError(f"file={file}: cannot be read ({error.strerror})") from error
    lines = [(n, line.strip()) for n, line in enumerate(text.splitlines(), 1)]
    lines = [(n, line) for n, line in lines if line and not line.startswith("#")]
    if not lines:
        raise UserError(f"file={file}: holds no command")
    return lines


if __name__ == "__main__":
    config.run_cli(main, SweepConfig)
