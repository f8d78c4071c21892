"""A trainer's end of vLLM's own transfer backends, for an engine in the process of the test."""

import asyncio


class LocalGroup:
    """One engine on the event loop of the test; the sender calls from another thread, as a training rank would."""

    num_engines = 1

    def __init__(self, engine):
        self._engine = engine
        self._loop = asyncio.get_running_loop()

    def init_weight_transfer(self, init_infos):
        self._wait(self._engine.init_weight_transfer(init_infos[0]))

    def update_weights(self, update):
        self._wait(self._engine.update_weights(update))

    def _wait(self, coroutine):
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(120)
