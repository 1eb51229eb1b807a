#!/usr/bin/env bash
# Beyond the 80/20 rule on Qwen3-14B-Base through verl 0.9.1, for 16 x 8 GPUs. Its code was not found: `paper` is arXiv
# 2506.01939, and `script` that of DAPO, on which it builds: verl-project/verl-recipe dapo/run_dapo_qwen2.5_32b.sh,
# commit 48ea0a7.
# What differs from it: groups are replaced one by one while a rollout is sampled, where the script samples batches of
# 3 x 512 prompts, at most 10.
set -euo pipefail

cd "$(dirname "$0")/../../.."
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-14B-Base}  # paper: Qwen3 8B, 14B and 32B base models
TRAIN_FILE=${TRAIN_FILE:-$HOME/data/dapo-math-17k.parquet}  # paper: DAPO-Math-17K, as DAPO
TEST_FILE=${TEST_FILE:-$HOME/data/aime-2024.parquet}  # own choice: any file in verl's format

settings=(
  actor_rollout_ref.actor.policy_loss.loss_mode="rlstab:$PWD/examples/recipes/20_entropy/objective.yaml"  # ours
  algorithm.adv_estimator=grpo                                  # GRPO's group mean and standard deviation
  data.train_files="$TRAIN_FILE"                                # above
  data.val_files="$TEST_FILE"                                   # above
  actor_rollout_ref.model.path="$MODEL_PATH"                    # above
  data.train_batch_size=512                                     # paper: train batch 512
  data.max_prompt_length=2048                                   # script: 1024 * 2
  data.max_response_length=20480                                # paper: 20,480
  data.truncation=left                                          # script: left
  algorithm.use_kl_in_reward=False                              # script: False
  actor_rollout_ref.actor.use_kl_loss=False                     # paper: no KL
  algorithm.filter_groups.enable=True                           # paper: dynamic sampling
  algorithm.filter_groups.metric=acc                            # script: acc
  actor_rollout_ref.actor.optim.lr=1e-6                         # paper: 1e-6
  actor_rollout_ref.actor.optim.weight_decay=0.1                # script: 0.1; not found in the paper
  actor_rollout_ref.actor.grad_clip=1.0                         # script: 1.0; not found in the paper
  actor_rollout_ref.actor.ppo_mini_batch_size=32                # paper: mini-batch 32, 16 optimizer steps per rollout
  actor_rollout_ref.actor.use_dynamic_bsz=True                  # script: True; the loss does not depend on it
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=22528       # script: 1024 * 22; the loss does not depend on it
  actor_rollout_ref.actor.ulysses_sequence_parallel_size=1      # own choice: 8 in the script, and the adapter was run with 1
  actor_rollout_ref.model.use_remove_padding=True               # script: True
  actor_rollout_ref.model.enable_gradient_checkpointing=True    # script: True
  actor_rollout_ref.rollout.name=vllm                           # own choice: the script leaves it at its default
  actor_rollout_ref.rollout.n=16                                # script: n_resp_per_prompt 16
  actor_rollout_ref.rollout.temperature=1.0                     # script: 1.0
  actor_rollout_ref.rollout.top_p=1.0                           # script: 1.0
  actor_rollout_ref.rollout.tensor_model_parallel_size=4        # script: gen_tp 4
  actor_rollout_ref.rollout.max_num_batched_tokens=22528        # script: 1024 * 22
  actor_rollout_ref.rollout.gpu_memory_utilization=0.80         # script: 0.80
  actor_rollout_ref.rollout.val_kwargs.do_sample=True           # script: True
  actor_rollout_ref.rollout.val_kwargs.n=1                      # script: 1
  actor_rollout_ref.rollout.val_kwargs.temperature=1.0          # script: 1.0
  actor_rollout_ref.rollout.val_kwargs.top_p=0.7                # script: 0.7
  reward.reward_manager.name=dapo                               # script: dapo
  +reward.reward_kwargs.max_resp_len=20480                      # paper: 20,480
  +reward.reward_kwargs.overlong_buffer_cfg.enable=True         # paper: overlong shaping
  +reward.reward_kwargs.overlong_buffer_cfg.len=4096            # paper: cache 4,096
  +reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0  # script: 1.0
  +reward.reward_kwargs.overlong_buffer_cfg.log=False           # own choice
  trainer.n_gpus_per_node=8                                     # script: 8
  trainer.nnodes=16                                             # script: NNODES 16
  trainer.save_freq=5                                           # own choice
  trainer.test_freq=5                                           # own choice
  trainer.total_epochs=1                                        # script: 1; no number of steps was found
  trainer.project_name=rlstab                                   # own choice
  trainer.experiment_name=20_entropy                            # own choice
  trainer.logger=[console]                                      # own choice
)
exec python3 -m verl.trainer.main_ppo "${settings[@]}" "$@"
