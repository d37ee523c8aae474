"""accelerate_configs/slurm.sh without SLURM: stand-ins for srun and scontrol run the tasks here and write down the requeues."""

import os
import stat
import subprocess

import pytest
from conftest import ROOT

SCRIPT = ROOT / "accelerate_configs" / "slurm.sh"

# Like srun it gives the highest status of its tasks.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for task in $(seq 0 $((SLURM_NTASKS - 1))); do
    SLURM_PROCID=$task SLURM_LOCALID=$((task % SLURM_NTASKS_PER_NODE)) "$@" & tasks+=($!)
done
highest=0
for task in "${tasks[@]}"; do wait $task; status=$?; [ $status -gt $highest ] && highest=$status; done
exit $highest
"""
SCONTROL = """#!/bin/bash
if [ "$1 $2" = "show hostnames" ]; then echo node1; echo node2; else echo "$*" >> requeues; fi
"""
# Stands in for the training: notes its environment and flags, and ends as told, rank by rank.
TRAIN = """#!/bin/bash
echo "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT$(printf "|%s" "$@")" >> seen
statuses=($STATUSES)
[ ${statuses[$RANK]} = kill ] && kill -9 $$
exit ${statuses[$RANK]}
"""


@pytest.fixture
def submit(tmp_path):
    """Runs the job once, in a folder of its own; `statuses` are those of the ranks."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("train", TRAIN)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(stat.S_IRWXU)

    def run(statuses: str, job: int = 71234, flags: tuple[str, ...] = ()) -> int:
        ntasks = len(statuses.split())
        job_environment = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_JOB_ID": str(job),
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_NTASKS": str(ntasks),
            "SLURM_NTASKS_PER_NODE": str(ntasks // 2),
            "TRAIN": "train",
            "STATUSES": statuses,
        }
        command = ["bash", str(SCRIPT), *flags]
        return subprocess.run(command, cwd=tmp_path, env=job_environment, capture_output=True, timeout=30).returncode

    run.folder = tmp_path
    run.requeues = lambda: (tmp_path / "requeues").read_text().splitlines() if (tmp_path / "requeues").exists() else []
    return run


def test_each_task_knows_its_place_and_quoted_flags_stay_whole(submit):
    assert submit("0 0 0 0", flags=("--output_dir", "a $HOME 'folder'")) == 0
    flags = "--output_dir|a $HOME 'folder'|--resume_from_checkpoint|latest"
    port = 10000 + 71234 % 20000
    expected = [f"{rank} {rank % 2} 4 2 node1 {port}|{flags}" for rank in range(4)]
    assert sorted((submit.folder / "seen").read_text().splitlines()) == expected


@pytest.mark.parametrize(
    ("statuses", "expected", "requeued"),
    [
        ("0 0", 0, False),
        ("2 2", 2, False),
        ("1 2", 2, False),  # a mistake that one rank met, and another that lost its peer
        ("3 3", 3, False),
        ("75 75", 75, True),
        ("1 1", 1, True),
        ("kill 1", 137, True),
    ],
)
def test_requeues_what_another_start_can_help(submit, statuses, expected, requeued):
    assert submit(statuses) == expected
    assert submit.requeues() == ["requeue 71234"] * requeued


def test_gives_up_after_three_crashes_in_a_row(submit):
    for _ in range(5):
        assert submit("1 1") == 1
    assert len(submit.requeues()) == 2
    assert submit("1 1", job=71235) == 1  # another job counts for itself
    assert submit.requeues()[-1] == "requeue 71235"


def test_a_stop_on_demand_ends_a_row_of_crashes(submit):
    for statuses in ("1 1", "1 1", "75 75", "1 1", "1 1"):
        submit(statuses)
    assert len(submit.requeues()) == 5
    submit("1 1")
    assert len(submit.requeues()) == 5
