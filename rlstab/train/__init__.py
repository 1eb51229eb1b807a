"""A minimal GRPO-family trainer on accelerate: tasks, rollout, step, loop, checkpoint, tracking."""
