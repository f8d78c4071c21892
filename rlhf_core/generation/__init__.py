"""vLLM behind the ``Generate`` protocol. The only package that imports vLLM, and only when an engine starts.

Import from its modules: the controller loads ``settings`` alone, without torch.
"""
