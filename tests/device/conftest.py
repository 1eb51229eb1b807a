"""The simulated device must exist before a process makes its first backward pass; only processes of
`test_device.py` make it, since it would be an accelerator to every other test.
"""

import os

if "RLSTAB_ON_DEVICE" in os.environ:
    from tests.device import simulated

    if simulated.AVAILABLE and not simulated.REAL:
        simulated.register()
