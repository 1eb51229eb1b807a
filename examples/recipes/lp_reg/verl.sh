#!/usr/bin/env bash
# Lp-Reg on Qwen3-14B-Base, on-policy, through verl 0.9.1, for 8 x 8 GPUs; `script` is
# CarlanLark/Lp-Reg-dev recipe/lp_reg/Qwen3_14b_lp_reg_onpolicy_64gpu.sh, commit 33b27e2.
# What differs from it: the paper's penalty, not the code's (see objective.yaml).
set -euo pipefail

cd "$(dirname "$0")/../../.."
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-14B-Base}  # script: MODEL_PATH
TRAIN_FILE=${TRAIN_FILE:-$HOME/data/dapo-math-17k.parquet}  # script: TRAIN_FILE
TEST_FILE=${TEST_FILE:-$HOME/data/aime-2024.parquet}  # own choice: any file in verl's format

settings=(
  actor_rollout_ref.actor.policy_loss.loss_mode="rlstab:$PWD/examples/recipes/lp_reg/objective.yaml"  # ours
  algorithm.adv_estimator=grpo                                # GRPO's group mean and standard deviation
  data.train_files="$TRAIN_FILE"                              # above
  data.val_files="$TEST_FILE"                                 # above
  actor_rollout_ref.model.path="$MODEL_PATH"                  # above
  data.train_batch_size=256                                   # script: train_prompt_bsz 256
  data.max_prompt_length=2048                                 # script: 1024 * 2
  data.max_response_length=8192                               # script: 1024 * 8
  data.truncation=left                                        # script: left
  algorithm.use_kl_in_reward=False                            # script: False
  actor_rollout_ref.actor.use_kl_loss=False                   # script: False
  algorithm.filter_groups.enable=False                        # script: enable_filter_groups False
  actor_rollout_ref.actor.optim.lr=1e-6                       # script: 1e-6
  actor_rollout_ref.actor.optim.weight_decay=0                # script: 0
  actor_rollout_ref.actor.grad_clip=1.0                       # script: 1.0
  actor_rollout_ref.actor.ppo_mini_batch_size=256             # script: train_prompt_mini_bsz 256, one step per rollout
  actor_rollout_ref.actor.use_dynamic_bsz=True                # script: True; the loss does not depend on it
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=30720     # script: 1024 * 30; the loss does not depend on it
  actor_rollout_ref.model.use_remove_padding=True             # script: True
  actor_rollout_ref.model.enable_gradient_checkpointing=True  # script: True
  actor_rollout_ref.rollout.name=vllm                         # own choice: the script leaves it at its fork's default
  actor_rollout_ref.rollout.n=8                               # script: n_resp_per_prompt 8
  actor_rollout_ref.rollout.temperature=1.0                   # script: 1.0
  actor_rollout_ref.rollout.top_p=1.0                         # script: 1.0
  actor_rollout_ref.rollout.tensor_model_parallel_size=1      # script: 1
  actor_rollout_ref.rollout.max_num_batched_tokens=30720      # script: 1024 * 30
  actor_rollout_ref.rollout.gpu_memory_utilization=0.85       # script: 0.85
  actor_rollout_ref.rollout.val_kwargs.do_sample=False        # script: False
  actor_rollout_ref.rollout.val_kwargs.n=1                    # script: 1
  reward.reward_manager.name=dapo                             # script: dapo, its overlong penalty off
  trainer.n_gpus_per_node=8                                   # script: 8
  trainer.nnodes=8                                            # script: NNODES 8
  trainer.val_before_train=False                              # script: False
  trainer.save_freq=64                                        # script: 64
  trainer.test_freq=8                                         # script: 8
  trainer.total_epochs=15                                     # script: 15
  trainer.project_name=rlstab                                 # own choice
  trainer.experiment_name=lp_reg                              # own choice
  trainer.logger=[console]                                    # own choice
)
exec python3 -m verl.trainer.main_ppo "${settings[@]}" "$@"
