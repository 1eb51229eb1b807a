"""What other trainers and trackers log: readers of their files, and what they call the metrics of rlstab."""
