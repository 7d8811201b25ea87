"""What holds for every test: how hard hypothesis searches, and one thread for torch.

HYPOTHESIS_PROFILE chooses the search: `dev` is quick, `ci` (the default where CI is set) runs more examples, `thorough`
is for a night. None has a deadline: a busy machine is no bug. Each run draws new examples; a failure prints how to
repeat it.
"""

import os

import torch
from hypothesis import HealthCheck, settings

settings.register_profile("dev", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("dev"), max_examples=150, derandomize=False, print_blob=True)
settings.register_profile("thorough", settings.get_profile("ci"), max_examples=3000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))

torch.set_num_threads(1)  # tests run side by side; more threads than cores make all of them slower
