#!/usr/bin/env bash
# GRPO on GSM8K through verl 0.9.1 with an objective of rlstab: one node with one GPU, vLLM for the rollouts.
#
#   pip install -c constraints-verl.txt -e '.[verl]' && pip install 'verl[vllm]==0.9.1'
#   python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k      # of verl's repository
#   examples/verl_grpo.sh                                  # further settings of verl may follow
#
# It differs from a run of plain verl in one line: loss_mode.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
OBJECTIVE="${OBJECTIVE:-$here/objective.yaml}"
MODEL="${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}"
DATA="${DATA:-$HOME/data/gsm8k}"

"${PYTHON:-python3}" -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.train_batch_size=256 \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.policy_loss.loss_mode="rlstab:$OBJECTIVE" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16 \
    trainer.logger='["console"]' \
    trainer.n_gpus_per_node=1 \
    trainer.nnodes=1 \
    trainer.save_freq=50 \
    trainer.test_freq=10 \
    trainer.total_epochs=5 \
    "$@"
