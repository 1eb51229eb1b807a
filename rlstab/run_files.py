"""The names of files and folders in the folder of a run, ``tracking.out``."""

#: Every setting of the run.
CONFIG = "config.yaml"

#: The id and hash of the run, its command, versions and machine.
ABOUT = "run.json"

#: One JSON object per line: metrics of each rollout, and sampled responses.
METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"

#: A folder with any of these files is the folder of a run.
OF_A_RUN = (METRICS, CONFIG, ABOUT)

#: Folders of checkpoints and of recorded optimizer steps.
CHECKPOINTS, DUMP = "checkpoints", "dump"

#: The folder for the files of a command, in a run that a bench made by one.
OUT = "out"

#: The process that writes into the folder, and its machine.
LOCK = ".lock"
