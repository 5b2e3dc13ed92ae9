"""The folder of a run, and its lock: one live run has a folder.

choose_folder     the folder of a run without --out
lock_folder       makes this the only live run of a folder
note_stop         notes that a signal has stopped the run
leave_if_stopped  a worker that torchrun has started anew, though a signal stopped the run, ends
step_folders      the checkpoints in a folder
"""

import fcntl
import json
import os
import re
import shutil
import socket
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from common.distributed import from_main, gather_objects, is_main, raise_on_all_ranks
from common.flags import RunArgs, SomeArgs
from common.ground.files import UserError, follow_pointer, read_json, say, write_link
from common.ground.process import EXIT_PREEMPTED, Exit, keep_errors


def choose_folder(args: SomeArgs, fingerprint: dict) -> SomeArgs:
    """``args`` with the folder of a run without --out: a new one, which runs/latest then names. An
    evaluation takes the one that runs/latest names; a restart by torchrun that of its first start.

    All ranks must call. Raises UserError: the folder cannot be made.
    """
    folder = follow_pointer(args.out)
    with raise_on_all_ranks("--out: "):
        if args.out.name == RunArgs.out.name and is_main():
            folder = find_folder(args) or new_folder(args, fingerprint)
    return replace(args, out=from_main(folder))


def find_folder(args: Any) -> Path | None:
    """The folder in which an evaluation, or a restart by torchrun, goes on, if there is one."""
    runs = args.out.parent
    latest = follow_pointer(runs / "latest")
    if args.eval_only and args.resume == "auto" and latest.is_dir():
        return latest
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)):
        for lock in sorted(runs.glob("*/.lock"), reverse=True):
            if read_holder(lock).get("launcher") == launcher():
                return lock.resolve().parent
    return None


def new_folder(args: RunArgs, fingerprint: dict) -> Path:
    """A new folder in runs/, for this start alone."""
    runs = args.out.parent
    runs.mkdir(parents=True, exist_ok=True)
    while True:
        folder = runs / f"{datetime.now():%Y-%m-%d-%H%M%S}"
        try:
            folder.mkdir()
            break
        except FileExistsError:  # of another start in the same second
            time.sleep(0.1)
    if not args.eval_only:
        mention_unfinished(follow_pointer(runs / "latest"), fingerprint)
        write_link(runs / "latest", folder.name)
    return folder


def mention_unfinished(folder: Path, fingerprint: dict) -> None:
    """Say how to go on with the run in a folder, if it is one of the same model and data and has not
    reached its last step."""
    checkpoints = step_folders(folder / "checkpoints")
    if not checkpoints:
        return
    _, newest = checkpoints[0]
    try:
        saved = read_json(newest / "state.json", {"step": int, "fingerprint": {"steps": int}})
    except UserError:  # of another version, say: it is not this run's
        return
    before, step = saved["fingerprint"], saved["step"]
    is_same = before.keys() >= fingerprint.keys() and all(
        before[name] == fingerprint[name] for name in ("model", "data")
    )
    if is_same and step < before["steps"]:
        say(
            f"this is a new run; {folder}, of the same model and data, has stopped after step {step} of "
            f"{before['steps']}: --config {folder}/args.json resumes it"
        )


def launcher() -> str:
    """The torchrun of this machine, which is the same when it starts its workers anew."""
    return f"{socket.gethostname()} {os.getppid()} {os.environ.get('TORCHELASTIC_RUN_ID')}"


def leave_if_stopped(out: Path) -> None:
    """End a worker that torchrun has started anew because its predecessor was stopped by a signal, which
    --max_restarts takes for a crash. A new torchrun goes on. Raises Exit."""
    if not int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)):
        return
    is_unnamed = out.name == RunArgs.out.name
    for lock in out.parent.glob("*/.lock") if is_unnamed else [follow_pointer(out) / ".lock"]:
        if launcher() in read_holder(lock).get("stopped", []):
            raise Exit(EXIT_PREEMPTED)


def lock_folder(out: Path, advice: str) -> TextIO | None:
    """Make this the only live run of a folder, which all ranks must see: rank 0 returns its lock. All
    must call. Raises UserError, with ``advice``: a live run has it."""
    mine = {
        "process": f"process {os.getpid()} on {socket.gethostname()}",
        "launcher": launcher(),
        "job": os.environ.get("SLURM_JOB_ID"),
        "restart": os.environ.get("SLURM_RESTART_COUNT"),  # how often the job was requeued
        "began": time.time_ns(),
    }
    mine, file, lock = from_main(mine), None, out / ".lock"
    with raise_on_all_ranks(f"--out {out}: "):
        if is_main():
            out.mkdir(parents=True, exist_ok=True)
            file = take_lock(lock, mine, advice)
            # Left by a process that was killed during a save or an export, and its tracebacks.
            for pattern in ("checkpoints/.tmp-*", "export*/.step-*"):
                for path in out.glob(pattern):
                    shutil.rmtree(path)
            for path in out.glob("errors/*rank-*"):  # the folder may be the user's own
                path.unlink()
    with raise_on_all_ranks(f"--out {out}: "):
        if not is_main() and read_holder(lock) != mine:  # each node would keep its shards
            raise UserError(
                f"on {socket.gethostname()} this is not rank 0's folder: use a file system that "
                "all nodes share"
            )
    keep_errors(out)
    return file


def take_lock(path: Path, mine: dict, advice: str) -> TextIO:
    """Hold the lock of a folder until the file is closed, or this process ends. Raises UserError: a
    live run has it; OSError.

    It is a lock of the process: its children do not hold it when it is killed. This process must not
    open the file a second time, as closing that would drop the lock.
    """
    holder = read_holder(path)
    # which can be read without opening it again; never the file behind a link
    lock = open(path, "a+", opener=lambda name, how: os.open(name, how | os.O_NOFOLLOW, 0o666))
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        is_this_job = mine["job"] and mine["job"] == holder.get("job")
        if not is_this_job or mine["restart"] == holder.get("restart"):
            who = holder.get("process", "of an earlier version")
            raise UserError(f"it is in use by a live run, {who}{advice}") from error
        path.unlink()  # of this job before it was requeued, on a machine that is gone
        return take_lock(path, mine, advice)
    except OSError as error:  # Lustre, say, without its mount option
        say(f"warning: a second run in {path.parent} would not be refused: {error}")
    write_holder(lock, mine)
    return lock


def note_stop(lock: TextIO | None) -> None:
    """Note in the lock, which rank 0 has, that a signal has stopped this run: see `leave_if_stopped`. All
    ranks must call."""
    launchers = gather_objects(launcher())
    if lock:
        lock.seek(0)
        holder = json.loads(lock.read())
        write_holder(lock, holder | {"stopped": sorted(set(launchers))})


def write_holder(lock: TextIO, holder: dict) -> None:
    """Write into a lock who has it."""
    lock.truncate(0)
    lock.write(json.dumps(holder))
    lock.flush()
    os.fsync(lock.fileno())


def read_holder(lock: Path) -> dict:
    """The run that has, or had, the lock of a folder, as `lock_folder` describes it; {}: none."""
    try:
        return read_json(lock)
    except UserError:
        return {}


def step_folders(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every checkpoint, newest first. Raises OSError: they cannot be listed, which
    does not mean that there is none."""
    names = os.listdir(folder) if os.path.lexists(folder) else []
    paths = [folder / name for name in names if re.fullmatch(r"step-\d+", name)]
    return sorted([(int(path.name[5:]), path) for path in paths], reverse=True)
