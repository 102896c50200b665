"""Run folders: made once, never overwritten, found by name.

A run is the folder `<run.dir>/<run.name>`. The process that starts a run decides its folder; the processes
that Lightning starts for the other ranks inherit both the folder and the composed options through one
environment variable, which holds their parent's process id. A variable left over from another run in the same
shell has another id and is not believed.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from src.errors import UserError
from src.files import read_yaml
from src.options import asdict, nearest, show

CONFIG_FILE = "config.yaml"
LOCK = ".lock"
_INHERITED = "SRC_RUN"
_NAME_NEEDED = "give run.name=<name>: ranks that torchrun, srun or several nodes start need it in common"
# What a continued run may change: where and how long it runs, not what is trained on which data.
_FREE_ON_RESUME = ("resume", "run", "plugins", "trainer", "data.num_workers", "data.val_batch_size")


def check_name(name: str) -> None:
    """Raises UserError unless the name is one plain folder name."""
    if not name.strip():
        raise UserError("run.name is empty: give a name, or leave it out for a generated one")
    if re.search(r"[/\\\x00-\x1f\x7f]", name) or name.startswith(".") or name != name.strip():
        raise UserError(
            f"run.name={name!r}: must be one folder name, without path separators, line breaks,"
            " blanks at its ends, or a leading dot (run.dir=... chooses the parent folder)"
        )
    if len(os.fsencode(name)) > 200:
        raise UserError(f"run.name={show(name)}: longer than 200 bytes")


def create(cfg: Any) -> Path:
    """The folder of this run, made now, by one process for all ranks; sets `cfg.run.name`.

    Raises UserError if the name exists and `cfg.resume` is not "auto", if a continued run had other options,
    and if ranks that an outside launcher started have no common name.
    """
    if is_child():
        inherited = _inherited()
        if inherited is None:
            return _join(cfg)
        cfg.run.name = Path(inherited["folder"]).name
        # A script that starts several runs is started anew for each rank, from its first run on.
        if differences := _differences(inherited["config"], asdict(cfg)):
            raise UserError(f"this rank was given other options than rank 0: {differences[0]}")
        return Path(inherited["folder"])
    if cfg.run.name is None and (cfg.trainer.num_nodes > 1 or _outside_launcher(os.environ)):
        raise UserError(_NAME_NEEDED)
    folder = _resume(cfg) if cfg.resume == "auto" else _start(cfg)
    cfg.run.name = folder.name
    entry = {"parent": os.getpid(), "folder": str(folder.resolve()), "config": asdict(cfg)}
    os.environ[_INHERITED] = json.dumps(entry)
    return folder


def changes(cfg: Any, folder: Path) -> list[str]:
    """What a continued run does otherwise than the options saved in its folder, as `key=new, not old`."""
    return _differences(saved_options(folder), asdict(cfg), ("resume", "run"))


def saved_options(folder: Path) -> dict[str, Any]:
    """The options that a run folder keeps, plain. Raises UserError where they are none."""
    path = folder / CONFIG_FILE
    saved = read_yaml(path)
    if not saved.get("mixer"):
        raise UserError(f"{path} is empty or damaged: it names no mixer")
    return saved


def launched(env: Mapping[str, str] = os.environ) -> int:
    """Ranks that torchrun or srun started; 1 where Lightning starts them itself."""
    if not _outside_launcher(env):
        return 1
    return _number(env, "WORLD_SIZE" if "TORCHELASTIC_RUN_ID" in env else "SLURM_STEP_NUM_TASKS")


def inherited_config() -> dict[str, Any] | None:
    """The composed options, plain, that the process of rank 0 handed to this one; None if it handed none."""
    inherited = _inherited() if is_child() else None
    return inherited["config"] if inherited else None


def is_child(env: Mapping[str, str] = os.environ) -> bool:
    """Whether another process than this one decides the run's folder: any rank but the first."""
    # Lightning leaves LOCAL_RANK=0 and NODE_RANK=0 behind in the process that called fit: still the first.
    keys = ("RANK",) if "RANK" in env else ("LOCAL_RANK", "NODE_RANK", "SLURM_PROCID")
    return any(_number(env, key) > 0 for key in keys)


def _outside_launcher(env: Mapping[str, str]) -> bool:
    torchrun = "TORCHELASTIC_RUN_ID" in env and _number(env, "WORLD_SIZE") > 1
    return torchrun or ("SLURM_PROCID" in env and _number(env, "SLURM_STEP_NUM_TASKS") > 1)


def _number(env: Mapping[str, str], key: str) -> int:
    text = env.get(key, "")
    return int(text) if text.isdecimal() else 0


def find(name_or_path: str | Path, runs_dir: str | Path = "runs", key: str = "run") -> Path:
    """The folder of an existing run, by its name in `runs_dir` or by its path; `key` is the option that names it."""
    text = str(name_or_path)
    if not text.strip():
        raise UserError(f"{key} is empty: give the name of a run in {runs_dir}/ or the path of its folder")
    places = [Path(runs_dir) / text, Path(text).expanduser()]
    for folder in places:
        if (folder / CONFIG_FILE).is_file():
            return folder
    for folder in places:
        if folder.exists():
            raise UserError(f"{key}={text}: {folder} is no run folder (it holds no {CONFIG_FILE})")
    names = _names(runs_dir)
    more = "…, " if len(names) > 10 else ""
    known = f"runs in {runs_dir}: {more}{', '.join(names[-10:])}" if names else f"there are no runs in {runs_dir}"
    raise UserError(f"{key}={text}: no such run{nearest(text, names)} ({known})")


@contextlib.contextmanager
def hold(run_dir: Path) -> Iterator[None]:
    """Be the only process that trains in a run folder; raises UserError if another one does.

    The operating system gives the lock back when a process ends, however it ends.
    """
    if is_child():
        yield
        return
    lock = FileLock(run_dir / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(f"run {run_dir.name!r} is being trained by another process") from None
    try:
        yield
    finally:
        (run_dir / LOCK).unlink(missing_ok=True)
        lock.release()


def is_held(run_dir: Path) -> bool:
    """Whether a process on this machine trains in a run folder now."""
    if not (run_dir / LOCK).exists():
        return False
    try:
        with FileLock(run_dir / LOCK, timeout=0):
            return False
    except Timeout:
        return True


def checkpoint(run_dir: str | Path, which: str = "last") -> Path:
    """`<run>/checkpoints/<which>.ckpt`, "last" or "best"; raises UserError if the run has none yet."""
    path = Path(run_dir) / "checkpoints" / f"{which}.ckpt"
    if not path.is_file():
        last = path.with_name("last.ckpt")
        hint = "; checkpoint=last is there" if last.is_file() else f" ({last} does not exist)"
        raise UserError(f"run {Path(run_dir).name} has no {which} checkpoint yet{hint}")
    return path


def _start(cfg: Any) -> Path:
    parent = Path(cfg.run.dir).expanduser()
    if cfg.run.name is not None:
        check_name(cfg.run.name)
        folder = parent / cfg.run.name
        if not _make(folder) and not _never_began(folder):
            raise UserError(
                f"run {cfg.run.name!r} exists in {parent}/: resume=auto continues it, another run.name starts a new one"
            )
        return folder
    stamp = datetime.now().strftime("%y%m%d-%H%M%S")
    stem = re.sub(r"[^\w.-]", "_", f"{cfg.mixer.name}-{cfg.data.name}-{stamp}")
    count = 1
    while not _make(folder := parent / (stem if count == 1 else f"{stem}-{count}")):
        count += 1
    return folder


def _resume(cfg: Any) -> Path:
    if cfg.run.name is None:
        raise UserError("resume=auto needs run.name=<name>: the run to continue, or to start if there is none")
    check_name(cfg.run.name)
    folder = Path(cfg.run.dir).expanduser() / cfg.run.name
    if not _make(folder) and (folder / CONFIG_FILE).is_file():
        saved = saved_options(folder)
        if differences := _differences(saved, asdict(cfg), _FREE_ON_RESUME):
            raise UserError(f"run {cfg.run.name!r} cannot be continued with other options: {differences[0]}")
    return folder


def _never_began(folder: Path) -> bool:
    """Whether a folder holds nothing: its process was killed before the run began, and the name is free."""
    return all(path.name == LOCK for path in folder.iterdir()) and not is_held(folder)


def _join(cfg: Any) -> Path:
    """A rank that torchrun or srun started: no common parent of ours, so the name must be given."""
    if cfg.run.name is None:
        raise UserError(_NAME_NEEDED)
    check_name(cfg.run.name)
    return Path(cfg.run.dir).expanduser() / cfg.run.name


def _inherited() -> dict[str, Any] | None:
    try:
        entry = json.loads(os.environ.get(_INHERITED, "{}"))
        return entry if entry["parent"] == os.getppid() else None
    except (ValueError, TypeError, KeyError):
        return None  # not written by `create`


def _make(folder: Path) -> bool:
    """Makes the folder; False if it existed. The file system lets one of several processes win."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    except FileExistsError as error:
        if folder.is_dir():
            return False
        raise UserError(f"cannot make the run folder {folder}: {error.filename} is no folder") from error
    except OSError as error:
        raise UserError(f"cannot make the run folder {folder}: {error.strerror}") from error
    return True


def _differences(
    saved: Mapping[str, Any], new: Mapping[str, Any], free: tuple[str, ...] = (), where: str = ""
) -> list[str]:
    found = []
    for key in {**saved, **new}:
        dotted = where + key
        a, b = saved.get(key), new.get(key)
        if dotted in free or a == b:
            continue
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += _differences(a, b, free, f"{dotted}.")
        else:
            found.append(f"{dotted}={show(b)}, not {show(a)}")
    return found


def _names(runs_dir: str | Path) -> list[str]:
    folders = (f for f in Path(runs_dir).glob("*") if (f / CONFIG_FILE).is_file())
    return [f.name for f in sorted(folders, key=lambda f: f.stat().st_mtime)]
