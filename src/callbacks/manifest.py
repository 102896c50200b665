"""`manifest.json`: what ran, with which code, on what, and how it ended."""

import hashlib
import json
import os
import platform
import socket
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from src.files import write_json

PACKAGES = ("torch", "lightning", "torchmetrics", "triton", "tokenizers", "datasets", "numpy", "omegaconf")


class Manifest(Callback):
    """Writes `<run>/manifest.json` when training starts and when it ends, however it ends.

    The file is a list of sessions, one for each process that trained the run; resuming appends one. Each has
    `config, argv, git, plugins, versions, hardware, seed, data, started, finished, state, from_step, to_step`;
    `plugins` has the SHA-256 of each plugin file, which git may not know; the state is `running`, `finished`, or
    the name of the exception that ended it.

    Args:
        run_dir: the run folder.
        config: the options, a plain dict with `seed`.
        data: facts about the data, its fingerprint among them.
    """

    def __init__(self, run_dir: Path, config: dict[str, Any], data: dict[str, Any]) -> None:
        self.path = run_dir / "manifest.json"
        self.session: dict[str, Any] = {"config": config, "data": data}

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        self.earlier = json.loads(self.path.read_text()) if self.path.exists() else []
        self.session |= {
            "argv": sys.argv,
            "git": git_state(Path(__file__).parent),
            "plugins": {path: _sha256(path) for path in self.session["config"]["plugins"]},
            "versions": versions(),
            "hardware": hardware(trainer),
            "seed": self.session["config"]["seed"],
            "started": _now(),
            "from_step": trainer.global_step,
        }
        self._write(trainer, "running")

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._write(trainer, "finished")

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
        if "started" in self.session:
            self._write(trainer, type(exception).__name__)

    def _write(self, trainer: Trainer, state: str) -> None:
        if trainer.is_global_zero:
            ended = None if state == "running" else _now()
            self.session |= {"state": state, "to_step": trainer.global_step, "finished": ended}
            write_json(self.path, [*self.earlier, self.session])


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit, and whether the files differ from it or are new to it; None outside a repository or without git."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(folder), *arguments],
                capture_output=True,
                text=True,
                timeout=30,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit, "dirty": bool(git("status", "--porcelain", "--untracked-files=normal"))}


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found | {"cuda": torch.version.cuda}


def hardware(trainer: Trainer) -> dict[str, Any]:
    device = trainer.strategy.root_device
    return {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "cpu_threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "world_size": trainer.world_size,
    }


def _sha256(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
