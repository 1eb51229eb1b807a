#!/usr/bin/env bash
# JustRL on DeepSeek-R1-Distill-Qwen-1.5B through verl 0.9.1, for 4 x 8 GPUs; `script` is
# thunlp/JustRL train/examples/justrl/run_scaling_ssh_distill.sh, commit cf444e9.
# What differs from it: token mean over the whole mini-batch instead of each micro-batch; the data's own prompt and
# verl's verifier for it, where the script puts a boxed suffix behind the prompt; validation ends at the length of
# training, not at 31,744 tokens.
set -euo pipefail

cd "$(dirname "$0")/../../.."
MODEL_PATH=${MODEL_PATH:-deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B}  # script: ACTOR_MODEL_PATH
TRAIN_FILE=${TRAIN_FILE:-$HOME/data/dapo-math-17k.parquet}  # script: TRAIN_DATASET
TEST_FILE=${TEST_FILE:-$HOME/data/aime-2024.parquet}  # own choice: any file in verl's format

settings=(
  actor_rollout_ref.actor.policy_loss.loss_mode="rlstab:$PWD/examples/recipes/justrl/objective.yaml"  # ours
  algorithm.adv_estimator=grpo                                # GRPO's group mean and standard deviation
  data.train_files="$TRAIN_FILE"                              # above
  data.val_files="$TEST_FILE"                                 # above
  actor_rollout_ref.model.path="$MODEL_PATH"                  # above
  data.train_batch_size=256                                   # script: data.train_batch_size 256
  data.max_prompt_length=1024                                 # script: data.max_prompt_length 1024
  data.max_response_length=15360                              # script: data.max_response_length 15360
  data.filter_overlong_prompts=True                           # script: True
  data.truncation=error                                       # script: error
  algorithm.use_kl_in_reward=False                            # script: False
  actor_rollout_ref.actor.use_kl_loss=False                   # script: use_kl_loss False
  actor_rollout_ref.actor.optim.lr=1e-6                       # script: optim.lr 1e-6
  actor_rollout_ref.actor.optim.lr_warmup_steps=10            # script: 10
  actor_rollout_ref.actor.optim.weight_decay=0.1              # script: 0.1
  actor_rollout_ref.actor.grad_clip=1.0                       # script: 1.0
  actor_rollout_ref.actor.ppo_mini_batch_size=64              # script: 64
  actor_rollout_ref.actor.use_dynamic_bsz=True                # script: True; the loss does not depend on it
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768     # script: 32768; the loss does not depend on it
  actor_rollout_ref.model.use_remove_padding=True             # script: True
  actor_rollout_ref.model.enable_gradient_checkpointing=True  # script: True
  actor_rollout_ref.rollout.name=vllm                         # script: vllm
  actor_rollout_ref.rollout.n=8                               # script: rollout.n 8
  actor_rollout_ref.rollout.temperature=1.0                   # script: 1.0
  actor_rollout_ref.rollout.top_p=1.0                         # script: left at verl's 1
  actor_rollout_ref.rollout.tensor_model_parallel_size=1      # script: 1
  actor_rollout_ref.rollout.max_num_batched_tokens=32768      # script: 32768
  actor_rollout_ref.rollout.gpu_memory_utilization=0.85       # script: 0.85
  actor_rollout_ref.rollout.val_kwargs.do_sample=True         # script: True
  actor_rollout_ref.rollout.val_kwargs.n=32                   # script: 32
  actor_rollout_ref.rollout.val_kwargs.temperature=0.7        # script: 0.7
  actor_rollout_ref.rollout.val_kwargs.top_p=0.9              # script: 0.9
  reward.reward_manager.name=dapo                             # script: reward_manager dapo, its overlong penalty off
  trainer.n_gpus_per_node=8                                   # script: 8
  trainer.nnodes=4                                            # script: 4
  trainer.save_freq=50                                        # script: 50
  trainer.test_freq=50                                        # script: 50
  trainer.total_training_steps=4380                           # arXiv 2512.16649: 4,380 steps
  trainer.project_name=rlstab                                 # own choice
  trainer.experiment_name=justrl                              # own choice
  trainer.logger=[console]                                    # own choice
)
exec python3 -m verl.trainer.main_ppo "${settings[@]}" "$@"
