#!/usr/bin/env bash
# STAPO on Qwen3-8B-Base through verl 0.9.1, for 8 x 8 GPUs. Its code was not found: `paper` is the table of arXiv
# 2602.15620 v4-v5, and `script` that of JustRL, on which it builds: thunlp/JustRL train/examples/justrl/run_scaling_ssh_distill.sh, commit cf444e9.
# What differs from it: the data's own prompt and verl's verifier for it, where the paper puts a boxed suffix behind the
# prompt.
set -euo pipefail

cd "$(dirname "$0")/../../.."
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B-Base}  # paper: Qwen 1.7B, 8B and 14B base models
TRAIN_FILE=${TRAIN_FILE:-$HOME/data/dapo-math-17k.parquet}  # paper: DAPO-Math-17K
TEST_FILE=${TEST_FILE:-$HOME/data/aime-2024.parquet}  # own choice: any file in verl's format

settings=(
  actor_rollout_ref.actor.policy_loss.loss_mode="rlstab:$PWD/examples/recipes/stapo/objective.yaml"  # ours
  algorithm.adv_estimator=grpo                                # GRPO's group mean and standard deviation
  data.train_files="$TRAIN_FILE"                              # above
  data.val_files="$TEST_FILE"                                 # above
  actor_rollout_ref.model.path="$MODEL_PATH"                  # above
  data.train_batch_size=256                                   # paper: train batch 256
  data.max_prompt_length=1024                                 # paper: 1k
  data.max_response_length=15360                              # paper: 15k
  data.filter_overlong_prompts=True                           # script: True
  data.truncation=error                                       # script: error
  algorithm.use_kl_in_reward=False                            # script: False
  actor_rollout_ref.actor.use_kl_loss=False                   # paper: no KL
  actor_rollout_ref.actor.optim.lr=1e-6                       # paper: 1e-6
  actor_rollout_ref.actor.optim.lr_warmup_steps=10            # paper: 10 warm-up steps
  actor_rollout_ref.actor.optim.weight_decay=0.1              # script: 0.1
  actor_rollout_ref.actor.grad_clip=1.0                       # paper: 1.0
  actor_rollout_ref.actor.ppo_mini_batch_size=64              # paper: mini-batch 64
  actor_rollout_ref.actor.use_dynamic_bsz=True                # script: True; the loss does not depend on it
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768     # script: 32768; the loss does not depend on it
  actor_rollout_ref.model.use_remove_padding=True             # script: True
  actor_rollout_ref.model.enable_gradient_checkpointing=True  # script: True
  actor_rollout_ref.rollout.name=vllm                         # script: vllm
  actor_rollout_ref.rollout.n=8                               # paper: 8 responses
  actor_rollout_ref.rollout.temperature=1.0                   # paper: T 1.0
  actor_rollout_ref.rollout.top_p=1.0                         # paper: top-p 1.0
  actor_rollout_ref.rollout.tensor_model_parallel_size=1      # script: 1
  actor_rollout_ref.rollout.max_num_batched_tokens=32768      # script: 32768
  actor_rollout_ref.rollout.gpu_memory_utilization=0.85       # script: 0.85
  actor_rollout_ref.rollout.val_kwargs.do_sample=True         # script: True
  actor_rollout_ref.rollout.val_kwargs.n=32                   # paper: N 32
  actor_rollout_ref.rollout.val_kwargs.temperature=0.7        # paper: 0.7
  actor_rollout_ref.rollout.val_kwargs.top_p=0.9              # paper: 0.9
  reward.reward_manager.name=dapo                             # paper: rule-based, +1 and -1, as DAPO's
  trainer.n_gpus_per_node=8                                   # paper: 64 GPUs
  trainer.nnodes=8                                            # paper: 64 GPUs
  trainer.save_freq=50                                        # script: 50
  trainer.test_freq=50                                        # script: 50
  trainer.total_training_steps=4380                           # own choice: as long as JustRL, arXiv 2512.16649; no number of steps was found
  trainer.project_name=rlstab                                 # own choice
  trainer.experiment_name=stapo                               # own choice
  trainer.logger=[console]                                    # own choice
)
exec python3 -m verl.trainer.main_ppo "${settings[@]}" "$@"
