"""Python imports this by itself in every process that has this folder on its PYTHONPATH: the stack of a fault test."""

import rlhf_holds

rlhf_holds.install()
