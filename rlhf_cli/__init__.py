"""The ``rlhf`` command: the local stack, starting and following runs, and looking into them."""
