"""``python -m rlstab`` is ``rlstab``, where the command is not on the path."""

import sys

from rlstab.cli import main

if __name__ == "__main__":
    sys.exit(main())
