"""Many nodes: launch/train.slurm on a SLURM cluster of two nodes that this file starts on this
machine, and two torchrun agents without SLURM. Everything talks over the loopback interface; what
was started is ended by its process id."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ranks
from conftest import ROOT, read_json, words
from lives import (
    ALGORITHMS,
    REWARD,
    assert_bitwise,
    steps,
)

pytestmark = pytest.mark.slow

PROGRAMS = "slurmctld slurmd sbatch srun scontrol scancel munged".split()
# the torchrun of this Python; and daemons, whose folders `su` without `-` leaves out
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin"
SLOW = '''

def slow(*arguments):
    """As above, but a step takes long enough to be interrupted."""
    import time
    time.sleep(0.7)
    return letters(*arguments)
'''
LOOPBACK = dict(
    MASTER_ADDR="127.0.0.1", PET_LOCAL_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo", NPROC="1"
)


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def wait_for(condition, seconds: float, what: str):
    """Poll until ``condition()`` is true, and return its value."""
    deadline = time.time() + seconds
    while not (value := condition()):
        assert time.time() < deadline, f"no {what} within {seconds} s"
        time.sleep(0.1)
    return value


@pytest.fixture(scope="module")
def slow_flags(flags, life_task):
    """The GRPO run of test_checkpoint with slow steps; its metrics are the same."""
    slow = life_task / "slow.py"
    slow.write_text(REWARD + SLOW)
    return lambda out: [*flags(out, ALGORITHMS["grpo"]), "--reward", f"{slow}:slow"]


# ----------------------------------------------------------------------------- SLURM
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
TaskPluginParam=cores
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_interval=2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def install_slurm() -> None:
    """By apt, as root; skips the test with the reason where that does not work."""
    missing = [program for program in PROGRAMS if not shutil.which(program, path=PATH)]
    if not missing:
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        pytest.skip(
            f"{', '.join(missing)} not installed, and only root can install them, by apt-get"
        )
    command = (
        "apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge".split()
    )
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "PATH": PATH}
    # a fresh machine has no package lists
    for attempt in (command, ["apt-get", "update"], command):
        result = subprocess.run(
            attempt, capture_output=True, text=True, env=environment, timeout=120
        )
        if attempt is command and result.returncode == 0:
            return
    pytest.skip(f"{' '.join(command)} failed: {result.stderr.strip()[-300:]}")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Environment of a client of a running cluster with the nodes n1 and n2."""
    install_slurm()
    if os.geteuid() != 0:
        pytest.skip("slurmd starts jobs for users only as root")
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "state").mkdir()
    (folder / "munge.key-file").write_bytes(os.urandom(128))
    (folder / "munge.key-file").chmod(0o400)
    (folder / "slurm.conf").write_text(
        CONFIG.format(host=socket.gethostname(), folder=folder, ports=free_ports(3))
    )
    environment = ranks.clean_environment(
        SLURM_CONF=str(folder / "slurm.conf"), PATH=PATH, **LOOPBACK
    )
    munge = [
        f"--{name}={folder}/munge.{name}"
        for name in ("key-file", "socket", "pid-file", "log-file", "seed-file")
    ]
    commands = [
        ["munged", "--foreground", "--force", *munge],
        "slurmctld -D".split(),
        "slurmd -D -N n1".split(),
        "slurmd -D -N n2".split(),
    ]
    daemons = []
    try:
        for number, command in enumerate(commands):
            with open(folder / f"daemon-{number}.log", "w") as log:
                daemons.append(
                    subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
                )
            if command[0] == "munged":
                wait_for((folder / "munge.socket").exists, 60, "munge socket")
        command, quiet = (
            ["sinfo", "-h", "-o", "%T %D"],
            {"env": environment, "capture_output": True},
        )
        # fails at first
        wait_for(lambda: subprocess.run(command, **quiet).stdout == b"idle 2\n", 200, "idle nodes")
        yield environment
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(60)
            except subprocess.TimeoutExpired:
                daemon.kill()


def ask(environment: dict[str, str], *command: str | Path) -> str:
    result = subprocess.run(
        words(*command), env=environment, capture_output=True, text=True, timeout=30
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_slurm_job_is_preempted_and_goes_on(cluster, slow_flags, undisturbed, tmp_path):
    """Submit, two nodes train together, USR1, requeue, resume: the same metrics and weights as an
    undisturbed run's."""
    (tmp_path / "train_ppo_vl.py").symlink_to(ROOT / "train_ppo_vl.py")
    out = tmp_path / "run"
    job = ask(
        cluster,
        "sbatch",
        "--parsable --nodes 2 --chdir",
        tmp_path,
        ROOT / "launch" / "train.slurm",
        "train_ppo_vl.py",
        *slow_flags(out),
    ).strip()
    told = lambda: "\n".join(path.read_text() for path in sorted((tmp_path / "logs").glob("*")))  # noqa: E731
    state = lambda: ask(cluster, "scontrol", "show", "job", job)  # noqa: E731

    def ended() -> bool:
        told = state()
        # SLURM lets a requeued job wait for two minutes;
        if "JobState=PENDING" in told:
            # at once, the first life's end is taken for the second's
            time.sleep(4)
            subprocess.run(
                ["scontrol", "update", f"JobId={job}", "StartTime=now"],
                env=cluster,
                capture_output=True,
            )
            time.sleep(1)
        # also for a moment while a job is being requeued
        if "JobState=FAILED" in told:
            time.sleep(5)
            told = state()
        return "JobState=COMPLETED" in told or "JobState=FAILED" in told

    try:
        wait_for(lambda: steps(out), 200, f"checkpoint: {told()}")
        assert "NodeList=n[1-2]" in state()
        assert "NumNodes=2" in state()
        ask(cluster, "scancel", "--signal=USR1", job)
        wait_for(lambda: "Restarts=1" in state(), 200, "requeue")
        stopped = steps(out)[0]
        assert 1 <= stopped < 6
        wait_for(ended, 200, "end of the job")
        final = state()
    finally:
        subprocess.run(["scancel", job], env=cluster)
    assert "JobState=COMPLETED" in final, f"{final}\n{told()}"
    first, second = ((tmp_path / "logs" / f"train-{job}-{life}.log").read_text() for life in (0, 1))
    assert "2 x cpu" in first
    assert f"stopped by a signal after step {stopped}" in first
    assert re.search(r"exitcode *: 75 ", first)
    assert f"resuming from {out}/checkpoints/step-{stopped}" in second
    assert (
        f"preempted: requeueing job {job}" in (tmp_path / "logs" / f"train-{job}.out").read_text()
    )
    assert_bitwise(out, undisturbed("grpo", 2))


SETUP = """export PREPARED=yes
: $UNKNOWN_TO_A_MODULE
"""
CONTAINER = """#!/bin/bash
echo "$SLURM_NODEID: $PREPARED, array $SLURM_ARRAY_TASK_ID, $(env -u OMP_NUM_THREADS nproc) CPUs of $SLURM_CPUS_PER_TASK" >> "$NOTES"
exec "$@"
"""


def test_an_array_of_supervised_runs_as_a_cluster_wants_it(cluster, qwen25, tmp_path):
    """Two nodes; a file that sets the environment up, a command that torchrun is run by, CPUs, a
    seed per run."""
    (tmp_path / "train_grm_vl.py").symlink_to(ROOT / "train_grm_vl.py")
    (tmp_path / "rows.jsonl").write_text(
        "".join(
            f'{{"prompt": "how many circles are there?", "response": "{n}"}}\n'
            for n in (1, 2, 3, 4)
        )
    )
    (tmp_path / "env.sh").write_text(SETUP)
    (tmp_path / "inside.sh").write_text(CONTAINER)
    environment = cluster | {
        "SETUP": "env.sh",
        "CONTAINER": "bash inside.sh",
        "NOTES": str(tmp_path / "notes"),
    }
    job = ask(
        environment,
        "sbatch",
        "--parsable --nodes 2 --array 3 --cpus-per-task 2 --chdir",
        tmp_path,
        ROOT / "launch" / "train.slurm",
        "train_grm_vl.py",
        "--model",
        qwen25,
        "--data",
        tmp_path / "rows.jsonl",
        "--steps 3 --prompts_per_step 1 --max_prompt_tokens 128 --max_tokens_per_pack 256 --seed %a "
        "--out",
        f"{tmp_path}/run-%a",
    ).strip()
    states = lambda: re.findall(r"JobState=(\w+)", ask(cluster, "scontrol", "show", "job", job))  # noqa: E731
    try:
        wait_for(lambda: set(states()) <= {"COMPLETED", "FAILED"}, 200, "end of the jobs")
        log = "\n".join(
            f"{path.name}: {path.read_text()}" for path in sorted((tmp_path / "logs").iterdir())
        )
        assert states() == ["COMPLETED"] and log.count("2 x cpu") == 1, log
    finally:
        subprocess.run(["scancel", job], env=cluster)
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {
        f"train-{job}_3.out",
        f"train-{job}_3-0.log",
    }
    assert read_json(tmp_path / "run-3" / "args.json")["seed"] == 3
    assert (tmp_path / "run-3" / "export" / "step-3" / "model.safetensors").exists()
    cpus = min(2, os.cpu_count())
    notes = (tmp_path / "notes").read_text().splitlines()
    assert sorted(notes) == [f"{node}: yes, array 3, {cpus} CPUs of 2" for node in (0, 1)]


@pytest.mark.parametrize("line, refused", [("", True), ("--out run", False), ("--out=run", False)])
def test_a_job_without_out_is_refused(tmp_path, line, refused):
    """It would begin anew at each requeue. With it, the script goes on to what only a cluster has."""
    (tmp_path / "train_ppo_vl.py").write_text("")
    job = ROOT / "launch" / "train.slurm"
    command = ["bash", job, "train_ppo_vl.py", "--steps", "2", *line.split()]
    environment = os.environ | {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "NPROC": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, timeout=60)
    told = (tmp_path / "logs" / "train-7.out").read_text()
    assert done.returncode == 2 if refused else done.returncode != 2
    assert ("would begin anew without it: add --out FOLDER" in told) == refused


@pytest.mark.parametrize(
    "variables, processes",
    [
        ({"SLURM_GPUS_ON_NODE": "4"}, "4"),
        ({"SLURM_GPUS_ON_NODE": "4", "NPROC": "2"}, "2"),
        ({}, ""),
    ],
)
def test_options_of_srun_and_the_processes_of_a_node(tmp_path, variables, processes):
    """A node without GPUs of SLURM's does not start one process without a word."""
    (tmp_path / "srun").write_text('#!/bin/bash\necho "$*" > asked\n')
    (tmp_path / "scontrol").write_text("#!/bin/bash\necho node-1\n")
    for name in ("srun", "scontrol"):
        (tmp_path / name).chmod(0o755)
    (tmp_path / "train_ppo_vl.py").write_text("")
    of_slurm = dict(
        SLURM_JOB_ID="7", SLURM_JOB_NAME="train", SLURM_NNODES="2", SLURM_JOB_NODELIST="n"
    )
    variables = of_slurm | variables | {"SRUN_OPTIONS": "--container-image=a.sqsh --mpi=none"}
    inherited = {name: value for name, value in os.environ.items() if name != "NPROC"}
    environment = inherited | {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | variables
    command = words("bash", ROOT / "launch" / "train.slurm", "train_ppo_vl.py", "--out run")
    ended = subprocess.run(command, cwd=tmp_path, env=environment, timeout=60)
    if processes:
        asked = (tmp_path / "asked").read_text()
        assert asked.startswith("--container-image=a.sqsh --mpi=none --export ALL ")
        assert f"torchrun --nnodes 2 --nproc_per_node {processes} " in asked
    else:
        assert ended.returncode == 2
        assert "set NPROC" in (tmp_path / "logs" / "train-7.out").read_text()


# ----------------------------------------------------------------------------- two agents, no SLURM
def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def torchrun(port: int, *more: str | Path) -> list[str]:
    """An agent of two nodes, with a rank each."""
    return words(
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--rdzv_endpoint",
        f"127.0.0.1:{port}",
        "--nnodes 2 --nproc_per_node 1 --rdzv_backend c10d --rdzv_id test",
        *more,
    )


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_lost_node_comes_back(slow_flags, undisturbed, tmp_path):
    """The node that does not host the rendezvous dies, agent and worker; its agent is started
    again: it goes on."""
    out, port = tmp_path / "run", free_ports(1)[0]
    patience = "--max_restarts 3 --rdzv_conf keep_alive_interval=1,keep_alive_max_attempt=2"
    command = torchrun(port, patience, ROOT / "train_ppo_vl.py", *slow_flags(out))
    environment = ranks.clean_environment(**LOOPBACK, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    agents = []

    def start(name: str) -> subprocess.Popen:
        with open(tmp_path / f"{name}.log", "w") as log:
            agents.append(
                subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
            )
        return agents[-1]

    def told() -> str:
        return "".join(
            f"--- {path.name}\n{path.read_text()[-3000:]}" for path in tmp_path.glob("*.log")
        )

    try:
        host = start("host")
        wait_for(lambda: listens(port), 200, "rendezvous")
        other = start("other")
        wait_for(lambda: steps(out), 200, "checkpoint")
        for pid in [other.pid, *children(other.pid)]:
            os.kill(pid, signal.SIGKILL)
        other.wait(60)
        again = start("again")
        for agent in (host, again):
            assert agent.wait(200) == 0, told()
    finally:
        for agent in agents:
            for pid in [*children(agent.pid), agent.pid] if agent.poll() is None else []:
                os.kill(pid, signal.SIGKILL)
    assert "resuming from" in told()
    assert_bitwise(out, undisturbed("grpo", 2))
