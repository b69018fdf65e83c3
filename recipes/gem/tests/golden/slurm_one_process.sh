#!/bin/bash
#SBATCH --job-name=gem.train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=8
#SBATCH --requeue
#SBATCH --open-mode=append
set -u
export PYTHONUNBUFFERED=1 TORCHX_MAX_RETRIES=0
GEMWORKS_RANK0_HOST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export GEMWORKS_RANK0_HOST

# Shortly before the time limit the tasks are asked to save themselves. A cancelled job gets SIGTERM instead, ends this
# script too, and is not put back.
stopped=0
trap 'stopped=1; scancel --signal=TERM "$SLURM_JOB_ID"' USR1

srun --output=slurm-%j-train-%t.out --error=slurm-%j-train-%t.err --open-mode=append --kill-on-bad-exit=1 --wait=60 \
    bash -c 'export PYTHONUNBUFFERED=1; exec /venv/bin/python -m gemworks.gem.train --preset small' &
step=$!
wait "$step"
code=$?
while [ "$stopped" -eq 1 ] && [ "$code" -gt 128 ] && kill -0 "$step" 2>/dev/null; do
    wait "$step" # it was the signal that ended the wait, not the tasks
    code=$?
done
echo "tasks ended with code $code, restarts so far: ${SLURM_RESTART_COUNT:-0}"
[ "$code" -eq 0 ] && exit 0
again=0
if [ "$stopped" -eq 1 ] || [ "$code" -eq 75 ]; then again=1; fi
if [ "${SLURM_RESTART_COUNT:-0}" -lt "$TORCHX_MAX_RETRIES" ]; then again=1; fi
if [ "$again" -eq 1 ] && [ "$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T)" = RUNNING ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
