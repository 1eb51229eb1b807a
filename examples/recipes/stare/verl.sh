#!/usr/bin/env bash
# STARE on Qwen2.5-Math-7B through verl 0.9.1, for 2 x 8 GPUs; `script` is
# hp-luo/STARE recipe/STARE/scripts/run_short_cot_qwen2.5_math_7b_STARE.sh, commit bffb9e7.
# What differs from it: the mean entropy that is compared with the target is that of the optimizer step; verl's verifier
# for the data's own prompt; groups are replaced one by one while a rollout is sampled, where the script samples batches
# of 3 x 64 prompts, at most 10.
set -euo pipefail

cd "$(dirname "$0")/../../.."
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-Math-7B}  # script: MODEL_PATH
TRAIN_FILE=${TRAIN_FILE:-$HOME/data/dapo-math-17k.parquet}  # script: a cleaned copy of DAPO-Math-17K
TEST_FILE=${TEST_FILE:-$HOME/data/aime-2024.parquet}  # own choice: any file in verl's format

settings=(
  actor_rollout_ref.actor.policy_loss.loss_mode="rlstab:$PWD/examples/recipes/stare/objective.yaml"  # ours
  algorithm.adv_estimator=grpo                                # GRPO's group mean and standard deviation
  data.train_files="$TRAIN_FILE"                              # above
  data.val_files="$TEST_FILE"                                 # above
  actor_rollout_ref.model.path="$MODEL_PATH"                  # above
  data.train_batch_size=64                                    # script: train_prompt_bsz 64
  data.max_prompt_length=1024                                 # script: 1024
  data.max_response_length=3072                               # script: 1024 * 3
  data.truncation=left                                        # script: left
  algorithm.use_kl_in_reward=False                            # script: False
  actor_rollout_ref.actor.use_kl_loss=False                   # script: False
  algorithm.filter_groups.enable=True                         # script: enable_filter_groups True
  algorithm.filter_groups.metric=acc                          # script: acc
  actor_rollout_ref.actor.optim.lr=1e-6                       # script: 1e-6
  actor_rollout_ref.actor.optim.weight_decay=0.01             # script: left at verl's 0.01
  actor_rollout_ref.actor.grad_clip=1.0                       # script: 1.0
  actor_rollout_ref.actor.ppo_mini_batch_size=64              # script: train_prompt_mini_bsz 64, one step per rollout
  actor_rollout_ref.actor.use_dynamic_bsz=True                # script: True; the loss does not depend on it
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192      # script: 8192; the loss does not depend on it
  actor_rollout_ref.actor.fsdp_config.dtype=float16           # script: float16
  actor_rollout_ref.model.use_remove_padding=True             # script: True
  actor_rollout_ref.model.enable_gradient_checkpointing=True  # script: True
  actor_rollout_ref.rollout.name=vllm                         # script: vllm
  actor_rollout_ref.rollout.dtype=float16                     # script: float16
  actor_rollout_ref.rollout.n=8                               # script: n_resp_per_prompt 8
  actor_rollout_ref.rollout.temperature=1.0                   # script: 1.0
  actor_rollout_ref.rollout.top_p=1.0                         # script: 1.0
  actor_rollout_ref.rollout.tensor_model_parallel_size=1      # script: 1
  actor_rollout_ref.rollout.max_num_batched_tokens=75776      # script: 75776
  actor_rollout_ref.rollout.gpu_memory_utilization=0.60       # script: 0.60
  actor_rollout_ref.rollout.calculate_log_probs=True          # script: True
  actor_rollout_ref.rollout.val_kwargs.do_sample=True         # script: True
  actor_rollout_ref.rollout.val_kwargs.n=32                   # script: 32
  actor_rollout_ref.rollout.val_kwargs.temperature=1.0        # script: 1.0
  actor_rollout_ref.rollout.val_kwargs.top_p=0.7              # script: 0.7
  reward.reward_manager.name=dapo                             # own choice: the script has one of its own
  trainer.n_gpus_per_node=8                                   # script: 8
  trainer.nnodes=2                                            # script: 2
  trainer.val_before_train=False                              # script: False
  trainer.save_freq=10                                        # script: 10
  trainer.test_freq=10                                        # script: 10
  trainer.total_epochs=1000                                   # script: 1000, until it is stopped
  trainer.project_name=rlstab                                 # own choice
  trainer.experiment_name=stare                               # own choice
  trainer.logger=[console]                                    # own choice
)
exec python3 -m verl.trainer.main_ppo "${settings[@]}" "$@"
