"""Many runs side by side: `python -m tools.sweep file=commands.txt per_device=2`.

The file has one shell command a line (`a && b` for steps that need each other; # starts a comment). Each is given one
GPU by CUDA_VISIBLE_DEVICES as soon as a place on one is free, so runs of the file never share a process. What a command
prints goes to `<logs>/<line number>.log`. Without a GPU, `devices=[cpu]` takes `per_device` places of the machine.

Started again, it skips the lines that have ended with status 0, whose command `<logs>/<line number>.done` holds; a line
that has failed or was stopped, or that now has another command, runs. `again=true`, or no such file, runs it once more.

Ctrl-C is passed on to the commands, and so is SIGTERM (at which a training saves a checkpoint); nothing new begins,
and the exit status is 130 or 143. A second one kills them.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from src import config
from src.errors import UserError
from src.files import write_text

POLL = 0.1  # seconds
# bash waits for the step that runs, whatever that one makes of the signal, and begins no other.
TRAPS = "trap 'exit 130' INT; trap 'exit 143' TERM HUP\n"


@dataclass(kw_only=True)
class SweepConfig:
    """Run the commands of a file, several at a time."""

    file: str
    """Text file with one shell command a line."""
    devices: list[str] = field(default_factory=list)
    """GPUs by number or UUID; empty: all of the machine; cpu: none."""
    per_device: int = 1
    """Commands at a time on each device."""
    logs: str = "runs/sweep"
    """Folder of the logs, and of what is done."""
    again: bool = False
    """Run every line; false: not those that an earlier call with these logs has done."""

    def __post_init__(self) -> None:
        if self.per_device < 1:
            raise UserError(f"per_device={self.per_device}: must be at least 1")


def main(options: SweepConfig) -> None:
    failed = sweep(options)
    if failed:
        say(f"{len(failed)} failed: lines {', '.join(map(str, failed))}")
        raise SystemExit(1)


@dataclass
class Job:
    """A line of the file that runs."""

    number: int
    command: str
    device: str
    log: Path
    begin: float
    process: subprocess.Popen


def sweep(options: SweepConfig) -> list[int]:
    """Runs the lines that are not done; the numbers of those that failed, whose logs say why.

    A signal ends it by SystemExit.
    """
    waiting = commands(Path(options.file))
    check_devices(options.devices)
    free = (options.devices or all_devices()) * options.per_device
    logs = Path(options.logs)
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"logs={logs}: cannot be made ({error.strerror})") from error
    if not os.access(logs, os.W_OK | os.X_OK):
        raise UserError(f"logs={logs}: no file can be written there")
    running: list[Job] = []
    failed: list[int] = []
    with caught_signals() as caught:
        try:
            if not options.again:
                waiting = [(number, command) for number, command in waiting if not done_before(number, command, logs)]
            while (waiting or running) and not caught:
                while waiting and free and not caught:
                    running.append(start(*waiting.pop(0), free.pop(0), logs))
                time.sleep(POLL)
                for job in [job for job in running if job.process.poll() is not None]:
                    running.remove(job)
                    free.append(job.device)
                    if report(job):
                        failed.append(job.number)
        except OSError as error:  # a full disk, say
            send(running, signal.SIGTERM)
            raise UserError(f"logs={logs}: {error.strerror or error}; the commands that ran got SIGTERM") from error
        if caught:
            say(f"stopped: ending {len(running)} commands, {len(waiting)} have not begun")
            end(running, caught)
            raise SystemExit(128 + caught[0])
    return sorted(failed)


def start(number: int, command: str, device: str, logs: Path) -> Job:
    """A process group of its own: a signal is passed on once, by this process, whoever sent it."""
    say(f"line {number} on {device}: {command[:90]}")
    log = logs / f"{number}.log"
    # From here on it is not done, whatever becomes of this process.
    done_file(logs, number).unlink(missing_ok=True)
    with log.open("w") as out:
        process = subprocess.Popen(
            ["bash", "-c", TRAPS + command],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "" if device == "cpu" else device},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
    return Job(number, command, device, log, time.monotonic(), process)


def report(job: Job) -> bool:
    """Says how a line has ended, and writes it down if it is done; whether it failed."""
    status = job.process.returncode
    if status == 0:
        write_text(done_file(job.log.parent, job.number), job.command)
    how = "done" if status == 0 else f"FAILED with status {status}, see {job.log}"
    say(f"line {job.number} {how} ({time.monotonic() - job.begin:.0f} s)")
    return status != 0


def done_before(number: int, command: str, logs: Path) -> bool:
    """Says so of a line that needs not run: this very command has ended with status 0 as this line."""
    file = done_file(logs, number)
    if not file.is_file() or file.read_bytes() != command.encode():
        return False
    say(f"line {number} done before: {command[:90]}; again=true runs it once more")
    return True


def done_file(logs: Path, number: int) -> Path:
    """Holds the command of a line that is done."""
    return logs / f"{number}.done"


def say(line: str) -> None:
    """A line and its end in one write: no other process's output comes between them."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def end(running: list[Job], caught: list[int]) -> None:
    """Passes the signal on and waits for the commands; a further signal meanwhile kills them."""
    send(running, caught[0])
    while any(job.process.poll() is None for job in running):
        if len(caught) > 1:
            send(running, signal.SIGKILL)
        time.sleep(POLL)


def send(running: list[Job], number: int) -> None:
    for job in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.process.pid, number)


@contextlib.contextmanager
def caught_signals() -> Iterator[list[int]]:
    """The numbers of the signals so far: of Ctrl-C, SIGTERM and a closed terminal. None of them ends this process."""
    caught: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda number, frame: caught.append(number)) for number in numbers}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def all_devices() -> list[str]:
    """The machine's GPUs, or those of them that CUDA_VISIBLE_DEVICES leaves. Raises UserError where there is none."""
    names = visible_devices()
    if not names:
        raise UserError("devices: there is no CUDA device here; devices=[cpu] runs without")
    return names


def check_devices(names: list[str]) -> None:
    """Raises UserError for a name that is neither cpu nor a GPU that this process sees, by number or UUID."""
    if set(names) <= {"cpu"}:
        return
    visible = visible_devices()
    known = {"cpu", *visible}
    if any(name.startswith("GPU-") for name in set(names) - known):
        known |= {f"GPU-{torch.cuda.get_device_properties(i).uuid}" for i in range(len(visible))}
    for name in names:
        if name not in known:
            gpus = f"one of the GPUs {', '.join(visible)} (or its UUID)" if visible else "there is no CUDA device here"
            raise UserError(f"devices=[{','.join(names)}]: {name} must be cpu or a GPU's number or UUID: {gpus}")


def visible_devices() -> list[str]:
    """The GPUs of this process, as CUDA_VISIBLE_DEVICES names them."""
    n = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [name.strip() for name in visible.split(",")][:n] if visible else [str(i) for i in range(n)]


def commands(file: Path) -> list[tuple[int, str]]:
    """The commands of the file with their line numbers. Raises UserError where there is none."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"file={file}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise UserError(f"file={file}: is not UTF-8 (byte {error.start})") from error
    lines = [(n, line.strip()) for n, line in enumerate(text.splitlines(), 1)]
    lines = [(n, line) for n, line in lines if line and not line.startswith("#")]
    if not lines:
        raise UserError(f"file={file}: holds no command")
    return lines


if __name__ == "__main__":
    config.run_cli(main, SweepConfig)
