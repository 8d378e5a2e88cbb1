"""A clock in the place of the GPU's, for choices that are timed."""

import torch

from fp4compile.passes.lib import autotune


class Clock:
    """What was timed, as (kernel, configuration), and how long it is said to take: by configuration, else by kernel."""

    def __init__(self, monkeypatch, times):
        self.timed, self.times = [], times
        monkeypatch.setattr(autotune, "_winners", {})
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(autotune, "_copies", lambda product: [None])
        monkeypatch.setattr(autotune, "_times", self._times)

    @property
    def kernels(self):
        return [[kernel for kernel, _ in each] for each in self.timed]

    def _times(self, sequences):
        choices = [call.keywords["choice"] for (call,) in sequences]
        self.timed.append([(choice.kernel, choice.config) for choice in choices])
        return [self.times.get(choice.config, self.times.get(choice.kernel, float("inf"))) for choice in choices]
